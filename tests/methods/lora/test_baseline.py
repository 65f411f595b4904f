"""methods/lora/baseline.py: matrices on all linear layers and experts, equal to the base at first,
saved and loaded.
"""

import warnings

import pytest
import torch

from moe_runtime.hf.dropin import experts
from moe_runtime.methods.lora import baseline as lora_baseline
from papers.engine.tiny import small_deepseek, train_tokenizer
from tests.support.checkpoints import assert_equal

IDS = torch.arange(10, 34).view(2, 12)
RANK = 2


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two"] * 9, 270)


def model_of(tokenizer):
    model = small_deepseek(
        tokenizer,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_experts=4,
        top_k=2,
        expert_size=8,
        shared_experts=1,
        dense_layers=1,
        max_length=16,
        seed=1,
    )
    experts.patch(model)
    return model.eval()


def test_the_matrices_are_on_all_but_embeddings_and_head(tokenizer):
    base = model_of(tokenizer)
    expected = base(IDS).logits
    size = 0
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            size += module.in_features + module.out_features
    moe = base.model.layers[1].mlp.experts
    for stack in (moe.gate_up_proj, moe.down_proj):
        E, out, into = stack.shape
        size += E * (out + into)
    size += sum(base.model.layers[1].mlp.gate.weight.shape)
    model = lora_baseline.add_lora(base, RANK, 2.0)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert sum(trained.values()) == RANK * size
    for name in trained:
        assert "lora_" in name
        assert "embed" not in name
    torch.testing.assert_close(
        model(IDS).logits,
        expected,
    )  # the second matrices are zero


def test_the_seed_draws_the_matrices(tokenizer):
    def drawn(seed: int) -> dict[str, torch.Tensor]:
        state = lora_baseline.add_lora(
            model_of(tokenizer),
            RANK,
            2.0,
            seed,
        ).state_dict()
        return {name: tensor for name, tensor in state.items() if ".lora_A." in name}

    first = drawn(3)
    other = drawn(4)
    assert_equal(first, drawn(3))
    for name, tensor in first.items():
        assert not torch.equal(tensor, other[name])


def test_what_was_trained_is_read_back(tokenizer, tmp_path):
    torch.manual_seed(0)
    model = lora_baseline.add_lora(model_of(tokenizer), RANK, 2.0).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    lora_baseline.save_lora(model, tmp_path / "lora")
    base = model_of(tokenizer)
    plain = base(IDS).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        again = lora_baseline.load_lora(base, tmp_path / "lora").eval()
    assert torch.equal(
        again(IDS).logits,
        model(IDS).logits,
    )
    assert (again(IDS).logits - plain).abs().max() > 1e-3
    config = again.peft_config["default"]
    assert config.r == RANK
    assert config.lora_alpha == 2 * RANK
