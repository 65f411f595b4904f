"""The layer as one op: bit-identical to its two halves on every backend, what it saves, and when
the module uses it.
"""

import pytest
import torch

from moe_runtime import MoEConfig
from moe_runtime.modules import moe
from moe_runtime.modules.moe import MoE
from moe_runtime.ops.activation import Activation
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.moe_layer import moe_layer
from moe_runtime.ops.moe_mlp import moe_mlp
from moe_runtime.ops.routing import route
from tests.support.oracle import GATES, SHARED, assert_parity, assert_same

OP = "moe_mlp"
T = 19
H = 33
I = 17
E = 4
K = 3


def leaves(device, gate="xft", dtype=torch.float32, tokens=T, gated=True, bias=False, experts=E):
    Z = I * (1 + gated)
    v = {
        "x": torch.randn(tokens, H),
        "router": 0.3 * torch.randn(experts - (gate in SHARED), H),
        "up": torch.randn(experts, Z, H) / H**0.5,
        "down": 2 * torch.randn(experts, H, I) / I**0.5,
    }
    if bias:
        v |= {"up_bias": torch.randn(experts, Z), "down_bias": torch.randn(experts, H)}
    return {name: leaf.to(device, dtype).requires_grad_() for name, leaf in v.items()}


def whole(v, gate, backend, recompute=False, shared="group", top_k=K, **activation):
    experts = ExpertStacks(
        v["up"],
        v["down"],
        v.get("up_bias"),
        v.get("down_bias"),
        activation=Activation(**activation),
        shared=shared,
    )
    return moe_layer(
        v["x"],
        v["router"],
        experts,
        top_k,
        gate,
        recompute=recompute,
        backend=backend,
    )


def halves(v, gate, backend, **options):
    logits = v["x"] @ v["router"].t()
    router = "torch" if backend == "cpp" else backend
    weight, idx = route(logits, K, gate, backend=router)
    out = moe_mlp(
        v["x"],
        v["up"],
        v["down"],
        weight,
        idx,
        gate_up_bias=v.get("up_bias"),
        down_bias=v.get("down_bias"),
        **options,
        backend=backend,
    )
    return out, logits, weight, idx


def results(v, output) -> dict:
    """Return the output and gradients of a loss that uses the output, the logits and the
    weights.
    """
    out, logits, weight = (part.double() for part in output[:3])
    pattern = torch.cos(
        torch.arange(
            out.numel(),
            dtype=torch.float64,
            device=out.device,
        )
    )
    loss = (out.flatten() * pattern).sum()
    loss = loss + logits.square().sum() / 7 + weight.square().sum() * 3
    found = {"out": out.detach()}
    grads = torch.autograd.grad(loss, list(v.values()))
    for name, grad in zip(v, grads, strict=True):
        found[f"d{name}"] = grad
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_is_the_two_halves(gate, dtype, backend, tolerance, device):
    v = leaves(device, gate, dtype, bias=True)
    got = whole(v, gate, backend)
    expected = halves(v, gate, backend)
    assert_same([got.topk_weight, got.topk_idx], list(expected[2:]))
    got = results(v, got)
    expected = results(v, expected)
    # dx is rounded once, not twice
    assert_parity(
        {"dx": got.pop("dx")},
        {"dx": expected.pop("dx")},
        tolerance[dtype],
    )
    assert_same(got, expected)


def test_a_loss_on_the_logits_alone_reaches_router_and_x(backend, device):
    v = leaves(device)
    loss = whole(v, "xft", backend).router_logits.square().sum()
    dx, drouter, dup = torch.autograd.grad(
        loss,
        [
            v["x"],
            v["router"],
            v["up"],
        ],
    )
    logits = v["x"] @ v["router"].t()
    expected = torch.autograd.grad(logits.square().sum(), [v["x"], v["router"]])
    torch.testing.assert_close((dx, drouter), expected)
    assert not dup.any()


