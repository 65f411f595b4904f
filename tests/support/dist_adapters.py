"""A rank of tests/hf/dropin/test_adapters_parallel.py: `dist_adapters.py OUT SCENARIO...`.

Runs SGD steps on PEFT's adapters of a tiny stock model, with batches that differ so much between
ranks that some leave experts without a token.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moe_runtime
from moe_runtime.hf.dropin.parallel import shard_experts
from tests.support.dist_expert_parallel import whole
from tests.support.stock_moe import stock

torch.set_num_threads(1)
STEPS = 3
LR = 0.5


class Scenario(NamedTuple):
    family: str
    engine: str
    mesh: tuple[int, int] | None = None  # replicas, owners
    format: str = ""  # of packed stacks
    # stacks are packed "first", "after" shard_experts, or "loaded" with only each rank's experts
    packed: str = "first"


SCENARIOS = {
    "qwen3-ddp": Scenario("qwen3_moe", "ddp"),
    "qwen3-fsdp2": Scenario("qwen3_moe", "fsdp2"),
    "gpt_oss-fsdp2": Scenario("gpt_oss", "fsdp2"),
    "qwen3-ddp-ep2": Scenario("qwen3_moe", "ddp", (1, 2)),
    "gpt_oss-ddp-ep2": Scenario("gpt_oss", "ddp", (1, 2)),
    "qwen3-ddp-ep4": Scenario("qwen3_moe", "ddp", (1, 4)),
    "qwen3-ddp-dp2-ep2": Scenario("qwen3_moe", "ddp", (2, 2)),
    "qwen3-fsdp2-dp2-ep2": Scenario("qwen3_moe", "fsdp2", (2, 2)),
    "qwen3-fsdp2-nf4": Scenario("qwen3_moe", "fsdp2", None, "nf4"),
    "gpt_oss-fsdp2-mxfp4": Scenario("gpt_oss", "fsdp2", None, "mxfp4"),
    "qwen3-ddp-ep2-fp8": Scenario("qwen3_moe", "ddp", (1, 2), "fp8_block"),
    "gpt_oss-ddp-ep2-mxfp4": Scenario(
        "gpt_oss",
        "ddp",
        (1, 2),
        "mxfp4",
        "loaded",
    ),
    "gpt_oss-ddp-ep2-nf4": Scenario(
        "gpt_oss",
        "ddp",
        (1, 2),
        "nf4",
        "loaded",
    ),
    "qwen3-ddp-dp2-ep2-int8": Scenario(
        "qwen3_moe",
        "ddp",
        (2, 2),
        "int8",
        "loaded",
    ),
    "qwen3-ddp-ep4-nf4": Scenario(
        "qwen3_moe",
        "ddp",
        (1, 4),
        "nf4",
        "loaded",
    ),
    "gpt_oss-ddp-ep4-nf4": Scenario("gpt_oss", "ddp", (1, 4), "nf4", "after"),
    "qwen3-fsdp2-dp2-ep2-nf4": Scenario("qwen3_moe", "fsdp2", (2, 2), "nf4"),
}


def base(family: str, format: str):
    """The stock model. With I = 64 an expert's down projection has 64 NF4 scales: blocks of 256
    scales span ranks.
    """
    wide = 128 if format == "fp8_block" else 64
    if format:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": wide,
            "moe_intermediate_size": wide,
        }
    else:
        sizes = {}
    return stock(family, num_hidden_layers=2, **sizes).eval()


def make(scenario: Scenario, mesh=None, folder: str = ""):
    """The model with adapters; the base is the same in every process, the adapters come from the
    process's own generator.
    """
    model = base(scenario.family, scenario.format)
    loads = mesh is not None and scenario.packed == "loaded"
    if loads:
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder}-base")
        dist.barrier()
        model = moe_runtime.load_quantized(
            f"{folder}-base",
            scenario.format,
            mesh=mesh,
        ).eval()
    elif scenario.format:
        if scenario.packed == "after" and mesh is not None:
            shard_experts(model, mesh)
        moe_runtime.quantize_experts(model, scenario.format)
    if mesh is not None and scenario.format:
        shard_experts(model, mesh)
        moe_runtime.save_quantized(model, f"{folder}-quantized")
    torch.manual_seed(0 if mesh is None else dist.get_rank())
    targets = ["experts.gate_up_proj", "experts.down_proj", "q_proj"]
    config = LoraConfig(
        r=3,
        lora_alpha=6,
        target_parameters=targets[:2],
        target_modules=targets[2:],
        init_lora_weights=False,
    )
    model = get_peft_model(model, config)
    if mesh is None:
        moe_runtime.patch(model)
        return model
    shard_experts(model, mesh)
    for name, parameter in learned(model).items():
        if "q_proj" in name:  # DDP would send them
            dist.broadcast(parameter.data, 0)
    return model


def batch(rank: int) -> torch.Tensor:
    size = (2, 20) if rank % 2 == 0 else (1, 2)
    return torch.randint(
        3,
        64,
        size,
        generator=torch.Generator().manual_seed(rank),
    )


def learned(model) -> dict[str, torch.nn.Parameter]:
    values = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            values[name.removeprefix("module.")] = p
    return values


def train(model, ranks, scale: float, lr: float = LR, folder: str = "") -> dict:
    """Train on the batches of `ranks`, from the checkpoint in `folder` if there is one; return
    losses, the last gradients and the weights.
    """
    optimizer = torch.optim.SGD(
        list(learned(model).values()),
        lr=lr,
        momentum=0.3,
    )
    losses = []
    for step in range(STEPS):
        if step == 1 and folder:
            optimizer.zero_grad()
            resume(model, optimizer, folder)
        optimizer.zero_grad()
        parts = []
        for rank in ranks:
            parts.append(
                model(
                    input_ids=batch(rank),
                    labels=batch(rank),
                ).loss
            )
        (sum(parts) * scale).backward()
        losses.append([part.item() for part in parts])
        optimizer.step()
    gradients = {name: whole(p.grad) for name, p in learned(model).items()}
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": {name: whole(p) for name, p in learned(model).items()},
    }


def alone(scenario: Scenario, ranks: int) -> dict:
    return train(make(scenario), range(ranks), 1 / ranks, lr_of(scenario))


@torch.no_grad()
def resume(model, optimizer, folder: str) -> None:
    """Write model and optimizer with torch.distributed.checkpoint, reset them, and load them
    again.
    """
    parts = dict(
        zip(
            ("model", "optimizer"),
            get_state_dict(model, optimizer),
        )
    )
    dcp.save(parts, checkpoint_id=folder)
    held = [
        *model.state_dict().values(),
        *(value for state in optimizer.state.values() for value in state.values()),
    ]
    for tensor in held:
        (tensor.to_local() if hasattr(tensor, "to_local") else tensor).zero_()
    parts = dict(zip(parts, get_state_dict(model, optimizer)))
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
    )


def lr_of(scenario: Scenario) -> float:
    """With the wider GPT-OSS, three steps of 0.5 amplify a difference of 1e-7 to 1e-3."""
    return LR / 50 if scenario.format and scenario.family == "gpt_oss" else LR


def run(scenario: Scenario, folder) -> dict:
    mesh = None
    rank = dist.get_rank()
    if scenario.mesh is not None:
        mesh = init_device_mesh(
            "cpu",
            scenario.mesh,
            mesh_dim_names=("dp", "ep"),
        )
        mesh = mesh["ep"] if scenario.mesh[0] == 1 or scenario.engine == "fsdp2" else mesh
    model = make(scenario, mesh, folder)
    if scenario.engine == "fsdp2":
        everyone = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.base_model.model.model.layers:
            if scenario.mesh is not None:
                fully_shard(
                    layer.mlp.experts.get_base_layer(),
                    mesh=mesh._get_root_mesh()["dp"],
                )
            fully_shard(layer, mesh=everyone)
        fully_shard(model, mesh=everyone)
    else:
        model = DistributedDataParallel(model)
    tensors = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensors[name.removeprefix("module.")] = tensor
    held = {
        name: held_of(tensor)
        for name, tensor in tensors.items()
        if "experts" in name and "lora" not in name
    }
    checkpoint = f"{folder}-checkpoint" if mesh is not None or scenario.format else ""
    result = {"held": held} | train(
        model,
        [rank],
        1.0,
        lr_of(scenario),
        checkpoint,
    )
    if scenario.engine == "ddp":
        if rank == 0:
            model.module.save_pretrained(folder)
        dist.barrier()
    return result


def held_of(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "to_local"):
        return tensor.to_local().untyped_storage().nbytes()
    return tensor.nbytes


def main(out: str, *names: str) -> None:
    for name in names:
        torch.save(
            run(SCENARIOS[name], f"{out}/{name}"),
            f"{out}/{name}-rank{dist.get_rank()}.pt",
        )
