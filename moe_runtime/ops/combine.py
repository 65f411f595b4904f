"""Combine expert outputs per token with a gather and a weighted sum, without a scatter.

out[t] = sum_k topk_weight[t, k] y[slot_row[t * K + k]]
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime import backends
from moe_runtime.ops import cuda_kernels
from moe_runtime.ops.dispatch import INTEGERS
from moe_runtime.ops.library import define, kind, register, register_backward, wide_dtype


def combine(y: Tensor, topk_weight: Tensor, slot_row: Tensor, backend: str | None = None) -> Tensor:
    """Sum each token's rows of `y` [R, H], times their weights -> [T, H] in y's dtype.

    `topk_weight` is [T, K], `slot_row` [R = T * K] or [T, K] of integers. Sums in float32, or
    float64 for float64 y. Differentiable in y and topk_weight. Raises ValueError for mismatched
    shapes.
    """
    fits = y.dim() == 2 and topk_weight.dim() == 2
    fits = fits and y.shape[0] == topk_weight.numel() == slot_row.numel()
    if not fits or slot_row.dtype not in INTEGERS:
        raise ValueError(
            "Expected y [T * K, H], topk_weight [T, K] and slot_row [T * K] of integers, but y is "
            f"{kind(y)}, topk_weight {kind(topk_weight)}, slot_row {kind(slot_row)}"
        )
    topk_weight = topk_weight.to(wide_dtype(y.dtype))
    return torch.ops.moe_runtime.combine(
        y, topk_weight, slot_row, backends.pick("combine", y, backend)
    )


class _GatherRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, row_token: Tensor, slot_row: Tensor) -> Tensor:
        return x.index_select(0, row_token)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, row_token, slot_row = inputs
        ctx.save_for_backward(slot_row)
        ctx.save_for_forward(row_token)
        ctx.tokens = x.shape[0]

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: Any) -> Tensor:
        return dx.index_select(0, *ctx.saved_tensors)

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple:
        (slot_row,) = ctx.saved_tensors
        ones = torch.ones(ctx.tokens, slot_row.numel() // max(ctx.tokens, 1), device=drows.device)
        return combine(drows, ones, slot_row), None, None


def gather_rows(x: Tensor, row_token: Tensor, slot_row: Tensor) -> Tensor:
    """Gather rows `row_token` [R] of `x` [T, H] -> [R, H].

    The gradient sums each token's rows `slot_row` [R], without a scatter.
    """
    return _GatherRows.apply(x, row_token, slot_row)


define("combine(Tensor y, Tensor topk_weight, Tensor slot_row, str backend) -> Tensor")
define(
    "combine_backward(Tensor dout, Tensor y, Tensor topk_weight, Tensor slot_row, str backend) -> "
    "(Tensor, Tensor)"
)


def weighted_sum(y: Tensor, topk_weight: Tensor | None, slot_row: Tensor) -> Tensor:
    """Sum rows of y by `slot_row` [T, K] -> [T, H]; weights have y's dtype, None means ones."""
    if slot_row.numel() == 0 or y.shape[1] == 0:
        return y.new_zeros(slot_row.shape[0], y.shape[1])
    # one pass, parallel over tokens, float32 inside; a gather and a bmm are ten times slower on the
    # CPU
    return F.embedding_bag(slot_row, y, mode="sum", per_sample_weights=topk_weight)


def _forward(y: Tensor, topk_weight: Tensor, slot_row: Tensor, backend: str) -> Tensor:
    if backend == "triton":
        from moe_runtime.kernels.combine import combine_forward

        return combine_forward(y, topk_weight, slot_row)
    if backend == "cuda":
        return cuda_kernels.combine_forward(y, topk_weight, slot_row)
    slot_row = slot_row.reshape(topk_weight.shape)
    if slot_row.dtype not in (torch.int32, torch.int64):
        slot_row = slot_row.int()
    return weighted_sum(y.to(topk_weight.dtype), topk_weight.contiguous(), slot_row).to(y.dtype)


def _backward(
    dout: Tensor,
    y: Tensor,
    topk_weight: Tensor,
    slot_row: Tensor,
    backend: str,
) -> tuple:
    if backend == "triton":
        from moe_runtime.kernels.combine import combine_backward

        return combine_backward(dout, y, topk_weight, slot_row)
    if backend == "cuda":
        return cuda_kernels.combine_backward(dout, y, topk_weight, slot_row)
    T, K = topk_weight.shape
    wide = dout.to(topk_weight.dtype)
    H = y.shape[1]
    slot_row = slot_row.reshape(-1).long()
    dy = y.new_empty(y.shape)
    dy[slot_row] = (topk_weight[:, :, None] * wide[:, None]).reshape(T * K, H).to(y.dtype)
    dweight = torch.einsum("tkh,th->tk", y[slot_row].view(T, K, H).to(wide.dtype), wide)
    return dy, dweight.contiguous()


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    y, topk_weight, slot_row, ctx.backend = inputs
    ctx.save_for_backward(y, topk_weight, slot_row)


def _autograd(ctx: Any, dout: Tensor) -> tuple:
    grads = torch.ops.moe_runtime.combine_backward(dout, *ctx.saved_tensors, ctx.backend)
    return *grads, None, None


def _fake(y: Tensor, topk_weight: Tensor, slot_row: Tensor, backend: str) -> Tensor:
    return y.new_empty(topk_weight.shape[0], y.shape[1])


def _backward_fake(
    dout: Tensor,
    y: Tensor,
    topk_weight: Tensor,
    slot_row: Tensor,
    backend: str,
) -> tuple:
    return y.new_empty(y.shape), topk_weight.new_empty(topk_weight.shape)


register(
    "combine",
    _forward,
    _fake,
    _autograd,
    _setup_context,
)
register_backward("combine_backward", _backward, _backward_fake)
