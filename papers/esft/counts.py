"""The experts that each task trains, found by running the base alone: nothing is tuned.

gate mass    c_r = sum of the r largest shares g_e / sum_e g_e of a layer    ESFT, Fig. 2
counts       experts that a selection trains, by layer                       ESFT, Fig. 4
"""

import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moe_runtime.methods.esft.scores import ExpertScores
from moe_runtime.methods.esft.selection import SCORES, ExpertSelection
from papers.engine import plots
from papers.engine.plots import GREY, cycle
from papers.engine.tables import Command, Finding, Run, columns_of, finite


class GateMass(NamedTuple):
    """The share of a layer's gate values on its r best experts, r = 1, 2, ...: mean and standard
    deviation over the layers.
    """

    tasks: Sequence[str]
    cumulative: Sequence[Sequence[float]]  # [tasks][R]
    cumulative_sd: Sequence[Sequence[float]]

    def experts_for(self, mass: float) -> list[int]:
        """Return how many experts per task hold at least `mass` of the gate values, on average over
        the layers.
        """
        counts = []
        for row in self.cumulative:
            counts.append(
                next((r for r, held in enumerate(row, 1) if held >= mass - 1e-9), len(row))
            )
        return counts


def gate_mass(scores: Mapping[str, ExpertScores]) -> GateMass:
    """Sort each layer's shares of the gate scores in descending order (Fig. 2); `scores` of one
    model, by task.
    """
    shapes = {(one.layers, one.num_experts, one.num_shared) for one in scores.values()}
    if len(shapes) != 1:
        problem = f"of {len(shapes)} kinds of models" if shapes else "empty"
        raise ValueError(f"scores must be scores of one model's layers, but is {problem}")
    means = []
    deviations = []
    for one in scores.values():
        table = one.scores("gate")[:, one.num_shared :]
        share = (table / table.sum(1, keepdim=True)).sort(1, descending=True).values
        means.append(share.cumsum(1).mean(0).tolist())
        deviations.append(share.cumsum(1).std(0, correction=0).tolist())
    return GateMass(tuple(scores), means, deviations)


class ExpertCounts(NamedTuple):
    """Experts that train, by task and layer."""

    tasks: Sequence[str]
    layers: Sequence[int]
    counts: Sequence[Sequence[int]]  # [tasks][layers]
    num_experts: int  # routed experts per layer

    @property
    def shares(self) -> list[float]:
        """The share of all routed experts that trains, per task."""
        return [statistics.fmean(row) / self.num_experts for row in self.counts]


def expert_counts(
    selections: Mapping[str, ExpertSelection], num_experts: int, layers: Sequence[int]
) -> ExpertCounts:
    """Count the selected experts per layer (Fig. 4); `num_experts` are the routed ones of a
    layer.
    """
    counts = []
    for one in selections.values():
        counts.append([len(one.experts.get(layer, ())) for layer in layers])
    return ExpertCounts(tuple(selections), layers, counts, num_experts)


