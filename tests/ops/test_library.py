"""Every op works with torch's own tools or refuses them: no silent zeros from forward-mode AD and
torch.func's transforms.
"""

import functools

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import MoE
from moe_runtime.ops import balance, library, merging
from moe_runtime.ops.combine import combine, gather_rows
from moe_runtime.ops.dispatch import dispatch
from moe_runtime.ops.expansion import dare_merge, gram
from moe_runtime.ops.fusion import fused_cross_entropy
from moe_runtime.ops.grouped_gemm import grouped_gemm
from moe_runtime.ops.lora import LoRA, lora_mlp
from moe_runtime.ops.merging import merge_experts, merged_linear
from moe_runtime.ops.moe_mlp import moe_mlp, moe_mlp_reference
from moe_runtime.ops.routing import route
from tests.support.oracle import relative_error

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


def draw_ids() -> torch.Tensor:
    return torch.rand(T, E).topk(K).indices.int()


@pytest.fixture
def ops() -> dict:
    """Return a function of x [T, H] for each op."""
    up = torch.randn(E, 2 * I, H) / 3
    down = torch.randn(E, H, I) / 2
    weight = torch.rand(T, K)
    idx = draw_ids()
    order = dispatch(idx, E)
    alpha = torch.rand(E)
    base = (up[0, :I], up[0, I:], down[0])
    pair = LoRA(torch.randn(E, R, H) / 3, torch.randn(E, R, I) / 3)
    heads = [torch.randn(V, H), torch.randn(V, H)]
    loss = functools.partial(
        fused_cross_entropy,
        heads=heads,
        gate_weight=torch.rand(T, 2).softmax(1),
        labels=torch.randint(0, V, (T,)),
    )
    child = functools.partial(
        dare_merge,
        seed=0,
        tensor="x",
        drop=0.5,
        weights=(0.5, 0.5),
    )
    config = MoEConfig(
        hidden_size=H, intermediate_size=I, num_experts=E, top_k=K, gate="softmax_topk"
    )
    return {
        "moe_mlp": lambda x: moe_mlp(x, up, down, weight, idx),
        "moe_layer": MoE(config).requires_grad_(False),
        "route": lambda x: route(x, K, "softmax_topk").topk_weight,
        "route_to": lambda x: (
            route(
                x,
                K,
                "xft",
                topk_idx=idx % 3 + 1,
            ).topk_weight
        ),
        "merge_experts": lambda x: merge_experts(up, x[0, :E]).square(),
        "merged_linear": lambda x: merged_linear(x, up, alpha).square(),
        "grouped_gemm": lambda x: grouped_gemm(
            x[order.row_token.long()],
            up,
            order.expert_offsets,
        ),
        "combine": lambda x: combine(
            x.repeat(K, 1),
            weight,
            order.slot_row,
        ),
        "gather_rows": lambda x: gather_rows(x, order.row_token, order.slot_row),
        "lora_mlp": lambda x: lora_mlp(x, *base, weight, idx, gate=pair),
        "fused_nll": lambda x: loss([x, x], reduction="none"),
        "fused_loss": lambda x: loss([x, x], reduction="sum"),
        "gram": gram,
        "dare_merge": lambda x: child(x, 2 * x),
    }


DIFFERENTIABLE = (
    "moe_mlp",
    "moe_layer",
    "route",
    "route_to",
    "merge_experts",
    "merged_linear",
    "grouped_gemm",
    "combine",
    "lora_mlp",
    "fused_nll",
    "fused_loss",
)


WATCHERS = {
    "a mode": lambda: FlopCounterMode(display=False),
    "a function mode": lambda: torch.device("cpu"),
    "a level of forward mode": fwAD.dual_level,
    "a profiler": torch.profiler.profile,
}


