"""Atomic writes of files and folders, JSON files, and the folders of the user's cache.

Everything is written into a hidden folder beside the target and renamed at the end. If the process
or the machine dies, the target holds either its previous or its complete new contents; only a
folder that is replaced is absent between two renames, and the next writer restores it from the
hidden folder where it was set aside. A killed process leaves nothing but hidden folders, which it
had locked; the next writer of the same target removes them.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.config import one_line, shown

_TRAINING = "training"  # in the name of a training's lock
MAX_NAME = 1000  # characters of a key in a file, ten times the longest tensor names of models
# what safetensors, tokenizers and torch.save raise, in place of an OSError, if they cannot write
_WRITE_FAILED = re.compile(
    r"\(os error (\d+)\)|SafetensorError|inline_container|PytorchStreamWriter|basic_ios|iostream"
)


def is_plain_name(name: object) -> bool:
    """Return whether `name` is a file name without a folder."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > 255:
        return False
    return name not in ("", ".", "..") and not re.search(r"[/\\]", name)


def check_names(names: Iterable[str], source: str | os.PathLike) -> None:
    """Raise ValueError for a name that no message can show: with escape sequences, or too long."""
    for name in names:
        if len(name) > MAX_NAME or not name.isprintable():
            raise ValueError(
                f"Names in {source} must be printable and have at most {MAX_NAME} characters, "
                f"but got {shown(name)}"
            )


def parse_object(text: bytes, source: str) -> dict[str, Any]:
    """Parse one JSON object; raises a ValueError that names `source` and the position."""
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source} must be a JSON object, but got a {type(value).__name__}")
    return value


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Read one JSON object; raises a ValueError with the file and the position of an error."""
    check_regular(path)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"Cannot read the JSON file {path} ({error.strerror})") from error
    value = parse_object(text, str(path))
    check_names(value, path)
    return value


def check_regular(path: str | os.PathLike) -> None:
    """Raise ValueError for a folder or a special file; opening a pipe would wait for its writer."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{path} is a folder, a pipe, a socket or a device, but must be a regular file"
        )


def cache_home() -> Path | None:
    """Return $XDG_CACHE_HOME, by default ~/.cache, or None without a home.

    A relative path is ignored, as XDG specifies.
    """
    for name in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(name):
            return Path(name)
    return None


def untrusted(path: Path, is_shared: bool = False) -> str | None:
    """Return why another user than root may have written a file or folder; None if none could.

    A shared folder may be like /tmp: everybody can write, and its sticky bit protects each user's
    files from the others.
    """
    status = os.stat(path)
    if status.st_uid not in (0, os.geteuid()):
        return (
            f"{path} is refused: it belongs to user {status.st_uid}. Remove it, or set "
            "XDG_CACHE_HOME to a folder of yours"
        )
    if status.st_mode & 0o022 and not (is_shared and status.st_mode & stat.S_ISVTX):
        mode = stat.S_IMODE(status.st_mode)
        return (
            f"{path} is refused: other users can write to it (mode {mode:o}). Run chmod go-w {path}"
        )
    return None


def _parts_in_cache(path: Path) -> list[Path]:
    """Return `path` and its parents up to `cache_home`."""
    base = cache_home()
    if base is None:
        return []
    return [part for part in (path, *path.parents) if part.is_relative_to(base)]


def untrusted_in_cache(path: Path) -> str | None:
    """Return what `untrusted` returns for a path in `cache_home`, or one of its parents there."""
    for part in _parts_in_cache(path):
        reason = untrusted(part, is_shared=part == cache_home())
        if reason:
            return reason
    return None


