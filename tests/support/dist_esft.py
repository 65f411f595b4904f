"""A rank of tests/methods/esft/test_processes.py: `dist_esft.py OUT ENGINE`."""

import contextlib
import functools
from unittest import mock

import torch
import torch.distributed as dist

from moe_runtime.hf.training.recording import last_checkpoint
from moe_runtime.hf.training.trainer import MoETrainer
from moe_runtime.methods import esft
from moe_runtime.methods.esft import runs
from moe_runtime.methods.esft.runs import EsftTraining
from tests.methods.esft.test_train import SELECTION, trainer_of
from tests.support.dist_stages import use_fsdp2
from tests.support.stock_moe import stock

torch.set_num_threads(1)


def spread_over():
    """Return a model whose experts are distributed over both ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    from moe_runtime.hf.dropin.parallel import shard_experts

    model = stock("deepseek_v2")
    shard_experts(model, init_device_mesh("cpu", (2,)))
    return model


def spread(out: str) -> None:
    """Train with expert parallelism."""
    model = spread_over()
    esft.train_only(model, SELECTION)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    esft.save_adapter(model, f"{out}/spread")


SETTINGS = {
    "steps": 3,
    "batch_size": 4,
    "per_device_batch_size": 2,
    "learning_rate": 1e-2,
    "save_steps": 2,
}
TRAININGS = (
    ("law", (2, 4.0), 1, "sgd"),
    ("law-ep2", (2, 4.0), 2, "sgd"),
    ("rows-ep2", None, 2, "adamw_torch"),
)


def save_spread(out: str) -> None:
    """Save a model with expert parallelism, in ways that are refused and in ways that work."""
    model = spread_over()
    errors = []
    guard = model.save_pretrained
    # DDP needs a parameter to reduce
    esft.train_only(model, SELECTION, shared_experts=True)
    try:
        model.save_pretrained(f"{out}/none")
    except ValueError as error:
        errors.append(str(error))
    trainer = trainer_of(
        MoETrainer, f"{out}/spread-run", model=model, max_steps=2, save_steps=1, optim="sgd"
    )
    trainer.train()
    trainer.save_model(f"{out}/spread-last")
    esft.save_adapter(model, f"{out}/spread-saved")
    esft.drop(model)
    torch.save(
        {"errors": errors, "is_guarded": model.save_pretrained == guard},
        f"{out}/spread-{dist.get_rank()}.pt",
    )


def train(out: str) -> None:
    """Run a trainer on both ranks; save a checkpoint, and the adapter at the end."""
    trainer = trainer_of(
        MoETrainer,
        f"{out}/run",
        per_device_train_batch_size=1,
        max_steps=4,
        save_steps=2,
        optim="sgd",
    )
    trainer.train()
    esft.save_adapter(trainer.model, f"{out}/adapter")
    trainer.save_model(f"{out}/last")


def train_folder(out: str) -> None:
    """Run `esft train` on both ranks, with a base and examples in the folder; the selection is
    experts 5 and 2 of layer 1.
    """
    selection = esft.ExpertSelection(experts={1: (5, 2)})
    for name, lora, ep_size, optimizer in TRAININGS:
        training = EsftTraining.from_dict(SETTINGS | {"optimizer": optimizer, "ep_size": ep_size})
        run = functools.partial(
            runs.train_folder,
            f"{out}/base",
            selection,
            f"{out}/rows.jsonl",
            f"{out}/{name}",
            training,
            max_length=32,
            lora=lora,
        )
        # it ends before it saves, and resumes from the checkpoint of the second step
        if lora is None:
            with (
                mock.patch.object(
                    esft,
                    "save_adapter",
                    side_effect=ValueError,
                ),
                contextlib.suppress(ValueError),
            ):
                run()
            assert last_checkpoint(f"{out}/{name}-checkpoints").name == "checkpoint-2"
        run()


def main(out: str, engine: str) -> None:
    if engine == "lora":
        return train_folder(out)
    if engine == "fsdp2":
        use_fsdp2()
    train(out)
    if engine == "ddp":
        spread(out)
        save_spread(out)
    dist.barrier()
    return None
