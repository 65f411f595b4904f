"""The standard library as data: pairs of a signature with its docstring and the function body, and
text.
"""

import ast

import pytest

from papers.engine import corpora
from papers.engine.corpora import (
    standard_library_files,
    standard_library_pairs,
    standard_library_text,
)

SCAN = corpora._library_rows.__wrapped__  # without its cache


@pytest.fixture(scope="module")
def pairs():
    return standard_library_pairs()


def test_library_pairs_are_functions_without_their_docstring(pairs):
    assert len(pairs.train) > 2000
    assert len(pairs.held_out) > 150
    for row in [*pairs.train, *pairs.held_out]:
        assert list(row) == ["prompt", "completion", "module"]
        assert corpora.SIZE[0] <= len(row["completion"]) <= corpora.SIZE[1] >= len(row["prompt"])
        assert row["prompt"].endswith("\n")
        assert not row["prompt"].endswith("\n\n")
        (function,) = ast.parse(row["completion"]).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        signature, _, doc = row["prompt"].partition("\n")
        assert f" {function.name}(" in signature
        assert ast.get_docstring(function) is None
        assert len(doc) < 60 or doc.strip() not in row["completion"]


def test_library_pairs_do_not_leak(pairs):
    completions = set()
    for held_out, rows in enumerate(pairs):
        for row in rows:
            assert corpora.is_held_out(row["module"]) == held_out
            completions.add(row["completion"])
    assert len(completions) == len(pairs.train) + len(pairs.held_out)


def library(monkeypatch, *files):
    """Return pairs from a library of these files; "b.py" is not held out, "held.py" is."""
    monkeypatch.setattr(corpora, "is_held_out", lambda name: name == "held.py")
    monkeypatch.setattr(corpora, "standard_library_files", lambda: files)
    monkeypatch.setattr(corpora, "_library_rows", SCAN)
    return standard_library_pairs()


TWICE = "# twice\n    return x * 2  # as said above"


@pytest.mark.parametrize(
    "copy, leaks",
    [
        pytest.param(
            f'def f(x):\n    """Doc."""\n    {TWICE}',
            True,
            id="same",
        ),
        pytest.param(
            f"def f(x):\n    {TWICE}",
            True,
            id="undocumented",
        ),
        pytest.param(
            "class A:\n    def f(x):\n        " + TWICE.replace("\n", "\n    "), True, id="deeper"
        ),
        pytest.param(
            f"def f(x):\n    {TWICE}".replace("2", "3"),
            False,
            id="another",
        ),
    ],
)
def test_what_a_train_file_defines_is_not_held_out(monkeypatch, copy, leaks):
    held = f'def f(x):\n    """Doc."""\n    {TWICE}\n'
    assert len(library(monkeypatch, ("b.py", copy), ("held.py", held)).held_out) == (not leaks)
    assert len(library(monkeypatch, ("held.py", held), ("b.py", copy)).held_out) == (not leaks)


HEAD = 'def f(x):\n    """Doc."""\n    '


BODY = "value = x * 2  # twice\n    other = value + 1\n    return other * value"


def test_library_text_is_the_files_in_pieces():
    documents = standard_library_text()
    files = [text for module, text in standard_library_files() if not corpora.is_held_out(module)]
    assert len(files) > 100
    assert sum(map(len, documents)) > 0.99 * sum(map(len, files))
    assert sorted(map(len, documents))[len(documents) // 2] > corpora.PIECE * 0.9
    assert documents[0] == "".join(files)[: len(documents[0])]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(HEAD + "return x", id="short"),
        pytest.param("def f(x):\n    " + BODY, id="no-docstring"),
        # the parser counts such a line as one, splitlines as two
        pytest.param("x = 1\n\f\n" + HEAD + BODY, id="form-feed"),
    ],
)
def test_functions_without_a_clean_pair_are_left_out(monkeypatch, source):
    good = f'\n\ndef g(x):\n    """Double it."""\n    {TWICE}\n'
    rows = library(monkeypatch, ("b.py", source + good)).train
    assert [row["completion"] for row in rows if "def f" in row["completion"]] == []
    if "\f" not in source:
        (row,) = rows
        assert row["completion"] == f"def g(x):\n    {TWICE}"
        assert row["prompt"] == "Write a Python function g(x).\nDouble it.\n"
