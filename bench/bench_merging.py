"""Merging the experts of one layer (XFT, Eq. 3) and its gradient in alpha, against a copy of the
same bytes.
"""

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.bench import machine
from moe_runtime.bench.clock import copy_floor
from moe_runtime.bench.machine import CUDA, DEVICE
from moe_runtime.ops.merging import merge_experts, merged_linear

KIND = "op"


@pytest.mark.parametrize("backward", [False, True], ids=["merge", "dalpha"])
def bench_merge_experts(interleaved, shape, backward):
    P = shape.H * shape.I
    weight = torch.randn(shape.E, P, dtype=torch.bfloat16, device=DEVICE)
    alpha = torch.full([shape.E], 1 / shape.E, device=DEVICE, requires_grad=backward)
    dout = torch.randn(P, dtype=torch.bfloat16, device=DEVICE)
    stack = weight.float()

    def official():
        return torch.mm(stack.t(), alpha[:, None]).view(-1).to(weight.dtype)

    def variant(merge):
        if not backward:
            return merge
        out = merge()
        return lambda: torch.autograd.grad(out, alpha, dout, retain_graph=True)

    variants = {
        f"moe_runtime {backend}": variant(
            lambda backend=backend: merge_experts(weight, alpha, backend=backend)
        )
        for backend in machine.runnable("merge_experts", weight.dtype)
    }
    bytes = 2 * (shape.E + 1) * P
    functions = (
        copy_floor(bytes, DEVICE)
        | variants
        | {"fp32 stack, mm, cast (official)": variant(official)}
    )
    interleaved(functions, bytes=bytes, flops=2 * shape.E * P, dtype=weight.dtype)


@pytest.mark.gpu
def bench_merged_linear(interleaved, shape):
    """One linear layer of merged experts whose alphas train: forward and backward, against the same
    layer trained densely.
    """
    T = min(shape.T, 4096)
    x = torch.randn(T, shape.H, dtype=torch.bfloat16, device=DEVICE)
    dout = torch.randn(T, shape.I, dtype=torch.bfloat16, device=DEVICE)
    x.requires_grad_()
    weight = (
        torch.randn(shape.E, shape.I, shape.H, dtype=torch.bfloat16, device=DEVICE) * shape.H**-0.5
    )
    alpha = torch.full([shape.E], 1 / shape.E, device=DEVICE, requires_grad=True)
    backend = "triton" if CUDA else "torch"
    merged = merge_experts(weight, alpha.detach(), backend=backend)
    dense = torch.nn.Parameter(merged.clone())
    variants = {
        "dense linear (floor)": (lambda: F.linear(x, dense), dense),
        f"moe_runtime {backend}": (
            lambda: merged_linear(x, weight, alpha, merged, backend=backend),
            alpha,
        ),
        "dW, then dalpha": (
            lambda: F.linear(x, merge_experts(weight, alpha, backend=backend)),
            alpha,
        ),
    }
    interleaved(
        {
            name: lambda f=f, p=p: torch.autograd.grad(f(), [x, p], dout)
            for name, (f, p) in variants.items()
        },
        flops=6 * T * shape.H * shape.I,
        bytes=2 * (2 * T * (shape.H + shape.I) + (shape.E + 2) * shape.H * shape.I),
        tokens=T,
        dtype=x.dtype,
    )
