"""Stock MoE models on our experts with the tools that users have: checkpointing, compile, autocast,
Trainer, TRL, PEFT.
"""

import datasets
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import moe_runtime
from moe_runtime.hf.dropin import experts
from moe_runtime.hf.training.fit import pair_collator
from papers.engine.tiny import train_tokenizer
from tests.hf import tiny
from tests.hf.tiny import distance
from tests.hf.training.test_trainer import COMMON as SETTINGS

datasets.disable_progress_bars()
TEXTS = [f"{i} and {j} make {i + j}" for i in range(6) for j in range(4)]
TOKENIZER = train_tokenizer(TEXTS, 280)
COMMON = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
MODELS = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    # transposed, interleaved, biased, clamped
    "gpt_oss": {
        "num_local_experts": 4,
        "intermediate_size": 24,
        "layer_types": ["full_attention"] * 2,
    },
}
EVERY = pytest.mark.parametrize("kind", MODELS)


def stock(kind: str = "qwen3_moe", implementation: str = "moe_runtime", **changes):
    """A tiny stock model in which every part affects the loss."""
    moe_runtime.register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **COMMON | MODELS[kind] | changes)
    model = AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            else:
                (parameter.add_(torch.randn_like(parameter) / 8))
    return model


def ids(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(
        3, len(TOKENIZER), (rows, length), generator=torch.Generator().manual_seed(2)
    )


def gradients(model, **inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (model(ids(), labels=ids(), **inputs).loss).backward()
    return tiny.gradients(model)


@pytest.fixture
def routed(monkeypatch):
    """The ids of every call of our experts function, including recomputation."""
    seen = []
    run = experts.experts_forward

    def recorded(self, hidden_states, top_k_index, top_k_weights):
        seen.append(top_k_index.clone())
        return run(self, hidden_states, top_k_index, top_k_weights)

    monkeypatch.setattr(experts, "experts_forward", recorded)
    return seen


@EVERY
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(kind, reentrant, routed):
    expected = gradients(stock(kind).train())
    routed.clear()
    model = stock(kind).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    got = gradients(model)
    tiny.assert_equal(got, expected)

    assert got.keys() == expected.keys()
    first = routed[:2]
    again = routed[2:]
    # each layer ran again with the same routing; the last layer comes first
    assert len(again) == 2
    for a, b in zip(first, reversed(again)):
        assert torch.equal(a, b)


def rows() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"text": text} for text in TEXTS])


def trained(trainer: str, model, folder, **settings):
    common = SETTINGS | {"per_device_train_batch_size": 4} | settings
    if trainer == "sft":
        args = SFTConfig(
            str(folder), **common, bf16=False, gradient_checkpointing=False, max_length=64
        )
        loop = SFTTrainer(
            model,
            args,
            train_dataset=rows(),
            processing_class=TOKENIZER,
        )
    else:
        data = []
        for text in TEXTS:
            tokens = TOKENIZER(text)["input_ids"]
            data.append({"input_ids": tokens, "labels": tokens})
        loop = Trainer(
            model, TrainingArguments(str(folder), **common), pair_collator(TOKENIZER), data
        )
    loop.train()
    values = []
    for entry in loop.state.log_history:
        if "loss" in entry:
            values.append(entry["loss"])
    return values


@EVERY
@pytest.mark.parametrize("trainer", ["trainer", "sft"])
def test_trainers_reach_the_losses_and_weights_of_eager(trainer, kind, tmp_path):
    losses = []
    states = []
    for implementation in ("eager", "moe_runtime"):
        model = stock(kind, implementation)
        losses.append(
            trained(
                trainer,
                model,
                tmp_path / implementation,
                gradient_accumulation_steps=2,
            )
        )
        states.append(model.state_dict())

    assert losses[1] == pytest.approx(losses[0], rel=2e-4)
    assert losses[0][2] < losses[0][0]
    for name, before in stock(kind).state_dict().items():
        moved = states[0][name] - before
        # Adam's first steps are signs, which differ where a gradient is nothing but rounding error
        assert moved.norm() > 0, name
        assert distance(states[1][name] - before, moved) < 2e-2, name
