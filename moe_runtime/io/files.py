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
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moe_runtime.config import shown

MAX_NAME = 1000  # characters of a key in a file; the longest of a model's tensors have a tenth


def is_plain_name(name: object) -> bool:
    """Whether `name` is a file name without a folder."""
    is_text = isinstance(name, str) and name.isprintable() and len(name) <= 255
    return is_text and name not in ("", ".", "..") and not re.search(r"[/\\]", name)


def check_names(names: Iterable[str], source: str | os.PathLike) -> None:
    """Raise ValueError for a name in a file that no message could show: escape sequences of a terminal, or endless."""
    if (bad := next((name for name in names if len(name) > MAX_NAME or not name.isprintable()), None)) is not None:
        raise ValueError(f"{source} has the name {shown(bad)}; want printable names of at most {MAX_NAME} characters")


def parse_object(text: bytes, source: str) -> dict[str, Any]:
    """Parse one JSON object; raises ValueError naming `source` and the position."""
    try:
        value = json.loads(text.decode())
        problem = f"is a JSON {type(value).__name__}"
    except (ValueError, RecursionError) as error:
        value, problem = None, f"is not valid JSON ({error})"
    if not isinstance(value, dict):
        raise ValueError(f"{source} {problem}; want one JSON object")
    return value


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Read one JSON object; raises ValueError naming the file, and the position where it is not JSON."""
    try:
        value = parse_object(Path(path).read_bytes(), str(path))
        check_names(value, path)
        return value
    except OSError as error:
        raise ValueError(f"path is {path}, which cannot be read ({error.strerror}); want a JSON file") from error


def distrust(path: Path, found: os.stat_result, shared: bool = False) -> str | None:
    """Return why another user could have written a file, or into a folder; None if nobody but root could.

    A `shared` folder may be like /tmp: everybody writes, and its sticky bit keeps each from what others have made.
    """
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} is refused: it belongs to user {found.st_uid}; remove it, or set XDG_CACHE_HOME to a folder of yours"
    if found.st_mode & 0o022 and not (shared and found.st_mode & stat.S_ISVTX):
        return f"{path} is refused: other users can write it, its mode is {stat.S_IMODE(found.st_mode):o}; chmod go-w {path}"
    return None


def cache_home() -> Path | None:
    """Return $XDG_CACHE_HOME, ~/.cache by default, None without a home; a relative one is ignored, as XDG says."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = base if base.is_absolute() else Path(os.path.expanduser("~/.cache"))
    return base if base.is_absolute() else None


def distrusted(path: Path) -> str | None:
    """Return what `distrust` says of a path in `cache_home`, or of a folder from there up to `cache_home`."""
    base = cache_home()
    places = (path, *(above for above in path.parents if above.is_relative_to(base)))
    return next((why for place in places if (why := distrust(place, os.stat(place), shared=place == base))), None)


def own_folder(path: Path) -> Path:
    """Make a folder in `cache_home` and return it; close it, and those above, to other users, whatever the umask.

    Raises ValueError if others can write into it all the same.
    """
    if not cache_home().exists():
        cache_home().mkdir(mode=0o700, parents=True, exist_ok=True)  # as XDG says
    path.mkdir(parents=True, exist_ok=True)
    for place in (path, *(above for above in path.parents if above.parent.is_relative_to(cache_home()))):
        if os.stat(place).st_uid == os.geteuid() and os.stat(place).st_mode & 0o022:
            place.chmod(stat.S_IMODE(os.stat(place).st_mode) & ~0o022)
    if why := distrusted(path):
        raise ValueError(why)
    return path


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _os_error_of(error: Exception, path: str) -> OSError | None:
    """Return the OSError behind a library's own exception, with `path` in it; None if it is not about writing."""
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # Rust's: safetensors, tokenizers
        return OSError(int(found[1]), os.strerror(int(found[1])), path)
    if type(error).__name__ == "SafetensorError":
        return OSError(errno.EIO, str(error), path)
    if not re.search("inline_container|PytorchStreamWriter|basic_ios|iostream error", str(error)):  # torch.save's
        return None
    reason = re.search(r"strerror: ([^\n.]+)", str(error))
    return OSError(errno.EIO, reason[1] if reason else "a file cannot be written, is the disk full?", path)


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
        if (found := _os_error_of(error, str(path))) is None:
            raise
        raise found from error