def own_folder(path: Path) -> Path:
    """Create a folder in `cache_home` that only this user can write to, whatever the umask.

    Returns `path`. Raises ValueError if it exists and other users can write to it.
    """
    for part in reversed(_parts_in_cache(path)):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(parents=True, exist_ok=True)
    if reason := untrusted_in_cache(path):
        raise ValueError(reason)
    return path


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def naming(path: str | os.PathLike, tmp: str | os.PathLike) -> Iterator[None]:
    """Turn errors in writing to the hidden folder `tmp` into OSErrors that name `path` instead."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(error.filename or path).replace(str(tmp), str(path))
        raise
    except Exception as error:
        failed = _WRITE_FAILED.search(f"{error} {type(error).__name__}")
        if failed is None:
            raise
        number = int(failed[1] or errno.EIO)
        reason = os.strerror(number)
        if not failed[1]:
            reason = f"a file cannot be written; is the disk full? {one_line(error, 300)}"
        raise OSError(number, reason, str(path)) from error


_numbers = itertools.count()  # several threads may write the same path


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{os.getpid()}-{next(_numbers)}")


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool | None]:
    """Lock a file or folder until the block ends or the process dies.

    Args:
        path: The file or folder.
        wait: Whether to wait for another process that holds the lock.

    Yields:
        True; False if another process holds the lock; None where locks fail: for another user's
        files, and on filesystems without locks.
    """
    is_locked: bool | None = None
    with contextlib.ExitStack() as stack:
        try:
            handle = os.open(path, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            is_locked = False
        except OSError:
            pass
        yield is_locked


def _remove(folder: Path) -> None:
    """Remove a folder even if a signal arrives meanwhile; files that cannot be removed stay."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(path: Path, ours: Path) -> bool:
    """Remove what killed writers of `path` left, or restore a folder that they set aside.

    Returns whether another writer is alive; `ours` is the caller's hidden folder.
    """
    is_busy = False
    for hidden in list(path.parent.iterdir()):
        match = re.fullmatch(rf"\.{re.escape(path.name)}\.(tmp|old)-\d+-\d+", hidden.name)
        if not match or not hidden.is_dir() or hidden == ours:
            continue
        with locked(hidden, wait=False) as is_dead:
            if is_dead is False:
                is_busy = True
            elif is_dead and match[1] == "old" and not path.exists():
                os.rename(hidden, path)
            elif is_dead:
                shutil.rmtree(hidden, ignore_errors=True)
    return is_busy


@contextlib.contextmanager
def _hidden(path: Path) -> Iterator[tuple[Path, bool]]:
    """Create and lock a hidden folder beside `path`, which is removed when the block ends.

    Yields it and whether another writer of `path` is alive.
    """
    with contextlib.ExitStack() as stack:
        is_locked = False
        while not is_locked:
            tmp = _beside(path, "tmp")
            stack.callback(_remove, tmp)
            with naming(path, tmp):
                tmp.mkdir()
            stack.enter_context(locked(tmp))
            is_locked = tmp.exists()  # or another writer has removed it before it was locked
        is_busy = _sweep(path, tmp)
        if path.exists():  # the temporary files must not be more readable than the final ones
            tmp.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IRWXU)
        yield tmp, is_busy


