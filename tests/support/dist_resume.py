"""One of two ranks of tests/hf/training/test_resume.py, `dist_resume.py OUT`: stock models train,
stop and resume.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from moe_runtime.hf.dropin.parallel import shard_experts
from moe_runtime.hf.training.ranks import expert_mesh
from tests.support.dist_expert_parallel import whole

torch.set_num_threads(1)
# family, and the trainer and adapters unless they are MoETrainer without adapters
CASES = {
    "olmoe": ("olmoe", {}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "lora": ("olmoe", {"lora": True}),
    "stock": ("olmoe", {"kind": "stock"}),
}
# fsdp2 comes last, since accelerate's state stays changed; transformers' Trainer cannot save
# sharded experts
ENGINES = {
    "ddp": list(CASES),
    "ep2": [case for case in CASES if case != "stock"],
    "fsdp2": list(CASES),
}


def run(engine: str, base: Path, folder: Path, settings: dict, callbacks=(), resume=None):
    """Train; return the losses, the weights, and whether parameters were distributed."""
    from tests.hf.training.test_resume import load, trainer_of

    torch.manual_seed(0)
    model = load(base, lora=settings.get("lora", False))
    if engine == "ep2":
        shard_experts(model, expert_mesh(2))
    trainer = trainer_of(
        settings.get("kind", "ours"),
        model,
        folder,
        callbacks,
        per_device_train_batch_size=1,
        ddp_find_unused_parameters=False,
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = []
    for entry in trainer.state.log_history:
        if "loss" in entry:
            losses.append(entry["loss"])
    is_distributed = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    return (
        losses,
        {name: whole(tensor) for name, tensor in model.state_dict().items()},
        is_distributed,
    )


def resumed(engine: str, case: str, out: Path) -> dict:
    from tests.hf.training.test_resume import STOP, Stop, load, write_base

    family, settings = CASES[case]
    base = out / f"{family}-base"
    folder = out / f"{engine}-{case}"
    if dist.get_rank() == 0 and not base.exists():
        write_base(family, base)
    dist.barrier()
    wanted_losses, expected, is_distributed = run(engine, base, folder / "whole", settings)
    run(engine, base, folder / "run", settings, [Stop()])
    losses, weights, _ = run(
        engine, base, folder / "run", settings, resume=str(folder / "run" / f"checkpoint-{STOP}")
    )
    torch.manual_seed(0)
    start = load(base, lora=settings.get("lora", False)).state_dict()
    trained = "lora" if "lora" in settings else "experts"
    moved = []
    for name, tensor in expected.items():
        if trained in name and not torch.equal(tensor, start[name]):
            moved.append(name)
    different = [
        name for name, tensor in expected.items() if not torch.equal(tensor, weights[name])
    ]
    return {
        "losses": losses,
        "wanted_losses": wanted_losses,
        "different": different,
        "moved": moved,
        "is_distributed": is_distributed,
    }


def loaded_into_shards(base: Path) -> list[str]:
    """Load a folder's tensors into sharded experts with other values; return the parameters that
    differ afterwards.
    """
    from tests.hf.training.test_resume import load

    model = load(base)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shard_experts(model, expert_mesh(2))
    for parameter in model.parameters():
        (parameter.data.to_local() if hasattr(parameter, "to_local") else parameter.data).add_(1)
    model.load_state_dict(load_file(base / "model.safetensors"))
    values = []
    for name, tensor in model.state_dict().items():
        if not torch.equal(whole(tensor), expected[name]):
            values.append(name)
    return values


def main(out: str) -> None:
    from tests.support.dist_stages import use_fsdp2

    results = {}
    for engine, cases in ENGINES.items():
        for case in cases:
            if engine == "fsdp2":
                # for each family, because accelerate's plugin remembers the class of the layers
                use_fsdp2()
            results[engine, case] = resumed(engine, case, Path(out))
        if engine == "ep2":
            results["loaded"] = loaded_into_shards(Path(out, "mixtral-base"))
    torch.save(results, Path(out) / f"rank{dist.get_rank()}.pt")
