"""Backward pass of the experts: dz with the activation's gradient in its epilogue, dW and db.

The equations are in `moe_runtime.ops.moe_mlp`; dx is the plain product of `kernels.grouped_gemm`,
which also describes TMA. Sums over tiles are stored as partial results, which the
next kernel adds in a fixed order, without atomics.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices

from moe_runtime.kernels.activation import Form, activate_grad, below, shifted
from moe_runtime.kernels.compiling import named
from moe_runtime.kernels.dispatch import rows_of
from moe_runtime.kernels.operands import (
    Gathered,
    LowRank,
    check_tile,
    describable,
    expert_weight,
    grid,
    last_contiguous,
    low_rank,
    options_of,
    pairs,
    piece,
    product_of,
    rows_block,
    term_of,
    weight_block,
    weight_operand,
)
from moe_runtime.kernels.tiles import Tile, cells, outer, precision, tile_of


class Dz(NamedTuple):
    """The pre-activation, its gradient, and the weighted activation."""

    z: torch.Tensor  # [R, 2I or I]
    dz: torch.Tensor  # like z
    wh: torch.Tensor | None  # [R, I]: weight * h


class Order(NamedTuple):
    """The rows of each expert, and the index of its gradient."""

    row_slot: torch.Tensor | None  # [R] int32
    offsets: torch.Tensor  # [E + 1] int32
    index: torch.Tensor | None  # [E] int32: row of a compact output, -1 for a frozen expert


@triton.jit
def store_dz(
    dh,
    weight,
    rows,  # TileRows
    col0,
    I,
    out,  # Dz
    FORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write dz and weight * h of BLOCK_M rows by BLOCK_N columns; return the rows' <dh, h>.

    dh = (dout W_down) of these rows and columns.
    """
    m = tl.arange(0, BLOCK_M)
    n = col0 + tl.arange(0, BLOCK_N)
    live = (m < rows.left)[:, None]
    mask = live & (n < I)[None, :]
    width = I * 2 if FORM.GATED else I
    ACT: tl.constexpr = FORM.ACT
    LIMIT: tl.constexpr = FORM.LIMIT
    if FORM.INTERLEAVED:
        c = col0 * 2 + tl.arange(0, BLOCK_N * 2)
        offset = rows.first.to(tl.int64) * width + cells(m.to(tl.int64), width, c)
        both = live & (c < width)[None, :]
        z = tl.load(out.z + offset, mask=both, other=0.0).to(tl.float32)
        gate, up = pairs(z, BLOCK_M, BLOCK_N)
    else:
        offset = rows.first.to(tl.int64) * width + cells(m.to(tl.int64), width, n)
        gate = tl.load(out.z + offset, mask=mask, other=0.0).to(tl.float32)
    value, slope = activate_grad(below(gate, LIMIT), ACT)
    weighted = dh * weight[:, None]
    if FORM.GATED and not FORM.INTERLEAVED:
        up = tl.load(out.z + offset + I, mask=mask, other=0.0).to(tl.float32)
    dz = out.dz + offset
    if FORM.GATED:
        dup = weighted * value
        if LIMIT > 0:
            dup = tl.where((up >= -LIMIT) & (up <= LIMIT), dup, 0.0)
        dup = dup.to(out.dz.dtype.element_ty)
        if not FORM.INTERLEAVED:
            tl.store(dz + I, dup, mask=mask)
        up = shifted(up, LIMIT, FORM.UP_OFFSET)
        slope = slope * up
        value = value * up
    dgate = weighted * slope
    if LIMIT > 0:
        dgate = tl.where(gate <= LIMIT, dgate, 0.0)
    dgate = dgate.to(out.dz.dtype.element_ty)
    if FORM.INTERLEAVED:
        tl.store(dz, tl.reshape(tl.join(dgate, dup), (BLOCK_M, BLOCK_N * 2)), mask=both)
    else:
        tl.store(dz, dgate, mask=mask)
    if out.wh is not None:
        wh = out.wh + rows.first.to(tl.int64) * I + cells(m.to(tl.int64), I, n)
        tl.store(wh, (value * weight[:, None]).to(out.wh.dtype.element_ty), mask=mask)
    return tl.sum(tl.where(mask, dh * value, 0.0), 1)


