"""Operands of the grouped matrix products: how a kernel finds an expert's weight and splits its tile.

A weight is read through pointers of any strides or through a tensor descriptor (TMA). Trained experts' weights may be stored
separately from the stack.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_runtime.kernels.packed import KINDS, PackedWeight, packed_block
from moe_runtime.kernels.tiles import Tile, processors


@triton.jit
def weight_base(w, w_trained, trained_ptr, e, stride_e, stride_te, TMA: tl.constexpr, TRAINED: tl.constexpr):
    """Where expert e's weight begins: in `w` or, if TRAINED and it has a place there, in `w_trained`; a descriptor as it is."""
    if TMA:
        return w
    elif TRAINED > 1:  # a packed stack: its bytes and its scales
        return w + e.to(tl.int64) * stride_e, w_trained + e.to(tl.int64) * stride_te
    elif TRAINED:
        place = tl.load(trained_ptr + e).to(tl.int64)
        return tl.where(place < 0, w + e.to(tl.int64) * stride_e, w_trained + place * stride_te)
    else:
        return w + e.to(tl.int64) * stride_e


@triton.jit
def weight_block(w, e, n0, k0, N, K, stride_n, stride_k, EVEN_K: tl.constexpr, TMA: tl.constexpr,
                 K_LAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRAINED: tl.constexpr = 0):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of expert e's weight at `weight_base`; zero outside. K_LAST: a descriptor's last dimension is k."""
    if TMA:
        if K_LAST:
            return tl.trans(tl.reshape(w.load([e, n0, k0]), (BLOCK_N, BLOCK_K)))
        else:
            return tl.reshape(w.load([e, k0, n0]), (BLOCK_K, BLOCK_N))
    elif TRAINED > 1:
        FORMAT: tl.constexpr = TRAINED - 2
        if K_LAST:
            return tl.trans(packed_block(w[0], w[1], n0, k0, N, K, stride_n, FORMAT, BLOCK_N, BLOCK_K))
        else:
            return packed_block(w[0], w[1], k0, n0, K, N, stride_k, FORMAT, BLOCK_K, BLOCK_N)
    else:
        n = (n0 + tl.arange(0, BLOCK_N)).to(tl.int64)
        k = (k0 + tl.arange(0, BLOCK_K)).to(tl.int64)
        mask = (n < N)[None, :]
        if not EVEN_K:
            mask = mask & (k < K)[:, None]
        return tl.load(w + (k[:, None] * stride_k + n[None, :] * stride_n), mask=mask, other=0.0)


@triton.jit
def joined_block(w, e, n0, k0, K_LAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_K, 2 BLOCK_N]: BLOCK_N columns of gate and as many of up, by one descriptor of [E, 2, I, H] or [E, H, 2, I]."""
    if K_LAST:
        return tl.trans(tl.reshape(w.load([e, 0, n0, k0]), (BLOCK_N * 2, BLOCK_K)))
    else:
        return tl.reshape(w.load([e, k0, 0, n0]), (BLOCK_K, BLOCK_N * 2))


