"""Pictures of a results file, as PNG and SVG next to it: python -m moe_runtime.bench.pictures
FILE.json [-o FOLDER].

The layer's times beside ours, rooflines, tokens/s against T, memory per token, a step's parts,
XFT's tuning step: each if the file has something of it. What was not measured is left out, and a
loss is drawn like a win. A roofline is

    attainable(x) = min(peak TFLOP/s, x * copy GB/s)           x = FLOPs / bytes that a benchmark must compute and move

whose peak is of multiply-adds on registers. An older file has that of products of torch, which
kernels may exceed: it is not drawn if one does. What is measured against a copy of the same bytes
is drawn below, as a share of the copy's bandwidth.
"""

import argparse
import statistics
from pathlib import Path

from moe_runtime.bench import pictures_bars as frame
from moe_runtime.bench.pictures_bars import GREY, INK, SMALL, Bench, is_ours, ordered, plain, style
from moe_runtime.io.rows import require
from papers.engine import plots

LAYER_TITLE = (
    "Experts of one layer: time as a multiple of moe_runtime's\n"
    "(dense matmul: one torch product of the same FLOPs)"
)
PASSES = {"bench_forward": "forward", "bench_forward_backward": "forward + backward"}
FAR = 3.5  # times ours: a bar that goes beyond is cut, its number stays
MANY = 8  # panels of bars: more of them, and a picture does not fit on a page


def layer(benches: list[Bench]):
    """Draw the layer's times as multiples of ours; None if it was not measured."""
    found = [
        bench for bench in benches if bench.function in PASSES and any(map(is_ours, bench.rows))
    ]
    found.sort(key=lambda bench: list(PASSES).index(bench.function))
    if not found:
        return None
    return _layer_bars(found) if len(found) <= MANY else _layer_dots(found)


def ratios(bench: Bench) -> dict[str, float]:
    """Return every time as a multiple of ours."""
    ours = bench.rows[ordered(bench.rows)[0]]["ms"]
    return {name: row["ms"] / ours for name, row in bench.rows.items()}


def _layer_tokens(bench: Bench) -> str:
    tokens = (bench.info.get("shape") or {}).get("T")
    return f"T={tokens}" if tokens else ""


def _layer_bars(found: list[Bench]):
    heights = [frame.bars_height(len(ratios(bench))) + 0.15 for bench in found]
    figure, all_axes = frame.grid(LAYER_TITLE, found, heights)
    for axes, bench in zip(all_axes, found):
        where = ", ".join(filter(None, [bench.shape, _layer_tokens(bench), bench.dtype]))
        plain(axes, f"{where}\n{PASSES[bench.function]}")
        frame.bars(
            axes,
            ratios(bench),
            "{:.2f}".format,
            f"times of {ordered(bench.rows)[0]} (less is better)",
            FAR,
        )
    frame.share_names(all_axes)
    return figure


def _layer_dots(found: list[Bench]):
    panels: dict[tuple, list[Bench]] = {}
    for bench in found:
        panels.setdefault((PASSES[bench.function], _layer_tokens(bench), bench.dtype), []).append(
            bench
        )
    figure, all_axes = frame.grid(
        LAYER_TITLE, found, [1.1 + 0.3 * len(group) for group in panels.values()]
    )
    for axes, (place, group) in zip(all_axes, panels.items()):
        for y, bench in enumerate(group):
            for name in reversed(ordered(ratios(bench))):
                colour, marker = style(name)
                label = f"{bench.shape}: {name}"
                axes.plot(
                    ratios(bench)[name],
                    y,
                    color=colour,
                    marker=marker,
                    markersize=6,
                    linestyle="",
                    label=label,
                )
        axes.axvline(1, color=INK, linestyle="--", linewidth=1.2, zorder=1)
        axes.set_yticks(range(len(group)), [bench.shape for bench in group])
        axes.set_ylim(len(group) - 0.5, -0.5)
        frame.logarithmic(axes, "x")
        plain(axes, ", ".join(filter(None, place)))
        axes.set_xlabel("times of moe_runtime (less is better)", fontsize=SMALL)
    frame.share_names(all_axes)
    frame.legend(figure, frame.key((name for bench in found for name in ratios(bench)), join=""))
    return figure


