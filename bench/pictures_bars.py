"""Code that all pictures share (colors, reading results, frames, saving), and the bar charts of
memory.
"""

import zlib
from pathlib import Path
from typing import NamedTuple

from moe_runtime.bench.records import benchmarks
from moe_runtime.io.files import atomic_file
from moe_runtime.io.rows import require

WIDTH = 8.0  # inches: 800 pixels at 100 dpi, where 8-point text is legible
# font sizes in points
SMALL = 9
TINY = 8
GREY = "#666666"
INK = "#222222"
# text as text, the font included in matplotlib, ids that are the same in every run
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "moe_runtime",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
}
DARK = (
    "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.9) hue-rotate(180deg) } "
    "}</style>\n"
)
# name: color, marker; hues of Okabe and Ito (2008), dark enough on white; distinguished by
# markers and names as well
STYLES = {
    "moe_runtime": ("#0072B2", "o"),
    "moe_runtime cuda": ("#003F63", "H"),
    "moe_runtime triton": ("#3F8FD2", "h"),
    "moe_runtime cpp": ("#1B9AD6", "p"),
    "moe_runtime torch": ("#4F9BCB", "P"),
    "transformers eager": ("#D55E00", "s"),
    "transformers grouped_mm": ("#B98C09", "D"),
    "transformers batched_mm": ("#8C4A00", "v"),
    "torch grouped_mm": ("#009E73", "^"),
    "official": ("#CC79A7", "X"),
    "scattermoe": ("#000000", "<"),
    "liger_kernel": ("#7B4FA3", ">"),
    "sonicmoe": ("#7A7A00", "d"),
    "megablocks": ("#6B2737", "*"),
    "moe_runtime, shared dense": ("#5F6CC4", "8"),
    "dense FFN": ("#7F8E3A", "x"),
}
OTHERS = (("#5F7A61", "v"), ("#A0522D", "<"), ("#8E7CC3", ">"), ("#B8860B", "d"), ("#AF3A4B", "X"))
FLOOR = ("#868686", "_")


class Bench(NamedTuple):
    """One benchmark of a results file."""

    function: str
    id: str
    info: dict

    @property
    def rows(self) -> dict[str, dict]:
        return self.info["rows"]

    @property
    def dtype(self) -> str:
        return self.info["dtype"]

    @property
    def shape(self) -> str:
        """Name of the shape, without its tokens."""
        return self.info.get("shape", {}).get("name") or self.id.removesuffix(f"-{self.dtype}")

    @property
    def tokens(self) -> int:
        return self.info.get("tokens", 0)


def read(path: str | Path) -> list[Bench]:
    """Return the benchmarks of a results file; raises ValueError for other files."""
    benches = []
    for bench in benchmarks(path):
        function, _, id = bench["name"].partition("[")
        benches.append(
            Bench(
                function,
                id.rstrip("]"),
                bench["extra_info"],
            )
        )
    return benches


def is_ours(name: str) -> bool:
    return name.split(":")[0].split(",")[0].split()[:1] == ["moe_runtime"]


def is_floor(name: str) -> bool:
    return name.endswith("(floor)")


def style(name: str) -> tuple[str, str]:
    """Return an implementation's color and marker, the same in every picture."""
    if is_floor(name):
        return FLOOR
    return STYLES.get(name) or OTHERS[zlib.crc32(name.encode()) % len(OTHERS)]


def ordered(names) -> list[str]:
    """Sort implementations: ours, then others in the table, then the rest, and floors last."""
    names = [*STYLES, *names]
    return sorted(
        dict.fromkeys(names[len(STYLES) :]),
        key=lambda name: (is_floor(name), not is_ours(name), names.index(name)),
    )


