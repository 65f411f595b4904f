"""Compile the libraries of csrc/: `python -m moe_runtime.native.build cpu|cuda`. Needs neither
torch nor a GPU.

cpu    csrc/cpu with g++ or clang++ into libmoert_cpu.so
cuda   csrc/ with nvcc into libmoert_cuda.so

The command builds into the user's cache, where `moe_runtime.native.library` searches. Only the
standard library is used.
"""

import argparse
import concurrent.futures
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_runtime.io.files import cache_home, own_folder, untrusted
from moe_runtime.native import selftest

NAMES = {"cpu": "libmoert_cpu.so", "cuda": "libmoert_cuda.so"}
SUFFIXES = {"cpu": (".cpp", ".h"), "cuda": (".cu", ".cuh", ".h")}

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
# the variants for which kernels.cpp is compiled; the library selects one when it is loaded
X86_SETS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _BF16,
    "amx": (*_BF16, "-mamx-tile", "-mamx-bf16"),
}
# what the CPU sources need beyond C++17: vector conversion and elementwise selection
PROBE = """
typedef float f4 __attribute__((vector_size(16)));
typedef int i4 __attribute__((vector_size(16)));
typedef unsigned short h4 __attribute__((vector_size(8)));
f4 wide(h4 h, float x) {
  f4 v = (f4)(__builtin_convertvector(h, i4) << 16);
  return v > x ? x - f4{} : v;
}
"""
GET_COMPILER = "Install g++ or clang++, or set CXX to one"

MIN_NVCC = (12, 8)  # the first with sm_100 and sm_120
ARCHS = "80;86;89;90;100+PTX;120"  # the PTX is for GPUs newer than the list
CUDA_FLAGS = ("-O3", "-std=c++17", "--threads", "1", "--compress-mode=size", "-Xptxas", "-v")
# so that it depends on libc only
CUDA_HOST_FLAGS = "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-threadsafe-statics"
GET_NVCC = "Install a CUDA toolkit and set CUDA_HOME, or run pip install 'moe-runtime[nvcc]'"
DEFAULT_NVCC = Path("/usr/local/cuda/bin/nvcc")
LIBRARY_DIRS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")


class BuildError(RuntimeError):
    """A build failure: what is missing, or the compiler's output."""


class Toolkit(NamedTuple):
    """An nvcc, its version and the folder of its static runtime."""

    nvcc: Path
    version: tuple[int, int]
    library_dir: Path


def csrc_dir(kind: str) -> Path:
    """Return the folder of the "cpu" or "cuda" sources, of an installed wheel or a checkout."""
    package = Path(__file__).resolve().parents[1]
    below = "cpu" if kind == "cpu" else "."
    if (package / "_csrc" / below).is_dir():
        return package / "_csrc" / below
    return package.parent / "csrc" / below


def cache_dir(kind: str) -> Path:
    """Return moe_runtime/cpu or cuda in `cache_home`. Raises BuildError if there is no home."""
    home = cache_home()
    if home is None:
        raise BuildError(
            f"This user has no home folder (HOME is {os.environ.get('HOME')!r}). Set "
            "XDG_CACHE_HOME to the full path of a writable folder"
        )
    return home / "moe_runtime" / kind


def library_path(kind: str, csrc: Path | None = None) -> Path:
    """Return where the build command writes the library of these sources for this machine."""
    name = source_hash(kind, csrc or csrc_dir(kind))
    if kind == "cpu":
        name += f"-{platform.machine()}"
    return cache_dir(kind) / name / NAMES[kind]


def source_hash(kind: str, csrc: Path) -> str:
    """Return a hash (16 hex digits) of everything that the compiler reads from `csrc`."""
    paths = [path for path in sorted(csrc.iterdir()) if path.suffix in SUFFIXES[kind]]
    return _hash_of(b"", paths)[:16]


def _hash_of(start: bytes, paths: Sequence[Path] = ()) -> str:
    """Return a hash of `start` and of the names and contents of files."""
    digest = hashlib.sha256(start)
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def find_sources(kind: str, csrc: Path) -> list[Path]:
    """Return the files to compile. Raises BuildError if there are none."""
    pattern = f"*{SUFFIXES[kind][0]}"
    sources = sorted(csrc.glob(pattern))
    if not sources:
        raise BuildError(
            f"{csrc} contains no {pattern} file. Pass the sources of a checkout, an sdist or an "
            "installed wheel"
        )
    return sources


