"""A rank of tests/papers/engine/test_sharded.py: `dist_sharded.py OUT METHOD RECIPE STOPPED...`;
FSDP2 on the CPU.

Trainings of the stages `STOPPED` fail after their third step, and resume from their checkpoints.
"""

import importlib
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from moe_runtime.hf.training import fit as trainers
from tests.support.dist_stages import use_fsdp2

torch.set_num_threads(1)
STAGES = {
    "upit": lambda s: {
        "dense": s.dense("ffn"),
        "upit": s.upit("ffn"),
        "lora": s.upit("lora"),
    },
    "ultrafuser": lambda s: {
        "specialist": s.specialist("sums"),
        "gate": s.gate(),
        "fused": s.fused(),
    },
}


class Watch(TrainerCallback):
    """Records where a training starts and the types of its parameters; raises in the third step of
    the training to be stopped.
    """

    def __init__(self, name: str, stopped: set[str]):
        self.name = name
        self.stopped = stopped
        self.begins = None
        self.kinds = set()

    def on_train_begin(self, args, state, control, **kwargs):
        self.begins = state.global_step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.kinds |= {type(p).__name__ for p in model.parameters()}
        if self.name in self.stopped and state.global_step == 3:
            self.stopped.remove(self.name)
            raise RuntimeError("stopped")


def run(out: Path, method: str, recipe: str, *stopped: str, say=print) -> dict:
    """Return the stages' results, the steps where their trainings started, and the types of their
    parameters.
    """
    study = importlib.import_module(f"papers.{method}.study")
    stages = getattr(study, f"{method.title()}Stages")(
        recipe,
        out,
        say=say,
    )
    watches = []
    train = trainers.train
    left = set(stopped)

    def watched(model, *arguments, callbacks=(), **settings):
        name = Path(settings["folder"]).name.partition("-")[0]
        watches.append(Watch(name, left))
        return train(
            model,
            *arguments,
            callbacks=[*callbacks, watches[-1]],
            **settings,
        )

    trainers.train = watched
    try:
        for _ in stopped:
            try:
                STAGES[method](stages)
            except RuntimeError as error:
                assert "stopped" in str(error), error
        assert not left, left
        results = STAGES[method](stages)
    finally:
        trainers.train = train
    return {
        "results": results,
        "seen": [(one.name, one.begins, one.kinds) for one in watches],
    }


def main(out: str, method: str, recipe: str, *stopped: str) -> None:
    use_fsdp2()
    found = run(
        Path(out, "out"), method, recipe, *stopped, say=lambda text: print(text, flush=True)
    )
    torch.save(found, f"{out}/rank{dist.get_rank()}.pt")
