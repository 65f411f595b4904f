"""The experts that each task trains, found by running the base alone: nothing is tuned.

gate mass    c_r = sum of the r largest shares g_e / sum_e g_e of a layer    ESFT, Fig. 2
counts       experts that a selection trains, by layer                       ESFT, Fig. 4
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_runtime.config import check_positive
from moe_runtime.methods.esft.scores import ExpertScores
from moe_runtime.methods.esft.selection import SCORES, ExpertSelection
from papers.engine import plots
from papers.engine.plots import GREY, cycle
from papers.engine.tables import Command, Finding, Run, finite


class _Plain:
    def to_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-ready."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class GateMass(_Plain):
    """The share of a layer's gate values on its r best experts, r = 1, 2, ...: mean and standard
    deviation over the layers.
    """

    tasks: Sequence[str]
    share: Sequence[Sequence[float]]  # [tasks][R], of the expert of each rank alone
    cumulative: Sequence[Sequence[float]]  # [tasks][R]
    share_sd: Sequence[Sequence[float]]
    cumulative_sd: Sequence[Sequence[float]]

    def experts_for(self, mass: float) -> list[int]:
        """Return how many experts per task hold at least `mass` of the gate values, on average over
        the layers.
        """
        reach = []
        for row in self.cumulative:
            reach.append([r for r, value in enumerate(row, 1) if value >= mass - 1e-9])
        experts_for = []
        for found, row in zip(reach, self.cumulative, strict=True):
            experts_for.append(min(found, default=len(row)))
        return experts_for


def gate_mass(scores: Mapping[str, ExpertScores], score: str = "gate") -> GateMass:
    """Sort each layer's shares of the scores in descending order (Fig. 2); `scores` of one model,
    by task.
    """
    _check(scores.values(), "scores")
    values = {"share": [], "cumulative": [], "share_sd": [], "cumulative_sd": []}
    for one in scores.values():
        table = one.scores(score)[:, one.num_shared :]
        share = (table / table.sum(1, keepdim=True)).sort(1, descending=True).values
        for name, rows in (("share", share), ("cumulative", share.cumsum(1))):
            values[name].append(rows.mean(0).tolist())
            values[f"{name}_sd"].append(rows.std(0, correction=0).tolist())
    return GateMass(tasks=tuple(scores), **values)


@dataclass(frozen=True, kw_only=True)
class ExpertCounts(_Plain):
    """Experts that train, by task and layer."""

    tasks: Sequence[str]
    layers: Sequence[int]
    counts: Sequence[Sequence[int]]  # [tasks][layers]
    num_experts: int  # routed experts per layer

    @property
    def shares(self) -> list[float]:
        """The share of all routed experts that trains, per task."""
        shares = []
        for row in self.counts:
            shares.append(sum(row) / (len(self.layers) * self.num_experts))
        return shares


def expert_counts(
    selections: Mapping[str, ExpertSelection], num_experts: int, layers: Sequence[int] | None = None
) -> ExpertCounts:
    """Count the selected experts per layer (Fig. 4); `num_experts` are the routed ones of a layer,
    `layers` all by default.
    """
    check_positive("num_experts", num_experts)
    layers = sorted(
        {n for one in selections.values() for n in one.experts} if layers is None else set(layers)
    )
    counts = []
    for one in selections.values():
        counts.append([len(one.experts.get(layer, ())) for layer in layers])
    return ExpertCounts(
        tasks=tuple(selections), layers=layers, counts=counts, num_experts=num_experts
    )


def _check(scores: Iterable[ExpertScores], name: str) -> None:
    scores = list(scores)
    shapes = set()
    for one in scores:
        shapes.add((one.layers, one.num_experts, one.num_shared))
    if len(shapes) != 1:
        problem = "empty" if not shapes else f"of {len(shapes)} kinds of models"
        raise ValueError(f"{name} must be scores of one model's layers, but is {problem}")


def draw_gate_mass(mass: GateMass, title: str = "Gate values on the best experts of a layer"):
    """Draw the cumulative share over the experts by rank, mean and standard deviation over the
    layers (Fig. 2).
    """
    figure, axes = plots.new_figure(f"{title} (ESFT)", (7.2, 4.9))
    ranks = range(1, len(mass.cumulative[0]) + 1)
    looks = cycle(len(mass.tasks))
    for task, means, sds, (colour, marker) in zip(
        mass.tasks, mass.cumulative, mass.cumulative_sd, looks, strict=True
    ):
        low = []
        for mean, sd in zip(means, sds, strict=True):
            low.append(mean + -1 * sd)
        high = []
        for mean, sd in zip(means, sds, strict=True):
            high.append(mean + 1 * sd)
        axes.fill_between(ranks, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(ranks, means, color=colour, marker=marker, markersize=4, label=task)
    axes.plot(
        ranks, [rank / len(ranks) for rank in ranks], color=GREY, linestyle="--", label="balanced"
    )
    axes.set(xlabel="experts, best first", ylabel="share of a layer's gate values", ylim=(0, 1.02))
    axes.grid()
    plots.legend_below(figure, axes, "mean and sd over the layers", 3)
    return figure


def draw_counts(counts: ExpertCounts, title: str = "Experts that are trained"):
    """Draw the number of trained experts by task and layer (Fig. 4)."""
    tasks = []
    for task, share in zip(counts.tasks, counts.shares, strict=True):
        tasks.append(f"{task}\n{share:.1%} of all")
    label = f"experts of {counts.num_experts}"
    top = max(1, *map(max, counts.counts))
    size = (max(6.4, 2.6 + 0.42 * len(counts.layers)), 1.8 + 0.5 * len(tasks))
    figure, axes = plots.new_figure(f"{title} (ESFT)", size)
    plots.heat_map(axes, counts.counts, tasks, counts.layers, label, top=top, form="{:.0f}")
    axes.set(xlabel="layer")
    return figure


@dataclass(kw_only=True)
class Study(Finding):
    """The results for every seed's samples, as a table."""

    found: list  # one result of `analyses` per seed
    table: list[tuple]  # the first row holds the column names
    note: str
    files: dict = field(default_factory=dict)  # written next to the picture

    def columns(self) -> list[tuple[str, str]]:
        """Return the table's columns and how they are aligned."""
        first, *others = self.table[0]
        return [(first, "left"), *((name, "right") for name in others)]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows as text, in the order of `columns`."""
        rows = []
        for row in self.table[1:]:
            rows.append(tuple(map(str, row)))
        return rows

    def legend(self) -> str:
        """Return what the table's numbers are."""
        if len(self.seeds) > 1:
            over = f"Mean over {len(self.seeds)} seeds, which draw"
        else:
            over = "One seed, which draws"
        return f"{self.note} {over} the samples."

    def to_dict(self) -> dict:
        """Return all of the report as JSON-ready values."""
        values = super().to_dict() | {"found": finite([one.to_dict() for one in self.found])}
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
    half = dict(zip(masses[0].tasks, masses[0].experts_for(0.5), strict=True))
    table: list[tuple] = [COLUMNS]
    for place, name in enumerate(counts[0].tasks):
        task, _, score = name.rpartition(", ")
        rows = [one.counts[place] for one in counts]  # of the seeds
        mean = statistics.fmean(map(statistics.fmean, rows))
        share = statistics.fmean(one.shares[place] for one in counts)
        p = f"{getattr(recipe.p, score):g}"
        ends = min(map(min, rows)), max(map(max, rows))
        table.append((name, p, f"{mean:.1f}", *ends, f"{share:.1%}", half[task]))
    note = f"{counts[0].num_experts} routed experts in each of {len(counts[0].layers)} layers."

    def summary(report: Study) -> list[str]:
        return [f"gate mass: {picture}"]

    files = {"gate mass": picture}
    return {"found": counts, "table": table, "note": note, "files": files, "summary": summary}


COMMANDS = {
    "counts": Command(
        "Experts that are trained",
        "ESFT, Figures 2 and 4",
        _counts,
        lambda report: draw_counts(report.found[0]),
        report=Study,
    )
}
