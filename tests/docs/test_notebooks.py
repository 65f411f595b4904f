"""The notebooks of docs/: they run, are committed with their outputs, and use public names only."""

import ast
import json
import re
import sys

import pytest

import moe_runtime
from tests.support.fences import ROOT
from tests.support.notebooks import FOLDER, execute

pytest.importorskip("mkdocs", reason="docs/hooks.py needs the extra docs")
sys.path.insert(0, str(ROOT / "docs"))
import hooks

sys.path.remove(str(ROOT / "docs"))
BOOKS = [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("*.ipynb"))]


def cells(path) -> list[tuple[str, str]]:
    """The code cells of a notebook: the code, and what it printed."""
    found = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    return [
        ("".join(cell["source"]), "".join("".join(out["text"]) for out in cell["outputs"]))
        for cell in found
    ]


def test_there_are_three_and_the_first_page_links_them():
    links = re.findall(r"\(notebooks/([\w-]+)\.ipynb\)", (ROOT / "docs" / "start.md").read_text())
    assert sorted(links) == [book.id for book in BOOKS] and len(links) == 3


@pytest.mark.parametrize("path", BOOKS)
def test_a_notebook_has_its_outputs_and_uses_public_names(path):
    names = []
    for code, printed in cells(path):
        assert "print" not in code or printed or "def " in code, code
        tree = ast.parse(code)
        ours = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module.startswith("moe_runtime")
        ]
        names += [(node.module, alias.name) for node in ours for alias in node.names]
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and not node.attr.startswith("__")
        }
        assert not [name for name in used if name.startswith("_")]
        for module in ("xft", "esft"):
            called = set(re.findall(rf"\b{module}\.(\w+)", code))
            assert called <= set(hooks.public(f"moe_runtime.methods.{module}")) | {"py"}
        assert set(re.findall(r"\bmoe_runtime\.(?!methods|hf)(\w+)", code)) <= set(
            moe_runtime.__all__
        )
    assert names
    for module, name in names:
        assert module == "moe_runtime.methods" or name in hooks.public(module), f"{module}.{name}"
    assert not re.search(r"/(home|root|tmp|work|usr)/", path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("path", BOOKS)
def test_a_notebook_prints_what_it_says(path, tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = execute(path, tmp_path)
    now = [
        "".join(out["text"] for out in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code"
    ]
    for text, (_, before) in zip(now, cells(path), strict=True):
        words = [re.sub(r"[-+]?\d[\d.,e+-]*|\([^)]*\)", "#", one).split() for one in (text, before)]
        assert words[0] == words[1]
