"""papers.engine.plots: colours that everyone tells apart, nothing hidden, files for light
and dark pages.
"""

import itertools

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from moe_runtime.bench import pictures_bars
from moe_runtime.hf.dropin.stats import RouterStats
from papers import demo
from papers.engine import plots
from tests.papers.xft.test_tables import ROWS, report_of, result

# Machado, Oliveira and Fernandes, 2009, severity 1: linear RGB as it is seen without red or without
# green
SEEN = {
    "normal": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def linear(values: np.ndarray) -> np.ndarray:
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def in_dark(values: np.ndarray) -> np.ndarray:
    """invert(0.9) hue-rotate(180deg) of CSS: the inverse, turned about the axis of greys."""
    turned = 2 * np.array([[0.213, 0.715, 0.072]] * 3) - np.eye(3)
    return np.clip(turned @ (0.9 - 0.8 * values), 0, 1)


def contrast(a: np.ndarray, b: np.ndarray) -> float:
    low, high = sorted((linear(values) @ XYZ[1]).item() for values in (a, b))
    return (high + 0.05) / (low + 0.05)


def lab(values: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(XYZ @ values / XYZ.sum(1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


@pytest.mark.parametrize(
    "colour", sorted({*plots.COLOURS, plots.GREY, *(c for c, _ in pictures_bars.STYLES.values())})
)
def test_every_colour_is_seen_on_light_and_dark_pages(colour):
    white = np.ones(3)
    assert contrast(rgb(colour), white) >= 3
    assert contrast(in_dark(rgb(colour)), in_dark(white)) >= 3


@pytest.mark.parametrize("matrix", SEEN.values(), ids=SEEN)
def test_colours_are_told_apart(matrix):
    seen = {colour: lab(np.clip(matrix @ linear(rgb(colour)), 0, 1)) for colour in plots.COLOURS}
    assert min(np.linalg.norm(seen[a] - seen[b]) for a, b in itertools.combinations(seen, 2)) > 14


def test_files_follow_the_page_and_are_the_same_each_time(tmp_path):
    figures = [plots.new_figure("a $x$ b", (2, 2))[0] for _ in range(3)]
    for name, figure in zip(("a.svg", "b.svg", "c.png"), figures, strict=True):
        plots.save(figure, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert text.count("prefers-color-scheme: dark") == 1
    assert "a $x$ b</text>" in text
    assert "'DejaVu Sans', 'Verdana', sans-serif" in text
    assert imread(tmp_path / "c.png").shape[:2] == (300, 300)


def test_a_tiny_run_says_so():
    figures = [plots.watermark(plots.new_figure("", (2, 2))[0], tiny) for tiny in (True, False)]
    assert [plots.TINY in texts(figure) for figure in figures] == [True, False]


def test_no_bar_and_no_number_is_lost():
    _, axes = plots.new_figure("", (4, 3))
    plots.grouped(
        axes,
        ["x", "y"],
        {"a": [0.0, 0.5], "b": [1.0, None]},
        {"a": [(0, 0.2), None], "b": [None] * 2},
        form="{:.1f}",
    )
    heights = {
        container.get_label(): [bar.get_height() for bar in container]
        for container in axes.containers
    }
    assert heights == {"a": [0, 0.5], "b": [1, 0]}
    assert sorted(t.get_text() for t in axes.texts) == [
        "0.0",
        "0.5",
        "1.0",
    ]
    assert [list(line.get_ydata()) for line in axes.lines] == [[0, 0.2]]
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize("draw", [plots.dots, plots.curves])
def test_every_method_of_a_long_table_is_drawn(draw):
    methods = {f"method {i}": [[loss + i / 100 for loss in ROWS]] * 2 for i in range(9)}
    report = report_of(methods, reference="method 0")
    for name in methods:
        assert any(name in text for text in texts(draw(report)))
    lines = [
        line
        for line in draw(report).axes[0].get_lines()
        if line.get_marker() not in ("None", "", None)
    ]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) >= (
        2 if draw is plots.dots else 9
    )


def test_a_method_without_a_curve_is_in_the_legend_and_one_seed_has_no_bars():
    report = report_of({"SFT": [ROWS], "SWA": [ROWS]})
    report.entries[1].results[:] = [result("SWA", ROWS, history=[])]
    figure = plots.curves(report)
    assert any(text.startswith("SWA: ") and text.endswith(", no curve") for text in texts(figure))
    for text in texts(figure):
        assert "sd" not in text
    assert not figure.axes[0].collections


LOSSES = {"base": 3.2, "SFT": 2.8, "SFT_time": 2.7, "MoE": 2.75, "INIT": 2.7501, "merged": 2.75}


def drawn_rows(axes, rows: dict[str, float]) -> None:
    """Each row of the table has its name and its number; the base's is at the edge."""
    assert [label.get_text().partition("\n")[0] for label in axes.get_yticklabels()] == list(rows)
    numbers = {text.get_text() for text in axes.texts}
    assert numbers == {f"{loss:.4f}" for loss in rows.values() if loss < 3} | {
        f"{rows['base']:.3f}  \u2192"
    }
    assert (
        sorted(line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "D")
        == sorted(rows.values())[:-1]
    )


def test_the_demos_table_is_in_its_picture():
    names = ["base", "SFT 1", "SFT 2", "SFT 3", "MoE", "merged INIT", "merged"]
    losses = dict(zip(names, [3.2, 2.8, 2.79, 2.81, 2.8, 2.795, 2.7951], strict=True))
    rows = [
        {"model": name, "loss": loss, "solved": 0.25, "parameters": 10}
        for name, loss in losses.items()
    ]
    ways = {name: [[2, 3.0], [4, loss]] for name, loss in losses.items() if name != "merged INIT"}
    stats = RouterStats(torch.tensor([[8, 3, 5]]), ("0",), num_shared=1)
    figure = demo._picture({"rows": rows, "validation_curves": ways, "seed": 0}, stats)
    table, solved, curves, load = figure.axes[:4]
    drawn_rows(table, losses)
    assert [bar.get_width() for bar in solved.patches] == [0.25] * 7
    assert solved.get_xlim()[0] == 0
    found = {line.get_label(): list(line.get_xdata()) for line in curves.get_lines()}
    assert found == {name: [2, 4] for name in names[1:5]} | {"merged, its mixing": [6, 8]}
    assert [text.get_text() for text in load.texts] == ["0.75", "1.25"]
