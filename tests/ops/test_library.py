"""What every op owes torch's own tools: no silent zeros from forward-mode AD, torch.func's
transforms, a FLOP count.
"""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import MoE
from moe_runtime.ops import balance, expansion, fusion, lora, merging, moe_layer
from moe_runtime.ops import grouped_gemm as grouped
from moe_runtime.ops.combine import combine, gather_rows
from moe_runtime.ops.dispatch import dispatch
from moe_runtime.ops.expansion import dare_merge, gram
from moe_runtime.ops.fusion import fused_cross_entropy
from moe_runtime.ops.grouped_gemm import grouped_gemm
from moe_runtime.ops.lora import LoRA, lora_mlp
from moe_runtime.ops.merging import merge_experts, merged_linear
from moe_runtime.ops.moe_mlp import moe_mlp, moe_mlp_reference
from moe_runtime.ops.routing import route

T = 6
H = 8
I = 5
E = 4
K = 2
R = 3
V = 11
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*performance drop", "ignore:.*not yet implemented the batching rule"
)


@pytest.fixture
def ops() -> dict:
    """A function of x [T, H] for each op."""
    up = torch.randn(E, 2 * I, H) / 3
    down = torch.randn(E, H, I) / 2
    weight = torch.rand(T, K)
    idx = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
    order = dispatch(idx, E)
    alpha = torch.rand(E)
    heads = [torch.randn(V, H), torch.randn(V, H)]
    base = (up[0, :I], up[0, I:], down[0])
    pair = LoRA(torch.randn(E, R, H) / 3, torch.randn(E, R, I) / 3)
    gate = torch.rand(T, 2).softmax(1)
    labels = torch.randint(0, V, (T,))
    sizes = {
        "hidden_size": H,
        "intermediate_size": I,
        "num_experts": E,
        "top_k": K,
        "gate": "softmax_topk",
    }
    moe = MoE(MoEConfig(**sizes)).requires_grad_(False)
    return {
        "moe_mlp": lambda x: moe_mlp(x, up, down, weight, idx),
        "moe_layer": moe,
        "route": lambda x: route(x, K, "softmax_topk").topk_weight,
        "route_to": lambda x: route(x, K, "xft", topk_idx=idx % 3 + 1).topk_weight,
        "merge_experts": lambda x: merge_experts(up, x[0, :E]).square(),
        "merged_linear": lambda x: merged_linear(x, up, alpha).square(),
        "grouped_gemm": lambda x: grouped_gemm(x[order.row_token.long()], up, order.expert_offsets),
        "combine": lambda x: combine(x.repeat(K, 1), weight, order.slot_row),
        "gather_rows": lambda x: gather_rows(x, order.row_token, order.slot_row),
        "lora_mlp": lambda x: lora_mlp(x, *base, weight, idx, gate=pair),
        "fused_nll": lambda x: fused_cross_entropy([x, x], heads, gate, labels, reduction="none"),
        "fused_loss": lambda x: fused_cross_entropy([x, x], heads, gate, labels, reduction="sum"),
        "gram": lambda x: gram(x),
        "dare_merge": lambda x: dare_merge(
            x, 2 * x, seed=0, tensor="x", drop=0.5, weights=(0.5, 0.5)
        ),
    }


OPS = (
    "moe_mlp",
    "moe_layer",
    "route",
    "route_to",
    "merge_experts",
    "merged_linear",
    "grouped_gemm",
    "combine",
    "gather_rows",
    "lora_mlp",
    "fused_nll",
    "fused_loss",
    "gram",
    "dare_merge",
)


@pytest.mark.parametrize("name", [name for name in OPS if name != "gather_rows"])
def test_forward_mode_is_refused(ops, name):
    """torch.func.jvp, jacfwd and dual tensors gave zeros, or no tangent at all."""
    f = ops[name]
    x = torch.randn(T, H)
    v = torch.randn(T, H)
    transforms = [lambda: jvp(f, (x,), (v,)), lambda: jacfwd(f)(x)]
    if name in OPS[:-2]:
        transforms += [lambda: jacfwd(jacrev(f))(x)]
        if name.startswith("fused"):
            transforms += []
        else:
            transforms += [lambda: jvp(vmap(f), (x[None],), (v[None],))]
    message = f"moe_runtime::({name}|fused_nll).* has no forward-mode derivative.*jacrev"
    for transform in transforms:
        with pytest.raises(NotImplementedError, match=message):
            transform()
    with fwAD.dual_level():
        assert f(x) is not None  # nothing carries a tangent here
        with pytest.raises(NotImplementedError, match=message):
            f(fwAD.make_dual(x, v))


def test_gathered_rows_have_a_tangent(ops):
    f = ops["gather_rows"]
    x = torch.randn(T, H)
    v = torch.randn(T, H)
    assert torch.equal(jvp(f, (x,), (v,))[1], f(v)) and torch.equal(jacfwd(f)(x), jacrev(f)(x))


def relative(got, wanted) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


