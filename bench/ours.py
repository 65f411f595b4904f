"""Which of our backends run an op here."""

import torch

from moe_runtime import backends
from moe_runtime.bench.machine import DEVICE, public
from moe_runtime.native.library import cpp


def runnable(op: str, dtype: torch.dtype) -> list[str]:
    """Return the backends that run `op` on this machine; not Triton's interpreter, whose time says nothing."""
    x = torch.empty(0, dtype=dtype, device=DEVICE)
    return [name for name in backends.BACKENDS if _runs(name, op, x)]


def default(op: str, dtype: torch.dtype) -> str:
    """Return the backend of `op` that a user gets without asking, of the CPU's library with the instruction set in use."""
    try:
        name = backends.pick(op, torch.empty(0, dtype=dtype, device=DEVICE))
    except ValueError as error:  # MOE_RUNTIME_BACKEND asks for one that does not run it
        return public(str(error))
    return f"{name} {cpp.library().variant}" if name == "cpp" else name


def others(op: str, dtype: torch.dtype) -> list[str]:
    """Return those of `runnable` that nobody gets without asking."""
    default = backends.pick(op, torch.empty(0, dtype=dtype, device=DEVICE))
    return [name for name in runnable(op, dtype) if name != default]


def _runs(name: str, op: str, x: torch.Tensor) -> bool:
    if name == "triton" and backends.interpreted():
        return False
    try:
        return backends.pick(op, x, name) == name
    except ValueError:
        return False
