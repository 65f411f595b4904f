"""The table of mutants is of the code that is here; the generator plants what it says; the runner sees what a test sees."""

import ast
import re

import pytest

from tests.stress import mutant_table
from tests.stress.generic_mutants import ROOT, files, mutants_of, planted

ROWS = mutant_table.read()


def test_the_table_is_of_the_code_that_is_here():
    """It may age by a tenth; then `python -m tests.stress.mutate`, which looks anew at what changed."""
    known = {mutant.key for file in files() for mutant in mutants_of(file)}
    gone, unseen = [key for key in ROWS if key not in known], set(files()) - {file for file, *_ in ROWS}
    assert len(gone) <= len(ROWS) / 10, f"{len(gone)} of {len(ROWS)} mutants are of other code, the first is {gone[0]}"
    assert len(unseen) <= len(files()) / 10, f"no mutant of {sorted(unseen)}"


def test_witnesses_exist():
    for witness in ROWS.values():
        path, _, name = witness.partition("::")
        if path.startswith("tests/"):
            function = re.split(r"[\[,]", name)[0]
            assert not function or f"def {function}(" in (ROOT / path).read_text(), witness


def test_reasons_are_of_mutants_that_lived():
    undecided = ("", mutant_table.TIMED_OUT)
    assert all(ROWS[key] in undecided and reason for key, reason in mutant_table.reasons().items())


def test_the_page_is_what_its_rows_make():
    start = "\nOf "  # in front of it are counts of what is written by hand
    assert mutant_table.page(ROWS).partition(start)[2] == mutant_table.PAGE.read_text().partition(start)[2] != ""


SOURCE = '''
def f(x: int = 1, *, mask=None):
    """1 < 2"""
    if x < 2:
        raise ValueError(f"x is {x + 1}")
    check_it(x)
    y = tl.load(x, mask=x < 4) + g(a, b)
    y += torch.zeros(3, dtype=torch.float32).double()
    return y if not mask else -1


def f_fake(x):
    return x + 1
'''


def test_what_is_planted():
    found = {(mutant.kind, mutant.new) for mutant in mutants_of("f.py", SOURCE)}
    assert found == {
        ("operator", "y = (tl.load(x, mask=x < 4) - g(a, b))"),
        ("mask", "y = (tl.load(x, mask=(x < 4) == (x < 4))) + g(a, b)"),
        ("comparison", "y = tl.load(x, mask=(x <= 4)) + g(a, b)"),
        ("off by one", "y = tl.load(x, mask=x < (5)) + g(a, b)"),
        ("arguments", "y = tl.load(x, mask=x < 4) + (g(b, a))"),
        ("statement", "pass"),
        ("dtype", "y += (torch.zeros(3, dtype=torch.float32).float())"),
        ("off by one", "y += torch.zeros((4), dtype=torch.float32).double()"),
        ("dtype", "y += torch.zeros(3, dtype=(torch.bfloat16)).double()"),
        ("operator", "return y if (mask) else -1"),
        ("operator", "return y if not mask else (1)"),
        ("off by one", "return y if not mask else -(2)"),
    }


@pytest.mark.parametrize("file", files())
def test_every_mutant_is_one_changed_line_of_python(file):
    source = (ROOT / file).read_text().splitlines()
    for mutant in mutants_of(file)[::40]:
        changed = planted(mutant)
        ast.parse(changed)
        lines = changed.splitlines()
        assert [n + 1 for n, (a, b) in enumerate(zip(source, lines, strict=True)) if a != b] == [mutant.line]
