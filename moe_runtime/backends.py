"""Choose the implementation that runs an op, and explain why another one cannot.

"torch" (any device), "triton" (kernels/), "cuda" (csrc/) or "cpp" (csrc/cpu, on a CPU).
"""

import functools
import importlib.util
import json
import os
from pathlib import Path

import torch
from torch import Tensor

from moe_runtime.config import check_choice
from moe_runtime.native.library import cpp, cuda

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
CPP_OPS = ("moe_mlp", "frozen_mlp", "merge_experts")
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


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


# the attribute that torch.compiler.assume_constant_result sets; calling that here would import the
# compiler. Without it the graph would break
_capability._dynamo_marked_constant = True


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
    capability = _capability(device)
    if capability < MIN_CAPABILITY:
        own, least = (f"sm_{major}{minor}" for major, minor in (capability, MIN_CAPABILITY))
        return f"the GPU is {own}, but {least} or newer is required"
    return None


@functools.cache
def measured_faster() -> frozenset[tuple[str, str]]:
    """Return the (op, device name) pairs listed in CUDA_TABLE."""
    return frozenset(
        (row["op"], row["device"]) for row in json.loads(CUDA_TABLE.read_text())["measured"]
    )


def _cuda_is_faster(op: str, device: torch.device) -> bool:
    table = measured_faster()
    return bool(table) and (op, torch.cuda.get_device_name(device)) in table


_cuda_is_faster._dynamo_marked_constant = True


def _default(op: str, x: Tensor, cuda_fits: bool) -> str:
    """Return the default backend of `op`: the fastest kernel that the device supports, else
    "torch".
    """
    if not x.is_cuda:
        fits = op in CPP_OPS and x.dtype in cpp.DTYPES
        return "cpp" if fits and why_not("cpp", op, x.device) is None else "torch"
    # dispatch accepts every integer dtype
    cuda_fits = cuda_fits and (op == "dispatch" or x.dtype in cuda.DTYPES)
    if cuda_fits and _cuda_is_faster(op, x.device) and why_not("cuda", op, x.device) is None:
        return "cuda"
    return "triton" if why_not("triton", op, x.device) is None else "torch"


def exporting() -> bool:
    """Return whether a graph is being exported: it then names no backend and saves nothing for a
    backward pass.
    """
    return torch.compiler.is_exporting() or torch._C._is_tracing()


exporting._dynamo_marked_constant = True  # torch.compile would evaluate is_exporting() to True


# the experts implementation for exports to runtimes that do not know our ops; set by
# hf.dropin.experts
foreign_experts: str | None = None


def portable() -> str | None:
    """Return the experts implementation for a foreign runtime, "batched_mm" in torch.onnx.export;
    None if torch runs the graph.

    For a foreign runtime the ops trace their equations in plain torch, every expert on every token.
    """
    if not exporting():
        return None
    return "batched_mm" if torch.onnx.is_in_onnx_export() else foreign_experts


portable._dynamo_marked_constant = True


def pick(op: str, x: Tensor, backend: str | None = None, *, cuda_fits: bool = True) -> str:
    """Return AT_RUN_TIME if no backend is requested and the graph is being exported, else what
    `choose` returns.
    """
    return AT_RUN_TIME if backend is None and exporting() else choose(op, x, backend, cuda_fits)


def requested(backend: str | None = None) -> str | None:
    """Return the backend that an argument or, without one, MOE_RUNTIME_BACKEND requests; None for
    the default.
    """
    return (os.environ.get("MOE_RUNTIME_BACKEND") or None) if backend is None else backend


def choose(op: str, x: Tensor, backend: str | None = None, cuda_fits: bool = True) -> str:
    """Return the backend that runs `op` on `x`; `cuda_fits` says whether "cuda" may be the default
    for x's sizes.

    An explicit `backend` is used or refused (ValueError), never replaced. MOE_RUNTIME_BACKEND
    applies to the ops that have a kernel of that backend and leaves the others on their default.
    The default on a supported GPU is "triton", or "cuda" where CUDA_TABLE lists it as faster; on a
    CPU it is "cpp" if its library is built and the op has a kernel there; else "torch".
    """
    asked = requested(backend)
    if x.dtype == torch.float64:  # the kernels sum in float32
        if backend not in (None, "torch"):
            raise ValueError(
                f"backend {backend!r} cannot run {op}: the tensor is {x.dtype}. Use backend "
                "'torch' for float64"
            )
        return "torch"
    if asked is None:
        return _default(op, x, cuda_fits)
    check_choice("backend", asked, BACKENDS)
    reason = why_not(asked, op, x.device)
    kernels = KERNELS[asked]
    if backend is None and kernels and op not in kernels:
        return _default(op, x, cuda_fits)
    if (
        reason is None
        and asked == "triton"
        and x.dtype == torch.bfloat16
        and x.device.type == "cpu"
    ):
        if interpreter_knows_bfloat16:
            reason = None
        else:
            reason = "Triton's interpreter computes bfloat16 wrongly. Use float32"
    if reason is None and asked == "cpp" and x.dtype not in cpp.DTYPES:
        reason = f"the tensor is {x.dtype}, but float32 or bfloat16 is required"
    if reason is not None:
        raise ValueError(f"backend {asked!r} cannot run {op}: {reason}")
    return asked
