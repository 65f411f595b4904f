"""Merging the experts of one layer (XFT, Eq. 3) and its gradient in alpha, against a copy of the same bytes."""

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.bench.machine import CUDA, DEVICE
from moe_runtime.ops.merging import merge_experts, merged_linear

BACKENDS = ["torch", "triton"] if CUDA else ["torch"]


@pytest.mark.parametrize("backward", [False, True], ids=["merge", "dalpha"])
def bench_merge_experts(interleaved, shape, backward):
    P = shape.H * shape.I
    weight = torch.randn(shape.E, P, dtype=torch.bfloat16, device=DEVICE)
    alpha = torch.full([shape.E], 1 / shape.E, device=DEVICE, requires_grad=backward)
    dout = torch.randn(P, dtype=torch.bfloat16, device=DEVICE)
    half = (shape.E + 1) * P // 2
    source, target = torch.empty(2, half, dtype=torch.bfloat16, device=DEVICE)

    def step(backend):
        out = merge_experts(weight, alpha, backend=backend)
        return torch.autograd.grad(out, alpha, dout) if backward else out

    stack = weight.float()

    def official():
        out = torch.mm(stack.t(), alpha[:, None]).view(-1).to(weight.dtype)
        return torch.autograd.grad(out, alpha, dout) if backward else out

    variants = {f"moe_runtime {backend}": lambda backend=backend: step(backend) for backend in BACKENDS}
    interleaved(
        {"copy (floor)": lambda: target.copy_(source), **variants, "fp32 stack, mm, cast (official)": official},
        bytes=2 * (shape.E + 1) * P,
    )


@pytest.mark.gpu
def bench_merged_linear(interleaved, shape):
    """One linear layer of merged experts whose alphas train: forward and backward, against the same layer trained densely."""
    T = min(shape.T, 4096)
    x, dout = (torch.randn(T, n, dtype=torch.bfloat16, device=DEVICE) for n in (shape.H, shape.I))
    x.requires_grad_()
    weight = torch.randn(shape.E, shape.I, shape.H, dtype=torch.bfloat16, device=DEVICE) * shape.H**-0.5
    alpha = torch.full([shape.E], 1 / shape.E, device=DEVICE, requires_grad=True)
    backend = BACKENDS[-1]
    merged = merge_experts(weight, alpha.detach(), backend=backend)
    dense = torch.nn.Parameter(merged.clone())
    variants = {
        "dense linear (floor)": (lambda: F.linear(x, dense), dense),
        f"moe_runtime {backend}": (lambda: merged_linear(x, weight, alpha, merged, backend=backend), alpha),
        "dW, then dalpha": (lambda: F.linear(x, merge_experts(weight, alpha, backend=backend)), alpha),
    }
    interleaved(
        {name: lambda f=f, p=p: torch.autograd.grad(f(), [x, p], dout) for name, (f, p) in variants.items()},
        flops=6 * T * shape.H * shape.I,
    )
