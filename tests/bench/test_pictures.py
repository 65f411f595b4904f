"""The benchmarks' figures show the values of a published file."""

from pathlib import Path

import pytest

from moe_runtime.bench import pictures, pictures_bars
from moe_runtime.bench.goals import PEFT
from moe_runtime.bench.pictures_bars import read

matplotlib = pytest.importorskip("matplotlib")
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
PUBLISHED = RESULTS / "2026-11-28-c3b91fb4-cpu.json"  # has data for every figure


LORA = ("bench_adapters", "coarse")


@pytest.fixture(scope="module")
def published():
    return read(PUBLISHED)


def title_of(axes) -> str:
    return axes.get_title(loc="left")


def panel_of(figure, begins: str, ends: str = ""):
    """Return the only panel whose title has this start and end."""
    chosen = []
    for axes in figure.axes:
        if title_of(axes).startswith(begins) and title_of(axes).endswith(ends):
            chosen.append(axes)
    (axes,) = chosen
    return axes


def bars_of(axes) -> dict[str, float]:
    """Return the width of each bar by implementation."""
    widths = {}
    for container in axes.containers:
        (bar,) = container
        widths[container.get_label()] = bar.get_width()
    return widths


def texts(axes) -> list[str]:
    return [text.get_text().strip() for text in axes.texts]


def test_memory_is_drawn_with_the_formula(published):
    figure = pictures_bars.memory(published)
    for bench in published:
        if bench.function != "bench_saved_memory":
            continue
        axes = panel_of(figure, bench.shape, bench.dtype)
        saved = {name: row["saved KiB/token"] for name, row in bench.rows.items()}
        assert bars_of(axes) == saved
        assert sorted(texts(axes)) == sorted(f"{value:.1f}" for value in saved.values())
        formula = bench.rows["moe_runtime"]["formula KiB/token"]
        lines = [line for line in axes.lines if line.get_label() == "published formula"]
        assert set(lines[0].get_xdata()) == {formula}


def test_the_front_picture_has_times_and_memory(published):
    (rows,) = [one.rows for one in published if (one.function, one.id) == LORA]
    speeds = bars_of(panel_of(pictures.front(published), "LoRA"))
    share = rows["moe_runtime"]["peak MiB"] / rows[PEFT]["peak MiB"]
    speed = rows[PEFT]["ms"] / rows["moe_runtime"]["ms"]
    assert speeds[f"E = 8, I = 2816: {share:.0%} of the memory"] == speed
