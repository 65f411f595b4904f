"""Rooflines: what each kernel reaches of the ceilings of the machine, measured in the same run.

    attainable(x) = min(matmul TFLOP/s, x * copy GB/s)         x = FLOPs / bytes that a benchmark must compute and move

What is measured against a copy of the same bytes only moves them; what share of the copy's bandwidth it reaches is drawn below.
"""

import statistics

from moe_runtime.bench.pictures_style import (  # fmt: skip
    GREY,
    INK,
    SMALL,
    STYLES,
    Bench,
    ceiling,
    figure_of,
    is_ours,
    key,
    legend,
    logarithmic,
    ordered,
    plain,
    shown,
    style,
)
from moe_runtime.io.rows import require

MARKERS = "osD^vPXh*<>dp8"
KINDS = ("op", "layer", "tokens")  # whole steps and methods have no single intensity
OTHER = "best other way of the benchmark"
OTHER_COLOUR = "#6E6E6E"
LETTER = 0.014  # width of a letter, in parts of the widest bar


def roofline(benches: list[Bench]):
    """Draw a roof per dtype and a bar per kernel that only moves bytes; None if nothing of it was measured."""
    on_roof: dict[str, list[Bench]] = {}
    moving: dict[str, list[Bench]] = {}
    for bench in benches:
        info = bench.info
        if info.get("kind", "op") not in KINDS:
            continue
        if _only_moves(bench):
            moving.setdefault(f"{bench.what}, {bench.dtype}", []).append(bench)
        elif info.get("flops") and info.get("bytes") and {"TFLOP/s", "GB/s"} <= info.get("ceilings", {}).keys():
            on_roof.setdefault(bench.dtype, []).append(bench)
    used = [bench for group in (*on_roof.values(), *moving.values()) for bench in group]
    if not used:
        return None
    heights = [3.6] * len(on_roof) + [0.9 + 0.24 * _lines_of(moving)] * bool(moving)
    figure = figure_of("Reached of the machine's ceilings, measured in the same run", used, 2.2 + sum(heights))
    all_axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights).flatten()
    marker = dict(zip(dict.fromkeys(bench.label for group in on_roof.values() for bench in group), MARKERS * 9))
    for axes, (dtype, group) in zip(all_axes, on_roof.items()):
        _roof(axes, dtype, group, marker)
    if moving:
        _moving(all_axes[-1], moving)
    names = [name for group in on_roof.values() for bench in group for name in shown(bench.rows, "TFLOP/s")]
    names += [name for group in moving.values() for bench in group for name in shown(bench.rows, "GB/s")]
    patches = key(name for name in map(_named, names) if name != OTHER)
    if OTHER in map(_named, names):
        patches.append(require("matplotlib.patches", "bench").Patch(color=OTHER_COLOUR, label=OTHER))
    lines = require("matplotlib.lines", "bench")
    shapes = [lines.Line2D([], [], color=INK, marker=m, linestyle="", label=what) for what, m in marker.items()]
    legend(figure, [*patches, *shapes])
    return figure


def _only_moves(bench: Bench) -> bool:
    floor = next(iter(bench.rows))
    moves = not bench.info.get("flops") or floor == "copy (floor)"
    return bool(moves and bench.info.get("bytes") and "GB/s" in bench.info.get("ceilings", {}))


def _named(name: str) -> str:
    """Return who an implementation is shown as: those that only one benchmark has are all one."""
    return name if name in STYLES else "moe_runtime" if is_ours(name) else OTHER


def _colour(name: str) -> str:
    return OTHER_COLOUR if _named(name) == OTHER else style(_named(name))[0]


