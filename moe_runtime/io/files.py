"""Atomic writes of files and folders, and JSON files.

Everything is written into a hidden folder beside the target and renamed or exchanged at the end. If
the process or the machine dies, the target holds either its previous or its complete new contents.
A killed process leaves only the hidden folder, which it had locked; the next writer of the same
target removes it.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.config import shown

_TRAINING = "training"  # in the name of a training's lock
MAX_NAME = 1000  # characters of a key in a file, ten times the longest tensor names of models
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def is_plain_name(name: object) -> bool:
    """Return whether `name` is a file name without a folder."""
    is_text = isinstance(name, str) and name.isprintable() and len(name) <= 255
    return is_text and name not in ("", ".", "..") and not re.search(r"[/\\]", name)


def check_names(names: Iterable[str], source: str | os.PathLike) -> None:
    """Raise ValueError for a name that could not be shown in a message: terminal escape sequences,
    or too long.
    """
    if (
        bad := next(
            (name for name in names if len(name) > MAX_NAME or not name.isprintable()), None
        )
    ) is not None:
        raise ValueError(
            f"Names in {source} must be printable and have at most {MAX_NAME} characters, but got "
            f"{shown(bad)}"
        )


def parse_object(text: bytes, source: str) -> dict[str, Any]:
    """Parse one JSON object; raises a ValueError that names `source` and the position.

    An escape of half a surrogate pair, such as \\ud800 alone, is refused: it is no character, and
    cannot be written as UTF-8.
    """
    try:
        value = json.loads(text.decode())
        problem = f"must be a JSON object, but got a {type(value).__name__}"
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        value = None
        problem = (
            f"has {error.object[error.start]!r}, half of a surrogate pair, which is no character. "
            "Remove it"
        )
    except (ValueError, RecursionError) as error:
        value = None
        problem = f"is not valid JSON ({error})"
    if not isinstance(value, dict):
        raise ValueError(f"{source} {problem}")
    return value


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Read one JSON object; raises a ValueError that names the file, and the position where it is
    not JSON.
    """
    check_regular(path)
    try:
        value = parse_object(Path(path).read_bytes(), str(path))
        check_names(value, path)
        return value
    except OSError as error:
        raise ValueError(f"Cannot read the JSON file {path} ({error.strerror})") from error


def check_regular(path: str | os.PathLike) -> None:
    """Raise ValueError for an existing path that is no regular file; opening a pipe would wait for
    its writer.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{path} is a folder, a pipe, a socket or a device, but must be a regular file"
        )


def distrust(path: Path, found: os.stat_result, shared: bool = False) -> str | None:
    """Return why a file or folder may have been written by another user; None if only root could
    have.

    A `shared` folder may be like /tmp: everybody can write, and its sticky bit protects each user's
    files from the others.
    """
    if found.st_uid not in (0, os.geteuid()):
        return (
            f"{path} is refused: it belongs to user {found.st_uid}. Remove it, or set "
            "XDG_CACHE_HOME to a folder of yours"
        )
    if found.st_mode & 0o022 and not (shared and found.st_mode & stat.S_ISVTX):
        return (
            f"{path} is refused: other users can write to it (mode "
            f"{stat.S_IMODE(found.st_mode):o}). Run chmod go-w {path}"
        )
    return None


def cache_home() -> Path | None:
    """Return $XDG_CACHE_HOME, by default ~/.cache, or None without a home; a relative path is
    ignored, as XDG specifies.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = base if base.is_absolute() else Path(os.path.expanduser("~/.cache"))
    return base if base.is_absolute() else None


def distrusted(path: Path) -> str | None:
    """Return what `distrust` returns for a path in `cache_home` or for one of its parents up to
    `cache_home`.
    """
    base = cache_home()
    places = (path, *(above for above in path.parents if above.is_relative_to(base)))
    return next(
        (why for place in places if (why := distrust(place, os.stat(place), shared=place == base))),
        None,
    )


