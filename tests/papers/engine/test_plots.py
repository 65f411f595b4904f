"""papers.engine.plots: colors that everyone can distinguish, nothing hidden, files for light and
dark pages.
"""

from types import SimpleNamespace

from matplotlib.image import imread

from papers.engine import plots
from papers.engine.tables import Entry

# Machado, Oliveira and Fernandes, 2009, severity 1: linear RGB as seen with protanopia or
# deuteranopia


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


def test_points_beside_each_other_stay_inside_the_axes():
    rates = {f"{kind}, {rate}": rate for kind in "abcdefgh" for rate in (1, 2)}
    entries = [Entry(name, [SimpleNamespace(loss=1.0)]) for name in rates]
    report = SimpleNamespace(
        entries=entries,
        entry=lambda name: entries[0],
        reference="a, 1",
        seeds=(0,),
        title="",
        source="",
        summary=(),
        extra={"x": rates, "x_label": ""},
    )
    (axes,) = plots.sweep(report).axes
    for points, *_ in axes.containers:
        pixels = points.get_transform().transform(points.get_xydata())
        assert all(map(axes.bbox.contains, *pixels.T))
