"""The experts of one layer as times of their floor: bars, or a dot per implementation where the shapes are many."""

from moe_runtime.bench.pictures_bars import bars_height, grid
from moe_runtime.bench.pictures_style import (
    GREY,
    INK,
    SMALL,
    Bench,
    bars,
    is_floor,
    key,
    legend,
    logarithmic,
    ordered,
    plain,
    share_names,
    style,
)

TITLE = "Experts of one layer, times of a dense matmul of the same FLOPs"
PASSES = {"bench_forward": "forward", "bench_forward_backward": "forward + backward"}
FAR = 3.0  # times ours: a bar that goes beyond is cut, its number stays
MANY = 8  # panels of bars: more of them, and a picture does not fit on a page


def layer(benches: list[Bench]):
    """Draw the layer's ratios to the floor; None if it was not measured."""
    found = [
        bench for bench in benches if bench.function in PASSES and any(map(is_floor, bench.rows)) and ratios(bench)
    ]
    found.sort(key=lambda bench: list(PASSES).index(bench.function))
    if not found:
        return None
    return _bars(found) if len(found) <= MANY else _dots(found)


def ratios(bench: Bench) -> dict[str, float]:
    return {name: row["ratio"] for name, row in bench.rows.items() if "ratio" in row and not is_floor(name)}


def _tokens(bench: Bench) -> str:
    tokens = (bench.info.get("shape") or {}).get("T")
    return f"T={tokens}" if tokens else ""


def _bars(found: list[Bench]):
    heights = [bars_height(len(ratios(bench))) + 0.15 for bench in found]
    figure, all_axes = grid(TITLE, found, heights, min(2, len(found)))
    for axes, bench in zip(all_axes, found):
        where = ", ".join(filter(None, [bench.shape, _tokens(bench), bench.dtype]))
        plain(axes, f"{where}\n{PASSES[bench.function]}")
        bars(axes, ratios(bench), "{:.2f}".format, "times of the floor (less is better)", _end(ratios(bench)))
        axes.axvline(1, color=GREY, linestyle="--", linewidth=1.2)
    share_names(all_axes[: len(found)], min(2, len(found)))
    return figure


def _end(values: dict[str, float]) -> float:
    """Return where bars are cut: one that is very long would leave the others nothing to be told apart by."""
    ours = values.get("moe_runtime", min(values.values()))
    return min(max(values.values()), FAR * max(1.0, ours))


def _dots(found: list[Bench]):
    panels: dict[tuple, list[Bench]] = {}
    for bench in found:
        panels.setdefault((PASSES[bench.function], _tokens(bench), bench.dtype), []).append(bench)
    columns = min(2, len(panels))
    heights = [1.1 + 0.3 * len(group) for group in panels.values()]
    figure, all_axes = grid(TITLE, found, heights, columns)
    for axes, (place, group) in zip(all_axes, panels.items()):
        for y, bench in enumerate(group):
            for name in reversed(ordered(ratios(bench))):
                colour, marker = style(name)
                label = f"{bench.shape}: {name}"
                axes.plot(ratios(bench)[name], y, color=colour, marker=marker, markersize=6, linestyle="", label=label)
        axes.axvline(1, color=INK, linestyle="--", linewidth=1.2, zorder=1)
        axes.set_yticks(range(len(group)), [bench.shape for bench in group])
        axes.set_ylim(len(group) - 0.5, -0.5)
        logarithmic(axes, "x")
        plain(axes, ", ".join(filter(None, place)))
        axes.set_xlabel("times of the floor (less is better)", fontsize=SMALL)
    share_names(all_axes[: len(panels)], columns)
    legend(figure, key((name for bench in found for name in ratios(bench)), line=True, join=False))
    return figure