MARKERS = "osD^vPXh*<>dp8"
KINDS = ("op", "layer", "tokens")  # whole steps and methods have no single intensity
OTHER = "best other way of the benchmark"
OTHER_COLOUR = "#6E6E6E"
LETTER = 0.014  # width of a letter, in parts of the widest bar


def roofline(benches: list[Bench]):
    """Draw a roof per dtype and a bar per kernel that only moves bytes; None if nothing of it was
    measured.
    """
    on_roof: dict[str, list[Bench]] = {}
    moving: dict[str, list[Bench]] = {}
    for bench in benches:
        info = bench.info
        if info.get("kind", "op") not in KINDS:
            continue
        if _only_moves(bench):
            moving.setdefault(f"{bench.what}, {bench.dtype}", []).append(bench)
        elif (
            info.get("flops")
            and info.get("bytes")
            and {"TFLOP/s", "GB/s"} <= info.get("ceilings", {}).keys()
        ):
            on_roof.setdefault(bench.dtype, []).append(bench)
    used = []
    for group in (*on_roof.values(), *moving.values()):
        used.extend(group)
    if not used:
        return None
    heights = [3.6] * len(on_roof) + [
        0.9 + 0.24 * sum(1 + len(_shares(group)) for group in moving.values())
    ] * bool(moving)
    figure, all_axes = frame.grid(
        "Reached of the machine's ceilings, measured in the same run", used, heights, 1, base=2.2
    )
    marker = dict(
        zip(
            dict.fromkeys(bench.label for group in on_roof.values() for bench in group), MARKERS * 9
        )
    )
    has_roof = all(_best(group) <= frame.ceiling(group, "TFLOP/s") for group in on_roof.values())
    for axes, (dtype, group) in zip(all_axes, on_roof.items()):
        _roof(axes, dtype, group, marker, has_roof)
    if moving:
        _moving(all_axes[-1], moving)
    names = []
    for group in on_roof.values():
        for bench in group:
            names.extend(frame.shown(bench.rows, "TFLOP/s"))
    for group in moving.values():
        for bench in group:
            names.extend(frame.shown(bench.rows, "GB/s"))
    patches = frame.key(name for name in map(_named, names) if name != OTHER)
    if OTHER in map(_named, names):
        patches.append(frame.patch(color=OTHER_COLOUR, label=OTHER))
    shapes = []
    for what, m in marker.items():
        shapes.append(frame.line(color=INK, marker=m, linestyle="", label=what))
    frame.legend(figure, [*patches, *shapes])
    return figure


def _only_moves(bench: Bench) -> bool:
    moves = not bench.info.get("flops") or next(iter(bench.rows)) == "copy (floor)"
    return bool(moves and bench.info.get("bytes") and "GB/s" in bench.info.get("ceilings", {}))


def _named(name: str) -> str:
    """Return who an implementation is shown as: those that only one benchmark has are all one."""
    return name if name in frame.STYLES else "moe_runtime" if is_ours(name) else OTHER


def _colour(name: str) -> str:
    return OTHER_COLOUR if _named(name) == OTHER else style(_named(name))[0]


def _best(group: list[Bench]) -> float:
    return max(
        (rate for bench in group for rate in frame.shown(bench.rows, "TFLOP/s").values()), default=0
    )


