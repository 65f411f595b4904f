"""Pack the experts of a model in 4 bits and train LoRA on them, without unpacking a stack."""

import argparse

import torch
from peft import LoraConfig, get_peft_model

import moe_runtime
from small import batches, moe_model

torch.manual_seed(0)
# a real model:
# model = moe_runtime.load_quantized("allenai/OLMoE-1B-7B-0924", "nf4", dtype="bfloat16")
model = moe_model()
moe_runtime.quantize_experts(model, "nf4")  # prints the bytes before and after
lora = LoraConfig(
    r=8, lora_alpha=16, target_parameters=["experts.gate_up_proj", "experts.down_proj"]
)
model = get_peft_model(model, lora)
model.print_trainable_parameters()

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step, ids in enumerate(batches(argparse, 60)):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == 59:
        print(f"step {step}: loss {loss:.3f}")
model.save_pretrained("runs/qlora-adapter")  # the adapter alone
