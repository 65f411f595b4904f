"""csrc/ without a GPU: g++ compiles its host code, nvcc its kernels to PTX, and the launches run on
tests/emulator; each source is compiled once per text.

    python -m tests.csrc.emulator    # write the PTX anew for machines without nvcc, kernels.ptx.xz
"""

import fcntl
import functools
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_runtime.native.build import BuildError, cache_dir, find_toolkit
from tests.emulator import library
from tests.support.captured import captured
from tests.support.patience import PATIENCE

CSRC = Path(__file__).resolve().parents[2] / "csrc"
CHECK = Path(__file__).with_name("check.py")
STORED = Path(__file__).with_name("kernels.ptx.xz")
HOST_FLAGS = (
    "-x",
    "c++",
    "-std=c++17",
    "-O0",
    "-fPIC",
    "-DMOERT_EMU",
    f"-I{CSRC}",
    f"-I{library.FOLDER}",
)
PTX_FLAGS = ("-O3", "-std=c++17", "-lineinfo", "-arch=compute_90", "--ptx")
# adds the modules of a file, separated by zeros, when the library is loaded
LOADER = """
#include <cstring>
extern "C" void emulator_load(const char* text);
asm(".section .rodata\\nkernels_begin: .incbin \\"{path}\\"\\nkernels_end: .byte 0\\n.previous");
extern const char begin[] __asm__("kernels_begin");
extern const char end[] __asm__("kernels_end");
__attribute__((constructor)) static void load() {{
  for (const char* text = begin; text < end; text += std::strlen(text) + 1) emulator_load(text);
}}
"""

needs_cxx = pytest.mark.skipif(
    shutil.which("g++") is None,
    reason="needs g++",
)
Edit = tuple[str, str, str]  # a file, a text that is in one place of it, its replacement


@functools.cache
def nvcc() -> Path | None:
    try:
        return find_toolkit().nvcc
    except BuildError:
        return None


needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="needs nvcc")


def build(edit: Edit | None = None) -> Path:
    """Build a library of csrc/, with `edit` applied to one source."""
    folder = cache_dir("cuda") / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ptx = folder / f"kernels-{_digest(_key(edit))}.ptx"
        if not ptx.exists():
            _write(ptx, _kernels(folder, edit).encode())
        sources = sorted(CSRC.glob("*.cu"))
        objects = [_compile(folder, path, edit, HOST_FLAGS, ".o") for path in sources]
        emulator = library.build()
        name = _digest("".join(str(path) for path in [*objects, ptx, emulator]))
        result = folder / f"libmoert_emu-{name}.so"
        if not result.exists():
            loader = folder / "loader.cpp"
            loader.write_text(LOADER.format(path=ptx))
            search = f"-Wl,-rpath,{emulator.parent}"
            _run(["g++", "-shared", "-fPIC", loader, *objects, emulator, search], result)
    return result


def _text(path: Path, edit: Edit | None) -> str:
    text = path.read_text()
    if edit is not None and edit[0] == path.name:
        assert text.count(edit[1]) == 1, (
            f"{edit[1]!r} is {text.count(edit[1])} times in {path.name}; expected once"
        )
        text = text.replace(*edit[1:])
    return text


def _headers() -> str:
    paths = [*CSRC.glob("*.h"), *CSRC.glob("*.cuh"), library.FOLDER / "cuda_host.h"]
    return "".join(path.read_text() for path in sorted(paths))


def _key(edit: Edit | None) -> str:
    sources = sorted(CSRC.glob("*.cu"))
    return _headers() + repr(PTX_FLAGS) + "".join(_text(path, edit) for path in sources)


def _kernels(folder: Path, edit: Edit | None) -> str:
    """Return the PTX of all sources, separated by zeros."""
    if nvcc() is None:
        digest, _, text = stored().partition("\n")
        if digest != _digest(_key(edit)):
            pytest.skip("csrc/ is not what its stored PTX was made of, and there is no nvcc")
        return text
    sources = [path for path in sorted(CSRC.glob("*.cu")) if "__global__" in path.read_text()]
    made = [_compile(folder, path, edit, PTX_FLAGS, ".ptx") for path in sources]
    text = "\0".join(path.read_text() for path in made)
    return re.sub(r'(\.file\t\d+ ").*/', r"\1", text)  # without this machine's folders


def _compile(
    folder: Path, path: Path, edit: Edit | None, flags: tuple[str, ...], suffix: str
) -> Path:
    text = _text(path, edit)
    made = folder / f"{path.stem}-{_digest(repr(flags) + _headers() + text)}{suffix}"
    if not made.exists():
        with_edit = made.parent / made.stem
        with_edit.mkdir(exist_ok=True)
        source = with_edit / path.name
        source.write_text(text)
        if suffix == ".o":
            _run(["g++", *flags, "-c", source], made)
        else:
            _run([nvcc(), *flags, f"-I{CSRC}", source], made)
        shutil.rmtree(with_edit)
    return made


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _run(command: list, out: Path) -> None:
    """Run a compiler and create its output atomically."""
    part = out.with_suffix(".part")
    done = captured([*map(str, command), "-o", str(part)])
    assert done.returncode == 0, done.stderr
    os.replace(part, out)


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)


def checks() -> list[str]:
    """Return the names of the checks in check.py."""
    return re.findall(r"^def check_(\w+)\(", CHECK.read_text(), re.M)


def check(library: Path, *names: str, seeds: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess:
    """Run the checks `names` of check.py (all by default) on `library`, in a process that a bug may
    crash.
    """
    command = [
        sys.executable,
        str(CHECK),
        str(library),
        ",".join(map(str, seeds)),
        *names,
    ]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    return captured(command, env=environment, timeout=PATIENCE)


def stored() -> str:
    """Return a digest of the sources, and in the next lines their PTX."""
    return lzma.decompress(STORED.read_bytes()).decode()


def to_store() -> str:
    """Return what kernels.ptx.xz should contain."""
    build()
    folder = cache_dir("cuda") / "emulator"
    return f"{_digest(_key(None))}\n{_kernels(folder, None)}"


if __name__ == "__main__":
    _write(STORED, lzma.compress(to_store().encode(), preset=9))