def find_compiler() -> tuple[list[str], str]:
    """Return the command and the version of $CXX, else g++, else clang++.

    Raises BuildError if it is missing.
    """
    requested = shlex.split(os.environ.get("CXX") or "")
    commands = [["g++"], ["clang++"]]
    missing = "Neither g++ nor clang++ was found"
    if requested:
        commands = [requested]
        missing = f"The compiler of CXX, {requested[0]!r}, was not found"
    for command in commands:
        if shutil.which(command[0]):
            return command, _run([*command, "--version"]).splitlines()[0].strip()
    raise BuildError(f"{missing}. {GET_COMPILER}")


def check_cpu(csrc: Path) -> tuple[list[str], str]:
    """Return the compiler that a build would use and its version.

    Raises BuildError if there is none or it is too old.
    """
    find_sources("cpu", csrc)
    compiler, version = find_compiler()
    with tempfile.TemporaryDirectory() as folder:
        command = [*compiler, *CPU_FLAGS, "-x", "c++", "-c", "-o", f"{folder}/probe.o", "-"]
        probe = subprocess.run(command, input=PROBE, text=True, capture_output=True)
    if probe.returncode != 0:
        raise BuildError(
            f"The compiler {version} is too old, as g++ 9 or a recent clang++ is required. "
            f"{GET_COMPILER}"
        )
    return compiler, version


class CpuBuild(NamedTuple):
    """What a build of the CPU library did."""

    compiled: bool  # False: the library was up to date
    left_out: dict[str, str]  # variants that the compiler could not make, with its first line


def build_cpu(out: Path, *, csrc: Path | None = None, force: bool = False) -> CpuBuild:
    """Compile `csrc` into the library `out`, test it in a child process, and move it into place.

    An existing library of the same sources and compiler is kept.

    Args:
        out: The library's path.
        csrc: The folder of the sources; by default those of this package.
        force: Whether to build even if the library is up to date.

    Raises:
        BuildError: Something is missing or does not compile, or the library fails its self-test on
            this processor; then it is not installed.
    """
    csrc = csrc or csrc_dir("cpu")
    compiler, version = check_cpu(csrc)
    sets: dict[str, tuple[str, ...]] = {"generic": ()}
    if platform.machine() == "x86_64":
        sets |= X86_SETS
    sources = source_hash("cpu", csrc)
    identity = _hash_of(json.dumps([sources, version]).encode())[:16]
    if not force and out.is_file() and not untrusted(out) and identity.encode() in out.read_bytes():
        _check_library(out, f"{out} is not used")
        return CpuBuild(False, {})
    info = {"sources": sources, "compiler": version, "identity": identity}
    with _folder_beside(out) as name:
        folder = Path(name)
        objects, left_out = compile_cpu(folder, csrc, compiler, sets, info)
        made = _link(folder, compiler, "cpu", objects)
        _check_library(made, f"{out} is not installed")
        os.replace(made, out)
    return CpuBuild(True, left_out)


def _check_library(path: Path, consequence: str) -> None:
    if problem := selftest.ensure(path):
        raise BuildError(f"{consequence}, because {problem}. Experts run in PyTorch on the CPU")


def compile_cpu(
    folder: Path,
    csrc: Path,
    compiler: list[str],
    sets: dict[str, tuple[str, ...]],
    info: dict[str, Any],
) -> tuple[list[Path], dict[str, str]]:
    """Compile the sources for each of `sets` into `folder`; return the objects.

    A set other than generic that the compiler does not know is left out: a dict of such sets with
    the compiler's first line is also returned.
    """

    def compile_one(source: str, name: str, flags: list) -> Path:
        made = folder / f"{name}.o"
        _run([*compiler, *CPU_FLAGS, *flags, "-c", csrc / source, "-o", made])
        return made

    jobs = {}
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, flags in sets.items():
            options: list = [*flags, f"-DMOERT_SET={name}"]
            jobs[name] = pool.submit(compile_one, "kernels.cpp", name, options)
    objects: dict[str, Path] = {}
    left_out = {}
    for name, job in jobs.items():
        try:
            objects[name] = job.result()
        except BuildError as error:
            if name == "generic":
                raise
            left_out[name] = str(error).splitlines()[1]
    stamp = folder / "stamp.h"
    stamp.write_text(_stamp(info | {"sets": list(objects)}))
    options = ["-include", stamp, *(f"-DMOERT_WITH_{name}" for name in objects)]
    for source in find_sources("cpu", csrc):
        if source.name != "kernels.cpp":
            objects[source.stem] = compile_one(source.name, source.stem, options)
    return list(objects.values()), left_out


def _stamp(info: dict[str, Any]) -> str:
    """Return a header that defines what the library says about its build."""
    return f"#define MOERT_BUILD_INFO {json.dumps(json.dumps(info))}\n"


