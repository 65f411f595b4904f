"""Pack the experts of a model in 4 bits and train LoRA on them, without unpacking a stack."""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import OlmoeConfig, OlmoeForCausalLM

import moe_runtime
from text import batches

torch.manual_seed(0)
# a real model:
# model = moe_runtime.load_quantized("allenai/OLMoE-1B-7B-0924", "nf4", dtype="bfloat16")
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
