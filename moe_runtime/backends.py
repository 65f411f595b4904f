"""Choose the implementation that runs an op, and explain why another one cannot.

"torch" (any device), "triton" (kernels/), "cuda" (csrc/) or "cpp" (csrc/cpu, on a CPU).
"""

import functools
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from moe_runtime.config import check_choice
from moe_runtime.native.library import cpp, cuda

Function = TypeVar("Function", bound=Callable)

BACKENDS = ("torch", "triton", "cuda", "cpp")
AT_RUN_TIME = "auto"  # what an exported graph holds: its op chooses where it runs
MIN_CAPABILITY = (8, 0)

# every op has a "torch" implementation; these have a hand-written kernel as well
OPS = (
    "route",
    "dispatch",
    "grouped_gemm",
    "combine",
    "moe_mlp",
    "frozen_mlp",
    "merge_experts",
    "lora_mlp",
    "gram",
    "dare_merge",
    "fused_cross_entropy",
)
TRITON_OPS = OPS
CUDA_OPS = ("route", "dispatch", "combine", "merge_experts")
CPP_OPS = ("moe_mlp", "frozen_mlp", "merge_experts", "lora_mlp")
KERNELS = {"torch": OPS, "triton": TRITON_OPS, "cuda": CUDA_OPS, "cpp": CPP_OPS}

# where "cuda" was measured to be faster than "triton" and is therefore the default: entries of op,
# device, date, torch, triton and times_faster at the worst size; written by `python -m
# moe_runtime.bench.report --cuda-table`
CUDA_TABLE = Path(__file__).parent / "native" / "cuda_table.json"


# Triton's interpreter computes on bfloat16's bits as integers; set to True by code that patches it,
# as the test suite does
interpreter_knows_bfloat16 = False

# cached: querying it inside a compiled function would break the graph
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton runs its kernels in the interpreter (TRITON_INTERPRET=1), on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def constant_in_graphs(function: Function) -> Function:
    """Make torch.compile call `function` while it traces, instead of breaking the graph.

    This sets the attribute of torch.compiler.assume_constant_result, which would import the
    compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def why_not(backend: str, op: str, device: torch.device) -> str | None:
    """Return why `backend` cannot run `op` on `device`, or None if it can."""
    if backend == "torch":
        return None
    if op not in KERNELS[backend]:
        return f"{op} has no {backend} kernel"
    if backend == "cpp":
        return cpp.why_not(device)
    if backend == "cuda" and device.type in ("cpu", "cuda"):
        reason = cuda.why_not(device)
        if reason is not None or device.type == "cpu":
            return reason
    if backend == "triton":
        if not _TRITON_INSTALLED:
            return "triton is not installed"
        if device.type == "cpu":
            if interpreted():
                return None
            return "the tensor is on the CPU. Set TRITON_INTERPRET=1 to interpret the kernels"
    if device.type != "cuda":
        return f"the tensor is on {device.type}, not on cuda"
    if torch.version.hip:
        return "the GPU is an AMD one, and the launch configs are for NVIDIA GPUs only"
    major, minor = _capability(device)
    if (major, minor) < MIN_CAPABILITY:
        least = "sm_{}{}".format(*MIN_CAPABILITY)
        return f"the GPU is sm_{major}{minor}, but {least} or newer is required"
    return None


@functools.cache
def measured_faster() -> frozenset[tuple[str, str]]:
    """Return the (op, device name) pairs listed in CUDA_TABLE."""
    rows = json.loads(CUDA_TABLE.read_text())["measured"]
    return frozenset((row["op"], row["device"]) for row in rows)


@constant_in_graphs
def _cuda_is_faster(op: str, device: torch.device) -> bool:
    table = measured_faster()
    return bool(table) and (op, torch.cuda.get_device_name(device)) in table


def _default(op: str, x: Tensor, cuda_fits: bool) -> str:
    """Return the fastest backend of `op` that the device supports."""
    if not x.is_cuda:
        if op in CPP_OPS and x.dtype in cpp.DTYPES and why_not("cpp", op, x.device) is None:
            return "cpp"
        return "torch"
    # dispatch accepts every integer dtype
    cuda_fits = cuda_fits and (op == "dispatch" or x.dtype in cuda.DTYPES)
    if cuda_fits and _cuda_is_faster(op, x.device) and why_not("cuda", op, x.device) is None:
        return "cuda"
    if why_not("triton", op, x.device) is None:
        return "triton"
    return "torch"


@constant_in_graphs  # torch.compile would evaluate is_exporting() to True
def exporting() -> bool:
    """Return whether a graph is being exported, which names no backend and has no backward pass."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


# the experts implementation for exports to runtimes that do not know our ops; set by
# hf.dropin.experts
foreign_experts: str | None = None


@constant_in_graphs
def portable() -> str | None:
    """Return the experts implementation for a foreign runtime, or None if torch runs the graph.

    It is "batched_mm" in torch.onnx.export. For a foreign runtime the ops trace their equations in
    plain torch, every expert on every token.
    """
    if not exporting():
        return None
    if torch.onnx.is_in_onnx_export():
        return "batched_mm"
    return foreign_experts


def pick(op: str, x: Tensor, backend: str | None = None, *, cuda_fits: bool = True) -> str:
    """Return what `choose` returns, or AT_RUN_TIME for an exported graph that names no backend."""
    if backend is None and exporting():
        return AT_RUN_TIME
    return choose(op, x, backend, cuda_fits)


def requested(backend: str | None = None) -> str | None:
    """Return the backend that an argument or else MOE_RUNTIME_BACKEND requests; None if neither."""
    if backend is not None:
        return backend
    return os.environ.get("MOE_RUNTIME_BACKEND") or None


def choose(op: str, x: Tensor, backend: str | None = None, cuda_fits: bool = True) -> str:
    """Return the backend that runs `op` on `x`.

    An explicit `backend` is used or refused (ValueError), never replaced. MOE_RUNTIME_BACKEND
    applies to the ops that have a kernel of that backend and leaves the others on their default.
    The default on a supported GPU is "triton", or "cuda" where CUDA_TABLE lists it as faster and
    `cuda_fits`, as it does not for every size of x; on a CPU it is "cpp" if its library is built
    and the op has a kernel there; else "torch".
    """
    if x.dtype == torch.float64:  # the kernels sum in float32
        if backend not in (None, "torch"):
            raise ValueError(
                f"backend {backend!r} cannot run {op}: the tensor is {x.dtype}. Use backend "
                "'torch' for float64"
            )
        return "torch"
    name = requested(backend)
    if name is None:
        return _default(op, x, cuda_fits)
    check_choice("backend", name, BACKENDS)
    if backend is None and op not in KERNELS[name]:
        return _default(op, x, cuda_fits)
    reason = why_not(name, op, x.device) or _dtype_problem(name, x)
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot run {op}: {reason}")
    return name


def _dtype_problem(backend: str, x: Tensor) -> str | None:
    """Return why `backend` cannot compute in the dtype of `x`, or None if it can."""
    if backend == "cpp" and x.dtype not in cpp.DTYPES:
        return f"the tensor is {x.dtype}, but float32 or bfloat16 is required"
    interpreted_bfloat16 = x.dtype == torch.bfloat16 and x.device.type == "cpu"
    if backend == "triton" and interpreted_bfloat16 and not interpreter_knows_bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly. Use float32"
    return None
