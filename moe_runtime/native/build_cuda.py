"""Compile csrc/ with nvcc into libmoert_cuda.so: `python -m moe_runtime.native.build_cuda`. No GPU is asked, no torch is needed.

setup.py loads this file by its path, for the wheel; as a command it builds for this machine, into the user's cache, where
`moe_runtime.native.cuda` finds the library. Standard library only.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NAME = "libmoert_cuda.so"
MIN_NVCC = (12, 8)  # the first that knows sm_100 and sm_120
ARCHS = "80;86;89;90;100+PTX;120"  # the PTX is for GPUs that are newer than the list
KEPT_DAYS = 30  # objects that no build has used for so long are deleted
MAX_REGISTERS = 128  # of a thread: 512 threads a multiprocessor at least
HOST_FLAGS = "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-threadsafe-statics"  # so that libc is all it needs
GET_NVCC = "install a CUDA toolkit and set CUDA_HOME, or pip install 'moe-runtime[nvcc]'"
GET_PLACE = "set XDG_CACHE_HOME to what can be written"
SPILLS = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
USUAL = Path("/usr/local/cuda/bin/nvcc")
PLACES = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")


class BuildError(RuntimeError):
    """What is missing, or what a compiler said."""


class Toolkit(NamedTuple):
    """An nvcc and the folder of its static runtime."""

    nvcc: Path
    version: tuple[int, int]
    library_dir: Path


class Usage(NamedTuple):
    """What ptxas says of one kernel on one architecture; bytes, but for the registers."""

    kernel: str
    arch: str
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0


def csrc_dir() -> Path:
    """Return the folder of the sources: in an installed wheel moe_runtime/_csrc, in a checkout csrc beside the package."""
    package = Path(__file__).resolve().parents[1]
    return package / "_csrc" if (package / "_csrc").is_dir() else package.parent / "csrc"


def cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/moe_runtime/cuda, ~/.cache by default. Raises BuildError where there is no home."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise BuildError(f"HOME is {os.environ.get('HOME')!r}, and this user has no other; {GET_PLACE}") from error
    return base / "moe_runtime" / "cuda"


def library_path(csrc: Path | None = None) -> Path:
    """Return where the command puts the library of these sources."""
    return cache_dir() / source_hash(csrc or csrc_dir()) / NAME


def source_hash(csrc: Path) -> str:
    """Return 16 hex digits of all that nvcc reads of `csrc`."""
    digest = hashlib.sha256()
    for path in sorted(path for path in csrc.iterdir() if path.suffix in (".cu", ".cuh", ".h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_toolkit() -> Toolkit:
    """Return the first usable nvcc: of CUDA_HOME or CUDA_PATH, which must then have it, of PATH, /usr/local/cuda or pip.

    Raises BuildError that says what is missing and where it was looked for.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            nvcc = Path(home) / "bin" / "nvcc"
            if not nvcc.is_file():
                raise BuildError(f"{variable} is {home}, which has no bin/nvcc; want a CUDA toolkit; {GET_NVCC}")
            return _toolkit(nvcc)
    found = [shutil.which("nvcc"), USUAL]
    for root in dict.fromkeys([*sys.path, *site.getsitepackages(), site.getusersitepackages()]):
        found += sorted(Path(root or ".").glob("nvidia/cu1[2-9]/bin/nvcc"), reverse=True)
    for nvcc in found:
        if nvcc and Path(nvcc).is_file():
            return _toolkit(Path(nvcc))
    raise BuildError(f"nvcc is missing in PATH, /usr/local/cuda and pip's nvidia packages; {GET_NVCC}")


def _toolkit(nvcc: Path) -> Toolkit:
    found = re.search(r"release (\d+)\.(\d+)", _run([nvcc, "--version"]))
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < MIN_NVCC:
        text, least = (".".join(map(str, numbers)) for numbers in (version, MIN_NVCC))
        raise BuildError(f"{nvcc} is nvcc {text}; want {least} or newer; {GET_NVCC}")
    # nvcc itself says where its toolkit is: the one in PATH may be a script or a link
    plan = _run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull])
    top = re.search(r"^#\$ TOP=(.*)$", plan, re.M)
    home = Path(top[1]).resolve() if top else nvcc.resolve().parents[1]
    for place in PLACES:
        if (home / place / "libcudart_static.a").is_file():
            return Toolkit(nvcc, version, home / place)
    raise BuildError(f"libcudart_static.a is missing in {home}; want the toolkit's runtime beside its nvcc; {GET_NVCC}")


