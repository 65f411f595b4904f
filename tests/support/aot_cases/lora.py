"""Launches of kernels/lora*.py: XFT's DeepSeek-Coder-1.3B layer with rank 16, UpIT's Llama-2-7B
with rank 8, and odd ones.
"""

import torch

from moe_runtime.kernels import lora, lora_backward
from tests.support.aot import Case, record

BF16 = torch.bfloat16
FP32 = torch.float32
T = 4096
I = 5504
E = 8
RANK = 16
FREE = {"T": "i32", "plane": "i32"}  # which are not specialised


def meta(*shape: int, dtype=FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _layer(
    dtype=BF16, experts=E, columns=I, rank=RANK, act="silu", targets=(True,) * 3, note="", stack=8
) -> list[Case]:
    """The launches of a layer; `stack` is what ptxas is known to keep there of sizes that are not
    listed, mostly on sm_80.
    """
    z = meta(T, 2 * columns, dtype=dtype)
    low = meta(3, T, experts * rank, dtype=dtype)
    halves = [meta(experts, rank, columns, dtype=dtype) if target else None for target in targets]
    shared = (z, low, meta(T, experts), *halves)
    inputs = (meta(T, columns, dtype=dtype), meta(T, experts * rank, dtype=dtype), *shared)
    cases = [
        *record(lambda: lora.lora_forward(*shared, act, 2.0)),
        *record(lambda: lora_backward.lora_backward(*inputs, act, 2.0)),
        *record(lambda: lora_backward.lora_backward_w(*inputs, targets, act, 2.0)),
    ]
    return [
        case._replace(
            signature=case.signature | FREE, note=note, stack={"3.6": stack or 8, "3.7": stack}
        )
        for case in cases
    ]


CASES = [
    *(case._replace(listed=True) for case in _layer(note="rank 16", stack=0)),
    *_layer(columns=11008, rank=8),
    *_layer(torch.float16),
    *_layer(FP32),
    *_layer(act="gelu"),
    *_layer(act="gelu_tanh"),
    *_layer(rank=64),
    *_layer(rank=128, experts=2, stack=48),
    *_layer(rank=5, stack=24),
    *_layer(columns=2047),
    *_layer(FP32, columns=2047, rank=5),
    *_layer(targets=(True, False, False)),
    *_layer(targets=(False, False, True)),
    *_layer(columns=64, experts=1),
]
