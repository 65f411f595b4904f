"""Train LoRA on the experts of a stock MoE model, save the adapter, and merge it."""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import OlmoeConfig, OlmoeForCausalLM

import moe_runtime
from text import batches

torch.manual_seed(0)
# a real model:
# model = AutoModelForCausalLM.from_pretrained("allenai/OLMoE-1B-7B-0924", dtype=torch.bfloat16)
config = OlmoeConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_experts=16,
    num_experts_per_tok=4,
    eos_token_id=None,
    pad_token_id=None,
)
model = OlmoeForCausalLM(config)
moe_runtime.patch(model)
lora = LoraConfig(
    r=8, lora_alpha=16, target_parameters=["experts.gate_up_proj", "experts.down_proj"]
)
model = get_peft_model(model, lora)
model.print_trainable_parameters()

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step, ids in enumerate(batches(argparse, 80)):  # or transformers' Trainer, or TRL's SFTTrainer
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == 79:
        print(f"step {step}: loss {loss:.3f}")

model.save_pretrained("runs/lora-adapter")  # PEFT's files
model = model.merge_and_unload()
with torch.no_grad():
    print(f"merged: loss {model(input_ids=ids, labels=ids).loss:.3f}")
