"""Train LoRA on the experts of a stock MoE model, save the adapter, and merge it."""

import argparse

import torch
from peft import LoraConfig, get_peft_model

import moe_runtime
from small import batches, moe_model

torch.manual_seed(0)
# a real model:
# model = AutoModelForCausalLM.from_pretrained("allenai/OLMoE-1B-7B-0924", dtype=torch.bfloat16)
model = moe_model()
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
