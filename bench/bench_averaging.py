"""EWA's averaging of one layer's experts in place, against a copy of the same bytes and against the paper's sums in torch."""

import torch

from moe_runtime.bench import ours
from moe_runtime.bench.machine import DEVICE
from moe_runtime.modules.ewa import average_experts_

KIND = "op"
SHARE = 0.3


def bench_average_experts(interleaved, shape):
    P = shape.H * shape.I
    weight = torch.randn(shape.E, P, dtype=torch.bfloat16, device=DEVICE)
    source, target = torch.empty(2, shape.E * P, dtype=torch.bfloat16, device=DEVICE)
    pull = SHARE * shape.E / (shape.E - 1)

    def in_torch():
        weight.copy_(weight.float().lerp_(weight.float().mean(0), pull))

    variants = {
        f"moe_runtime {backend}": lambda backend=backend: average_experts_(weight, SHARE, backend=backend)
        for backend in ours.runnable("average_experts", weight.dtype)
    }
    interleaved(
        {"copy (floor)": lambda: target.copy_(source), **variants, "float, mean, lerp": in_torch},
        bytes=4 * shape.E * P,
        flops=4 * shape.E * P,  # a sum, a difference, a product, a sum
        dtype=weight.dtype,
    )
