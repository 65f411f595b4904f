"""How much there is to read, and how densely it is written: python -m tests.support.density [DEPTH]

Counted in nodes of the syntax tree, which folding lines together does not change, and per line.
"""

import ast
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.captured import captured

ROOT = Path(__file__).resolve().parents[2]
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Density(NamedTuple):
    """Counts of a folder's Python files."""

    files: int = 0
    lines: int = 0
    nodes: int = 0
    conditionals: int = 0  # conditional expressions
    tuples: int = 0  # assignments of several values to several names
    comprehensions: int = 0

    def __add__(self, other: "Density") -> "Density":
        return Density(*map(sum, zip(self, other, strict=True)))

    @property
    def nodes_per_line(self) -> float:
        """Nodes of the syntax tree per line."""
        return self.nodes / max(self.lines, 1)

    def per_thousand(self, name: str) -> float:
        """Return the number of `name` per 1,000 lines."""
        return 1000 * getattr(self, name) / max(self.lines, 1)


def measured(text: str) -> Density:
    """Measure one file."""
    nodes = list(ast.walk(ast.parse(text)))
    tuples = 0
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            tuples += isinstance(node.targets[0], ast.Tuple)
    return Density(
        files=1,
        lines=text.count("\n"),
        nodes=len(nodes),
        conditionals=sum(isinstance(node, ast.IfExp) for node in nodes),
        tuples=tuples,
        comprehensions=sum(isinstance(node, COMPREHENSIONS) for node in nodes),
    )


def python_files(folder: Path) -> list[Path]:
    """List a folder's Python files, except behind symlinks."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        is_linked = any(parent.is_symlink() for parent in (path, *path.parents))
        if not is_linked:
            found.append(path)
    return found


def total(folder: Path) -> Density:
    """Measure all files of a folder."""
    return sum(
        (measured(path.read_text()) for path in python_files(folder)),
        Density(),
    )


def main() -> None:
    """Print a line for each folder down to the depth given on the command line."""
    depth = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    listed = captured(["git", "ls-files", "*.py"], cwd=ROOT, check=True)
    folders: dict[str, Density] = {}
    for name in listed.stdout.split():
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        folder = "/".join(name.split("/")[:-1][:depth]) or "."
        folders[folder] = folders.get(folder, Density()) + measured(path.read_text())
    print(
        f"{'':36}{'files':>6}{'lines':>8}{'nodes':>9}{'n/line':>8}{'if':>7}{'tuple':>7}{'compr':>7}"
    )
    for folder, found in sorted(folders.items()):
        parts = []
        for of in Density._fields[3:]:
            parts.append(f"{found.per_thousand(of):7.1f}")
        counts = f"{found.files:6}{found.lines:8}{found.nodes:9}{found.nodes_per_line:8.2f}"
        print(f"{folder:36}{counts}{''.join(parts)}")


if __name__ == "__main__":
    main()
