"""papers.engine.plots: colors that everyone can distinguish, nothing hidden, files for light and
dark pages.
"""

from matplotlib.image import imread

from papers.engine import plots

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
