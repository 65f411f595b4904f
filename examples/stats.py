"""See how a model's routers use its experts, and run it with a routing that was recorded."""

import argparse

import torch

import moe_runtime
from moe_runtime.hf.dropin.replay import record_routing, replay_routing
from moe_runtime.hf.dropin.stats import collect_router_stats
from small import batches, moe_model

torch.manual_seed(0)
# a real model:
# model = AutoModelForCausalLM.from_pretrained("allenai/OLMoE-1B-7B-0924", dtype=torch.bfloat16)
model = moe_model().eval()
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