@triton.jit
def halves(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right half of a tile's columns: an epilogue in two pieces does not spill."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def piece(tile, AT: tl.constexpr, PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Columns [AT, AT + 1) * BLOCK_N / PIECES of a tile; PIECES is a power of two. No data moves between threads."""
    if PIECES == 1:
        return tile
    else:
        HALF: tl.constexpr = PIECES // 2
        left, right = halves(tile, BLOCK_M, BLOCK_N)
        if AT < HALF:
            return piece(left, AT, HALF, BLOCK_M, BLOCK_N // 2)
        else:
            return piece(right, AT - HALF, HALF, BLOCK_M, BLOCK_N // 2)


@triton.jit
def pairs(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The even and the odd columns of a tile [BLOCK_M, 2 BLOCK_N]: gate and up where they take turns."""
    return tl.split(tl.reshape(tile, (BLOCK_M, BLOCK_N, 2)))


@triton.jit
def low_rank(low, b, rows_left, n0, N, stride_r, stride_n, RANK: tl.constexpr, PRECISION: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """low b, [BLOCK_M, BLOCK_N] float32: rows of `low` [., RANK] by columns from `n0` on of an expert's `b` [RANK, N]."""
    m = tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for r0 in tl.static_range(0, RANK, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        rows = tl.load(low + (m[:, None] * RANK + r[None, :]), mask=(m < rows_left)[:, None] & (r < RANK)[None, :], other=0.0)
        at = r.to(tl.int64)[:, None] * stride_r + n.to(tl.int64)[None, :] * stride_n
        block = tl.load(b + at, mask=(r < RANK)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(rows, block, acc, input_precision=PRECISION)
    return acc


class LowRank(NamedTuple):
    """What a product adds to its sum: low[r] b[e] of each row r of expert e."""

    low: torch.Tensor  # [R, rank], contiguous
    b: torch.Tensor  # [E, rank, N], any strides


def low_rank_operand(pair: LowRank | None) -> tuple[tuple, dict]:
    """Return (low, b, stride_e, stride_r, stride_n) and the constants as a kernel expects them."""
    if pair is None:
        return (None, None, 0, 0, 0), {"RANK": 0, "BLOCK_R": 16}
    rank = pair.low.shape[1]
    return (pair.low, pair.b, *pair.b.stride()), {"RANK": rank, "BLOCK_R": min(64, max(16, triton.next_power_of_2(rank)))}


class Trained(NamedTuple):
    """Weights of experts that are stored separately from the stack: what to look up, and where."""

    place: torch.Tensor  # [E] int32: row of `weight`, -1 for an expert of the stack
    weight: torch.Tensor  # [n, ., .], inner strides as the stack's


def describable(*tensors: torch.Tensor) -> bool:
    """Whether tensor descriptors can hold them: 16-byte pointers and strides, the last one 1, no dimension expanded."""
    return all(
        isinstance(t, torch.Tensor)
        and t.data_ptr() % 16 == 0
        and t.stride(-1) == 1
        and all(s > 0 and s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
        and t.numel() > 0
        for t in tensors
    )


def last_contiguous(weight: torch.Tensor, k_last: bool) -> tuple[torch.Tensor, bool]:
    """Return the same product with the last dimension of `weight` [E, a, b] contiguous if its other one is, for descriptors."""
    if isinstance(weight, PackedWeight):
        return weight, k_last != weight.transposed
    if weight.stride(1) == 1 and weight.stride(2) != 1:
        return weight.transpose(1, 2), not k_last
    return weight, k_last


def weight_operand(weight, trained: Trained | None, k_last: bool, tma: bool, tile: Tile) -> tuple[tuple, tuple]:
    """`weight` [E, ., .] as a kernel expects it: (w, w_trained, place), and the strides (e, te, n, k).

    k_last: the sum runs over the last dimension.
    """
    if isinstance(weight, PackedWeight):
        stride_e, row, one = weight.data.stride()
        return (weight.data, weight.scale, None), (stride_e, weight.scale.stride(0), *((row, one) if k_last else (one, row)))
    stride_e, *strides = weight.stride()
    stride_n, stride_k = strides if k_last else strides[::-1]
    if trained is not None:
        return (weight, trained.weight, trained.place), (stride_e, trained.weight.stride(0), stride_n, stride_k)
    if tma:
        block = [1, tile.BLOCK_N, tile.BLOCK_K] if k_last else [1, tile.BLOCK_K, tile.BLOCK_N]
        weight = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), block)
    return (weight, None, None), (stride_e, 0, stride_n, stride_k)


def storage(weight, trained: Trained | None) -> bool | int:
    """Return the kernels' TRAINED: whether trained experts are stored separately, or KINDS and the format of a packed stack."""
    return KINDS + weight.format if isinstance(weight, PackedWeight) else trained is not None


def grid(tile: Tile, num_m: int, N: int, device: torch.device) -> tuple[int]:
    """Return the launch grid: every tile of the bound, or as many programs as run at once."""
    programs = num_m * triton.cdiv(N, tile.BLOCK_N)
    return (min(programs, processors(device)) if tile.PERSISTENT else programs,)
