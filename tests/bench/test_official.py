"""The benchmarks' official form of an XFT layer: its function and gradients equal those of our
layer and of the tests' formulas.
"""

import pytest
import torch

from moe_runtime.bench.official import OfficialBlock
from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import MoE
from tests.support.oracle import relative_error

H = 24
I = 40
T = 33


def layer(router: str = "linear", num_experts: int = 6, top_k: int = 4, **settings) -> MoE:
    torch.manual_seed(0)
    settings |= {
        "hidden_size": H,
        "intermediate_size": I,
        "router": router,
    }
    moe = MoE(
        MoEConfig(
            num_experts=num_experts,
            top_k=top_k,
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
    x = torch.randn(
        3,
        T // 3,
        H,
        requires_grad=True,
    )
    dout = torch.randn_like(x)
    ours = moe(x)
    theirs = official(x)
    assert relative_error(theirs, ours) < 2e-6
    leaves = [x, *moe.gate.parameters()]
    parts = [
        *official.weight_gate,
        *official.weight_up,
        *official.weight_down,
    ]
    stacks = [moe.experts.gate_up_proj, moe.experts.down_proj]
    dours = torch.autograd.grad(ours, [*leaves, *stacks], dout)
    dtheirs = torch.autograd.grad(theirs, [*leaves, *parts], dout)
    n = len(leaves)
    dgate = torch.stack(dtheirs[n : n + num_experts])
    dup = torch.stack(dtheirs[n + num_experts : n + 2 * num_experts])
    ddown = torch.stack(dtheirs[n + 2 * num_experts :])
    joined = [*dtheirs[:n], torch.cat([dgate, dup], 1), ddown]
    for one, other in zip(dours, joined, strict=True):
        assert relative_error(other, one) < 1e-5
