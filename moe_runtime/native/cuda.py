"""The library of csrc/'s kernels: where it is, why it cannot be used, and how a kernel of it is launched.

Its C interface is csrc/moert.h, from which the argument types are read: no second list of them exists. Nothing is loaded
before the first question, and no library is a normal state: the backends "triton" and "torch" do without.
"""

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime.native import library as native
from moe_runtime.native.build_cuda import NAME, csrc_dir, library_path, source_hash

COMMAND = "python -m moe_runtime.native.build_cuda"
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as in moert.h


class Library(NamedTuple):
    """A loaded library; `info` says how it was built: sources, nvcc, archs. The CPU emulator's has no archs."""

    handle: ctypes.CDLL
    path: Path
    info: dict

    @property
    def emulated(self) -> bool:
        """Whether its kernels run on the CPU, on CPU tensors."""
        return not self.info.get("archs")


def bind(path: Path, csrc: Path | None = None) -> Library:
    """Load the library at `path` with the types of csrc/moert.h. Raises OSError where it does not load or is another's."""
    csrc = csrc or csrc_dir()
    handle, info = native.bind(path, csrc / "moert.h", "moert", source_hash(csrc), COMMAND)
    return Library(handle, Path(path), info)


def places() -> list[Path]:
    """Return where the library may lie: in the wheel that brought it, and where the command puts it, if that is known."""
    return native.places(Path(__file__).resolve().parents[1] / "_lib" / NAME, library_path)


_using: Library | None = None


def use(library: Library | None) -> None:
    """Use `library`, one that `bind` loaded, from now on; None: the one that is found."""
    global _using
    _using = library


@functools.cache
def _find() -> Library | str:
    """Return the first library that loads, or why there is none."""
    missing = f"the CUDA library is not built; {COMMAND} builds it"
    return native.find(places, bind, lambda: csrc_dir() / "moert.h", missing)


def library() -> Library:
    """Return the library in use. Raises ValueError that says why there is none."""
    found = _using or _find()
    if isinstance(found, str):
        raise ValueError(found)
    return found


def why_not(device: torch.device) -> str | None:
    """Say why the library's kernels cannot run on `device`, the CPU or a CUDA GPU; None if they can."""
    found = _using or _find()
    emulated = isinstance(found, Library) and found.emulated
    if device.type == "cpu":
        return None if emulated else "the tensor is on the CPU; want cuda"
    if isinstance(found, str):
        return found
    if emulated:
        return "the CUDA library in use is the emulator's, for the CPU"
    major, minor = torch.cuda.get_device_capability(device)
    if not covers(found.info["archs"], major, minor):
        return f"{found.path} is for {', '.join(found.info['archs'])}; want sm_{major}{minor}; {COMMAND}"
    return None


def covers(archs: list[str], major: int, minor: int) -> bool:
    """Whether code for one of `archs` runs on a GPU of this compute capability: machine code of its major version, or PTX."""
    for arch in archs:
        kind, _, number = arch.partition("_")
        digits = number.rstrip("af")
        made = int(digits[:-1]), int(digits[-1])
        if number != digits:  # sm_90a runs on 9.0 alone
            fits = made == (major, minor)
        elif kind == "sm":
            fits = made[0] == major and made[1] <= minor
        else:
            fits = made <= (major, minor)
        if fits:
            return True
    return False


# what torch.compiler.assume_constant_result sets: loading a library would break the graph
why_not._dynamo_marked_constant = True


def describe() -> str:
    """Say which library there is and what is in it, or why there is none."""
    found = _using or _find()
    if isinstance(found, str):
        return f"none: {found}"
    driver, runtime, devices = (ctypes.c_int() for _ in range(3))
    code = found.handle.moert_probe(*map(ctypes.byref, (driver, runtime, devices)))
    state = f"; {error_string(found, code)}" if code else ""
    made = f"nvcc {found.info['nvcc']} for {', '.join(found.info['archs'])}" if found.info.get("archs") else "emulated"
    return f"{found.path}: {made}{state}"


def error_string(found: Library, code: int) -> str:
    """Return what the code of a launcher means."""
    return found.handle.moert_error_string(code).decode()


def launch(name: str, tensor: torch.Tensor, *args) -> None:
    """Call the launcher `name` on the current stream of `tensor`'s device, which becomes the current one for the call.

    `args` are all arguments but the last, the stream; tensors give their pointers. Raises RuntimeError for a code other than 0.
    """
    found = library()
    function = getattr(found.handle, name)
    values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
    if tensor.is_cuda:
        with torch.cuda.device_of(tensor):
            code = function(*values, torch.cuda.current_stream().cuda_stream)
    else:
        code = function(*values, None)
    if code:
        raise RuntimeError(f"{name} failed: {error_string(found, code)} ({code})")