def own_folder(path: Path) -> Path:
    """Create and return a folder in `cache_home` that only this user can write to, with its
    parents, whatever the umask.

    Raises ValueError if other users can still write to it.
    """
    if not cache_home().exists():
        cache_home().mkdir(mode=0o700, parents=True, exist_ok=True)  # as XDG specifies
    path.mkdir(parents=True, exist_ok=True)
    for place in (
        path,
        *(above for above in path.parents if above.parent.is_relative_to(cache_home())),
    ):
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
    """Return the OSError behind a library's exception, with `path` in it; None if it is not about
    writing.
    """
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # Rust's: safetensors, tokenizers
        return OSError(int(found[1]), os.strerror(int(found[1])), path)
    if type(error).__name__ == "SafetensorError":
        return OSError(errno.EIO, str(error), path)
    # torch.save's
    if not re.search("inline_container|PytorchStreamWriter|basic_ios|iostream error", str(error)):
        return None
    reason = re.search(r"strerror: ([^\n.]+)", str(error))
    return OSError(
        errno.EIO, reason[1] if reason else "a file cannot be written; is the disk full?", path
    )


@contextlib.contextmanager
def naming(path: str | os.PathLike, tmp: str | os.PathLike) -> Iterator[None]:
    """Convert an error in writing into an OSError that names `path` instead of the hidden folder
    `tmp`.
    """
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


_numbers = itertools.count()  # several threads may write the same path


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{os.getpid()}-{next(_numbers)}")


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool | None]:
    """Lock a file or folder until the block ends or the process dies; yield False if it is taken,
    None where locks fail.
    """
    handle = None
    state = None
    try:
        try:
            handle = os.open(path, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            state = True
        except BlockingIOError:
            state = False
        except OSError:  # owned by another user, or a filesystem without locks
            pass
        yield state
    finally:
        if handle is not None:
            os.close(handle)


def _locked_for_writers(folder: Path) -> contextlib.AbstractContextManager:
    """Lock a folder, unless this process already holds the lock: it is a hidden folder of ours, or
    `alone_in` has locked it.
    """
    is_own = re.fullmatch(rf"\..*\.tmp-{os.getpid()}-\d+", folder.name) or folder in _mine.folders
    return contextlib.nullcontext() if is_own else locked(folder)


class _Mine(threading.local):
    folders: frozenset[Path] = frozenset()  # those in which only this thread may write


_mine = _Mine()


@contextlib.contextmanager
def alone_in(folder: str | os.PathLike) -> Iterator[None]:
    """Keep other writers out of a folder until the block ends, so that a file can be read, changed
    and rewritten.
    """
    folder = Path(os.path.realpath(folder))
    before = _mine.folders
    with _locked_for_writers(folder):
        _mine.folders = before | {folder}
        try:
            yield
        finally:
            _mine.folders = before


def _remove(folder: Path) -> None:
    """Remove a folder completely, even if a signal arrives meanwhile; files that cannot be removed
    stay.
    """
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(path: Path) -> bool:
    """Remove what killed writers of `path` left, or restore a folder set aside; return whether
    another writer is alive.
    """
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
    """Yield a new hidden folder beside `path`, which is removed when the block ends; with `alone`,
    refuse a second writer.
    """
    tmp = _beside(path, "tmp")
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, tmp)
        with _locked_for_writers(path.parent):
            if _sweep(path) and alone:
                raise BlockingIOError(errno.EBUSY, "another process is writing it", str(path))
            tmp.mkdir()
            if path.exists():  # the temporary files must not be more readable than the final ones
                tmp.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IRWXU)
            stack.enter_context(locked(tmp))
        with naming(path, tmp):
            yield tmp


@contextlib.contextmanager
def sole_training(folder: str | os.PathLike) -> Iterator[None]:
    """Create a folder if needed and hold it for one training until the block ends; raises
    ValueError if another holds it.

    The lock is a hidden folder inside, so that other writers of files in the folder need not wait.
    It ends with the process.
    """
    folder = Path(os.path.realpath(folder))
    is_new = not folder.exists()
    with naming(folder, folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = _beside(folder / _TRAINING, "tmp")
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, folder if is_new else None)
        stack.callback(_remove, lock)
        with _locked_for_writers(folder), naming(folder, folder):
            if _sweep(folder / _TRAINING):
                raise ValueError(
                    f"Another training is writing to {folder}. Wait until it ends, or choose "
                    "another folder"
                )
            lock.mkdir()
            stack.enter_context(locked(lock))
        yield


def _remove_empty(folder: Path | None) -> None:
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.rmdir()


