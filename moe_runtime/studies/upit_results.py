"""What UpIT's stages leave behind: models judged by domain, experts on the way, and what a router's rows were made of."""

from pathlib import Path
from typing import NamedTuple

from moe_runtime.studies.domain_results import by_domain


class Judged(NamedTuple):
    """A model, judged on the held-out rows of every domain."""

    name: str
    folder: Path
    loss: float  # mean over the label tokens of all held-out rows
    losses: list[float]  # mean of each held-out row, domain after domain
    tokens: list[int]
    rows: dict[str, int]  # domain -> how many of the held-out rows are its
    steps: int
    seconds: float
    total_seconds: float  # with the stages before it, the base excepted
    parameters: int
    active_parameters: int  # that a token passes through
    history: list  # (step, held-out loss)
    steps_per_second: float
    trained_parameters: int = 0
    optimizer_bytes: int = 0

    @property
    def domains(self) -> dict[str, float]:
        """The loss of each domain."""
        return by_domain(self.losses, self.tokens, self.rows)


class Pool(NamedTuple):
    """Experts: checkpoints of a tuning, and those grown from them."""

    name: str
    folder: Path
    experts: list[str]  # their folders, below that of all stages
    parents: list  # of each grown one: two places in `experts`
    total_seconds: float
    history: list


class Buckets(NamedTuple):
    """The seed data, dealt out to the experts."""

    name: str
    folder: Path
    rows: int  # of the seed data
    buckets: list[list[int]]  # rows of the seed data that each expert got
    perplexity: list[list[float]]  # of each expert on each row
    total_seconds: float
    history: list


class Routers(NamedTuple):
    """Routing vectors, and the experts as they are after step 4."""

    name: str
    folder: Path  # of expert-<i>/
    buckets: list[list[int]]  # rows of the seed data that each expert got
    before: list[float]  # mean sigmoid of each expert's vectors on its bucket
    after: list[float]
    total_seconds: float
    history: list


class Routed(NamedTuple):
    """Which experts the tokens of each domain go to."""

    name: str
    folder: Path
    counts: dict  # domain -> [L][E] slots
    layers: list[str]
    total_seconds: float
    history: list
