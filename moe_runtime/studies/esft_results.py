"""What ESFT's stages leave behind: results of a task, joined over tasks, and the experts' scores."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from moe_runtime.hf import fit as trainers
from moe_runtime.methods.esft_scores import ExpertScores
from moe_runtime.studies.stages import loss_of


class Tuned(NamedTuple):
    """A model that was tuned on a task, or the base; or several, joined over tasks by `join`."""

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
    tasks: dict | None = None  # of several: name -> Tuned


class Scored(NamedTuple):
    """The experts' scores of a task."""

    name: str
    folder: Path  # of summary.json
    total_seconds: float
    history: list

    @property
    def scores(self) -> ExpertScores:
        """The scores themselves."""
        return ExpertScores.load(self.folder / "summary.json")


def join(name: str, parts: Mapping[str, Tuned]) -> Tuned:
    """Return one result of a method for all its tasks: the held-out rows of all, means of the rest.

    A general row's loss is its mean over the tasks' models, as in the paper's Table 2.
    """
    first, count = next(iter(parts.values())), len(parts)
    losses, tokens = ([value for one in parts.values() for value in getattr(one, of)] for of in ("losses", "tokens"))
    general = [sum(row) / count for row in zip(*(one.general_losses for one in parts.values()), strict=True)]
    ways = zip(*(one.history for one in parts.values()), strict=False)
    mean = {
        of: statistics.fmean(getattr(one, of) for one in parts.values())
        for of in ("seconds", "total_seconds", "steps_per_second")
    }
    whole = {
        of: round(statistics.fmean(getattr(one, of) for one in parts.values()))
        for of in ("trained_parameters", "optimizer_bytes")
    }
    return first._replace(
        name=name,
        **loss_of(losses, tokens),
        general_loss=trainers.mean_loss(general, first.general_tokens),
        general_losses=general,
        history=[(way[0][0], statistics.fmean(loss for _, loss in way)) for way in ways],
        experts=None,
        tasks=dict(parts),
        **mean,
        **whole,
    )


class Base(NamedTuple):
    """A base as it is kept: judged on all tasks."""

    name: str
    folder: Path
    found: dict  # task -> loss, losses, tokens
    steps: int
    seconds: float
    total_seconds: float
    parameters: int
    active_parameters: int
    history: list
    steps_per_second: float
    trained_parameters: int
    optimizer_bytes: int
