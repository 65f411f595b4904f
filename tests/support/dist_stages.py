"""A rank of tests/methods/xft/test_distributed.py: `dist_stages.py OUT ENGINE RECIPE STAGES...`."""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from moe_runtime.hf.training import fit as trainers
from papers.xft.recipe import load_recipe
from papers.xft.study import XftStages

torch.set_num_threads(1)


class Spy(TrainerCallback):
    """Records which parameters have a gradient when the optimizer steps, and the types of the
    parameters.
    """

    def __init__(self):
        self.graded = set()
        self.kinds = set()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.graded |= {
            name.removeprefix("module.")
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        self.kinds |= {type(p).__name__ for p in model.parameters()}


def use_fsdp2(mixed_precision: str | None = None) -> None:
    """Make accelerate use FSDP2, which it disables on the CPU although its own code works there."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    if mixed_precision is not None:
        plugin.set_mixed_precision(mixed_precision)
    real = AcceleratorState.__init__

    def init(self, *args, **kwargs):
        real(self, *args, **kwargs)
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = plugin

    AcceleratorState.__init__ = init


def main(out: str, engine: str, recipe: str, *names: str) -> None:
    if engine == "fsdp2":
        use_fsdp2()
    real = trainers.train
    spies = {}
    said = []

    def train(*args, callbacks=(), **kwargs):
        spies[name] = Spy()
        return real(*args, callbacks=[*callbacks, spies[name]], **kwargs)

    trainers.train = train

    def say(text: str) -> None:
        said.append(text)
        print(text, flush=True)  # to the log that a failed launch prints

    stages = XftStages(load_recipe(recipe), Path(out, "out"), say=say)
    results = {}
    for name in names:
        results[name] = stages.mix(results["moe"]) if name == "mix" else getattr(stages, name)()
    seen = {name: (spy.graded, spy.kinds) for name, spy in spies.items()}
    torch.save(
        {"results": results, "seen": seen, "said": said},
        f"{out}/rank{dist.get_rank()}.pt",
    )
