"""The experts that each task trains, found by running the base alone: nothing is tuned.

counts    experts by layer, how gate values concentrate on few experts, and a page with held-out
          text, each token coloured by the share of its experts that train    Figures 4, 2 and 9

The analyses are in `analyses`; the pictures are here.
"""

import statistics
from dataclasses import dataclass, field

from moe_runtime.methods.esft.selection import SCORES
from papers.engine import plots
from papers.engine.plots import GREY, cycle
from papers.engine.tables import Command, Finding, Run, finite
from papers.esft import analyses
from papers.esft.analyses import ExpertCounts, GateMass
from papers.esft.study import Stages


def gate_mass(mass: GateMass, title: str = "Gate values on the best experts of a layer"):
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


def expert_counts(counts: ExpertCounts, title: str = "Experts that are trained"):
    """Draw the number of trained experts by task and layer (Fig. 4)."""
    tasks = []
    for task, share in zip(counts.tasks, counts.shares, strict=True):
        tasks.append(f"{task}\n{share:.1%} of all")
    label = f"experts of {counts.num_experts}"
    top = max(max(map(max, counts.counts)), 1)
    size = (max(6.4, 2.6 + 0.42 * len(counts.layers)), 1.8 + 0.5 * len(tasks))
    figure, axes = plots.new_figure(f"{title} (ESFT)", size)
    plots.heat_map(axes, counts.counts, tasks, counts.layers, label, top=top, form="{:.0f}")
    axes.set(xlabel="layer")
    return figure


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
        summary = []
        for name, path in report.files.items():
            summary.append(f"{name}: {path}")
        return summary

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
        decoded = []
        for row in rows:
            decoded.append(tokenizer.decode(row["input_ids"], skip_special_tokens=True))
        selection = stages.selection(task, "token")
        texts[task] = analyses.token_shares(
            model, tokenizer, decoded, selection, max_length=recipe.max_length
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    analyses.write_page(
        path, texts, title=f"Experts that ESFT-Token trains, p = {recipe.p.token:g}"
    )


COMMANDS = {
    "counts": Command(
        "Experts that are trained",
        "ESFT, Figures 2, 4 and 9",
        _counts,
        lambda report: expert_counts(report.found[0]),
        report=Study,
    )
}
