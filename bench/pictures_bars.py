"""Bars: memory kept for the backward pass, a step's parts, XFT's tuning step, the layer's times of its floor."""

from moe_runtime.bench.pictures_style import (  # fmt: skip
    INK,
    SMALL,
    TINY,
    Bench,
    bars,
    figure_of,
    legend,
    luminance,
    number,
    ordered,
    plain,
    share_names,
    style,
)
from moe_runtime.io.rows import require

SAVED, FORMULA = "saved KiB/token", "formula KiB/token"
WHOLE = "whole step"
# parts of a step that are the same code for every implementation, and the experts
SHARED = {
    "embedding, head and loss": "#C4C4C4",
    "attention and norms": "#9C9C9C",
    "router": "#DADADA",
    "optimizer": "#868686",
}
EXPERTS = ("experts forward", "experts backward")
XFT = {
    "tokens/s": "tokens/s (more is better)",
    "peak MiB": "peak MiB (less is better)",
    "total MiB": "total MiB (less is better)",
}


def grid(title: str, benches: list[Bench], heights: list[float], columns: int):
    """Return a figure and its axes, a row as high as the highest of its panels."""
    rows = [max(heights[i : i + columns]) for i in range(0, len(heights), columns)]
    figure = figure_of(title, benches, 1.3 + sum(rows))
    all_axes = figure.subplots(len(rows), columns, squeeze=False, height_ratios=rows).flatten()
    for axes in all_axes[len(heights) :]:
        axes.set_visible(False)
    return figure, all_axes


def bars_height(count: int) -> float:
    return 0.95 + 0.27 * count


def memory(benches: list[Bench]):
    """Draw what each implementation keeps for the backward pass, per token; None if it was not measured."""
    found = [(bench, _column(bench, SAVED)) for bench in benches if _column(bench, SAVED)]
    if not found:
        return None
    heights = [bars_height(len(values)) for _, values in found]
    used = [bench for bench, _ in found]
    figure, all_axes = grid("Kept for the backward pass, per token of one layer", used, heights, min(2, len(found)))
    for axes, (bench, values) in zip(all_axes, found):
        plain(axes, f"{bench.shape}, {bench.dtype}")
        bars(axes, values, "{:.1f}".format, "KiB per token")
        for y, name in enumerate(ordered(values)):
            if FORMULA in bench.rows[name]:
                at = bench.rows[name][FORMULA]
                axes.plot([at, at], [y - 0.45, y + 0.45], color=INK, linewidth=2.5, label="published formula")
    share_names(all_axes[: len(found)], min(2, len(found)))
    if any(FORMULA in row for bench in used for row in bench.rows.values()):
        lines = require("matplotlib.lines", "bench")
        legend(figure, [lines.Line2D([], [], color=INK, linewidth=2.5, label="our published formula")])
    return figure


def _column(bench: Bench, column: str) -> dict[str, float]:
    return {name: row[column] for name, row in bench.rows.items() if column in row}


def xft(benches: list[Bench]):
    """Draw tokens/s and memory of XFT's tuning step, the whole where a file has it; None if it was not measured."""
    found = [bench for bench in benches if bench.function == "bench_xft_step"]
    memory = ["total MiB" if _column(bench, "total MiB") else "peak MiB" for bench in found]
    pairs = [(bench, column) for bench, most in zip(found, memory) for column in ("tokens/s", most)]
    panels = [pair for pair in pairs if _column(*pair)]
    if not panels:
        return None
    heights = [bars_height(len(_column(*panel))) for panel in panels]
    columns = 2 if any(column != "tokens/s" for _, column in panels) else 1
    figure, all_axes = grid("XFT: a tuning step, random weights", found, heights, columns)
    for axes, (bench, column) in zip(all_axes, panels):
        values = _column(bench, column)
        plain(axes, f"{bench.shape}, {bench.dtype}")
        bars(axes, values, number, XFT[column])
    share_names(all_axes[: len(panels)], columns)
    return figure


def breakdown(benches: list[Bench]):
    """Draw a training step's parts, stacked, a bar per implementation; None if it was not measured."""
    found = [bench for bench in benches if bench.function == "bench_step_breakdown" and parts(bench)]
    if not found:
        return None
    heights = [bars_height(len(parts(bench))) for bench in found]
    figure, all_axes = grid("Where the time of a training step goes", found, heights, 1)
    for axes, bench in zip(all_axes, found):
        _stack(axes, bench)
        plain(axes, f"{bench.shape}, {bench.dtype}")
        axes.grid(axis="y", visible=False)
    patches = require("matplotlib.patches", "bench")
    same = [patches.Patch(color=colour, label=part) for part, colour in SHARED.items()]
    ours = [patches.Patch(color=style("moe_runtime")[0], label="experts forward (colour of each)")]
    ours += [patches.Patch(color=style("moe_runtime")[0], alpha=0.55, label="experts backward")]
    legend(figure, [*same, *ours], columns=3)
    return figure


def parts(bench: Bench) -> dict[str, dict[str, float]]:
    """Return {implementation: {part: ms}}: the shared parts, measured once, and the implementation's experts."""
    ms = {name: row["ms"] for name, row in bench.rows.items()}
    shared = {part: ms[part] for part in SHARED if part in ms}
    found: dict[str, dict[str, float]] = {}
    for name, value in ms.items():
        implementation, _, part = name.rpartition(": ")
        if part in EXPERTS:
            found.setdefault(implementation or "moe_runtime", {})[part] = value
    return {name: shared | found[name] for name in ordered(found)}


def _stack(axes, bench: Bench) -> None:
    stacks, whole = parts(bench), bench.rows.get(WHOLE, {}).get("ms", 0.0)
    widest = max(whole, *(sum(one.values()) for one in stacks.values()))
    for y, (name, one) in enumerate(stacks.items()):
        left, colour = 0.0, style(name)[0]
        for part in (*EXPERTS, *SHARED):
            if part not in one:
                continue
            faint = 0.55 if part == EXPERTS[1] else 1.0
            axes.barh(
                y, one[part], left=left, color=SHARED.get(part, colour), alpha=faint, height=0.72, edgecolor="white",
                linewidth=0.8, label=f"{name}: {part}",
            )  # fmt: skip
            if one[part] > 0.05 * widest:
                dark = part == EXPERTS[0] and luminance(colour) < 0.3
                place = left + one[part] / 2, y
                ink = "white" if dark else INK
                axes.text(*place, number(one[part]), ha="center", va="center", fontsize=TINY, color=ink)
            left += one[part]
        end = max(left, whole) if y == 0 else left
        said = f"  sum {number(left)}, whole {number(whole)} ms" if y == 0 and whole else f"  {number(left)} ms"
        axes.text(end, y, said, va="center", fontsize=SMALL, color=INK)
    if whole:
        axes.plot([whole, whole], [-0.45, 0.45], color=INK, linewidth=2.5, label=WHOLE)
    axes.set_yticks(range(len(stacks)), list(stacks))
    axes.set_ylim(len(stacks) - 0.4, -0.6)
    axes.set_xlim(0, widest * 1.32)
    axes.set_xlabel("ms; grey: the same code for all, measured once; black line: our whole step", fontsize=TINY)