def _roof(axes, dtype: str, group: list[Bench], marker: dict[str, str], has_roof: bool) -> None:
    matmul = frame.ceiling(group, "TFLOP/s")
    copy = frame.ceiling(group, "GB/s")
    xs = [bench.info["flops"] / bench.info["bytes"] for bench in group]
    ridge = matmul * 1e3 / copy
    left = min(*xs, ridge) / 2
    right = max(*xs, ridge) * 3
    ways = [left, ridge, right]
    if has_roof:
        axes.plot(
            ways,
            [min(matmul, x * copy / 1e3) for x in ways],
            color=INK,
            linewidth=1.6,
            label="roof",
            zorder=1,
        )
    for bench, x in zip(group, xs):
        rates = frame.shown(bench.rows, "TFLOP/s")
        if len(rates) > 1:
            axes.plot(
                [x, x],
                [min(rates.values()), max(rates.values())],
                color=GREY,
                linewidth=0.6,
                zorder=2,
            )
        for name, rate in rates.items():
            face = _colour(name) if is_ours(name) else "white"
            axes.plot(
                x,
                rate,
                marker=marker[bench.label],
                markersize=5.5,
                color=_colour(name),
                markerfacecolor=face,
                linestyle="",
                zorder=4 if is_ours(name) else 3,
                label=f"{bench.function}[{bench.id}] {name}",
            )
    _sweeps(axes, group)
    frame.logarithmic(axes, "x")
    frame.logarithmic(axes, "y")
    measured = f"ceiling {matmul:.3g} TFLOP/s, {copy:.3g} GB/s in copy"
    plain(
        axes,
        (
            f"{dtype}: "
            f"{measured if has_roof else f'no roof, as a kernel exceeds {matmul:.3g} TFLOP/s'}"
        ),
    )
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
        axes.plot(
            xs,
            rates,
            color=style("moe_runtime")[0],
            linewidth=0.9,
            alpha=0.6,
            zorder=2,
            label="sweep",
        )


def _shares(group: list[Bench]) -> dict[str, list[float]]:
    """Return {variant: share of the copy's GB/s in each benchmark}."""
    found: dict[str, list[float]] = {}
    for bench in group:
        for name, rate in frame.shown(bench.rows, "GB/s").items():
            found.setdefault(name, []).append(rate / bench.info["ceilings"]["GB/s"])
    return found


def _moving(axes, moving: dict[str, list[Bench]]) -> None:
    widest = max(
        share for group in moving.values() for each in _shares(group).values() for share in each
    )
    y = 0
    span = max(1.05, widest)
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
            said = f"{middle:.0%}" + (f"  {name}" if name not in frame.STYLES else "")
            frame.beside(axes, max(shares[name]), y, said)
            end = max(end, max(shares[name]) + LETTER * (len(said) + 2) * span)
        y += 1
    axes.axvline(1, color=INK, linewidth=1.6, zorder=1)
    axes.set_xlim(0, end)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.set_yticks([])
    axes.set_ylim(y - 0.4, -0.7)
    plain(axes, "bytes moved, share of the copy's GB/s")
    axes.set_xlabel("bar: median over the shapes; ticks: each shape", fontsize=SMALL)
    axes.spines["left"].set_visible(False)


FUNCTIONS = {"bench_tokens": "forward", "bench_tokens_backward": "forward + backward"}
RATE = "tokens/s"
LOSSES = 4  # lines of a panel that name who is faster than ours, and where


def throughput(benches: list[Bench]):
    """Draw tokens/s over T; a ring where another implementation is faster than ours. None if
    nothing of it was measured.
    """
    found: dict[tuple, list[Bench]] = {}
    for bench in benches:
        if (
            bench.function in FUNCTIONS
            and bench.tokens
            and any(RATE in row for row in bench.rows.values())
        ):
            found.setdefault(
                (list(FUNCTIONS).index(bench.function), bench.shape, bench.dtype), []
            ).append(bench)
    if not found:
        return None
    used = [bench for group in found.values() for bench in group]
    groups = sorted(
        ((place, sorted(g, key=lambda bench: bench.tokens)) for place, g in found.items()),
        key=lambda g: g[0][0],
    )
    heights = [2.7 + 0.15 * len(_said(_lost(group))) for _, group in groups]
    figure, all_axes = frame.grid(
        "Experts of one layer: tokens/s against tokens", used, heights, base=1.9
    )
    for axes, (place, group) in zip(all_axes, groups):
        _panel(axes, group)
        plain(axes, f"{place[1]}, {place[2]}: {list(FUNCTIONS.values())[place[0]]}")
    frame.legend(figure, frame.key((name for bench in used for name in _rates(bench)), join="-"))
    return figure


