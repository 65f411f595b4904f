"""What UpIT's stages leave behind beside models judged by domain: experts on the way, a router's rows, its routing."""

from pathlib import Path
from typing import NamedTuple


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
