"""csrc/ compiled for the CPU by g++ -DMOERT_EMU and csrc/emu/cuda_emu.h; each source is compiled
once per text and set of flags.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_runtime.native.build import cache_dir
from tests.support.patience import PATIENCE

CSRC = Path(__file__).resolve().parents[2] / "csrc"
CHECK = Path(__file__).with_name("check.py")
FLAGS = (
    "-x",
    "c++",
    "-std=c++17",
    "-g1",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-DMOERT_EMU",
    f"-I{CSRC}",
)
FAST = ("-O0",)
SANITIZED = (
    "-O0",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)
# fibers restart without having returned, which breaks ThreadSanitizer's stack of calls
RACES = ("-O0", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "TSAN_OPTIONS": "halt_on_error=1",
    "OPENBLAS_NUM_THREADS": "1",
}

needs_cxx = pytest.mark.skipif(
    shutil.which("g++") is None,
    reason="needs g++",
)


def build(flags: tuple[str, ...] = FAST, edit: tuple[str, str, str] | None = None) -> Path:
    """Build a library with `flags`, and `edit` = (file, text, replacement) applied to one place of
    one source.
    """
    folder = cache_dir("cuda") / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        objects = [_compile(folder, path, flags, edit) for path in sorted(CSRC.glob("*.cu"))]
        library = folder / f"libmoert_emu-{_digest(''.join(path.name for path in objects))}.so"
        if not library.exists():
            _run(
                ["g++", "-shared", *flags, *objects],
                library,
            )
    return library


def _compile(
    folder: Path, path: Path, flags: tuple[str, ...], edit: tuple[str, str, str] | None
) -> Path:
    text = path.read_text()
    if edit is not None and edit[0] == path.name:
        assert text.count(edit[1]) == 1, (
            f"{edit[1]!r} is {text.count(edit[1])} times in {path.name}; expected once"
        )
        text = text.replace(*edit[1:])
    headers = "".join(
        header.read_text() for header in sorted([*CSRC.rglob("*.h"), *CSRC.glob("*.cuh")])
    )
    made = folder / f"{path.stem}-{_digest(repr((flags, FLAGS)) + headers + text)}.o"
    if not made.exists():
        source = made.with_suffix(".cu")
        source.write_text(text)
        _run(["g++", *FLAGS, *flags, "-c", source], made)
        source.unlink()
    return made


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _run(command: list, out: Path) -> None:
    """Run a compiler and create its output atomically."""
    part = out.with_suffix(".part")
    done = subprocess.run(
        [*map(str, command), "-o", str(part)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    os.replace(part, out)


def checks() -> list[str]:
    """Return the names of the checks in check.py."""
    return re.findall(r"^def check_(\w+)\(", CHECK.read_text(), re.M)


def check(
    library: Path, *names: str, seeds: tuple[int, ...] = (0,), preload: str = ""
) -> subprocess.CompletedProcess:
    """Run the checks `names` of check.py (all by default) on `library`, in a process that a bug may
    crash.
    """
    environment = os.environ | OPTIONS | {"LD_PRELOAD": preload}
    command = [
        sys.executable,
        str(CHECK),
        str(library),
        ",".join(map(str, seeds)),
        *names,
    ]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