_numbers = itertools.count()  # threads may write one path


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{os.getpid()}-{next(_numbers)}")


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool | None]:
    """Lock a file or folder until the block ends or the process dies; yield False if another has it, None where locks fail."""
    handle, state = None, None
    try:
        try:
            handle = os.open(path, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            state = True
        except BlockingIOError:
            state = False
        except OSError:  # another user's, or a filesystem without locks
            pass
        yield state
    finally:
        if handle is not None:
            os.close(handle)


def _locked_for_writers(folder: Path) -> contextlib.AbstractContextManager:
    """Lock a folder, unless it is a hidden one of this process, or `alone_in` has it: their lock is held already."""
    is_own = re.fullmatch(rf"\..*\.tmp-{os.getpid()}-\d+", folder.name) or folder in _mine.folders
    return contextlib.nullcontext() if is_own else locked(folder)


class _Mine(threading.local):
    folders: frozenset[Path] = frozenset()  # that this thread is alone in


_mine = _Mine()


@contextlib.contextmanager
def alone_in(folder: str | os.PathLike) -> Iterator[None]:
    """Let nobody else write a file into a folder atomically until the block ends: to read one, change it and write it again."""
    folder, before = Path(os.path.realpath(folder)), _mine.folders
    with _locked_for_writers(folder):
        _mine.folders = before | {folder}
        try:
            yield
        finally:
            _mine.folders = before


def _remove(folder: Path) -> None:
    """Remove a folder to the end, also if a signal comes in between; what cannot be removed stays."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(path: Path) -> bool:
    """Remove what killed writers of `path` left, or bring back a folder set aside; return whether another writer is alive."""
    alive = False
    for left in list(path.parent.iterdir()):
        match = re.fullmatch(rf"\.{re.escape(path.name)}\.(tmp|old)-\d+-\d+", left.name)
        if not match or not left.is_dir():
            continue
        with locked(left, wait=False) as dead:
            alive |= dead is False
            if dead and match[1] == "old" and not path.exists():
                os.rename(left, path)
            elif dead:
                shutil.rmtree(left, ignore_errors=True)
    return alive


@contextlib.contextmanager
def _hidden(path: Path, alone: bool = False) -> Iterator[Path]:
    """Yield a new hidden folder beside `path` and remove it when the block ends; `alone` refuses a second writer."""
    tmp = _beside(path, "tmp")
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, tmp)
        with _locked_for_writers(path.parent):
            if _sweep(path) and alone:
                raise BlockingIOError(errno.EBUSY, "another process is writing it", str(path))
            tmp.mkdir()
            if path.exists():  # nobody else reads meanwhile what he may not read in the end
                tmp.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IRWXU)
            stack.enter_context(locked(tmp))
        with naming(path, tmp):
            yield tmp


def _keep_mode(new: Path, old: Path) -> None:
    """Give a file or folder the mode of the one that it replaces, if there is one."""
    if not new.is_symlink() and (old.is_dir() if new.is_dir() else old.is_file()):
        new.chmod(stat.S_IMODE(old.stat().st_mode))


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a path of the same name in a hidden folder; move the file to `path` when the block ends; OSErrors name `path`.

    A file that is replaced leaves its mode to the new one.
    """
    path = Path(os.path.realpath(path))
    with _hidden(path) as tmp:
        yield tmp / path.name
        _keep_mode(tmp / path.name, path)
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
    """Return the real path of a folder to write; ValueError if it may not be written, or is or holds one of `reads`."""
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


def check_out_file(path: str | os.PathLike, overwrite: bool = False) -> Path:
    """Return the path of a file to write; ValueError if it cannot be written, or exists and should not be replaced."""
    path = Path(path)
    above = next((one for one in path.parents if one.exists() and not one.is_dir()), None)
    problem = "which exists; pass a new file, or overwrite=True" if path.exists() and not overwrite else None
    problem = "which is a folder; pass a file" if path.is_dir() else problem
    problem = f"below {above}, which is a file; pass another folder" if above else problem
    if problem:
        raise ValueError(f"out is {path}, {problem}")
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
        with _locked_for_writers(path.parent):
            try:
                os.rename(path, old)
                os.rename(tmp, path)
            finally:
                if old.exists() and not path.exists():
                    os.rename(old, path)
    _sync(path.parent)
    _remove(old)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """Yield a hidden folder beside `path`; rename it to `path` when the block ends, remove it if the block raises.

    With `overwrite` an old folder is replaced in one step (two renames where the filesystem cannot exchange) and then deleted;
    its mode is kept, and that of each file whose name comes again.
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
        for folder, _, names in os.walk(tmp, topdown=False):
            for name in (*names, "."):
                _keep_mode(place := Path(folder, name), path / place.relative_to(tmp))
                _sync(place)
        _move_in(tmp, path, overwrite)


# the files of weights, and those without which nobody loads them; an adapter may be beside the model that it is of
_WEIGHTS = {
    "model": r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?",
    "adapter": r"adapter_model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?",
}
_MARKS = {"model": ("model.safetensors.index.json", "config.json"), "adapter": ("adapter_config.json",)}
_CARD = "README.md"


def weights_of(folder: str | os.PathLike) -> list[str]:
    """Return the names of a model's files of weights, sorted; none without a config.json beside them."""
    has_config = Path(folder, "config.json").is_file()
    return sorted(p.name for p in Path(folder).iterdir() if re.fullmatch(_WEIGHTS["model"], p.name)) if has_config else []


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
        new = [Path(path, name).relative_to(tmp) for path, _, names in os.walk(tmp) for name in names]
        # PEFT's adapters of other names are in folders of theirs
        if not any(re.fullmatch("|".join(_WEIGHTS.values()), name.name) for name in new):
            raise FileNotFoundError(errno.ENOENT, "no weights were written", str(folder))
        for name in new:
            _sync(tmp / name)
        for kind, pattern in _WEIGHTS.items():
            weights = {str(name) for name in new if re.fullmatch(pattern, str(name))}
            old = {path.name for path in folder.iterdir() if re.fullmatch(pattern, path.name)} if weights else set()
            if old - weights or len(weights) > 1 or any(_differ(tmp / m, folder / m) for m in _MARKS[kind] if weights):
                for mark in _MARKS[kind]:
                    (folder / mark).unlink(missing_ok=True)
            for name in old - weights:
                (folder / name).unlink(missing_ok=True)
        for name in sorted(new, key=lambda name: (name.name in sum(_MARKS.values(), ()), name)):
            (folder / name).parent.mkdir(exist_ok=True)
            _keep_mode(tmp / name, folder / name)
            os.replace(tmp / name, folder / name)
        _sync(folder)


def _differ(new: Path, old: Path) -> bool:
    """Whether a file replaces one of other contents."""
    return new.is_file() and old.is_file() and new.read_bytes() != old.read_bytes()
