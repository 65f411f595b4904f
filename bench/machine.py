"""Where benchmarks run: device, machine (described, not named), versions and commit."""

import contextlib
import functools
import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

import moe_runtime
from moe_runtime import backends
from moe_runtime.native.library import cpp

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROOT = Path(__file__).resolve().parents[1]  # of a clone
PACKAGES = ("torch", "triton", "transformers")


@functools.cache
def describe() -> dict[str, str]:
    """Return machine, driver, versions, commit and date."""
    if CUDA:
        name = torch.cuda.get_device_name()
    else:
        name = f"{_processor()} ({_instruction_set()}), {torch.get_num_threads()} threads"
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    if CUDA:
        driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    else:
        driver = "none"
    return {
        "machine": name,
        "driver": driver,
        **versions,
        "commit": commit(),
        "date": today(),
    }


def today() -> str:
    return time.strftime("%Y-%m-%d")


def commit() -> str:
    """Return $COMMIT, else the clone's commit, with `-dirty` if tracked files differ, or the
    version of an installed package.

    The variable is for copies of the files without .git.
    """
    if revision := os.environ.get("COMMIT"):
        return revision
    if (ROOT / ".git").exists() and (
        revision := _said("git", "describe", "--always", "--dirty", "--exclude=*")
    ):
        return revision
    return f"v{moe_runtime.__version__}"


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    except OSError:  # not installed
        return ""


def public(text: str) -> str:
    """Return a text without the user's paths, as results are published."""
    paths = {
        str(ROOT): ".",
        os.getcwd(): ".",
        sys.prefix: "PREFIX",
        os.path.expanduser("~"): "~",
    }
    for path in sorted(paths, key=len, reverse=True):
        if len(path) > 1:
            text = re.sub(
                re.escape(path) + r"(?![\w-])",
                paths[path],
                text,
            )
    return text


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _instruction_set() -> str:
    """Return the CPU library's variant, or without the library that of torch's kernels."""
    library = cpp.find()
    return torch.backends.cpu.get_cpu_capability() if isinstance(library, str) else library.variant


def version(package: str) -> str:
    """Return the version of an installed package, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


@functools.cache
def missing(package: str) -> str | None:
    """Return why a package, or one that it needs, cannot be imported; None if it can."""
    try:
        importlib.import_module(package)
    except Exception as error:  # importing a package may raise any exception
        return f"cannot be imported: {type(error).__name__}: {error}"
    return None


def free_memory() -> int:
    """Return the device's free bytes; for a CPU, those available without swapping."""
    if CUDA:
        return torch.cuda.mem_get_info()[0]
    with contextlib.suppress(OSError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if match:
            return int(match[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return normally distributed numbers on the device."""
    return torch.randn(size, dtype=dtype, device=DEVICE)


@contextlib.contextmanager
def fits():
    """Skip a benchmark, with a note, if it does not fit into the GPU's memory."""
    import pytest

    from moe_runtime.bench import clock

    try:
        yield
    except torch.OutOfMemoryError as error:
        pytest.skip(f"does not fit into memory: {clock.one_line(error)}")


def runnable(op: str, dtype: torch.dtype) -> list[str]:
    """Return the backends that run `op` here, except Triton's interpreter."""
    x = torch.empty(0, dtype=dtype, device=DEVICE)
    runnable = []
    for name in backends.BACKENDS:
        if _runs(name, op, x):
            runnable.append(name)
    return runnable


def default(op: str, dtype: torch.dtype) -> str:
    """Return the default backend of `op`; for the CPU library, with its instruction set."""
    try:
        name = backends.pick(op, torch.empty(0, dtype=dtype, device=DEVICE))
    except ValueError as error:  # MOE_RUNTIME_BACKEND is one that does not run it
        return public(str(error))
    return f"{name} {cpp.library().variant}" if name == "cpp" else name


def others(op: str, dtype: torch.dtype) -> list[str]:
    """Return the backends of `runnable` that are not the default."""
    default = backends.pick(op, torch.empty(0, dtype=dtype, device=DEVICE))
    others = []
    for name in runnable(op, dtype):
        if name != default:
            others.append(name)
    return others


def _runs(name: str, op: str, x: torch.Tensor) -> bool:
    if name == "triton" and backends.interpreted():
        return False
    try:
        return backends.pick(op, x, name) == name
    except ValueError:
        return False
