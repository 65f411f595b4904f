"""One style for all pictures, and the tables' figures with error bars over seeds.

Colours have a contrast of at least 3 on white and on the dark ground that an SVG takes where the
reader's pages are dark, and are told apart without colour vision; markers and names say the same. A
picture of a run that only checks that everything works says so across its middle.
"""

import importlib
import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moe_runtime.io.files import atomic_file
from moe_runtime.io.rows import require
from papers.engine.compare import signed

# the first three are of Okabe and Ito, 2008
BLUE, VERMILION, GREEN, BROWN, PURPLE, NAVY, INK, GREY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#5B380E",
    "#B040E0",
    "#1B2A8F",
    "#222222",
    "#606060",
)
COLOURS = (BLUE, VERMILION, GREEN, BROWN, PURPLE, NAVY, INK)
MARKERS = "osD^vPX"
OF_VERDICT = {"lower": GREEN, "higher": VERMILION}
LOSS = "held-out loss per label token (lower is better)"
# times the median distance from the reference: beyond it a method is named at the edge, not drawn
# to scale
FAR = 6
DARK = 0.55  # of a map's range: beyond it numbers are white
# text as text, the font that matplotlib brings, ids that are the same in every run; a name with two
# $ is no formula
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "moe_runtime",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
}
INVERTED = (
    "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.9) hue-rotate(180deg) } "
    "}</style>\n"
)
TINY = "tiny run\nnot a result"


def new_figure(
    title: str,
    size: tuple[float, float],
    rows: int = 1,
    columns: int = 1,
    mosaic: str | None = None,
    **subplots,
):
    """Return a Figure without pyplot's global state, and its axes, a dict of them with a `mosaic`
    such as "AB;CC".
    """
    kind = require("matplotlib.figure", "plot").Figure
    with require("matplotlib", "plot").rc_context(SETTINGS):
        figure = kind(figsize=size, layout="constrained", facecolor="white")
        if title:
            figure.suptitle(title, fontsize=11)
        if mosaic:
            return figure, figure.subplot_mosaic(mosaic)
        return figure, figure.subplots(rows, columns, **subplots)


def figure_of(report, size: tuple[float, float], rows: int = 1, columns: int = 1, **subplots):
    """Return a report's Figure and axes; rows share the x axis unless `subplots` says otherwise.

    The title is the report's first comparison, if it has one, and its own title.
    """
    title = f"{report.title} ({report.source})"
    comparisons = re.findall(
        r".* against .*: (?:lower|higher|no difference)[^(]*", "\n".join(report.summary)
    )
    if comparisons:
        title = f"{comparisons[0].strip()}\n{title}"
    return new_figure(
        title,
        size,
        rows,
        columns,
        **{"sharex": rows > 1} | subplots,
    )


def watermark(figure, tiny: bool = True):
    """Say across a figure that its numbers mean nothing, if its run was `tiny`; return it."""
    if tiny:
        figure.text(
            0.5,
            0.5,
            TINY,
            rotation=30,
            fontsize=44,
            color=VERMILION,
            alpha=0.35,
            ha="center",
            va="center",
            zorder=9,
        )
    return figure


