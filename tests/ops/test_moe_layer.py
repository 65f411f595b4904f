"""The layer as one op: bit-equal to its two halves on the torch backend, and both backends to the
oracle's chain.
"""

import pytest
import torch

from moe_runtime import MoEConfig
from moe_runtime.backends import interpreted
from moe_runtime.modules.moe import MoE
from moe_runtime.ops.activation import Activation
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.moe_layer import moe_layer
from moe_runtime.ops.moe_mlp import moe_mlp
from moe_runtime.ops.routing import route
from tests.support.opcheck import opcheck
from tests.support.oracle import assert_parity, moe_oracle, route_oracle, saved_bytes

T = 19
H = 33
I = 17
E = 4
K = 3
GATES = ["xft", "nonorm", "topk_softmax", "softmax_topk", "softmax_topk_renorm", "sigmoid_topk"]
BACKENDS = ["torch", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"


def leaves(gate="xft", dtype=torch.float32, tokens=T, gated=True, bias=False, e=E, device=DEVICE):
    torch.manual_seed(0)
    router = e - (gate in ("xft", "nonorm"))
    sizes = {
        "x": (tokens, H),
        "router": (router, H),
        "up": (e, I * (1 + gated), H),
        "down": (e, H, I),
    }
    if bias:
        sizes |= {"up_bias": (e, I * (1 + gated)), "down_bias": (e, H)}
    scale = {
        "x": 1,
        "router": 0.3,
        "up": H**-0.5,
        "down": 2 * I**-0.5,
        "up_bias": 1,
        "down_bias": 1,
    }
    return {
        name: (torch.randn(size) * scale[name]).to(device, dtype).requires_grad_()
        for name, size in sizes.items()
    }


def whole(v, gate, backend, recompute=False, **options):
    return moe_layer(
        v["x"], v["router"], experts_of(v, **options), K, gate, recompute=recompute, backend=backend
    )


def experts_of(v, shared="group", **activation):
    return ExpertStacks(
        v["up"],
        v["down"],
        v.get("up_bias"),
        v.get("down_bias"),
        activation=Activation(**activation),
        shared=shared,
    )


def halves(v, gate, backend, **options):
    logits = v["x"] @ v["router"].t()
    weight, idx = route(logits, K, gate, backend=backend)
    biases = {"gate_up_bias": v.get("up_bias"), "down_bias": v.get("down_bias")}
    out = moe_mlp(v["x"], v["up"], v["down"], weight, idx, **biases, **options, backend=backend)
    return out, logits, weight, idx


def results(v, output) -> dict:
    """Output and gradients of a loss that uses the output, the logits and the weights."""
    out, logits, weight = (part.double() for part in output[:3])
    pattern = torch.cos(torch.arange(out.numel(), dtype=torch.float64, device=out.device)).view(
        out.shape
    )
    loss = (out * pattern).sum() + logits.square().sum() / 7 + (weight.square().sum() * 3)
    grads = torch.autograd.grad(loss, list(v.values()))
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(v, grads, strict=True)}}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_is_the_two_halves(gate, dtype, backend, tolerance):
    v = leaves(gate, dtype, bias=True)
    got = whole(v, gate, backend)
    want = halves(v, gate, backend)
    assert torch.equal(got.topk_idx, want[3]) and torch.equal(got.topk_weight, want[2])
    got = results(v, got)
    want = results(v, want)
    # which is rounded once, not twice
    assert all(torch.equal(got[name], want[name]) for name in set(want) - {"dx"})
    assert_parity({"dx": got["dx"]}, {"dx": want["dx"]}, tolerance[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "gate, gated", [("xft", True), ("softmax_topk_renorm", False), ("sigmoid_topk", True)]
)
def test_parity(gate, gated, backend, device):
    v = {
        name: leaf.to(device).detach().requires_grad_()
        for name, leaf in leaves(gate, gated=gated).items()
    }
    wide = {name: leaf.detach().double().cpu().requires_grad_() for name, leaf in v.items()}
    got = {
        name: part.cpu() for name, part in results(v, whole(v, gate, backend, gated=gated)).items()
    }
    logits = wide["x"] @ wide["router"].t()
    weight, ids = route_oracle(logits, K, gate)
    out = moe_oracle(wide["x"], wide["up"], wide["down"], weight, torch.tensor(ids), gated=gated)
    assert_parity(got, results(wide, (out, logits, weight)), 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared", ["group", "dense"])
def test_a_clamped_gate_is_that_of_the_halves(shared, backend):
    v = leaves(bias=True)
    options = {
        "act": "quick_gelu",
        "limit": 0.75,
        "up_offset": 1.0,
        "interleaved": True,
        "shared": shared,
    }
    got, want = (results(v, f(v, "xft", backend, **options)) for f in (whole, halves))
    assert all(torch.equal(got[name], want[name]) for name in set(want) - {"dx"})
    assert_parity({"dx": got["dx"]}, {"dx": want["dx"]}, 5e-6)
    plain = results(v, whole(v, "xft", backend, act="quick_gelu", shared=shared))
    assert not torch.allclose(got["out"], plain["out"], atol=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_on_the_logits_alone_reaches_router_and_x(backend):
    v = leaves()
    output = whole(v, "xft", backend)
    dx, drouter, dup = torch.autograd.grad(
        output.router_logits.square().sum(), [v["x"], v["router"], v["up"]]
    )
    want = torch.autograd.grad((v["x"] @ v["router"].t()).square().sum(), [v["x"], v["router"]])
    torch.testing.assert_close((dx, drouter), want)
    assert not dup.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_gradient_alone(backend):
    v = leaves(bias=True)
    want = results(v, whole(v, "xft", backend))
    for name in v:
        alone = {other: leaf.detach().requires_grad_(other == name) for other, leaf in v.items()}
        out, logits, weight = (part.double() for part in whole(alone, "xft", backend)[:3])
        pattern = torch.cos(torch.arange(out.numel(), dtype=torch.float64, device=out.device)).view(
            out.shape
        )
        loss = (out * pattern).sum() + logits.square().sum() / 7 + (weight.square().sum() * 3)
        assert torch.equal(torch.autograd.grad(loss, alone[name])[0], want[f"d{name}"]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens, backend):
    v = leaves(tokens=tokens)
    got = results(v, whole(v, "xft", backend))
    assert got["out"].shape == (tokens, H) and not any(part.isnan().any() for part in got.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_shared_expert_is_the_dense_mlp(backend):
    v = leaves(e=1)
    out, logits, weight, idx = moe_layer(
        v["x"], v["router"], experts_of(v), 1, "xft", backend=backend
    )
    z = v["x"] @ v["up"][0].t()
    want = (torch.nn.functional.silu(z[:, :I]) * z[:, I:]) @ v["down"][0].t()
    torch.testing.assert_close(out, want)
    assert logits.shape == (T, 0) and (weight == 1).all() and not idx.any()
    got = torch.autograd.grad(out.sum(), v["x"])[0]
    dx = torch.autograd.grad(want.sum(), v["x"])[0]
    torch.testing.assert_close(got, dx)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keeps_x_z_weights_and_indices(backend):
    tokens = 64
    dtype = torch.bfloat16
    v = leaves(dtype=dtype, tokens=tokens)
    kept, _ = saved_bytes(lambda: whole(v, "xft", backend).out, [v["router"], v["up"], v["down"]])
    per_token = 2 * H + 4 * I * K + 12 * K + 2 * (E - 1)  # the logits, too
    assert kept <= tokens * per_token + 4 * (E + 1)
    kept, _ = saved_bytes(
        lambda: whole(v, "xft", backend, recompute=True).out, [v["router"], v["up"], v["down"]]
    )
    assert kept <= tokens * (2 * H + 12 * K + 2 * (E - 1)) + 4 * (E + 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_recompute_is_bit_equal(backend):
    v = leaves(bias=True)
    want, got = (
        results(v, whole(v, "xft", backend, recompute=recompute)) for recompute in (False, True)
    )
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_opcheck(bias, backend):
    v = leaves(bias=bias, tokens=5)
    inputs = (v["x"], v["router"], *experts_of(v).pack())
    is_traced = backend == "torch" or bias
    opcheck(torch.ops.moe_runtime.moe_layer, (*inputs, K, "xft", True, backend), is_traced)
    inputs = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]
    out, *saved = torch.ops.moe_runtime.moe_layer(*inputs, K, "xft", True, backend)
    extra = [torch.randn_like(saved[0]), torch.randn_like(saved[1])]
    for needs in ([True, True, True, False, bias, bias], [False] * 6):
        for dlogits, dweight in ([None, None], extra):
            args = (
                torch.randn_like(out),
                dlogits,
                dweight,
                *inputs,
                *saved,
                any(needs),
                needs,
                "xft",
                backend,
            )
            opcheck(torch.ops.moe_runtime.moe_layer_backward, args, is_traced)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_without_a_graph_break(backend):
    torch._dynamo.reset()
    v = leaves()

    def f(x, router, up, down):
        return tuple(moe_layer(x, router, ExpertStacks(up, down), K, "xft", backend=backend))

    assert torch._dynamo.explain(f)(*v.values()).graph_break_count == 0
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    got = results(v, compiled(*v.values()))
    want = results(v, f(*v.values()))
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
def test_dense_shared_expert_is_the_group(gated, bias, backend, tolerance):
    v = leaves(gated=gated, bias=bias)
    got, want = (
        results(v, whole(v, "xft", backend, gated=gated, shared=how)) for how in ("dense", "group")
    )
    assert_parity(got, want, tolerance[torch.float32])
    recomputed = results(v, whole(v, "xft", backend, gated=gated, shared="dense", recompute=True))
    assert all(torch.equal(recomputed[name], got[name]) for name in got)


def test_dense_shared_expert_wants_the_last_slot_of_every_token():
    v = leaves("topk_softmax", device="cpu")  # where the ids can be looked at
    with pytest.raises(ValueError, match="shared='dense' requires gate to be one of"):
        whole(v, "topk_softmax", "torch", shared="dense")
    idx = torch.tensor([[1, 0], [0, 2]])
    with pytest.raises(ValueError, match="With shared='dense', topk_idx .* must have expert 0"):
        moe_mlp(v["x"][:2], v["up"], v["down"], torch.rand(2, 2), idx, shared="dense")
    with pytest.raises(ValueError, match="shared must be .*but got 'both'"):
        whole(v, "topk_softmax", "torch", shared="both")
    with pytest.raises(ValueError, match="With shared='dense', trainable must be None"):
        mask = torch.ones(E, dtype=torch.bool)
        moe_mlp(
            v["x"][:2], v["up"], v["down"], torch.rand(2, 2), idx, shared="dense", trainable=mask
        )


# the module uses it
def layer(**config):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": H,
        "intermediate_size": I,
        "num_experts": E,
        "top_k": K,
        "initializer_range": 0.3,
    }
    return MoE(MoEConfig(**sizes | config))


@pytest.fixture
def calls(monkeypatch):
    """How often the one op ran."""
    count = []
    from moe_runtime.modules import moe

    monkeypatch.setattr(
        moe, "moe_layer", lambda *args, **options: count.append(1) or moe_layer(*args, **options)
    )
    return count


def test_the_module_runs_as_one_op_and_steps_aside_for_whoever_looks(calls):
    module = layer(bias=True)
    x = torch.randn(2, 5, H)
    want = module(x)
    assert len(calls) == 1
    seen = []
    handle = module.gate.register_forward_hook(lambda _, __, output: seen.append(output.topk_idx))
    assert torch.equal(module(x), want) and len(seen) == 1 and len(calls) == 1
    handle.remove()
    for watched in (module.gate, module.experts):
        handle = watched.register_full_backward_hook(lambda *_: seen.append("backward"))
        module(x.clone().requires_grad_()).sum().backward()
        handle.remove()
    assert seen[1:] == ["backward"] * 2 and len(calls) == 1
    names = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: names.append(type(module).__name__)
    )
    assert (
        torch.equal(module(x), want) and len(calls) == 1 and names == ["Router", "Experts", "MoE"]
    )
    handle.remove()
    module.experts.forward = module.experts.forward  # as accelerate's offloading wraps it
    assert torch.equal(module(x), want) and len(calls) == 1


@pytest.mark.parametrize(
    "config", [{"router": "mlp"}, {"noisy_gate": True}], ids=["mlp router", "noise"]
)
def test_other_routers_go_through_their_own_forward(config, calls):
    module = layer(**config)
    module(torch.randn(5, H))
    assert not calls
    module.eval()(torch.randn(5, H))
    assert len(calls) == ("noisy_gate" in config)


def test_a_router_kept_in_float32_stays_there(calls):
    module = layer().bfloat16()
    module.gate.float()
    with pytest.raises(RuntimeError):  # the router's own matmul wants x in its dtype
        module(torch.randn(5, H).bfloat16())
    assert not calls
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.randn(5, H)).dtype == torch.bfloat16 and len(calls) == 1
