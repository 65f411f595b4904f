"""A rank of tests/hf/training/test_trainable_engines.py: `dist_trainable.py OUT SCENARIO...`.

Runs AdamW steps with clipped gradients on tiny models with some trained experts, more of them on
one rank than on the other.
"""

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_runtime.hf.dropin.parallel import clip_grad_norm, save_pretrained, shard_experts
from moe_runtime.hf.training.trainable import fold_rows, train_rows
from moe_runtime.methods.esft.freezing import freeze_for_esft
from moe_runtime.modules.trainable import split_of
from tests.support.dist_expert_parallel import MAX_NORM, batch, make, whole
from tests.support.trained_rows import gathered_rows, trained_rows

torch.set_num_threads(1)
RANKS = 2
STEPS = 3


class Scenario(NamedTuple):
    family: str
    engine: str
    spread: bool = False  # expert parallelism
    everything: bool = False  # shared experts and all other modules train, too
    checkpointing: bool = False
    low: bool = False  # a bfloat16 model with rows in float32
    groups: bool = False  # the experts are a separate FSDP2 group


SCENARIOS = {
    "qwen3-ddp": Scenario("qwen3_moe", "ddp"),
    "gpt_oss-ddp-everything": Scenario("gpt_oss", "ddp", everything=True),
    "qwen3-fsdp2": Scenario("qwen3_moe", "fsdp2"),
    "qwen3-fsdp2-low": Scenario("qwen3_moe", "fsdp2", low=True),
    "qwen3-fsdp2-low-everything": Scenario(
        "qwen3_moe", "fsdp2", everything=True, low=True, groups=True
    ),
    "ours-fsdp2-everything": Scenario("ours", "fsdp2", everything=True),
    "gpt_oss-fsdp2-checkpointing": Scenario(
        "gpt_oss",
        "fsdp2",
        checkpointing=True,
    ),
    "qwen3-accelerate": Scenario("qwen3_moe", "accelerate"),
    # nothing is left for DDP, which refuses such a module
    "qwen3-ep2": Scenario("qwen3_moe", "none", spread=True),
    "gpt_oss-ep2-checkpointing": Scenario(
        "gpt_oss",
        "none",
        spread=True,
        checkpointing=True,
    ),
    "qwen3-ddp-ep2-everything": Scenario(
        "qwen3_moe",
        "ddp",
        spread=True,
        everything=True,
    ),
    "ours-ddp-ep2-everything": Scenario(
        "ours",
        "ddp",
        spread=True,
        everything=True,
    ),
    "qwen3-fsdp2-ep2": Scenario("qwen3_moe", "fsdp2", spread=True),
}
# two on the second rank and one on the first, then none on one of them
EXPERTS = {
    "qwen3_moe": {0: [6, 1, 7], 1: [2]},
    "gpt_oss": {0: [3, 0, 2], 1: [3]},
    "ours": {0: [3], 1: [2, 1]},
}


def freeze(model, scenario: Scenario):
    return freeze_for_esft(
        model,
        EXPERTS[scenario.family],
        scenario.everything,
        scenario.everything,
        dtype=torch.float32 if scenario.low else None,
    )


def made(scenario: Scenario):
    model = make(scenario.family)
    return model.to(torch.bfloat16) if scenario.low else model


def gradients_of(model) -> dict[str, torch.Tensor]:
    """Return every gradient, unsharded; rows are in the order of their ids."""
    gradients = {}
    for n, p in model.named_parameters():
        if p.grad is not None:
            gradients[n] = whole(p.grad)
    for path, module in model.named_modules():
        split = split_of(module)
        for name in split.requires_grad if split else ():
            padded = gradients[f"{path}.trained_{name}"]
            rows = gradients[f"{path}.trained_{name}"] = padded[list(split.places)]
            # rows that belong to no expert get no gradient
            assert padded.count_nonzero() == rows.count_nonzero()
    return gradients


