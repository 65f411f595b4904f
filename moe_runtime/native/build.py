"""Compile the libraries of csrc/: `python -m moe_runtime.native.build cpu|cuda`. Needs neither
torch nor a GPU.

cpu    csrc/cpu with g++ or clang++ into libmoert_cpu.so
cuda   csrc/ with nvcc into libmoert_cuda.so

The command builds into the user's cache, where `moe_runtime.native.library` searches. Only the
standard library is used.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from moe_runtime.io.files import cache_home, distrust, own_folder
from moe_runtime.native import selftest

NAMES = {"cpu": "libmoert_cpu.so", "cuda": "libmoert_cuda.so"}
SUFFIXES = {"cpu": (".cpp", ".h"), "cuda": (".cu", ".cuh", ".h")}
# objects that no build has used for this long are deleted; other checkouts may still use theirs
MAX_AGE_DAYS = 30

CPU_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-Wno-psabi",
)
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mprefer-vector-width=512",
)
_BF16 = (*_AVX512, "-mavx512bf16")
# the variants for which kernels.cpp is compiled, with their flags; the library selects one when it
# is loaded
X86_SETS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _BF16,
    "amx": (*_BF16, "-mamx-tile", "-mamx-bf16"),
}
# one instruction of each set: a compiler may know its name, and its assembler not
INSTRUCTIONS = {
    "avx2": "__m256i f(__m256i a) { return _mm256_add_epi32(a, a); }",
    "avx512": "__m512 f(__m512 a) { return _mm512_add_ps(a, a); }",
    "avx512_bf16": "__m512 f(__m512 a, __m512bh b) { return _mm512_dpbf16_ps(a, b, b); }",
    "amx": "void f() { _tile_dpbf16ps(0, 1, 2); }",
}
# compiler features that the CPU sources need beyond C++17: vector conversion and elementwise
# selection
PROBE = """
typedef float f4 __attribute__((vector_size(16)));
typedef int i4 __attribute__((vector_size(16)));
typedef unsigned short h4 __attribute__((vector_size(8)));
f4 wide(h4 h, float x) { f4 v = (f4)(__builtin_convertvector(h, i4) << 16); return v > x ? x - f4{} : v; }
"""
GET_COMPILER = "Install g++ or clang++, or set CXX to one"

MIN_NVCC = (12, 8)  # the first with sm_100 and sm_120
ARCHS = "80;86;89;90;100+PTX;120"  # the PTX is for GPUs newer than the list
MAX_REGISTERS = 128  # per thread: at least 512 threads per multiprocessor
CUDA_FLAGS = ("-O3", "-std=c++17", "--threads", "1", "--compress-mode=size", "-Xptxas", "-v")
# so that it depends on libc only
CUDA_HOST_FLAGS = "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-threadsafe-statics"
GET_NVCC = "Install a CUDA toolkit and set CUDA_HOME, or run pip install 'moe-runtime[nvcc]'"
DEFAULT_NVCC = Path("/usr/local/cuda/bin/nvcc")
LIBRARY_DIRS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
SPILLS = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"


class BuildError(RuntimeError):
    """A build failure: what is missing, or the compiler's output."""


class Toolkit(NamedTuple):
    """An nvcc, its version and the folder of its static runtime."""

    nvcc: Path
    version: tuple[int, int]
    library_dir: Path


class Usage(NamedTuple):
    """What ptxas reports for one kernel on one architecture, in bytes except for the registers."""

    kernel: str
    arch: str
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0


def csrc_dir(kind: str) -> Path:
    """Return the folder of the "cpu" or "cuda" sources: moe_runtime/_csrc in an installed wheel,
    csrc in a checkout.
    """
    package = Path(__file__).resolve().parents[1]
    below = "cpu" if kind == "cpu" else "."
    if (package / "_csrc" / below).is_dir():
        return package / "_csrc" / below
    return package.parent / "csrc" / below