def caption(benches: list[Bench]) -> str:
    """Return machine, versions, rounds, commit and date of the results, a line per machine."""
    infos = [bench.info for bench in benches]
    machines = {}
    spreads = []
    for bench in benches:
        words = [bench.info["machine"]]
        for name in ("torch", "triton", "transformers"):
            if bench.info.get(name, "missing") != "missing":
                words.append(f"{name} {bench.info[name]}")
        machines[", ".join(words)] = None
        for row in bench.rows.values():
            if "iqr" in row:
                spreads.append(row["iqr"])
    rounds = sorted({info["rounds"] for info in infos})
    ends = dict.fromkeys((rounds[0], rounds[-1]))
    measured = f"medians of {' to '.join(map(str, ends))} rounds, "
    if spreads:
        measured += f"quartiles at most {max(spreads):.0%} apart, "
    commit = ", ".join(dict.fromkeys(info["commit"] for info in infos))
    date = ", ".join(dict.fromkeys(info["date"] for info in infos))
    return "\n".join([*machines, f"{measured}commit {commit}, {date}"])


def figure_of(title: str, benches: list[Bench], height: float):
    """Return a Figure, without pyplot, with its title and, below, the caption of its results."""
    figure = require("matplotlib.figure", "bench").Figure(
        figsize=(WIDTH, height),
        layout="constrained",
        facecolor="white",
    )
    figure.suptitle(title, fontsize=12, color=INK)
    figure.supxlabel(
        caption(benches),
        fontsize=TINY,
        color=GREY,
    )
    figure.get_layout_engine().set(
        w_pad=0.08,
        h_pad=0.08,
        hspace=0.04,
        wspace=0.04,
    )
    return figure


def watermark(figure) -> None:
    """Mark a figure as drawn from meaningless numbers."""
    figure.text(
        0.5,
        0.5,
        "tiny run\nnot a result",
        rotation=30,
        ha="center",
        va="center",
        fontsize=44,
        color="#D55E00",
        alpha=0.35,
        zorder=9,
    )


def save(figure, path: Path) -> None:
    """Write a figure as .png or .svg, atomically; equal numbers produce equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Software": None}
    if path.suffix == ".svg":
        metadata = {"Date": None, "Creator": None}
    with atomic_file(path) as beside:
        figure.savefig(
            beside,
            dpi=150,
            metadata=metadata,
            format=path.suffix[1:],
        )
        if path.suffix == ".svg":
            text = beside.read_text(encoding="utf-8")
            beside.write_text(text.replace(" <defs>", f" {DARK} <defs>", 1), encoding="utf-8")


def plain(axes, title: str = "") -> None:
    """Give axes their title, a pale grid behind the data and no box."""
    axes.set_title(
        title,
        fontsize=SMALL + 1,
        color=INK,
        loc="left",
    )
    axes.tick_params(labelsize=SMALL)
    axes.grid(alpha=0.25, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def patch(**look):
    return require("matplotlib.patches", "bench").Patch(**look)


def line(**look):
    return require("matplotlib.lines", "bench").Line2D([], [], **look)


def key(names, join: str | None = None) -> list:
    """Return a legend's handles of implementations: patches, or markers with line style `join`."""
    handles = []
    for name in ordered(names):
        colour, marker = style(name)
        if join is None:
            handles.append(patch(color=colour, label=name))
        else:
            handles.append(
                line(
                    color=colour,
                    label=name,
                    marker=marker,
                    markersize=5,
                    linestyle=join,
                )
            )
    return handles


def legend(figure, handles: list, columns: int = 3) -> None:
    """Add a legend whose title is the figure's, as a separate figure title would overlap it."""
    title = figure.get_suptitle()
    figure.suptitle("")
    box = figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=min(columns, len(handles)),
        fontsize=SMALL,
        frameon=False,
        title=title,
        title_fontsize=12,
    )
    box.get_title().set_color(INK)