def steps(model, losses_of, optimizer) -> dict:
    """Train; return losses, the norms of the gradients, the first step's gradients and the final
    rows.
    """
    losses = []
    norms = []
    gradients = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(losses_of())
        gradients = gradients or gradients_of(model)
        norms.append(whole(clip_grad_norm(model, MAX_NORM)).item())
        optimizer.step()
    rows = {}
    for number, layer in gathered_rows(model).items():
        rows[number] = layer.stacks
    states = [state["exp_avg"] for state in optimizer.state.values()]
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "rows": rows,
        "states": sum(
            s.to_local().numel() if hasattr(s, "to_local") else s.numel() for s in states
        ),
    }


def optimizer_of(model) -> torch.optim.Optimizer:
    # far above 1e-8, where a gradient that is zero up to rounding would cause a whole step
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, eps=1e-5
    )


def weights_of(model) -> dict[str, torch.Tensor]:
    values = {}
    for name, p in model.named_parameters():
        if "trained_" not in name:
            values[name] = whole(p)
    return values


@functools.cache
def alone(family: str, everything: bool, low: bool) -> dict:
    """Compute the reference for all engines: the mean of the ranks' losses in one process."""
    scenario = Scenario(family, "none", everything=everything, low=low)
    model = made(scenario)
    before = weights_of(model)
    receipt = freeze(model, scenario)

    def losses_of():
        parts = []
        for rank in range(RANKS):
            parts.append(model(batch(rank), labels=batch(rank)).loss)
        (sum(parts) / RANKS).backward()
        return [part.item() for part in parts]

    result = steps(model, losses_of, optimizer_of(model))
    weights = weights_of(model)
    fold_rows(model)
    return result | {
        "before": before,
        "weights": weights,
        "folded": weights_of(model),
        "receipt": receipt,
    }


def held_by(engine: str, model, mesh, scenario: Scenario):
    """Wrap the model in its engine as a user would; return what to call, and the optimizer."""
    if engine == "accelerate":
        from tests.support.engine_worker import accelerator_of

        return accelerator_of("fsdp2").prepare(model, optimizer_of(model))
    if engine != "fsdp2":
        return DistributedDataParallel(model) if engine == "ddp" else model, optimizer_of(model)
    everyone = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        if scenario.spread:
            fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        # otherwise rows and other trained parameters would need the same dtype
        elif scenario.groups:
            fully_shard(layer.mlp.experts, mesh=everyone)
        fully_shard(layer, mesh=everyone)
    called = fully_shard(model, mesh=everyone)
    return called, optimizer_of(model)


def run(scenario: Scenario, folder: str) -> dict:
    model = made(scenario)
    ids = batch(dist.get_rank())
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "ep"))
    if scenario.spread:
        shard_experts(model, mesh["ep"])
    receipt = freeze(model, scenario)
    if scenario.checkpointing:
        model.gradient_checkpointing_enable()
    called, optimizer = held_by(scenario.engine, model, mesh, scenario)

    def losses_of():
        loss = called(ids, labels=ids).loss
        loss.backward()
        return loss.item()

    result = steps(model, losses_of, optimizer) | {
        "receipt": receipt,
        "weights": weights_of(model),
    }
    shapes = {}
    for n, layer in trained_rows(model).items():
        shapes[n] = [tuple(p.shape) for p in layer.stacks.values()]
    result["shapes"] = shapes
    if scenario.spread and scenario.engine != "fsdp2":
        result["refused"] = says(lambda: save_pretrained(called, folder))
        ignored = set(model._ddp_params_and_buffers_to_ignore)
        fold_rows(model)
        result["ignored"] = ignored - set(model._ddp_params_and_buffers_to_ignore)
        save_pretrained(called, folder)
    return result


def says(change) -> str:
    try:
        change()
    except ValueError as error:
        return str(error)
    return ""


def run_order(folder: str) -> dict:
    """Make the two calls in the other order."""
    model = make("qwen3_moe")
    train_rows(model, {1: [2]})
    before = dict(model.named_parameters())
    error = says(
        lambda: shard_experts(
            model,
            init_device_mesh("cpu", (RANKS,)),
        )
    )
    same = all(model.get_parameter(name) is parameter for name, parameter in before.items())
    return {"error": error, "same": same}


def main(out: str, *names: str) -> None:
    for name in names:
        result = run_order(out) if name == "order" else run(SCENARIOS[name], f"{out}/{name}")
        torch.save(result, f"{out}/{name}-rank{dist.get_rank()}.pt")