def autograd(f, x, create_graph=False):
    x = x if x.requires_grad else x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x, create_graph=create_graph)[0]


@pytest.mark.parametrize("name", OPS[:-2])
def test_reverse_transforms(ops, name):
    """What the refusal names as a remedy is autograd's own, alone and nested; a second derivative
    too, or it is refused.
    """
    f = ops[name]
    x = torch.randn(T, H)
    xs = torch.stack([x, x + 0.1])
    scale = torch.linspace(0.5, 1, f(x).numel()).view(f(x).shape)

    def loss(x):
        return (f(x) * scale).sum()

    wanted = torch.stack([autograd(loss, x) for x in xs])
    assert (
        relative(grad(loss)(x), wanted[0]) < 1e-6
        and relative(vjp(f, x)[1](scale)[0], wanted[0]) < 1e-6
    )
    if name.startswith("fused"):  # an op that returns lists has no batching rule, and torch says so
        with pytest.raises(RuntimeError, match="Batching rule not implemented"):
            vmap(f)(xs)
        return
    assert relative(vmap(f)(xs), torch.stack([f(x) for x in xs])) < 1e-6
    assert relative(vmap(grad(loss))(xs), wanted) < 1e-6
    assert relative(grad(lambda xs: vmap(loss)(xs).sum())(xs), wanted) < 1e-6
    assert relative(torch.einsum("...,...th->th", scale, jacrev(f)(x)), wanted[0]) < 1e-6
    leaf = x.clone().requires_grad_()
    try:
        second = torch.autograd.grad(
            autograd(loss, leaf, create_graph=True).sum() + 0 * leaf.sum(), leaf
        )[0]
    except RuntimeError as error:
        assert "no second derivative" in str(error)
        with pytest.raises(RuntimeError, match="no second derivative"):
            jacrev(grad(loss))(x)
    else:
        torch.testing.assert_close(jacrev(grad(loss))(x).sum((0, 1)), second, rtol=1e-4, atol=1e-5)
        # autograd around a transform
        outside = torch.autograd.grad(grad(loss)(leaf).sum() + 0 * leaf.sum(), leaf)[0]
        torch.testing.assert_close(outside, second, rtol=1e-4, atol=1e-5)


def test_compiled_transforms(ops):
    f = ops["moe_mlp"]
    x = torch.randn(T, H)
    compiled = torch.compile(
        lambda x: grad(lambda x: f(x).sum())(x), fullgraph=True, backend="aot_eager"
    )
    assert relative(compiled(x), grad(lambda x: f(x).sum())(x)) < 1e-6
    with pytest.raises(Exception, match="forward-mode derivative|forward_ad|NotImplementedError"):
        torch.compile(lambda x: jvp(f, (x,), (x,))[1], fullgraph=True, backend="aot_eager")(x)


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def train(f, *leaves):
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = f(*leaves)
    out.backward(torch.ones_like(out))


@pytest.mark.parametrize("recompute", [False, True])
def test_flops_of_experts_are_those_of_transformers(recompute):
    """Every token and slot through stock experts, eager: the same products, forward and
    backward.
    """
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

    sizes = {
        "hidden_size": H,
        "intermediate_size": I,
        "num_local_experts": E,
        "num_experts_per_tok": K,
    }
    experts = MixtralExperts(MixtralConfig(**sizes, experts_implementation="eager"))
    up = torch.randn(E, 2 * I, H)
    down = torch.randn(E, H, I)
    x = torch.randn(T, H)
    weight = torch.rand(T, K)
    idx = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()

    def eager(x, up, down, weight):
        parts = {"gate_up_proj": up, "down_proj": down}
        return torch.func.functional_call(experts, parts, (x, idx.long(), weight))

    def ours(x, up, down, weight):
        return moe_mlp(x, up, down, weight, idx, recompute=recompute)

    with torch.inference_mode():
        forward = flops(lambda: ours(x, up, down, weight))
        assert forward == flops(lambda: eager(x, up, down, weight)) == 2 * T * K * 3 * H * I
    again = 2 * T * K * 2 * H * I if recompute else 0
    assert flops(lambda: train(ours, x, up, down, weight)) - again == flops(
        lambda: train(eager, x, up, down, weight)
    )
    frozen = flops(lambda: train(lambda x: ours(x, up, down, weight), x)) - again
    assert frozen == flops(lambda: train(lambda x: eager(x, up, down, weight), x)) == 2 * forward


# what the torch backend runs for each op, and what its products count when the counter sees them
KERNELS = {
    "moe_layer": moe_layer._forward,
    "moe_layer_backward": moe_layer._backward,
    "grouped_gemm": grouped._forward,
    "grouped_gemm_backward": grouped._backward,
    "merged_linear": lambda x, w, a, merged, *_: x @ merged.t(),
    "merged_linear_backward": merging._linear_backward,
    "lora_mlp": lora._forward,
    "lora_mlp_backward": lora._backward,
    "fused_nll": fusion._nll,
    "fused_nll_backward": fusion._nll_backward,
    "fused_loss": fusion._loss,
    "gram": expansion._gram,
    "merge_experts_backward_alpha": merging._merge_backward_alpha,
}
UNCOUNTED = {
    torch.ops.aten.addmm_: lambda out, a, b, **_: 2 * a[0] * a[1] * b[1],
    torch.ops.aten.mv: lambda a, b, **_: 2 * a[0] * a[1],
}