def _folder_beside(out: Path) -> tempfile.TemporaryDirectory:
    """Return a temporary folder from which a library can be renamed to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=out.parent, prefix=".build-")


def _link(folder: Path, compiler: list[str], kind: str, objects: list) -> Path:
    """Link objects and options into a library in `folder`, which exports its interface alone."""
    made = folder / NAMES[kind]
    exports = folder / "exports.map"
    prefix = "moert_cpu" if kind == "cpu" else "moert"
    exports.write_text(f"{{ global: {prefix}_*; local: *; }};\n")
    options = [f"-Wl,--version-script={exports}", "-Wl,-z,defs", "-Wl,--as-needed"]
    soname = f"-Wl,-soname,{NAMES[kind]}"
    _run([*compiler, "-shared", "-s", "-o", made, *objects, *options, soname])
    made.chmod(0o755)  # not writable by others, whatever the umask
    return made


def find_toolkit() -> Toolkit:
    """Return the toolkit of CUDA_HOME or CUDA_PATH, else of PATH, /usr/local/cuda or pip.

    Raises BuildError if there is none, or if it is too old or incomplete.
    """
    nvcc = _find_nvcc()
    release = re.search(r"release (\d+)\.(\d+)", _run([nvcc, "--version"]))
    version = (int(release[1]), int(release[2])) if release else (0, 0)
    if version < MIN_NVCC:
        least = "{}.{}".format(*MIN_NVCC)
        text = "{}.{}".format(*version)
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


def _find_nvcc() -> Path:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            nvcc = Path(home, "bin", "nvcc")
            if nvcc.is_file():
                return nvcc
            raise BuildError(f"{name} is {home}, which has no bin/nvcc. {GET_NVCC}")
    candidates = [Path(shutil.which("nvcc") or DEFAULT_NVCC), DEFAULT_NVCC]
    for root in dict.fromkeys([*sys.path, *site.getsitepackages(), site.getusersitepackages()]):
        candidates += sorted(Path(root or ".").glob("nvidia/cu1[2-9]/bin/nvcc"), reverse=True)
    for nvcc in candidates:
        if nvcc.is_file():
            return nvcc
    raise BuildError(
        f"nvcc was not found in PATH, /usr/local/cuda and pip's nvidia packages. {GET_NVCC}"
    )


def architectures(spec: str, toolkit: Toolkit) -> tuple[list[str], list[str]]:
    """Return nvcc's flags, and the names of what they make (sm_90, compute_100).

    Machine code comes from the PTX of the first plain architecture in the list if that is older:
    the kernels use nothing newer, and the passes before ptxas take half of the time.

    Args:
        spec: A list such as 80;90;100+PTX.
        toolkit: The toolkit that compiles.

    Raises:
        BuildError: The list is empty or has an architecture that nvcc does not know.
    """
    supported = _run([toolkit.nvcc, "--list-gpu-arch"]).replace("compute_", "").split()
    items = [item for item in re.split(r"[;,\s]+", spec) if item]
    flags = []
    names = []
    plain = None
    for item in items:
        match = re.fullmatch(r"(?:sm_)?((\d+)[af]?)(\+PTX)?", item)
        if not match or match[2] not in supported:
            items = []
            break
        number = virtual = match[1]
        outputs = [f"sm_{number}"]
        if match[3]:
            outputs.append(f"compute_{number}")
        elif number.isdigit():
            plain = plain or number
            virtual = min(plain, number, key=int)
        for name in outputs:
            flags += ["-gencode", f"arch=compute_{virtual},code={name}"]
        names += outputs
    if not items:
        raise BuildError(
            f"architectures must be a list such as {ARCHS} with architectures that {toolkit.nvcc} "
            f"supports ({', '.join(supported)}), but got {spec!r}"
        )
    return flags, names


class CudaPlan(NamedTuple):
    """What a build of the CUDA library needs."""

    sources: list[Path]
    toolkit: Toolkit
    compiler: list[str]  # which links
    flags: list[str]  # nvcc's, for the architectures
    archs: list[str]  # names of what they make


def check_cuda(csrc: Path, archs: str = ARCHS) -> CudaPlan:
    """Return what a build needs, or raise BuildError. Compiles nothing."""
    sources = find_sources("cuda", csrc)
    toolkit = find_toolkit()
    return CudaPlan(sources, toolkit, find_compiler()[0], *architectures(archs, toolkit))


def build_cuda(out: Path, *, csrc: Path | None = None, archs: str = ARCHS) -> str:
    """Compile `csrc` for `archs` into the library `out`, atomically.

    Args:
        out: The library's path.
        csrc: The folder of the sources; by default those of this package.
        archs: The architectures, such as 80;90;100+PTX.

    Returns:
        ptxas' report on each kernel and architecture: registers, spills and shared memory.

    Raises:
        BuildError: Something is missing or does not compile.
    """
    csrc = csrc or csrc_dir("cuda")
    plan = check_cuda(csrc, archs)
    identity = {
        "sources": source_hash("cuda", csrc),
        "nvcc": "{}.{}".format(*plan.toolkit.version),
        "archs": plan.archs,
    }
    cache = own_folder(cache_dir("cuda") / "objects")  # by the hash of all their inputs
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time
        workers = min(len(os.sched_getaffinity(0)), len(plan.sources))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(_compile, plan, p, identity, cache) for p in plan.sources]
        objects: list = [job.result() for job in jobs]
        report = "".join([made.with_suffix(".ptxas").read_text() for made in objects])
        # the runtime is linked statically and hidden, as torch's may be of another version
        objects += ["-L", plan.toolkit.library_dir, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        with _folder_beside(out) as folder:
            os.replace(_link(Path(folder), plan.compiler, "cuda", objects), out)
    return report


def _compile(plan: CudaPlan, source: Path, identity: dict[str, Any], cache: Path) -> Path:
    """Return the object of one source, from `cache` if possible, with ptxas' report beside it."""
    gencode = plan.flags
    stamp = ""
    if source.stem == "info":
        gencode = gencode[:2]  # it has no kernel, so one architecture is enough
        # a header instead of -D, as nvcc's shell would remove the quotes
        stamp = _stamp(identity)
    flags = [*CUDA_FLAGS, "-Xcompiler", CUDA_HOST_FLAGS, *gencode]
    headers = [path for path in sorted(source.parent.iterdir()) if path.suffix in (".cuh", ".h")]
    start = repr((flags, stamp, plan.toolkit.version)).encode()
    made = cache / f"{source.stem}-{_hash_of(start, [source, *headers])[:24]}.o"
    report = made.with_suffix(".ptxas")
    if not (made.exists() and report.exists()) or untrusted(made):
        with tempfile.TemporaryDirectory(dir=cache) as name:
            include = Path(name, "stamp.h")
            fresh = Path(name, made.name)
            include.write_text(stamp)
            options = ["-include", include, "-I", source.parent, "-c", source, "-o", fresh]
            printed = _run([plan.toolkit.nvcc, *flags, *options])
            fresh.with_suffix(".ptxas").write_text(printed)
            fresh.chmod(0o644)  # not writable by others, whatever the umask
            os.replace(fresh.with_suffix(".ptxas"), report)
            os.replace(fresh, made)
    return made


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.native.build",
        description="Compile the libraries of csrc/. Needs neither torch nor a GPU.",
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, what in (("cpu", "csrc/cpu with g++ or clang++"), ("cuda", "csrc/ with nvcc")):
        options = kinds.add_parser(
            kind, help=what, description=f"Compile {what} into {NAMES[kind]}."
        )
        options.add_argument(
            "--out", type=Path, help="default: below moe_runtime in $XDG_CACHE_HOME or ~/.cache"
        )
        options.add_argument(
            "--csrc", type=Path, help="folder of the sources (default: those of this package)"
        )
    kinds.choices["cpu"].add_argument(
        "--force", action="store_true", help="build even if the library is up to date"
    )
    cuda = kinds.choices["cuda"]
    cuda.add_argument(
        "--archs", default=ARCHS, help="default: %(default)s; 90 alone takes a fifth of the time"
    )
    cuda.add_argument("--report", action="store_true", help="print ptxas' report on each kernel")
    return parser


