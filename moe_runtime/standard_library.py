"""The text that every Python brings along: its standard library, as documents and as instruction-answer pairs."""

import ast
import functools
import random
import sysconfig
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PIECE = 2000  # characters of a document of `standard_library_text`
SIZE = (40, 1200)  # characters of a completion of `standard_library_pairs`; the upper bound holds for prompts too
# no prose and code, but tests, tables and copies of other packages
SKIPPED = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idle_test", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip


class Pairs(NamedTuple):
    """What `standard_library_pairs` returns; no held-out completion stands in a file that is not held out."""

    train: list[dict[str, str]]
    held_out: list[dict[str, str]]


def standard_library_pairs(limit: int | None = None, seed: int = 0) -> Pairs:
    """Return instruction-answer pairs from the documented functions of the running Python's standard library.

    Rows have `prompt` (kind, signature, docstring), `completion` (the source without docstring), `module` (its file).
    One file in ten is held out. At most `limit` rows of each, in an order that depends on `seed` and on the version.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; want at least 1, or None for all rows")
    pairs = Pairs(*([dict(row) for row in rows] for rows in _library_rows()))
    for rows in pairs:
        random.Random(seed).shuffle(rows)
    return Pairs(pairs.train[:limit], pairs.held_out[:limit])


def standard_library_text(piece: int = PIECE, held_out: bool = False) -> list[str]:
    """Return the standard library's source as documents of about `piece` characters, the held-out files excepted, or alone."""
    documents = []
    for module, text in standard_library_files():
        if is_held_out(module) != held_out:
            continue
        document, size = [], 0
        for line in text.splitlines(keepends=True):
            if size and size + len(line) > piece:
                documents.append("".join(document))
                document, size = [], 0
            document.append(line)
            size += len(line)
        documents.append("".join(document))
    return [document for document in documents if document.strip()]


def is_held_out(module: str) -> bool:
    """Whether a file of the standard library, given as its path below it, is held out; the same in each process."""
    return zlib.crc32(module.encode()) % 10 == 0


@functools.cache
def standard_library_files() -> tuple[tuple[str, str], ...]:
    """Return the standard library's files: pairs of a file's path below it and its text, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        module = path.relative_to(root)
        if not SKIPPED & set(module.parts) and not module.parts[0].startswith("config-"):
            files.append((module.as_posix(), path.read_text(encoding="utf-8", errors="ignore")))
    return tuple(sorted(files))


@functools.cache
def _library_rows() -> tuple[tuple[dict[str, str], ...], tuple[dict[str, str], ...]]:
    """Return the rows of the train files and those of the held-out files, without doubles, in the files' order."""
    train: dict[str, dict[str, str]] = {}
    held_out: dict[str, dict[str, str]] = {}
    known = set()  # all that the train files define, documented or not, however deep
    for module, text in standard_library_files():
        lines, is_test = text.splitlines(), is_held_out(module)
        for node, owner in _functions(ast.parse(text)):
            completion = _cut(lines, node)
            if not is_test:
                known.add(_flat(completion))
            row = _row(module, node, owner, completion)
            if row is not None:
                (held_out if is_test else train).setdefault(completion, row)
    fresh = (row for completion, row in held_out.items() if _flat(completion) not in known)
    return tuple(train.values()), tuple(fresh)


def _flat(text: str) -> str:
    """The text without its indentation."""
    return "\n".join(line.strip() for line in text.splitlines())


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(node: ast.AST, owner: str | None = None) -> Iterator[tuple[Function, str | None]]:
    """Walk the functions of a module and the methods of its classes, not what is nested inside functions."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, child.name)
        elif isinstance(child, Function):
            yield child, owner


def _cut(lines: list[str], node: Function) -> str:
    """The source of a function, with its decorators, without the lines of its docstring, indentation removed."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    source = lines[first - 1 : node.end_lineno]
    if ast.get_docstring(node, clean=False) is not None:
        del source[node.body[0].lineno - first : node.body[0].end_lineno - first + 1]
    return textwrap.dedent("\n".join(source)).strip("\n")


def _row(module: str, node: Function, owner: str | None, completion: str) -> dict[str, str] | None:
    """Make the pair of one function; None where there is no docstring, no body beside it or no clean cut."""
    doc, rest = ast.get_docstring(node), node.body[1:]
    if not doc or not rest or _is_stub(rest):
        return None
    prompt = _prompt(node, owner, doc.strip())
    if not (SIZE[0] <= len(completion) <= SIZE[1] >= len(prompt)) or not _is_body(completion, rest):
        return None
    return {"prompt": prompt, "completion": completion, "module": module}


def _is_stub(body: list[ast.stmt]) -> bool:
    """Whether nothing happens in the body: pass, ... or an exception that says so."""
    return len(body) == 1 and (
        isinstance(body[0], (ast.Pass, ast.Raise))
        or (isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant))
    )


def _is_body(completion: str, body: list[ast.stmt]) -> bool:
    """Whether the text is one function with just that body: no statement and no string's blanks went with the cut."""
    try:
        function, *others = ast.parse(completion).body
    except SyntaxError:
        return False
    # a form feed ends a line to splitlines, not to the parser: then what was cut lies lines beside the function
    if others or not isinstance(function, Function) or len(function.body) != len(body):
        return False
    # only a string over several lines can have changed; comparing all bodies would take seconds
    strings = '"""' in completion or "'''" in completion
    return not strings or [*map(ast.dump, function.body)] == [*map(ast.dump, body)]


def _prompt(node: Function, owner: str | None, doc: str) -> str:
    """The instruction. It ends in one line feed, where byte-level tokenizers break in any case."""
    kind = "method" if owner else "function"
    kind = f"async {kind}" if isinstance(node, ast.AsyncFunctionDef) else kind
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    where = f" of the class {owner}" if owner else ""
    article = "an" if kind.startswith("a") else "a"
    return f"Write {article} Python {kind} {node.name}({ast.unparse(node.args)}){returns}{where}.\n{doc}\n"
