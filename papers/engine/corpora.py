"""Text without downloads: Python's standard library as documents and as pairs, and three domains of
pairs.

code        documented functions of Python's standard library: signature and docstring, then the
            body
prose       paragraphs of its docstrings, of Python's documentation and of licences: their
            beginning, then the rest
arithmetic  generated word problems: a story and a question, then every step and the answer
sums        short problems with one-digit numbers, answered by their one step; not in DOMAINS, the
            default of studies
steps       problems with small numbers in one to three steps, answered by the steps alone; not in
            DOMAINS either

Files and problems are held out in the same way for all domains and seeds; no training example comes
from them.
"""

import ast
import contextlib
import functools
import importlib.metadata
import itertools
import platform
import random
import re
import sysconfig
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import model_validator

from moe_runtime.config import check_choice, check_positive
from papers.engine.recipe import DataSplits
from papers.engine.sums import KINDS, sums_of

PIECE = 2000  # characters of a document of `standard_library_text`
# characters of a completion of `standard_library_pairs`; the upper bound holds for prompts too
SIZE = (40, 1200)
# excluded: tests, tables and copies of other packages
SKIPPED = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idle_test",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}


class SplitRows(NamedTuple):
    """Result of `standard_library_pairs`; no held-out completion occurs in a training file."""

    train: list[dict[str, str]]
    held_out: list[dict[str, str]]


def standard_library_pairs(limit: int | None = None, seed: int = 0) -> SplitRows:
    """Return instruction-answer pairs from the documented functions of the running Python's
    standard library.

    Rows have `prompt` (kind, signature, docstring), `completion` (the source without docstring),
    `module` (its file). One file in ten is held out. At most `limit` rows of each, in an order that
    depends on `seed` and on the version.
    """
    if limit is not None:
        check_positive("limit", limit)
    pairs = SplitRows(*([dict(row) for row in rows] for rows in _library_rows()))
    for rows in pairs:
        random.Random(seed).shuffle(rows)
    return SplitRows(pairs.train[:limit], pairs.held_out[:limit])


def standard_library_text(piece: int = PIECE, held_out: bool = False) -> list[str]:
    """Return the standard library's source as documents of about `piece` characters, without or of
    only held-out files.
    """
    documents = []
    for module, text in standard_library_files():
        if is_held_out(module) != held_out:
            continue
        document = ""
        for line in text.splitlines(keepends=True):
            if document and len(document) + len(line) > piece:
                documents.append(document)
                document = ""
            document += line
        documents.append(document)
    return [document for document in documents if document.strip()]


def is_held_out(module: str) -> bool:
    """Return whether a file of the standard library, by its relative path, is held out; equal in
    all processes.
    """
    return zlib.crc32(module.encode()) % 10 == 0


@functools.cache
def standard_library_files() -> tuple[tuple[str, str], ...]:
    """Return the standard library's files as sorted pairs of relative path and text."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        module = path.relative_to(root)
        if not SKIPPED & set(module.parts) and not module.parts[0].startswith("config-"):
            files.append((module.as_posix(), path.read_text(encoding="utf-8", errors="ignore")))
    return tuple(sorted(files))


@functools.cache
def _library_rows() -> tuple[tuple[dict[str, str], ...], tuple[dict[str, str], ...]]:
    """Return the examples of the training and the held-out files, without duplicates, in the order
    of the files.
    """
    train: dict[str, dict[str, str]] = {}
    held_out: dict[str, dict[str, str]] = {}
    known = set()  # every function in the training files, also nested or undocumented ones
    for module, text in standard_library_files():
        lines = text.splitlines()
        is_test = is_held_out(module)
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
    """Return the text without its indentation."""
    return "\n".join(line.strip() for line in text.splitlines())


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(node: ast.AST, owner: str | None = None) -> Iterator[tuple[Function, str | None]]:
    """Walk the functions of a module and the methods of its classes, without nested functions."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, child.name)
        elif isinstance(child, Function):
            yield child, owner


