"""The Triton backend of `frozen_mlp`: the kernels of `moe_mlp_triton`, whose products add a
low-rank term in their epilogues.

forward   low of up (gathers), up with its term and the activation, low of down, down with its term,
          combine
backward  d_low of down (gathers), dz with its term, d_low of up, dx with its term, sum of each
          token's rows, dA, dB

A term is low[r] B_e, a product of rank r with a separate accumulator that is added after the loop
over the base's sum.
"""

from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels import combine, dispatch, grouped_gemm
from moe_runtime.kernels import grouped_gemm_backward as backwards
from moe_runtime.kernels.operands import LowRank
from moe_runtime.kernels.packed import PackedWeight, fit_packed
from moe_runtime.kernels.tiles import Tile
from moe_runtime.ops import packed
from moe_runtime.ops.expert_rows import ExpertStacks
from moe_runtime.ops.frozen_rows import FrozenExperts, FrozenGradients, Pair, Stack, in_order_of
from moe_runtime.ops.moe_mlp_triton import RowProducts, sum_rows


class _FrozenRowProducts(RowProducts):
    """A layer of `moe_mlp_triton` over frozen stacks, and the products with its low-rank
    matrices.
    """

    def __init__(self, experts: FrozenExperts, offsets: Tensor, row_slot: Tensor, slots: int):
        stacks = ExpertStacks(
            _operand(experts.up),
            _operand(experts.down),
            experts.up_bias,
            experts.down_bias,
            activation=experts.activation,
        )
        super().__init__(stacks, offsets, row_slot, slots)

    def choose(self, kernel: str, x: Tensor, N: int, K: int) -> Tile:
        """Return the launch config; packed weights are read through pointers, with steps of at most
        64 along the sum.
        """
        tile = super().choose(kernel, x, N, K)
        up = self.experts.up
        if isinstance(up, PackedWeight) and kernel != "dw":
            return fit_packed(tile, kernel, up.format)
        return tile

    def gathered(self, x: Tensor, half: Tensor) -> Tensor:
        """Return x[token] half[e]^T [R, r] of all rows."""
        tile = self.choose("down", x, half.shape[1], half.shape[2])
        order = (self.row_slot, self.map(tile), self.slots)
        return grouped_gemm.gathered_gemm_forward(x, half, *order, tile)

    def of_rows(self, rows: Tensor, half: Tensor) -> Tensor:
        """Return rows[r] half[e]^T [R, r] of rows in expert order."""
        tile = self.choose("down", rows, half.shape[1], half.shape[2])
        return grouped_gemm.grouped_gemm_forward(rows, half, None, self.map(tile), True, tile)

    def gradient(self, low: Tensor, rows: Tensor, gather: str | None, like: Tensor) -> Tensor:
        """Return low^T rows [E, r, n], in the order of `like`."""
        tile = self.choose("dw", rows, rows.shape[1], low.shape[1])
        grad = backwards.weight_backward(
            low, rows, self.row_slot, self.offsets, self.slots, gather, tile
        )
        out = in_order_of(like)
        if out.stride() == grad.stride():
            return grad
        return out.copy_(grad)


def _operand(stack: Stack) -> Tensor | PackedWeight:
    """Return the launchers' arguments for a stack; the scales of a packed one are converted to
    float32, one per group.
    """
    if not stack.format:
        return stack.data
    # the kernels read the bytes of a row one after the other
    data = stack.data.contiguous()
    name = stack.format
    return PackedWeight(
        data if data.dtype == torch.uint8 else data.view(torch.uint8),
        packed.scale_of(data, stack.scales, name).contiguous(),
        packed.of_name(name).number,
        tuple(stack.shape),
        name.endswith(packed.TRANSPOSED),
    )


def _term(low: Any, pair: Pair | None, half: str) -> LowRank | None:
    """Return the term that a product adds: low times the pair's half "a" or "b"."""
    return None if pair is None else LowRank(low, getattr(pair, half))


def forward(
    x: Tensor,
    experts: FrozenExperts,
    topk_weight: Tensor,
    topk_idx: Tensor,
    save: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    """Return out [T, H], z [R, 2I or I], the low [R, r] of up and of down (empty unless `save`),
    offsets [E + 1], row_slot.
    """
    E = experts.up.shape[0]
    up = experts.up_lora
    down = experts.down_lora
    offsets, _, row_slot, slot_row = dispatch.dispatch_forward(topk_idx, E)
    layer = _FrozenRowProducts(experts, offsets, row_slot, topk_idx.shape[1])
    up_low = None if up is None else layer.gathered(x, up.a)
    z, h = layer.up(x, save, _term(up_low, up, "b"))
    down_low = None if down is None else layer.of_rows(h, down.a)
    y = layer.down(h, _term(down_low, down, "b"))
    out = combine.combine_forward(y, topk_weight, slot_row, offsets[E:])
    lows = []
    for low in (up_low, down_low):
        if low is None:
            low = x.new_empty(layer.R, 0)
        lows.append(low if save else low[:0])
    return out, z, *lows, offsets, row_slot


def backward(
    dout: Tensor,
    x: Tensor,
    experts: FrozenExperts,
    topk_weight: Tensor,
    z: Tensor,
    lows: tuple[Tensor, Tensor],
    offsets: Tensor,
    row_slot: Tensor,
    needs: FrozenGradients,
    backend: str,
) -> FrozenGradients:
    """Compute the gradients requested by `needs` from `dout` [T, H]; stacks get none."""
    T, K = topk_weight.shape
    E = experts.up.shape[0]
    # None without LoRA, which then needs no gradients
    up: Any = experts.up_lora
    down: Any = experts.down_lora
    layer = _FrozenRowProducts(experts, offsets, row_slot, K)
    up_low, down_low = lows
    down_dlow: Any = None if down is None else layer.gathered(dout, down.b)
    term = _term(down_dlow, down, "a")
    dz, wh, partial = layer.dz(dout, z, topk_weight, bool(needs.down_a), term)
    up_dlow: Any = None if up is None else layer.of_rows(dz, up.b)
    rows = layer.dx(dz, _term(up_dlow, up, "a")) if needs.x else None
    dx, dweight = sum_rows(rows, dispatch.invert(row_slot), partial, T, K, offsets[E:], None)
    if needs.down_b:  # y = w (h A^T) B: the weight is the low product's here, as it is h's in dA
        row_weight = topk_weight.reshape(-1)[row_slot.long()]
        down_low = down_low * row_weight.to(down_low.dtype)[:, None]
    order = (row_slot, offsets, K)
    up_bias = backwards.bias_backward(dz, None, *order, False) if needs.up_bias else None
    down_bias = None
    if needs.down_bias:
        down_bias = backwards.bias_backward(dout, topk_weight, *order, True)
    return FrozenGradients(
        x=dx,
        topk_weight=dweight,
        up_bias=up_bias,
        down_bias=down_bias,
        up_a=layer.gradient(up_dlow, x, "x", up.a) if needs.up_a else None,
        up_b=layer.gradient(up_low, dz, None, up.b) if needs.up_b else None,
        down_a=layer.gradient(down_dlow, wh, None, down.a) if needs.down_a else None,
        down_b=layer.gradient(down_low, dout, "x", down.b) if needs.down_b else None,
    )
