"""Rows checked as files hold them: `datasets` ends the process on some broken JSON lines, and takes texts for dates."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_runtime.config import shown
from moe_runtime.files import parse_object

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


def check_lines(source: Path) -> None:
    """Raise ValueError, with file and line, unless a .jsonl file, or each below a folder, is JSON objects, one a line."""
    files = sorted(source.rglob("*.jsonl")) if source.is_dir() else [source] if source.suffix == ".jsonl" else []
    for path in files:
        for _ in _lines(path):
            pass


def line_source(path: Path, columns: set[str]) -> dict[str, Any]:
    """Return what Dataset.from_generator reads a .jsonl file by: those of `columns` that its first row has, as they stand."""
    stat = path.stat()
    names = [name for name in next(_lines(path)) if name in columns]
    # the file's state is part of what the cache is looked up by
    state = {"path": str(path), "names": names, "state": (stat.st_size, stat.st_mtime_ns)}
    return {"generator": _rows, "gen_kwargs": state}


def _rows(path: str, names: list[str], state: tuple[int, int]) -> Iterator[dict[str, Any]]:
    for row in _lines(Path(path)):
        yield {name: row.get(name) for name in names}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object of each line that is not blank, holding one at a time."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(BOM) if number == 1 else line
            if line.strip():
                yield parse_object(line, f"line {number} of {path}", finite=True)


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
