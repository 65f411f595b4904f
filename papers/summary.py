"""What each method gains over its best control, from the JSON files of tables.

    python -m papers.summary docs/papers papers/results/*.json

prints a table in Markdown and draws docs/papers/summary.svg.

    difference = held-out loss of the method - held-out loss of the control       for each seed

Where a method has several settings, validation rows choose one; of the controls the one with the
lowest held-out loss counts, which favours the controls.
"""

import operator
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moe_runtime.config import check_choice
from moe_runtime.io.files import read_json
from papers.engine import plots
from papers.engine.compare import signed

BETTER = "better with every seed"
# table -> method, task, and patterns of the names of the method and of its controls
KINDS = {
    "overfit": ("XFT", "few examples, several epochs", "XFT, .*", "(SFT|SFT last|EMA|SWA), .*"),
    "frontier": ("ESFT", "general text at equal task loss", "ESFT-Token", "(?!ESFT-Gate).*"),
    "budget": ("UpIT", "at most equal steps", "UpIT", "(?!UpIT|base).*"),
    "ablate": (
        "UltraFuser",
        "one model for several tasks",
        "two-stage, balanced",
        ".*, tuned further",
    ),
}


class Row(NamedTuple):
    """A method beside its best control."""

    method: str
    task: str
    ours: str
    best_control: str
    differences: list[float]  # one for each seed

    @property
    def verdict(self) -> str:
        """What all seeds say together."""
        if len(self.differences) == 1:
            return "one seed"
        if max(self.differences) < 0:
            return BETTER
        if min(self.differences) > 0:
            return "worse with every seed"
        return "undecided"

    def cells(self) -> tuple[str, ...]:
        """Return the row as text."""
        return *self[:-1], ", ".join(map(signed, self.differences)), self.verdict


COLUMNS = ("method", "task", "ours", "best control", "difference with each seed", "verdict")


def row_of(path: Path) -> Row:
    """Return the row of a table.

    Raises ValueError for other tables, and for several settings of the method without validation
    rows to choose one.
    """
    report = read_json(path)
    check_choice(f"the table in {path.name}", report.get("command"), tuple(KINDS))
    method, task, ours, controls = KINDS[report["command"]]
    if "ladders" in report:
        # ESFT's frontier: the deepest level that a control reaches too
        reached = filter(report["comparisons"].get, report["comparisons"])
        depth = max(reached, key=float)
        found = _named(report["comparisons"][depth], controls)
        best = min(found, key=operator.itemgetter("difference"))
        task += f", {depth} below the base's"
        return Row(method, task, ours, best["name"], [*map(operator.neg, best["by_seed"])])
    settings = _named(report["methods"], ours)
    chosen = settings[0]
    if len(settings) > 1:
        chosen = min(settings, key=_validation)
    best = min(_named(report["methods"], controls), key=_loss)
    differences = [*map(operator.sub, _losses(chosen), _losses(best))]
    return Row(method, task, _shown(chosen), _shown(best), differences)


def _named(methods: Sequence[dict], pattern: str) -> list[dict]:
    named = []
    for method in methods:
        if re.fullmatch(pattern, method["name"]):
            named.append(method)
    return named


def _losses(method: dict, name: str = "loss") -> list:
    return [seed.get(name) for seed in method["seeds"]]


def _loss(method: dict) -> float:
    return statistics.fmean(_losses(method))


def _validation(method: dict) -> float:
    losses = _losses(method, "validation")
    if None in losses:
        raise ValueError(f"No validation rows choose among the settings of {method['name']!r}")
    return statistics.fmean(losses)


def _shown(method: dict) -> str:
    return f"{method['name']}: {_loss(method):.4f}"


def picture(rows: Sequence[Row]):
    """Draw the differences; the title says for how many methods all seeds agree on a gain."""
    gains = sum(row.verdict == BETTER for row in rows)
    title = f"Better than the best control with every seed: {gains} of {len(rows)} methods"
    figure, axes = plots.new_figure(title, (8.2, 1.4 + 0.55 * len(rows)))
    axes.axvline(0, color=plots.GREY)
    for y, row in enumerate(rows):
        seeds = row.differences
        axes.plot(seeds, [y] * len(seeds), "o", markerfacecolor="none", color=plots.BLUE)
        axes.plot(statistics.fmean(seeds), y, "D", color=plots.BLUE)
    axes.set_yticks(range(len(rows)), [f"{row.method}: {row.task}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(
        "held-out loss minus the control's (left: better)\nrings: seeds, diamonds: means"
    )
    axes.grid(axis="x")
    return figure


def write(out: Path, paths: Sequence[Path]) -> list[str]:
    """Write OUT/summary.svg; return the lines of a table in Markdown, a row for each report."""
    rows = [*map(row_of, paths)]
    plots.save(picture(rows), out / "summary.svg")
    cells = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells() for row in rows)]
    return [f"| {' | '.join(line)} |" for line in cells]


if __name__ == "__main__":
    print(*write(Path(sys.argv[1]), [*map(Path, sys.argv[2:])]), sep="\n")
