"""What a stage of an UltraFuser study leaves behind: its losses by domain, the weights that its gate gives."""

from pathlib import Path
from typing import NamedTuple

from moe_runtime.studies.domain_results import by_domain


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
    active_parameters: int
    history: list  # (step, held-out loss), of a specialist that of its own domain
    steps_per_second: float
    trained_parameters: int = 0
    optimizer_bytes: int = 0
    source: str = ""  # what the model is loaded from: `folder`, or a given specialist's own place
    course: list | None = None  # (step, {domain: loss}), where the training was watched

    @property
    def domains(self) -> dict[str, float]:
        """The loss of each domain."""
        return by_domain(self.losses, self.tokens, self.rows)