def _cut(lines: list[str], node: Function) -> str:
    """Return the source of a function with its decorators, without docstring and indentation."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    source = lines[first - 1 : node.end_lineno]
    if ast.get_docstring(node, clean=False) is not None:
        del source[node.body[0].lineno - first : node.body[0].end_lineno - first + 1]
    return textwrap.dedent("\n".join(source)).strip("\n")


def _row(module: str, node: Function, owner: str | None, completion: str) -> dict[str, str] | None:
    """Make the pair of one function; None without a docstring, a body or a clean split."""
    doc = ast.get_docstring(node)
    rest = node.body[1:]
    if not doc or not rest or _is_stub(rest):
        return None
    prompt = _prompt(node, owner, doc.strip())
    if not (SIZE[0] <= len(completion) <= SIZE[1] >= len(prompt)) or not _is_body(completion, rest):
        return None
    return {"prompt": prompt, "completion": completion, "module": module}


def _is_stub(body: list[ast.stmt]) -> bool:
    """Return whether the body does nothing: pass, ... or only a raise."""
    return len(body) == 1 and (
        isinstance(body[0], (ast.Pass, ast.Raise))
        or (isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant))
    )


def _is_body(completion: str, body: list[ast.stmt]) -> bool:
    """Return whether the text is one function with exactly that body, so no statement or whitespace
    was lost.
    """
    try:
        function, *others = ast.parse(completion).body
    except SyntaxError:
        return False
    # splitlines treats a form feed as a line end, the parser does not, so the cut may be off by
    # lines
    if others or not isinstance(function, Function) or len(function.body) != len(body):
        return False
    # only multi-line strings can have changed; comparing all bodies would take seconds
    strings = '"""' in completion or "'''" in completion
    return not strings or [*map(ast.dump, function.body)] == [*map(ast.dump, body)]


def _prompt(node: Function, owner: str | None, doc: str) -> str:
    """Return the instruction; it ends in one line feed, where byte-level tokenizers always
    split.
    """
    article = "a"
    kind = "method" if owner else "function"
    if isinstance(node, ast.AsyncFunctionDef):
        article = "an"
        kind = f"async {kind}"
    call = f"{node.name}({ast.unparse(node.args)})"
    if node.returns:
        call += f" -> {ast.unparse(node.returns)}"
    if owner:
        call += f" of the class {owner}"
    return f"Write {article} Python {kind} {call}.\n{doc}\n"


GENERATOR = 1  # version of the generated examples
SUMS = 4096  # in each part, without a limit
# required dependencies, whose licences are therefore on every machine
DISTRIBUTIONS = (
    "huggingface-hub",
    "numpy",
    "packaging",
    "pyyaml",
    "rich",
    "safetensors",
    "torch",
    "tqdm",
    "transformers",
    "typer",
)
LICENCE = re.compile(r"(licen[cs]e|copying|notice|authors)[^/]*$", re.IGNORECASE)
# characters of a piece of prose; longer paragraphs are cut between sentences
PARAGRAPH = (100, 600)
LETTERS = 0.93  # minimum share of letters, spaces, commas and periods in prose


class Domain(DataSplits):
    """A domain in a recipe, with examples of SOURCES or of the user."""

    @model_validator(mode="after")
    def _check_held_out(self):
        if self.train in SOURCES and self.held_out is not None:
            raise ValueError(
                f"held_out must be null, as {self.train!r} has held-out data, but got "
                f"{self.held_out!r}"
            )
        return self


def domain_rows(name: str, *, limit: int | None = None, seed: int = 0) -> SplitRows:
    """Return a domain's training and held-out rows of prompt and completion, disjoint, in an order
    drawn by `seed`.

    At most `limit` of each; without a limit all rows, or SUMS generated ones.
    """
    check_choice("domain", name, SOURCES)
    if limit is not None:
        check_positive("limit", limit)
    return SplitRows(*_ROWS[name](limit, seed))


def joined_rows(names: Iterable[str]) -> SplitRows:
    """Return the rows of several domains in turn, until one of them runs out."""
    parts = []
    for of_domains in zip(*map(domain_rows, names), strict=True):
        parts.append([*itertools.chain(*zip(*of_domains))])
    return SplitRows(*parts)