class Calls(TorchDispatchMode):
    """Keep the calls of our ops, and what each counted for."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with FlopCounterMode(display=False) as counter:
            out = func(*args, **(kwargs or {}))
        if func.namespace == "moe_runtime":
            self.calls.append((func._opname, args, counter.get_total_flops()))
        return out


@pytest.mark.parametrize("recompute", [False, True])
def test_flops_are_the_products_of_the_torch_backend(ops, recompute, monkeypatch):
    """An op counts for what its torch backend multiplies, to the last product, whatever needs a
    gradient.
    """
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")
    base = torch.randn(3, I, H)
    idx = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    weight = torch.rand(T, E)
    pairs = {
        name: LoRA(torch.randn(E, R, a), torch.randn(E, R, b))
        for name, a, b in (("gate", H, I), ("down", I, H))
    }

    def loras(names, x, idx):
        mine = {name: LoRA(pairs[name].a.clone().requires_grad_(), pairs[name].b) for name in names}
        chosen = weight if idx is None else weight[:, :K]
        return lora_mlp(x, base[0], base[1], base[2].t(), chosen, idx, **mine, recompute=recompute)

    def forms(x):
        yield from (
            ops[name]
            for name in ("moe_layer", "merged_linear", "grouped_gemm", "fused_nll", "fused_loss")
        )
        yield from (
            lambda x, n=n, i=i: loras(n, x, i)
            for n in (("gate",), ("gate", "down"))
            for i in (None, idx)
        )
        experts = torch.randn(E, I, H)
        yield lambda x: merge_experts(experts, x[0, :E])
        yield lambda x: merged_linear(x, experts, x[0, :E].softmax(0))

    with Calls() as seen:
        gram(torch.randn(E, I, H))
        for form in forms(None):
            train(form, torch.randn(T, H))
    checked = set()
    for name, args, counted in seen.calls:
        if name in KERNELS:
            with (
                torch.no_grad(),
                FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter,
            ):
                KERNELS[name](*args)
            assert counted == counter.get_total_flops() > 0, name
            checked.add(name)
    assert checked == set(KERNELS)


def test_float64_inputs_have_float64_gradients(ops):
    """A router's float32 weights beside float64 experts, float32 experts behind a float64 product:
    nothing is cast down.
    """
    idx = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
    weight = torch.rand(T, K)
    out = torch.randn(T, H, dtype=torch.float64)
    shapes = {
        "x": (T, H),
        "up": (E, 2 * I, H),
        "down": (E, H, I),
        "gate_up_bias": (E, 2 * I),
        "down_bias": (E, H),
    }
    leaves = {
        name: torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for name, shape in shapes.items()
    }

    def gradients(op, weight):
        x, up, down, *biases = leaves.values()
        y = op(x, up, down, weight.requires_grad_(), idx, **dict(zip(list(leaves)[3:], biases)))
        return torch.autograd.grad(y, (*leaves.values(), weight), out)

    for got, wanted in zip(
        gradients(moe_mlp, weight), gradients(moe_mlp_reference, weight.double())
    ):
        assert relative(got, wanted) < (1e-14 if got.dtype == torch.float64 else 1e-7)
    experts = torch.randn(E, I, H)
    x = torch.randn(T, H, dtype=torch.float64)
    for alpha in (torch.rand(E), torch.rand(E, dtype=torch.float64)):
        exact = alpha.double().requires_grad_()
        merged = torch.tensordot(exact, experts.double(), 1)
        (got,) = torch.autograd.grad(
            merged_linear(x, experts, alpha.requires_grad_(), merged.detach()), alpha, out[:, :I]
        )
        (wanted,) = torch.autograd.grad(x @ merged.t(), exact, out[:, :I])
        assert relative(got, wanted) < (1e-14 if alpha.dtype == torch.float64 else 1e-7)


@pytest.mark.parametrize("loss", ["cv2", "switch", "top_k", "mixing"])
def test_losses_of_float64_logits_are_float64(loss):
    logits = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    config = MoEConfig(
        hidden_size=H, intermediate_size=I, num_experts=E, top_k=K, gate="softmax_topk"
    )
    idx = logits.topk(K).indices
    f = {
        "cv2": lambda x: balance.cv2_loss(config, x, idx),
        "switch": lambda x: balance.switch_loss(config, x, idx),
        "top_k": lambda x: balance.top_k_loss(x, K),
        "mixing": lambda x: merging.mixing(x[0], 0.7),
    }[loss]
    assert f(logits).dtype == torch.float64 and f(logits.float()).dtype == torch.float32
    assert torch.autograd.gradcheck(f, logits, eps=1e-6, atol=1e-8, rtol=1e-7)