def test_a_call_without_gradients_passes_the_dispatcher_by_unless_something_watches(
    ops, monkeypatch
):
    x = torch.randn(T, H)
    kernel = library.KERNELS["moe_mlp"]
    direct = []
    monkeypatch.setitem(library.KERNELS, "moe_mlp", lambda *args: direct.append(1) or kernel(*args))
    expected = ops["moe_mlp"](x.requires_grad_()).detach()
    with torch.no_grad():
        for watcher in WATCHERS.values():
            with watcher():
                assert torch.equal(ops["moe_mlp"](x), expected)
        subclass = type("Subclass", (torch.Tensor,), {})
        for other in (x.as_subclass(subclass), torch._neg_view(-x)):
            assert torch.equal(ops["moe_mlp"](other), expected)
        assert not direct
        assert torch.equal(ops["moe_mlp"](x), expected)
    assert direct == [1]


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, "gram", "dare_merge"])
def test_forward_mode_is_refused(ops, name):
    """torch.func.jvp, jacfwd and dual tensors would otherwise give zeros, or no tangent at all."""
    f = ops[name]
    x = torch.randn(T, H)
    v = torch.randn(T, H)
    transforms = [
        lambda: jvp(
            f,
            (x,),
            (v,),
        ),
        lambda: jacfwd(f)(x),
    ]
    if name in DIFFERENTIABLE:
        transforms.append(lambda: jacfwd(jacrev(f))(x))
        if not name.startswith("fused"):
            transforms.append(
                lambda: jvp(
                    vmap(f),
                    (x[None],),
                    (v[None],),
                )
            )
    message = f"moe_runtime::({name}|fused_nll).* has no forward-mode derivative.*jacrev"
    for transform in transforms:
        with pytest.raises(NotImplementedError, match=message):
            transform()
    with fwAD.dual_level():
        assert f(x) is not None  # nothing has a tangent here
        with pytest.raises(NotImplementedError, match=message):
            f(fwAD.make_dual(x, v))


def test_gathered_rows_have_a_tangent(ops):
    f = ops["gather_rows"]
    x = torch.randn(T, H)
    v = torch.randn(T, H)
    assert torch.equal(jvp(f, (x,), (v,))[1], f(v))
    assert torch.equal(jacfwd(f)(x), jacrev(f)(x))


def autograd(f, x, create_graph=False):
    if not x.requires_grad:
        x = x.clone().requires_grad_()
    return torch.autograd.grad(
        f(x),
        x,
        create_graph=create_graph,
    )[0]


def weighted(f, x):
    """Return a loss of f, and the weights of its outputs."""
    scale = torch.linspace(
        0.5,
        1,
        f(x).numel(),
    ).view(f(x).shape)
    return lambda x: (f(x) * scale).sum(), scale


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, "gather_rows"])
def test_reverse_transforms(ops, name):
    """The alternatives that the refusal suggests match autograd, alone and nested."""
    f = ops[name]
    x = torch.randn(T, H)
    xs = torch.stack([x, x + 0.1])
    loss, scale = weighted(f, x)
    wanted = torch.stack([autograd(loss, x) for x in xs])
    assert relative_error(grad(loss)(x), wanted[0]) < 1e-6
    assert relative_error(vjp(f, x)[1](scale)[0], wanted[0]) < 1e-6
    # an op that returns lists has no batching rule, and torch reports it
    if name.startswith("fused"):
        with pytest.raises(RuntimeError, match="Batching rule not implemented"):
            vmap(f)(xs)
        return
    assert relative_error(vmap(f)(xs), torch.stack([f(x) for x in xs])) < 1e-6
    assert relative_error(vmap(grad(loss))(xs), wanted) < 1e-6
    assert relative_error(grad(lambda xs: vmap(loss)(xs).sum())(xs), wanted) < 1e-6
    by_rows = torch.einsum("...,...th->th", scale, jacrev(f)(x))
    assert relative_error(by_rows, wanted[0]) < 1e-6


