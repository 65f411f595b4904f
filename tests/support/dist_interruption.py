"""One of two ranks of tests/io/test_signals.py: `dist_interruption.py OUT`; each gets signals in
different steps.
"""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import TrainerCallback

from moe_runtime.hf.training import fit
from moe_runtime.io import signals as interruption
from papers.engine.tiny import train_tokenizer
from tests.hf.tiny import VOCAB, dense

torch.set_num_threads(1)
STEPS = 4
ROWS = torch.randint(
    3,
    VOCAB,
    (16, 8),
    generator=torch.Generator().manual_seed(0),
).tolist()
TOKENIZER = train_tokenizer(["a"], 300)

# for each rank: where a signal arrives, and which one
CASES = {
    "whole": ({}, {}),
    "one of them": ({}, {("step", 2): signal.SIGTERM}),
    "all, not together": ({("step", 1): signal.SIGINT}, {("step", 3): signal.SIGTERM}),
    "last step": ({("step", STEPS): signal.SIGTERM}, {}),
    "behind the last step": ({}, {("end", STEPS): signal.SIGINT}),
}


class Sender(TrainerCallback):
    """Sends this process the signals of a case."""

    def __init__(self, signals: dict):
        self.signals = signals

    def on_step_begin(self, args, state, control, **kwargs):
        self._send("step", state.global_step + 1)

    def on_train_end(self, args, state, control, **kwargs):
        self._send("end", state.global_step)

    def _send(self, *place) -> None:
        if place in self.signals:
            os.kill(os.getpid(), self.signals[place])


def train(folder: Path, signals: dict, steps: list) -> dict:
    """Train like a recipe; return the weights."""
    model = dense("llama")
    rows = Dataset.from_dict({"input_ids": ROWS, "labels": ROWS})

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    fit.train(
        model,
        rows,
        TOKENIZER,
        folder=folder,
        learning_rate=1e-2,
        batch_size=4,
        held_out=rows,
        steps=STEPS,
        per_device_batch_size=2,
        evaluations=1,
        callbacks=[Sender(signals), Count()],
    )
    return model.state_dict()


def ended(*arguments) -> tuple[str, dict | None]:
    """Return how training ends: the kind of interruption, or "done" and the weights."""
    try:
        return "done", train(*arguments)
    except KeyboardInterrupt as stop:
        return type(stop).__name__, None


def main(out: str) -> None:
    signal.signal(
        signal.SIGINT,
        signal.default_int_handler,
    )  # the server that forks us ignores it
    rank = dist.get_rank()
    found = {}
    for name, signals in CASES.items():
        folder = Path(out, name)
        steps = []
        again = []
        with interruption.sigterm_raises():
            how, weights = ended(folder, signals[rank], steps)
            saved = sorted(path.name for path in folder.glob("checkpoint-*"))
            dist.barrier()  # before the next training removes the checkpoints that it resumes from
            # a signal after the last step is raised here
            next_how, next_weights = ended(folder, {}, again)
        found[name] = {
            "how": how,
            "steps": steps,
            "saved": saved,
            "next": next_how,
            "again": again,
            "weights": next_weights if weights is None else weights,
        }
    torch.save(found, f"{out}/rank{rank}.pt")
