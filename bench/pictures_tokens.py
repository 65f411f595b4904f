"""Throughput against the number of tokens: a panel per shape, dtype and pass, a line per implementation."""

from moe_runtime.bench.pictures_style import (  # fmt: skip
    INK,
    SMALL,
    Bench,
    figure_of,
    is_floor,
    is_ours,
    key,
    legend,
    logarithmic,
    ordered,
    plain,
    style,
)

FUNCTIONS = {"bench_tokens": "forward", "bench_tokens_backward": "forward + backward"}
RATE = "tokens/s"
LOSSES = 4  # lines of a panel that name who is faster than ours, and where


def throughput(benches: list[Bench]):
    """Draw tokens/s over T; a ring where another implementation is faster than ours. None if nothing of it was measured."""
    found: dict[tuple, list[Bench]] = {}
    for bench in benches:
        if bench.function in FUNCTIONS and bench.tokens and any(RATE in row for row in bench.rows.values()):
            found.setdefault((list(FUNCTIONS).index(bench.function), bench.shape, bench.dtype), []).append(bench)
    if not found:
        return None
    used = [bench for group in found.values() for bench in group]
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    groups = sorted(found.items(), key=lambda item: item[0][0])
    losses = [len(_said(_lost(sorted(group, key=lambda bench: bench.tokens)))) for _, group in groups]
    heights = [2.7 + 0.15 * max(losses[i : i + columns]) for i in range(0, len(losses), columns)]
    figure = figure_of("Experts of one layer: tokens/s against tokens", used, 1.9 + sum(heights))
    all_axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).flatten()
    for axes in all_axes[len(found) :]:
        axes.set_visible(False)
    for axes, (place, group) in zip(all_axes, groups):
        _panel(axes, group)
        plain(axes, f"{place[1]}, {place[2]}: {list(FUNCTIONS.values())[place[0]]}")
    legend(figure, key((name for bench in used for name in _rates(bench)), line=True))
    return figure


def _rates(bench: Bench) -> dict[str, float]:
    return {name: row[RATE] for name, row in bench.rows.items() if RATE in row and not is_floor(name)}


def _panel(axes, group: list[Bench]) -> None:
    group = sorted(group, key=lambda bench: bench.tokens)
    # ours last, on top
    for name in reversed(ordered(name for bench in group for name in _rates(bench))):
        points = [(bench.tokens, _rates(bench)[name]) for bench in group if name in _rates(bench)]
        colour, marker = style(name)
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4.5, linewidth=1.5, label=name)
    axes.set_xscale("log", base=2)
    logarithmic(axes, "y")
    axes.set_xticks([bench.tokens for bench in group], [_tokens(bench.tokens) for bench in group])
    axes.xaxis.minorticks_off()
    axes.set_xlabel("T (1k = 1024)", fontsize=SMALL)
    axes.set_ylabel(RATE, fontsize=SMALL)
    lost = _lost(group)
    if lost:
        places = [(T, rate) for T, _, rate, _ in lost]
        axes.plot(*zip(*places, strict=True), "o", markersize=11, markerfacecolor="none", color=INK, label="faster")
        axes.set_xlabel("\n".join(["T (1k = 1024)", *_said(lost)]), fontsize=SMALL)


def _lost(group: list[Bench]) -> list[tuple]:
    return [one for bench in group if (one := loss(bench)) is not None]


def _said(lost: list[tuple]) -> list[str]:
    """Say who is faster than ours, where and by how much."""
    lines = [f"T = {_tokens(T)}: {name} {ratio:.2f} times ours" for T, name, _, ratio in lost]
    left = [f"and {len(lines) - LOSSES} more (rings)"] if len(lines) > LOSSES else []
    return lines[:LOSSES] + left


def _tokens(T: int) -> str:
    return f"{T // 1024}k" if T % 1024 == 0 else str(T)


def loss(bench: Bench) -> tuple[int, str, float, float] | None:
    """Return T, the fastest implementation, its tokens/s and how many times faster than ours it is; None if ours is."""
    rates = _rates(bench)
    ours = rates.get("moe_runtime") or max((rate for name, rate in rates.items() if is_ours(name)), default=None)
    others = {name: rate for name, rate in rates.items() if not is_ours(name)}
    if ours is None or not others:
        return None
    best = max(others, key=others.get)
    ratio = others[best] / ours
    return (bench.tokens, best, others[best], ratio) if round(ratio, 2) > 1 else None
