"""The figures of the ESFT paper that need no tuning, one command each: they use only the base's
routers.

counts        experts that each task trains, by layer; how gate values concentrate on few experts; a
              page with
              held-out text, each token coloured by the share of its experts that train      Figures 4, 2 and 9
overlap       top experts shared by two samples, of the same task and of different tasks     Figure 3
sample-size   the same, by the size of the samples                                           Figure 8

The analyses are in `analyses`; each has its picture here.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_runtime.config import check_choice, check_positive
from moe_runtime.methods.esft.selection import SCORES
from papers.engine import plots
from papers.engine.plots import GREY, cycle
from papers.engine.tables import Command, Finding, Run, different, finite
from papers.esft import analyses
from papers.esft.analyses import ExpertCounts, GateMass, Overlap, SampleSizes
from papers.esft.recipe import EsftRecipe
from papers.esft.study import Stages


def gate_mass(mass: GateMass, title: str = "Gate values on the best experts of a layer"):
    """Draw the cumulative share over the experts by rank, mean and standard deviation over the
    layers (Fig. 2).
    """
    figure, axes = _figure((7.2, 4.9), title)
    ranks = range(1, len(mass.cumulative[0]) + 1)
    looks = cycle(len(mass.tasks))
    for task, means, sds, (colour, marker) in zip(
        mass.tasks, mass.cumulative, mass.cumulative_sd, looks, strict=True
    ):
        low, high = (
            [mean + sign * sd for mean, sd in zip(means, sds, strict=True)] for sign in (-1, 1)
        )
        axes.fill_between(ranks, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(ranks, means, color=colour, marker=marker, markersize=4, label=task)
    axes.plot(
        ranks, [rank / len(ranks) for rank in ranks], color=GREY, linestyle="--", label="balanced"
    )
    axes.set(xlabel="experts, best first", ylabel="share of a layer's gate values", ylim=(0, 1.02))
    axes.grid()
    plots.legend_below(figure, axes, "mean and sd over the layers", 3)
    return figure


def overlap(found: Overlap, title: str | None = None):
    """Draw the mean shared top experts of two samples, task by task (Fig. 3)."""
    values = [[math.nan if value is None else value for value in row] for row in found.shared]
    heading = title or f"Shared top-{found.top} experts of two samples, mean over the layers"
    label = f"experts of {found.top} (by chance {found.chance:.2f})"
    return _heat_map(values, found.tasks, found.tasks, heading, label, top=found.top, form="{:.2f}")


def sample_sizes(found: SampleSizes, title: str | None = None):
    """Draw the mean shared top experts against the size of the two samples, a line per task (Fig.
    8).
    """
    figure, axes = _figure(
        (7.2, 4.9),
        title or f"Shared top-{found.top} experts of two samples, by {found.score} score",
    )
    for task, shared, (colour, marker) in zip(
        found.tasks, found.shared, cycle(len(found.tasks)), strict=True
    ):
        axes.plot(found.sizes, shared, color=colour, marker=marker, label=task)
    axes.set_xscale("log", base=2)
    axes.set_xticks(found.sizes, [f"{size:,}" for size in found.sizes], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set(
        xlabel="tokens of a sample",
        ylabel=f"experts of {found.top}, mean over the layers",
        ylim=(0, found.top * 1.03),
    )
    axes.grid()
    plots.legend_below(figure, axes, columns=3)
    return figure


def expert_counts(found: ExpertCounts, title: str = "Experts that are trained"):
    """Draw the number of trained experts by task and layer (Fig. 4)."""
    tasks = [
        f"{task}\n{share:.1%} of all" for task, share in zip(found.tasks, found.shares, strict=True)
    ]
    label = f"experts of {found.num_experts}"
    top = max(max(map(max, found.counts)), 1)
    figure = _heat_map(found.counts, tasks, found.layers, title, label, top=top, form="{:.0f}")
    figure.axes[0].set(xlabel="layer")
    return figure


def _heat_map(values, rows, columns, title: str, label: str, *, top: float, form: str):
    figure, axes = _figure((max(6.4, 2.6 + 0.42 * len(columns)), 1.8 + 0.5 * len(rows)), title)
    plots.heat_map(axes, values, rows, columns, label, top=top, form=form)
    return figure


def _figure(size: tuple[float, float], title: str):
    return plots.new_figure(f"{title} (ESFT)", size)


TEXTS = 4  # per task on the page


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
        return [tuple(map(str, row)) for row in self.table[1:]]

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


def _counts(process: Run) -> dict:
    recipe = process.recipe
    found = []
    masses = []
    for stages in process.all:
        scores = {task: stages.scores(task).scores for task in recipe.tasks}
        first = next(iter(scores.values()))
        selections = {
            f"{task}, {score}": stages.selection(task, score)
            for task in recipe.tasks
            for score in SCORES
        }
        routed = first.num_experts - first.num_shared
        found.append(analyses.expert_counts(selections, routed, first.layers))
        masses.append(analyses.gate_mass(scores))
    files = {}
    if process.is_main:
        files = {
            "gate mass": process.out / "counts-gate-mass.png",
            "page": process.out / "counts.html",
        }
        plots.save(gate_mass(masses[0]), files["gate mass"])
        _page(process, files["page"])

    def line(place: int, name: str) -> tuple:
        rows = [one.counts[place] for one in found]
        mean = statistics.fmean(statistics.fmean(row) for row in rows)
        share = statistics.fmean(one.shares[place] for one in found)
        task, _, score = name.rpartition(", ")
        reach = masses[0].experts_for(0.5)[masses[0].tasks.index(task)]
        p = f"{getattr(recipe.p, score):g}"
        return (
            name,
            p,
            f"{mean:.1f}",
            min(map(min, rows)),
            max(map(max, rows)),
            f"{share:.1%}",
            reach,
        )

    names = found[0].tasks
    table = [
        (
            "task, score",
            "p",
            "experts per layer",
            "fewest",
            "most",
            "of all",
            "experts with half of the gate values",
        )
    ]
    table += [line(place, name) for place, name in enumerate(names)]
    note = f"{found[0].num_experts} routed experts in each of {len(found[0].layers)} layers."

    def summary(report: Study) -> list[str]:
        return [f"{name}: {path}" for name, path in report.files.items()]

    return {"found": found, "table": table, "note": note, "files": files, "summary": summary}


def _page(process: Run, path) -> None:
    """Write the page: held-out examples of every task, under the selection by token scores, as in
    the paper.
    """
    stages: Stages = process.all[0]
    model = stages.base_model()
    tokenizer = stages.tokenizer
    recipe = process.recipe
    texts = {}
    for task in recipe.tasks:
        rows = stages.part(f"{task}-held_out").select(range(TEXTS))
        decoded = [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows]
        selection = stages.selection(task, "token")
        texts[task] = analyses.token_shares(
            model, tokenizer, decoded, selection, max_length=recipe.max_length
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    analyses.write_page(
        path, texts, title=f"Experts that ESFT-Token trains, p = {recipe.p.token:g}"
    )


def _means(found: Sequence) -> list[tuple]:
    """Return a row per task with the shared top experts, means over the seeds."""
    rows = [
        [f"{statistics.fmean(cell):.2f}" for cell in zip(*row)]
        for row in zip(*(one.shared for one in found))
    ]
    return [(name, *row) for name, row in zip(found[0].tasks, rows, strict=True)]


def _overlap(process: Run, top: int, score: str) -> dict:
    found = []
    for stages in process.all:
        samples = {task: stages.halves(task) for task in process.recipe.tasks}
        found.append(analyses.overlap(samples, top, score))
    names = found[0].tasks

    table = [("sample of", *names), *_means(found)]
    note = (
        f"Of the top {top} experts by {score} score, those that two samples share, mean over the "
        "layers."
    )

    def summary(report: Study) -> list[str]:
        within, between = (
            [getattr(one, of) for one in found if getattr(one, of) is not None]
            for of in ("within", "between")
        )
        across = f", of two tasks {statistics.fmean(between):.2f}" if between else ""
        return [
            (
                f"Two samples of one task share {statistics.fmean(within):.2f} of {top}{across}; "
                f"by chance {found[0].chance:.2f}."
            )
        ]

    return {"found": found, "table": table, "note": note, "summary": summary}


def _sample_size(process: Run, top: int, score: str, sizes: Sequence[int] | None) -> dict:
    found = [stages.sample_sizes(sizes, top, score) for stages in process.all]
    taken = found[0].sizes
    table = [("task", *(f"{size:,}" for size in taken)), *_means(found)]
    note = (
        f"Of the top {top} experts by {score} score, those that two samples of this size share, "
        "mean over the layers."
    )

    def summary(report: Study) -> list[str]:
        last = statistics.fmean(row[-1] for one in found for row in one.shared)
        first = statistics.fmean(row[0] for one in found for row in one.shared)
        return [
            (
                f"Mean over the tasks: {first:.2f} of {top} at {taken[0]:,} tokens, {last:.2f} at "
                f"{taken[-1]:,}."
            )
        ]

    return {"found": found, "table": table, "note": note, "summary": summary}


def _check_top(recipe: EsftRecipe, top: int = analyses.TOP, score: str = "gate") -> dict:
    check_positive("top", top)
    check_choice("score", score, SCORES)
    small = recipe.pretrain
    if small is not None and top > small.num_experts:
        raise ValueError(
            f"top must be at most the {small.num_experts} routed experts of a layer, but got {top}"
        )
    return {"top": top, "score": score}


def _check_sizes(recipe: EsftRecipe, sizes: Sequence[int] | None = None, **options) -> dict:
    if sizes is not None:
        sizes = different("sizes", sorted(set(sizes)), lambda size: check_positive("sizes", size))
    return _check_top(recipe, **options) | {"sizes": sizes and list(sizes)}


COMMANDS = {
    "counts": Command(
        "Experts that are trained",
        "ESFT, Figures 2, 4 and 9",
        _counts,
        lambda report: expert_counts(report.found[0]),
        report=Study,
    ),
    "overlap": Command(
        "Experts that tasks share",
        "ESFT, Figure 3",
        _overlap,
        lambda report: overlap(report.found[0]),
        _check_top,
        Study,
    ),
    "sample-size": Command(
        "Text that finds the experts",
        "ESFT, Figure 8",
        _sample_size,
        lambda report: sample_sizes(report.found[0]),
        _check_sizes,
        Study,
    ),
}
