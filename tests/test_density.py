"""How much code there is, and how dense it is: budgets and ceilings of each folder.

A budget counts nodes of the syntax tree, so that joining lines gains nothing. To raise one, lower
another by as much in the same commit.
"""

import pytest

from tests.support.density import ROOT, Density, measured, python_files, total

NODES = {
    "bench": 40_397,
    "kernels": 37_177,
    "moe_runtime": 278_065,
    "papers": 75_737,
    "tests": 405_424,
}
NODES_PER_LINE = 6.5
PER_THOUSAND_LINES = {"conditionals": 15, "tuples": 5, "comprehensions": 25}

SAMPLE = """\
a, b = 1, 2
c = a if b else None
d = [x for x in (a, b)]
e, f = d
"""


def excesses(name: str, density: Density) -> list[str]:
    """List where a folder is denser than the ceilings."""
    excess = []
    if density.nodes_per_line > NODES_PER_LINE:
        excess.append(f"{name} has {density.nodes_per_line:.2f} nodes a line")
    for kind, most in PER_THOUSAND_LINES.items():
        if density.per_thousand(kind) > most:
            excess.append(f"{name} has {density.per_thousand(kind):.1f} {kind} per 1,000 lines")
    return excess


@pytest.mark.parametrize("name", NODES)
def test_a_folder_keeps_its_budget(name):
    assert total(ROOT / name).nodes <= NODES[name]


@pytest.mark.parametrize("name", NODES)
def test_a_folder_is_unfolded(name):
    assert excesses(name, total(ROOT / name)) == []


def test_only_kernels_may_switch_the_formatter_off():
    folders = NODES.keys() - {"kernels"}
    files = [path for name in folders for path in python_files(ROOT / name)]
    skip = "# fmt: " + "skip"
    assert [path for path in files if skip in path.read_text()] == []


def test_what_is_counted():
    sample = measured(SAMPLE)
    assert (sample.lines, sample.conditionals, sample.tuples, sample.comprehensions) == (4, 1, 1, 1)
    spaced = measured(SAMPLE.replace("(a, b)", "(\n    a,\n    b,\n)"))
    assert spaced.nodes == sample.nodes  # formatting does not count


def test_each_excess_is_reported():
    dense = Density(1, lines=10, nodes=66, conditionals=1, tuples=1, comprehensions=1)
    assert len(excesses("bench", dense)) == 4
    assert excesses("bench", Density(1, lines=10, nodes=65)) == []
