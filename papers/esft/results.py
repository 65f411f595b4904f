"""Results of an ESFT study's stages: a tuned model, the experts' scores, several models joined to
one row of a table.
"""

import statistics
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from moe_runtime.hf.training import fit as trainers
from moe_runtime.methods.esft.scores import ExpertScores
from papers.engine.stages import loss_of

# the methods' names in tables
BASE = "base"
FFT = "FFT"
LORA = "LoRA"
TOKEN = "ESFT-Token"
GATE = "ESFT-Gate"
RANDOM = "{}, random experts"  # as many per layer as the method in the braces selects


class Tuned(NamedTuple):
    """A model tuned on a task, or the base; or several, joined over tasks by `join`."""

    name: str
    folder: Path
    loss: float  # mean over the label tokens of the held-out rows
    losses: list[float]
    tokens: list[int]
    general_loss: float
    general_losses: list[float]
    general_tokens: list[int]
    steps: int
    seconds: float
    total_seconds: float  # scoring included
    parameters: int
    active_parameters: int
    history: list  # (step, validation loss)
    steps_per_second: float
    trained_parameters: int
    optimizer_bytes: int
    experts: dict | None = None  # layer -> ids that were trained
    tasks: dict | None = None  # joined results: name -> Tuned
    exact: list | None = None  # per held-out row: 1 if greedy decoding gives its label, else 0
    general_exact: list | None = None


class Scored(NamedTuple):
    """The experts' scores of a task."""

    name: str
    folder: Path  # of summary.json
    total_seconds: float

    @property
    def scores(self) -> ExpertScores:
        """The scores themselves."""
        return ExpertScores.load(self.folder / "summary.json")


def join(name: str, parts: Mapping[str, Tuned]) -> Tuned:
    """Join a method's results over its tasks: held-out rows are concatenated, all else, general
    losses included, averaged.
    """
    first = next(iter(parts.values()))
    count = len(parts)
    losses = []
    for one in parts.values():
        for value in one.losses:
            losses.append(value)
    tokens = []
    for one in parts.values():
        for value in one.tokens:
            tokens.append(value)
    if None in (one.exact for one in parts.values()):
        exact = None
    else:
        exact = []
        for one in parts.values():
            for flag in one.exact:
                exact.append(flag)
    general = []
    for row in zip(*(one.general_losses for one in parts.values()), strict=True):
        general.append(sum(row) / count)
    histories = zip(*(one.history for one in parts.values()), strict=False)
    costs = (
        "seconds",
        "total_seconds",
        "steps_per_second",
        "trained_parameters",
        "optimizer_bytes",
    )
    means = {}
    for of in costs:
        means[of] = statistics.fmean(getattr(one, of) for one in parts.values())
    means |= {of: round(means[of]) for of in costs[3:]}
    history = []
    for points in histories:
        history.append((points[0][0], statistics.fmean(loss for _, loss in points)))
    return first._replace(
        name=name,
        general_loss=trainers.mean_loss(general, first.general_tokens),
        general_losses=general,
        history=history,
        experts=None,
        tasks=dict(parts),
        exact=exact,
        **loss_of(losses, tokens),
        **means,
    )


# a base as it is saved: its costs, and `found`, its loss, losses and tokens by task
COSTS = (
    Tuned._fields[:2] + Tuned._fields[Tuned._fields.index("steps") : Tuned._fields.index("experts")]
)
Base = namedtuple("Base", (*COSTS, "found"))
