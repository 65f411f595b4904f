"""papers.engine.plots: colours that everyone tells apart, nothing hidden, files for light
and dark pages.
"""

import itertools

import numpy as np
import pytest
from matplotlib.image import imread

from moe_runtime.bench import pictures_bars
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
XYZ = np.array(
    [
        [0.4124, 0.3576, 0.1805],
        [0.2126, 0.7152, 0.0722],
        [0.0193, 0.1192, 0.9505],
    ]
)


def rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def linear(values: np.ndarray) -> np.ndarray:
    return np.where(
        values <= 0.04045,
        values / 12.92,
        ((values + 0.055) / 1.055) ** 2.4,
    )


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
    """All text of a figure."""
    drawn = figure.findobj(lambda artist: hasattr(artist, "get_text"))
    return [artist.get_text() for artist in drawn]


BARS = [colour for colour, _ in pictures_bars.STYLES.values()]


@pytest.mark.parametrize("colour", sorted({*plots.COLOURS, plots.GREY, *BARS}))
def test_every_colour_is_seen_on_light_and_dark_pages(colour):
    white = np.ones(3)
    assert contrast(rgb(colour), white) >= 3
    assert contrast(in_dark(rgb(colour)), in_dark(white)) >= 3


@pytest.mark.parametrize("matrix", SEEN.values(), ids=SEEN)
def test_colours_are_told_apart(matrix):
    seen = [lab(np.clip(matrix @ linear(rgb(colour)), 0, 1)) for colour in plots.COLOURS]
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(one - other) > 14


def test_files_follow_the_page_and_are_the_same_each_time(tmp_path):
    for name in ("a.svg", "b.svg", "c.png"):
        figure, _ = plots.new_figure("a $x$ b", (2, 2))
        plots.save(figure, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert text.count("prefers-color-scheme: dark") == 1
    assert "a $x$ b</text>" in text
    assert "'DejaVu Sans', 'Verdana', sans-serif" in text
    assert imread(tmp_path / "c.png").shape[:2] == (300, 300)


@pytest.mark.parametrize("tiny", [True, False])
def test_a_tiny_run_says_so(tiny):
    figure, _ = plots.new_figure("", (2, 2))
    assert (plots.TINY in texts(plots.watermark(figure, tiny))) == tiny


def test_no_bar_and_no_number_is_lost():
    _, axes = plots.new_figure("", (4, 3))
    plots.grouped(
        axes,
        ["x", "y"],
        {"a": [0.0, 0.5], "b": [1.0, None]},
        {"a": [(0, 0.2), None], "b": [None] * 2},
        form="{:.1f}",
    )
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert heights == [[0, 0.5], [1, 0]]
    assert sorted(text.get_text() for text in axes.texts) == ["0.0", "0.5", "1.0"]
    assert list(axes.lines[0].get_ydata()) == [0, 0.2]
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize("draw", [plots.dots, plots.curves])
def test_every_method_of_a_long_table_is_drawn(draw):
    methods = {}
    for i in range(9):
        methods[f"method {i}"] = [[loss + i / 100 for loss in ROWS]] * 2
    report = report_of(methods, reference="method 0")
    report.entries[8].results[:] = [result("method 8", ROWS, history=[])] * 2  # has no curve
    figure = draw(report)
    drawn = "\n".join(texts(figure))
    for name in methods:
        assert name in drawn
    styles = set()
    for line in figure.axes[0].get_lines():
        if line.get_marker() not in ("None", "", None):
            styles.add((line.get_color(), line.get_marker()))
    assert len(styles) >= (2 if draw is plots.dots else 8)
