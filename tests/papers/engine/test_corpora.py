"""The standard library as data: pairs of a signature with its docstring and the function,
and text.
"""

import ast
import time

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
    start = time.process_time()
    pairs = standard_library_pairs()
    assert time.process_time() - start < 30  # 4 s on one core of a Xeon, 2026-11-20
    return pairs


def test_library_pairs_are_many_and_bounded(pairs):
    assert len(pairs.train) > 2000
    assert len(pairs.held_out) > 150
    for row in [*pairs.train, *pairs.held_out]:
        assert list(row) == ["prompt", "completion", "module"]
        assert corpora.SIZE[0] <= len(row["completion"]) <= corpora.SIZE[1] >= len(row["prompt"])
        assert row["prompt"].endswith("\n")
        assert not row["prompt"].endswith("\n\n")


def test_library_pairs_are_functions_without_their_docstring(pairs):
    for row in [*pairs.train, *pairs.held_out]:
        (function,) = ast.parse(row["completion"]).body
        assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        assert f" {function.name}(" in row["prompt"].partition("\n")[0]
        doc = row["prompt"].partition("\n")[2].strip()
        assert ast.get_docstring(function) is None
        assert len(doc) < 60 or doc not in row["completion"]


def test_library_pairs_keep_comments_and_say_what_they_are(pairs):
    (row,) = (
        row
        for row in pairs.train + pairs.held_out
        if row["completion"].startswith("def insort_right(")
    )
    signature = "insort_right(a, x, lo=0, hi=None, *, key=None)"
    assert row["prompt"].startswith(
        f"Write a Python function {signature}.\nInsert item x in list a"
    )
    assert any("#" in row["completion"] for row in pairs.train)


def test_library_pairs_do_not_leak(pairs):
    modules = [{row["module"] for row in rows} for rows in pairs]
    assert not modules[0] & modules[1]
    for held, names in enumerate(modules):
        for module in names:
            assert corpora.is_held_out(module) == held
    completions = [row["completion"] for row in pairs.train + pairs.held_out]
    assert len(set(completions)) == len(completions)


def library(monkeypatch, *files):
    """Pairs of a library of these files; "b.py" is not held out, "held.py" is."""
    held = next(f"held{i}.py" for i in range(99) if corpora.is_held_out(f"held{i}.py"))
    assert not corpora.is_held_out("b.py")
    files = tuple((held if name == "held.py" else name, text) for name, text in files)
    monkeypatch.setattr(corpora, "standard_library_files", lambda: files)
    monkeypatch.setattr(corpora, "_library_rows", SCAN)
    return standard_library_pairs()


@pytest.mark.parametrize(
    "copy, leaks",
    [
        pytest.param(
            'def f(x):\n    """Doc."""\n    # twice\n    return x * 2  # as said above',
            True,
            id="same",
        ),
        pytest.param(
            "def f(x):\n    # twice\n    return x * 2  # as said above", True, id="undocumented"
        ),
        pytest.param(
            'def f(x):\n    """Other."""\n    # twice\n    return x * 2  # as said above',
            True,
            id="reworded",
        ),
        pytest.param(
            "class A:\n    def f(x):\n        # twice\n        return x * 2  # as said above",
            True,
            id="deeper",
        ),
        pytest.param(
            "def f(x):\n    # thrice\n    return x * 3  # as said above", False, id="another"
        ),
    ],
)
def test_what_a_train_file_defines_is_not_held_out(monkeypatch, copy, leaks):
    held = 'def f(x):\n    """Doc."""\n    # twice\n    return x * 2  # as said above\n'
    assert len(library(monkeypatch, ("b.py", copy), ("held.py", held)).held_out) == (not leaks)
    assert len(library(monkeypatch, ("held.py", held), ("b.py", copy)).held_out) == (not leaks)


def test_a_function_behind_a_form_feed_is_left_out(monkeypatch):
    """Such a line counts as one to the parser and as two to splitlines; Python 3.10's own library
    has one.
    """
    text = (
        'def f(x):\n    """Doc."""\n    value = x * 2  # twice\n    other = value + '
        "1\n"
        " "
        " "
        " "
        " "
        "return other * value\n"
    )
    assert len(library(monkeypatch, ("b.py", text)).train) == 1
    assert library(monkeypatch, ("b.py", "x = 1\n\f\n" + text)).train == []


def test_library_pairs_repeat_and_limit(pairs):
    again = standard_library_pairs(limit=50)
    assert again.train == pairs.train[:50]
    assert again.held_out == pairs.held_out[:50]
    other = standard_library_pairs(seed=1)
    assert other.train != pairs.train
    assert sorted(map(str, other.train)) == sorted(map(str, pairs.train))
    again.train[0]["prompt"] = "changed"
    assert standard_library_pairs(limit=50).train == pairs.train[:50]
    with pytest.raises(ValueError, match="limit must be .*but got 0"):
        standard_library_pairs(limit=0)


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
        pytest.param('def f(x): "Doc."; return x + 12345678901234567890123456789', id="one-line"),
        pytest.param(
            'def f(x):\n    """Doc."""\n    raise '
            'NotImplementedError("a '
            "text "
            "over "
            "the "
            "lower "
            'bound")',
            id="stub",
        ),
        pytest.param(
            'class A:\n    def f(x):\n        """Doc."""\n        return """\nabc""" + x * 10**9',
            id="string",
        ),
        pytest.param(
            'def f(x):\n    """Doc."""\n    ' + "x += 1\n    " * 200 + "return x", id="long"
        ),
        pytest.param('def f(x):\n    """Doc."""\n    return x', id="short"),
        pytest.param(
            "def f(x):\n    y = x * x + 1234567890\n    return y * y * y", id="no-docstring"
        ),
    ],
)
def test_functions_without_a_clean_pair_are_left_out(monkeypatch, source):
    good = '\n\ndef g(x):\n    """Double it."""\n    # twice\n    return x * 2  # as said above\n'
    (row,) = library(monkeypatch, ("b.py", source + good)).train
    assert row["completion"] == "def g(x):\n    # twice\n    return x * 2  # as said above"
    assert row["prompt"] == "Write a Python function g(x).\nDouble it.\n"