def contents_of(folder: Path) -> list[str]:
    """Return the names in a folder, without the hidden lock of a training that runs or was
    killed.
    """
    hidden = re.compile(rf"\.{_TRAINING}\.tmp-\d+-\d+")
    return sorted(path.name for path in folder.iterdir() if not hidden.fullmatch(path.name))


def _keep_mode(new: Path, old: Path) -> None:
    """Give a file or folder the mode of the one that it replaces, if any."""
    if not new.is_symlink() and (old.is_dir() if new.is_dir() else old.is_file()):
        new.chmod(stat.S_IMODE(old.stat().st_mode))


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a path of the same name in a hidden folder and move the file to `path` when the block
    ends; OSErrors name `path`.

    The new file has the mode of the one that it replaces. Raises ValueError for a device or another
    special file.
    """
    path = check_out_file(os.path.realpath(path), overwrite=True)
    with _hidden(path) as tmp:
        yield tmp / path.name
        _keep_mode(tmp / path.name, path)
        _sync(tmp / path.name)
        os.replace(tmp / path.name, path)
        _sync(path.parent)


def atomic_write_text(path: str | os.PathLike, text: str) -> None:
    """Write `text` as UTF-8 atomically."""
    with atomic_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def atomic_write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON atomically; raises ValueError for NaN and infinities."""
    atomic_write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def check_paths(name: str, paths: Any) -> None:
    """Raise ValueError unless `paths` is a sequence of paths."""
    is_list = isinstance(paths, Sequence) and not isinstance(paths, str)
    if not is_list or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise ValueError(f"{name} must be a list of folders, but got {shown(paths)}")


def check_out_dir(
    path: str | os.PathLike, overwrite: bool = False, reads: Iterable[object] = ()
) -> Path:
    """Return the real path of a folder to write; raises ValueError if it must not be written, or is
    or holds one of `reads`.
    """
    path = Path(os.path.realpath(path))
    problem = None
    if path.exists() and not path.is_dir():
        problem = f"Output folder {path} is a file. Choose another"
    elif path.is_mount() or (path.exists() and Path.cwd().is_relative_to(path)):
        problem = (
            f"Output folder {path} is a mount point or a parent of the current folder. Choose a "
            "folder inside it"
        )
    elif path.exists() and any(path.iterdir()) and not overwrite:
        problem = f"Output folder {path} already exists. Choose another or pass overwrite=True"
    for source in reads if path.exists() and not problem else ():
        if isinstance(source, str | os.PathLike) and Path(os.path.realpath(source)).is_relative_to(
            path
        ):
            problem = (
                f"Output folder {path} is or contains {os.fspath(source)}, which is read. Choose "
                "another"
            )
    if problem:
        raise ValueError(problem)
    return path


def check_out_file(
    path: str | os.PathLike, overwrite: bool = False, reads: Iterable[object] = ()
) -> Path:
    """Return the path of a file to write; raises ValueError if it cannot be written, or exists
    without `overwrite`.

    Nothing but a regular file is replaced, and none of `reads`: files that are read, or folders
    with files that are.
    """
    path = Path(path)
    above = next((one for one in path.parents if one.exists() and not one.is_dir()), None)
    problem = None
    if above is not None:
        problem = f"cannot be written, as {above} is a file. Choose another"
    elif path.is_dir():
        problem = "is a folder. Choose a file name"
    elif path.exists() and not path.is_file():
        problem = "is a device, a pipe or a socket, which is never replaced. Choose a file name"
    elif path.exists() and not overwrite:
        problem = "already exists. Choose another or pass overwrite=True"
    elif path.exists():
        source = next((one for one in reads if _holds(one, path)), None)
        if source is not None:
            problem = f"is read, or is a file in {os.fspath(source)}, which is read. Choose another"
    if problem is not None:
        raise ValueError(f"Output file {path} {problem}")
    return path


def _holds(source: object, path: Path) -> bool:
    """Return whether an existing file is `source` or a file in that folder."""
    if not isinstance(source, str | os.PathLike) or not os.path.exists(source):
        return False
    source = Path(source)
    return source.samefile(path) or (
        source.is_dir() and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(source))
    )


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders atomically; return False where the filesystem does not support it."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    at_cwd = -100
    exchange = 2
    return (
        renameat2 is not None
        and renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0
    )


