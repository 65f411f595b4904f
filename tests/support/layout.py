"""The imports of moe_runtime, read without running them, for tests/test_layout.py."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "moe_runtime"
PAPERS = "papers"  # the experiments, which import the package and are not shipped
# a module imports from its own rank and below; within a rank any order without cycles is fine
RANK = {
    "kernels": 0,
    "config": 1,
    "native": 1,
    "io": 1,
    "backends": 2,
    "ops": 3,
    "modules": 4,
    "hf": 5,
    "hf.common": 5,
    "hf.models": 5.1,
    "hf.dropin": 5.2,
    "hf.training": 5.5,
    "methods": 7,
    "methods.lora": 7,
    "methods.ultrafuser": 7,
    "methods.xft": 7.1,
    "methods.esft": 7.1,
    "methods.shrink": 7.1,
    "methods.upit": 7.2,
    "tools": 7.5,
    "cli": 8,
    "__main__": 8,
    "papers.engine": 9,
    "papers.evaluation": 9.1,
    "papers.xft": 9.2,
    "papers.esft": 9.2,
    "papers.upit": 9.2,
    "papers.ultrafuser": 9.2,
    "papers": 9.3,
}


class Import(NamedTuple):
    """An imported name; `level` counts its leading dots, and a `lazy` import is inside a
    function.
    """

    name: str
    line: int
    level: int
    lazy: bool


class Arrow(NamedTuple):
    """An import of one of our modules by another one."""

    source: str
    target: str
    line: int
    lazy: bool


def own_files(root: Path) -> list[Path]:
    """List the package's files; kernels/ and bench/ are symlinks, and are not included."""
    links = [root / PACKAGE / name for name in ("kernels", "bench")]
    paths = [
        *sorted((root / PACKAGE).rglob("*.py")),
        *sorted((root / PAPERS).rglob("*.py")),
    ]
    values = []
    for path in paths:
        if not any(link in path.parents for link in links):
            values.append(path)
    return values


def modules(root: Path) -> dict[str, Path]:
    """Return the dotted name of every module; those of kernels/ have the names they are imported
    by.
    """
    found = {}
    for path in [*own_files(root), *sorted((root / "kernels").rglob("*.py"))]:
        parts = path.relative_to(root).with_suffix("").parts
        parts = (PACKAGE, *parts) if parts[0] == "kernels" else parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(node: ast.AST, lazy: bool = False) -> Iterator[Import]:
    """Yield all imports of a module, including those in functions, but not those for
    annotations.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, 0, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            prefix = f"{child.module}." if child.module else ""
            yield from (
                Import(prefix + alias.name, child.lineno, child.level, lazy)
                for alias in child.names
            )
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(child, lazy or is_function)


def arrows(root: Path) -> list[Arrow]:
    """Return which module imports which. `from package import module` counts for the module, `from
    module import name` for its parent.
    """
    known = modules(root)
    found = []
    for source, path in known.items():
        for found_import in imports(ast.parse(path.read_text())):
            name = found_import.name
            target = name if name in known else name.rpartition(".")[0]
            # the version, which the package itself defines, is not a dependency
            if target in known and target != source and name != f"{PACKAGE}.__version__":
                found.append(
                    Arrow(
                        source,
                        target,
                        found_import.line,
                        found_import.lazy,
                    )
                )
    return found


def folder_of(module: str) -> str:
    """Return the folder of a module as named in RANK: `ops`, `hf.models`, `papers.xft`."""
    parts = module.split(".")
    if parts[0] == PAPERS:
        folder = ".".join(parts[:2])
        return folder if folder in RANK else PAPERS
    folder = ".".join(parts[1:3])
    return folder if folder in RANK else ".".join(parts[1:2])


def components(targets: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of several nodes that reach each other (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for target in sorted(targets[name]):
            if target not in number:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], number[target])
        if low[name] == number[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(targets):
        if name not in number:
            visit(name)
    return found


def circles(root: Path) -> list[list[str]]:
    """Return the groups of modules that import each other, including imports in functions."""
    targets: dict[str, set[str]] = {name: set() for name in modules(root)}
    for arrow in arrows(root):
        targets[arrow.source].add(arrow.target)
    return components(targets)


def folder_circles(root: Path) -> list[list[str]]:
    """Return the groups of folders whose modules import each other."""
    targets: dict[str, set[str]] = {folder_of(name): set() for name in modules(root)}
    for arrow in arrows(root):
        source = folder_of(arrow.source)
        target = folder_of(arrow.target)
        if source != target:
            targets[source].add(target)
    return components(targets)
