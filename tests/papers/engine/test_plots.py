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
