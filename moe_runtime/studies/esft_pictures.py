"""ESFT's own pictures: of each analysis in `esft_analyses` one. Those of the tables are in `pictures`."""

import math

from moe_runtime.data import require
from moe_runtime.studies.esft_analyses import ExpertCounts, GateMass, Overlap, SampleSizes
from moe_runtime.studies.pictures import COLOURS, GREY, MARKERS

DARK = 0.55  # of a map's range: beyond it numbers are white


def gate_mass(mass: GateMass, title: str = "Gate values on the best experts of a layer"):
    """Draw the cumulative share over the experts by rank, mean and standard deviation over the layers (Fig. 2)."""
    figure, axes = _figure((7.2, 4.4), title)
    ranks = range(1, len(mass.cumulative[0]) + 1)
    for task, means, sds, colour, marker in zip(
        mass.tasks, mass.cumulative, mass.cumulative_sd, *_styles(len(mass.tasks)), strict=True
    ):
        low, high = ([mean + sign * sd for mean, sd in zip(means, sds, strict=True)] for sign in (-1, 1))
        axes.fill_between(ranks, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(ranks, means, color=colour, marker=marker, markersize=4, label=task)
    axes.plot(ranks, [rank / len(ranks) for rank in ranks], color=GREY, linestyle="--", label="balanced")
    axes.set(xlabel="experts, best first", ylabel="share of a layer's gate values", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(title="mean and sd over the layers", fontsize=9, title_fontsize=9)
    return figure


def overlap(found: Overlap, title: str | None = None):
    """Draw the mean shared top experts of two samples, task by task (Fig. 3)."""
    values = [[math.nan if value is None else value for value in row] for row in found.shared]
    said = title or f"Shared top-{found.top} experts of two samples, mean over the layers"
    label = f"experts of {found.top} (by chance {found.chance:.2f})"
    return _heat_map(values, found.tasks, found.tasks, said, label, top=found.top, form="{:.2f}")


def sample_sizes(found: SampleSizes, title: str | None = None):
    """Draw the mean shared top experts over the size of the two samples, a line per task (Fig. 8)."""
    figure, axes = _figure(
        (7.2, 4.4), title or f"Shared top-{found.top} experts of two samples, by {found.score} score"
    )
    for task, shared, colour, marker in zip(found.tasks, found.shared, *_styles(len(found.tasks)), strict=True):
        axes.plot(found.sizes, shared, color=colour, marker=marker, label=task)
    axes.set_xscale("log", base=2)
    axes.set_xticks(found.sizes, [f"{size:,}" for size in found.sizes], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set(
        xlabel="tokens of a sample", ylabel=f"experts of {found.top}, mean over the layers", ylim=(0, found.top * 1.03)
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9)
    return figure


def expert_counts(found: ExpertCounts, title: str = "Experts that are trained"):
    """Draw the number of trained experts by task and layer (Fig. 4)."""
    tasks = [f"{task}\n{share:.1%} of all" for task, share in zip(found.tasks, found.shares, strict=True)]
    label = f"experts of {found.num_experts}"
    top = max(max(map(max, found.counts)), 1)
    figure = _heat_map(found.counts, tasks, found.layers, title, label, top=top, form="{:.0f}")
    figure.axes[0].set(xlabel="layer")
    return figure


def _heat_map(values, rows, columns, title: str, label: str, *, top: float, form: str):
    figure, axes = _figure((max(6.4, 2.6 + 0.42 * len(columns)), 1.8 + 0.5 * len(rows)), title)
    image = axes.imshow(values, aspect="auto", cmap="Blues", vmin=0, vmax=top)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            colour = "white" if value > DARK * top else "black"
            axes.text(
                x,
                y,
                "" if math.isnan(value) else form.format(value),
                ha="center",
                va="center",
                color=colour,
                fontsize=8,
            )
    turned = {"rotation": 30, "ha": "right"} if any(isinstance(name, str) for name in columns) else {}
    axes.set_xticks(range(len(columns)), columns, **turned)
    axes.set_yticks(range(len(rows)), rows)
    figure.colorbar(image, ax=axes, label=label)
    return figure


def _figure(size: tuple[float, float], title: str):
    """Return a Figure of its own, not pyplot's: no display and no global state."""
    figure = require("matplotlib.figure", "plot").Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{title} (ESFT)", fontsize=11)
    return figure, figure.subplots()


def _styles(count: int) -> tuple[list[str], list[str]]:
    """Colours and markers of `count` lines, from the start again when they are used up."""
    return [COLOURS[i % len(COLOURS)] for i in range(count)], [MARKERS[i % len(MARKERS)] for i in range(count)]
