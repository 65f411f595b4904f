"""What a finished result was made of, as a hash, by which it is known again."""

import hashlib
import json
import shutil
from pathlib import Path

from moe_runtime.hf import ranks


def hash_of(value) -> str:
    """Return 12 hex digits that stand for a JSON value."""
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def files_print(source: str | Path) -> str | list:
    """Return what tells a file or a folder of files from a changed one: names, sizes and times; an id of the Hub as it is."""
    path = Path(source)
    if not path.exists():
        return str(source)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    names = [p.name if path.is_file() else p.relative_to(path).as_posix() for p in files]
    return [[name, p.stat().st_size, p.stat().st_mtime_ns] for name, p in zip(names, files, strict=True)]


def remove(folder: Path) -> None:
    """Remove a folder of checkpoints that nobody needs any more, on rank 0."""
    if ranks.state().is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
