"""The notebooks in docs/ run, are committed with their outputs, and use only public names."""

import ast
import re
import sys

import pytest

from tests.support.fences import ROOT
from tests.support.notebooks import FOLDER, execute

pytest.importorskip("mkdocs", reason="docs/hooks.py needs the extra docs")
sys.path.insert(0, str(ROOT / "docs"))
import hooks

from moe_runtime.io.files import read_json

sys.path.remove(str(ROOT / "docs"))
BOOKS = [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("*.ipynb"))]


def cells(path) -> list[tuple[str, str]]:
    """Return the code cells of a notebook: the code, and its output."""
    pairs = []
    for cell in read_json(path)["cells"]:
        if cell["cell_type"] == "code":
            pairs.append(("".join(cell["source"]), printed_by(cell)))
            assert cell["execution_count"] == len(pairs)
    return pairs


def printed_by(cell) -> str:
    return "".join("".join(out["text"]) for out in cell["outputs"])


@pytest.mark.parametrize("path", BOOKS)
def test_a_notebook_has_its_outputs_and_uses_public_names(path):
    imported = 0
    for code, printed in cells(path):
        assert "print" not in code or printed or "def " in code, code
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute):
                assert not re.match("_[^_]", node.attr), node.attr
            if isinstance(node, ast.ImportFrom) and node.module.startswith("moe_runtime"):
                imported += 1
                for alias in node.names:
                    is_method = node.module == "moe_runtime.methods"
                    assert is_method or alias.name in hooks.public(node.module), alias.name
    assert imported
    assert not re.search(r"/(home|root|tmp|work|usr)/", path.read_text())


def without_numbers(text: str) -> list[str]:
    return re.sub(r"[-+]?\d[\d.,e+-]*|\([^)]*\)", "#", text).split()


@pytest.mark.slow
@pytest.mark.parametrize("path", BOOKS)
def test_a_notebook_prints_what_it_says(path, tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = execute(path, tmp_path)
    now = [printed_by(cell) for cell in book.cells if cell.cell_type == "code"]
    for text, (_, before) in zip(now, cells(path), strict=True):
        assert without_numbers(text) == without_numbers(before)
