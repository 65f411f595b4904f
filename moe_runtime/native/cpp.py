"""The library of csrc/cpu, the backend "cpp": where it is, why it cannot be used, and what of this process it works with.

Its C interface is csrc/cpu/moert_cpu.h, from which the argument types are read: no second list of them exists. Nothing is
loaded before the first question, and no library is a normal state: the backend "torch" does without.
"""

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime.native import library as native
from moe_runtime.native.build_cpu import NAME, csrc_dir, library_path, source_hash

COMMAND = "python -m moe_runtime.native.build_cpu"
DTYPES = {torch.float32: 0, torch.bfloat16: 2}  # as in moert_cpu.h
ACTS = {name: number for number, name in enumerate(("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"))}
IDX_KINDS = {torch.uint8: 1, torch.int8: -1, torch.int16: -2, torch.int32: -4, torch.int64: -8}
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
NO_OPENMP = "none: torch has loaded no OpenMP runtime"


class Library(NamedTuple):
    """A loaded library; `info` says how it was built: sources, compiler, instruction sets."""

    handle: ctypes.CDLL
    path: Path
    info: dict
    openmp: str  # the runtime whose threads it works in, or why there is none

    @property
    def variant(self) -> str:
        """The instruction set in use."""
        return self.handle.moert_cpu_variant().decode()


def bind(path: Path, csrc: Path | None = None) -> Library:
    """Load the library at `path` with the types of moert_cpu.h. Raises OSError where it does not load or is another's."""
    csrc = csrc or csrc_dir()
    sources, command = source_hash(csrc), f"{COMMAND} --force"
    handle, info = native.bind(path, csrc / "moert_cpu.h", "moert_cpu", sources, command)
    return Library(handle, Path(path), info, _share_openmp(handle))


def _share_openmp(handle: ctypes.CDLL) -> str:
    """Give the library the OpenMP runtime that torch works in: two of them in one process fight for the cores."""
    for runtime in _runtimes():
        if all(hasattr(runtime, name) for name in OPENMP):
            addresses = [ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in OPENMP]
            handle.moert_cpu_use_openmp(*addresses)
            return _file_at(addresses[0].value)
    return NO_OPENMP


def _runtimes() -> Iterator[ctypes.CDLL]:
    """Yield where torch's OpenMP may be, the surest first."""
    torch_lib = Path(torch.__file__).parent / "lib"
    if os.environ.get("LD_PRELOAD"):
        yield ctypes.CDLL(None)  # what is preloaded comes before all else for torch too
    # a name looked up through torch is found in what torch itself is linked with; other packages may bring their own
    paths = [torch_lib / "libtorch_cpu.so"]
    names = {Path(line[5]) for line in _maps() if len(line) > 5}
    found = [path for path in names if re.match(r"lib(g|i)?omp\d*[-.]", path.name)]
    paths += sorted(found, key=lambda path: (not path.is_relative_to(torch_lib), path))
    for path in paths:
        with contextlib.suppress(OSError):
            yield ctypes.CDLL(str(path))


def _maps() -> list[list[str]]:
    """Return what is mapped into this process: the addresses, four columns, and the file if there is one."""
    maps = Path("/proc/self/maps")
    return [line.split(maxsplit=5) for line in maps.read_text().splitlines()] if maps.is_file() else []


def _file_at(address: int) -> str:
    """Return the file that is mapped at `address`."""
    for span, *rest in _maps():
        first, end = (int(word, 16) for word in span.split("-"))
        if first <= address < end and len(rest) == 5:
            return rest[4]
    return "of torch"


def places() -> list[Path]:
    """Return where the library may lie: in the wheel that brought it, and where the command puts it, if that is known."""
    return native.places(Path(__file__).resolve().parents[1] / "_lib" / NAME, library_path)


@functools.cache
def _find() -> Library | str:
    """Return the first library that loads, or why there is none."""
    missing = f"the CPU library is not built; {COMMAND} builds it"
    return native.find(places, bind, lambda: csrc_dir() / "moert_cpu.h", missing)


def library() -> Library:
    """Return the library in use. Raises ValueError that says why there is none."""
    found = _find()
    if isinstance(found, str):
        raise ValueError(found)
    return found


def why_not(device: torch.device) -> str | None:
    """Say why the library's kernels cannot run on `device`; None if they can."""
    if device.type != "cpu":
        return f"the tensor is on {device.type}; want cpu"
    found = _find()
    if isinstance(found, str):
        return found
    if found.openmp == NO_OPENMP and (threads := torch.get_num_threads()) > 1:
        says = f"the CPU library found no OpenMP runtime, torch's threads are {threads}"
        return f"{says}; want libgomp, or torch.set_num_threads(1)"
    return None


# what torch.compiler.assume_constant_result sets: loading a library would break the graph
why_not._dynamo_marked_constant = True


def describe() -> str:
    """Say which library there is and what it works with, or why there is none."""
    found = _find()
    if isinstance(found, str):
        return f"none: {found}"
    return f"{found.path}: {found.variant}, {found.info['compiler']}; OpenMP {found.openmp}"
