"""See how a model's routers use its experts, and run it with a routing that was recorded."""

import argparse

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

import moe_runtime
from moe_runtime.hf.dropin.replay import record_routing, replay_routing
from moe_runtime.hf.dropin.stats import collect_router_stats
from text import batches

torch.manual_seed(0)
# a real model:
# model = AutoModelForCausalLM.from_pretrained("allenai/OLMoE-1B-7B-0924", dtype=torch.bfloat16)
config = OlmoeConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    eos_token_id=None,
    pad_token_id=None,
)
model = OlmoeForCausalLM(config).eval()
moe_runtime.patch(model)
texts = batches(argparse, 4)
stats = collect_router_stats(model, [{"input_ids": ids} for ids in texts])
for layer, counts in zip(stats.layers, stats.counts):
    share = counts / counts.sum()
    print(f"layer {layer}: an expert gets {share.min():.0%} to {share.max():.0%} of the slots")

with torch.no_grad():
    with record_routing(model) as record:
        expected = model(texts[0]).logits
    with torch.autocast("cpu", torch.bfloat16):  # rounding alone would choose other experts
        free = model(texts[0]).logits
        with replay_routing(model, record):
            replayed = model(texts[0]).logits
print(f"bfloat16 against float32: {(free - expected).abs().max():.3f}")
print(f"the same with the recorded experts: {(replayed - expected).abs().max():.3f}")
