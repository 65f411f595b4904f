"""Launches of kernels/expansion.py, at the sizes of DeepSeek-Coder-1.3B's down projection and at
odd ones.
"""

import torch

from moe_runtime.kernels import expansion
from tests.support.aot import Case, meta, record

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
P = 2048 * 5504


def _gram(n=8, dtype=BF16, size=P, base=True, note="") -> Case:
    weight = meta(n, size, dtype=dtype)
    origin = meta(size, dtype=dtype) if base else None
    (case,) = record(lambda: expansion.gram_forward(weight, origin))
    has_products = dtype != FP32 and not base and n < 64
    return case._replace(note=note, expect=("mma.sync",) * has_products)


def _dare(dtype=BF16, size=P, base=True) -> Case:
    parent = meta(size, dtype=dtype)
    args = (parent, parent, parent if base else None, 1 << 62, 1 << 61, 1 << 31, 1.0, 1.0)
    (case,) = record(lambda: expansion.dare_merge_forward(*args))
    return case._replace(max_registers=128)


CASES = [
    _gram(note="with a base")._replace(listed=True),
    _gram(base=False)._replace(listed=True),
    _gram(dtype=FP32),
    _gram(dtype=FP32, base=False),
    _gram(dtype=FP16),
    *(_gram(n, base=base) for n in (3, 17, 64) for base in (True, False)),
    _gram(64, FP32),
    _gram(size=33 * 17),
    _gram(size=33 * 17, base=False),
    _dare()._replace(listed=True),
    _dare(base=False),
    _dare(FP32),
    _dare(FP16),
    _dare(size=33 * 17),
]
