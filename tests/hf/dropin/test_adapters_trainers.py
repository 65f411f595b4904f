"""PEFT's adapters of expert stacks in TRL's DPO, whose reference is the model without them. Trainer
and SFT are in test_layers.py.
"""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

import moe_runtime
from papers.engine.tiny import train_tokenizer
from tests.hf import tiny
from tests.support.stock_moe import stock

TEXTS = ["Write 1: x = 1", "Write 2: x = 2", "Say no", "Say yes"]


def trained(implementation: str, tokenizer, folder):
    """Train three steps of DPO; return the logged losses and the adapters."""
    model = stock(vocab_size=len(tokenizer), num_hidden_layers=1).eval()
    model.set_experts_implementation("eager")
    if implementation == "moe_runtime":
        moe_runtime.patch(model)
    lora = LoraConfig(
        r=2,
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    args = DPOConfig(
        str(folder / implementation),
        max_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-2,
        save_strategy="no",
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    rows = []
    for text in TEXTS * 2:
        rows.append({"prompt": "Say ", "chosen": text, "rejected": "no x"})
    torch.manual_seed(0)
    trainer = DPOTrainer(
        model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )
    assert trainer.ref_model is None
    trainer.train()
    losses = []
    for entry in trainer.state.log_history:
        if "loss" in entry:
            losses.append(entry["loss"])
    adapters = {}
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            adapters[name] = p
    return losses, adapters


@pytest.mark.slow
def test_equals_pefts_own(tmp_path):
    tokenizer = train_tokenizer(TEXTS * 3, 270)
    losses, adapters = trained("eager", tokenizer, tmp_path)
    our_losses, our_adapters = trained("moe_runtime", tokenizer, tmp_path)
    assert len(losses) == 3
    assert our_losses == pytest.approx(losses, rel=1e-3)
    assert our_adapters.keys() == adapters.keys()
    assert len(adapters) == 4
    tiny.assert_close(our_adapters, adapters, 0.001)