def number(value: float) -> str:
    """Three digits, or all digits before the decimal point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def logarithmic(axes) -> None:
    """Make the y axis logarithmic, with ticks at 1, 2 and 5 like 0.05, 20, 5k and 2M."""
    ticker = require("matplotlib.ticker", "bench")
    axes.set_yscale("log")
    axis = axes.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high / low < 2e3 else (1,)))
    axis.set_major_formatter(lambda value, _: _short(value))
    axis.set_minor_formatter(ticker.NullFormatter())


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e3:
        return f"{value / 1e3:g}k"
    return f"{value:g}"


def bars(axes, values: dict[str, float], form, unit: str, most: float | None = None) -> None:
    """Draw a bar per implementation from the top down, with its number; cut bars beyond `most`."""
    names = ordered(values)
    end = most or max(values.values())
    for y, name in enumerate(names):
        value = values[name]
        length = min(value, end)
        axes.barh(
            y,
            length,
            color=style(name)[0],
            height=0.72,
            label=name,
        )
        beside(
            axes,
            length,
            y,
            form(value) + " \u2192" * (value > end),
        )
    axes.set_yticks(range(len(names)), [name.removesuffix(" (floor)") for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.locator_params(axis="x", nbins=5)
    # room for the longest number
    axes.set_xlim(0, end * 1.32)
    axes.set_xlabel(unit, fontsize=SMALL)
    axes.grid(axis="y", visible=False)


def beside(axes, x: float, y: float, text: str) -> None:
    """Write text to the right of a point."""
    axes.annotate(
        text,
        (x, y),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=SMALL,
        color=INK,
    )


def share_names(all_axes) -> None:
    """Omit the bars' names if the panel to the left has the same."""
    before = []
    for i, axes in enumerate(all_axes):
        names = [label.get_text() for label in axes.get_yticklabels()]
        if i % 2 and names == before:
            axes.tick_params(axis="y", labelleft=False)
        before = names


SAVED = "saved KiB/token"
FORMULA = "formula KiB/token"


def grid(title: str, benches: list[Bench], heights: list[float], base: float = 1.3):
    """Return a figure with axes per panel; rows are as high as their highest panel, plus `base`."""
    columns = min(2, len(heights))
    rows = []
    for i in range(0, len(heights), columns):
        rows.append(max(heights[i : i + columns]))
    figure = figure_of(title, benches, base + sum(rows))
    all_axes = figure.subplots(
        len(rows),
        columns,
        squeeze=False,
        height_ratios=rows,
    ).flatten()
    for axes in all_axes[len(heights) :]:
        axes.set_visible(False)
    return figure, all_axes[: len(heights)]


def bars_height(count: int) -> float:
    return 0.95 + 0.27 * count


def memory(benches: list[Bench]):
    """Draw what is saved for the backward pass, per token; None if it was not measured."""
    measured = [bench for bench in benches if _column(bench, SAVED)]
    if not measured:
        return None
    heights = [bars_height(len(_column(bench, SAVED))) for bench in measured]
    title = (
        f"moe_runtime keeps {_shares(measured)} of what the next best keeps\nfor the backward pass"
    )
    figure, all_axes = grid(title, measured, heights)
    has_formula = False
    for axes, bench in zip(all_axes, measured, strict=True):
        values = _column(bench, SAVED)
        plain(axes, f"{bench.shape}, {bench.dtype}")
        bars(axes, values, "{:.1f}".format, "KiB per token")
        for y, name in enumerate(ordered(values)):
            if FORMULA in bench.rows[name]:
                has_formula = True
                _mark(
                    axes,
                    bench.rows[name][FORMULA],
                    y,
                    "published formula",
                )
    share_names(all_axes)
    if has_formula:
        legend(figure, [line(color=INK, linewidth=2.5, label="our published formula")])
    return figure


def _shares(benches: list[Bench]) -> str:
    """Return ours as shares of the least of the others, such as "28 to 44 %"."""
    shares = []
    for bench in benches:
        values = _column(bench, SAVED)
        others = [value for name, value in values.items() if not is_ours(name)]
        if others:
            shares.append(round(100 * values[ordered(values)[0]] / min(others)))
    if not shares:
        return "an unknown share"
    return " to ".join(map(str, sorted({min(shares), max(shares)}))) + " %"


def _mark(axes, x: float, y: float, label: str) -> None:
    """Draw a thick line across a bar."""
    axes.plot(
        [x, x],
        [y - 0.45, y + 0.45],
        color=INK,
        linewidth=2.5,
        label=label,
    )


def _column(bench: Bench, column: str) -> dict[str, float]:
    return {name: row[column] for name, row in bench.rows.items() if column in row}
