"""PEFT's adapters of expert stacks in transformers' Trainer and in TRL: SFT, DPO with the reference
by disabled adapters.
"""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

import moe_runtime
from papers.engine.tiny import train_tokenizer
from tests.hf import tiny
from tests.support.stock_moe import stock

TEXTS = ["Write 1: x = 1", "Write 2: x = 2", "Say no", "Say yes"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 3, 270)


def trained(kind: str, implementation: str, tokenizer, folder):
    """Train three steps; return the logged losses and the adapters."""
    model = stock(vocab_size=len(tokenizer), num_hidden_layers=1).eval()
    model.set_experts_implementation("eager")
    if implementation == "moe_runtime":
        moe_runtime.patch(model)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    lora = LoraConfig(
        r=2, target_parameters=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    model = model if kind == "dpo" else get_peft_model(model, lora)
    common = {
        "output_dir": str(folder / f"{kind}-{implementation}"),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "seed": 0,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": kind == "sft",
    }
    if kind == "trainer":
        from transformers import Trainer, TrainingArguments

        ids = [{"input_ids": (ids := tokenizer("Write 1: x = 1")["input_ids"]), "labels": ids}] * 6
        trainer = Trainer(model, TrainingArguments(**common), train_dataset=Dataset.from_list(ids))
    elif kind == "sft":
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_list([{"text": text} for text in TEXTS * 2])
        trainer = SFTTrainer(
            model,
            SFTConfig(**common, max_length=16),
            train_dataset=data,
            processing_class=tokenizer,
        )
    else:
        from trl import DPOConfig, DPOTrainer

        data = Dataset.from_list(
            [{"prompt": "Say ", "chosen": text, "rejected": "no x"} for text in TEXTS * 2]
        )
        args = DPOConfig(**common)
        trainer = DPOTrainer(
            model, args=args, train_dataset=data, processing_class=tokenizer, peft_config=lora
        )
        assert trainer.ref_model is None
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {
        name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo"])
def test_equals_pefts_own(kind, tokenizer, tmp_path):
    losses, want = trained(kind, "eager", tokenizer, tmp_path)
    got_losses, got = trained(kind, "moe_runtime", tokenizer, tmp_path)
    assert len(losses) == 3
    assert got_losses == pytest.approx(losses, rel=1e-3)
    assert got.keys() == want.keys()
    assert len(want) == 4
    tiny.assert_close(got, want, 0.001)