def linker() -> list[str]:
    """Return the command that links: $CXX, g++ by default. Raises BuildError where it is missing."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        raise BuildError(f"the host compiler {command[0]!r} is missing; install g++, or set CXX to one")
    return command


def architectures(spec: str, toolkit: Toolkit) -> tuple[list[str], list[str]]:
    """Return nvcc's flags and the names of what they make, sm_90 and the like, of `spec` such as 80;90;100+PTX.

    Machine code comes from the PTX of the first plain one in the list if that is older: the kernels use nothing newer, and
    the passes before ptxas take half of the time. Raises BuildError for what is no architecture, or none that nvcc knows.
    """
    known = _run([toolkit.nvcc, "--list-gpu-arch"]).split()
    flags, names, plain = [], [], None
    for item in filter(None, re.split(r"[;,\s]+", spec)):
        number, plus, _ = item.removeprefix("sm_").partition("+PTX")
        if not re.fullmatch(r"\d+[af]?", number) or item.removeprefix("sm_") != number + plus:
            raise BuildError(f"architectures are {spec!r}; want a list such as {ARCHS}")
        if f"compute_{number.rstrip('af')}" not in known:
            ours = ", ".join(name.removeprefix("compute_") for name in known)
            raise BuildError(
                f"architectures are {spec!r}, but {toolkit.nvcc} does not know {number}; want some of {ours}"
            )
        virtual = number
        if number.isdigit() and not plus:
            plain = plain or number
            virtual = min(plain, number, key=int)
        for name in [f"sm_{number}"] + [f"compute_{number}"] * bool(plus):
            flags += ["-gencode", f"arch=compute_{virtual},code={name}"]
            names.append(name)
    if not names:
        raise BuildError(f"architectures are {spec!r}; want a list such as {ARCHS}")
    return flags, names


def check(csrc: Path, archs: str = ARCHS) -> tuple[list[Path], Toolkit, list[str], list[str], list[str]]:
    """Return what a build needs: sources, toolkit, linker, nvcc's flags, names of the architectures. Compiles nothing.

    Raises BuildError for what is missing.
    """
    sources = sorted(csrc.glob("*.cu"))
    if not sources:
        raise BuildError(f"csrc is {csrc}, which has no .cu file; want a checkout, an sdist or an installed wheel")
    toolkit = find_toolkit()
    return sources, toolkit, linker(), *architectures(archs, toolkit)


def build(out: Path, *, csrc: Path | None = None, cache: Path | None = None, archs: str = ARCHS) -> list[Usage]:
    """Compile `csrc` for `archs` into the library `out`, which appears whole or not at all; return what ptxas said.

    `cache` keeps the objects by the hash of all that they depend on. Raises BuildError for what is missing or does not compile.
    """
    csrc, cache = csrc or csrc_dir(), cache or cache_dir() / "objects"
    sources, toolkit, link, gencode, names = check(csrc, archs)
    identity = {"sources": source_hash(csrc), "nvcc": ".".join(map(str, toolkit.version)), "archs": names}
    flags = ["-O3", "-std=c++17", "--threads", "1", "--compress-mode=size", "-Xptxas", "-v", "-Xcompiler", HOST_FLAGS]
    with _locked(cache):
        workers = min(len(os.sched_getaffinity(0)), len(sources))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            # info.cu has no kernel: one architecture will do
            targets = [gencode[:2] if path.stem == "info" else gencode for path in sources]
            jobs = [
                pool.submit(_compile, toolkit, flags + t, path, identity, cache) for path, t in zip(sources, targets)
            ]
            objects, reports = zip(*(job.result() for job in jobs))
        prune(cache)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".build-") as tmp:
            made, exports = Path(tmp) / NAME, Path(tmp) / "exports.map"
            exports.write_text("{ global: moert_*; local: *; };\n")
            # the runtime is static and hidden: torch brings its own, of another version maybe
            _run([
                *link, "-shared", "-s", "-o", made, *objects, "-L", toolkit.library_dir, "-lcudart_static", "-ldl", "-lrt",
                "-lpthread", f"-Wl,--version-script={exports}", "-Wl,-z,defs", "-Wl,--as-needed", f"-Wl,-soname,{NAME}",
            ])  # fmt: skip
            os.replace(made, out)
    return [usage for report in reports for usage in report]


def _compile(toolkit: Toolkit, flags: list, source: Path, identity: dict, cache: Path) -> tuple[Path, list[Usage]]:
    """Return the object of one source, from `cache` if it is there, and ptxas' report of it."""
    # a header and not -D: nvcc runs its steps through a shell, which would take the quotes away
    stamp = f"#define MOERT_BUILD_INFO {json.dumps(json.dumps(identity))}\n" if source.stem == "info" else ""
    headers = [path for path in sorted(source.parent.iterdir()) if path.suffix in (".cuh", ".h")]
    digest = hashlib.sha256(repr((flags, stamp, toolkit.version)).encode())
    for path in [source, *headers]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    made = cache / f"{source.stem}-{digest.hexdigest()[:24]}.o"
    report = made.with_suffix(".ptxas")
    if made.exists() and report.exists():
        for path in (made, report):
            path.touch()  # its age says when it was last of use
    else:
        with tempfile.TemporaryDirectory(dir=cache) as tmp:
            include, fresh = Path(tmp) / "stamp.h", Path(tmp) / made.name
            include.write_text(stamp)
            said = _run([toolkit.nvcc, *flags, "-include", include, "-I", source.parent, "-c", source, "-o", fresh])
            (Path(tmp) / report.name).write_text(said)
            os.replace(Path(tmp) / report.name, report)
            os.replace(fresh, made)
    return made, read_ptxas(report.read_text())


