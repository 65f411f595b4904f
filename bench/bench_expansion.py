"""UpIT's expansion of one layer's projection: Gram matrix of its experts and the child of two,
against a copy of the bytes.
"""

import torch

from moe_runtime.bench import machine
from moe_runtime.bench.clock import copy_floor
from moe_runtime.bench.machine import DEVICE
from moe_runtime.ops.expansion import dare_merge, gram

KIND = "op"


def bench_gram(interleaved, shape):
    P = shape.H * shape.I
    base = torch.randn(P, dtype=torch.bfloat16, device=DEVICE)
    experts = base + 0.01 * torch.randn(shape.E, P, dtype=torch.bfloat16, device=DEVICE)

    def pairs():
        rows = []
        for expert in experts:
            rows.append(expert.float() - base.float())
        return torch.stack([torch.stack([a.dot(b) for b in rows]) for a in rows])

    names = machine.runnable("gram", base.dtype)
    variants = {f"moe_runtime {b}": lambda b=b: gram(experts, base, backend=b) for b in names}
    # the differences, and each pair's products once
    bytes = 2 * (shape.E + 1) * P
    flops = shape.E * (shape.E + 2) * P
    functions = copy_floor(bytes, DEVICE) | variants | {"pair by pair": pairs}
    interleaved(functions, bytes=bytes, flops=flops, dtype=base.dtype)


def bench_dare_merge(interleaved, shape):
    P = shape.H * shape.I
    base, first, second = torch.randn(3, P, dtype=torch.bfloat16, device=DEVICE)

    def eager():
        out = base.float()
        for parent, weight in ((first, 0.3), (second, 0.7)):
            delta = parent.float() - base.float()
            out = out + weight * delta * (torch.rand_like(delta) >= 0.5) / 0.5
        return out.to(base.dtype)

    args = {"weights": (0.3, 0.7), "drop": 0.5, "seed": 1, "tensor": "w"}
    names = machine.runnable("dare_merge", base.dtype)
    variants = {
        f"moe_runtime {b}": lambda b=b: dare_merge(first, second, base, **args, backend=b)
        for b in names
    }
    functions = copy_floor(8 * P, DEVICE) | variants | {"float, rand, where": eager}
    # flops of each parent: a difference, two factors, a sum; not the random bits
    interleaved(functions, bytes=8 * P, flops=8 * P, dtype=base.dtype)
