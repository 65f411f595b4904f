"""Merging the experts of one layer (XFT, Eq. 3), and the gradient of alpha, against a copy of the
same bytes.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.bench import machine
from moe_runtime.bench.clock import copy_floor
from moe_runtime.bench.machine import CUDA, DEVICE, random
from moe_runtime.ops.merging import merge_experts, merged_linear

KIND = "op"


@pytest.mark.parametrize(
    "backward",
    [False, True],
    ids=["merge", "dalpha"],
)
def bench_merge_experts(interleaved, shape, backward):
    P = shape.H * shape.I
    weight = random(shape.E, P)
    alpha = torch.full(
        [shape.E],
        1 / shape.E,
        device=DEVICE,
        requires_grad=backward,
    )
    dout = random(P)
    stack = weight.float()

    def official():
        return torch.mm(stack.t(), alpha[:, None]).view(-1).to(weight.dtype)

    def variant(merge):
        if not backward:
            return merge
        out = merge()
        return lambda: torch.autograd.grad(out, alpha, dout, retain_graph=True)

    bytes = 2 * (shape.E + 1) * P
    functions = copy_floor(bytes, DEVICE)
    for backend in machine.runnable("merge_experts", weight.dtype):
        merge = functools.partial(merge_experts, weight, alpha, backend=backend)
        functions[f"moe_runtime {backend}"] = variant(merge)
    functions["fp32 stack, mm, cast (official)"] = variant(official)
    interleaved(
        functions,
        bytes=bytes,
        flops=2 * shape.E * P,
        dtype=weight.dtype,
    )


@pytest.mark.gpu
def bench_merged_linear(interleaved, shape):
    """A linear layer of merged experts whose alphas train, forward and backward, against the same
    layer with a trained dense weight.
    """
    _, H, I, E, _, _ = shape
    T = min(shape.T, 4096)
    x = random(T, H).requires_grad_()
    dout = random(T, I)
    weight = random(E, I, H) * H**-0.5
    alpha = torch.full(
        [E],
        1 / E,
        device=DEVICE,
        requires_grad=True,
    )
    backend = "triton" if CUDA else "torch"
    merged = merge_experts(weight, alpha.detach(), backend=backend)
    dense = torch.nn.Parameter(merged.clone())

    def floor():
        return torch.autograd.grad(
            F.linear(x, dense),
            [x, dense],
            dout,
        )

    def ours():
        y = merged_linear(x, weight, alpha, merged, backend=backend)
        return torch.autograd.grad(y, [x, alpha], dout)

    def unfused():
        y = F.linear(x, merge_experts(weight, alpha, backend=backend))
        return torch.autograd.grad(y, [x, alpha], dout)

    interleaved(
        {
            "dense linear (floor)": floor,
            f"moe_runtime {backend}": ours,
            "dW, then dalpha": unfused,
        },
        flops=6 * T * H * I,
        bytes=2 * (2 * T * (H + I) + (E + 2) * H * I),
        tokens=T,
        dtype=x.dtype,
    )
