"""A model judged by domain: losses of rows that stand domain after domain, as those of each domain."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moe_runtime.hf import fit as trainers
from moe_runtime.studies.stages import loss_of


class Judged(NamedTuple):
    """A model, one or fused, judged on the held-out rows of every domain."""

    name: str
    folder: Path  # of the stage's model
    loss: float  # mean over the label tokens of all held-out rows
    losses: list[float]  # mean of each held-out row, domain after domain
    tokens: list[int]
    rows: dict[str, int]  # domain -> how many of the held-out rows are its
    steps: int
    seconds: float
    total_seconds: float  # with the stages before it, the base excepted
    parameters: int
    active_parameters: int  # that a token passes through
    history: list  # (step, held-out loss), of an UltraFuser's specialist that of its own domain
    steps_per_second: float
    trained_parameters: int = 0
    optimizer_bytes: int = 0
    source: str = ""  # what the model is loaded from: `folder`, or a given specialist's own place
    course: list | None = None  # (step, {domain: loss}), where the training was watched

    @property
    def domains(self) -> dict[str, float]:
        """The loss of each domain."""
        return by_domain(self.losses, self.tokens, self.rows)


def by_domain(losses: Sequence[float], tokens: Sequence[int], rows: Mapping[str, int]) -> dict[str, float]:
    """Return the mean loss per label token of each domain's rows, which stand domain after domain."""
    return {domain: trainers.mean_loss(losses[place], tokens[place]) for domain, place in places_of(rows).items()}


def places_of(rows: Mapping[str, int]) -> dict[str, slice]:
    """Return where the rows of each domain stand."""
    places, start = {}, 0
    for domain, count in rows.items():
        places[domain] = slice(start, start + count)
        start += count
    return places


def of_domain(result, domain: str):
    """Return a result as if the rows of one domain were all it is judged by."""
    place = places_of(result.rows)[domain]
    losses, tokens = result.losses[place], result.tokens[place]
    return result._replace(rows={domain: len(losses)}, history=[], **loss_of(losses, tokens))
