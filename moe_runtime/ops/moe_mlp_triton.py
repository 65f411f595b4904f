"""The Triton backend of `moe_mlp`: the sequence of kernels. No host synchronization, no atomics, no
buffer of [T, E].

forward   dispatch, up projection (gather, activation), down projection, combine
backward  dz (gather, the activation's gradient, the weights' gradient), dx, sum of each token's
          rows, dW_up, dW_down

If csrc/'s kernels are selected, `BESIDE_CUDA` uses their sort, maps (one launch) and combine in the
forward pass. With shared="dense" the rows of expert 0, the first T of every buffer in expert order,
are computed with torch's matmul.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_runtime.config import SHARED_GATES
from moe_runtime.kernels import (
    combine,
    decode,
    dispatch,
    grouped_gemm,
    operands,
    shared_expert,
    tiles,
)
from moe_runtime.kernels import grouped_gemm_backward as backwards
from moe_runtime.ops import cuda_kernels, routing
from moe_runtime.ops.expert_rows import NOWHERE, ExpertStacks, Gradients, add_product, is_transposed
from moe_runtime.ops.grouped_gemm import one_layout


class RowProducts:
    """The experts and the order of the rows; computes the tile map of every block size once."""

    def __init__(
        self,
        experts: ExpertStacks,
        offsets: Tensor,
        row_slot: Tensor,
        slots: int,
        maps: dict | None = None,
    ):
        self.experts = _in_order(experts)
        self.offsets = offsets
        self.row_slot = row_slot
        self.slots = slots
        self.maps = maps or {}
        self.learned = experts.learned()
        self.H, self.I = experts.down.shape[1:]
        self.R = row_slot.numel()
        self.T = self.R // max(slots, 1)
        self.first = _first(experts)
        self.form = experts.activation.gate_form()
        self.up_trained = self._trained(self.experts.up_trained)
        self.down_trained = self._trained(self.experts.down_trained)

    def _trained(self, weight: Tensor | None) -> operands.Trained | None:
        return None if weight is None else operands.Trained(self.experts.trainable, weight)

    def choose(self, kernel: str, x: Tensor, N: int, K: int) -> tiles.Tile:
        """Return the launch config of a product."""
        return _choose(self.experts, self.R, kernel, x, N, K)

    def map(self, tile: tiles.Tile) -> Tensor:
        """Return the tile map of a config's rows."""
        # in the backward pass this launch is the first and creates the CUDA context of autograd's
        # thread for tensor descriptors
        if tile.BLOCK_M not in self.maps:
            self.maps[tile.BLOCK_M] = dispatch.tile_map(
                self.offsets, self.R, tile.BLOCK_M, self.first
            )
        return self.maps[tile.BLOCK_M]

    def up(
        self, x: Tensor, save: bool, lora: operands.LowRank | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return z (empty unless `save`) and h of all rows."""
        e = self.experts
        act, gated, *_ = e.activation
        tile = self.choose("up", x, self.I, self.H)
        z, h = grouped_gemm.up_forward(
            x,
            e.up,
            e.up_bias,
            self.row_slot,
            self.map(tile),
            self.slots,
            act,
            gated,
            save,
            tile,
            self.up_trained,
            **self.form,
            lora=lora,
        )
        if self.first and self.T:
            dense = z[: self.T] if save else x.new_empty(self.T, e.up.shape[1])
            _product(x, e.up[0].t(), e.up_bias, dense)
            shared_expert.shared_activation_forward(dense, h[: self.T], act, gated, **self.form)
        return z, h

    def down(self, h: Tensor, lora: operands.LowRank | None = None) -> Tensor:
        """Return y of all rows."""
        e = self.experts
        tile = self.choose("down", h, self.H, self.I)
        args = (h, e.down, e.down_bias, self.map(tile), True, tile, self.down_trained)
        y = grouped_gemm.grouped_gemm_forward(*args, lora=lora)
        if self.first:
            _product(h[: self.T], e.down[0].t(), e.down_bias, y[: self.T])
        return y

    def dz(
        self,
        dout: Tensor,
        z: Tensor,
        topk_weight: Tensor,
        need_wh: bool,
        lora: operands.LowRank | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dz, weight * h (empty unless need_wh) and the partial gradients of the weights, of
        all rows.
        """
        e = self.experts
        act, gated, *_ = e.activation
        tile = self.choose("dz", dout, self.I, self.H)
        dz, wh, partial = backwards.dz_backward(
            dout,
            e.down,
            e.down_bias,
            topk_weight,
            self.row_slot,
            self.map(tile),
            z,
            act,
            gated,
            need_wh,
            tile,
            self.down_trained,
            **self.form,
            lora=lora,
        )
        if self.first and self.T:
            shared_wh = wh[: self.T] if need_wh else None
            shared_expert.shared_dz_backward(
                dout @ e.down[0],
                topk_weight,
                z,
                dz,
                shared_wh,
                partial,
                act,
                gated,
                tile.BLOCK_N,
                **self.form,
            )
            if e.down_bias is not None:
                partial[: self.T, 0] += dout.float() @ e.down_bias[0].float()
        return dz, wh, partial

    def dx(self, dz: Tensor, lora: operands.LowRank | None = None) -> Tensor:
        """Return the gradient of each row's x."""
        e = self.experts
        tile = self.choose("dx", dz, e.up.shape[2], e.up.shape[1])
        args = (dz, e.up, None, self.map(tile), False, tile, self.up_trained)
        rows = grouped_gemm.grouped_gemm_forward(*args, lora=lora)
        if self.first:
            torch.mm(dz[: self.T], e.up[0], out=rows[: self.T])
        return rows

    def dw(
        self, dy: Tensor, x: Tensor, gather: str, trained: Tensor | None, into: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of a stack, or of the weights stored separately: dy^T x, one of which
        is gathered.

        It is added to `into` in place if given.
        """
        learned = self.learned.up if gather == "x" else self.learned.down
        if learned is not None and is_transposed(learned):  # x^T dy, in the layout of the parameter
            if into is not None:
                into = into.transpose(1, 2)
            other = {"x": "dy", "dy": "x"}[gather]
            return self._dw(x, dy, other, trained, into).transpose(1, 2)
        return self._dw(dy, x, gather, trained, into)

    def _dw(
        self, dy: Tensor, x: Tensor, gather: str, trained: Tensor | None, into: Tensor | None
    ) -> Tensor:
        if into is not None and not into.is_contiguous():
            return into.add_(self._dw(dy, x, gather, trained, None))
        tile = self.choose("dw", x, x.shape[1], dy.shape[1])
        separate = self.experts.up_trained
        count = None if separate is None else separate.shape[0]
        dw = backwards.weight_backward(
            dy,
            x,
            self.row_slot,
            self.offsets,
            self.slots,
            gather,
            tile,
            trained,
            count,
            self.first,
            into,
        )
        if self.first:
            add_product(dy[: self.T], x[: self.T], dw[0], into is not None)
        return dw


def _first(experts: ExpertStacks) -> int:
    """Return the first expert whose rows are computed by the kernels."""
    return int(experts.shared == "dense")


def _choose(experts: ExpertStacks, R: int, kernel: str, x: Tensor, N: int, K: int) -> tiles.Tile:
    gated = kernel == "up" and experts.activation.gated
    return tiles.choose(kernel, x, N, K, R, experts.up.shape[0], gated)


def _in_order(experts: ExpertStacks) -> ExpertStacks:
    """Return the kernel arguments without separate strides: biases, the map, separate weights in
    the stacks' layout.
    """
    up, up_trained = one_layout(experts.up, experts.up_trained)
    down, down_trained = one_layout(experts.down, experts.down_trained)
    changed: dict[str, Any] = {
        "up": up,
        "down": down,
        "up_trained": up_trained,
        "down_trained": down_trained,
    }
    for name in ("up_bias", "down_bias", "trainable"):
        tensor = getattr(experts, name)
        if tensor is not None:
            changed[name] = tensor.contiguous()
    return experts._replace(**changed)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias[0], x, weight, out=out)


def sum_rows(
    rows: Tensor | None,
    slot_row: Tensor,
    partial: Tensor,
    T: int,
    K: int,
    num_rows: Tensor,
    router: Callable[[Tensor], tuple[Tensor, Tensor]] | None,
) -> tuple[Tensor | None, Tensor]:
    """Return dx (None without rows) and the gradient of the weights [T, K]."""
    if router is None:
        return combine.sum_rows(rows, slot_row, partial, T, K, num_rows)
    _, dweight = combine.sum_rows(None, slot_row, partial, T, K, num_rows)
    dlogits, weight = router(dweight)
    if rows is None:
        return None, dweight
    return combine.sum_rows_and_router(rows, slot_row, T, K, num_rows, dlogits, weight), dweight


def forward(
    x: Tensor, experts: ExpertStacks, topk_weight: Tensor, topk_idx: Tensor, save: bool
) -> tuple[Tensor, ...]:
    """Return out [T, H], z [R, 2I or I] (empty unless `save`), expert_offsets [E + 1], row_slot [R]
    int32.
    """
    E = experts.down.shape[0]
    R = topk_idx.numel()
    if 0 < R <= decode.SMALL:
        rows = _up_tile(x, experts, R).BLOCK_M
        _, _, plan = decode.plan_forward(topk_idx, E, rows, _first(experts))
        return _small_forward(x, experts, topk_weight, plan, save)
    offsets, _, row_slot, slot_row = dispatch.dispatch_forward(topk_idx, E)
    layer = RowProducts(experts, offsets, row_slot, topk_idx.shape[1])
    z, h = layer.up(x, save)
    out = combine.combine_forward(layer.down(h), topk_weight, slot_row, offsets[E:])
    return out, z, offsets, row_slot


def layer_forward(
    x: Tensor, experts: ExpertStacks, logits: Tensor, top_k: int, gate: str, save: bool
) -> tuple[Tensor, ...]:
    """Run `route` and `forward`, with one launch for routing and sort if there are few slots.

    Returns topk_weight, topk_idx [T, K] and what `forward` returns.
    """
    shared = int(gate in SHARED_GATES)
    R = logits.shape[0] * top_k
    if 0 < R <= decode.SMALL and logits.shape[1]:
        weight, idx, plan = decode.plan_forward(
            None,
            experts.down.shape[0],
            _up_tile(x, experts, R).BLOCK_M,
            _first(experts),
            logits=logits,
            top_k=top_k,
            gate=gate,
            shared=shared,
        )
        return weight, idx, *_small_forward(x, experts, weight, plan, save)
    weight, idx = routing.route_kernel(logits, None, top_k, gate, "triton")
    return weight, idx, *forward(x, experts, weight, idx, save)


def _up_tile(x: Tensor, experts: ExpertStacks, R: int) -> tiles.Tile:
    return _choose(experts, R, "up", x, *experts.down.shape[:0:-1])


def _small_forward(
    x: Tensor, experts: ExpertStacks, topk_weight: Tensor, plan: decode.Plan, save: bool
) -> tuple[Tensor, ...]:
    offsets = plan.expert_offsets
    up_rows = _up_tile(x, experts, plan.row_slot.numel()).BLOCK_M
    maps = {up_rows: plan.tile_map}
    layer = RowProducts(experts, offsets, plan.row_slot, topk_weight.shape[1], maps)
    z, h = layer.up(x, save)
    tile = layer.choose("down", h, layer.H, layer.I)
    plain = layer.down_trained is None and not layer.first
    if layer.R <= decode.TINY and plain and up_rows == tile.BLOCK_M:
        out = decode.down_combine_forward(
            h, layer.experts.down, layer.experts.down_bias, topk_weight, plan, tile
        )
    else:
        rows = offsets[offsets.numel() - 1 :]
        out = combine.combine_forward(layer.down(h), topk_weight, plan.slot_row, rows)
    return out, z, offsets, plan.row_slot


def _forward_beside_cuda(
    x: Tensor, experts: ExpertStacks, topk_weight: Tensor, topk_idx: Tensor, save: bool
) -> tuple[Tensor, ...]:
    E, H, I = experts.down.shape
    R = topk_idx.numel()
    up_tile = _choose(experts, R, "up", x, I, H)
    down_tile = _choose(experts, R, "down", x, H, I)
    blocks = list({up_tile.BLOCK_M, down_tile.BLOCK_M})
    offsets, _, row_slot, slot_row, maps = cuda_kernels.route_plan(
        topk_idx, E, blocks, _first(experts)
    )
    layer = RowProducts(experts, offsets, row_slot, topk_idx.shape[1], dict(zip(blocks, maps)))
    z, h = layer.up(x, save)
    out = cuda_kernels.combine_forward(layer.down(h), topk_weight, slot_row, offsets[E:])
    return out, z, offsets, row_slot


def backward(
    dout: Tensor,
    x: Tensor,
    experts: ExpertStacks,
    topk_weight: Tensor,
    z: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    needs: Gradients,
    router: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    into: Gradients = NOWHERE,
) -> Gradients:
    """Compute the gradients requested by `needs` from `dout` [T, H]; `z` [0, ...] is recomputed.

    Frozen experts cost nothing and get zeros; if trained weights are stored separately, gradients
    of up and down are theirs. `router(dweight)` returns dlogits [T, R] and the router's weight [R,
    H], whose product is added to dx when its rows are summed. Gradients in `into` are accumulated
    in place.
    """
    T, K = topk_weight.shape
    E = experts.down.shape[0]
    layer = RowProducts(experts, offsets, row_slot, K)
    if z.shape[0] != layer.R:
        z, _ = layer.up(x, save=True)
    dz, wh, partial = layer.dz(dout, z, topk_weight, bool(needs.down))
    del z
    rows = layer.dx(dz) if needs.x else None
    dx, dweight = sum_rows(rows, dispatch.invert(row_slot), partial, T, K, offsets[E:], router)
    del rows, partial
    trained = layer.experts.trainable
    if trained is not None and trained.dtype == torch.bool:
        trained = trained.to(torch.int32) - 1
    order = (row_slot, offsets, K)
    up_bias = None
    if needs.up_bias:
        up_bias = backwards.bias_backward(dz, None, *order, False, trained)
    down_bias = None
    if needs.down_bias:
        down_bias = backwards.bias_backward(dout, topk_weight, *order, True, trained)
    return Gradients(
        x=dx,
        up=layer.dw(dz, x, "x", trained, into.up) if needs.up else None,
        down=layer.dw(dout, wh, "dy", trained, into.down) if needs.down else None,
        topk_weight=dweight,
        up_bias=up_bias,
        down_bias=down_bias,
    )


BESIDE_CUDA = SimpleNamespace(forward=_forward_beside_cuda, backward=backward)
