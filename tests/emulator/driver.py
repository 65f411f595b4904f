"""Triton's driver of a GPU that the emulator is: launches run compiled PTX on CPU tensors.

`install(90)` makes Triton's own JIT specialize, compile and launch as on a GPU of compute
capability 9.0; only its last step, ptxas and the CUDA driver, is replaced.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends import backends as triton_backends
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from moe_runtime import backends
from moe_runtime.io.files import read_json
from moe_runtime.kernels import tiles
from tests.emulator.library import EmulationError, Program, Schedule, TensorMap

SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
SWIZZLES = (0, 32, 64, 128)  # of CUtensorMapSwizzle
FLOATS = {"fp16": "e", "fp32": "f", "f32": "f", "fp64": "d"}  # struct's letters
MOST_SIZE = 2**32  # of a dimension of a tensor map
MOST_STRIDE = 2**40  # bytes
MOST_BOX = 256

# Triton 3.6 leaves the fence out of loops (triton#9610): wrong by the ISA, and seen on some GPUs
FENCED = not triton.__version__.startswith("3.6.")

EXECUTED = Path(__file__).with_name("executed.json")

schedule = Schedule(fenced=FENCED)  # of the launches that follow
edits: list[Callable[[str, str], str]] = []  # of each kernel's name and PTX, before it is parsed
launches: list[str] = []  # names of the kernels that ran
executed: set[str] = set()  # the same, with their modules
on_launch: list[Callable[[Callable[[], None]], Any]] = []  # get what runs a launch again


class Compiler(CUDABackend):
    """Stops at PTX."""

    def __init__(self, target: GPUTarget):
        super().__init__(target)
        self.binary_ext = "ptx"

    def add_stages(self, stages: dict, *args: Any) -> None:
        """List the stages up to PTX."""
        super().add_stages(stages, *args)
        del stages["cubin"]

    def hash(self) -> str:
        """Name a cache of its own: what stands there has no cubin."""
        return f"{super().hash()}-emulated"


def tensor_map(descriptor: Any, meta: dict) -> TensorMap:
    """Encode a tensor descriptor as cuTensorMapEncodeTiled would; EmulationError where it fails."""
    base = descriptor.base
    bytes_each = meta["elem_size"]
    sizes = [int(n) for n in descriptor.shape][::-1]
    strides = [int(n) * bytes_each for n in descriptor.strides][::-1]
    box = [int(n) for n in meta["block_size"]][::-1]
    swizzle = SWIZZLES[meta["swizzle"]]
    problems = []
    if base.data_ptr() % 16:
        problems.append(f"its address is {base.data_ptr():#x}, not a multiple of 16")
    if strides[0] != bytes_each:
        problems.append(f"its innermost stride is {strides[0]} bytes")
    for stride in strides[1:]:
        if stride % 16 or not 0 <= stride < MOST_STRIDE:
            problems.append(f"a stride is {stride} bytes, not a multiple of 16 below 2^40")
    for size in sizes:
        if not 0 < size <= MOST_SIZE:
            problems.append(f"a size is {size}")
    for length in box:
        if not 0 < length <= MOST_BOX:
            problems.append(f"a side of its box is {length}")
    inner = box[0] * bytes_each
    if inner % 16 or (swizzle and inner > swizzle):
        problems.append(f"its box has rows of {inner} bytes with a swizzle of {swizzle}")
    if meta.get("fp4_padded"):
        problems.append("it is of 4-bit elements")
    if problems:
        raise EmulationError(f"a tensor map that CUDA refuses: {'; '.join(problems)}")
    result = TensorMap(
        base=base.data_ptr(),
        rank=len(sizes),
        element_bytes=bytes_each,
        swizzle_bytes=swizzle,
        fill_nan=descriptor.padding == "nan",
    )
    for i, values in enumerate(zip(sizes, strides, box)):
        result.sizes[i], result.strides[i], result.box[i] = values
    return result


class Arguments:
    """What a launch passes, in the order of the kernel's parameters."""

    def __init__(self, maps: Sequence[dict]):
        self.bits: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self.maps: list[TensorMap] = []
        self.meta = list(maps)

    def add(self, kind: Any, value: Any) -> None:
        """Append an argument, or the members of a tuple, unless it is a constant."""
        if isinstance(kind, tuple):
            for each, member in zip(kind, value):
                self.add(each, member)
        elif kind == "constexpr":
            return
        elif kind.startswith("tensordesc"):
            self._add_descriptor(value)
        elif kind.startswith("*"):
            self._add_tensor(value)
        elif kind in FLOATS:
            code = FLOATS[kind]
            self.bits.append(int.from_bytes(struct.pack(f"<{code}", value), "little"))
        else:
            self.bits.append(int(value))

    def _add_tensor(self, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            self.bits.append(0)
            return
        self.bits.append(tensor.data_ptr())
        self.tensors.append(tensor)

    def _add_descriptor(self, descriptor: Any) -> None:
        self.tensors.append(descriptor.base)
        self.bits.append(len(self.maps))
        self.maps.append(tensor_map(descriptor, self.meta[len(self.maps)]))
        self.bits += [int(n) for n in descriptor.shape]
        self.bits += [int(n) for n in descriptor.strides]


class Launcher:
    """Passes a launch to the emulator."""

    def __init__(self, src: Any, metadata: Any):
        self.name = src.fn.__name__
        self.full_name = f"{src.fn.__module__.rpartition('.')[2]}.{self.name}"
        self.signature = tuple(src.signature.values())
        self.metadata = metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise EmulationError(f"{self.name} needs scratch memory, which is not emulated")
        if getattr(metadata, "num_ctas", 1) != 1:
            raise EmulationError(f"{self.name} needs clusters of blocks, which are not emulated")

    def __call__(self, x: int, y: int, z: int, stream: Any, program: Program, *rest: Any) -> None:
        """Run the kernel; `rest` has three values for profilers, two hooks, and the arguments."""
        arguments = Arguments(getattr(self.metadata, "tensordesc_meta", None) or ())
        for kind, value in zip(self.signature, rest[4:], strict=True):
            arguments.add(kind, value)
        missing = program.parameters - len(arguments.bits)  # scratch memory, of which there is none
        if not 0 <= missing <= 2:
            raise EmulationError(f"{self.name}: {missing} parameters are not known")
        arguments.bits += [0] * missing
        threads = 32 * self.metadata.num_warps
        launch = Launch(self.name, program, (x, y, z), threads, self.metadata.shared, arguments)
        for note in on_launch:
            note(launch.run)
        launch.run()
        executed.add(self.full_name)


class Launch(NamedTuple):
    """A kernel with its arguments, whose tensors stay alive."""

    name: str
    program: Program
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: Arguments

    def run(self) -> None:
        """Run it, again if it ran before."""
        launches.append(self.name)
        given = self.arguments
        block = (self.threads, 1, 1)
        self.program.run(
            self.grid, block, self.shared_bytes, given.bits, given.tensors, given.maps, schedule
        )


class Utilities:
    """The functions of CUDA's driver that Triton calls."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the sizes that Triton and our launch configs read."""
        return {
            "max_shared_mem": SHARED[self.arch],
            "multiprocessor_count": 4,  # persistent kernels take several tiles each
            "warpSize": 32,
            "max_num_regs": 65_536,
        }

    def load_binary(self, name: str, ptx: bytes, shared: int, device: int) -> tuple:
        """Return module, function, registers, spilled registers and threads."""
        text = ptx.decode()
        for edit in edits:
            text = edit(name, text)
        return None, Program(text), 0, 0, 1024


class Driver:
    """A GPU of compute capability arch / 10."""

    launcher_cls = Launcher

    def __init__(self, arch: int):
        self.arch = arch
        self.utils = Utilities(arch)

    def get_current_target(self) -> GPUTarget:
        """Return the GPU to compile for."""
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """Return the number of the only GPU."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Do nothing."""

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return where the tensors lie."""
        return torch.device("cpu")


def _choose(op: str, x: torch.Tensor, backend: str | None = None, cuda_fits: bool = True) -> str:
    has_kernel = op in backends.TRITON_OPS and x.dtype != torch.float64
    return backend or ("triton" if has_kernel else "torch")


def _record(path: Path, arch: int) -> None:
    """Add the kernels that were executed to a file, for docs/kernels.md."""
    known = read_json(path) if path.exists() else {}
    version = known.setdefault(triton.__version__, {})
    version[str(arch)] = sorted(executed.union(version.get(str(arch), ())))
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def install(arch: int) -> None:
    """Make this process run Triton's kernels on the emulator, as on a GPU of this capability.

    With MOE_RUNTIME_EXECUTED=1, the kernels that it executes are added to executed.json.
    """
    if "MOE_RUNTIME_EXECUTED" in os.environ:
        atexit.register(_record, EXECUTED, arch)
    nvidia = triton_backends["nvidia"]
    triton_backends["nvidia"] = dataclasses.replace(nvidia, compiler=Compiler)
    triton.runtime.driver.set_active(Driver(arch))
    why_not = backends.why_not
    backends.why_not = lambda backend, op, device: (
        None if backend == "triton" else why_not(backend, op, device)
    )
    backends.choose = _choose
    tiles._device = lambda device: (arch, "")


def forget() -> None:
    """Let every kernel be loaded again at its next launch."""
    for path, module in list(sys.modules.items()):
        if path.startswith("moe_runtime.kernels."):
            for value in vars(module).values():
                if isinstance(value, triton.JITFunction):
                    value.device_caches.clear()


@contextlib.contextmanager
def scheduled(arrival: str, seed: int = 0) -> Iterator[None]:
    """Run the launches of this block with another schedule."""
    global schedule
    before = schedule
    schedule = Schedule(arrival, seed, FENCED)
    try:
        yield
    finally:
        schedule = before