@triton.jit(do_not_specialize=["num_m"], repr=named("dz", "FORM", "TILE"))  # grows with T
def _dz_kernel(
    tokens,  # Gathered: dout [T, H]
    w,  # [E, H, I], or its descriptor
    weight,  # Weight
    lora,  # Term or None, of I columns
    topk_ptr,  # [T, SLOTS] float32
    map_ptr,  # [3, num_m] int32
    out,  # Dz
    partial_ptr,  # [R, cdiv(I, BLOCK_N)] float32: <dout W_down, h> of these columns
    num_m,
    I,
    H,
    SLOTS: tl.constexpr,
    FORM: tl.constexpr,  # Form
    PRODUCT: tl.constexpr,  # Product
    TILE: tl.constexpr,  # Tile
):
    check_tile(TILE)
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    TMA: tl.constexpr = TILE.TMA
    num_n = tl.cdiv(I, BLOCK_N)
    pid_m, pid_n = tile_of(tl.program_id(0), num_m, num_n, TILE.GROUP_M)
    e = tl.load(map_ptr + pid_m)
    if e >= 0:
        rows = rows_of(map_ptr, num_m, pid_m, e)
        m = tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        n0 = pid_n * BLOCK_N
        live = m < rows.left
        slot = tl.load(tokens.row_slot + rows.first + m, mask=live, other=0)
        token = (slot // SLOTS).to(tl.int64)
        dout_row = tokens.data + cells(token, tokens.stride, k)
        dout = dout_row
        base = expert_weight(w, weight, e, TMA)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, H, BLOCK_K):
            a = rows_block(dout, live, k0 + k, H, PRODUCT.EVEN_K)
            b = weight_block(
                base,
                weight,
                e,
                n0,
                k0,
                I,
                H,
                PRODUCT,
                TMA,
                BLOCK_N,
                BLOCK_K,
            )
            acc = tl.dot(a, b.to(a.dtype), acc, input_precision=PRODUCT.PRECISION)
            dout += BLOCK_K
        topk_weight = tl.load(topk_ptr + slot, mask=live, other=0.0).to(tl.float32)
        # in pieces, as the epilogue's values would spill: z is twice as wide as the accumulator,
        # and a clamp also needs it
        MORE: tl.constexpr = FORM.INTERLEAVED or FORM.LIMIT > 0 or PRODUCT.RANK > 0
        PIECES: tl.constexpr = (4 if MORE else 2) * (4 if BLOCK_N > 128 else 1)
        COLUMNS: tl.constexpr = BLOCK_N // PIECES
        dot = tl.zeros((BLOCK_M,), tl.float32)
        for i in tl.static_range(PIECES):
            dh = piece(acc, i, PIECES, BLOCK_M, BLOCK_N)
            c0 = n0 + i * COLUMNS
            if lora is not None:
                dh += low_rank(
                    lora,
                    rows,
                    c0,
                    I,
                    PRODUCT,
                    BLOCK_M,
                    COLUMNS,
                )
            dot += store_dz(
                dh,
                topk_weight,
                rows,
                c0,
                I,
                out,
                FORM,
                BLOCK_M,
                COLUMNS,
            )
        if weight.bias is not None:  # y = W_down h + b: add <dout, b>, in the first column of tiles
            bias_ptr = weight.bias + e.to(tl.int64) * H
            for k0 in range(0, tl.where(pid_n == 0, H, 0), BLOCK_K):
                in_row = k0 + k < H
                a = tl.load(dout_row, mask=outer(live, in_row), other=0.0)
                bias = tl.load(bias_ptr + k0 + k, mask=in_row, other=0.0).to(tl.float32)
                dot += tl.sum(a.to(tl.float32) * bias[None, :], 1)
                dout_row += BLOCK_K
        tl.store(partial_ptr + (rows.first.to(tl.int64) + m) * num_n + pid_n, dot, mask=live)


@triton.jit
def _segment(order, e, COMPACT: tl.constexpr):
    """First row, end row and output index of expert e; a frozen expert has no rows.

    In a COMPACT output it has no index either.
    """
    start = tl.load(order.offsets + e)
    end = tl.load(order.offsets + e + 1)
    index = e
    if order.index is not None:
        trained = tl.load(order.index + e)
        end = tl.where(trained >= 0, end, start)
        if COMPACT:
            index = trained
    return start, end, index


