"""A rank of tests/methods/lora/test_lora.py: LoRA experts under DDP; arguments OUT."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.hf import tiny
from tests.support.lora_models import lora_model

torch.set_num_threads(1)


def make():
    """The model, the same in every process."""
    return lora_model().train()


def train(model, ids: torch.Tensor) -> dict:
    """Run three steps of AdamW on `ids`; return the losses and the trained parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = {}
    for n, p in model.named_parameters():
        if p.requires_grad:
            weights[n.removeprefix("module.")] = p.detach()
    return {"losses": losses, "weights": weights}


def main(out: str) -> None:
    rank = dist.get_rank()
    found = train(
        DistributedDataParallel(make()),
        tiny.batch(4)[2 * rank : 2 * rank + 2],
    )
    torch.save(found, f"{out}/{os.environ['RANK']}.pt")
