"""Folders of finished stages: named after a hash of all that they depend on, made once, whole or not at all."""

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from moe_runtime.files import atomic_folder, atomic_write_text, read_json
from moe_runtime.hf import ranks


class Result(NamedTuple):
    """A finished stage."""

    name: str
    folder: Path  # of the model
    loss: float  # mean over the label tokens of the held-out rows
    losses: list[float]  # mean of each held-out row
    tokens: list[int]  # label tokens of each
    steps: int
    seconds: float  # of this stage's training alone
    total_seconds: float  # with the stages before it, the base excepted
    parameters: int
    active_parameters: int  # that a token passes through
    history: list  # (step, held-out loss)
    steps_per_second: float
    alpha: list | None = None  # [L][E], mixing coefficients of a merged model


def hash_of(value) -> str:
    """Return 12 hex digits that stand for a JSON value."""
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def fingerprint(source: str | Path) -> str | list:
    """Return what tells a file or a folder of files from a changed one: names, sizes and times; an id of the Hub as it is."""
    path = Path(source)
    if not path.exists():
        return str(source)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    names = [p.name if path.is_file() else p.relative_to(path).as_posix() for p in files]
    return [[name, p.stat().st_size, p.stat().st_mtime_ns] for name, p in zip(names, files, strict=True)]


def made_once(folder: Path, mark: str, make: Callable[[Path], dict | None]) -> None:
    """Have `make` fill `folder`, unless its file `mark` says that it is whole; what it returns is written to `mark`.

    All processes of the run must call, and all make; rank 0's folder counts. Of two runs, one makes and one waits.
    """
    if ranks.agree((folder / mark).is_file()):
        return
    main = ranks.state().is_main_process
    with contextlib.ExitStack() as stack:
        if main:
            stack.enter_context(_locked(folder))
        if ranks.agree((folder / mark).is_file()):
            return
        tmp = ranks.agree(str(stack.enter_context(atomic_folder(folder, overwrite=True))) if main else None)
        values = make(Path(tmp))
        if main:
            atomic_write_text(Path(tmp) / mark, json.dumps(values or {}, indent=2) + "\n")  # a loss may be NaN
    ranks.agree()  # nobody reads before rank 0 has moved the folder in


def read_result(stage: Path, kind: type = Result, **changes):
    """Read the result.json of a stage's folder as the NamedTuple `kind`; `changes` replace what is in it."""
    values = read_json(stage / "result.json")
    try:
        values["history"] = [tuple(point) for point in values["history"]]
        return kind(**{name: values[name] for name in kind._fields if name in values} | changes)
    except (KeyError, TypeError) as error:
        how = "remove the folder, and the stage is made anew"
        raise ValueError(f"{stage / 'result.json'} lacks fields ({error}); want a file of a stage; {how}") from error


def remove(folder: Path) -> None:
    """Remove a folder of checkpoints that nobody needs any more, on rank 0."""
    if ranks.state().is_main_process:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`; the kernel gives it back when the process dies. Without locks, two runs may both make."""
    locks = folder.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / folder.name, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
