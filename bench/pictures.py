"""Pictures of a results file, as PNG and SVG next to it.

    python -m moe_runtime.bench.pictures FILE.json [-o FOLDER]

Layer times relative to ours, tokens/s against T, and memory per token: each if the file has results
for it. Results that are worse than others' are included.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from moe_runtime.bench import pictures_bars as frame
from moe_runtime.bench.goals import PEFT
from moe_runtime.bench.pictures_bars import INK, SMALL, Bench, is_ours, ordered, plain, style
from moe_runtime.io.rows import require

LAYER_UNITS = (
    "time as a multiple of moe_runtime's; dense matmul: one torch product of the same FLOPs"
)
PASSES = {"bench_forward": "forward", "bench_forward_backward": "forward + backward"}
FAR = 3.5  # times ours: a longer bar is cut, but keeps its number


def layer(benches: list[Bench]):
    """Draw the layer's times as multiples of ours; None if it was not measured."""
    measured = []
    for function in PASSES:
        for bench in benches:
            if bench.function == function and any(map(is_ours, bench.rows)):
                measured.append(bench)
    if not measured:
        return None
    return _layer_bars(measured)


def ratios(bench: Bench) -> dict[str, float]:
    """Return every time as a multiple of ours."""
    ours = bench.rows[ordered(bench.rows)[0]]["ms"]
    return {name: row["ms"] / ours for name, row in bench.rows.items()}


def _layer_bars(benches: list[Bench]):
    heights = [frame.bars_height(len(bench.rows)) + 0.15 for bench in benches]
    figure, all_axes = frame.grid(f"{_standing(benches)}\n{LAYER_UNITS}", benches, heights)
    for axes, bench in zip(all_axes, benches, strict=True):
        where = f"{bench.shape}, T={bench.tokens}, {bench.dtype}"
        plain(axes, f"{where}\n{PASSES[bench.function]}")
        unit = f"time / {ordered(bench.rows)[0]}'s (lower is better)"
        frame.bars(
            axes,
            ratios(bench),
            "{:.2f}".format,
            unit,
            FAR,
        )
    frame.share_names(all_axes)
    return figure


FUNCTIONS = {"bench_tokens": "forward", "bench_tokens_backward": "forward + backward"}
RATE = "tokens/s"
LOSSES = 4  # most lines per panel that list faster implementations


def throughput(benches: list[Bench]):
    """Draw tokens/s over T, with rings where others are faster; None if it was not measured."""
    panels: dict[str, list[Bench]] = {}
    measured = []
    names: list[str] = []
    for function, what in FUNCTIONS.items():
        for bench in sorted(benches, key=lambda bench: bench.tokens):
            if bench.function == function and bench.tokens and _rates(bench):
                title = f"{bench.shape}, {bench.dtype}: {what}"
                panels.setdefault(title, []).append(bench)
                measured.append(bench)
                names += _rates(bench)
    if not panels:
        return None
    heights = [2.7 + 0.15 * len(_losses(group)) for group in panels.values()]
    title = f"{_standing(measured)}\ntokens per second, by the number of tokens T"
    figure, all_axes = frame.grid(title, measured, heights, base=1.9)
    for axes, (title, group) in zip(all_axes, panels.items(), strict=True):
        _panel(axes, group)
        plain(axes, title)
    frame.legend(figure, frame.key(names, join="-"))
    return figure


def _rates(bench: Bench) -> dict[str, float]:
    rates = {}
    for name, row in bench.rows.items():
        if RATE in row and not frame.is_floor(name):
            rates[name] = row[RATE]
    return rates


def _panel(axes, group: list[Bench]) -> None:
    """Draw a line per implementation, ours last, on top."""
    points: dict[str, list] = {}
    for bench in group:
        for name, rate in _rates(bench).items():
            points.setdefault(name, []).append((bench.tokens, rate))
    for name in reversed(ordered(points)):
        tokens, rates = zip(*points[name], strict=True)
        colour, marker = style(name)
        axes.plot(
            tokens,
            rates,
            label=name,
            color=colour,
            marker=marker,
            markersize=4.5,
            linewidth=1.5,
        )
    axes.set_xscale("log", base=2)
    frame.logarithmic(axes)
    axes.set_xticks([bench.tokens for bench in group], [_tokens(bench.tokens) for bench in group])
    axes.xaxis.minorticks_off()
    for bench in group:
        if (lost := loss(bench)) is not None:
            axes.plot(
                bench.tokens,
                lost.rate,
                "o",
                label="faster",
                markersize=11,
                markerfacecolor="none",
                color=INK,
            )
    axes.set_xlabel("\n".join(["T (1k = 1024)", *_losses(group)]), fontsize=SMALL)
    axes.set_ylabel(RATE, fontsize=SMALL)


