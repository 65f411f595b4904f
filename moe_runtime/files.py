"""Files and folders that appear whole or not at all, and JSON whose errors name the file."""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def is_plain_name(name: object) -> bool:
    """Whether `name` is a file name without a folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its pairs; ValueError for a key given twice, of which json would keep the last in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)[:80]!r} is given twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def parse_object(text: bytes, source: str, *, finite: bool = False) -> dict[str, Any]:
    """Parse one JSON object, each key once; raises ValueError naming `source` and the position.

    `finite` refuses NaN and Infinity, which Python writes and other readers do not know.
    """
    try:
        value = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_constant if finite else None)
        if re.search(rb"\\u[dD][89a-fA-F]", text):  # half a surrogate pair is no text: nobody could write it again
            json.dumps(value, ensure_ascii=False).encode()
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
    """Return the OSError, with `path` in it, that a library's own exception tells of; None where it tells of none."""
    if isinstance(error, OSError):
        return None
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # Rust's: safetensors, tokenizers
        return OSError(int(found[1]), os.strerror(int(found[1])), str(path))
    if not re.search("inline_container|PytorchStreamWriter|basic_ios|iostream error", str(error)):  # torch.save's
        return None
    said = re.search(r"strerror: ([^\n.]+)", str(error))
    return OSError(errno.EIO, said[1] if said else "a file cannot be written, is the disk full?", str(path))


@contextlib.contextmanager
def naming(path: str | os.PathLike, tmp: str | os.PathLike) -> Iterator[None]:
    """Let an error in writing be an OSError that names `path`: not the hidden place `tmp`, and not nothing."""
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


def _lock(folder: Path) -> int:
    """Return a handle whose closing gives back the lock that keeps sweepers away from `folder`."""
    handle = os.open(folder, os.O_RDONLY)
    # a filesystem without locks keeps its left-overs
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _remove(folder: Path) -> None:
    """Remove a folder to the end, also where a signal comes in between; what cannot be removed stays."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _hidden(tmp: Path) -> Iterator[Path]:
    """Make the hidden folder `tmp`, locked, and remove it when the block ends."""
    lock = None
    try:
        tmp.mkdir()
    except Exception:  # another's
        raise
    except BaseException:  # a signal that came while it was made
        _remove(tmp)
        raise
    try:
        lock = _lock(tmp)
        yield tmp
    finally:
        try:
            _remove(tmp)
        finally:
            if lock is not None:
                os.close(lock)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a path of the same name in a hidden folder beside; move what was written there to `path` when the block ends.

    Whenever the process or the machine dies, `path` holds what it held or all that was written. A killed process leaves
    only the hidden folder, which the next writer of `path` removes. An OSError names `path`.
    """
    path = Path(os.path.realpath(path))
    tmp = path.with_name(f".{path.name}.tmp-{os.getpid()}-{threading.get_native_id()}")
    with naming(path, tmp):
        _sweep(path)
        with _hidden(tmp):
            beside = tmp / path.name
            yield beside
            _sync(beside)
            os.replace(beside, path)
        _sync(path.parent)


def atomic_write_text(path: str | os.PathLike, text: str) -> None:
    """Write `text` as UTF-8, the way of `atomic_file`."""
    with atomic_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def atomic_write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON, the way of `atomic_write_text`; raises ValueError for NaN and infinities."""
    atomic_write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def check_out_dir(path: str | os.PathLike, overwrite: bool = False) -> Path:
    """Return the real path of a folder that may be written; raises ValueError if it may not. Touches nothing."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise ValueError(f"out_dir is {path}, which is a file; want a new or empty folder")
    if path.is_mount() or (path.exists() and Path.cwd().is_relative_to(path)):
        raise ValueError(f"out_dir is {path}, a mount point or a parent of the current folder; want one inside it")
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise ValueError(f"out_dir is {path}, which exists; want a new or empty folder; or pass overwrite=True")
    return path


def _is_abandoned(folder: Path, pid: int) -> bool:
    if pid != os.getpid() and os.path.exists(f"/proc/{pid}"):
        return False
    # the lock speaks where the pid does not: for this process, and for containers that share a disk but not their pids
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(handle)
    return False


def _sweep(path: Path) -> None:
    """Remove what killed writers of `path` left beside it; bring back an old folder set aside and not replaced."""
    for left in list(path.parent.iterdir()) if path.parent.is_dir() else ():
        match = re.fullmatch(rf"\.{re.escape(path.name)}\.(tmp|old)-(\d+)(-\d+)?", left.name)
        if match and left.is_dir() and _is_abandoned(left, int(match[2])):
            if match[1] == "old" and not path.exists():
                os.rename(left, path)
            else:
                shutil.rmtree(left, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step; False where the filesystem cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    at_cwd, exchange = -100, 2
    return renameat2 is not None and renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0


def _move_in(tmp: Path, path: Path, overwrite: bool) -> None:
    """Rename `tmp` to `path`, which is absent, empty, or (with `overwrite`) replaced and deleted."""
    old = tmp
    if not (overwrite and path.exists()):
        os.rename(tmp, path)
    elif not _exchange(tmp, path):
        old = path.with_name(f".{path.name}.old-{os.getpid()}")
        try:
            os.rename(path, old)
            os.rename(tmp, path)
        except BaseException:
            if old.exists() and not path.exists():
                os.rename(old, path)
            raise
    try:
        _sync(path.parent)
    finally:
        _remove(old)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """Yield a hidden folder beside `path`; rename it to `path` when the block ends, remove it when the block raises.

    A killed process leaves only the hidden folder, which the next writer of `path` removes. With `overwrite` an old
    folder is replaced in one step (two renames where the filesystem cannot exchange) and then deleted. Raises
    ValueError before anything is written if `path` exists and is not empty, or if nothing can be written beside it.
    """
    path = check_out_dir(path, overwrite)
    tmp = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with contextlib.ExitStack() as stack:
        try:
            _sweep(path)
            check_out_dir(path, overwrite)
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_hidden(tmp))
        except OSError as error:
            reason = f"beside which {tmp.name} cannot be made ({error.strerror})"
            raise ValueError(f"out_dir is {path}, {reason}; want a folder in a writable place") from error
        with naming(path, tmp):
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
    several the index and the config go first and come last: a process that dies between leaves no model rather than a
    mixed one. Raises FileNotFoundError, with nothing removed, if the block wrote no weights.
    """
    folder = Path(os.path.realpath(folder))
    tmp = folder / f".model.tmp-{os.getpid()}"
    with naming(folder, tmp):
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder / "model")
        with _hidden(tmp):
            if (folder / _CARD).is_file():
                shutil.copyfile(folder / _CARD, tmp / _CARD)
            yield tmp
            _move_model(tmp, folder)
        _sync(folder)


def _kind(name: str) -> str:
    """Return whose a file of weights is, by _MARKS."""
    return "adapter" if name.startswith("adapter_model") else "model"


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
    if old - weights or len(weights) > 1:
        for mark in marks:
            (folder / mark).unlink(missing_ok=True)
    for name in old - weights:
        (folder / name).unlink(missing_ok=True)
    for name in sorted(new, key=lambda name: (name.name in sum(_MARKS.values(), ()), name)):
        (folder / name).parent.mkdir(exist_ok=True)
        os.replace(tmp / name, folder / name)
