"""methods/esft/recorder.py: the router chooses groups by their mean gate; groups of one change
nothing; what is refused.
"""

import pytest
import torch
from transformers import DeepseekV2ForCausalLM

from moe_runtime.hf.dropin.layers import block_of, numbered_layers
from moe_runtime.methods.esft.recorder import group_routing
from papers.engine.tiny import small_deepseek, train_tokenizer

E = 8
K = 4
PAIRS = [(0, 5), (1, 2), (3, 7), (4, 6)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two"] * 9, 270)


@pytest.fixture
def model(tokenizer):
    return small_deepseek(
        tokenizer,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_experts=E,
        top_k=K,
        expert_size=8,
        shared_experts=1,
        dense_layers=1,
        max_length=16,
        seed=1,
    ).eval()


IDS = torch.arange(10, 34).view(2, 12)


def test_the_small_model_is_a_stock_deepseek_whose_experts_differ(model):
    assert type(model) is DeepseekV2ForCausalLM
    assert list(numbered_layers(model)) == [1, 2]
    layer = numbered_layers(model)[1]
    assert block_of(model, layer).gate.weight.std() > 0
    assert model.config.num_experts == E
    assert model.config.num_experts_per_tok == K


@torch.no_grad()
def test_groups_of_one_are_the_router_itself(model):
    before = model(IDS).logits
    alone = [(e,) for e in range(E)]
    handles = group_routing(model, {1: alone, 2: alone})
    torch.testing.assert_close(
        model(IDS).logits,
        before,
        rtol=0,
        atol=1e-6,
    )
    for handle in handles:
        handle.remove()
    assert torch.equal(model(IDS).logits, before)


def test_the_best_groups_are_taken_whole_with_their_mean_gate(model):
    group_routing(
        model,
        {1: PAIRS, 2: [(0, 1), (2, 3), (4, 5), (6, 7)]},
    )
    router = block_of(model, numbered_layers(model)[1]).gate
    logits, weights, ids = router(torch.randn(7, 32))
    pairs = torch.tensor(PAIRS)
    means = logits.double().softmax(-1)[:, pairs].mean(-1)
    best, chosen = means.topk(K // 2, -1)
    assert torch.equal(ids, pairs[chosen].flatten(1))
    expected = best.repeat_interleave(2, 1).float()
    torch.testing.assert_close(
        weights,
        expected,
        rtol=1e-5,
        atol=0,
    )
    model(IDS, labels=IDS).loss.backward()
    assert router.weight.grad.any()


@pytest.mark.parametrize(
    "groups, match",
    [
        pytest.param({1: PAIRS}, r"groups of layer 2 have the shape \(0,\)", id="a layer without"),
        pytest.param(
            {1: PAIRS[:3], 2: PAIRS},
            r"groups of layer 1 .* every expert in one group",
            id="an expert without",
        ),
        pytest.param(
            {1: [tuple(range(8))], 2: PAIRS},
            "top_k is 4, but .* a group size that divides top_k",
            id="too large",
        ),
    ],
)
def test_bad_groups_are_refused(model, groups, match):
    with pytest.raises(ValueError, match=match):
        group_routing(model, groups)


def test_a_router_with_other_weights_is_refused(model):
    def renormalize(module, args, out):
        return out[0], out[1] / out[1].sum(-1, keepdim=True), out[2]

    router = block_of(model, numbered_layers(model)[1]).gate
    router.register_forward_hook(renormalize)
    group_routing(model, {1: PAIRS, 2: PAIRS})
    with pytest.raises(ValueError, match="logits' softmax, .* use a router like DeepSeek-V2's"):
        model(IDS)