def draw_gate_mass(mass: GateMass):
    """Draw the cumulative share over the experts by rank, mean and standard deviation over the
    layers (Fig. 2).
    """
    title = "Gate values on the best experts of a layer (ESFT)"
    figure, axes = plots.new_figure(title, (7.2, 4.9))
    R = len(mass.cumulative[0])
    ranks = range(1, R + 1)
    for task, means, sds, (colour, marker) in zip(
        *mass,
        cycle(len(mass.tasks)),
        strict=True,
    ):
        low = map(operator.sub, means, sds)
        high = map(operator.add, means, sds)
        axes.fill_between(
            ranks,
            [*low],
            [*high],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
        axes.plot(
            ranks,
            means,
            color=colour,
            marker=marker,
            markersize=4,
            label=task,
        )
    axes.plot(
        [1, R],
        [1 / R, 1],
        color=GREY,
        linestyle="--",
        label="balanced",
    )
    axes.set(xlabel="experts, best first", ylabel="share of a layer's gate values", ylim=(0, 1.02))
    axes.grid()
    plots.legend_below(figure, axes, "mean and sd over the layers", 3)
    return figure


def draw_counts(counts: ExpertCounts):
    """Draw the number of trained experts by task and layer (Fig. 4)."""
    tasks = []
    for task, share in zip(counts.tasks, counts.shares, strict=True):
        tasks.append(f"{task}\n{share:.1%} of all")
    label = f"experts of {counts.num_experts}"
    top = max(1, *map(max, counts.counts))
    size = (max(6.4, 2.6 + 0.42 * len(counts.layers)), 1.8 + 0.5 * len(tasks))
    figure, axes = plots.new_figure("Experts that are trained (ESFT)", size)
    plots.heat_map(
        axes,
        counts.counts,
        tasks,
        counts.layers,
        label,
        top=top,
        form="{:.0f}",
    )
    axes.set(xlabel="layer")
    return figure


@dataclass(kw_only=True)
class Study(Finding):
    """The results for every seed's samples, as a table."""

    found: list[ExpertCounts]  # of each seed
    table: list[tuple]  # the first row holds the column names
    note: str
    files: dict = field(default_factory=dict)  # written next to the picture

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        return columns_of(*self.table[0])

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows as text, in the order of `columns`."""
        return [tuple(map(str, row)) for row in self.table[1:]]

    def legend(self) -> str:
        """Return what the table's numbers are."""
        over = "One seed, which draws"
        if len(self.seeds) > 1:
            over = f"Mean over {len(self.seeds)} seeds, which draw"
        return f"{self.note} {over} the samples."

    def to_dict(self) -> dict:
        """Return all of the report as JSON-ready values."""
        values = super().to_dict() | {"found": finite([one._asdict() for one in self.found])}
        del values["table"], values["note"]
        return values


COLUMNS = (
    "task, score",
    "p",
    "experts per layer",
    "fewest",
    "most",
    "of all",
    "experts with half of the gate values",
)


def _counts(process: Run) -> dict:
    recipe = process.recipe
    counts = []
    masses = []
    for stages in process.all:
        scores = {task: stages.scores(task).scores for task in recipe.tasks}
        first = next(iter(scores.values()))
        selections = {}
        for task in recipe.tasks:
            for score in SCORES:
                selections[f"{task}, {score}"] = stages.selection(task, score)
        routed = first.num_experts - first.num_shared
        counts.append(expert_counts(selections, routed, first.layers))
        masses.append(gate_mass(scores))
    picture = process.out / "counts-gate-mass.png"
    if process.is_main:
        plots.save(draw_gate_mass(masses[0]), picture)
    half = dict(
        zip(
            masses[0].tasks,
            masses[0].experts_for(0.5),
            strict=True,
        )
    )
    table: list[tuple] = [COLUMNS]
    for i, name in enumerate(counts[0].tasks):
        task, _, score = name.rpartition(", ")
        rows = [one.counts[i] for one in counts]  # of the seeds
        mean = statistics.fmean(map(statistics.fmean, rows))
        p = f"{getattr(recipe.p, score):g}"
        ends = min(map(min, rows)), max(map(max, rows))
        share = f"{mean / counts[0].num_experts:.1%}"
        table.append((name, p, f"{mean:.1f}", *ends, share, half[task]))
    num_experts = counts[0].num_experts
    return {
        "found": counts,
        "table": table,
        "note": f"{num_experts} routed experts in each of {len(counts[0].layers)} layers.",
        "files": {"gate mass": picture},
        "summary": lambda report: [f"gate mass: {picture}"],
    }


COMMANDS = {
    "counts": Command(
        "Experts that are trained",
        "ESFT, Figures 2 and 4",
        _counts,
        lambda report: draw_counts(report.found[0]),
        report=Study,
    )
}