@pytest.mark.parametrize("name", [*DIFFERENTIABLE[:-2], "gather_rows"])
def test_second_derivatives_of_transforms(ops, name):
    """A second derivative matches autograd, or it is refused."""
    leaf = torch.randn(T, H, requires_grad=True)
    x = leaf.detach()
    loss, _ = weighted(ops[name], x)
    first = autograd(loss, leaf, create_graph=True).sum()
    try:
        (second,) = torch.autograd.grad(first + 0 * leaf.sum(), leaf)
    except RuntimeError as error:
        assert "no second derivative" in str(error)
        with pytest.raises(RuntimeError, match="no second derivative"):
            jacrev(grad(loss))(x)
        return
    torch.testing.assert_close(
        jacrev(grad(loss))(x).sum((0, 1)),
        second,
        rtol=1e-4,
        atol=1e-5,
    )
    outside = grad(loss)(leaf).sum() + 0 * leaf.sum()
    (got,) = torch.autograd.grad(outside, leaf)
    torch.testing.assert_close(got, second, rtol=1e-4, atol=1e-5)


def test_compiled_transforms(ops):
    f = ops["moe_mlp"]
    x = torch.randn(T, H)

    def gradient(x):
        return grad(lambda x: f(x).sum())(x)

    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x), gradient(x)) < 1e-6
    forward_mode = torch.compile(
        lambda x: jvp(
            f,
            (x,),
            (x,),
        )[1],
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(Exception, match="forward-mode derivative|forward_ad|NotImplementedError"):
        forward_mode(x)


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_float64_inputs_have_float64_gradients():
    """A router's float32 weights next to float64 experts: nothing is cast down."""
    idx = draw_ids()
    weight = torch.rand(T, K)
    x = double(T, H)
    up = double(E, 2 * I, H)
    down = double(E, H, I)
    biases = {"gate_up_bias": double(E, 2 * I), "down_bias": double(E, H)}
    dout = torch.randn(T, H, dtype=torch.float64)

    def gradients(op, weight):
        weight.requires_grad_()
        out = op(x, up, down, weight, idx, **biases)
        return torch.autograd.grad(
            out,
            (x, up, down, *biases.values(), weight),
            dout,
        )

    *got, got_weight = gradients(moe_mlp, weight)
    *wanted, wanted_weight = gradients(moe_mlp_reference, weight.detach().double())
    for gradient, expected in zip(got, wanted, strict=True):
        assert gradient.dtype == torch.float64
        assert relative_error(gradient, expected) < 1e-14
    assert relative_error(got_weight, wanted_weight) < 1e-7


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-7), (torch.float64, 1e-14)], ids=str)
def test_float32_experts_behind_a_float64_product(dtype, bound):
    experts = torch.randn(E, I, H)
    alpha = torch.rand(E, dtype=dtype, requires_grad=True)
    x = torch.randn(T, H, dtype=torch.float64)
    dout = torch.randn(T, I, dtype=torch.float64)
    exact = alpha.detach().double().requires_grad_()
    merged = torch.tensordot(exact, experts.double(), 1)
    out = merged_linear(x, experts, alpha, merged.detach())
    (got,) = torch.autograd.grad(out, alpha, dout)
    (wanted,) = torch.autograd.grad(
        x @ merged.t(),
        exact,
        dout,
    )
    assert relative_error(got, wanted) < bound


@pytest.mark.parametrize("loss", ["cv2", "switch", "top_k", "mixing"])
def test_losses_of_float64_logits_are_float64(loss):
    logits = double(T, E)
    config = MoEConfig(
        hidden_size=H, intermediate_size=I, num_experts=E, top_k=K, gate="softmax_topk"
    )
    idx = logits.topk(K).indices
    losses = {
        "cv2": lambda x: balance.cv2_loss(config, x, idx),
        "switch": lambda x: balance.switch_loss(config, x, idx),
        "top_k": lambda x: balance.top_k_loss(x, K),
        "mixing": lambda x: merging.mixing(x[0], 0.7),
    }
    f = losses[loss]
    assert f(logits).dtype == torch.float64
    assert f(logits.float()).dtype == torch.float32
    assert torch.autograd.gradcheck(
        f,
        logits,
        eps=1e-6,
        atol=1e-8,
        rtol=1e-7,
    )