def _move_in(tmp: Path, path: Path, overwrite: bool) -> None:
    """Rename `tmp` to `path`, which is absent, empty, or (with `overwrite`) replaced and
    deleted.
    """
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
    """Yield a hidden folder beside `path`; rename it to `path` when the block ends, remove it if
    the block raises.

    With `overwrite` an old folder is replaced in one step (two renames where the filesystem cannot
    exchange folders) and then deleted; its mode is kept, and so is that of each file of the same
    name. Raises ValueError before anything is written if `path` exists and is not empty, or if
    nothing can be written beside it.
    """
    path = check_out_dir(path, overwrite)
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tmp = stack.enter_context(_hidden(path, alone=True))
        except OSError as error:
            reason = f"no file can be created beside it ({error.strerror})"
            raise ValueError(
                f"Output folder {path} cannot be written: {reason}. Choose another"
            ) from error
        check_out_dir(path, overwrite)  # a killed writer may have set it aside, and it is back now
        yield tmp
        for folder, _, names in os.walk(tmp, topdown=False):
            for name in (*names, "."):
                _keep_mode(place := Path(folder, name), path / place.relative_to(tmp))
                _sync(place)
        _move_in(tmp, path, overwrite)


# the files of weights, with the files that are needed to load them; an adapter may lie beside the
# model that it belongs to
_WEIGHTS = {
    "model": r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?",
    "adapter": r"adapter_model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?",
}
_MARKS = {
    "model": ("model.safetensors.index.json", "config.json"),
    "adapter": ("adapter_config.json",),
}
_CARD = "README.md"


def weights_of(folder: str | os.PathLike) -> list[str]:
    """Return the sorted names of a model's weight files; none without a config.json beside them."""
    has_config = Path(folder, "config.json").is_file()
    if has_config:
        return sorted(
            p.name for p in Path(folder).iterdir() if re.fullmatch(_WEIGHTS["model"], p.name)
        )
    return []


@contextlib.contextmanager
def atomic_model(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield a hidden folder in `folder`; when the block ends, move a model's files from there and
    remove its older weights.

    For a folder that also holds other things, such as checkpoints: writing an adapter leaves a
    model's files alone, and the reverse. The hidden folder starts with a copy of README.md. A
    single weight file is replaced in one step. With several, or a changed config, the index and the
    config are removed first and written last, so that a process that dies meanwhile leaves no model
    rather than a mixed one. Raises FileNotFoundError, and removes nothing, if the block wrote no
    weights.
    """
    folder = Path(os.path.realpath(folder))
    with naming(folder, folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _hidden(folder / "model") as tmp, naming(folder, tmp):
        if (folder / _CARD).is_file():
            shutil.copyfile(folder / _CARD, tmp / _CARD)
        yield tmp
        new = [
            Path(path, name).relative_to(tmp) for path, _, names in os.walk(tmp) for name in names
        ]
        # PEFT stores adapters of other names in subfolders
        if not any(re.fullmatch("|".join(_WEIGHTS.values()), name.name) for name in new):
            raise FileNotFoundError(errno.ENOENT, "no weights were written", str(folder))
        for name in new:
            _sync(tmp / name)
        for kind, pattern in _WEIGHTS.items():
            weights = {str(name) for name in new if re.fullmatch(pattern, str(name))}
            if weights:
                old = {path.name for path in folder.iterdir() if re.fullmatch(pattern, path.name)}
            else:
                old = set()
            if (
                old - weights
                or len(weights) > 1
                or any(_differ(tmp / m, folder / m) for m in _MARKS[kind] if weights)
            ):
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
    """Return whether a file replaces one with different contents."""
    return new.is_file() and old.is_file() and new.read_bytes() != old.read_bytes()


def hash_of(value) -> str:
    """Return a hash of 12 hex digits of a JSON value."""
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def files_print(source: str | Path) -> str | list:
    """Return names, sizes and times of a file or a folder's files, to detect changes; a Hub id is
    returned unchanged.
    """
    path = Path(source)
    if not path.exists():
        return str(source)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    names = [p.name if path.is_file() else p.relative_to(path).as_posix() for p in files]
    return [
        [name, p.stat().st_size, p.stat().st_mtime_ns] for name, p in zip(names, files, strict=True)
    ]
