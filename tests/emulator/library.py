"""The emulator's C++ part: compiled once per text, and called through ctypes.

A tensor is used where it lies, so an address of PTX is an address of this process. The machine
knows which bytes the launch may touch, and refuses all others.
"""

import ctypes
import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime.native.build import cache_dir

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror")
MESSAGE = 4096  # bytes
ROOM = 16  # words of 64 bits


class EmulationError(AssertionError):
    """Something that a GPU would not do, or not always: the message says what and where."""


class TensorMap(ctypes.Structure):
    """A tensor's box for bulk copies; the innermost dimension is first."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("element_bytes", ctypes.c_int32),
        ("swizzle_bytes", ctypes.c_int32),
        ("fill_nan", ctypes.c_int32),
        ("sizes", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 5),
        ("box", ctypes.c_uint32 * 5),
    )


class _Region(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_int32),
        ("arrival", ctypes.c_int32),
        ("fenced", ctypes.c_int32),
        ("together", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("regions", ctypes.POINTER(_Region)),
        ("region_count", ctypes.c_int32),
        ("maps", ctypes.POINTER(TensorMap)),
        ("map_count", ctypes.c_int32),
        ("executed", ctypes.c_uint64),
    )


ARRIVALS = ("early", "late", "random")


class Schedule(NamedTuple):
    """When asynchronous instructions take effect, and the seed of all orders.

    `fenced`: whether a product that reads what cp.async wrote needs fence.proxy.async, as the ISA
    says.
    """

    arrival: str = "late"
    seed: int = 0
    fenced: bool = True


def _compile(source: Path, folder: Path) -> Path:
    target = folder / f"{source.stem}.o"
    subprocess.run(["g++", *FLAGS, "-c", source, "-o", target], check=True)
    return target


def build() -> Path:
    """Compile the library, unless a process has compiled the same text before; return its path."""
    sources = sorted(FOLDER.glob("*.cpp"))
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in [*sources, *sorted(FOLDER.glob("*.h"))]:
        digest.update(path.read_bytes())
    cache = cache_dir("emulator")
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"{digest.hexdigest()[:16]}.so"
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder, ThreadPoolExecutor(2) as pool:
                objects = list(pool.map(lambda path: _compile(path, Path(folder)), sources))
                fresh = Path(folder, "library.so")
                subprocess.run(["g++", "-shared", *objects, "-o", fresh], check=True)
                os.replace(fresh, library)
    return library


_loaded: list[ctypes.CDLL] = []


def load() -> ctypes.CDLL:
    """Return the library."""
    if not _loaded:
        library = ctypes.CDLL(str(build()))
        library.emulator_parse.restype = ctypes.c_void_p
        library.emulator_parse.argtypes = (
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_int,
        )
        library.emulator_parameters.argtypes = (ctypes.c_void_p,)
        library.emulator_run.argtypes = (
            ctypes.c_void_p,
            ctypes.POINTER(_Launch),
            ctypes.c_char_p,
            ctypes.c_int,
        )
        _loaded.append(library)
    return _loaded[0]


def region_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor, and the number of bytes up to its last element."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride()):
        last += (size - 1) * stride
    count = last + 1 if tensor.numel() else 0
    return tensor.data_ptr(), count * tensor.element_size()


class Program:
    """A kernel's PTX, parsed; EmulationError if it has an instruction that is not known."""

    def __init__(self, ptx: str):
        self.library = load()
        message = ctypes.create_string_buffer(MESSAGE)
        self.handle = self.library.emulator_parse(ptx.encode(), b"", message, MESSAGE)
        if not self.handle:
            raise EmulationError(message.value.decode())
        self.parameters = self.library.emulator_parameters(self.handle)

    def run(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        arguments: Sequence[int],
        tensors: Sequence[torch.Tensor],
        maps: Sequence[TensorMap] = (),
        schedule: Schedule | None = None,
    ) -> int:
        """Execute a launch and return the number of thread instructions.

        `arguments` has the bits of each parameter; of a tensor map its number in `maps`.
        """
        if len(arguments) != self.parameters:
            raise EmulationError(
                f"the kernel has {self.parameters} parameters, but got {len(arguments)}"
            )
        schedule = schedule or Schedule()
        regions = [_Region(*region_of(t)) for t in tensors]
        # each has the room of a tensor map
        values = (ctypes.c_uint64 * ROOM * len(arguments))()
        for place, bits in zip(values, arguments):
            place[0] = bits & 0xFFFFFFFFFFFFFFFF
        places = [ctypes.addressof(place) for place in values]
        launch = _Launch(
            grid=(ctypes.c_uint32 * 3)(*grid),
            block=(ctypes.c_uint32 * 3)(*block),
            shared_bytes=shared_bytes,
            arrival=ARRIVALS.index(schedule.arrival),
            fenced=schedule.fenced,
            seed=schedule.seed,
            arguments=(ctypes.c_void_p * len(places))(*places),
            regions=(_Region * len(regions))(*regions),
            region_count=len(regions),
            maps=(TensorMap * len(maps))(*maps),
            map_count=len(maps),
        )
        message = ctypes.create_string_buffer(MESSAGE)
        if self.library.emulator_run(self.handle, launch, message, MESSAGE):
            raise EmulationError(message.value.decode())
        return launch.executed
