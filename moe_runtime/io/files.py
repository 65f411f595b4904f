"""Files and folders that are written atomically, and JSON files.

What is written goes into a hidden folder beside its target and is renamed or exchanged at the end. Whenever the process or the
machine dies, the target holds what it held or all that was written. A killed process leaves only the hidden folder, on which
it held a lock; the next writer of the same target removes it.
"""

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def is_plain_name(name: object) -> bool:
    """Whether `name` is a file name without a folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)


def parse_object(text: bytes, source: str) -> dict[str, Any]:
    """Parse one JSON object; raises ValueError naming `source` and the position."""
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not valid JSON ({error}); want one JSON object") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source} is a JSON {type(value).__name__}; want one JSON object")
    return value


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Read one JSON object; raises ValueError naming the file, and the position where it is not JSON."""
    try:
        return parse_object(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"path is {path}, which cannot be read ({error.strerror}); want a JSON file") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def os_error_of(error: BaseException, path: str | os.PathLike) -> OSError | None:
    """Return the OSError behind a library's own exception, with `path` in it; None if it is not about writing."""
    if isinstance(error, OSError):
        return None
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # Rust's: safetensors, tokenizers
        return OSError(int(found[1]), os.strerror(int(found[1])), str(path))
    if not re.search("inline_container|PytorchStreamWriter|basic_ios|iostream error", str(error)):  # torch.save's
        return None
    reason = re.search(r"strerror: ([^\n.]+)", str(error))
    return OSError(errno.EIO, reason[1] if reason else "a file cannot be written, is the disk full?", str(path))


@contextlib.contextmanager
def naming(path: str | os.PathLike, tmp: str | os.PathLike) -> Iterator[None]:
    """Turn an error in writing into an OSError that names `path` instead of the hidden folder `tmp`."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(error.filename or path).replace(str(tmp), str(path))
        raise
    except Exception as error:
        if (found := os_error_of(error, path)) is not None:
            raise found from error
        raise


_numbers = itertools.count()  # threads may write one path


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{os.getpid()}-{next(_numbers)}")


def _lock(folder: Path, wait: bool = False) -> int:
    """Lock a folder until the returned handle is closed or the process dies; OSError if it is locked or cannot be."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(handle)
        raise
    return handle


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other writers from starting or sweeping in `folder`, where the filesystem has locks."""
    handle = None
    with contextlib.suppress(OSError):
        handle = _lock(folder, wait=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _remove(folder: Path) -> None:
    """Remove a folder to the end, also if a signal comes in between; what cannot be removed stays."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _sweep(path: Path) -> bool:
    """Remove what killed writers of `path` left, or bring back the folder one set aside; return whether another one is alive."""
    alive = False
    for left in list(path.parent.iterdir()):
        match = re.fullmatch(rf"\.{re.escape(path.name)}\.(tmp|old)-\d+-\d+", left.name)
        if not match or not left.is_dir():
            continue
        try:
            handle = _lock(left)
        except OSError as error:  # also another user's, or on a filesystem without locks
            alive |= isinstance(error, BlockingIOError)
            continue
        if match[1] == "old" and not path.exists():
            os.rename(left, path)
        else:
            shutil.rmtree(left, ignore_errors=True)
        os.close(handle)
    return alive


@contextlib.contextmanager
def _hidden(path: Path, alone: bool = False) -> Iterator[Path]:
    """Yield a new hidden folder beside `path` and remove it when the block ends; `alone` refuses a second writer."""
    tmp, handle = _beside(path, "tmp"), None
    try:
        with _locked(path.parent):
            if _sweep(path) and alone:
                raise BlockingIOError(errno.EBUSY, "another process is writing it", str(path))
            tmp.mkdir()
            with contextlib.suppress(OSError):
                handle = _lock(tmp)
        with naming(path, tmp):
            yield tmp
    finally:
        _remove(tmp)
        if handle is not None:
            os.close(handle)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a path of the same name in a hidden folder; move what was written there to `path` when the block ends.

    An OSError names `path`.
    """
    path = Path(os.path.realpath(path))
    with _hidden(path) as tmp:
        yield tmp / path.name
        _sync(tmp / path.name)
        os.replace(tmp / path.name, path)
        _sync(path.parent)


def atomic_write_text(path: str | os.PathLike, text: str) -> None:
    """Write `text` as UTF-8, as `atomic_file` does."""
    with atomic_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def atomic_write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON, as `atomic_file` does; raises ValueError for NaN and infinities."""
    atomic_write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def check_out_dir(path: str | os.PathLike, overwrite: bool = False, reads: Iterable[object] = ()) -> Path:
    """Return the real path of a folder to write. Touches nothing.

    Raises ValueError if it may not be written, or if it is or holds one of `reads`, of which what is no path is ignored.
    """
    path = Path(os.path.realpath(path))
    problem = None
    if path.exists() and not path.is_dir():
        problem = "which is a file; want a new or empty folder"
    elif path.is_mount() or (path.exists() and Path.cwd().is_relative_to(path)):
        problem = "a mount point or a parent of the current folder; want one inside it"
    elif path.exists() and any(path.iterdir()) and not overwrite:
        problem = "which exists; want a new or empty folder; or pass overwrite=True"
    for source in reads if path.exists() and not problem else ():
        if isinstance(source, str | os.PathLike) and Path(os.path.realpath(source)).is_relative_to(path):
            problem = f"which is or holds {os.fspath(source)}, that is read; want another folder"
    if problem:
        raise ValueError(f"out_dir is {path}, {problem}")
    return path


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step; return False where the filesystem cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    at_cwd, exchange = -100, 2
    return renameat2 is not None and renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0