def domain_text(name: str, *, limit: int | None = None) -> list[str]:
    """Return at most `limit` documents of about PIECE characters for pre-training, without held-out
    text.
    """
    check_choice("domain", name, SOURCES)
    if limit is not None:
        check_positive("limit", limit)
    if name == "code":
        documents = standard_library_text()
    elif name == "prose":
        documents = _joined(_prose()[0])
    else:
        told = []
        for i, (p, c) in enumerate(itertools.islice(sums_of("text", False, name), 4 * SUMS)):
            if name != "arithmetic" and i % 4:
                p = p.partition(" How many")[0] + " "
            told.append(p + c)
        documents = _joined(told)
    if limit is None:
        return documents
    return documents[:: max(len(documents) // limit, 1)][:limit]


def domains_key() -> list:
    """Return what the examples depend on besides limit and seed, JSON-ready, to detect changes."""
    return [
        GENERATOR,
        platform.python_version(),
        [[name, _version(name)] for name in DISTRIBUTIONS],
    ]


def _code(limit: int | None, seed: int) -> Iterator[list]:
    for rows in standard_library_pairs(limit, seed):
        yield [{name: row[name] for name in ("prompt", "completion")} for row in rows]


def _paragraph_rows(limit: int | None, seed: int) -> Iterator[list]:
    known: set[str] = set()
    for paragraphs in _prose():
        # two paragraphs may have the same beginning or end
        rows = [*filter(known.isdisjoint, map(_begun, paragraphs))]
        known = {part for row in rows for part in row}
        random.Random(seed).shuffle(rows)
        yield named_rows(rows[:limit])


def _sum_rows(limit: int | None, seed: int, name: str) -> Iterator[list]:
    for is_held_out in (False, True):
        sums = itertools.islice(sums_of(seed, is_held_out, name), limit or SUMS)
        yield named_rows(
            (p, c if name == "arithmetic" else c.rpartition(". ")[0] + ".") for p, c in sums
        )


def named_rows(pairs: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Return pairs as rows with names."""
    return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]


_ROWS: dict[str, Callable[[int | None, int], Iterator[list]]] = {
    "code": _code,
    "prose": _paragraph_rows,
    **{name: functools.partial(_sum_rows, name=name) for name in KINDS},
}
SOURCES = tuple(_ROWS)
DOMAINS = ("code", "prose", "arithmetic")


@functools.cache
def _prose() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the paragraphs of the training and the held-out sources, without duplicates up to
    spelling.
    """
    parts: tuple[dict, dict] = {}, {}
    for source, text in _sources():
        for paragraph in _paragraphs(text):
            bare = "".join(filter(str.isalnum, paragraph.lower()))
            parts[is_held_out(source)].setdefault(bare, paragraph)
    train, held_out = parts
    fresh = (text for bare, text in held_out.items() if bare not in train)
    return tuple(train.values()), tuple(fresh)


def _sources() -> Iterator[tuple[str, str]]:
    """Yield names and texts: each file's docstrings, Python's documentation topics, licences."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module, text in standard_library_files():
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, documented))
        yield module, "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
    with contextlib.suppress(ImportError):  # some distributions omit it
        from pydoc_data.topics import topics

        for topic in sorted(topics):
            yield f"topics/{topic}", topics[topic]
    for name in DISTRIBUTIONS:
        if _version(name) is None:
            continue
        for file in sorted(importlib.metadata.files(name) or (), key=str):
            path = file.locate()
            if LICENCE.search(file.name) and file.suffix not in (".py", ".pyc") and path.is_file():
                yield f"{name}/{file.name}", path.read_text(encoding="utf-8", errors="ignore")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the prose in a text: complete sentences of one paragraph, PARAGRAPH characters long, on
    one line.
    """
    low, high = PARAGRAPH
    for block in re.split(r"\n\s*\n", text):
        piece = ""
        for sentence in (*re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(block.split())), None):
            if sentence is not None and len(piece) + len(sentence) < high:
                piece = f"{piece} {sentence}".lstrip()
                continue
            if low <= len(piece) <= high and _is_prose(piece):
                yield piece
            piece = sentence or ""


def _is_prose(text: str) -> bool:
    plain = sum(character.isalpha() or character in " ,.'" for character in text)
    whole = text[0].isupper() and text[-1] in ".!?" and " " in text
    return whole and plain >= LETTERS * len(text) and text != text.upper()


def _begun(paragraph: str) -> tuple[str, str]:
    """Split a paragraph after about a third, between sentences, or between words if it has only
    one.
    """
    ends = [match.end() for match in re.finditer(r"[.!?] (?=[A-Z])", paragraph)]
    ends = ends or [match.end() for match in re.finditer(" ", paragraph)]
    cut = min(ends, key=lambda end: abs(end - len(paragraph) / 3))
    return f"Continue this text.\n{paragraph[:cut].rstrip()}\n", paragraph[cut:]


def _joined(parts: Iterable[str]) -> list[str]:
    """Join parts, separated by blank lines, into documents of at least PIECE characters."""
    documents = []
    document = []
    for part in parts:
        document.append(part)
        if sum(map(len, document)) >= PIECE:
            documents.append("\n\n".join(document))
            document = []
    if document:
        documents.append("\n\n".join(document))
    return documents
