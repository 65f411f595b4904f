"""Launches of kernels/shared_expert.py, as made by `ops.moe_mlp_triton` with shared="dense"."""

import torch

from moe_runtime.kernels import shared_expert
from tests.support.aot import Case, cases_of, meta

BF16 = torch.bfloat16
T = 4096
I = 1408
K = 6


def _cases(
    BLOCK_I: int, note: str, dtype=BF16, gated=True, act="silu", need_wh=True, odd=0, **form
) -> list[Case]:
    """BLOCK_I is dz's BLOCK_N."""
    i = I + odd
    z = meta(T, 2 * i if gated else i, dtype=dtype)
    h = meta(T, i, dtype=dtype)
    wh = h if need_wh else None
    weight = meta(T, K, dtype=torch.float32)
    partial = meta(T * K, -(-i // BLOCK_I), dtype=torch.float32)

    def step():
        shared_expert.shared_activation_forward(z, h, act, gated, **form)
        args = (h, weight, z, z, wh, partial, act, gated, BLOCK_I)
        shared_expert.shared_dz_backward(*args, **form)

    return cases_of(
        step,
        expect=() if odd else ("wide",),
        max_registers=144,
        note=note,
        stack={"3.6": 0, "3.7": 0, "3.9": 8} if form else {},
    )


CASES = [
    *_cases(128, "gated"),
    *_cases(64, "gated, sm_80"),
    *_cases(128, "without a gate", gated=False),
    *_cases(128, "no wh, gelu_tanh", need_wh=False, act="gelu_tanh"),
    *_cases(128, "fp16", torch.float16),
    *_cases(64, "fp32", torch.float32),
    *_cases(64, "odd sizes", odd=1),
    *_cases(
        128,
        "in turns, clamped",
        act="quick_gelu",
        limit=7.0,
        up_offset=1.0,
        interleaved=True,
    ),
]
