"""A rank of tests/methods/xft/test_averaging.py: EWA under FSDP2, with stacks of each placement;
arguments OUT.
"""

import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from moe_runtime.methods.xft import baselines
from moe_runtime.modules.ewa import average_experts_
from tests.hf import tiny

torch.set_num_threads(1)
# a number that two ranks cannot share equally
EXPERTS = 3
STEPS = 3


def train(model, ids: torch.Tensor) -> None:
    """Run three steps of AdamW with an increasing share; partitions are drawn from the same seed
    everywhere.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    averaging = baselines.average_after_steps(
        model, optimizer, share=0.6, schedule="linear", total_steps=STEPS
    )
    torch.manual_seed(5)
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert averaging.step == STEPS


def make():
    """The model, the same in every process, with distinct experts."""
    model = tiny.dense("llama")
    baselines.to_ewa(model, num_experts=EXPERTS)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.add_(
                    torch.randn(
                        parameter.shape,
                        generator=generator,
                    )
                    / 8
                )
    return model


def stacks() -> dict[str, torch.Tensor]:
    """Return a stack after one step, by placement."""
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(3))
    found = {}
    for name, placement in {
        "experts": Shard(0),
        "columns": Shard(2),
        "copies": Replicate(),
    }.items():
        for dtype in (torch.float32, torch.bfloat16):
            stack = distribute_tensor(
                weight.to(dtype, copy=True),
                mesh,
                [placement],
            )
            found[f"{name} {dtype}"] = average_experts_(stack, 0.3).full_tensor()
    partial = torch.distributed.tensor.DTensor.from_local(
        weight,
        mesh,
        [Partial()],
    )
    try:
        average_experts_(partial, 0.3)
    except ValueError as error:
        found["error"] = str(error)
    return found


def main(out: str) -> None:
    found = stacks()
    model = make()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    train(model, tiny.batch())
    kinds = {type(p).__name__ for p in model.parameters()}
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}
    torch.save(
        {
            "stacks": found,
            "weights": weights,
            "kinds": kinds,
        },
        f"{out}/{os.environ['RANK']}.pt",
    )