def _losses(group: list[Bench]) -> list[str]:
    """List the implementations that are faster than ours, where and by how much."""
    lines = []
    for bench in group:
        if (lost := loss(bench)) is not None:
            lines.append(f"T = {_tokens(bench.tokens)}: {lost.name} {lost.times:.2f} times ours")
    if len(lines) > LOSSES:
        lines[LOSSES:] = [f"and {len(lines) - LOSSES} more (rings)"]
    return lines


def _tokens(T: int) -> str:
    return f"{T // 1024}k" if T % 1024 == 0 else str(T)


class Loss(NamedTuple):
    """An implementation that is faster than ours."""

    name: str
    rate: float
    times: float


def loss(bench: Bench) -> Loss | None:
    """Return the fastest implementation if it is not ours."""
    rates = _rates(bench)
    ours = [rate for name, rate in rates.items() if is_ours(name)]
    others = {name: rate for name, rate in rates.items() if not is_ours(name)}
    if not ours or not others:
        return None
    best = max(others, key=others.get)
    times = others[best] / rates.get("moe_runtime", max(ours))
    if round(times, 2) <= 1:
        return None
    return Loss(best, others[best], times)


def _standing(benches: list[Bench]) -> str:
    """Return in how many of these cases ours is the fastest."""
    won = sum(loss(bench) is None for bench in benches)
    return f"One layer's experts: moe_runtime is the fastest in {won} of {len(benches)} cases"


STOCK = ("transformers eager", "transformers grouped_mm")


def front(benches: list[Bench]):
    """Draw how many times ours is as fast: LoRA on experts as PEFT's, with its share of the memory,
    and layers as the faster of transformers' two; None if one was not measured.
    """
    adapters = {}
    layers = {}
    measured = [bench for bench in benches if bench.function in ("bench_adapters", *PASSES)]
    for bench in measured:
        rows = bench.rows
        ours = rows[ordered(rows)[0]]
        sizes = "E = {E}, I = {I}".format(**bench.info["shape"])
        if bench.function == "bench_adapters" and PEFT in rows:
            share = ours["peak MiB"] / rows[PEFT]["peak MiB"]
            adapters[f"{sizes}: {share:.0%} of the memory"] = rows[PEFT]["ms"] / ours["ms"]
        stock = [rows[name]["ms"] for name in STOCK if name in rows]
        if stock:
            where = f"{sizes}, {bench.dtype}, {PASSES[bench.function]}"
            layers[where] = min(stock) / ours["ms"]
    if not adapters or not layers:
        return None
    title = (
        f"LoRA on experts: {_range(adapters)} PEFT's speed; layers: {_range(layers)} transformers'"
        "\nE experts of size I"
    )
    figure = frame.figure_of(title, measured, 3.4)
    panels = {"LoRA on experts": adapters, "layers": layers}
    for axes, (name, speeds) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        plain(axes, name)
        frame.bars(axes, speeds, "{:.1f}".format, "times as fast")
        for bar in axes.patches:
            bar.set_color(style("moe_runtime")[0])
    return figure


def _range(speeds: dict[str, float]) -> str:
    return f"{min(speeds.values()):.1f} to {max(speeds.values()):.1f} times"


PICTURES = {
    "front": front,
    "layer": layer,
    "throughput": throughput,
    "memory": frame.memory,
}


def write_pictures(json_path: str | Path, out: str | Path | None = None) -> list[Path]:
    """Draw the pictures of a results file in `out`, by default next to it; return the files.

    Each picture is a PNG and an SVG. Raises ValueError for other files, ImportError without
    matplotlib.
    """
    json_path = Path(json_path)
    benches = frame.read(json_path)
    matplotlib = require("matplotlib", "bench")
    folder = Path(out) if out is not None else json_path.parent
    is_tiny = any(bench.info.get("tiny") for bench in benches)
    written = []
    with matplotlib.rc_context(frame.SETTINGS):
        for name, draw in PICTURES.items():
            figure = draw(benches)
            if figure is None:
                continue
            if is_tiny:
                frame.watermark(figure)
            for kind in ("png", "svg"):
                path = folder / f"{json_path.stem}-{name}.{kind}"
                frame.save(figure, path)
                written.append(path)
    return written


def main(arguments: list[str] | None = None) -> None:
    """Draw the pictures and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="results of `make bench` or bench/gpu.sh")
    parser.add_argument(
        "-o", "--out", type=Path, help="folder for the pictures; default: the file's folder"
    )
    options = parser.parse_args(arguments)
    for path in write_pictures(options.file, options.out):
        print(path)


if __name__ == "__main__":
    main()