@triton.jit(repr=named("grouped_gemm_bwd_w", "GATHER", "TILE"))
def _grouped_gemm_bwd_w_kernel(
    dy,  # [R or T, N]; with TMA, its ragged descriptor unless gathered
    x,  # [R or T, K], likewise
    order,  # Order
    dw_ptr,  # [E or n, N, K]
    N,
    K,
    stride_dy,
    stride_x,
    SLOTS: tl.constexpr,
    GATHER: tl.constexpr,  # the operand in token order: "dy", "x" or None
    FIRST: tl.constexpr,  # first expert
    COMPACT: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,  # Tile
):
    check_tile(TILE)
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    num_m = tl.cdiv(N, BLOCK_M)
    pid_m, pid_n = tile_of(tl.program_id(0), num_m, tl.cdiv(K, BLOCK_N), TILE.GROUP_M)
    start, end, index = _segment(order, tl.program_id(1) + FIRST, COMPACT)
    if ADD:  # no rows, so nothing to add
        index = tl.where(end > start, index, -1)
    if index >= 0:
        m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for row in range(start, end, BLOCK_K):
            live = k < end - row
            r = (row + k).to(tl.int64)
            token = r
            if GATHER is not None:
                slot = tl.load(order.row_slot + r, mask=live, other=0)
                token = (slot // SLOTS).to(tl.int64)
            if TILE.TMA:
                c0, c1, c2 = to_ragged_indices(start, end - start, row - start)
            if TILE.TMA and GATHER != "dy":
                a = tl.reshape(dy.load([c0, c1, c2, pid_m * BLOCK_M]), (BLOCK_K, BLOCK_M))
                a = tl.trans(a)
            else:  # transposed by its pointers: on Ampere tl.trans would prevent pipelining
                dy_row = token if GATHER == "dy" else r
                mask = live[None, :] & (m < N)[:, None]
                a = tl.load(dy + dy_row[None, :] * stride_dy + m[:, None], mask=mask, other=0.0)
            if TILE.TMA and GATHER != "x":
                b = tl.reshape(x.load([c0, c1, c2, pid_n * BLOCK_N]), (BLOCK_K, BLOCK_N))
            else:
                x_row = token if GATHER == "x" else r
                mask = outer(live, n < K)
                b = tl.load(x + x_row[:, None] * stride_x + n[None, :], mask=mask, other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        dw_ptr += index.to(tl.int64) * N * K
        # in pieces, as the loaded sums would spill; small tiles whole: threads would share elements
        PIECES: tl.constexpr = 4 if ADD and BLOCK_M * BLOCK_N > 1024 else 1
        COLUMNS: tl.constexpr = BLOCK_N // PIECES
        for i in tl.static_range(PIECES):
            part = piece(acc, i, PIECES, BLOCK_M, BLOCK_N)
            column = pid_n * BLOCK_N + i * COLUMNS + tl.arange(0, COLUMNS)
            dw = dw_ptr + cells(m.to(tl.int64), K, column)
            mask = outer(m < N, column < K)
            if ADD:
                part += tl.load(dw, mask=mask, other=0.0).to(tl.float32)
            tl.store(dw, part.to(dw_ptr.dtype.element_ty), mask=mask)


@triton.jit(repr=named("bias_bwd"))
def _bias_bwd_kernel(
    dy_ptr,  # [R or T, N]
    topk_ptr,  # [T, SLOTS] float32 or None: 1
    order,  # Order
    db_ptr,  # [E, N]
    N,
    stride_dy,
    SLOTS: tl.constexpr,
    GATHER: tl.constexpr,  # dy is in token order
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    start, end, index = _segment(order, tl.program_id(1), False)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for row in range(start, end, BLOCK_K):
        live = k < end - row
        r = (row + k).to(tl.int64)
        if GATHER or topk_ptr is not None:
            slot = tl.load(order.row_slot + r, mask=live, other=0)
        if GATHER:
            r = (slot // SLOTS).to(tl.int64)
        mask = outer(live, n < N)
        dy = tl.load(dy_ptr + r[:, None] * stride_dy + n[None, :], mask=mask, other=0.0)
        dy = dy.to(tl.float32)
        if topk_ptr is not None:
            weight = tl.load(topk_ptr + slot, mask=live, other=0.0)
            dy = dy * weight.to(tl.float32)[:, None]
        acc += dy
    db = tl.sum(acc, 0).to(db_ptr.dtype.element_ty)
    tl.store(db_ptr + index.to(tl.int64) * N + n, db, mask=n < N)


def dz_backward(
    dout,
    down,
    bias,
    topk_weight,
    row_slot,
    tile_map,
    z,
    act: str,
    gated: bool,
    need_wh: bool,
    tile: Tile,
    trained=None,
    *,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
    lora: LowRank | None = None,
):
    """From `dout` [T, H] and z [R, 2I or I] -> dz like z, weight * h [R, I], partial [R, n].

    weight * h is empty unless `need_wh`; `lora` is added to dout W_down. The sum of `partial`
    (float32) over its columns is the gradient of the row's weight. Rows outside the tile map are
    not written.

    Grid: as in `grouped_gemm.up_forward`. A program gathers BLOCK_M rows of dout, multiplies them
    by BLOCK_N columns of one expert's weight, and applies the activation's gradient. At least T H
    elements of dout, the weights of the experts that have rows and 2 R I of z are read, 2 R I of dz
    and R I of weight * h written.
    """
    H, I = down.shape[1:]
    R = row_slot.numel()
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
    tile = tile._replace(TMA=tma, JOINED=False, PERSISTENT=False)
    w, weight = weight_operand(down, trained, bias, k_last, tile)
    tokens = Gathered(dout, row_slot, dout.stride(0))
    out = Dz(z, dz, wh if need_wh else None)
    form = Form(act, gated, limit or 0.0, up_offset, interleaved)
    product = product_of(
        dout,
        down,
        k_last,
        H,
        tile,
        lora,
    )
    with torch.cuda.device_of(dout):
        _dz_kernel[grid(tile, num_m, I, dout.device)](
            tokens,
            w,
            weight,
            term_of(lora),
            topk_weight,
            tile_map,
            out,
            partial,
            num_m,
            I,
            H,
            topk_weight.shape[1],
            form,
            **options_of(product, tile),
        )
    return dz, wh, partial


def weight_backward(
    dy,
    x,
    row_slot,
    expert_offsets,
    slots: int,
    gather: str | None,
    tile: Tile,
    trained=None,
    num_trained=None,
    first: int = 0,
    into=None,
):
    """dw[e] = sum over e's rows of dy[r]^T x[r]: [E, N, K] in x's dtype, zero without rows.

    `gather` names the operand that is [T, .] in token order: "dy", "x", or None, which does not
    read `row_slot`. `trained` [E] int32 (-1: frozen) makes frozen experts zero or, with
    `num_trained`, the result [num_trained, N, K]: `trained` is an expert's index there, and an
    unused index is zero. Experts below `first` are not written. `into`, contiguous and of any
    floating dtype, is added to in place and returned; frozen experts and those without rows are
    unchanged there.

    Grid: the tiles of [N, K], in groups of GROUP_M, by the experts from `first` on. A program sums
    over all rows of one expert. At least R (N + K) elements are read and E N K written. Loads from
    L2 or memory are R N cdiv(K, BLOCK_N) of dy and R K cdiv(N, BLOCK_M) of x.
    """
    E, N, K = expert_offsets.numel() - 1, dy.shape[1], x.shape[1]
    if into is not None:
        dw = into
    elif num_trained is None:
        dw = x.new_empty(E, N, K)
    else:  # only the device knows which rows belong to no expert
        dw = x.new_zeros(num_trained, N, K)
    if dw.numel() == 0 or first == E:
        return dw
    # without an index loaded in the loop, every stage has a buffer
    stages = tile.num_stages if gather else (tile.num_stages + 1) // 2
    strides = (dy.stride(0), x.stride(0))
    in_order = [t for name, t in (("dy", dy), ("x", x)) if name != gather]
    tma = tile.TMA and describable(*in_order)
    if tma and gather != "dy":
        dy = create_ragged_descriptor(dy, [tile.BLOCK_K, tile.BLOCK_M])
    if tma and gather != "x":
        x = create_ragged_descriptor(x, [tile.BLOCK_K, tile.BLOCK_N])
    tile = tile._replace(TMA=tma, JOINED=False, PERSISTENT=False, num_stages=stages)
    order = Order(row_slot if gather else None, expert_offsets, trained)
    programs = (triton.cdiv(N, tile.BLOCK_M) * triton.cdiv(K, tile.BLOCK_N), E - first)
    with torch.cuda.device_of(dw):
        _grouped_gemm_bwd_w_kernel[programs](
            dy,
            x,
            order,
            dw,
            N,
            K,
            *strides,
            SLOTS=slots,
            GATHER=gather,
            FIRST=first,
            COMPACT=num_trained is not None,
            ADD=into is not None,
            PRECISION=precision(dw),
            TILE=tile,
            num_warps=tile.num_warps,
            num_stages=stages,
            enable_fp_fusion=True,
        )
    return dw


def bias_backward(
    dy,
    topk_weight,
    row_slot,
    expert_offsets,
    slots: int,
    gather: bool,
    trained=None,
):
    """db[e] = sum over e's rows of dy[r], times the row's weight if given: [E, N].

    Zero for frozen experts. Grid: blocks of at most 64 columns by the experts; a program sums over
    all rows of one expert. R N elements are read, E N written.
    """
    E, N = expert_offsets.numel() - 1, dy.shape[1]
    db = dy.new_empty(E, N)
    if db.numel() == 0:
        return db
    BLOCK_N = min(64, max(16, triton.next_power_of_2(N)))
    order = Order(row_slot, expert_offsets, trained)
    with torch.cuda.device_of(dy):
        _bias_bwd_kernel[(triton.cdiv(N, BLOCK_N), E)](
            dy,
            topk_weight,
            order,
            db,
            N,
            dy.stride(0),
            SLOTS=slots,
            GATHER=gather,
            BLOCK_N=BLOCK_N,
            BLOCK_K=64,
            enable_fp_fusion=True,
        )
    return db
