"""EWA's layer: the partition it draws, the experts it trains, the mean it runs, and what repeats
it.
"""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_runtime.config import MoEConfig
from moe_runtime.modules.ewa import EWAMLP, random_partition
from tests.support.oracle import assert_parity, mlp


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


def expert(layer: EWAMLP, x: torch.Tensor, weights) -> torch.Tensor:
    """One dense MLP in float64, token by token."""
    up = layer.experts.up_name
    config = layer.config
    args = (
        weights[up],
        weights["down_proj"],
        weights.get(f"{up}_bias"),
        weights.get("down_proj_bias"),
    )
    return torch.stack([mlp(t, *args, config.hidden_act, config.gated) for t in x.double()])


VARIANTS = [
    pytest.param({}, id="gated"),
    pytest.param({"bias": True, "gated": False, "hidden_act": "gelu"}, id="biases, no gate"),
    pytest.param({"E": 1}, id="E = 1"),
    pytest.param({"E": 7, "bias": True}, id="E does not divide the tokens"),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_while_training_each_token_is_seen_by_its_expert_alone(variant, tolerance):
    layer = make(**variant).train()
    x = torch.randn(13, 33)
    E = layer.config.num_experts
    torch.manual_seed(7)
    idx = random_partition(13, E)
    want = torch.empty(13, 33, dtype=torch.float64)
    for e in range(E):
        weights = {name: p.detach()[e].double() for name, p in layer.experts.named_parameters()}
        if (idx == e).any():
            want[idx == e] = expert(layer, x[idx == e], weights)
    torch.manual_seed(7)
    assert_parity({"out": layer(x)}, {"out": want}, tolerance[torch.float32])


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_eval_mode_the_mean_expert_runs_and_follows_every_write(variant, tolerance):
    layer = make(**variant).eval()
    x = torch.randn(2, 5, 33)
    for _ in range(2):
        mean = {name: p.detach().double().mean(0) for name, p in layer.experts.named_parameters()}
        want = expert(layer, x.flatten(0, 1), mean).view(2, 5, 33)
        assert_parity({"out": layer(x)}, {"out": want}, tolerance[torch.float32])
        for p in layer.parameters():
            p.data.add_(torch.randn_like(p))  # which autograd's version counter does not see


@pytest.mark.parametrize("tokens, E", [(64, 8), (13, 4), (3, 8), (0, 3), (5, 1)])
def test_partition_is_equal_but_for_one_token(tokens, E):
    idx = random_partition(tokens, E)
    count = torch.bincount(idx, minlength=E)
    assert idx.dtype == torch.int32 and idx.shape == (tokens,)
    assert count.sum() == tokens and count.max() - count.min() <= 1


def test_partition_favours_no_token_and_no_expert():
    # one expert gets two tokens
    tokens = 5
    E = 4
    draws = 4000
    found = torch.stack([random_partition(tokens, E) for _ in range(draws)])
    share = torch.stack([(found == e).double().mean(0) for e in range(E)])
    torch.testing.assert_close(
        share, torch.full((E, tokens), 1 / E, dtype=torch.float64), rtol=0, atol=0.03
    )
    twice = torch.stack([((found == e).sum(1) == 2).double().mean() for e in range(E)])
    torch.testing.assert_close(
        twice, torch.full((E,), 1 / E, dtype=torch.float64), rtol=0, atol=0.03
    )
    together = (found[:, 0] == found[:, 1]).double().mean().item()  # 1 pair of 10
    assert together == pytest.approx(0.1, abs=0.02)


def test_a_seed_repeats_it_and_batches_differ():
    layer = make().train()
    x = torch.randn(16, 33)
    torch.manual_seed(1)
    first = layer(x)
    second = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first) and not torch.equal(first, second)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_draws_the_same_partition(use_reentrant):
    layer = make(bias=True).train()
    other = copy.deepcopy(layer)
    x = torch.randn(3, 5, 33)
    grads = []
    for model, run in (
        (layer, lambda t: layer(t)),
        (other, lambda t: checkpoint(other, t, use_reentrant=use_reentrant)),
    ):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        (run(leaf) * torch.arange(33)).sum().backward()
        grads.append([leaf.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_every_expert_trains_and_the_sum_of_their_gradients_is_the_dense_ones():
    layer = make()
    x = torch.randn(16, 33)
    dout = torch.randn(16, 33)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(p[:1].expand_as(p))
    found = [
        torch.autograd.grad(layer.train(mode)(x), list(layer.parameters()), dout)
        for mode in (True, False)
    ]
    for random, mean in zip(*found, strict=True):
        assert all(part.abs().sum() > 0 for part in random)
        torch.testing.assert_close(random.sum(0), mean.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(33,), (0, 33), (7, 33), (2, 0, 33), (2, 3, 5, 33)], ids=str)
def test_any_leading_shape(shape, training):
    assert make().train(training)(torch.randn(shape)).shape == shape


@pytest.mark.parametrize("training", [True, False])
def test_dtypes_and_autocast(training):
    for dtype in (torch.bfloat16, torch.float64):
        assert make(dtype=dtype).train(training)(torch.randn(4, 33, dtype=dtype)).dtype == dtype
    layer = make().train(training)
    x = torch.randn(7, 33)
    torch.manual_seed(0)
    want = layer(x)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert_parity({"out": out}, {"out": want}, 3e-2)
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_state_dict_round_trip():
    a = make(bias=True).eval()
    b = make(bias=True).eval()
    b.load_state_dict(a.state_dict())
    x = torch.randn(3, 33)
    assert torch.equal(a(x), b(x)) and set(a.state_dict()) == {
        f"experts.{n}" for n, _ in a.experts.named_parameters()
    }


def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    layer = make().train()
    x = torch.randn(7, 33)
    torch.manual_seed(0)
    got = torch.compile(layer, fullgraph=True, backend="eager")(x)
    torch.manual_seed(0)
    torch.testing.assert_close(got, layer(x))
