"""Files and folders that appear whole or not at all, and JSON whose errors name the file."""

import contextlib
import ctypes
import errno
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
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


# what this process writes now, by its hidden place; and a number for each, so that no two are alike
_live: dict[str, object] = {}
_numbers = itertools.count()
_DAY = 86400.0


@functools.cache
def _host() -> str:
    """Return 8 hex digits of what a process number is unique in: host, boot and container."""
    found = [os.uname().nodename]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:8]


def _beside(path: Path, kind: str) -> Path:
    """Return the hidden place of this process beside `path`; `kind` is "tmp" or "old"."""
    return path.with_name(f".{path.name}.{kind}-{_host()}-{os.getpid()}")


@contextlib.contextmanager
def _claimed(place: Path) -> Iterator[None]:
    """Keep this process's sweepers away from a hidden place; FileExistsError where another thread has it."""
    mine = object()
    if _live.setdefault(str(place), mine) is not mine:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))
    try:
        yield
    finally:
        del _live[str(place)]


def _remove(folder: Path) -> None:
    """Remove a folder to the end, also where a signal comes in between; what cannot be removed stays."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _hidden(tmp: Path) -> Iterator[Path]:
    """Make the hidden folder `tmp`, and remove it when the block ends."""
    with _claimed(tmp):
        try:
            tmp.mkdir()
        except Exception:  # another's
            raise
        except BaseException:  # a signal that came while it was made
            _remove(tmp)
            raise
        try:
            yield tmp
        finally:
            _remove(tmp)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a path of the same name in a hidden folder beside; move what was written there to `path` when the block ends.

    Whenever the process or the machine dies, `path` holds what it held or all that was written. A killed process leaves
    only the hidden folder, which the next writer of `path` removes. An OSError names `path`.
    """
    path = Path(os.path.realpath(path))
    tmp = Path(f"{_beside(path, 'tmp')}-{next(_numbers)}")  # threads may write one path
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


def check_out_dir(path: str | os.PathLike, overwrite: bool = False, reads: Iterable[object] = ()) -> Path:
    """Return the real path of a folder that may be written; raises ValueError if it may not. Touches nothing.

    One of `reads`, or a folder that holds one, may not be with `overwrite` either; what is no path there is passed over.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise ValueError(f"out_dir is {path}, which is a file; want a new or empty folder")
    if path.is_mount() or (path.exists() and Path.cwd().is_relative_to(path)):
        raise ValueError(f"out_dir is {path}, a mount point or a parent of the current folder; want one inside it")
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise ValueError(f"out_dir is {path}, which exists; want a new or empty folder; or pass overwrite=True")
    for source in reads if path.exists() else ():
        if isinstance(source, str | os.PathLike) and Path(os.path.realpath(source)).is_relative_to(path):
            raise ValueError(
                f"out_dir is {path}, which is or holds {os.fspath(source)}, that is read; want another folder"
            )
    return path


def _is_abandoned(left: Path, host: str, pid: int) -> bool:
    """Whether nobody writes a hidden folder: its process is gone or, where nobody can tell, it was left alone for a day."""
    if host != _host():
        with contextlib.suppress(OSError):
            # when it changed: what was renamed has times of its own
            return time.time() - max(path.lstat().st_ctime for path in (left, *left.rglob("*"))) > _DAY
        return False
    if pid == os.getpid():
        return str(left) not in _live
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's; no number of a process
        return False
    return False


def _sweep(path: Path) -> None:
    """Remove what killed writers of `path` left beside it; bring back an old folder set aside and not replaced."""
    for left in list(path.parent.iterdir()) if path.parent.is_dir() else ():
        match = re.fullmatch(rf"\.{re.escape(path.name)}\.(tmp|old)-([0-9a-f]{{8}})-(\d+)(-\d+)?", left.name)
        if match and left.is_dir() and _is_abandoned(left, match[2], int(match[3])):
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
    if not (overwrite and path.exists()):
        os.rename(tmp, path)
        _sync(path.parent)
        return
    if _exchange(tmp, path):
        _sync_and_remove(path, tmp)
        return
    old = _beside(path, "old")
    with _claimed(old):
        try:
            os.rename(path, old)
            os.rename(tmp, path)
        except BaseException:
            if old.exists() and not path.exists():
                os.rename(old, path)
            raise
        _sync_and_remove(path, old)


def _sync_and_remove(path: Path, old: Path) -> None:
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
    tmp = _beside(path, "tmp")
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
    several, or with another config, the index and the config go first and come last: a process that dies between leaves
    no model rather than a mixed one. Raises FileNotFoundError, with nothing removed, if the block wrote no weights.
    """
    folder = Path(os.path.realpath(folder))
    tmp = _beside(folder / "model", "tmp")
    with naming(folder, tmp):
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder / "model")
        with _hidden(tmp):
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
