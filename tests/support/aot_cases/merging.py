"""Launches of kernels/merging.py, at the sizes of DeepSeek-Coder-1.3B's down projection and at odd
ones.
"""

import torch

from moe_runtime.kernels import merging
from tests.support.aot import CAPABILITIES, CORES, Case, cases_of, meta

E = 8
N = 2048
K = 5504
T = 4096
BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32


def _merge(dtype=BF16, experts=E, size=N * K, out=None, guarded=False) -> list[Case]:
    weight = meta(experts, size, dtype=dtype)
    alpha = meta(experts, dtype=FP32)
    merged = meta(size, dtype=out or dtype)

    def step():
        merging.merge_experts_forward(
            weight,
            alpha,
            merged,
            alpha if guarded else None,
        )
        if not guarded:
            merging.merge_experts_backward_alpha(merged, weight)

    is_wide = size % 16 == 0
    return cases_of(
        step,
        expect=("wide",) * is_wide,
        max_registers=64 if is_wide else 255,
        note="only if alpha changed" * guarded,
    )


def _linear(
    capability: int, dtype=BF16, weights=None, precision="ieee", experts=E, n=N, k=K, rows=T
) -> Case:
    x = meta(rows, k, dtype=dtype)
    dout = meta(rows, n, dtype=dtype)
    weight = meta(experts, n, k, dtype=weights or dtype)
    config = merging.linear_config(
        capability,
        dtype,
        weight.dtype,
        precision,
        rows,
        n,
        k,
    )
    expect = ("cp.async",) * (n % 16 == 0)
    if dtype != FP32 and min(config["BLOCK_N"], config["BLOCK_K"]) >= 64:
        expect += (CORES[capability],)
    (case,) = cases_of(
        lambda: merging.merged_linear_backward_alpha(dout, x, weight, config),
        ("T",),
        capabilities=(capability,),
        expect=expect,
    )
    return case


def _cases():
    for capability in CAPABILITIES:
        yield _linear(capability)._replace(listed=True)
        yield _linear(capability, weights=FP32)  # under autocast
    for capability in (80, 90, 100, 120):
        yield _linear(capability, FP32)
        yield _linear(capability, FP32, precision="tf32")
        yield _linear(capability, n=2047, k=5503)
    yield _linear(80, rows=16)
    yield _linear(90, rows=16)
    yield _linear(90, FP16)
    yield _linear(90, experts=1)
    yield _linear(90, experts=64)
    yield _linear(90, n=64, k=32)


CASES = [
    *_merge(),
    *_merge(guarded=True),
    *_merge(FP32),
    *_merge(FP32, out=BF16, guarded=True),  # kept under autocast
    *_merge(experts=3),
    *_merge(experts=64),
    *_merge(size=33 * 17),
    *_cases(),
]
