"""Launches of kernels/merging.py, at the sizes of DeepSeek-Coder-1.3B's down projection and at odd
ones.
"""

import torch

from moe_runtime.kernels import merging
from tests.support.aot import CAPABILITIES, Case, record

E = 8
N = 2048
K = 5504
T = 4096
BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
CORES = {
    80: "mma.sync",
    86: "mma.sync",
    89: "mma.sync",
    90: "wgmma",
    100: "tcgen05",
    120: "mma.sync",
}


def meta(*shape: int, dtype=FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _merge(dtype=BF16, experts=E, size=N * K, out=None, guarded=False) -> list[Case]:
    weight = meta(experts, size, dtype=dtype)
    alpha = meta(experts)
    out = meta(size, dtype=out or dtype)
    seen = meta(experts) if guarded else None
    cases = record(lambda: merging.merge_experts_forward(weight, alpha, out, seen))
    cases += [] if guarded else record(lambda: merging.merge_experts_backward_alpha(out, weight))
    note = "only if alpha changed" * guarded
    wide = ("wide",) * (size % 16 == 0)
    return [
        case._replace(expect=wide, max_registers=64 if wide else 255, note=note) for case in cases
    ]


def _linear(
    capability: int, dtype=BF16, weights=None, precision="ieee", experts=E, n=N, k=K, rows=T
) -> Case:
    x = meta(rows, k, dtype=dtype)
    dout = meta(rows, n, dtype=dtype)
    weight = meta(experts, n, k, dtype=weights or dtype)
    config = merging.linear_config(capability, dtype, weight.dtype, precision, rows, n, k)
    (case,) = record(lambda: merging.merged_linear_backward_alpha(dout, x, weight, config))
    signature = case.signature | {"T": "i32"}  # which is not specialised
    copies = ("cp.async",) * (n % 16 == 0)
    cores = (
        (CORES[capability],) * (dtype != FP32) * (min(config["BLOCK_N"], config["BLOCK_K"]) >= 64)
    )
    return case._replace(signature=signature, capabilities=(capability,), expect=copies + cores)


CASES = [
    *_merge(),
    *_merge(guarded=True),
    *_merge(FP32),
    *_merge(FP32, out=BF16, guarded=True),  # kept under autocast
    *(case for experts in (3, 64) for case in _merge(experts=experts)),
    *_merge(size=33 * 17),
    *(_linear(capability)._replace(listed=True) for capability in CAPABILITIES),
    *(_linear(capability, weights=FP32) for capability in CAPABILITIES),  # under autocast
    *(
        _linear(capability, FP32, precision=p)
        for capability in (80, 90, 100, 120)
        for p in ("ieee", "tf32")
    ),
    *(_linear(capability, n=2047, k=5503) for capability in (80, 90, 100, 120)),
    *(_linear(capability, rows=16) for capability in (80, 90)),
    _linear(90, FP16),
    *(_linear(90, experts=experts) for experts in (1, 64)),
    _linear(90, n=64, k=32),
]
