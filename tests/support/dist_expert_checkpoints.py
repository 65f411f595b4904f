"""A rank of tests/methods/upit/test_checkpoints.py: `dist_expert_checkpoints.py OUT BASE`.

Trains under DDP with the callback, and saves models sharded by FSDP2, whole and as an adapter.
"""

from pathlib import Path

import peft
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from moe_runtime.hf.training.trainer import MoETrainer
from moe_runtime.methods.upit.checkpoints import ExpertCheckpoints, save_expert, saved_steps
from tests.methods.upit.test_checkpoints import LORA, trainer

torch.set_num_threads(1)


def loaded(base: str, **settings):
    return AutoModelForCausalLM.from_pretrained(base, **settings)


def changed(base: str, **settings):
    """The same model in every process; it differs from the base in one tensor."""
    model = loaded(base, **settings)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    return model


def adapted(base: str):
    torch.manual_seed(0)
    return peft.get_peft_model(loaded(base), peft.LoraConfig(**LORA))


def main(out: str, base: str) -> None:
    out = Path(out)
    callback = ExpertCheckpoints(out / "ddp", every_steps=2)
    trainer(
        loaded(base),
        out / "run",
        callback,
        kind=MoETrainer,
        per_device_train_batch_size=2,
        max_steps=3,
    ).train()
    # every process finds them as soon as its training has ended
    assert [path.name for path in saved_steps(out / "ddp")] == ["step-2", "step-3"]
    mesh = init_device_mesh("cpu", (2,))
    is_main = dist.get_rank() == 0
    models = {
        "whole": changed(base),
        "tied": changed(base, tie_word_embeddings=True),
    }
    for name, model in (models | {"lora": adapted(base)}).items():
        for layer in model.get_submodule(
            "base_model.model.model.layers" if name == "lora" else "model.layers"
        ):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        save_expert(
            model,
            out / name,
            is_main=is_main,
        )
        dist.barrier()
        assert (out / name / "expert.json").is_file()
