"""Gradients of gradients: refused by name where an op has none, whichever backend runs; never a
silent zero.
"""

import pytest
import torch

from moe_runtime.ops.combine import combine
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.grouped_gemm import grouped_gemm
from moe_runtime.ops.moe_layer import moe_layer
from moe_runtime.ops.moe_mlp import moe_mlp

OP = "combine"  # whose backends they all have


def call(op, x, backend):
    device = x.device
    up = torch.randn(2, 6, 4, device=device)
    down = torch.randn(2, 4, 3, device=device)
    weight = torch.rand(3, 2, device=device)
    if op == "moe_mlp":
        idx = torch.tensor(
            [
                [0, 1],
                [1, 0],
                [0, 1],
            ],
            dtype=torch.int32,
            device=device,
        )
        return moe_mlp(x, up, down, weight, idx, backend=backend)
    if op == "moe_layer":
        experts = ExpertStacks(up, down)
        return moe_layer(
            x,
            up[:, 0],
            experts,
            2,
            "softmax_topk",
            backend=backend,
        ).out
    if op == "grouped_gemm":
        return grouped_gemm(
            x,
            up,
            torch.tensor([0, 1, 3], device=device),
            backend=backend,
        )
    return combine(
        x[:2],
        weight[:1],
        torch.tensor([1, 0], device=device),
        backend,
    )


@pytest.mark.parametrize("op", ["moe_mlp", "moe_layer", "grouped_gemm", "combine"])
def test_a_second_gradient_is_refused_by_name(op, backend, device):
    x = torch.randn(3, 4, device=device).requires_grad_()
    loss = call(op, x, backend).square().sum()
    # asked for and not used, it costs nothing
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    (want,) = torch.autograd.grad(loss, x)
    assert torch.equal(dx.detach(), want)
    with pytest.raises(RuntimeError, match=f"moe_runtime::{op} has no second derivative"):
        torch.autograd.grad(dx.square().sum(), x)
