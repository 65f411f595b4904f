"""Launches of kernels/lora*.py: XFT's DeepSeek-Coder-1.3B layer with rank 16, UpIT's Llama-2-7B
with rank 8, and odd ones.
"""

import torch

from moe_runtime.kernels import lora, lora_backward
from tests.support.aot import Case, cases_of, meta

BF16 = torch.bfloat16
FP32 = torch.float32
T = 4096
ALL = (True, True, True)


def _layer(
    dtype=BF16, experts=8, columns=5504, rank=16, act="silu", targets=ALL, note="", stack=8
) -> list[Case]:
    """The launches of a layer; `stack` is what ptxas is known to spill at sizes that are not
    listed, mostly on sm_80.
    """
    z = meta(T, 2 * columns, dtype=dtype)
    low = meta(3, T, experts * rank, dtype=dtype)
    half = meta(experts, rank, columns, dtype=dtype)
    shared = (z, low, meta(T, experts, dtype=FP32), *(half if on else None for on in targets))
    inputs = (meta(T, columns, dtype=dtype), meta(T, experts * rank, dtype=dtype), *shared)

    def step():
        lora.lora_forward(*shared, act, 2.0)
        lora_backward.lora_backward(*inputs, act, 2.0)
        lora_backward.lora_backward_w(*inputs, targets, act, 2.0)

    stacks = {"3.6": stack or 8, "3.7": stack}
    return cases_of(step, ("T", "plane"), note=note, stack=stacks)


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
