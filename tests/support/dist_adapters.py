"""One of the ranks of tests/hf/dropin/test_adapters_parallel.py: `dist_adapters.py OUT SCENARIO...`.

Steps of SGD on PEFT's adapters of a tiny stock model, the ranks' batches so unlike that some leave experts without a token.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moe_runtime
from moe_runtime.hf.dropin.parallel import shard_experts
from tests.support.stock_moe import stock

torch.set_num_threads(1)
STEPS, LR = 3, 0.5


class Scenario(NamedTuple):
    family: str
    engine: str
    mesh: tuple[int, int] | None = None  # replicas, owners


SCENARIOS = {
    "qwen3-ddp": Scenario("qwen3_moe", "ddp"),
    "qwen3-fsdp2": Scenario("qwen3_moe", "fsdp2"),
    "gpt_oss-fsdp2": Scenario("gpt_oss", "fsdp2"),
    "qwen3-ddp-ep2": Scenario("qwen3_moe", "ddp", (1, 2)),
    "gpt_oss-ddp-ep2": Scenario("gpt_oss", "ddp", (1, 2)),
    "qwen3-ddp-ep4": Scenario("qwen3_moe", "ddp", (1, 4)),
    "qwen3-ddp-dp2-ep2": Scenario("qwen3_moe", "ddp", (2, 2)),
}


def make(family: str, seed: int = 0):
    """The model with adapters; the base equal in every process, the adapters by the process' own generator."""
    model = stock(family, num_hidden_layers=2).eval()
    torch.manual_seed(seed)
    targets = ["experts.gate_up_proj", "experts.down_proj", "q_proj"]
    config = LoraConfig(r=3, lora_alpha=6, target_parameters=targets[:2], target_modules=targets[2:], init_lora_weights=False)
    model = get_peft_model(model, config)
    moe_runtime.patch(model)
    return model


def batch(rank: int) -> torch.Tensor:
    size = (2, 20) if rank % 2 == 0 else (1, 2)
    return torch.randint(3, 64, size, generator=torch.Generator().manual_seed(rank))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def learned(model) -> dict[str, torch.nn.Parameter]:
    return {name.removeprefix("module."): p for name, p in model.named_parameters() if p.requires_grad}


def train(model, ranks, scale: float) -> dict:
    """Train on the batches of `ranks`; return losses, the last gradients and the weights."""
    optimizer, losses = torch.optim.SGD(list(learned(model).values()), lr=LR), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = [model(input_ids=batch(rank), labels=batch(rank)).loss for rank in ranks]
        (sum(parts) * scale).backward()
        losses.append([part.item() for part in parts])
        optimizer.step()
    gradients = {name: whole(p.grad) for name, p in learned(model).items()}
    return {"losses": losses, "gradients": gradients, "weights": {name: whole(p) for name, p in learned(model).items()}}


def alone(family: str, ranks: int) -> dict:
    return train(make(family), range(ranks), 1 / ranks)


def run(scenario: Scenario, folder) -> dict:
    spread = scenario.mesh is not None
    model, rank = make(scenario.family, dist.get_rank() if spread else 0), dist.get_rank()
    if spread:
        mesh = init_device_mesh("cpu", scenario.mesh, mesh_dim_names=("dp", "ep"))
        shard_experts(model, mesh["ep"] if scenario.mesh[0] == 1 else mesh)
    if scenario.engine == "fsdp2":
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    result = train(model, [rank], 1.0)
    if scenario.engine == "ddp":
        if rank == 0:
            model.module.save_pretrained(folder)
        dist.barrier()
    return result


def main(out: str, *names: str) -> None:
    for name in names:
        torch.save(run(SCENARIOS[name], f"{out}/{name}"), f"{out}/{name}-rank{dist.get_rank()}.pt")
