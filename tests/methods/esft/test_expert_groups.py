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
    assert type(model) is DeepseekV2ForCausalLM and list(numbered_layers(model)) == [1, 2]
    layer = numbered_layers(model)[1]
    assert block_of(model, layer).gate.weight.std() > 0
    assert model.config.num_experts == E and model.config.num_experts_per_tok == K


def test_groups_of_one_are_the_router_itself(model):
    with torch.no_grad():
        before = model(IDS).logits
        handles = group_routing(model, {layer: [(e,) for e in range(E)] for layer in (1, 2)})
        assert (model(IDS).logits - before).abs().max() < 1e-6
        for handle in handles:
            handle.remove()
        assert torch.equal(model(IDS).logits, before)


def test_the_best_groups_are_taken_whole_with_their_mean_gate(model):
    group_routing(model, {1: PAIRS, 2: [(0, 1), (2, 3), (4, 5), (6, 7)]})
    router = block_of(model, numbered_layers(model)[1]).gate
    x = torch.randn(7, 32)
    logits, weights, ids = router(x)
    gates = logits.double().softmax(-1)
    for t in range(7):
        means = sorted(
            ((gates[t, list(pair)].mean().item(), pair) for pair in PAIRS), reverse=True
        )[: K // 2]
        assert [tuple(pair) for pair in ids[t].view(-1, 2).tolist()] == [pair for _, pair in means]
        assert weights[t].tolist() == pytest.approx(
            [mean for mean, _ in means for _ in range(2)], rel=1e-5
        )
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    model(IDS, labels=IDS).loss.backward()
    assert router.weight.grad.abs().sum() > 0


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
    router = block_of(model, numbered_layers(model)[1]).gate
    router.register_forward_hook(
        lambda module, args, out: (out[0], out[1] / out[1].sum(-1, keepdim=True), out[2])
    )
    group_routing(model, {1: PAIRS, 2: PAIRS})
    with pytest.raises(
        ValueError,
        match="weights that are the logits' softmax, as required: use a router like DeepSeek-V2's",
    ):
        model(IDS)
