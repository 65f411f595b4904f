"""Run a stock MoE model on moe_runtime: the same logits, in less time."""

import argparse
import time

import torch

import moe_runtime
from small import batches, moe_model

torch.manual_seed(0)
# a real model:
# moe_runtime.register()
# model = AutoModelForCausalLM.from_pretrained(
#     "allenai/OLMoE-1B-7B-0924", dtype=torch.bfloat16, experts_implementation="moe_runtime"
# )
model = moe_model(hidden_size=256, intermediate_size=256, num_hidden_layers=4).eval()
(ids,) = batches(argparse, 1)


def timed(name: str) -> torch.Tensor:
    """Print the milliseconds of the fastest of five forward passes, and return the logits."""
    seconds = []
    with torch.no_grad():
        for _ in range(5):
            start = time.perf_counter()
            logits = model(ids).logits
            seconds.append(time.perf_counter() - start)
    print(f"{name}: {1000 * min(seconds):.1f} ms")
    return logits


stock = timed("transformers")
moe_runtime.patch(model)
ours = timed("moe_runtime")
print(f"largest difference of the logits: {(ours - stock).abs().max():.1e}")
