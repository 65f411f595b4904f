"""Train only the experts that a task's text uses, save them alone, and put them into the base."""

import argparse
import copy
import textwrap

import torch

import moe_runtime
from moe_runtime.methods import esft
from small import batches, moe_model

torch.manual_seed(0)
# a real model:
# model = AutoModelForCausalLM.from_pretrained("allenai/OLMoE-1B-7B-0924", dtype=torch.bfloat16)
model = moe_model(intermediate_size=64, num_experts=32)
moe_runtime.patch(model)
base = copy.deepcopy(model)
task = batches(argparse, 60)
general = batches(textwrap, 4)


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Return a model's loss on one batch."""
    with torch.no_grad():
        return model(ids, labels=ids).loss.item()


scores = esft.score_experts(model, task, n_tokens=8192)
selection = esft.select_experts(scores, score="token", experts_per_layer=6)
print(esft.train_only(model, selection))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for ids in task:  # or any trainer
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
esft.save_adapter(model, "runs/esft-adapter", overwrite=True)  # the selected experts alone

for name, ids in {"task": task[-1], "other text": general[0]}.items():
    print(f"{name}: loss {loss_of(base, ids):.3f} before, {loss_of(model, ids):.3f} after")
esft.apply(base, "runs/esft-adapter")  # what a user of the adapter does
print(f"the base with the adapter: task loss {loss_of(base, task[-1]):.3f}")