def save(figure, path: Path) -> None:
    """Write a figure in the format of its suffix, atomically; the same numbers make the
    same file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = None
    if path.suffix == ".svg":
        metadata = {"Date": None, "Creator": None}
    elif path.suffix == ".png":
        metadata = {"Software": None}
    with atomic_file(path) as beside, require("matplotlib", "plot").rc_context(SETTINGS):
        figure.savefig(
            beside,
            dpi=150,
            metadata=metadata,
            format=path.suffix[1:] or "png",
        )
        if path.suffix == ".svg":
            text = beside.read_text(encoding="utf-8")
            text = text.replace(" <defs>", f" {INVERTED} <defs>", 1)
            beside.write_text(text, encoding="utf-8")


def cycle(count: int) -> list[tuple[str, str]]:
    """Return colours and markers for `count` series; beyond the seven colours the markers
    differ.
    """
    pairs = []
    for i in range(count):
        turn, colour = divmod(i, len(COLOURS))
        pairs.append((COLOURS[colour], MARKERS[(colour + turn) % len(MARKERS)]))
    return pairs


def legend_below(figure, axes, title: str = "", columns: int = 2) -> None:
    """Put a legend of everything that has a name in `axes` below the figure, where it hides
    nothing.
    """
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, len(handles)),
        title=title,
        fontsize=9,
        title_fontsize=9,
        frameon=False,
    )


def heat_map(
    axes, values, rows: Sequence, columns: Sequence, label: str, *, top: float, form: str
) -> None:
    """Draw a table of numbers from 0 to `top` as colours, with the numbers in it; NaN is
    left out.
    """
    image = axes.imshow(
        values,
        aspect="auto",
        cmap="Blues",
        vmin=0,
        vmax=top,
    )
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if math.isnan(value):
                continue
            colour = "white" if value > DARK * top else INK
            text = form.format(value)
            axes.text(
                x,
                y,
                text,
                ha="center",
                va="center",
                color=colour,
                fontsize=8,
            )
    turned = {}
    if len("".join(map(str, columns))) > 36:
        turned = {"rotation": 30, "ha": "right"}
    axes.set_xticks(
        range(len(columns)),
        columns,
        **turned,
    )
    axes.set_yticks(range(len(rows)), rows)
    axes.figure.colorbar(image, ax=axes, label=label)


def grouped(
    axes,
    groups: Sequence,
    series: Mapping[str, Sequence],
    spans: Mapping | None = None,
    form: str = "",
    colours: Mapping = {},
) -> None:
    """Draw a bar from zero per group and series, with a line from low to high where `spans` has
    them; None is no bar.

    With `form` a number stands at each bar, so that one of zero is seen. `colours` may name the
    series' own.
    """
    width = 0.82 / len(series)
    # lines on dark bars
    halo = require("matplotlib.patheffects", "plot").withStroke(linewidth=2.6, foreground="white")
    spans = spans or {}
    for i, ((name, values), (colour, _)) in enumerate(zip(series.items(), cycle(len(series)))):
        offset = (i - (len(series) - 1) / 2) * width
        at = [group + offset for group in range(len(groups))]
        heights = [value or 0 for value in values]
        colour = colours.get(name, colour)
        axes.bar(
            at,
            heights,
            0.94 * width,
            color=colour,
            label=name,
        )
        for x, value, span in zip(
            at,
            values,
            spans.get(name, [None] * len(at)),
            strict=True,
        ):
            top = value
            if span is not None:
                top = max(span) if value is None else max(value, *span)
                axes.plot(
                    [x, x],
                    span,
                    color=INK,
                    linewidth=1.1,
                    marker="_",
                    markersize=4,
                    path_effects=[halo],
                )
            if form and value is not None:
                axes.annotate(
                    form.format(value),
                    (x, top),
                    xytext=(0, 3),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(axis="y")


def losses(axes, rows: Sequence[tuple[str, float, str]], reference: str) -> None:
    """Draw a loss per (name, loss, colour), from the top down, with its number; those far from the
    reference's at the edge.
    """
    values = {name: loss for name, loss, _ in rows}
    near = _near(values, reference)
    shown = [values[name] for name in near] or [0.0]
    margin = (max(shown) - min(shown)) or 0.01
    axes.axvline(
        values[reference],
        color=GREY,
        linestyle="--",
        linewidth=1.2,
        zorder=1,
    )
    for y, (name, loss, colour) in enumerate(rows):
        if name not in near:
            _at_edge(
                axes,
                y,
                loss,
                loss > values[reference],
                colour,
            )
            continue
        axes.plot(
            loss,
            y,
            "D",
            color=colour,
            label=name,
        )
        axes.annotate(
            f"{loss:.4f}",
            (loss, y),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox=PLATE,
        )
    axes.set_yticks(range(len(rows)), values)
    axes.set_xlim(min(shown) - 0.12 * margin, max(shown) + 0.5 * margin)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x")


PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def _at_edge(axes, y: float, loss: float, right: bool, colour: str) -> None:
    x = 0.015
    side = "left"
    text = f"\u2190  {loss:.3f}"
    if right:
        x = 0.985
        side = "right"
        text = f"{loss:.3f}  \u2192"
    axes.text(
        x,
        y,
        text,
        transform=axes.get_yaxis_transform(),
        ha=side,
        va="center",
        color=colour,
        bbox=PLATE,
    )


def _panels(report) -> list:
    """Return the report, and its report on general text if it has one."""
    reports = [report]
    if hasattr(report, "general"):
        reports.append(report.general)
    return reports


def dots(report):
    """Plot every method's losses by seed, with the reference as a line and `general` losses;
    outliers are named at the edge.
    """
    reports = _panels(report)
    width = 8.2 if len(reports) == 1 else 13.0
    size = (width, 1.6 + 0.52 * len(report.entries))
    figure, panels = figure_of(report, size, columns=len(reports), squeeze=False)
    for axes, one in zip(panels.flat, reports, strict=True):
        dots_in(axes, one)
        label = getattr(one, "label", LOSS)
        about = f"diamonds: {_seeds(report)}; rings: seeds; dashed: {report.reference}"
        axes.set_xlabel(f"{label}\n{about}")
    return figure


def dots_in(axes, report, label_of: Callable | None = None) -> None:
    """Draw a report's methods as dots, to the right of each what `label_of` makes of its entry, or
    the verdict on it.
    """
    entries = report.entries[::-1]
    reference = report.entry(report.reference)
    axes.axvline(
        reference.loss,
        color=GREY,
        linestyle="--",
        linewidth=1.2,
        zorder=1,
    )
    near = _near({entry.name: entry.loss for entry in entries}, reference.name)
    values = []
    for y, entry in enumerate(entries):
        one = report.comparison(entry.name)
        colour = BLUE if one is None else OF_VERDICT.get(one.verdict, GREY)
        if entry.name in near:
            sd = _sd(entry)
            values += [*entry.losses, entry.loss - sd, entry.loss + sd]
            axes.plot(
                entry.losses,
                [y] * len(entry.losses),
                "o",
                markerfacecolor="none",
                color=colour,
                alpha=0.7,
            )
            axes.errorbar(
                entry.loss,
                y,
                xerr=_bars(report, [sd]),
                fmt="D",
                color=colour,
                capsize=4,
                markersize=7,
            )
        else:
            _at_edge(
                axes,
                y,
                entry.loss,
                not entry.loss < reference.loss,
                colour,
            )
        axes.annotate(
            label_of(entry) if label_of else _said(one),
            (1.02, y),
            xycoords=axes.get_yaxis_transform(),
            va="center",
            color=colour,
            fontsize=9,
        )
    if values:
        margin = 0.06 * (max(values) - min(values)) or 0.01
        axes.set_xlim(min(values) - margin, max(values) + margin)
    axes.set_yticks(range(len(entries)), [entry.name for entry in entries])
    axes.set_ylim(-0.6, len(entries) - 0.4)
    axes.grid(axis="x")


def sweep(report):
    """Plot losses over the swept value, a line per kind of model and the reference as a band;
    general losses below.
    """
    reports = _panels(report)
    size = (7.2, 1.6 + 3.4 * len(reports))
    figure, panels = figure_of(report, size, rows=len(reports), squeeze=False)
    for axes, one in zip(panels.flat, reports, strict=True):
        _sweep(axes, one, report.extra)
        axes.set_ylabel(getattr(one, "label", LOSS).replace(" (", "\n("), fontsize=9)
    axes.set_xlabel(report.extra["x_label"])
    about = _seeds(report)
    if len(report.seeds) > 1:
        about += "; thin: seeds"
    legend_below(figure, axes, about, 3)
    return figure


def _sweep(axes, report, extra: dict) -> None:
    reference = report.entry(report.reference)
    x = extra["x"]
    if reference.name not in x:
        sd = _sd(reference)
        axes.axhline(
            reference.loss,
            color=GREY,
            linestyle="--",
            label=reference.name,
        )
        axes.axhspan(
            reference.loss - sd,
            reference.loss + sd,
            color=GREY,
            alpha=0.15,
            linewidth=0,
        )
    axes.margins(x=0.1)  # for the points that stand aside, below
    kinds: dict[str, list] = {}
    lines = itertools.cycle((":", "-.", (0, (1, 3))))
    for entry in report.entries:
        if entry.name in x:
            kinds.setdefault(entry.name.partition(",")[0], []).append(entry)
        elif entry is not reference:
            axes.axhline(
                entry.loss,
                color=INK,
                linestyle=next(lines),
                label=entry.name,
            )
    moved = importlib.import_module("matplotlib.transforms").offset_copy
    is_shared = len(x) > len(set(x.values()))  # several points have the same x
    for i, ((kind, entries), (colour, marker)) in enumerate(zip(kinds.items(), cycle(len(kinds)))):
        at = [x[entry.name] for entry in entries]
        means = [entry.loss for entry in entries]
        deviations = [*map(_sd, entries)]
        if len(report.seeds) > 1:
            for losses in zip(*(entry.losses for entry in entries), strict=True):
                axes.plot(
                    at,
                    losses,
                    color=colour,
                    alpha=0.3,
                    linewidth=0.8,
                )
        for where, mean, sd in zip(at, means, deviations, strict=True):
            axes.update_datalim([(where, mean - sd), (where, mean + sd)])
        # points of one x stand side by side, so that none hides another
        aside = 6 * (i - (len(kinds) - 1) / 2) * is_shared
        axes.errorbar(
            at,
            means,
            yerr=_bars(report, deviations),
            color=colour,
            marker=marker,
            capsize=4,
            label=kind,
            transform=moved(axes.transData, axes.figure, aside, 0, "points"),
        )
    if extra.get("x_log"):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        # the minor ticks' numbers stand in the same line
        axes.tick_params(axis="x", which="both", length=3, pad=4)
    else:
        axes.set_xticks(sorted(set(x.values())))
    axes.grid()


def curves(report):
    """Plot the held-out loss over steps: the mean over seeds, and each seed as a thin line; the
    others' are in the legend.
    """
    figure, axes = figure_of(report, (7.2, 5.6))
    watched = [entry for entry in report.entries if entry.results[0].history]
    for entry, (colour, marker) in zip(watched, cycle(len(watched)), strict=True):
        columns = []  # the losses of each seed
        for result in entry.results:
            steps, losses = zip(*result.history, strict=True)
            axes.plot(
                steps,
                losses,
                color=colour,
                alpha=0.35,
                linewidth=0.8,
            )
            columns.append(losses)
        points = [*zip(*columns, strict=True)]
        spread = None
        if len(columns) > 1:
            spread = [*map(statistics.stdev, points)]
        axes.errorbar(
            steps,
            [*map(statistics.fmean, points)],
            yerr=spread,
            color=colour,
            marker=marker,
            capsize=4,
            label=f"{entry.name}: {entry.loss:.4f} at the end",
        )
    for entry in report.entries:
        if entry not in watched:
            axes.plot(
                [],
                [],
                " ",
                label=f"{entry.name}: {entry.loss:.4f}, no curve",
            )
    axes.set(xlabel="step", ylabel=LOSS)
    axes.grid()
    legend_below(figure, axes, f"{_seeds(report)}; thin: seeds")
    return figure


def _near(values: Mapping[str, float], reference: str) -> set[str]:
    """Return what to plot to scale: finite, and not so far from the reference that the others would
    coincide.
    """
    distances = {}
    for name, value in values.items():
        if math.isfinite(value):
            distances[name] = abs(value - values[reference])
    others = [distance for name, distance in distances.items() if name != reference]
    limit = 0
    if len(others) > 1:
        limit = FAR * statistics.median(others)
    return {name for name, distance in distances.items() if distance <= (limit or math.inf)}


def _said(one) -> str:
    if one is None:
        return "reference"
    if math.isnan(one.difference):
        return one.verdict
    return f"{signed(one.difference)}, {one.verdict}"


def _sd(entry) -> float:
    return 0.0 if math.isnan(entry.sd) else entry.sd


def _seeds(report) -> str:
    if len(report.seeds) == 1:
        return "one seed"
    return f"mean and sd, {len(report.seeds)} seeds"


def _bars(report, deviations) -> list[float] | None:
    """Return error bars; None where one seed has no deviation."""
    return [*deviations] if len(report.seeds) > 1 else None
