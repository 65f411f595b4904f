"""Figures of the tables, with error bars over seeds and colours for colour-blind readers, and HTML pages of coloured tokens."""

import html
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from moe_runtime.experiments.compare import signed
from moe_runtime.io.files import atomic_file
from moe_runtime.io.rows import require

# Okabe and Ito, 2008
BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#777777",
)  # fmt: skip
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY, "#000000")
MARKERS = "osD^vPX"
OF_VERDICT = {"lower": GREEN, "higher": VERMILION}
LOSS = "held-out loss per label token (lower is better)"
FAR = 6  # times the median distance from the reference: beyond it a method is named at the edge, not drawn to scale


def save(figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as beside:
        figure.savefig(beside, dpi=150)


def dots(report):
    """Plot every method's losses by seed, with the reference as a line and `general` losses; outliers are named at the edge."""
    reports = (report, report.general) if hasattr(report, "general") else (report,)
    size = 8.2 if len(reports) == 1 else 13.0, 1.6 + 0.52 * len(report.entries)
    figure, all_axes = figure_of(report, size, columns=len(reports))
    for axes, one in zip(all_axes if len(reports) > 1 else (all_axes,), reports):
        _dots(axes, one)
        label = getattr(one, "label", LOSS)
        axes.set_xlabel(f"{label}\ndiamonds: mean and sd, {_seeds(report)}; rings: seeds; dashed: {report.reference}")
    return figure


def _dots(axes, report) -> None:
    entries, reference = report.entries[::-1], report.entry(report.reference)
    axes.axvline(reference.loss, color=GREY, linestyle="--", linewidth=1.2, zorder=1)
    near = _near(entries, reference)
    values = [loss for entry in near for loss in (*entry.losses, entry.loss - _sd(entry), entry.loss + _sd(entry))]
    if values:
        margin = 0.06 * (max(values) - min(values)) or 0.01
        axes.set_xlim(min(values) - margin, max(values) + margin)
    for y, entry in enumerate(entries):
        one = report.comparison(entry.name)
        colour = BLUE if one is None else OF_VERDICT.get(one.verdict, GREY)
        if any(entry is one for one in near):
            axes.plot(entry.losses, [y] * len(entry.losses), "o", markerfacecolor="none", color=colour, alpha=0.7)
            axes.errorbar(entry.loss, y, xerr=_sd(entry), fmt="D", color=colour, capsize=4, markersize=7)
        else:
            right = not entry.loss < reference.loss
            arrow = "  \u2192" if right else "\u2190  "
            text = f"{entry.loss:.3f}{arrow}" if right else f"{arrow}{entry.loss:.3f}"
            place = (0.985, "right") if right else (0.015, "left")
            axes.text(
                place[0], y, text, transform=axes.get_yaxis_transform(), ha=place[1], va="center", color=colour,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip
        axes.annotate(_said(one), (1.02, y), xycoords=axes.get_yaxis_transform(), va="center", color=colour, fontsize=9)
    axes.set_yticks(range(len(entries)), [entry.name for entry in entries])
    axes.set_ylim(-0.6, len(entries) - 0.4)
    axes.grid(axis="x", alpha=0.25)


def sweep(report):
    """Plot losses over the swept value, a line per kind of model and the reference as a band; general losses below."""
    reports = (report, report.general) if hasattr(report, "general") else (report,)
    figure, all_axes = figure_of(report, (7.2, 0.8 + 3.6 * len(reports)), rows=len(reports))
    for axes, one in zip(all_axes if len(reports) > 1 else (all_axes,), reports):
        _sweep(axes, one, report.extra)
        axes.set_ylabel(getattr(one, "label", LOSS), fontsize=9)
    axes.set_xlabel(report.extra["x_label"])
    first = all_axes[0] if len(reports) > 1 else all_axes
    first.legend(title=f"mean and sd, {_seeds(report)}", fontsize=9, title_fontsize=9)
    return figure


def _sweep(axes, report, extra: dict) -> None:
    reference, x = report.entry(report.reference), extra["x"]
    if reference.name not in x:
        band = reference.loss - _sd(reference), reference.loss + _sd(reference)
        axes.axhline(reference.loss, color=GREY, linestyle="--", label=reference.name)
        axes.axhspan(*band, color=GREY, alpha=0.15, linewidth=0)
    kinds: dict[str, list] = {}
    for entry in report.entries:
        if entry.name in x:
            kinds.setdefault(entry.name.partition(",")[0], []).append(entry)
        elif entry is not reference:
            axes.axhline(entry.loss, color=VERMILION, linestyle=":", label=entry.name)
    for (kind, entries), colour, marker in zip(kinds.items(), COLOURS, MARKERS):
        places = [x[entry.name] for entry in entries]
        for seed in range(len(report.seeds)):
            axes.plot(places, [entry.losses[seed] for entry in entries], color=colour, alpha=0.3, linewidth=0.8)
        axes.errorbar(
            places, [entry.loss for entry in entries], yerr=[_sd(entry) for entry in entries], color=colour,
            marker=marker, capsize=4, label=kind,
        )  # fmt: skip
    if extra.get("x_log"):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_xticks(sorted(set(x.values())))
    axes.grid(alpha=0.25)


def times(report):
    """Plot losses over seconds of training: every method's curve and its final loss."""
    figure, axes = figure_of(report, (7.2, 4.4))
    for entry, colour, marker in zip(report.entries, COLOURS, MARKERS):
        if entry.name == report.reference:
            axes.axhline(entry.loss, color=GREY, linestyle="--", linewidth=1.2, zorder=1)
        for result in entry.results:
            before = result.total_seconds - result.seconds
            steps = [(before + step * result.seconds / result.steps, loss) for step, loss in result.history]
            axes.plot(*zip(*steps, strict=True), color=colour, alpha=0.4, linewidth=1)
        axes.errorbar(
            entry.seconds, entry.loss, yerr=_sd(entry), fmt=marker, color=colour, capsize=4, markersize=8,
            label=f"{entry.name}: {entry.loss:.4f}",
        )  # fmt: skip
    return _labelled(figure, axes, report, "seconds of training after the base", "on the way")


def curves(report):
    """Plot the held-out loss over steps: the mean over seeds, and each seed as a thin line."""
    figure, axes = figure_of(report, (7.2, 4.4))
    for entry, colour, marker in zip(report.entries, COLOURS, MARKERS):
        ways = [result.history for result in entry.results]
        for way in ways:
            axes.plot(*zip(*way, strict=True), color=colour, alpha=0.35, linewidth=0.8)
        steps, points = zip(*((at[0][0], [loss for _, loss in at]) for at in zip(*ways, strict=True)), strict=True)
        spread = [statistics.stdev(losses) if len(losses) > 1 else 0.0 for losses in points]
        axes.errorbar(
            steps, [*map(statistics.fmean, points)], yerr=spread, color=colour, marker=marker, capsize=4,
            label=f"{entry.name}: {entry.loss:.4f} at the end",
        )  # fmt: skip
    return _labelled(figure, axes, report, "step", "seeds")


def _labelled(figure, axes, report, x_label: str, thin: str):
    axes.set(xlabel=x_label, ylabel=LOSS)
    axes.grid(alpha=0.25)
    axes.legend(title=f"mean and sd, {_seeds(report)}; thin: {thin}", fontsize=9, title_fontsize=9)
    return figure


def figure_of(report, size: tuple[float, float], rows: int = 1, columns: int = 1, **subplots):
    """Return a Figure without pyplot's global state, and its axes; rows share the x axis unless `subplots` says otherwise."""
    figure = require("matplotlib.figure", "plot").Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{report.title} ({report.source})", fontsize=11)
    return figure, figure.subplots(rows, columns, **{"sharex": rows > 1} | subplots)


def _near(entries, reference) -> list:
    """Return the entries to plot to scale: finite, and not so far from the reference that the others would coincide."""
    apart = {entry.name: abs(entry.loss - reference.loss) for entry in entries if math.isfinite(entry.loss)}
    others = [distance for name, distance in apart.items() if name != reference.name]
    limit = FAR * statistics.median(others) if len(others) > 1 else math.inf
    return [entry for entry in entries if not apart.get(entry.name, math.inf) > limit]


def _said(one) -> str:
    if one is None:
        return "reference"
    return one.verdict if math.isnan(one.difference) else f"{signed(one.difference)}, {one.verdict}"


def _sd(entry) -> float:
    return 0.0 if math.isnan(entry.sd) else entry.sd


def _seeds(report) -> str:
    return f"{len(report.seeds)} seeds" if len(report.seeds) > 1 else "one seed"


_STYLE = """\
:root {{ color-scheme: light dark; --page: #ffffff; --text: #1b1b1b; --soft: #5a5a5a; --line: #d8d8d8; {light} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #16181b; --text: #f0f0f0; --soft: #a8a8a8; --line: #3a3d42; {dark} }}
}}
body {{ margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--page); color: var(--text);
  font: 1rem/1.7 system-ui, sans-serif; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
p.note, p.mean {{ color: var(--soft); font-size: 0.875rem; }}
pre {{ border: 1px solid var(--line); border-radius: 0.4rem; padding: 0.8rem 1rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 0.95rem/1.8 ui-monospace, monospace; }}
span[style] {{ background: {background}; border-radius: 0.15rem;
  print-color-adjust: exact; }}
"""
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
<p class="note">{note}</p>
<p class="note">{scale}</p>
{sections}
</body>
</html>
"""


def page(title: str, note: str, scale: str, sections: str, *, light: str, dark: str, background: str) -> str:
    """Return an HTML page; `title` and `note` are text, `scale` and `sections` HTML, `light`, `dark`, `background` CSS."""
    style = _STYLE.format(light=light, dark=dark, background=background)
    return _PAGE.format(title=html.escape(title), style=style, note=html.escape(note), scale=scale, sections=sections)


def section(name: str, blocks: Sequence[str]) -> str:
    """Return HTML blocks under a heading."""
    return f"<section>\n<h2>{html.escape(name)}</h2>\n" + "\n".join(blocks) + "\n</section>"


def block(tokens: str, said: str) -> str:
    """Return HTML tokens and a line of text below."""
    return f'<pre>\n{tokens}</pre>\n<p class="mean">{html.escape(said, quote=False)}</p>'


def token(piece: str, style: str, said: str = "") -> str:
    """Return a token with a CSS `style` and the tooltip `said`."""
    title = f' title="{html.escape(said)}"' if said else ""
    # a browser takes a lone carriage return and control characters for errors
    clean = "".join(c if c in "\n\t" or c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in piece)
    return f'<span style="{style}"{title}>{html.escape(clean)}</span>'
