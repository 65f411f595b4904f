"""One matrix product per expert over rows in expert order: up projection with its activation, and the plain product.

The equations are in `moe_runtime.ops.grouped_gemm` and `moe_runtime.ops.moe_mlp`. A program computes one tile of the tile map
(`kernels.dispatch.tile_map`): BLOCK_M rows of one expert by BLOCK_N columns. Weights come as (n, k) with any strides, so the
plain kernel serves the down projection (k contiguous) and dx (n contiguous) alike.
"""

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_runtime.kernels.activation import activate, below, shifted
from moe_runtime.kernels.dispatch import live_tiles
from moe_runtime.kernels.operands import (
    LowRank,
    describable,
    grid,
    halves,
    joined_block,
    last_contiguous,
    low_rank,
    low_rank_operand,
    pairs,
    piece,
    storage,
    weight_base,
    weight_block,
    weight_operand,
)
from moe_runtime.kernels.tiles import Tile, arch_of, in_turns, precision, tile_of


@triton.jit
def _store_activation(gate, up, row, col0, I, rows_left, z_ptr, h_ptr, GATED: tl.constexpr, SAVE: tl.constexpr,
                      ACT: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Write z = [gate, up] and h = act(gate) * up of BLOCK_M rows from `row` on, BLOCK_N columns from `col0` on.

    INTERLEAVED: `gate` [BLOCK_M, 2 BLOCK_N] holds both.
    """
    m = tl.arange(0, BLOCK_M)
    n = col0 + tl.arange(0, BLOCK_N)
    mask = (m < rows_left)[:, None] & (n < I)[None, :]
    if SAVE:
        width = I * 2 if GATED else I
        z = z_ptr + row.to(tl.int64) * width
        if INTERLEAVED:
            c = col0 * 2 + tl.arange(0, BLOCK_N * 2)
            z += m[:, None].to(tl.int64) * width + c[None, :]
            tl.store(z, gate.to(z_ptr.dtype.element_ty), mask=(m < rows_left)[:, None] & (c < width)[None, :])
        else:
            z += m[:, None].to(tl.int64) * width + n[None, :]
            tl.store(z, gate.to(z_ptr.dtype.element_ty), mask=mask)
            if GATED:
                tl.store(z + I, up.to(z_ptr.dtype.element_ty), mask=mask)
    if INTERLEAVED:
        gate, up = pairs(gate, BLOCK_M, BLOCK_N)
    h = activate(below(gate, LIMIT), ACT)
    if GATED:
        h = h * shifted(up, LIMIT, UP_OFFSET)
    h_ptr += row.to(tl.int64) * I
    tl.store(h_ptr + (m[:, None].to(tl.int64) * I + n[None, :]), h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_half(gate, up, bias, low, b, row, col0, I, rows_left, z_ptr, h_ptr, stride_lr, stride_ln,
                GATED: tl.constexpr, BIAS: tl.constexpr, SAVE: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr,
                UP_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """`_store_activation`; where z comes twice as wide in two pieces, each of which adds its bias: all at once would spill.

    The low-rank term is a product of its own for each piece: a second accumulator of a whole tile would spill as well.
    """
    if INTERLEAVED:
        left, right = halves(gate, BLOCK_M, BLOCK_N * 2)
        if BIAS:
            c = col0 * 2 + tl.arange(0, BLOCK_N)
            left += tl.load(bias + c, mask=c < I * 2, other=0.0).to(tl.float32)[None, :]
            right += tl.load(bias + c + BLOCK_N, mask=c + BLOCK_N < I * 2, other=0.0).to(tl.float32)[None, :]
        if RANK:
            left += low_rank(low, b, rows_left, col0 * 2, I * 2, stride_lr, stride_ln, RANK, PRECISION, BLOCK_M, BLOCK_N,
                             BLOCK_R)  # fmt: skip
            right += low_rank(low, b, rows_left, col0 * 2 + BLOCK_N, I * 2, stride_lr, stride_ln, RANK, PRECISION,
                              BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
        HALF: tl.constexpr = BLOCK_N // 2
        _store_activation(left, left, row, col0, I, rows_left, z_ptr, h_ptr, GATED, SAVE, ACT, LIMIT, UP_OFFSET,
                          INTERLEAVED, BLOCK_M, HALF)  # fmt: skip
        _store_activation(right, right, row, col0 + HALF, I, rows_left, z_ptr, h_ptr, GATED, SAVE, ACT, LIMIT,
                          UP_OFFSET, INTERLEAVED, BLOCK_M, HALF)  # fmt: skip
    else:
        if RANK:
            gate += low_rank(low, b, rows_left, col0, I, stride_lr, stride_ln, RANK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)
            if GATED:
                up += low_rank(low, b, rows_left, I + col0, I * 2, stride_lr, stride_ln, RANK, PRECISION, BLOCK_M, BLOCK_N,
                               BLOCK_R)  # fmt: skip
        _store_activation(gate, up, row, col0, I, rows_left, z_ptr, h_ptr, GATED, SAVE, ACT, LIMIT, UP_OFFSET,
                          INTERLEAVED, BLOCK_M, BLOCK_N)  # fmt: skip


@triton.jit
def _up_tile(pid, x_ptr, w, w_trained, trained_ptr, bias_ptr, low_ptr, lora_ptr, row_slot_ptr, map_ptr, z_ptr, h_ptr,
             num_m, I, H, stride_x, stride_e, stride_te, stride_n, stride_k, stride_le, stride_lr, stride_ln,
             SLOTS: tl.constexpr, ACT: tl.constexpr,
             GATED: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
             BIAS: tl.constexpr, SAVE: tl.constexpr, TRAINED: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr,
             JOINED: tl.constexpr, K_LAST: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
             GROUP_M: tl.constexpr):  # fmt: skip
    pid_m, pid_n = tile_of(pid, num_m, tl.cdiv(I, BLOCK_N), GROUP_M)
    e = tl.load(map_ptr + pid_m)
    if e >= 0:
        row = tl.load(map_ptr + num_m + pid_m)
        rows_left = tl.load(map_ptr + 2 * num_m + pid_m) - row
        m = tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        n0 = pid_n * BLOCK_N
        live = m < rows_left
        token = tl.load(row_slot_ptr + row + m, mask=live, other=0) // SLOTS
        x = x_ptr + (token.to(tl.int64)[:, None] * stride_x + k[None, :])
        N = I * 2 if GATED else I
        # two accumulators, or one of gate and up, side by side (JOINED) or in turns: one product with one block of the weight
        TWO: tl.constexpr = GATED and not (INTERLEAVED or JOINED)
        WIDTH: tl.constexpr = BLOCK_N * 2 if INTERLEAVED or JOINED else BLOCK_N
        c0 = pid_n * WIDTH
        base = weight_base(w, w_trained, trained_ptr, e, stride_e, stride_te, TMA, TRAINED)
        gate = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        up = gate
        for k0 in range(0, H, BLOCK_K):
            mask = live[:, None]
            if not EVEN_K:
                mask = mask & (k0 + k < H)[None, :]
            a = tl.load(x, mask=mask, other=0.0)
            if JOINED:
                b = joined_block(base, e, n0, k0, K_LAST, BLOCK_N, BLOCK_K)
            else:
                b = weight_block(base, e, c0, k0, N, H, stride_n, stride_k, EVEN_K, TMA, K_LAST, WIDTH, BLOCK_K, TRAINED)
            gate = tl.dot(a, b.to(a.dtype), gate, input_precision=PRECISION)
            if TWO:
                b = weight_block(base, e, I + n0, k0, N, H, stride_n, stride_k, EVEN_K, TMA, K_LAST, BLOCK_N, BLOCK_K, TRAINED)
                up = tl.dot(a, b.to(a.dtype), up, input_precision=PRECISION)
            x += BLOCK_K
        if JOINED:
            gate, up = halves(gate, BLOCK_M, WIDTH)
        bias = bias_ptr
        if BIAS:
            bias += e.to(tl.int64) * N
            if not INTERLEAVED:
                n = n0 + tl.arange(0, BLOCK_N)
                gate += tl.load(bias + n, mask=n < I, other=0.0).to(tl.float32)[None, :]
                if GATED:
                    up += tl.load(bias + n + I, mask=n < I, other=0.0).to(tl.float32)[None, :]
        EPILOGUE: tl.constexpr = BLOCK_N * 2 if INTERLEAVED else BLOCK_N
        gate0, gate1 = halves(gate, BLOCK_M, EPILOGUE)
        up0, up1 = halves(up, BLOCK_M, EPILOGUE)
        HALF: tl.constexpr = BLOCK_N // 2
        low, b = low_ptr, lora_ptr
        if RANK:
            low += row.to(tl.int64) * RANK
            b += e.to(tl.int64) * stride_le
        _store_half(gate0, up0, bias, low, b, row, n0, I, rows_left, z_ptr, h_ptr, stride_lr, stride_ln, GATED, BIAS,
                    SAVE, ACT, LIMIT, UP_OFFSET, INTERLEAVED, RANK, PRECISION, BLOCK_M, HALF, BLOCK_R)  # fmt: skip
        _store_half(gate1, up1, bias, low, b, row, n0 + HALF, I, rows_left, z_ptr, h_ptr, stride_lr, stride_ln, GATED,
                    BIAS, SAVE, ACT, LIMIT, UP_OFFSET, INTERLEAVED, RANK, PRECISION, BLOCK_M, HALF, BLOCK_R)  # fmt: skip


@triton.jit(do_not_specialize=["num_m"])  # it follows T
def _up_fwd_kernel(
    x_ptr,  # [T, H]
    w,  # [E, 2I or I, H], or its descriptor; JOINED: the descriptor of [E, 2, I, H]
    w_trained,  # [n, 2I or I, H]: the weights of the experts that have a place here
    trained_ptr,  # [E] int32: that place, or -1
    bias_ptr,  # [E, 2I or I]
    low_ptr,  # [R, RANK]
    lora_ptr,  # [E, RANK, 2I or I], by its strides
    row_slot_ptr,  # [R] int32
    map_ptr,  # [3, num_m] int32
    z_ptr,  # [R, 2I or I]
    h_ptr,  # [R, I]
    num_m, I, H, stride_x, stride_e, stride_te, stride_n, stride_k, stride_le, stride_lr, stride_ln,
    SLOTS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, SAVE: tl.constexpr, TRAINED: tl.constexpr, EVEN_K: tl.constexpr,
    TMA: tl.constexpr, JOINED: tl.constexpr, K_LAST: tl.constexpr, PERSISTENT: tl.constexpr, RANK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        for pid in tl.range(tl.program_id(0), num_m * tl.cdiv(I, BLOCK_N), tl.num_programs(0)):
            _up_tile(pid, x_ptr, w, w_trained, trained_ptr, bias_ptr, low_ptr, lora_ptr, row_slot_ptr,
                     map_ptr, z_ptr, h_ptr, num_m, I, H, stride_x, stride_e, stride_te, stride_n, stride_k,
                     stride_le, stride_lr, stride_ln, SLOTS, ACT, GATED, LIMIT, UP_OFFSET, INTERLEAVED, BIAS, SAVE,
                     TRAINED, EVEN_K, TMA, JOINED, K_LAST, RANK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R,
                     GROUP_M)  # fmt: skip
    else:
        _up_tile(tl.program_id(0), x_ptr, w, w_trained, trained_ptr, bias_ptr, low_ptr, lora_ptr, row_slot_ptr,
                 map_ptr, z_ptr, h_ptr, num_m, I, H, stride_x, stride_e, stride_te, stride_n, stride_k,
                 stride_le, stride_lr, stride_ln, SLOTS, ACT, GATED, LIMIT, UP_OFFSET, INTERLEAVED, BIAS, SAVE,
                 TRAINED, EVEN_K, TMA, JOINED, K_LAST, RANK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R,
                 GROUP_M)  # fmt: skip


@triton.jit
def _gemm_tile(pid, a, w, w_trained, trained_ptr, bias_ptr, low_ptr, lora_ptr, map_ptr, y_ptr, num_m, N, K, stride_a,
               stride_e, stride_te, stride_n, stride_k, stride_le, stride_lr, stride_ln, BIAS: tl.constexpr,
               TRAINED: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, K_LAST: tl.constexpr, RANK: tl.constexpr,
               PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
               BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr):  # fmt: skip
    pid_m, pid_n = tile_of(pid, num_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    e = tl.load(map_ptr + pid_m)
    if e >= 0:
        row = tl.load(map_ptr + num_m + pid_m)
        rows_left = tl.load(map_ptr + 2 * num_m + pid_m) - row
        m = tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        n0 = pid_n * BLOCK_N
        if not TMA:
            a_ptr = a + row.to(tl.int64) * stride_a + (m[:, None].to(tl.int64) * stride_a + k[None, :])
        base = weight_base(w, w_trained, trained_ptr, e, stride_e, stride_te, TMA, TRAINED)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            if TMA:  # rows of the next expert come along; they are not stored
                rows = a.load([row, k0])
            else:
                mask = (m < rows_left)[:, None]
                if not EVEN_K:
                    mask = mask & (k0 + k < K)[None, :]
                rows = tl.load(a_ptr, mask=mask, other=0.0)
                a_ptr += BLOCK_K
            b = weight_block(base, e, n0, k0, N, K, stride_n, stride_k, EVEN_K, TMA, K_LAST, BLOCK_N, BLOCK_K, TRAINED)
            acc = tl.dot(rows, b.to(rows.dtype), acc, input_precision=PRECISION)
        n = n0 + tl.arange(0, BLOCK_N)
        if BIAS:
            acc += tl.load(bias_ptr + e.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        PIECES: tl.constexpr = (4 if BLOCK_N > 128 else 2) if RANK else 1
        WIDTH: tl.constexpr = BLOCK_N // PIECES
        for i in tl.static_range(PIECES):  # the low-rank term has an accumulator of its own, which as a whole would spill
            part = piece(acc, i, PIECES, BLOCK_M, BLOCK_N)
            c0 = n0 + i * WIDTH
            if RANK:
                low, b = low_ptr + row.to(tl.int64) * RANK, lora_ptr + e.to(tl.int64) * stride_le
                part += low_rank(low, b, rows_left, c0, N, stride_lr, stride_ln, RANK, PRECISION, BLOCK_M, WIDTH, BLOCK_R)
            c = c0 + tl.arange(0, WIDTH)
            y = y_ptr + row.to(tl.int64) * N + (m[:, None].to(tl.int64) * N + c[None, :])
            tl.store(y, part.to(y_ptr.dtype.element_ty), mask=(m < rows_left)[:, None] & (c < N)[None, :])


@triton.jit(do_not_specialize=["num_m"])  # it follows T
def _grouped_gemm_fwd_kernel(
    a,  # [R, K], or its descriptor
    w,  # [E, N, K] by its strides, or its descriptor
    w_trained,  # [n, N, K]: the weights of the experts that have a place here
    trained_ptr,  # [E] int32: that place, or -1
    bias_ptr,  # [E, N]
    low_ptr,  # [R, RANK]
    lora_ptr,  # [E, RANK, N], by its strides
    map_ptr,  # [3, num_m] int32
    y_ptr,  # [R, N]
    num_m, N, K, stride_a, stride_e, stride_te, stride_n, stride_k, stride_le, stride_lr, stride_ln,
    BIAS: tl.constexpr, TRAINED: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, K_LAST: tl.constexpr,
    PERSISTENT: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        for pid in tl.range(tl.program_id(0), num_m * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
            _gemm_tile(pid, a, w, w_trained, trained_ptr, bias_ptr, low_ptr, lora_ptr, map_ptr, y_ptr, num_m,
                       N, K, stride_a, stride_e, stride_te, stride_n, stride_k, stride_le, stride_lr, stride_ln,
                       BIAS, TRAINED, EVEN_K, TMA, K_LAST, RANK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R,
                       GROUP_M)  # fmt: skip
    else:
        _gemm_tile(tl.program_id(0), a, w, w_trained, trained_ptr, bias_ptr, low_ptr, lora_ptr, map_ptr, y_ptr, num_m,
                   N, K, stride_a, stride_e, stride_te, stride_n, stride_k, stride_le, stride_lr, stride_ln,
                   BIAS, TRAINED, EVEN_K, TMA, K_LAST, RANK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R,
                   GROUP_M)  # fmt: skip


@triton.jit(do_not_specialize=["num_m"])  # it follows T
def _grouped_gemm_stream_kernel(
    a,  # descriptor of [R, K]
    w,  # descriptor of [E, N, K], or with not K_LAST of [E, K, N]
    y,  # ragged descriptor of [R, N], half as wide as a tile
    bias_ptr,  # [E, N]
    low_ptr,  # [R, RANK]
    lora_ptr,  # [E, RANK, N], by its strides
    map_ptr,  # [3, num_m] int32
    num_m, N, K, stride_le, stride_lr, stride_ln,
    BIAS: tl.constexpr, K_LAST: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # one flat loop over the tiles of a program and their sums, so that the next tile's loads run under this one's epilogue.
    # Nothing in it may be conditional: dead tiles are excluded by their count, and the descriptor ends a store at the
    # expert's last row
    live = live_tiles(map_ptr, num_m)
    num_n = tl.cdiv(N, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2
    for pid in tl.range(tl.program_id(0), live * num_n, tl.num_programs(0), flatten=True):
        pid_m, pid_n = tile_of(pid, live, num_n, GROUP_M)
        e = tl.load(map_ptr + pid_m)
        row = tl.load(map_ptr + num_m + pid_m)
        rows_left = tl.load(map_ptr + 2 * num_m + pid_m) - row
        n0 = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            b = weight_block(w, e, n0, k0, N, K, 0, 0, True, True, K_LAST, BLOCK_N, BLOCK_K)
            acc = tl.dot(a.load([row, k0]), b, acc, input_precision=PRECISION)
        if BIAS:
            n = n0 + tl.arange(0, BLOCK_N)
            acc += tl.load(bias_ptr + e.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        if RANK:
            low, b = low_ptr + row.to(tl.int64) * RANK, lora_ptr + e.to(tl.int64) * stride_le
            left += low_rank(low, b, rows_left, n0, N, stride_lr, stride_ln, RANK, PRECISION, BLOCK_M, HALF, BLOCK_R)
            right += low_rank(low, b, rows_left, n0 + HALF, N, stride_lr, stride_ln, RANK, PRECISION, BLOCK_M, HALF, BLOCK_R)
        c0, c1, c2 = to_ragged_indices(row, rows_left, 0)
        y.store([c0, c1, c2, n0], tl.reshape(left.to(y.dtype), (1, 1, BLOCK_M, HALF)))
        y.store([c0, c1, c2, n0 + HALF], tl.reshape(right.to(y.dtype), (1, 1, BLOCK_M, HALF)))


def up_forward(
    x, up, bias, row_slot, tile_map, slots: int, act: str, gated: bool, save: bool, tile: Tile, trained=None,
    *, limit: float | None = None, up_offset: float = 0.0, interleaved: bool = False, lora: LowRank | None = None,
):  # fmt: skip
    """`x` [T, H], `up` [E, 2I or I, H], `row_slot` [R] -> z [R, 2I or I] (empty unless `save`), h [R, I].

    `lora` is added to z. The columns of z are in the order of up's rows;
    what `limit` and the others are, `moe_runtime.ops.activation` says.
    """
    R, H, Z = row_slot.numel(), x.shape[1], up.shape[1]
    I = Z // 2 if gated else Z
    z = x.new_empty(R if save else 0, Z)
    h = x.new_empty(R, I)
    num_m = tile_map.shape[1]
    if num_m == 0:
        return z, h
    up, k_last = last_contiguous(up, True)
    if interleaved:
        tile = in_turns(tile, arch_of(x.device))
    width = tile.BLOCK_N * (1 + interleaved)
    tma = tile.TMA and trained is None and describable(up)
    weights, strides = weight_operand(up, trained, k_last, tma, tile._replace(BLOCK_N=width))
    pair = up.unflatten(1 if k_last else 2, (2, I)) if gated and tma else up
    joined = tma and tile.JOINED and gated and not interleaved and describable(pair)
    if joined:
        block = [1, 2, tile.BLOCK_N, tile.BLOCK_K] if k_last else [1, tile.BLOCK_K, 2, tile.BLOCK_N]
        weights = (TensorDescriptor(pair, list(pair.shape), list(pair.stride()), block), None, None)
    (low, b, *lora_strides), constants = low_rank_operand(lora)
    with torch.cuda.device_of(x):
        _up_fwd_kernel[grid(tile, num_m, I, x.device)](
            x, *weights, bias, low, b, row_slot, tile_map, z if save else None, h, num_m, I, H, x.stride(0), *strides,
            *lora_strides, **constants,
            SLOTS=slots, ACT=act, GATED=gated, LIMIT=limit or 0.0, UP_OFFSET=up_offset, INTERLEAVED=interleaved,
            BIAS=bias is not None, SAVE=save, TRAINED=storage(up, trained),
            EVEN_K=H % tile.BLOCK_K == 0, TMA=tma, JOINED=joined, K_LAST=k_last, PERSISTENT=tile.PERSISTENT,
            PRECISION=precision(x), BLOCK_M=tile.BLOCK_M, BLOCK_N=tile.BLOCK_N, BLOCK_K=tile.BLOCK_K,
            GROUP_M=tile.GROUP_M,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
    return z, h


def grouped_gemm_forward(
    a, weight, bias, tile_map, k_last: bool, tile: Tile, trained=None, y=None, lora: LowRank | None = None
) -> torch.Tensor:
    """y[r] = weight[e] a[r] + bias[e], plus `lora`, for the rows of the tile map.

    Other rows stay as they are in `y`, or unwritten.

    `a` [R, K], `weight` [E, N, K] with k_last, else [E, K, N] (the transposed product) -> [R, N].
    """
    R, K = a.shape
    N = weight.shape[1] if k_last else weight.shape[2]
    y = a.new_empty(R, N) if y is None else y
    num_m = tile_map.shape[1]
    if num_m == 0 or N == 0:
        return y
    weight, k_last = last_contiguous(weight, k_last)
    tma = tile.TMA and trained is None and describable(a, weight)
    weights, strides = weight_operand(weight, trained, k_last, tma, tile)
    rows = TensorDescriptor(a, list(a.shape), list(a.stride()), [tile.BLOCK_M, tile.BLOCK_K]) if tma else a
    (low, b, *lora_strides), constants = low_rank_operand(lora)
    common = constants | {
        "BIAS": bias is not None, "K_LAST": k_last, "PRECISION": precision(a), "BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": tile.BLOCK_K, "GROUP_M": tile.GROUP_M, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
    if tma and tile.PERSISTENT and describable(y):
        stored = create_ragged_descriptor(y, [tile.BLOCK_M, tile.BLOCK_N // 2])
        with torch.cuda.device_of(a):
            _grouped_gemm_stream_kernel[grid(tile, num_m, N, a.device)](
                rows, weights[0], stored, bias, low, b, tile_map, num_m, N, K, *lora_strides, **common, enable_fp_fusion=True
            )
        return y
    with torch.cuda.device_of(a):
        _grouped_gemm_fwd_kernel[grid(tile, num_m, N, a.device)](
            rows, *weights, bias, low, b, tile_map, y, num_m, N, K, a.stride(0), *strides, *lora_strides,
            TRAINED=storage(weight, trained), EVEN_K=K % tile.BLOCK_K == 0, TMA=tma, PERSISTENT=tile.PERSISTENT, **common,
            enable_fp_fusion=True,
        )  # fmt: skip
    return y
