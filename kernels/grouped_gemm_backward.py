"""Backward of the experts: dz with the activation's gradient in its epilogue, and the weights' and biases' gradients.

The equations are in `moe_runtime.ops.moe_mlp`; dx is the plain product of `kernels.grouped_gemm`. Sums over tiles are stored as
partial results, which the next kernel adds in a fixed order: no atomics.
"""

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices

from moe_runtime.kernels.activation import activate_grad, below, shifted
from moe_runtime.kernels.operands import (
    LowRank,
    describable,
    grid,
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
from moe_runtime.kernels.tiles import Tile, precision, tile_of


@triton.jit
def store_dz(dh, weight, row, col0, I, rows_left, z_ptr, dz_ptr, wh_ptr, GATED: tl.constexpr, WH: tl.constexpr,
             ACT: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """From dh = (dout W_down) of BLOCK_M rows by BLOCK_N columns write dz and weight * h; return the rows' <dh, h>."""
    m = tl.arange(0, BLOCK_M)
    n = col0 + tl.arange(0, BLOCK_N)
    mask = (m < rows_left)[:, None] & (n < I)[None, :]
    width = I * 2 if GATED else I
    if INTERLEAVED:
        c = col0 * 2 + tl.arange(0, BLOCK_N * 2)
        offset = row.to(tl.int64) * width + (m[:, None].to(tl.int64) * width + c[None, :])
        both = (m < rows_left)[:, None] & (c < width)[None, :]
        gate, up = pairs(tl.load(z_ptr + offset, mask=both, other=0.0).to(tl.float32), BLOCK_M, BLOCK_N)
    else:
        offset = row.to(tl.int64) * width + (m[:, None].to(tl.int64) * width + n[None, :])
        gate = tl.load(z_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    value, slope = activate_grad(below(gate, LIMIT), ACT)
    weighted = dh * weight[:, None]
    if GATED and not INTERLEAVED:
        up = tl.load(z_ptr + offset + I, mask=mask, other=0.0).to(tl.float32)
    dz = dz_ptr + offset
    if GATED:
        dup_ptr = dz + I
        dup = weighted * value
        if LIMIT > 0:
            dup = tl.where((up >= -LIMIT) & (up <= LIMIT), dup, 0.0)
        dup = dup.to(dz_ptr.dtype.element_ty)
        if not INTERLEAVED:
            tl.store(dup_ptr, dup, mask=mask)
        up = shifted(up, LIMIT, UP_OFFSET)
        slope = slope * up
        value = value * up
    dgate = weighted * slope
    if LIMIT > 0:
        dgate = tl.where(gate <= LIMIT, dgate, 0.0)
    dgate = dgate.to(dz_ptr.dtype.element_ty)
    if INTERLEAVED:
        tl.store(dz, tl.reshape(tl.join(dgate, dup), (BLOCK_M, BLOCK_N * 2)), mask=both)
    else:
        tl.store(dz, dgate, mask=mask)
    if WH:
        wh = wh_ptr + row.to(tl.int64) * I + (m[:, None].to(tl.int64) * I + n[None, :])
        tl.store(wh, (value * weight[:, None]).to(wh_ptr.dtype.element_ty), mask=mask)
    return tl.sum(tl.where(mask, dh * value, 0.0), 1)


@triton.jit
def _dz_tile(pid, dout_ptr, w, w_trained, trained_ptr, bias_ptr, low_ptr, lora_ptr, weight_ptr, row_slot_ptr, map_ptr,
             z_ptr, dz_ptr, wh_ptr, partial_ptr, num_m, I, H, stride_dout, stride_e, stride_te, stride_n, stride_k,
             stride_le, stride_lr, stride_ln, SLOTS: tl.constexpr, ACT: tl.constexpr,
             GATED: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
             INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, WH: tl.constexpr, TRAINED: tl.constexpr,
             EVEN_K: tl.constexpr, TMA: tl.constexpr, K_LAST: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
             GROUP_M: tl.constexpr):  # fmt: skip
    num_n = tl.cdiv(I, BLOCK_N)
    pid_m, pid_n = tile_of(pid, num_m, num_n, GROUP_M)
    e = tl.load(map_ptr + pid_m)
    if e >= 0:
        row = tl.load(map_ptr + num_m + pid_m)
        rows_left = tl.load(map_ptr + 2 * num_m + pid_m) - row
        m = tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        n0 = pid_n * BLOCK_N
        live = m < rows_left
        slot = tl.load(row_slot_ptr + row + m, mask=live, other=0)
        dout_row = dout_ptr + ((slot // SLOTS).to(tl.int64)[:, None] * stride_dout + k[None, :])
        dout = dout_row
        base = weight_base(w, w_trained, trained_ptr, e, stride_e, stride_te, TMA, TRAINED)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, H, BLOCK_K):
            mask = live[:, None]
            if not EVEN_K:
                mask = mask & (k0 + k < H)[None, :]
            a = tl.load(dout, mask=mask, other=0.0)
            b = weight_block(base, e, n0, k0, I, H, stride_n, stride_k, EVEN_K, TMA, K_LAST, BLOCK_N, BLOCK_K, TRAINED)
            acc = tl.dot(a, b.to(a.dtype), acc, input_precision=PRECISION)
            dout += BLOCK_K
        weight = tl.load(weight_ptr + slot, mask=live, other=0.0).to(tl.float32)
        # in pieces, or what the epilogue holds besides the accumulator would spill: z is twice as wide, or a clamp needs it too
        PIECES: tl.constexpr = (4 if INTERLEAVED or LIMIT > 0 or RANK else 2) * (4 if BLOCK_N > 128 else 1)
        WIDTH: tl.constexpr = BLOCK_N // PIECES
        dot = tl.zeros((BLOCK_M,), tl.float32)
        for i in tl.static_range(PIECES):
            dh = piece(acc, i, PIECES, BLOCK_M, BLOCK_N)
            c0 = n0 + i * WIDTH
            if RANK:
                low, b = low_ptr + row.to(tl.int64) * RANK, lora_ptr + e.to(tl.int64) * stride_le
                dh += low_rank(low, b, rows_left, c0, I, stride_lr, stride_ln, RANK, PRECISION, BLOCK_M, WIDTH, BLOCK_R)
            dot += store_dz(dh, weight, row, c0, I, rows_left, z_ptr, dz_ptr, wh_ptr, GATED, WH, ACT, LIMIT, UP_OFFSET,
                            INTERLEAVED, BLOCK_M, WIDTH)  # fmt: skip
        if BIAS:  # y = W_down h + b: the weight's gradient has <dout, b> too, in the first column
            for k0 in range(0, tl.where(pid_n == 0, H, 0), BLOCK_K):
                in_row = k0 + k < H
                a = tl.load(dout_row, mask=live[:, None] & in_row[None, :], other=0.0).to(tl.float32)
                bias = tl.load(bias_ptr + e.to(tl.int64) * H + k0 + k, mask=in_row, other=0.0).to(tl.float32)
                dot += tl.sum(a * bias[None, :], 1)
                dout_row += BLOCK_K
        tl.store(partial_ptr + (row.to(tl.int64) + m) * num_n + pid_n, dot, mask=live)


@triton.jit(do_not_specialize=["num_m"])  # it follows T
def _dz_kernel(
    dout_ptr,  # [T, H]
    w,  # [E, H, I], or its descriptor
    w_trained,  # [n, H, I]: the weights of the experts that have a place here
    trained_ptr,  # [E] int32: that place, or -1
    bias_ptr,  # [E, H]
    low_ptr,  # [R, RANK]
    lora_ptr,  # [E, RANK, I], by its strides
    weight_ptr,  # [T, SLOTS] float32
    row_slot_ptr,  # [R] int32
    map_ptr,  # [3, num_m] int32
    z_ptr,  # [R, 2I or I]
    dz_ptr,  # [R, 2I or I]
    wh_ptr,  # [R, I]: weight * h
    partial_ptr,  # [R, cdiv(I, BLOCK_N)] float32: <dout W_down, h> of these columns
    num_m, I, H, stride_dout, stride_e, stride_te, stride_n, stride_k, stride_le, stride_lr, stride_ln,
    SLOTS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, WH: tl.constexpr, TRAINED: tl.constexpr, EVEN_K: tl.constexpr,
    TMA: tl.constexpr, K_LAST: tl.constexpr, PERSISTENT: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        for pid in tl.range(tl.program_id(0), num_m * tl.cdiv(I, BLOCK_N), tl.num_programs(0)):
            _dz_tile(pid, dout_ptr, w, w_trained, trained_ptr, bias_ptr, low_ptr, lora_ptr, weight_ptr,
                     row_slot_ptr, map_ptr, z_ptr, dz_ptr, wh_ptr, partial_ptr, num_m, I, H, stride_dout, stride_e,
                     stride_te, stride_n, stride_k, stride_le, stride_lr, stride_ln, SLOTS, ACT, GATED, LIMIT, UP_OFFSET,
                     INTERLEAVED, BIAS, WH, TRAINED, EVEN_K, TMA, K_LAST, RANK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
                     BLOCK_R, GROUP_M)  # fmt: skip
    else:
        _dz_tile(tl.program_id(0), dout_ptr, w, w_trained, trained_ptr, bias_ptr, low_ptr, lora_ptr, weight_ptr,
                 row_slot_ptr, map_ptr, z_ptr, dz_ptr, wh_ptr, partial_ptr, num_m, I, H, stride_dout, stride_e,
                 stride_te, stride_n, stride_k, stride_le, stride_lr, stride_ln, SLOTS, ACT, GATED, LIMIT, UP_OFFSET,
                 INTERLEAVED, BIAS, WH, TRAINED, EVEN_K, TMA, K_LAST, RANK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
                 BLOCK_R, GROUP_M)  # fmt: skip


@triton.jit
def _segment(expert_offsets_ptr, map_ptr, e, MAP: tl.constexpr, COMPACT: tl.constexpr):
    """First row, end row and place in the output of expert e; a frozen expert has no rows, in a compact output no place."""
    start = tl.load(expert_offsets_ptr + e)
    end = tl.load(expert_offsets_ptr + e + 1)
    place = e
    if MAP:
        trained = tl.load(map_ptr + e)
        end = tl.where(trained >= 0, end, start)
        if COMPACT:
            place = trained
    return start, end, place


@triton.jit
def _grouped_gemm_bwd_w_kernel(
    dy,  # [R or T, N]; with TMA and unless gathered, its ragged descriptor
    x,  # [R or T, K], likewise
    row_slot_ptr,  # [R] int32
    expert_offsets_ptr,  # [E + 1] int32
    map_ptr,  # [E] int32: row of the output, -1 for a frozen expert
    dw_ptr,  # [E or n, N, K]
    N, K, stride_dy, stride_x,
    SLOTS: tl.constexpr, GATHER_DY: tl.constexpr, GATHER_X: tl.constexpr, FIRST: tl.constexpr, MAP: tl.constexpr,
    COMPACT: tl.constexpr, TMA: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = tile_of(tl.program_id(0), tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N), GROUP_M)
    e = tl.program_id(1) + FIRST
    start, end, place = _segment(expert_offsets_ptr, map_ptr, e, MAP, COMPACT)
    if ADD:  # nothing to add
        place = tl.where(end > start, place, -1)
    if place >= 0:
        m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for row in range(start, end, BLOCK_K):
            live = k < end - row
            at = (row + k).to(tl.int64)
            token = at
            if GATHER_DY or GATHER_X:
                token = (tl.load(row_slot_ptr + at, mask=live, other=0) // SLOTS).to(tl.int64)
            if TMA and not GATHER_DY:
                c0, c1, c2 = to_ragged_indices(start, end - start, row - start)
                a = tl.trans(tl.reshape(dy.load([c0, c1, c2, pid_m * BLOCK_M]), (BLOCK_K, BLOCK_M)))
            else:  # transposed by its pointers: behind tl.trans Ampere's pipeline would not hold it
                dy_row = token if GATHER_DY else at
                a = tl.load(dy + dy_row[None, :] * stride_dy + m[:, None], mask=live[None, :] & (m < N)[:, None], other=0.0)
            if TMA and not GATHER_X:
                c0, c1, c2 = to_ragged_indices(start, end - start, row - start)
                b = tl.reshape(x.load([c0, c1, c2, pid_n * BLOCK_N]), (BLOCK_K, BLOCK_N))
            else:
                x_row = token if GATHER_X else at
                b = tl.load(x + x_row[:, None] * stride_x + n[None, :], mask=live[:, None] & (n < K)[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        dw_ptr += place.to(tl.int64) * N * K
        if ADD:  # in pieces, or what was there would spill
            WIDTH: tl.constexpr = BLOCK_N // 4
            for i in tl.static_range(4):
                column = pid_n * BLOCK_N + i * WIDTH + tl.arange(0, WIDTH)
                dw = dw_ptr + (m[:, None].to(tl.int64) * K + column[None, :])
                mask = (m < N)[:, None] & (column < K)[None, :]
                total = piece(acc, i, 4, BLOCK_M, BLOCK_N) + tl.load(dw, mask=mask, other=0.0).to(tl.float32)
                tl.store(dw, total.to(dw_ptr.dtype.element_ty), mask=mask)
        else:
            dw = dw_ptr + (m[:, None].to(tl.int64) * K + n[None, :])
            tl.store(dw, acc.to(dw_ptr.dtype.element_ty), mask=(m < N)[:, None] & (n < K)[None, :])


@triton.jit
def _bias_bwd_kernel(
    dy_ptr,  # [R or T, N]
    weight_ptr,  # [T, SLOTS] float32
    row_slot_ptr,  # [R] int32
    expert_offsets_ptr,  # [E + 1] int32
    map_ptr,  # [E] int32
    db_ptr,  # [E, N]
    N, stride_dy,
    SLOTS: tl.constexpr, GATHER: tl.constexpr, WEIGHTED: tl.constexpr, MAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1)
    start, end, place = _segment(expert_offsets_ptr, map_ptr, e, MAP, False)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for row in range(start, end, BLOCK_K):
        live = k < end - row
        at = (row + k).to(tl.int64)
        if GATHER or WEIGHTED:
            slot = tl.load(row_slot_ptr + at, mask=live, other=0)
        if GATHER:
            at = (slot // SLOTS).to(tl.int64)
        dy = tl.load(dy_ptr + at[:, None] * stride_dy + n[None, :], mask=live[:, None] & (n < N)[None, :], other=0.0)
        dy = dy.to(tl.float32)
        if WEIGHTED:
            dy = dy * tl.load(weight_ptr + slot, mask=live, other=0.0).to(tl.float32)[:, None]
        acc += dy
    tl.store(db_ptr + place.to(tl.int64) * N + n, tl.sum(acc, 0).to(db_ptr.dtype.element_ty), mask=n < N)


def dz_backward(
    dout, down, bias, topk_weight, row_slot, tile_map, z, act: str, gated: bool, need_wh: bool, tile: Tile, trained=None,
    *, limit: float | None = None, up_offset: float = 0.0, interleaved: bool = False, lora: LowRank | None = None,
):  # fmt: skip
    """From `dout` [T, H] and z [R, 2I or I] -> dz like z, weight * h [R, I] (empty unless need_wh), partial [R, n] float32.

    `lora` is added to dout W_down. The sum of `partial` over its columns is the gradient of the row's weight. Rows outside of
    the tile map stay unwritten.
    """
    H, I = down.shape[1:]
    R, slots = row_slot.numel(), topk_weight.shape[1]
    if lora is not None and interleaved:  # a wider tile spills
        tile = tile._replace(BLOCK_N=min(tile.BLOCK_N, 128))
    dz = torch.empty_like(z)
    wh = z.new_empty(R if need_wh else 0, I)
    partial = torch.empty(R, triton.cdiv(I, tile.BLOCK_N), dtype=torch.float32, device=z.device)
    num_m = tile_map.shape[1]
    if num_m == 0:
        return dz, wh, partial
    down, k_last = last_contiguous(down, False)
    tma = tile.TMA and trained is None and describable(down)
    weights, strides = weight_operand(down, trained, k_last, tma, tile)
    (low, b, *lora_strides), constants = low_rank_operand(lora)
    with torch.cuda.device_of(dout):
        _dz_kernel[grid(tile, num_m, I, dout.device)](
            dout, *weights, bias, low, b, topk_weight, row_slot, tile_map, z, dz, wh if need_wh else None, partial, num_m, I, H,
            dout.stride(0), *strides, *lora_strides, **constants,
            SLOTS=slots, ACT=act, GATED=gated, LIMIT=limit or 0.0, UP_OFFSET=up_offset,
            INTERLEAVED=interleaved, BIAS=bias is not None, WH=need_wh,
            TRAINED=storage(down, trained), EVEN_K=H % tile.BLOCK_K == 0, TMA=tma, K_LAST=k_last,
            PERSISTENT=tile.PERSISTENT, PRECISION=precision(dout), BLOCK_M=tile.BLOCK_M, BLOCK_N=tile.BLOCK_N,
            BLOCK_K=tile.BLOCK_K, GROUP_M=tile.GROUP_M,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
    return dz, wh, partial


def weight_backward(dy, x, row_slot, expert_offsets, slots: int, gather: str | None, tile: Tile, trained=None,
                    num_trained=None, first: int = 0, into=None):  # fmt: skip
    """dw[e] = sum over e's rows of dy[r]^T x[r]: [E, N, K] in x's dtype; zero for an expert without rows.

    `gather` ("dy", "x", or None: `row_slot` is not read) names the operand that is [T, .] and not in expert order. `trained`
    [E] int32 (-1: frozen) leaves frozen experts zero or, with `num_trained`, gives [num_trained, N, K] in the order that
    `trained` says, with zeros where it names nobody. Experts below `first` stay unwritten. `into`, contiguous and of any
    floating dtype, is added to in place and returned; what has no rows, or is frozen, stays as it is there.
    """
    E, N, K = expert_offsets.numel() - 1, dy.shape[1], x.shape[1]
    # only the device knows which rows belong to no expert
    dw = into if into is not None else (x.new_empty(E, N, K) if num_trained is None else x.new_zeros(num_trained, N, K))
    if dw.numel() == 0 or first == E:
        return dw
    # without an index in the loop every stage is a buffer
    stages = tile.num_stages if gather else (tile.num_stages + 1) // 2
    dy_stride, x_stride = dy.stride(0), x.stride(0)
    tma = tile.TMA and describable(*([] if gather == "dy" else [dy]), *([] if gather == "x" else [x]))
    if tma and gather != "dy":
        dy = create_ragged_descriptor(dy, [tile.BLOCK_K, tile.BLOCK_M])
    if tma and gather != "x":
        x = create_ragged_descriptor(x, [tile.BLOCK_K, tile.BLOCK_N])
    with torch.cuda.device_of(dw):
        _grouped_gemm_bwd_w_kernel[(triton.cdiv(N, tile.BLOCK_M) * triton.cdiv(K, tile.BLOCK_N), E - first)](
            dy, x, row_slot, expert_offsets, trained, dw, N, K, dy_stride, x_stride,
            SLOTS=slots, GATHER_DY=gather == "dy", GATHER_X=gather == "x", FIRST=first, MAP=trained is not None,
            COMPACT=num_trained is not None, TMA=tma, ADD=into is not None, PRECISION=precision(dw), BLOCK_M=tile.BLOCK_M,
            BLOCK_N=tile.BLOCK_N, BLOCK_K=tile.BLOCK_K, GROUP_M=tile.GROUP_M, num_warps=tile.num_warps, num_stages=stages,
            enable_fp_fusion=True,
        )  # fmt: skip
    return dw


def bias_backward(dy, topk_weight, row_slot, expert_offsets, slots: int, gather: bool, trained=None):
    """db[e] = sum over e's rows of dy[r], times the row's weight if `topk_weight` is given: [E, N], zero for frozen experts."""
    E, N = expert_offsets.numel() - 1, dy.shape[1]
    db = dy.new_empty(E, N)
    if db.numel() == 0:
        return db
    BLOCK_N = min(64, max(16, triton.next_power_of_2(N)))
    with torch.cuda.device_of(dy):
        _bias_bwd_kernel[(triton.cdiv(N, BLOCK_N), E)](
            dy, topk_weight, row_slot, expert_offsets, trained, db, N, dy.stride(0),
            SLOTS=slots, GATHER=gather, WEIGHTED=topk_weight is not None, MAP=trained is not None, BLOCK_N=BLOCK_N, BLOCK_K=64,
            enable_fp_fusion=True,
        )  # fmt: skip
    return db
