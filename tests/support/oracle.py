"""Error metrics against the equations of moe_runtime.tools.conformance, and cases for them.

The equations run in float64 on the inputs after rounding to the tested dtype, so that an error is
due to the implementation. Gradients come from autograd.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moe_runtime.tools.conformance.draw import choose_experts
from moe_runtime.tools.conformance.oracle import (  # noqa: F401  re-exported for the tests
    ACT,
    GATES,
    SHARED,
    best_experts,
    gate_and_up,
    gate_weights,
    gated_product,
    mixing,
    mlp,
    moe,
)

SUM_ONE = ("xft", "topk_softmax", "softmax_topk_renorm")


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Frobenius norm of the difference, relative to `want`, or to `got` if `want` is zero; inf for
    a NaN.
    """
    got = got.detach().double()
    want = want.detach().double()
    if got.shape != want.shape:
        return math.inf
    scale = want.norm().item()
    error = (got - want).norm().item() / (scale if scale > 0 else 1.0)
    return error if math.isfinite(error) else math.inf


def cosine(got: torch.Tensor, want: torch.Tensor) -> float:
    """Cosine of the angle between two tensors; 1 if both are zero, 0 if only one is or the shapes
    differ.
    """
    if got.shape != want.shape:
        return 0.0
    got = got.detach().double().flatten()
    want = want.detach().double().flatten()
    norms = (got.norm() * want.norm()).item()
    return (got @ want).item() / norms if norms > 0 else float(got.norm() == want.norm())