def _move_in(tmp: Path, path: Path, overwrite: bool) -> None:
    """Rename `tmp` to `path`, which is absent, empty, or (with `overwrite`) replaced and deleted."""
    old = _beside(path, "old")
    if not (overwrite and path.exists()):
        os.rename(tmp, path)
    elif not _exchange(tmp, path):
        with _locked(path.parent):
            try:
                os.rename(path, old)
                os.rename(tmp, path)
            except BaseException:
                if old.exists() and not path.exists():
                    os.rename(old, path)
                raise
    _sync(path.parent)
    _remove(old)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """Yield a hidden folder beside `path`; rename it to `path` when the block ends, remove it if the block raises.

    With `overwrite` an old folder is replaced in one step (two renames where the filesystem cannot exchange) and then deleted.
    Raises ValueError before anything is written if `path` exists and is not empty, or if nothing can be written beside it.
    """
    path = check_out_dir(path, overwrite)
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tmp = stack.enter_context(_hidden(path, alone=True))
        except OSError as error:
            reason = f"beside which nothing can be written ({error.strerror})"
            raise ValueError(f"out_dir is {path}, {reason}; want a folder in a writable place") from error
        check_out_dir(path, overwrite)  # a killed writer may have left it set aside
        yield tmp
        for folder, _, names in os.walk(tmp):
            for name in (*names, "."):
                _sync(Path(folder, name))
        _move_in(tmp, path, overwrite)


# a folder without its mark is loaded by nobody; an adapter may stand beside the model that it is of
_MARKS = {"model": ("model.safetensors.index.json", "config.json"), "adapter": ("adapter_config.json",)}
_WEIGHTS = r"(model|adapter_model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
_CARD = "README.md"


@contextlib.contextmanager
def atomic_model(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield a hidden folder in `folder`; move a model's files from there when the block ends, and remove its older weights.

    For a folder that holds other things too, such as checkpoints: an adapter's files leave a model's alone, and these an
    adapter's. The folder's README.md is in the hidden one from the start. One file of weights is replaced in one step. Of
    several, or with another config, the index and the config go first and come last: a process that dies between leaves
    no model rather than a mixed one. Raises FileNotFoundError, with nothing removed, if the block wrote no weights.
    """
    folder = Path(os.path.realpath(folder))
    with naming(folder, folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _hidden(folder / "model") as tmp, naming(folder, tmp):
        if (folder / _CARD).is_file():
            shutil.copyfile(folder / _CARD, tmp / _CARD)
        yield tmp
        _move_model(tmp, folder)
        _sync(folder)


def weights_of(folder: str | os.PathLike) -> list[str]:
    """Return the names of a folder's files of a model's weights, sorted; none where there is no config.json beside them."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        return []
    return sorted(p.name for p in folder.iterdir() if re.fullmatch(_WEIGHTS, p.name) and _kind(p.name) == "model")


def _kind(name: str) -> str:
    """Return whose a file of weights is, by _MARKS."""
    return "adapter" if name.startswith("adapter_model") else "model"


def _differs(new: Path, standing: Path) -> bool:
    """Whether a file comes in place of another one."""
    return new.is_file() and standing.is_file() and new.read_bytes() != standing.read_bytes()


def _move_model(tmp: Path, folder: Path) -> None:
    new = [Path(path, name).relative_to(tmp) for path, _, names in os.walk(tmp) for name in names]
    # PEFT's adapters of other names are in folders of theirs
    if not any(re.fullmatch(_WEIGHTS, name.name) for name in new):
        raise FileNotFoundError(errno.ENOENT, "no weights were written", str(folder))
    for name in new:
        _sync(tmp / name)
    weights = {str(name) for name in new if re.fullmatch(_WEIGHTS, str(name))}
    kinds = {_kind(name) for name in weights}
    old = {path.name for path in folder.iterdir() if re.fullmatch(_WEIGHTS, path.name) and _kind(path.name) in kinds}
    marks = [mark for kind in kinds for mark in _MARKS[kind]]
    if old - weights or len(weights) > 1 or any(_differs(tmp / mark, folder / mark) for mark in marks):
        for mark in marks:
            (folder / mark).unlink(missing_ok=True)
    for name in old - weights:
        (folder / name).unlink(missing_ok=True)
    for name in sorted(new, key=lambda name: (name.name in sum(_MARKS.values(), ()), name)):
        (folder / name).parent.mkdir(exist_ok=True)
        os.replace(tmp / name, folder / name)
