"""The benchmarks' official form of an XFT layer: the function and the gradients of our layer, and
of the tests' formulas.
"""

import pytest
import torch

from moe_runtime.bench import bench_xft, shapes
from moe_runtime.bench.official import OfficialBlock
from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import MoE
from tests.support import official_xft
from tests.support.oracle import relative_error

H = 24
I = 40
T = 33


def layer(router: str = "linear", num_experts: int = 6, top_k: int = 4, **settings) -> MoE:
    torch.manual_seed(0)
    moe = MoE(
        MoEConfig(
            hidden_size=H,
            intermediate_size=I,
            num_experts=num_experts,
            top_k=top_k,
            router=router,
            **settings,
        )
    )
    with torch.no_grad():
        for weight in moe.parameters():
            weight.normal_(0, 0.3)
    return moe


@pytest.mark.parametrize("router", ["linear", "mlp"])
@pytest.mark.parametrize("num_experts, top_k", [(6, 4), (6, 6), (4, 2)])
def test_is_our_layer_with_every_gradient(router, num_experts, top_k):
    moe = layer(router, num_experts, top_k)
    official = OfficialBlock(moe)
    x = torch.randn(3, T // 3, H, requires_grad=True)
    dout = torch.randn_like(x)
    want = moe(x)
    got = official(x)
    assert relative_error(got, want) < 2e-6
    router_leaves = list(moe.gate.parameters())
    stacks = [moe.experts.gate_up_proj, moe.experts.down_proj]
    parts = [*official.weight_gate, *official.weight_up, *official.weight_down]
    want = torch.autograd.grad(want, [x, *router_leaves, *stacks], dout)
    got = torch.autograd.grad(got, [x, *router_leaves, *parts], dout)
    n = 1 + len(router_leaves)
    gate, up, down = (
        torch.stack(got[n + i * num_experts : n + (i + 1) * num_experts]) for i in range(3)
    )
    for ours, theirs in zip(want, [*got[:n], torch.cat([gate, up], 1), down], strict=True):
        assert relative_error(theirs, ours) < 1e-5


def test_is_what_the_formulas_of_the_released_code_say():
    moe = layer("mlp")
    x = torch.randn(T, H)
    gate, up = moe.experts.gate_up_proj.detach().chunk(2, 1)
    own = {
        "mlp.gate.gate_network.0.weight": moe.gate.weight.detach(),
        "mlp.gate.gate_network.2.weight": moe.gate.weight_out.detach(),
    }
    for kind, stack in zip(official_xft.KINDS, (gate, up, moe.experts.down_proj.detach())):
        own |= {f"mlp.calculator.experts.{kind}.{e}.weight": stack[e] for e in range(6)}
    values = official_xft.VALUES | {"num_experts": 6, "num_selects": 4, "gate_add_noise": False}
    want, balance = official_xft.moe(values, own, x, None)
    block = OfficialBlock(moe)
    with torch.no_grad():
        assert relative_error(block(x), want) < 2e-6
    cv2 = official_xft.cv2(block.importance) + official_xft.cv2(block.load.float())
    assert values["gate_balance_loss_weight"] * cv2.item() == pytest.approx(
        balance.item(), rel=1e-5
    )


def test_an_expert_without_tokens_and_shared_storage():
    moe = layer()
    with torch.no_grad():
        moe.gate.weight.copy_(torch.tensor([3.0, 2.0, 1.0, -1.0, -2.0])[:, None].expand(-1, H))
    official = OfficialBlock(moe)
    x = torch.rand(T, H)
    assert (official.route(x)[0] == torch.tensor([1, 2, 3, 0])).all()
    assert relative_error(official(x), moe(x)) < 2e-6
    with torch.no_grad():
        official.weight_up[2].fill_(7.0)
    assert (moe.experts.gate_up_proj[2, I:] == 7.0).all()


def test_refuses_what_it_does_not_compute():
    with pytest.raises(ValueError, match="must have gate='xft'"):
        OfficialBlock(layer(noisy_gate=True))


def test_a_tuning_step_computes_the_same_whoever_runs_the_layers():
    losses = {}
    moved = {}
    averages = {}
    for name in bench_xft.Tuned(shapes.TUNING_TINY["tiny"], torch.float32).blocks:
        tuned = bench_xft.Tuned(shapes.TUNING_TINY["tiny"], torch.float32)
        parameters = dict(tuned.model.named_parameters())
        before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
        losses[name] = tuned.step_of(name)().item()
        moved[name] = {
            key: parameter.detach() - before[key] for key, parameter in parameters.items()
        }
        states = tuned.optimizers["moe_runtime"].state
        averages[name] = {
            key: states[parameter]["exp_avg"] for key, parameter in parameters.items()
        }
    assert len(losses) == 4
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["moe_runtime"], rel=1e-6), name
        for key, want in moved["moe_runtime"].items():
            assert want.abs().max() > 0, key
            assert relative_error(averages[name][key], averages["moe_runtime"][key]) < 1e-4, (
                name,
                key,
            )
            # the first step of AdamW is the gradient's sign, which rounding turns where it is about
            # zero
            assert relative_error(moved[name][key], want) < 0.1, (name, key)
