"""Upcycle a dense model to experts, tune it, and merge it to a dense model of the base's class."""

import argparse
import textwrap

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moe_runtime.methods import xft
from small import batches

torch.manual_seed(0)
# a real model: model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    eos_token_id=None,
    pad_token_id=None,
    bos_token_id=None,
)
model = LlamaForCausalLM(config)


def train(model: torch.nn.Module, steps: list[torch.Tensor], rate: float) -> None:
    """Train the parameters that require a gradient."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    for ids in steps:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def report(name: str, model: torch.nn.Module) -> None:
    """Print a model's loss on the last batch, which is not trained on."""
    with torch.no_grad():
        loss = model(input_ids=held_out, labels=held_out).loss
    print(f"{name}, a {type(model).__name__}: loss {loss:.3f}")


*tuning, held_out = batches(argparse, 61)
train(model, batches(textwrap, 60), 3e-3)
report("pre-trained", model)
print(xft.upcycle(model, num_experts=4, top_k=2))  # in place; compares the logits
train(model, tuning, 1e-3)
report("tuned", model)
xft.to_mergeable(model, shared_rate=0.25)  # from here on only the mixing logits train
train(model, tuning[:10], 1e-2)
dense = xft.merge(model)  # a model of the base's own class
report("merged", dense)
xft.save_dense(dense, "runs/xft-dense", overwrite=True)  # for any engine that runs the base