def test_one_shared_expert_is_the_dense_mlp(backend, device):
    v = leaves(device, experts=1)
    out, logits, weight, idx = whole(
        v,
        "xft",
        backend,
        top_k=1,
    )
    z = v["x"] @ v["up"][0].t()
    expected = (torch.nn.functional.silu(z[:, :I]) * z[:, I:]) @ v["down"][0].t()
    torch.testing.assert_close(out, expected)
    assert logits.shape == (T, 0)
    assert (weight == 1).all()
    assert not idx.any()
    (dx,) = torch.autograd.grad(out.sum(), v["x"])
    torch.testing.assert_close(dx, torch.autograd.grad(expected.sum(), v["x"])[0])


@pytest.mark.parametrize("shared", ["group", "dense"])
def test_recompute_is_bit_equal(shared, backend, device):
    v = leaves(device, bias=True)
    expected = results(v, whole(v, "xft", backend, shared=shared))
    assert_same(
        results(
            v,
            whole(
                v,
                "xft",
                backend,
                recompute=True,
                shared=shared,
            ),
        ),
        expected,
    )


def test_dense_shared_expert_wants_the_last_slot_of_every_token():
    v = leaves("cpu", "topk_softmax")
    with pytest.raises(ValueError, match="shared='dense' requires gate to be one of"):
        whole(v, "topk_softmax", "torch", shared="dense")
    with pytest.raises(ValueError, match="shared must be .*but got 'both'"):
        whole(v, "topk_softmax", "torch", shared="both")
    idx = torch.tensor([[1, 0], [0, 2]])
    args = (v["x"][:2], v["up"], v["down"], torch.rand(2, 2), idx)
    with pytest.raises(ValueError, match="With shared='dense', topk_idx .* must have expert 0"):
        moe_mlp(*args, shared="dense")
    with pytest.raises(ValueError, match="With shared='dense', trainable must be None"):
        moe_mlp(
            *args,
            shared="dense",
            trainable=torch.ones(E, dtype=torch.bool),
        )


def module_of(**config):
    return MoE(
        MoEConfig(
            hidden_size=H,
            intermediate_size=I,
            num_experts=E,
            top_k=K,
            initializer_range=0.3,
            **config,
        )
    )


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of the fused op."""
    count = []

    def counted(*args, **options):
        count.append(1)
        return moe_layer(*args, **options)

    monkeypatch.setattr(moe, "moe_layer", counted)
    return count


def test_the_module_runs_as_one_op_unless_a_hook_looks_inside(calls):
    module = module_of(bias=True)
    x = torch.randn(2, 5, H)
    expected = module(x)
    assert len(calls) == 1
    seen = []
    handle = module.gate.register_forward_hook(lambda _, __, output: seen.append(output.topk_idx))
    assert torch.equal(module(x), expected)
    assert len(seen) == 1
    assert len(calls) == 1
    handle.remove()
    for watched in (module.gate, module.experts):
        handle = watched.register_full_backward_hook(lambda *_: seen.append("backward"))
        module(x.clone().requires_grad_()).sum().backward()
        handle.remove()
    assert seen[1:] == ["backward"] * 2
    assert len(calls) == 1


def test_a_hook_of_all_modules_sees_every_part(calls):
    module = module_of()
    names = []

    def note(module, *_):
        names.append(type(module).__name__)

    handle = torch.nn.modules.module.register_module_forward_hook(note)
    module(torch.randn(2, 5, H))
    handle.remove()
    assert names == ["Router", "Experts", "MoE"]
    assert not calls


def test_a_forward_that_something_wrapped_runs(calls):
    module = module_of()
    module.experts.forward = module.experts.forward  # as accelerate's offloading wraps it
    module(torch.randn(2, 5, H))
    assert not calls


@pytest.mark.parametrize(
    "config", [{"router": "mlp"}, {"noisy_gate": True}], ids=["mlp router", "noise"]
)
def test_other_routers_go_through_their_own_forward(config, calls):
    module = module_of(**config)
    module(torch.randn(5, H))
    assert not calls
    module.eval()(torch.randn(5, H))
    assert len(calls) == ("noisy_gate" in config)


def test_a_router_in_float32_stays_there(calls):
    module = module_of().bfloat16()
    module.gate.float()
    with pytest.raises(RuntimeError):  # the router's own matmul needs x in its dtype
        module(torch.randn(5, H).bfloat16())
    assert not calls
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.randn(5, H)).dtype == torch.bfloat16
    assert len(calls) == 1