def worst_slice(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error of a slice along dim 0 (a token, an expert), relative to the larger of its norm
    and the slices' rms norm.
    """
    if want.dim() < 2 or want.numel() == 0 or got.shape != want.shape:
        return 0.0
    got = got.detach().double().flatten(1)
    want = want.detach().double().flatten(1)
    norm = want.norm(dim=1)
    scale = norm.clamp_min(norm.square().mean().sqrt().item())
    error = ((got - want).norm(dim=1) / torch.where(scale > 0, scale, 1.0)).max().item()
    return error if math.isfinite(error) else math.inf


def mismatches(got: dict, want: dict, bound: dict | float) -> list[str]:
    """Names and errors of the tensors in `got` whose distance to `want` exceeds `bound` (one for
    all, or per name).
    """
    bad = []
    if got.keys() != want.keys():
        bad.append(f"got {sorted(got)}, want {sorted(want)}")
    for name in got.keys() & want.keys():
        limit = bound[name] if isinstance(bound, dict) else bound
        error = relative_error(got[name], want[name])
        angle = cosine(got[name], want[name])
        piece = worst_slice(got[name], want[name])
        if not (error <= limit and 1 - angle <= max(limit, 1e-12) and piece <= 4 * limit):
            bad.append(
                f"{name}: relative error {error:.2e}, cosine {angle:.6f}, worst slice {piece:.2e}; "
                f"want {limit:.2e}"
            )
    return bad


def assert_parity(got: dict, want: dict, bound: dict | float) -> None:
    """Fail with the list of `mismatches`."""
    bad = mismatches(got, want, bound)
    assert not bad, "; ".join(bad)


def assert_same(got, want) -> None:
    """Fail unless two dicts or sequences of tensors are equal, with NaN in the same places."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, check_stride=False)


def bounds(eager: dict, want: dict, table: float) -> dict:
    """For each tensor, a few times the error of an eager path in the tested dtype, but at most the
    table's tolerance.
    """
    limits = {}
    for name, tensor in want.items():
        limits[name] = min(
            table,
            3 * relative_error(eager[name], tensor) + table / 5,
        )
    return limits


@dataclass
class Case:
    """Leaves as the user has them, and `view`, which turns them into the op's arguments, including
    strides.
    """

    leaves: dict[str, torch.Tensor]  # x, up, down, topk_weight, and up_bias and down_bias, if any
    topk_idx: torch.Tensor
    dout: torch.Tensor
    act: str = "silu"
    gated: bool = True
    view: Callable[[dict], dict] = field(default=lambda leaves: leaves)
    form: dict = field(default_factory=dict)  # limit, up_offset, interleaved


def make_case(
    T,
    H,
    I,
    E,
    K,
    dtype=torch.float32,
    routing="random",
    act="silu",
    gated=True,
    bias=False,
    idx=torch.int32,
) -> Case:
    """Return a layer whose outputs and gradients are O(1)."""
    Z = 2 * I if gated else I
    leaves = {
        "x": torch.randn(T, H),
        "up": torch.randn(E, Z, H) / H**0.5,
        "down": 2 * torch.randn(E, H, I) / I**0.5,
        "topk_weight": 0.2 + torch.rand(T, K),
    }
    if bias:
        leaves |= {
            "up_bias": torch.randn(E, Z),
            "down_bias": torch.randn(E, H),
        }
    for name, leaf in leaves.items():
        # gates are float32 or wider
        is_gate = name == "topk_weight"
        leaves[name] = leaf.to(torch.promote_types(dtype, torch.float32) if is_gate else dtype)
    topk_idx = choose_experts(T, E, K, routing).to(idx)
    return Case(leaves, topk_idx, torch.randn(T, H).to(dtype), act, gated)


def gradients(
    out: torch.Tensor, leaves: dict[str, torch.Tensor], dout: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Gradients d<leaf> on the CPU; zeros for leaves that `out` does not depend on."""
    grads = torch.autograd.grad(
        out,
        list(leaves.values()),
        dout,
        allow_unused=True,
    )
    named = {}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        if grad is None:
            grad = torch.zeros_like(leaf)
        named[f"d{name}"] = grad.cpu()
    return named


def leaves_of(
    case, dtype: torch.dtype | None = None, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Copy a case's leaves for differentiation."""
    copies = {}
    for name, leaf in case.leaves.items():
        copies[name] = (
            leaf.detach()
            .clone()
            .to(
                device,
                dtype or leaf.dtype,
            )
            .requires_grad_()
        )
    return copies


def run(
    case: Case, layer: Callable, dtype: torch.dtype | None = None, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Run layer(x, up, down, topk_weight, topk_idx, up_bias=, down_bias=, act=, gated=, [form]);
    return the output and every d<leaf>.

    It runs on `device`; the results are moved to the CPU.
    """
    leaves = leaves_of(case, dtype, device)
    given = case.view(leaves)
    out = layer(
        given["x"],
        given["up"],
        given["down"],
        given["topk_weight"],
        case.topk_idx.to(device),
        up_bias=given.get("up_bias"),
        down_bias=given.get("down_bias"),
        act=case.act,
        gated=case.gated,
        **case.form,
    )
    grads = gradients(out, leaves, case.dout.to(device, out.dtype))
    return {"out": out.detach().cpu()} | grads


def moe_oracle(x, up, down, topk_weight, topk_idx, **options):
    """out[t] = sum_k topk_weight[t, k] FFN_{topk_idx[t, k]}(x[t]); weights of dropped slots may be
    NaN.
    """
    is_live = (topk_idx >= 0) & (topk_idx < up.shape[0])
    return moe(
        x,
        up,
        down,
        torch.where(is_live, topk_weight, 0.0),
        topk_idx,
        **options,
    )


def moe_eager(
    x,
    up,
    down,
    topk_weight,
    topk_idx,
    *,
    up_bias=None,
    down_bias=None,
    act="silu",
    gated=True,
    **form,
):
    """Compute like transformers' eager experts, in the inputs' dtype; their error sets the
    tolerance.
    """
    native = {"silu": torch.nn.functional.silu, "relu": torch.relu}.get(
        act,
        ACT[act],
    )
    out = torch.zeros_like(x)
    for e in range(up.shape[0]):
        token, slot = torch.where(topk_idx == e)
        z = x[token] @ up[e].t()
        if up_bias is not None:
            z = z + up_bias[e]
        h = gated_product(z, native, **form) if gated else native(z)
        y = h @ down[e].t()
        if down_bias is not None:
            y = y + down_bias[e]
        out = out.index_add(
            0,
            token,
            (y * topk_weight[token, slot, None]).to(x.dtype),
        )
    return out


def moe_mismatches(layer: Callable, case: Case, table: float, device: str = "cpu") -> list[str]:
    """Return where `layer` differs from the equation on this case."""
    want = run(case, moe_oracle, torch.float64)
    return mismatches(
        run(case, layer, device=device), want, bounds(run(case, moe_eager), want, table)
    )


def saved_bytes(
    step: Callable[[], torch.Tensor], besides: list[torch.Tensor]
) -> tuple[int, torch.Tensor]:
    """Return the bytes of the distinct storages that step() saves for the backward pass, without
    those of `besides`, and its result.
    """
    skip = {tensor.untyped_storage().data_ptr() for tensor in besides}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(
        pack,
        lambda tensor: tensor,
    ):
        out = step()
    return sum(saved.values()), out


# routing, balance and merging use numbers instead of tensors where no gradient is needed
def route_oracle(
    logits: torch.Tensor, top_k: int, gate: str
) -> tuple[torch.Tensor, list[list[int]]]:
    """Return weights [T, K] in the logits' dtype (differentiable) and ids, from XFT's Eq. (1),
    (2).
    """
    ids = best_experts(logits, top_k, gate)
    if logits.shape[1]:
        weight = gate_weights(logits, ids, gate)
    else:  # without routed experts, the shared one gets everything
        weight = 1 + logits.sum(1, keepdim=True)
    return weight, ids.tolist()


def route_mismatches(
    route: Callable, logits: torch.Tensor, top_k: int, gate: str, table: float
) -> list[str]:
    """Return where route(logits, top_k, gate) -> (weight, idx) differs from the equation: ids,
    weights, gradient of the logits.
    """
    logits = logits.detach().requires_grad_()
    weight, idx = route(logits, top_k, gate)
    clean = logits.detach().double().requires_grad_()
    expected, ids = route_oracle(clean, top_k, gate)
    bad = []
    if idx.tolist() != ids:
        bad.append(f"ids are {idx.tolist()}, want {ids}")
    # gates are float32 or wider
    bad += mismatches(
        {"weight": weight},
        {"weight": expected},
        min(table, 5e-6),
    )
    dweight = torch.cos(
        torch.arange(
            weight.numel(),
            dtype=torch.float64,
        )
    ).view(weight.shape)
    (dlogits,) = torch.autograd.grad(weight, logits, dweight.to(weight.dtype))
    (dclean,) = torch.autograd.grad(expected, clean, dweight)
    if dclean.norm() < 1e-9:  # a softmax over one expert
        if not dlogits.norm() < 1e-6:
            bad.append(f"dlogits is {dlogits}, want 0")
        return bad
    if table > 1e-9:
        table = max(table, 2e-5)
    return bad + mismatches({"dlogits": dlogits}, {"dlogits": dclean}, table)


def mixing_oracle(logits: list[float], shared_rate: float | None) -> list[float]:
    """Compute alpha of XFT's Eq. (5)."""
    return mixing(
        torch.tensor(logits, dtype=torch.float64),
        shared_rate,
    ).tolist()


def cv2_oracle(values: list[float]) -> float:
    """Unbiased variance over (mean^2 + 1e-10), 0 for one value."""
    n = len(values)
    if n == 1:
        return 0.0
    mean = sum(values) / n
    return sum((v - mean) ** 2 for v in values) / (n - 1) / (mean**2 + 1e-10)


def normal_cdf(z: float) -> float:
    """Phi."""
    return (1 + math.erf(z / math.sqrt(2))) / 2


def poison() -> None:
    """Leave NaN in the memory that the allocator returns next."""
    blocks = []
    for _ in range(8):
        blocks.append(torch.full((1 << 24,), float("nan"), device="cuda"))
    torch.cuda.synchronize()
    del blocks