def _roof(axes, dtype: str, group: list[Bench], marker: dict[str, str]) -> None:
    matmul, copy = ceiling(group, "TFLOP/s"), ceiling(group, "GB/s")
    xs = [bench.info["flops"] / bench.info["bytes"] for bench in group]
    ridge = matmul * 1e3 / copy
    left, right = min(*xs, ridge) / 2, max(*xs, ridge) * 3
    ways = [left, ridge, right]
    axes.plot(ways, [min(matmul, x * copy / 1e3) for x in ways], color=INK, linewidth=1.6, label="roof", zorder=1)
    for bench, x in zip(group, xs):
        rates = shown(bench.rows, "TFLOP/s")
        if len(rates) > 1:
            axes.plot([x, x], [min(rates.values()), max(rates.values())], color=GREY, linewidth=0.6, zorder=2)
        for name, rate in rates.items():
            face = _colour(name) if is_ours(name) else "white"
            axes.plot(
                x, rate, marker=marker[bench.label], markersize=5.5, color=_colour(name), markerfacecolor=face,
                linestyle="", zorder=4 if is_ours(name) else 3, label=f"{bench.function}[{bench.id}] {name}",
            )  # fmt: skip
    _sweeps(axes, group)
    logarithmic(axes, "x")
    logarithmic(axes, "y")
    plain(axes, f"{dtype}: {matmul:.3g} TFLOP/s in matmul, {copy:.3g} GB/s in copy")
    axes.set_xlabel("FLOPs per byte", fontsize=SMALL)
    axes.set_ylabel("TFLOP/s", fontsize=SMALL)


def _sweeps(axes, group: list[Bench]) -> None:
    """Join ours of one shape at several numbers of tokens."""
    ways: dict[tuple, list] = {}
    for bench in group:
        if bench.tokens and "TFLOP/s" in bench.rows.get("moe_runtime", {}):
            x = bench.info["flops"] / bench.info["bytes"]
            ways.setdefault((bench.what, bench.shape), []).append(
                (bench.tokens, x, bench.rows["moe_runtime"]["TFLOP/s"])
            )
    for points in (sorted(points) for points in ways.values() if len(points) > 1):
        _, xs, rates = zip(*points, strict=True)
        axes.plot(xs, rates, color=style("moe_runtime")[0], linewidth=0.9, alpha=0.6, zorder=2, label="sweep")


def _lines_of(moving: dict[str, list[Bench]]) -> int:
    return sum(1 + len(_shares(group)) for group in moving.values())


def _shares(group: list[Bench]) -> dict[str, list[float]]:
    """Return {variant: share of the copy's GB/s in each benchmark}."""
    found: dict[str, list[float]] = {}
    for bench in group:
        for name, rate in shown(bench.rows, "GB/s").items():
            found.setdefault(name, []).append(rate / bench.info["ceilings"]["GB/s"])
    return found


def _moving(axes, moving: dict[str, list[Bench]]) -> None:
    widest = max(share for group in moving.values() for each in _shares(group).values() for share in each)
    y, span = 0, max(1.05, widest)
    end = span * 1.02
    for what, group in moving.items():
        shares = _shares(group)
        axes.text(0, y, what, va="center", fontsize=SMALL, color=INK)
        for name in ordered(shares):
            y += 1
            middle = statistics.median(shares[name])
            axes.barh(y, middle, color=_colour(name), height=0.8, label=f"{what}: {name}")
            if len(shares[name]) > 1:
                axes.plot(shares[name], [y] * len(shares[name]), "|", color=INK, markersize=7)
            said = f"  {middle:.0%}" + (f"  {name}" if name not in STYLES else "")
            axes.text(max(shares[name]), y, said, va="center", fontsize=SMALL, color=INK)
            end = max(end, max(shares[name]) + LETTER * len(said) * span)
        y += 1
    axes.axvline(1, color=INK, linewidth=1.6, zorder=1)
    axes.set_xlim(0, end)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.set_yticks([])
    axes.set_ylim(y - 0.4, -0.7)
    plain(axes, "bytes moved, share of the copy's GB/s")
    axes.set_xlabel("bar: median over the shapes; ticks: each shape", fontsize=SMALL)
    axes.spines["left"].set_visible(False)
