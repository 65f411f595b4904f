"""EWA's layer: the partition that it draws, the experts that it trains, the mean that it runs, and
recomputation.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_runtime.config import MoEConfig
from moe_runtime.modules.ewa import EWAMLP, random_partition
from tests.support.layer import dense_mlp
from tests.support.oracle import assert_parity


def make(E=4, H=33, I=17, dtype=None, **kwargs) -> EWAMLP:
    config = MoEConfig(
        hidden_size=H,
        intermediate_size=I,
        num_experts=E,
        top_k=1,
        gate="topk_softmax",
        initializer_range=0.3,
        **kwargs,
    )
    layer = EWAMLP(config, dtype=dtype)
    with torch.no_grad():
        for name, weight in layer.experts.named_parameters():
            if name.endswith("_bias"):
                weight.normal_()
    return layer


VARIANTS = [
    pytest.param({}, id="gated"),
    pytest.param(
        {"bias": True, "gated": False, "hidden_act": "gelu"},
        id="biases, no gate",
    ),
    pytest.param({"E": 1}, id="E = 1"),
    pytest.param({"E": 7, "bias": True}, id="E does not divide the tokens"),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_while_training_each_token_is_seen_by_its_expert_alone(variant, tolerance):
    layer = make(**variant).train()
    x = torch.randn(13, 33)
    torch.manual_seed(7)
    idx = random_partition(13, layer.config.num_experts)
    expected = torch.empty(13, 33, dtype=torch.float64)
    for e in range(layer.config.num_experts):
        weights = {name: p.detach()[e].double() for name, p in layer.experts.named_parameters()}
        expected[idx == e] = dense_mlp(
            layer,
            weights,
            x[idx == e],
        )
    torch.manual_seed(7)
    assert_parity(
        {"out": layer(x)},
        {"out": expected},
        tolerance[torch.float32],
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_eval_mode_the_mean_expert_runs_and_follows_every_write(variant, tolerance):
    layer = make(**variant).eval()
    x = torch.randn(2, 5, 33)
    for _ in range(2):
        mean = {name: p.detach().double().mean(0) for name, p in layer.experts.named_parameters()}
        expected = dense_mlp(layer, mean, x)
        assert_parity(
            {"out": layer(x)},
            {"out": expected},
            tolerance[torch.float32],
        )
        for p in layer.parameters():
            p.data.add_(torch.randn_like(p))  # a write that autograd's version counter does not see


def test_partition_favours_no_token_and_no_expert():
    # one of the four experts gets two of the five tokens
    drawn = torch.stack([random_partition(5, 4) for _ in range(4000)])
    chosen = torch.nn.functional.one_hot(
        drawn.long(),
        4,
    ).double()  # [draws, tokens, experts]
    quarter = torch.full(
        (5, 4),
        0.25,
        dtype=torch.float64,
    )
    torch.testing.assert_close(
        chosen.mean(0),
        quarter,
        rtol=0,
        atol=0.03,
    )
    has_two = (chosen.sum(1) == 2).double().mean(0)
    torch.testing.assert_close(
        has_two,
        quarter[0],
        rtol=0,
        atol=0.03,
    )
    is_pair = (drawn[:, 0] == drawn[:, 1]).double().mean().item()
    assert is_pair == pytest.approx(0.1, abs=0.02)  # 1 pair of 10


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_draws_the_same_partition(use_reentrant):
    layer = make(bias=True).train()
    x = torch.randn(3, 5, 33)

    def gradients(run):
        torch.manual_seed(3)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        (run(leaf) * torch.arange(33)).sum().backward()
        return [leaf.grad, *(p.grad for p in layer.parameters())]

    expected = gradients(layer)
    result = gradients(lambda t: checkpoint(layer, t, use_reentrant=use_reentrant))
    for a, b in zip(result, expected, strict=True):
        assert torch.equal(a, b)


def test_every_expert_trains_and_the_sum_of_their_gradients_is_the_dense_ones():
    layer = make()
    x = torch.randn(16, 33)
    dout = torch.randn(16, 33)
    parameters = list(layer.parameters())
    with torch.no_grad():
        for p in parameters:
            p.copy_(p[:1].expand_as(p))
    by_experts = torch.autograd.grad(
        layer.train()(x),
        parameters,
        dout,
    )
    by_the_mean = torch.autograd.grad(
        layer.eval()(x),
        parameters,
        dout,
    )
    for divided, mean in zip(by_experts, by_the_mean, strict=True):
        assert divided.flatten(1).any(1).all()
        torch.testing.assert_close(
            divided.sum(0),
            mean.sum(0),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("training", [True, False])
def test_dtypes_and_autocast(training):
    for dtype in (torch.bfloat16, torch.float64):
        assert make(dtype=dtype).train(training)(torch.randn(4, 33, dtype=dtype)).dtype == dtype
    layer = make().train(training)
    x = torch.randn(7, 33)
    torch.manual_seed(0)
    expected = layer(x)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert_parity({"out": out}, {"out": expected}, 3e-2)
    out.float().square().sum().backward()
    for p in layer.parameters():
        assert p.grad.dtype == torch.float32
        assert p.grad.any()