def _main_cpu(out: Path, options: argparse.Namespace) -> None:
    build = build_cpu(out, csrc=options.csrc, force=options.force)
    for name, reason in build.left_out.items():
        print(
            f"warning: the compiler cannot build the variant {name}, which is left out: {reason}",
            file=sys.stderr,
        )
    state = "built" if build.compiled else "up to date, built"
    print(f"{out}: {state} by {find_compiler()[1]}")


def main(arguments: list[str] | None = None) -> int:
    """Build for this machine and print the library's path; returns 2 if nothing was built."""
    options = _parser().parse_args(arguments)
    out = options.out
    try:
        find_sources(options.kind, options.csrc or csrc_dir(options.kind))
        if out is None:
            path = library_path(options.kind, options.csrc)
            out = own_folder(path.parent) / path.name
        if options.kind == "cpu":
            _main_cpu(out, options)
            return 0
        report = build_cuda(out, csrc=options.csrc, archs=options.archs)
        if options.report:
            print(report)
        print(f"{out}: built for {options.archs}")
        return 0
    except OSError as error:
        path = error.filename2 or error.filename or out or options.csrc
        problem = (
            f"{path} cannot be read or written ({error.strerror}). Set XDG_CACHE_HOME or --out to "
            "a writable path"
        )
    except (BuildError, ValueError) as error:
        problem = str(error)
    print(f"error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
