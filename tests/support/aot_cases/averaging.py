"""Launches of kernels/averaging.py, at the sizes of DeepSeek-Coder-1.3B's down projection and at odd ones."""

import torch

from moe_runtime.kernels import averaging
from tests.support.aot import Case, record

E, P = 8, 2048 * 5504
BF16, FP32 = torch.bfloat16, torch.float32


def _average(dtype=BF16, experts=E, size=P, pull=0.34) -> Case:
    weight = torch.empty(experts, size, dtype=dtype, device="meta")
    (case,) = record(lambda: averaging.average_experts(weight, pull))
    wide = ("wide",) * (size % 16 == 0)
    return case._replace(expect=wide, max_registers=128 if wide else 255)


CASES = [
    _average()._replace(listed=True),
    _average(FP32),
    *(_average(experts=experts) for experts in (2, 3, 64, 128, 256, 300)),
    _average(FP32, experts=64),
    _average(pull=1.0),
    _average(experts=64, pull=1.0),
    _average(size=33 * 17),
    _average(FP32, experts=64, size=33 * 17),
]