def _rates(bench: Bench) -> dict[str, float]:
    rates = {}
    for name, row in bench.rows.items():
        if RATE in row and not frame.is_floor(name):
            rates[name] = row[RATE]
    return rates


def _panel(axes, group: list[Bench]) -> None:
    # ours last, on top
    for name in reversed(ordered(name for bench in group for name in _rates(bench))):
        points = []
        for bench in group:
            if name in _rates(bench):
                points.append((bench.tokens, _rates(bench)[name]))
        colour, marker = style(name)
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            marker=marker,
            markersize=4.5,
            linewidth=1.5,
            label=name,
        )
    axes.set_xscale("log", base=2)
    frame.logarithmic(axes, "y")
    axes.set_xticks([bench.tokens for bench in group], [_tokens(bench.tokens) for bench in group])
    axes.xaxis.minorticks_off()
    axes.set_xlabel("T (1k = 1024)", fontsize=SMALL)
    axes.set_ylabel(RATE, fontsize=SMALL)
    lost = _lost(group)
    if lost:
        places = [(T, rate) for T, _, rate, _ in lost]
        axes.plot(
            *zip(*places, strict=True),
            "o",
            markersize=11,
            markerfacecolor="none",
            color=INK,
            label="faster",
        )
        axes.set_xlabel("\n".join(["T (1k = 1024)", *_said(lost)]), fontsize=SMALL)


def _lost(group: list[Bench]) -> list[tuple]:
    return [one for bench in group if (one := loss(bench)) is not None]


def _said(lost: list[tuple]) -> list[str]:
    """Say who is faster than ours, where and by how much."""
    lines = []
    for T, name, _, ratio in lost:
        lines.append(f"T = {_tokens(T)}: {name} {ratio:.2f} times ours")
    left = [f"and {len(lines) - LOSSES} more (rings)"] if len(lines) > LOSSES else []
    return lines[:LOSSES] + left


def _tokens(T: int) -> str:
    return f"{T // 1024}k" if T % 1024 == 0 else str(T)


def loss(bench: Bench) -> tuple[int, str, float, float] | None:
    """Return T, the fastest implementation, its tokens/s and how many times faster than ours it is;
    None if ours is.
    """
    rates = _rates(bench)
    ours = rates.get("moe_runtime") or max(
        (rate for name, rate in rates.items() if is_ours(name)), default=None
    )
    others = {name: rate for name, rate in rates.items() if not is_ours(name)}
    if ours is None or not others:
        return None
    best = max(others, key=others.get)
    ratio = others[best] / ours
    return (bench.tokens, best, others[best], ratio) if round(ratio, 2) > 1 else None


PICTURES = {
    "layer": layer,
    "roofline": roofline,
    "throughput": throughput,
    "memory": frame.memory,
    "breakdown": frame.breakdown,
    "xft": frame.xft,
}


def write_pictures(json_path: str | Path, out: str | Path | None = None) -> list[Path]:
    """Draw what a results file holds into `out`, else next to it; return the files, a PNG and an
    SVG per picture.

    Raises ValueError for what is no results file, ImportError without matplotlib.
    """
    json_path = Path(json_path)
    benches = frame.read(json_path)
    matplotlib = require("matplotlib", "bench")
    folder = Path(out) if out is not None else json_path.parent
    tiny = any(bench.info.get("tiny") for bench in benches)
    written = []
    with matplotlib.rc_context(plots.SETTINGS):
        for name, draw in PICTURES.items():
            if (figure := draw(benches)) is not None:
                plots.watermark(figure, tiny)
                paths = []
                for kind in ("png", "svg"):
                    paths.append(folder / f"{json_path.stem}-{name}.{kind}")
                written += paths
                for path in paths:
                    plots.save(figure, path)
    return written


def main(arguments: list[str] | None = None) -> None:
    """Draw the pictures and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="what `make bench` or bench/gpu.sh wrote")
    parser.add_argument(
        "-o", "--out", type=Path, help="folder for the pictures; default: the file's"
    )
    options = parser.parse_args(arguments)
    for path in write_pictures(options.file, options.out):
        print(path)


if __name__ == "__main__":
    main()
