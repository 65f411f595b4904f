"""methods.lora: tuned LoRA is grown to experts, tuned by Trainer, resumed and merged back, in
memory and in folders.
"""

import copy

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from moe_runtime.hf.training.fit import pair_collator
from moe_runtime.hf.training.trainer import MoETrainer
from moe_runtime.io.rows import tokenize_pairs
from moe_runtime.methods.xft import baselines
from papers.engine.tiny import train_tokenizer
from tests.hf import tiny
from tests.support.checkpoints import assert_equal

datasets.disable_progress_bars()
ROWS = [
    {"prompt": f"add {i} to {j}:\n", "completion": f"{i + j} is it" + "!" * i}
    for i in range(4)
    for j in range(2)
]
TOKENIZER = train_tokenizer(
    [row["prompt"] + row["completion"] for row in ROWS],
    280,
)


def trainer(model, folder, **settings) -> MoETrainer:
    args = TrainingArguments(
        str(folder),
        **{"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2} | settings,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = tokenize_pairs(
        TOKENIZER,
        datasets.Dataset.from_list(ROWS),
        64,
    )
    return MoETrainer(
        model,
        args,
        pair_collator(TOKENIZER),
        rows,
        None,
        TOKENIZER,
    )


def dense():
    return tiny.dense(vocab_size=len(TOKENIZER))


def trained(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_a_tuned_lora_grows_to_experts_that_train_and_resume(tmp_path):
    adapted = baselines.to_lora(dense(), rank=3, alpha=6.0, seed=1)
    for name, p in adapted.named_parameters():
        is_pair = "lora_" in name
        assert p.requires_grad == is_pair
        assert ".mlp." in name or not is_pair
    trainer(adapted, tmp_path / "sft", max_steps=2, save_strategy="no").train()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    expected = tiny.logits(adapted)
    assert (
        tiny.distance(
            expected,
            tiny.logits(dense()),
        )
        > 1e-3
    )

    settings = {"top_k": 2, "balance_loss": "switch", "balance_loss_coef": 0.1}
    experts = [tmp_path / "adapter"] * 3
    model = baselines.to_lora_moe(dense(), experts=experts, **settings)
    assert tiny.distance(tiny.logits(model), expected) < 1e-5  # equal experts
    fresh = copy.deepcopy(model)
    before = trained(model)
    whole = trainer(model.train(), tmp_path / "moe")
    whole.train()
    logs = [entry for entry in whole.state.log_history if "lm_loss" in entry]
    assert len(logs) == 4
    for entry in logs:
        assert entry["loss"] == pytest.approx(
            entry["lm_loss"] + entry["balance_loss"],
            abs=1e-3,
        )
    assert "router" in str(logs[0])  # the statistics see its routers
    for name, value in trained(model).items():
        assert not torch.equal(value, before[name])

    again = trainer(fresh.train(), tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "moe" / "checkpoint-2"))
    assert_equal(trained(fresh), trained(model))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "moe" / "checkpoint-4")
    assert torch.equal(
        tiny.logits(loaded),
        tiny.logits(model),
    )
