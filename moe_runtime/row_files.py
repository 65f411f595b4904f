"""Rows checked as files hold them: `datasets` ends the process on some broken JSON lines, and takes texts for dates."""

import contextlib
import gzip
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from moe_runtime.config import shown
from moe_runtime.files import parse_object
from moe_runtime.progress import bar

BOM = b"\xef\xbb\xbf"


@contextlib.contextmanager
def uncounted(datasets, is_local: bool) -> Iterator[None]:
    """Keep `datasets` from telling the Hub, over the network, that a local file is read."""
    before = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = before and not is_local
    try:
        yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = before


def check_lines(source: Path, columns: Collection[str]) -> None:
    """Raise ValueError, with file and line, unless a .jsonl file, or .json of lines, is JSON objects, one a line.

    Of a folder, every such file that `datasets` would find. NaN is refused in `columns` alone, those that are used. Every
    process of a run looks for itself: `datasets` would end any of them.
    """
    for path in _files(source) if source.is_dir() else [source]:
        if not _is_jsonl(path) and path.suffix != ".json" and not path.name.endswith(".json.gz"):
            continue
        first = _first_line(path)
        if _is_jsonl(path) and first.startswith(b"["):
            raise ValueError(f"{path} begins with a JSON array; want one object a line, or a name that ends in .json")
        if has_lines(path):
            for _ in _lines(path, columns):
                pass
        elif first.startswith(b"{"):
            with _open(path) as file:
                parse_object(file.read().removeprefix(BOM), str(path))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder but for the hidden ones, which `datasets` passes over."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
        if not hidden and path.is_file():
            yield path


def _is_jsonl(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def has_lines(path: Path) -> bool:
    """Whether a file is read line by line: .jsonl, and .json that is neither an array nor one object over several lines."""
    first = _first_line(path)
    return _is_jsonl(path) or (first.startswith(b"{") and first.endswith(b"}"))


def _first_line(path: Path) -> bytes:
    """Return the first line that is not blank, stripped; the beginning of an array, which may be one line of gigabytes."""
    with _open(path) as file:
        first = file.readline(4096).removeprefix(BOM)
        while first and not first.strip():
            first = file.readline(4096)
        if first.lstrip().startswith(b"{") and not first.endswith(b"\n"):
            first += file.readline()
        return first.strip()


@contextlib.contextmanager
def _open(path: Path, raw: IO[bytes] | None = None) -> Iterator[IO[bytes]]:
    """Open a file, packed by gzip or not; `raw` is the file as it lies on the disk, if it is open."""
    with open(path, "rb") if raw is None else contextlib.nullcontext(raw) as opened:
        if path.suffix == ".gz":
            with gzip.open(opened) as file:
                yield file
        else:
            yield opened


def line_source(path: Path, columns: Collection[str]) -> dict[str, Any]:
    """Return what Dataset.from_generator reads a file of lines by: those of `columns` that its first row has, as they stand."""
    stat = path.stat()
    # a tuple: `datasets` takes lists for shards, and wants all of one length
    names = tuple(name for name in next(_lines(path, columns)) if name in columns)
    # the file's state is part of what the cache is looked up by
    state = {"path": str(path), "names": names, "state": (stat.st_size, stat.st_mtime_ns)}
    return {"generator": _rows, "gen_kwargs": state}


def _rows(path: str, names: tuple[str, ...], state: tuple[int, int]) -> Iterator[dict[str, Any]]:
    for row in _lines(Path(path), names):
        yield {name: row.get(name) for name in names}


def _lines(path: Path, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the object of each line that is not blank, holding one at a time; ValueError for NaN in one of `columns`."""
    size = path.stat().st_size
    with bar(f"reading {path.name}", "B") as update, open(path, "rb") as raw, _open(path, raw) as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(BOM) if number == 1 else line
            if line.strip():
                row = parse_object(line, place := f"line {number} of {path}")
                if b"NaN" in line or b"Infinity" in line:
                    _check_finite(row, columns, place)
                yield row
            if number % 1024 == 0:
                update(raw.tell(), size)


def _check_finite(row: Mapping, columns: Collection[str], place: str) -> None:
    for name in columns:
        try:
            json.dumps(row.get(name), allow_nan=False)
        except ValueError as error:
            raise ValueError(f"{place} is not valid JSON ({name} has NaN or Infinity); want one JSON object") from error


def holds_dates(kind: Any) -> bool:
    """Whether a column's texts were read as dates, by its feature; of chats, the roles' and the contents'."""
    if isinstance(kind, Mapping):
        return any(holds_dates(part) for name, part in kind.items() if name in ("role", "content", "type", "text"))
    if isinstance(kind, list | tuple):
        return any(map(holds_dates, kind))
    inner = getattr(kind, "feature", None)
    return holds_dates(inner) if inner is not None else str(getattr(kind, "dtype", "")).startswith("timestamp")


def check_row(row: Mapping, place: int) -> None:
    """Raise ValueError, with the row's place, for a text that is none and for a chat of other than roles and contents."""
    for name in ("prompt", "completion", "text"):
        if name in row and not isinstance(row[name], str):
            raise ValueError(f"row {place} has {name} {shown(row[name])}; want text")
    messages = row.get("messages", ())
    fine = isinstance(messages, list | tuple) and all(map(_is_message, messages))
    if not fine:
        raise ValueError(f"row {place} has messages {shown(messages)}; want a list of role and content, both text")


def _is_message(message) -> bool:
    """Whether a chat's turn has a role and a text, parts of one, or none beside a call of tools."""
    kinds = str | list | None
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), kinds)
    )


def render(tokenizer, messages):
    """Put a chat as the tokenizer's template does, with the mask of what is generated; ValueError where it cannot."""
    try:
        return tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    except Exception as error:  # a template is a program, and raises what it likes
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"messages are {shown(messages)}, of which the chat template makes no prompt ({why}); want roles and texts it takes"
        ) from error
