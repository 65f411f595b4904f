"""Oracles in plain loops from the papers' equations, and the metrics that hold an implementation
against them.

Nothing here imports moe_runtime: the oracle is a second opinion. It runs in float64 on the inputs
as they are after rounding to the tested dtype, so an error is the implementation's own. Gradients
come from autograd through the loops.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

SHARED = ("xft", "nonorm")
GATES = (*SHARED, "topk_softmax", "softmax_topk", "softmax_topk_renorm", "sigmoid_topk")
SUM_ONE = ("xft", "topk_softmax", "softmax_topk_renorm")

ACT = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: torch.where(x > 0, x, 0 * x),
    "relu2": lambda x: torch.where(x > 0, x * x, 0 * x),
}


# metrics
def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `want`; of `got` itself where `want` is zero;
    inf for a NaN.
    """
    got = got.detach().double()
    want = want.detach().double()
    if got.shape != want.shape:
        return math.inf
    scale = want.norm().item()
    error = (got - want).norm().item() / (scale if scale > 0 else 1.0)
    return error if math.isfinite(error) else math.inf


def cosine(got: torch.Tensor, want: torch.Tensor) -> float:
    """Cosine of the angle between two tensors; 1 if both are zero, 0 if one is or the shapes
    differ.
    """
    if got.shape != want.shape:
        return 0.0
    got = got.detach().double().flatten()
    want = want.detach().double().flatten()
    norms = (got.norm() * want.norm()).item()
    return (got @ want).item() / norms if norms > 0 else float(got.norm() == want.norm())


def worst_slice(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error of a slice along dim 0 (a token, an expert) over the larger of its norm and the
    slices' rms norm.
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
    """Names and numbers of the tensors in `got` that are farther from `want` than `bound` (one for
    all, or per name).
    """
    bad = [] if got.keys() == want.keys() else [f"got {sorted(got)}, want {sorted(want)}"]
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
    """Fail unless two dicts or sequences of tensors hold the same numbers, NaN at the same
    places.
    """
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, check_stride=False)


def bounds(eager: dict, want: dict, table: float) -> dict:
    """Per tensor a few times the error of an eager path in the tested dtype, and never more than
    the table's tolerance.
    """
    return {
        name: min(table, 3 * relative_error(eager[name], want[name]) + table / 5) for name in want
    }


# one MoE layer's experts
@dataclass
class Case:
    """Leaves as the user holds them, and `view`, which turns them into the op's arguments (strides
    included).
    """

    leaves: dict[str, torch.Tensor]  # x, up, down, topk_weight, maybe up_bias, down_bias
    topk_idx: torch.Tensor
    dout: torch.Tensor
    act: str = "silu"
    gated: bool = True
    view: Callable[[dict], dict] = field(default=lambda leaves: leaves)
    form: dict = field(default_factory=dict)  # limit, up_offset, interleaved