@contextlib.contextmanager
def sole_training(folder: str | os.PathLike) -> Iterator[None]:
    """Create a folder if needed and hold it for one training; ValueError if another holds it.

    The lock is a hidden folder inside, and ends with the process.
    """
    folder = Path(os.path.realpath(folder))
    is_new = not folder.exists()
    with naming(folder, folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with _hidden(folder / _TRAINING) as (_, is_busy):
            if is_busy:
                raise ValueError(
                    f"Another training is writing to {folder}. Wait until it ends, or choose "
                    "another folder"
                )
            yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def contents_of(folder: Path) -> list[str]:
    """Return the names in a folder, without a training's hidden lock."""
    lock = re.compile(rf"\.{_TRAINING}\.tmp-\d+-\d+")
    return sorted(path.name for path in folder.iterdir() if not lock.fullmatch(path.name))


def _keep_mode(new: Path, old: Path) -> None:
    """Give a file or folder the mode of the one that it replaces, if any."""
    is_same_kind = old.is_dir() if new.is_dir() else old.is_file()
    if is_same_kind and not new.is_symlink():
        new.chmod(stat.S_IMODE(old.stat().st_mode))


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a path of the same name in a hidden folder; move the file to `path` at the end.

    The new file has the mode of the one that it replaces.

    Raises:
        ValueError: `path` is a folder, a device or another special file.
        OSError: The file cannot be written; the error names `path`.
    """
    path = check_out_file(os.path.realpath(path), overwrite=True)
    with _hidden(path) as (tmp, _), naming(path, tmp):
        yield tmp / path.name
        _keep_mode(tmp / path.name, path)
        _sync(tmp / path.name)
        os.replace(tmp / path.name, path)
        _sync(path.parent)


def atomic_write_text(path: str | os.PathLike, text: str) -> None:
    """Write `text` as UTF-8 atomically."""
    with atomic_file(path) as tmp:
        tmp.write_text(text, encoding="utf-8")


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
    """Return the real path of a folder to write.

    Args:
        path: The folder, which may not exist yet.
        overwrite: Whether a folder that is not empty may be replaced.
        reads: What the command reads; paths among these must be neither replaced nor deleted.

    Raises:
        ValueError: The folder must not be written.
    """
    path = Path(os.path.realpath(path))
    problem = None
    if path.is_mount() or (path.exists() and Path.cwd().is_relative_to(path)):
        problem = "is a mount point or a parent of the current folder. Choose a folder inside it"
    elif path.is_dir() and any(path.iterdir()) and not overwrite:
        problem = "already exists. Choose another or pass overwrite=True"
    elif path.is_dir():
        for source in _existing(reads):
            if _is_in(source, path):
                problem = f"is or contains {source}, which is read. Choose another"
    elif path.exists():
        problem = "is a file. Choose another"
    if problem:
        raise ValueError(f"Output folder {path} {problem}")
    return path


def check_out_file(
    path: str | os.PathLike, overwrite: bool = False, reads: Iterable[object] = ()
) -> Path:
    """Return the path of a file to write.

    Args:
        path: The file, which may not exist yet.
        overwrite: Whether an existing regular file may be replaced.
        reads: What the command reads: files, or folders with files, that must not be replaced.

    Raises:
        ValueError: The file must not be written.
    """
    path = Path(path)
    problem = None
    if path.is_dir():
        problem = "is a folder. Choose a file name"
    elif path.exists() and not path.is_file():
        problem = "is a device, a pipe or a socket, which is never replaced. Choose a file name"
    elif path.exists() and not overwrite:
        problem = "already exists. Choose another or pass overwrite=True"
    elif path.exists():
        for source in _existing(reads):
            if source.samefile(path) or _is_in(path, source):
                problem = f"is read, or is a file in {source}, which is read. Choose another"
    for parent in path.parents:
        if parent.is_file():
            problem = f"cannot be written, as {parent} is a file. Choose another"
    if problem:
        raise ValueError(f"Output file {path} {problem}")
    return path


def _existing(reads: Iterable[object]) -> Iterator[Path]:
    """Yield the paths among `reads`, which also has ids of the Hub, objects and None."""
    for source in reads:
        if isinstance(source, str | os.PathLike) and os.path.exists(source):
            yield Path(source)


def _is_in(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """Yield a hidden folder beside `path`; rename it to `path` when the block ends.

    It is removed if the block raises.

    Args:
        path: The folder to write.
        overwrite: Whether an old folder is set aside, replaced and then deleted; its mode is kept,
            and so is that of each file of the same name.

    Raises:
        ValueError: `path` exists and is not empty, or nothing can be written beside it.
    """
    path = check_out_dir(path, overwrite)
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tmp, is_busy = stack.enter_context(_hidden(path))
            if is_busy:
                raise BlockingIOError(errno.EBUSY, "another process is writing it", str(path))
        except OSError as error:
            raise ValueError(
                f"Output folder {path} cannot be written: no file can be created beside it "
                f"({error.strerror}). Choose another"
            ) from error
        stack.enter_context(naming(path, tmp))
        check_out_dir(path, overwrite)  # a killed writer may have set it aside, and it is back now
        yield tmp
        for folder, _, names in os.walk(tmp, topdown=False):
            for name in (*names, "."):
                new = Path(folder, name)
                _keep_mode(new, path / new.relative_to(tmp))
                _sync(new)
        _move_in(tmp, path, overwrite)


def _move_in(tmp: Path, path: Path, overwrite: bool) -> None:
    """Rename `tmp` to `path`, which is absent, empty, or (with `overwrite`) replaced."""
    old = _beside(path, "old")
    with contextlib.ExitStack() as stack:
        try:
            if overwrite and path.exists():
                stack.enter_context(locked(path))  # no other writer restores or removes `old`
                os.rename(path, old)
            os.rename(tmp, path)
        finally:
            if old.exists() and not path.exists():
                os.rename(old, path)
    _sync(path.parent)
    _remove(old)


# per kind of weights: the names of their files, and the files without which nobody loads them; an
# adapter may be stored beside the model that it belongs to
_WEIGHTS = {
    "model": r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?",
    "adapter": r"adapter_model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?",
}
_MARKS = {
    "model": ("model.safetensors.index.json", "config.json"),
    "adapter": ("adapter_config.json",),
}
_CARD = "README.md"


def _weights_in(folder: Path, kind: str) -> set[str]:
    return {path.name for path in folder.iterdir() if re.fullmatch(_WEIGHTS[kind], path.name)}


def weights_of(folder: str | os.PathLike) -> list[str]:
    """Return the sorted names of a model's weight files; none without a config.json beside them."""
    if not Path(folder, "config.json").is_file():
        return []
    return sorted(_weights_in(Path(folder), "model"))


@contextlib.contextmanager
def atomic_model(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield a hidden folder in `folder`; at the end move a model's files from there to `folder`.

    The older weights are removed. For a folder that also holds other things, such as checkpoints:
    writing an adapter leaves a model's files alone, and the reverse. The hidden folder starts with
    a copy of README.md. A single weight file is replaced in one step. With several, or a changed
    config, the index and the config are removed first and written last, so that a process that dies
    meanwhile leaves no model rather than a mixed one.

    Raises:
        FileNotFoundError: The block wrote no weights; nothing is removed.
    """
    folder = Path(os.path.realpath(folder))
    with naming(folder, folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _hidden(folder / "model") as (tmp, _), naming(folder, tmp):
        if (folder / _CARD).is_file():
            shutil.copyfile(folder / _CARD, tmp / _CARD)
        yield tmp
        # PEFT stores adapters of other names in subfolders
        new = [path.relative_to(tmp) for path in tmp.rglob("*") if not path.is_dir()]
        if not any(re.fullmatch("|".join(_WEIGHTS.values()), file.name) for file in new):
            raise FileNotFoundError(errno.ENOENT, "no weights were written", str(folder))
        for file in new:
            _sync(tmp / file)
        marks: set[str] = set()
        for kind in _WEIGHTS:
            marks.update(_MARKS[kind])
            _remove_old_weights(tmp, folder, kind)
        for file in sorted(new, key=lambda file: (file.name in marks, file)):
            (folder / file).parent.mkdir(exist_ok=True)
            _keep_mode(tmp / file, folder / file)
            os.replace(tmp / file, folder / file)
        _sync(folder)


def _remove_old_weights(tmp: Path, folder: Path, kind: str) -> None:
    """Remove from `folder` what would make a mixed model with the weights of a kind in `tmp`."""
    new = _weights_in(tmp, kind)
    if not new:
        return
    old = _weights_in(folder, kind) - new
    is_changed = any(_differ(tmp / mark, folder / mark) for mark in _MARKS[kind])
    if old or len(new) > 1 or is_changed:
        for name in (*_MARKS[kind], *old):
            (folder / name).unlink(missing_ok=True)


def _differ(new: Path, old: Path) -> bool:
    """Return whether a file replaces one with different contents."""
    return new.is_file() and old.is_file() and new.read_bytes() != old.read_bytes()


def hash_of(value: Any) -> str:
    """Return a hash of 12 hex digits of a JSON value."""
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def files_print(source: str | Path) -> str | list:
    """Return names, sizes and times of a file or a folder's files, to detect changes.

    A Hub id is returned unchanged.
    """
    path = Path(source)
    if not path.exists():
        return str(source)
    names = {path: path.name}
    if path.is_dir():
        names = {file: file.relative_to(path).as_posix() for file in sorted(path.rglob("*"))}
    prints = []
    for file, name in names.items():
        if file.is_file():
            status = file.stat()
            prints.append([name, status.st_size, status.st_mtime_ns])
    return prints