def cache_dir(kind: str) -> Path:
    """Return moe_runtime/cpu or cuda in `cache_home`. Raises BuildError if there is no home."""
    if (home := cache_home()) is None:
        what = f"This user has no home folder (HOME is {os.environ.get('HOME')!r})"
        raise BuildError(f"{what}. Set XDG_CACHE_HOME to the full path of a writable folder")
    return home / "moe_runtime" / kind


def library_path(kind: str, csrc: Path | None = None) -> Path:
    """Return where the build command writes the library of these sources for this machine."""
    name = source_hash(kind, csrc or csrc_dir(kind)) + (
        f"-{platform.machine()}" if kind == "cpu" else ""
    )
    return cache_dir(kind) / name / NAMES[kind]


def source_hash(kind: str, csrc: Path) -> str:
    """Return a hash (16 hex digits) of everything that the compiler reads from `csrc`."""
    digest = hashlib.sha256()
    for path in sorted(path for path in csrc.iterdir() if path.suffix in SUFFIXES[kind]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_sources(kind: str, csrc: Path) -> list[Path]:
    """Return the files to compile. Raises BuildError if there are none."""
    sources = sorted(csrc.glob("*" + SUFFIXES[kind][0]))
    if not sources:
        what = f"{csrc} contains no *{SUFFIXES[kind][0]} file"
        raise BuildError(f"{what}. Pass the sources of a checkout, an sdist or an installed wheel")
    return sources


def find_compiler() -> tuple[list[str], str]:
    """Return the command and the version of $CXX, else g++, else clang++. Raises BuildError if it
    is missing.
    """
    asked = shlex.split(os.environ.get("CXX") or "")
    for command in [asked] if asked else [["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command, _run([*command, "--version"]).splitlines()[0].strip()
    if asked:
        missing = f"The compiler of CXX, {asked[0]!r}, was not found"
    else:
        missing = "Neither g++ nor clang++ was found"
    raise BuildError(f"{missing}. {GET_COMPILER}")


def check_cpu(csrc: Path) -> tuple[list[str], str]:
    """Return the compiler that a build would use and its version. Raises BuildError if there is
    none or it is too old.
    """
    find_sources("cpu", csrc)
    compiler, version = find_compiler()
    if not _accepts(compiler):
        raise BuildError(
            f"The compiler {version} is too old, as g++ 9 or a recent clang++ is required. "
            f"{GET_COMPILER}"
        )
    return compiler, version


def _accepts(compiler: list[str], variant: str | None = None) -> bool:
    """Return whether the compiler and its assembler make what the CPU sources need, for one variant
    or for any processor.
    """
    flags = ()
    source = PROBE
    if variant is not None:
        flags = X86_SETS[variant]
        source = f"#include <immintrin.h>\n{PROBE}{INSTRUCTIONS[variant]}\n"
    with tempfile.TemporaryDirectory() as folder:
        command = [*compiler, *CPU_FLAGS, *flags, "-x", "c++", "-c", "-o", f"{folder}/probe.o", "-"]
        return subprocess.run(command, input=source, text=True, capture_output=True).returncode == 0


class CpuBuild(NamedTuple):
    """What a build of the CPU library did."""

    compiled: bool  # False: the library was up to date
    left_out: dict[str, str]  # variants that the compiler could not make, with its first line


def build_cpu(out: Path, *, csrc: Path | None = None, force: bool = False) -> CpuBuild:
    """Compile `csrc` into the library `out`, test it on this processor in a child process, and put
    it in place atomically.

    An existing library of the same sources and compiler is kept. Raises BuildError if something is
    missing or fails; a library that fails its self-test is not installed.
    """
    csrc = csrc or csrc_dir("cpu")
    compiler, version = check_cpu(csrc)
    x86 = X86_SETS if platform.machine() == "x86_64" else {}
    sets = {"generic": ()} | {
        name: flags for name, flags in x86.items() if _accepts(compiler, name)
    }
    sources = source_hash("cpu", csrc)
    identity = hashlib.sha256(json.dumps([sources, version, list(sets)]).encode()).hexdigest()[:16]
    # read from the library itself, so that no second file can disagree
    if (
        not force
        and out.is_file()
        and not distrust(out, out.stat())
        and identity.encode() in out.read_bytes()
    ):
        if wrong := selftest.ensure(out):
            raise BuildError(
                f"{out} is not used, because {wrong}. Experts run in PyTorch on the CPU"
            )
        return CpuBuild(False, {})

    def check(made: Path) -> None:
        if wrong := selftest.ensure(made):
            raise BuildError(
                f"{out} is not installed, because {wrong}. Experts run in PyTorch on the CPU"
            )

    left_out: dict[str, str] = {}
    info = {"sources": sources, "compiler": version, "identity": identity}
    with _link(out, compiler, "cpu", check) as (tmp, objects):
        objects += compile_cpu(tmp, csrc, compiler, sets, left_out, info)
    return CpuBuild(True, left_out)


def compile_cpu(
    folder: Path,
    csrc: Path,
    compiler: list[str],
    sets: dict[str, tuple[str, ...]],
    left_out: dict[str, str],
    info: dict,
) -> list[Path]:
    """Compile the sources for each of `sets` into objects in `folder`; return those to link.

    A set other than generic that does not compile is left out and added to `left_out` with the
    compiler's first line.
    """
    sources = find_sources("cpu", csrc)

    def compile_one(source: Path, name: str, flags: tuple) -> Path | BuildError:
        made = folder / f"{name}.o"
        try:
            _run([*compiler, *CPU_FLAGS, *flags, "-c", source, "-o", made])
        except BuildError as error:
            return error
        return made

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = {
            name: pool.submit(
                compile_one, csrc / "kernels.cpp", name, (*flags, f"-DMOERT_SET={name}")
            )
            for name, flags in sets.items()
        }
        made = {name: job.result() for name, job in jobs.items()}
    for name, result in made.items():
        if isinstance(result, BuildError):
            if name == "generic":
                raise result
            left_out[name] = str(result).partition("\n")[2].partition("\n")[0]
    objects = {name: result for name, result in made.items() if name not in left_out}
    stamp = folder / "stamp.h"
    stamp.write_text(
        f"#define MOERT_BUILD_INFO {json.dumps(json.dumps(info | {'sets': list(objects)}))}\n"
    )
    flags = ("-include", stamp, *(f"-DMOERT_WITH_{name}" for name in objects))
    for source in sources:
        if source.name != "kernels.cpp":
            result = compile_one(source, source.stem, flags)
            if isinstance(result, BuildError):
                raise result
            objects[source.stem] = result
    return list(objects.values())


@contextlib.contextmanager
def _link(
    out: Path, compiler: list[str], kind: str, check: Callable[[Path], None] | None = None
) -> Iterator[tuple[Path, list]]:
    """Yield a temporary folder and a list to fill with objects and options; link them into `out`.

    The library goes into place only after `check`, which raises an error for one that must not be
    used.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".build-") as name:
        tmp = Path(name)
        objects = []
        yield tmp, objects
        made = tmp / out.name
        exports = tmp / "exports.map"
        exports.write_text(
            f"{{ global: {'moert_cpu' if kind == 'cpu' else 'moert'}_*; local: *; }};\n"
        )
        _run(
            [
                *compiler,
                "-shared",
                "-s",
                "-o",
                made,
                *objects,
                f"-Wl,--version-script={exports}",
                "-Wl,-z,defs",
                "-Wl,--as-needed",
                f"-Wl,-soname,{NAMES[kind]}",
            ]
        )
        made.chmod(0o755)  # not writable by others, whatever the umask
        if check is not None:
            check(made)
        os.replace(made, out)


def find_toolkit() -> Toolkit:
    """Return the toolkit of CUDA_HOME or CUDA_PATH if set, else the first nvcc of PATH,
    /usr/local/cuda or pip.

    Raises BuildError if there is none, or if it is too old or incomplete.
    """
    named = next((name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)), None)
    if named:
        found = [Path(os.environ[named]) / "bin" / "nvcc"]
    else:
        found = [shutil.which("nvcc"), DEFAULT_NVCC]
        for root in dict.fromkeys([*sys.path, *site.getsitepackages(), site.getusersitepackages()]):
            found += sorted(Path(root or ".").glob("nvidia/cu1[2-9]/bin/nvcc"), reverse=True)
    nvcc = next((Path(path) for path in found if path and Path(path).is_file()), None)
    if nvcc is None:
        where = "nvcc was not found in PATH, /usr/local/cuda and pip's nvidia packages"
        where = f"{named} is {os.environ[named]}, which has no bin/nvcc" if named else where
        raise BuildError(f"{where}. {GET_NVCC}")
    release = re.search(r"release (\d+)\.(\d+)", _run([nvcc, "--version"]))
    version = (int(release[1]), int(release[2])) if release else (0, 0)
    if version < MIN_NVCC:
        text, least = (".".join(map(str, numbers)) for numbers in (version, MIN_NVCC))
        raise BuildError(
            f"nvcc {least} or newer is required, but {nvcc} is version {text}. {GET_NVCC}"
        )
    # ask nvcc where its toolkit is, as the one in PATH may be a script or a link
    plan = _run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull])
    top = re.search(r"^#\$ TOP=(.*)$", plan, re.M)
    home = Path(top[1]).resolve() if top else nvcc.resolve().parents[1]
    for folder in LIBRARY_DIRS:
        if (home / folder / "libcudart_static.a").is_file():
            return Toolkit(nvcc, version, home / folder)
    raise BuildError(
        f"libcudart_static.a was not found in {home}, so the toolkit is incomplete. {GET_NVCC}"
    )


def architectures(spec: str, toolkit: Toolkit) -> tuple[list[str], list[str]]:
    """Return nvcc's flags, and the names of what they make (sm_90, compute_100), for `spec` such as
    80;90;100+PTX.

    Machine code comes from the PTX of the first plain architecture in the list if that is older:
    the kernels use nothing newer, and the passes before ptxas take half of the time. Raises
    BuildError for an architecture that nvcc does not know.
    """
    known = [
        name.removeprefix("compute_") for name in _run([toolkit.nvcc, "--list-gpu-arch"]).split()
    ]
    items = list(filter(None, re.split(r"[;,\s]+", spec)))
    matches = [re.fullmatch(r"(?:sm_)?((\d+)[af]?)(\+PTX)?", item) for item in items]
    if not items or not all(match and match[2] in known for match in matches):
        known = f"with architectures that {toolkit.nvcc} supports ({', '.join(known)})"
        raise BuildError(f"architectures must be a list such as {ARCHS} {known}, but got {spec!r}")
    flags = []
    names = []
    plain = None
    for match in matches:
        number, _, plus = match.groups()
        virtual = number
        if number.isdigit() and not plus:
            plain = plain or number
            virtual = min(plain, number, key=int)
        for name in [f"sm_{number}"] + [f"compute_{number}"] * bool(plus):
            flags += ["-gencode", f"arch=compute_{virtual},code={name}"]
            names.append(name)
    return flags, names


def check_cuda(
    csrc: Path, archs: str = ARCHS
) -> tuple[list[Path], Toolkit, list[str], list[str], list[str]]:
    """Return what a build needs: sources, toolkit, linker, nvcc's flags, names of the
    architectures. Compiles nothing.
    """
    sources = find_sources("cuda", csrc)
    toolkit = find_toolkit()
    return sources, toolkit, find_compiler()[0], *architectures(archs, toolkit)


def build_cuda(
    out: Path, *, csrc: Path | None = None, cache: Path | None = None, archs: str = ARCHS
) -> list[Usage]:
    """Compile `csrc` for `archs` into the library `out`, written atomically; return what ptxas
    reports.

    `cache` holds the objects by the hash of all their inputs. Raises BuildError if something is
    missing or does not compile.
    """
    csrc = csrc or csrc_dir("cuda")
    flags = [*CUDA_FLAGS, "-Xcompiler", CUDA_HOST_FLAGS]
    sources, toolkit, compiler, gencode, names = check_cuda(csrc, archs)
    identity = {
        "sources": source_hash("cuda", csrc),
        "nvcc": ".".join(map(str, toolkit.version)),
        "archs": names,
    }
    cache = cache or own_folder(cache_dir("cuda") / "objects")
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time
        workers = min(len(os.sched_getaffinity(0)), len(sources))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            # info.cu has no kernel, so one architecture is enough
            targets = [gencode[:2] if path.stem == "info" else gencode for path in sources]
            jobs = [
                pool.submit(_compile, toolkit, flags + t, p, identity, cache)
                for p, t in zip(sources, targets)
            ]
            made, reports = zip(*(job.result() for job in jobs))
        prune(cache)
        with _link(out, compiler, "cuda") as (_, objects):
            # the runtime is linked statically and hidden, as torch brings one that may be of
            # another version
            objects += [
                *made,
                "-L",
                toolkit.library_dir,
                "-lcudart_static",
                "-ldl",
                "-lrt",
                "-lpthread",
            ]
    return [usage for report in reports for usage in report]


def _compile(
    toolkit: Toolkit, flags: list, source: Path, identity: dict, cache: Path
) -> tuple[Path, list[Usage]]:
    """Return the object of one source, from `cache` if it is there, and ptxas' report of it."""
    # a header instead of -D, as nvcc runs its steps through a shell, which would remove the quotes
    stamp = (
        f"#define MOERT_BUILD_INFO {json.dumps(json.dumps(identity))}\n"
        if source.stem == "info"
        else ""
    )
    headers = [path for path in sorted(source.parent.iterdir()) if path.suffix in (".cuh", ".h")]
    digest = hashlib.sha256(repr((flags, stamp, toolkit.version)).encode())
    for path in [source, *headers]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    made = cache / f"{source.stem}-{digest.hexdigest()[:24]}.o"
    report = made.with_suffix(".ptxas")
    if not (made.exists() and report.exists()) or distrust(made, made.stat()):
        with tempfile.TemporaryDirectory(dir=cache) as tmp:
            include = Path(tmp) / "stamp.h"
            fresh = Path(tmp) / made.name
            include.write_text(stamp)
            printed = _run(
                [
                    toolkit.nvcc,
                    *flags,
                    "-include",
                    include,
                    "-I",
                    source.parent,
                    "-c",
                    source,
                    "-o",
                    fresh,
                ]
            )
            (Path(tmp) / report.name).write_text(printed)
            fresh.chmod(0o644)
            os.replace(Path(tmp) / report.name, report)
            os.replace(fresh, made)
    for path in (made, report):
        path.touch()  # so that its age is the time since its last use
    return made, read_ptxas(report.read_text())


def prune(folder: Path) -> None:
    """Delete objects, libraries of other sources, and marks of tested libraries, older than
    MAX_AGE_DAYS.

    A build touches what it uses; a library whose mark is gone is tested again.
    """
    oldest = time.time() - MAX_AGE_DAYS * 86400
    for mark in folder.glob("tested/*"):
        if mark.stat().st_mtime < oldest:
            mark.unlink()
    for path in folder.iterdir():
        is_library = (
            re.fullmatch(r"[0-9a-f]{16}-\w+", path.name) and (path / NAMES["cpu"]).is_file()
        )
        if (is_library or path.suffix in (".o", ".ptxas", ".so")) and path.stat().st_mtime < oldest:
            shutil.rmtree(path, ignore_errors=True) if is_library else path.unlink()


def read_ptxas(text: str) -> list[Usage]:
    """Parse the output of `ptxas -v` into one entry per kernel and architecture."""
    found: list[Usage] = []
    for line in text.splitlines():
        if kernel := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            found.append(Usage(kernel[1], kernel[2]))
        elif found and (spills := re.search(SPILLS, line)):
            stack, stores, loads = map(int, spills.groups())
            found[-1] = found[-1]._replace(stack=stack, spill_stores=stores, spill_loads=loads)
        elif found and (used := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            found[-1] = found[-1]._replace(
                registers=int(used[1]), shared=int(shared[1]) if shared else 0
            )
    return found


def complaints(usages: list[Usage], max_registers: int = MAX_REGISTERS) -> list[str]:
    """Return a line per kernel that spills, has a stack frame or uses more than `max_registers`
    registers.
    """
    bad = []
    for usage in usages:
        name = f"{usage.kernel} on {usage.arch}"
        spilled = usage.spill_stores + usage.spill_loads
        if spilled or usage.stack:
            bad.append(f"{name} spills {spilled} bytes, stack frame {usage.stack}; expected none")
        if usage.registers > max_registers:
            bad.append(f"{name} uses {usage.registers} registers; expected at most {max_registers}")
    return bad


def _run(command: list) -> str:
    """Return the output of the command; raises a BuildError with the output if it fails."""
    command = [str(part) for part in command]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run ({error.strerror}). Reinstall it") from error
    if done.returncode:
        raise BuildError(
            f"{shlex.join(command)} failed with exit code {done.returncode}:\n{done.stdout}"
        )
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Build for this machine and print the library's path; return 1 if a kernel exceeds a limit, 2
    if nothing was built.
    """
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.native.build", description=__doc__.splitlines()[0]
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, what in (("cpu", "csrc/cpu with g++ or clang++"), ("cuda", "csrc/ with nvcc")):
        options = kinds.add_parser(
            kind, help=what, description=f"Compile {what} into {NAMES[kind]}."
        )
        place = (
            f"moe_runtime/{kind}/<hash of the "
            f"sources>{f'-{platform.machine()}' * (kind == 'cpu')}/{NAMES[kind]}"
        )
        options.add_argument(
            "--out", type=Path, help=f"default: {place} in $XDG_CACHE_HOME or ~/.cache"
        )
        options.add_argument(
            "--csrc", type=Path, help="folder of the sources (default: those of this package)"
        )
        if kind == "cpu":
            options.add_argument(
                "--force", action="store_true", help="build even if the library is up to date"
            )
            continue
        options.add_argument(
            "--archs",
            default=ARCHS,
            help="default: %(default)s; 90 alone takes a fifth of the time",
        )
        options.add_argument(
            "--max-registers",
            type=int,
            default=MAX_REGISTERS,
            help="limit per thread (default: %(default)s)",
        )
        options.add_argument(
            "--report", action="store_true", help="print the report of ptxas for each kernel"
        )
    asked = parser.parse_args(arguments)
    out = asked.out
    try:
        find_sources(asked.kind, asked.csrc or csrc_dir(asked.kind))
        out = out or own_folder(library_path(asked.kind, asked.csrc).parent) / NAMES[asked.kind]
        if asked.kind == "cpu":
            made = build_cpu(out, csrc=asked.csrc, force=asked.force)
            if asked.out is None:
                os.utime(out.parent)  # used now
                prune(out.parent.parent)
            for name, why in made.left_out.items():
                print(
                    f"warning: the compiler cannot build the variant {name}, which is left out: "
                    f"{why}",
                    file=sys.stderr,
                )
            print(
                f"{out}: {'built' if made.compiled else 'up to date, built'} by "
                f"{find_compiler()[1]}"
            )
            return 0
        usages = build_cuda(out, csrc=asked.csrc, archs=asked.archs)
    except (BuildError, OSError, ValueError) as error:
        if isinstance(error, OSError):
            place = error.filename2 or error.filename or out or asked.csrc
            remedy = "Set XDG_CACHE_HOME or --out to a writable path"
            error = f"{place} cannot be read or written ({error.strerror}). {remedy}"
        print(f"error: {error}", file=sys.stderr)
        return 2
    most = max(
        usages, key=lambda usage: usage.registers, default=Usage("no kernel", "no architecture")
    )
    print(
        f"{out}: {len(usages)} kernel images, at most {most.registers} registers ({most.kernel}, "
        f"{most.arch})"
    )
    for u in usages if asked.report else ():
        spilled = u.spill_stores + u.spill_loads
        print(
            f"{u.registers:4d} registers {u.shared:6d} bytes shared {spilled:5d} spilled "
            f"{u.arch:8s}{u.kernel}"
        )
    for line in (bad := complaints(usages, asked.max_registers)):
        print(f"error: {line}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
