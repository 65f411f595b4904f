"""Compile csrc/cpu with g++ or clang++ into libmoert_cpu.so: `python -m moe_runtime.native.build_cpu`. No torch is needed.

setup.py loads this file by its path, for the wheel; as a command it builds for this machine, into the user's cache, where
`moe_runtime.native.cpp` finds the library. Standard library only.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAME = "libmoert_cpu.so"
GET_COMPILER = "install g++ or clang++, or set CXX to one"
GET_PLACE = "set XDG_CACHE_HOME or --out to what can be written"
FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
    "-Wno-psabi",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
# the table of kernels.h that kernels.cpp becomes, and the flags that make it; the library picks one when it is loaded
SETS = {"generic": ()}
X86_SETS = {"avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": (*_AVX512, "-mavx512bf16")}
DAYS = 30  # another checkout may be at work with its own
# what the sources want of a compiler beyond C++17: vectors that convert, and that choose by element
PROBE = """
typedef float f4 __attribute__((vector_size(16)));
typedef int i4 __attribute__((vector_size(16)));
typedef unsigned short h4 __attribute__((vector_size(8)));
f4 wide(h4 h, float x) { f4 v = (f4)(__builtin_convertvector(h, i4) << 16); return v > x ? x - f4{} : v; }
"""


class BuildError(RuntimeError):
    """What is missing, or what the compiler said."""


def csrc_dir() -> Path:
    """Return the folder of the sources: in an installed wheel moe_runtime/_csrc/cpu, in a checkout csrc/cpu."""
    package = Path(__file__).resolve().parents[1]
    return package / "_csrc" / "cpu" if (package / "_csrc" / "cpu").is_dir() else package.parent / "csrc" / "cpu"


def cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/moe_runtime/cpu, ~/.cache by default. Raises BuildError where there is no home."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise BuildError(f"HOME is {os.environ.get('HOME')!r}, and this user has no other; {GET_PLACE}") from error
    return base / "moe_runtime" / "cpu"


def library_path(csrc: Path | None = None) -> Path:
    """Return where the command puts the library of these sources for this kind of machine."""
    return cache_dir() / f"{source_hash(csrc or csrc_dir())}-{platform.machine()}" / NAME


def source_hash(csrc: Path) -> str:
    """Return 16 hex digits of all that the compiler reads of `csrc`."""
    digest = hashlib.sha256()
    for path in sorted(path for path in csrc.iterdir() if path.suffix in (".cpp", ".h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_compiler() -> tuple[list[str], str]:
    """Return the command and the version of $CXX, else of g++, else of clang++. Raises BuildError where none is."""
    asked = shlex.split(os.environ.get("CXX") or "")
    for command in [asked] if asked else [["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command, _run([*command, "--version"]).splitlines()[0].strip()
    missing = f"CXX is {asked[0]!r}, which is missing" if asked else "the compilers g++ and clang++ are missing"
    raise BuildError(f"{missing}; {GET_COMPILER}")


def check(csrc: Path) -> tuple[list[str], str]:
    """Return the compiler that a build would take, and its version. Raises BuildError for what is missing."""
    if not (csrc / "kernels.cpp").is_file():
        raise BuildError(f"csrc is {csrc}, which has no kernels.cpp; want a checkout, an sdist or an installed wheel")
    compiler, version = find_compiler()
    if not _accepts(compiler, ()):
        raise BuildError(f"the compiler is {version}; want g++ >= 9, or as new a clang++; {GET_COMPILER}")
    return compiler, version


def _accepts(compiler: list[str], flags: tuple[str, ...]) -> bool:
    """Say whether the compiler has what the sources want, with these flags too."""
    command = [*compiler, *FLAGS, *flags, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, input=PROBE, text=True, capture_output=True).returncode == 0


def build(out: Path, *, csrc: Path | None = None, force: bool = False) -> bool:
    """Compile `csrc` into the library `out`, which appears whole or not at all; say whether there was anything to do.

    A library of the same sources by the same compiler stays. Raises BuildError for what is missing or does not compile.
    """
    csrc = csrc or csrc_dir()
    compiler, version = check(csrc)
    asked = X86_SETS if platform.machine() == "x86_64" else {}
    sets = SETS | {name: flags for name, flags in asked.items() if _accepts(compiler, flags)}
    info = json.dumps({"sources": source_hash(csrc), "compiler": version, "sets": list(sets)})
    # the library's own words, so that no second file can say otherwise
    if not force and out.is_file() and info.encode() in out.read_bytes():
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".build-") as tmp:
        kernels = csrc / "kernels.cpp"
        jobs = [(kernels, Path(tmp) / f"{name}.o", (*flags, f"-DMOERT_SET={name}")) for name, flags in sets.items()]
        stamp = Path(tmp) / "stamp.h"
        stamp.write_text(f"#define MOERT_BUILD_INFO {json.dumps(info)}\n")
        stamp_flags = ("-include", stamp, *(f"-DMOERT_WITH_{name}" for name in sets))
        jobs.append((csrc / "moert_cpu.cpp", Path(tmp) / "moert_cpu.o", stamp_flags))
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda job: _run([*compiler, *FLAGS, *job[2], "-c", job[0], "-o", job[1]]), jobs))
        made, exports = Path(tmp) / NAME, Path(tmp) / "exports.map"
        exports.write_text("{ global: moert_cpu_*; local: *; };\n")
        # libc alone: OpenMP's functions come from the runtime that torch has loaded
        _run([
            *compiler, "-shared", "-s", "-o", made, *(job[1] for job in jobs), f"-Wl,--version-script={exports}",
            "-Wl,-z,defs", "-Wl,--as-needed", f"-Wl,-soname,{NAME}",
        ])  # fmt: skip
        os.replace(made, out)
    return True


def _forget_others(folder: Path) -> None:
    """Remove the libraries of other sources that no build has asked for since DAYS days; `folder` was asked for now."""
    os.utime(folder)
    for other in folder.parent.iterdir():
        ours = re.fullmatch(r"[0-9a-f]{16}-\w+", other.name) and (other / NAME).is_file()
        if ours and time.time() - other.stat().st_mtime > DAYS * 24 * 3600:
            shutil.rmtree(other, ignore_errors=True)


def built_by(path: Path) -> str:
    """Return the compiler that a library names in itself, "unknown" if it names none."""
    found = re.search(rb'"compiler": "([^"]*)"', path.read_bytes())
    return found[1].decode() if found else "unknown"


def _run(command: list) -> str:
    """Return what the command wrote; raises BuildError with it if it failed."""
    command = [str(part) for part in command]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run ({error.strerror}); {GET_COMPILER}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed with {done.returncode}:\n{done.stdout}")
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Build for this machine and print the library's path."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.native.build_cpu", description=__doc__.splitlines()[0])
    place = f"moe_runtime/cpu/<hash of the sources>-{platform.machine()}/{NAME}"
    parser.add_argument("--out", type=Path, help=f"default {place} in $XDG_CACHE_HOME, ~/.cache by default")
    parser.add_argument("--csrc", type=Path, help="default the sources of this package")
    parser.add_argument("--force", action="store_true", help="build even where the library is there already")
    options = parser.parse_args(arguments)
    csrc, out = options.csrc or csrc_dir(), options.out
    try:
        check(csrc)
        out = out or library_path(csrc)
        fresh = build(out, csrc=csrc, force=options.force)
        if options.out is None:
            _forget_others(out.parent)
        print(f"{out}: {'built' if fresh else 'there already, built'} by {built_by(out)}")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {out or csrc} cannot be written ({error.strerror}); {GET_PLACE}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