def choose_experts(T: int, E: int, K: int, routing: str) -> torch.Tensor:
    """Ids [T, K]: random distinct | skip (no token picks the last expert) | all (every token picks
    expert E // 2) | twice | halves (token t picks expert t % 2 in all slots: T rows each at K = 2,
    and yet not every token) | dropped.
    """
    pool = E - 1 if routing == "skip" else E
    if T:
        idx = torch.stack([torch.randperm(pool)[:K] for _ in range(T)])
    else:
        idx = torch.zeros(0, K, dtype=torch.int64)
    if routing == "all":
        idx = torch.full((T, K), E // 2)
    if routing == "halves":
        idx = (torch.arange(T) % min(2, E))[:, None].repeat(1, K)
    if routing == "twice" and K > 1:  # one token, two slots, one expert
        idx[:, 1] = idx[:, 0]
    if routing == "dropped":  # by -1 and by ids beyond the last expert
        idx[::3, 0] = -1
        idx[1::4, -1] = E
        idx[2::5, 0] = E + 7
    return idx


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
    """A layer whose outputs and gradients are O(1)."""
    Z = 2 * I if gated else I
    leaves = {
        "x": torch.randn(T, H),
        "up": torch.randn(E, Z, H) / H**0.5,
        "down": 2 * torch.randn(E, H, I) / I**0.5,
        "topk_weight": 0.2 + torch.rand(T, K),
    }
    if bias:
        leaves |= {"up_bias": torch.randn(E, Z), "down_bias": torch.randn(E, H)}
    gates = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {
        name: leaf.to(gates if name == "topk_weight" else dtype) for name, leaf in leaves.items()
    }
    return Case(
        leaves, choose_experts(T, E, K, routing).to(idx), torch.randn(T, H).to(dtype), act, gated
    )


def run(
    case: Case, layer: Callable, dtype: torch.dtype | None = None, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Run layer(x, up, down, topk_weight, topk_idx, up_bias=, down_bias=, act=, gated=, [form]) ->
    out and every d<leaf>.

    It runs on `device`; what it gives comes back to the CPU.
    """
    leaves = {
        name: leaf.detach().clone().to(device, dtype or leaf.dtype).requires_grad_()
        for name, leaf in case.leaves.items()
    }
    v = case.view(leaves)
    out = layer(
        v["x"],
        v["up"],
        v["down"],
        v["topk_weight"],
        case.topk_idx.to(device),
        up_bias=v.get("up_bias"),
        down_bias=v.get("down_bias"),
        act=case.act,
        gated=case.gated,
        **case.form,
    )
    grads = torch.autograd.grad(
        out, list(leaves.values()), case.dout.to(device, out.dtype), allow_unused=True
    )
    zeros = [torch.zeros_like(leaf) for leaf in leaves.values()]
    grads = {
        f"d{name}": (zero if grad is None else grad).cpu()
        for name, zero, grad in zip(leaves, zeros, grads, strict=True)
    }
    return {"out": out.detach().cpu(), **grads}


def gate_and_up(z: torch.Tensor, interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate's columns of z [..., 2I], and up's."""
    I = z.shape[-1] // 2
    at = [2 * i for i in range(I)] if interleaved else list(range(I))
    return z[..., at], z[..., [i + (1 if interleaved else I) for i in at]]


def cut(v: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """v within low..high, with a gradient of 1 there, ends included, and 0 outside."""
    return torch.where(v > high, high, torch.where(v < low, low, v))


def gated_product(
    z: torch.Tensor, act, limit=None, up_offset=0.0, interleaved=False
) -> torch.Tensor:
    """act(min(gate, limit)) * (clamp(up) + up_offset), as autograd differentiates it."""
    gate, up = gate_and_up(z, interleaved)
    if limit is not None:
        gate = cut(gate, -math.inf, limit)
        up = cut(up, -limit, limit)
    return act(gate) * (up + up_offset)


def mlp(x, up, down, up_bias=None, down_bias=None, act="silu", gated=True, **form):
    """FFN(x) of one expert on one token: x [H], up [2I or I, H], down [H, I] -> [H]."""
    z = up @ x if up_bias is None else up @ x + up_bias
    h = gated_product(z, ACT[act], **form) if gated else ACT[act](z)
    y = down @ h
    return y if down_bias is None else y + down_bias


def moe_oracle(
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
    """out[t] = sum_k topk_weight[t, k] FFN_{topk_idx[t, k]}(x[t]), slot by slot."""
    rows = []
    for t in range(x.shape[0]):
        row = 0 * x[t]
        for k, e in enumerate(topk_idx[t].tolist()):
            if 0 <= e < up.shape[0]:
                biases = [None if b is None else b[e] for b in (up_bias, down_bias)]
                row = row + topk_weight[t, k] * mlp(
                    x[t], up[e], down[e], *biases, act, gated, **form
                )
        rows.append(row)
    return torch.stack(rows) if rows else x * up.sum() * 0


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
    """What transformers' eager experts do, in the inputs' dtype: its error is the yardstick of the
    tolerance.
    """
    native = {"silu": torch.nn.functional.silu, "relu": torch.relu}.get(act, ACT[act])
    out = torch.zeros_like(x)
    for e in range(up.shape[0]):
        token, slot = torch.where(topk_idx == e)
        z = x[token] @ up[e].t()
        z = z if up_bias is None else z + up_bias[e]
        y = (gated_product(z, native, **form) if gated else native(z)) @ down[e].t()
        y = y if down_bias is None else y + down_bias[e]
        out = out.index_add(0, token, (y * topk_weight[token, slot, None]).to(x.dtype))
    return out


def moe_mismatches(layer: Callable, case: Case, table: float, device: str = "cpu") -> list[str]:
    """Where `layer` is not the equation on this case: the parity check of the tests, and what the
    mutants must not pass.
    """
    want = run(case, moe_oracle, torch.float64)
    return mismatches(
        run(case, layer, device=device), want, bounds(run(case, moe_eager), want, table)
    )


# what autograd keeps
def saved_bytes(
    step: Callable[[], torch.Tensor], besides: list[torch.Tensor]
) -> tuple[int, torch.Tensor]:
    """Bytes of the distinct storages that step() saves for the backward pass, without those of
    `besides`; and its result.
    """
    skip = {tensor.untyped_storage().data_ptr() for tensor in besides}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = step()
    return sum(saved.values()), out


# routing, balance, merging: numbers, not tensors, wherever no gradient is wanted
def route_oracle(
    logits: torch.Tensor, top_k: int, gate: str
) -> tuple[torch.Tensor, list[list[int]]]:
    """Weights [T, K] in logits' dtype (differentiable) and ids, token by token, from XFT's Eq. (1),
    (2).
    """
    k = top_k - (gate in SHARED)
    weights = []
    ids = []
    for row in logits:
        values = row.tolist()
        chosen = sorted(range(len(values)), key=lambda r: (-values[r], r))[:k]
        exp = [torch.exp(v - max(values)) for v in row]
        total = sum(exp)
        p = [v / total for v in exp]
        s = [p[r] for r in chosen]
        if gate == "xft":  # softmax of the probabilities, a second one
            total = sum(torch.exp(v) for v in s)
            w = [torch.exp(v) / total * s[0] for v in s]
        elif gate == "topk_softmax":
            total = sum(exp[r] for r in chosen)
            w = [exp[r] / total for r in chosen]
        elif gate == "softmax_topk_renorm":
            total = sum(s)
            w = [v / total for v in s]
        elif gate == "sigmoid_topk":
            w = [1 / (1 + torch.exp(-row[r])) for r in chosen]
        else:
            w = s
        # s[0] is the largest probability; no routed experts at all leave everything to the shared
        # one
        if gate in SHARED:
            w = [*w, 1 - s[0] if s else 1 + row.sum()]
            chosen = [*(r + 1 for r in chosen), 0]
        weights.append(torch.stack(w))
        ids.append(chosen)
    return torch.stack(weights), ids


def route_mismatches(
    route: Callable, logits: torch.Tensor, top_k: int, gate: str, table: float
) -> list[str]:
    """Where route(logits, top_k, gate) -> (weight, idx) is not the equation: ids, weights, gradient
    of the logits.
    """
    logits = logits.detach().requires_grad_()
    weight, idx = route(logits, top_k, gate)
    clean = logits.detach().double().requires_grad_()
    want, ids = route_oracle(clean, top_k, gate)
    bad = [] if idx.tolist() == ids else [f"ids are {idx.tolist()}, want {ids}"]
    # gates are float32 or wider
    bad += mismatches({"weight": weight}, {"weight": want}, min(table, 5e-6))
    dweight = torch.cos(torch.arange(want.numel(), dtype=torch.float64)).view(want.shape)
    (dlogits,) = torch.autograd.grad(weight, logits, dweight.to(weight.dtype))
    (dwant,) = torch.autograd.grad(want, clean, dweight)
    if dwant.norm() < 1e-9:  # a softmax over one expert
        return bad + ([] if dlogits.norm() < 1e-6 else [f"dlogits is {dlogits}, want 0"])
    return bad + mismatches(
        {"dlogits": dlogits}, {"dlogits": dwant}, max(table, 2e-5) if table > 1e-9 else table
    )


def mixing_oracle(logits: list[float], shared_rate: float | None) -> list[float]:
    """alpha of XFT's Eq. (5): [lambda, (1 - lambda) softmax(logits)], or softmax(logits) for the
    soup (None).
    """
    exp = [math.exp(a - max(logits)) for a in logits]
    soft = [v / sum(exp) for v in exp]
    return soft if shared_rate is None else [shared_rate, *((1 - shared_rate) * v for v in soft)]


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
    """Leave NaN in the memory that the allocator hands out next."""
    blocks = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    del blocks
