"""Launches of kernels/routing.py."""

import torch

from moe_runtime.kernels import routing
from tests.support.aot import Case, cases_of, meta

T = 4097


def _cases(
    E: int,
    K: int,
    gate: str,
    dtype: torch.dtype,
    note: str,
    shared: int = 0,
    bias: bool = False,
    forced: bool = False,
) -> list[Case]:
    """Forward and backward over E routed experts and K slots, including the shared expert's."""
    logits = meta(T, E, dtype=dtype)
    b = meta(E, dtype=FP32) if bias else None
    given = meta(T, K) if forced else None

    def step():
        weight, idx = routing.route_forward(logits, b, K, gate, shared, given)
        routing.route_backward(weight, logits, idx, gate, shared, forced)

    row = E * dtype.itemsize
    cases = []
    for case in cases_of(step, max_registers=128, note=note):
        # where the row size allows it and every lane has 16 bytes
        is_wide = row % 16 == 0 and row * case.constant("BLOCK_T") >= 512
        cases.append(case._replace(expect=("wide",) * is_wide))
    return cases


BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
CASES = [
    *_cases(7, 6, "xft", BF16, "XFT: 8 experts, top 6", shared=1),
    *_cases(7, 6, "nonorm", FP32, "XFT: 8 experts, top 6", shared=1),
    *_cases(7, 6, "xft", BF16, "XFT, replayed", shared=1, forced=True),
    *_cases(3, 2, "xft", BF16, "XFT: 4 experts, top 2", shared=1),
    *_cases(1, 2, "xft", BF16, "XFT: 2 experts", shared=1),
    *_cases(8, 2, "softmax_topk_renorm", BF16, "Mixtral"),
    *_cases(16, 4, "topk_softmax", BF16, "16 experts"),
    *_cases(15, 4, "nonorm", BF16, "16 experts", shared=1),
    *_cases(64, 8, "softmax_topk", BF16, "OLMoE"),
    *_cases(64, 8, "softmax_topk", FP32, "OLMoE"),
    *_cases(64, 64, "softmax_topk_renorm", FP16, "all of 64 experts"),
    *_cases(63, 8, "xft", BF16, "XFT: 64 experts, top 8", shared=1),
    *_cases(128, 8, "softmax_topk_renorm", BF16, "Qwen3"),
    *_cases(256, 8, "sigmoid_topk", BF16, "DeepSeek-V3", bias=True),
    *_cases(1024, 8, "softmax_topk", BF16, "1024 experts"),
]