def prune(cache: Path) -> None:
    """Delete what is older than KEPT_DAYS of what compilers made; a build makes what it uses young again."""
    oldest = time.time() - KEPT_DAYS * 86400
    for path in cache.iterdir():
        if path.suffix in (".o", ".ptxas", ".so") and path.stat().st_mtime < oldest:
            path.unlink()


def read_ptxas(text: str) -> list[Usage]:
    """Return what `ptxas -v` reports, one line per kernel and architecture."""
    found: list[Usage] = []
    for line in text.splitlines():
        if kernel := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            found.append(Usage(kernel[1], kernel[2]))
        elif found and (spills := re.search(SPILLS, line)):
            stack, stores, loads = map(int, spills.groups())
            found[-1] = found[-1]._replace(stack=stack, spill_stores=stores, spill_loads=loads)
        elif found and (used := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            found[-1] = found[-1]._replace(registers=int(used[1]), shared=int(shared[1]) if shared else 0)
    return found


def complaints(usages: list[Usage], max_registers: int = MAX_REGISTERS) -> list[str]:
    """Return a line per kernel that spills, has a stack frame or takes more than `max_registers` registers."""
    bad = []
    for usage in usages:
        spilled = usage.spill_stores + usage.spill_loads
        if spilled or usage.stack:
            bad.append(f"{usage.kernel} on {usage.arch} spills {spilled} bytes, stack frame {usage.stack}; want none")
        if usage.registers > max_registers:
            bad.append(
                f"{usage.kernel} on {usage.arch} takes {usage.registers} registers; want at most {max_registers}"
            )
    return bad


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time build in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: list) -> str:
    """Return what the command wrote; raises BuildError with it if it failed."""
    command = [str(part) for part in command]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run ({error.strerror}); {GET_NVCC}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed with {done.returncode}:\n{done.stdout}")
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Build for this machine, print the library's path, and fail if a kernel is over the gate."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.native.build_cuda", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--archs", default=ARCHS, help="default %(default)s; 90 alone takes a fifth of the time")
    place = f"moe_runtime/cuda/<hash of the sources>/{NAME}"
    parser.add_argument("--out", type=Path, help=f"default {place} in $XDG_CACHE_HOME, ~/.cache by default")
    parser.add_argument("--csrc", type=Path, help="default the sources of this package")
    parser.add_argument("--max-registers", type=int, default=MAX_REGISTERS, help="of a thread, default %(default)s")
    parser.add_argument("--report", action="store_true", help="print what ptxas says of each kernel")
    options = parser.parse_args(arguments)
    try:
        out = options.out or library_path(options.csrc)
        usages = build(out, csrc=options.csrc, archs=options.archs)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        place = error.filename or options.out or "the library"
        print(f"error: {place} cannot be read or written ({error.strerror}); {GET_PLACE}, or --out", file=sys.stderr)
        return 2
    bad = complaints(usages, options.max_registers)
    most = max(usages, key=lambda usage: usage.registers, default=Usage("no kernel", "no architecture"))
    print(f"{out}: {len(usages)} kernel images, at most {most.registers} registers ({most.kernel}, {most.arch})")
    for usage in usages if options.report else ():
        spilled = usage.spill_stores + usage.spill_loads
        print(
            f"{usage.registers:4d} registers {usage.shared:6d} bytes shared {spilled:5d} spilled {usage.arch:8s}{usage.kernel}"
        )
    for line in bad:
        print(f"error: {line}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
