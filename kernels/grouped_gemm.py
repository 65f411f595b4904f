"""One matrix product per expert over rows in expert order: up projection and plain product.

The equations are in `moe_runtime.ops.grouped_gemm` and `moe_runtime.ops.moe_mlp`. A program
computes one tile of the tile map (`kernels.dispatch.tile_map`): BLOCK_M rows of one expert by
BLOCK_N columns. Weights are passed as (n, k) with any strides, so the plain kernel computes both
the down projection (k contiguous) and dx (n contiguous).

The expected gain of each option over the plain form, and when the option is to be deleted:
TMA         addresses and bounds cost no registers; if pointers are as fast on sm_90 at 128 rows.
JOINED      one product of gate and up instead of two, and stream; if two are as fast on sm_90.
stream      one program per processor loads the next tile during an epilogue; if the plain kernels
            are as fast.
"""

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices

from moe_runtime.kernels.activation import Form, activate, below, shifted
from moe_runtime.kernels.compiling import named
from moe_runtime.kernels.dispatch import live_tiles, rows_of
from moe_runtime.kernels.operands import (
    Gathered,
    LowRank,
    add_terms,
    check_tile,
    describable,
    descriptor,
    expert_weight,
    grid,
    halves,
    joined_block,
    last_contiguous,
    options_of,
    pairs,
    piece,
    product_of,
    rows_block,
    term_of,
    weight_block,
    weight_operand,
)
from moe_runtime.kernels.tiles import Tile, arch_of, cells, in_turns, outer, tile_of


@triton.jit
def _store_activation(
    gate,  # INTERLEAVED: gate and up, [BLOCK_M, 2 BLOCK_N]
    up,
    rows,  # TileRows
    col0,
    I,
    z_ptr,
    h_ptr,
    FORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write z = [gate, up] and h = act(gate) * up of a tile's rows, each if its pointer is given.

    The tile has BLOCK_N columns of h, from `col0` on.
    """
    m = tl.arange(0, BLOCK_M)
    n = col0 + tl.arange(0, BLOCK_N)
    live = (m < rows.left)[:, None]
    mask = live & (n < I)[None, :]
    if z_ptr is not None:
        width = I * 2 if FORM.GATED else I
        z = z_ptr + rows.first.to(tl.int64) * width
        if FORM.INTERLEAVED:
            c = col0 * 2 + tl.arange(0, BLOCK_N * 2)
            z += cells(m.to(tl.int64), width, c)
            tl.store(z, gate.to(z_ptr.dtype.element_ty), mask=live & (c < width)[None, :])
        else:
            z += cells(m.to(tl.int64), width, n)
            tl.store(z, gate.to(z_ptr.dtype.element_ty), mask=mask)
            if FORM.GATED:
                tl.store(z + I, up.to(z_ptr.dtype.element_ty), mask=mask)
    if h_ptr is not None:
        if FORM.INTERLEAVED:
            gate, up = pairs(gate, BLOCK_M, BLOCK_N)
        ACT: tl.constexpr = FORM.ACT  # Triton 3.6 cannot pass it on directly
        h = activate(below(gate, FORM.LIMIT), ACT)
        if FORM.GATED:
            h = h * shifted(up, FORM.LIMIT, FORM.UP_OFFSET)
        h_ptr += rows.first.to(tl.int64) * I
        offset = cells(m.to(tl.int64), I, n)
        tl.store(h_ptr + offset, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_m"], repr=named("up_fwd", "FORM", "TILE"))  # grows with T
def _up_fwd_kernel(
    tokens,  # Gathered: x [T, H]
    w,  # [E, 2I or I, H], or its descriptor; JOINED: the descriptor of [E, 2, I, H]
    weight,  # Weight
    lora,  # Term or None, of 2I or I columns
    map_ptr,  # [3, num_m] int32
    z_ptr,  # [R, 2I or I] or None
    h_ptr,  # [R, I] or None
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
    PRECISION: tl.constexpr = PRODUCT.PRECISION
    # interleaved gate and up have one accumulator
    WIDTH: tl.constexpr = BLOCK_N * 2 if FORM.INTERLEAVED else BLOCK_N
    pid_m, pid_n = tile_of(tl.program_id(0), num_m, tl.cdiv(I, BLOCK_N), TILE.GROUP_M)
    e = tl.load(map_ptr + pid_m)
    if e >= 0:
        rows = rows_of(map_ptr, num_m, pid_m, e)
        m = tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        live = m < rows.left
        token = tl.load(tokens.row_slot + rows.first + m, mask=live, other=0) // SLOTS
        x = tokens.data + cells(token.to(tl.int64), tokens.stride, k)
        N = I * 2 if FORM.GATED else I
        n0 = pid_n * BLOCK_N
        base = expert_weight(w, weight, e, TMA)
        gate = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        up = gate
        for k0 in range(0, H, BLOCK_K):
            a = rows_block(x, live, k0 + k, H, PRODUCT.EVEN_K)
            b = weight_block(
                base,
                weight,
                e,
                pid_n * WIDTH,
                k0,
                N,
                H,
                PRODUCT,
                TMA,
                WIDTH,
                BLOCK_K,
            )
            gate = tl.dot(a, b.to(a.dtype), gate, input_precision=PRECISION)
            if FORM.GATED and not FORM.INTERLEAVED:
                c0 = I + n0
                b = weight_block(
                    base,
                    weight,
                    e,
                    c0,
                    k0,
                    N,
                    H,
                    PRODUCT,
                    TMA,
                    BLOCK_N,
                    BLOCK_K,
                )
                up = tl.dot(a, b.to(a.dtype), up, input_precision=PRECISION)
            x += BLOCK_K
        PIECES: tl.constexpr = 4 if FORM.INTERLEAVED else 2
        COLUMNS: tl.constexpr = BLOCK_N // PIECES
        PART: tl.constexpr = WIDTH // PIECES
        for i in tl.static_range(PIECES):
            col0 = n0 + i * COLUMNS
            c0 = pid_n * WIDTH + i * PART
            part = piece(gate, i, PIECES, BLOCK_M, WIDTH)
            end = N if FORM.INTERLEAVED else I
            part = add_terms(
                part,
                weight,
                lora,
                rows,
                c0,
                end,
                N,
                PRODUCT,
                BLOCK_M,
                PART,
            )
            second = part
            if FORM.GATED and not FORM.INTERLEAVED:
                c0 = I + col0
                second = add_terms(
                    piece(up, i, PIECES, BLOCK_M, BLOCK_N),
                    weight,
                    lora,
                    rows,
                    c0,
                    N,
                    N,
                    PRODUCT,
                    BLOCK_M,
                    COLUMNS,
                )
            _store_activation(
                part,
                second,
                rows,
                col0,
                I,
                z_ptr,
                h_ptr,
                FORM,
                BLOCK_M,
                COLUMNS,
            )


@triton.jit
def _store_piece(y, start, n, part, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store columns from n on of a tile's rows; `start` is the tile's ragged index.

    The descriptor clips at the expert's last row and at the last column.
    """
    c0, c1, c2 = start
    y.store([c0, c1, c2, n], tl.reshape(part.to(y.dtype), (1, 1, BLOCK_M, BLOCK_N)))


@triton.jit(do_not_specialize=["num_m"], repr=named("up_stream", "FORM", "TILE"))  # grows with T
def _up_stream_kernel(
    tokens,  # Gathered: x [T, H]
    w,  # descriptor of [E, 2, I, H], or of [E, H, 2, I] without K_LAST
    weight,  # Weight
    lora,  # Term or None, of 2I columns
    map_ptr,  # [3, num_m] int32
    z_gate,  # ragged descriptor of the left half of z [R, 2I], or None
    z_up,  # of the right half
    h,  # of [R, I]; each is half as wide as a tile
    num_m,
    I,
    H,
    SLOTS: tl.constexpr,
    FORM: tl.constexpr,  # Form: gated, not interleaved
    PRODUCT: tl.constexpr,  # Product
    TILE: tl.constexpr,  # Tile
):
    check_tile(TILE)
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    HALF: tl.constexpr = BLOCK_N // 2
    ACT: tl.constexpr = FORM.ACT  # Triton 3.6 cannot pass it on directly
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    live = live_tiles(map_ptr, num_m)
    num_n = tl.cdiv(I, BLOCK_N)
    # as in `_grouped_gemm_stream_kernel`
    for pid in tl.range(tl.program_id(0), live * num_n, tl.num_programs(0), flatten=True):
        pid_m, pid_n = tile_of(pid, live, num_n, TILE.GROUP_M)
        e = tl.load(map_ptr + pid_m)
        rows = rows_of(map_ptr, num_m, pid_m, e)
        filled = m < rows.left
        token = tl.load(tokens.row_slot + rows.first + m, mask=filled, other=0) // SLOTS
        x = tokens.data + cells(token.to(tl.int64), tokens.stride, k)
        n0 = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N * 2), tl.float32)
        for k0 in range(0, H, BLOCK_K):
            a = rows_block(x, filled, k0 + k, H, PRODUCT.EVEN_K)
            b = joined_block(w, e, n0, k0, PRODUCT.K_LAST, BLOCK_N, BLOCK_K)
            acc = tl.dot(a, b, acc, input_precision=PRODUCT.PRECISION)
            x += BLOCK_K
        gates, ups = halves(acc, BLOCK_M, BLOCK_N * 2)
        start = to_ragged_indices(rows.first, rows.left, 0)
        for i in tl.static_range(2):
            n = n0 + i * HALF
            gate = piece(gates, i, 2, BLOCK_M, BLOCK_N)
            gate = add_terms(gate, weight, lora, rows, n, I, I * 2, PRODUCT, BLOCK_M, HALF)
            up = piece(ups, i, 2, BLOCK_M, BLOCK_N)
            up = add_terms(up, weight, lora, rows, I + n, I * 2, I * 2, PRODUCT, BLOCK_M, HALF)
            if z_gate is not None:
                _store_piece(z_gate, start, n, gate, BLOCK_M, HALF)
                _store_piece(z_up, start, n, up, BLOCK_M, HALF)
            gate = activate(below(gate, FORM.LIMIT), ACT)
            gate = gate * shifted(up, FORM.LIMIT, FORM.UP_OFFSET)
            _store_piece(h, start, n, gate, BLOCK_M, HALF)


@triton.jit(do_not_specialize=["num_m"], repr=named("grouped_gemm_fwd", "TILE"))  # grows with T
def _grouped_gemm_fwd_kernel(
    a,  # [R, K], or its descriptor
    w,  # [E, N, K] by its strides, or its descriptor
    weight,  # Weight
    lora,  # Term or None, of N columns
    map_ptr,  # [3, num_m] int32
    y_ptr,  # [R, N]
    num_m,
    N,
    K,
    stride_a,
    PRODUCT: tl.constexpr,  # Product
    TILE: tl.constexpr,  # Tile
):
    check_tile(TILE)
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    TMA: tl.constexpr = TILE.TMA
    pid_m, pid_n = tile_of(tl.program_id(0), num_m, tl.cdiv(N, BLOCK_N), TILE.GROUP_M)
    e = tl.load(map_ptr + pid_m)
    if e >= 0:
        rows = rows_of(map_ptr, num_m, pid_m, e)
        m = tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        live = m < rows.left
        n0 = pid_n * BLOCK_N
        if not TMA:
            offset = cells(m.to(tl.int64), stride_a, k)
            a_ptr = a + rows.first.to(tl.int64) * stride_a + offset
        base = expert_weight(w, weight, e, TMA)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            if TMA:  # also loads rows of the next expert, which are not stored
                block = a.load([rows.first, k0])
            else:
                block = rows_block(a_ptr, live, k0 + k, K, PRODUCT.EVEN_K)
                a_ptr += BLOCK_K
            b = weight_block(
                base,
                weight,
                e,
                n0,
                k0,
                N,
                K,
                PRODUCT,
                TMA,
                BLOCK_N,
                BLOCK_K,
            )
            acc = tl.dot(block, b.to(block.dtype), acc, input_precision=PRODUCT.PRECISION)
        # the low-rank term has its own accumulator, of which a whole tile would spill
        PIECES: tl.constexpr = (4 if BLOCK_N > 128 else 2) if PRODUCT.RANK else 1
        COLUMNS: tl.constexpr = BLOCK_N // PIECES
        for i in tl.static_range(PIECES):
            part = piece(acc, i, PIECES, BLOCK_M, BLOCK_N)
            c0 = n0 + i * COLUMNS
            part = add_terms(
                part,
                weight,
                lora,
                rows,
                c0,
                N,
                N,
                PRODUCT,
                BLOCK_M,
                COLUMNS,
            )
            c = c0 + tl.arange(0, COLUMNS)
            y = y_ptr + rows.first.to(tl.int64) * N + cells(m.to(tl.int64), N, c)
            mask = outer(live, c < N)
            tl.store(y, part.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_m"], repr=named("grouped_gemm_stream", "TILE"))  # grows with T
def _grouped_gemm_stream_kernel(
    a,  # descriptor of [R, K]
    w,  # descriptor of [E, N, K], or of [E, K, N] without K_LAST
    weight,  # Weight
    lora,  # Term or None, of N columns
    map_ptr,  # [3, num_m] int32
    y,  # ragged descriptor of [R, N], half as wide as a tile
    num_m,
    N,
    K,
    PRODUCT: tl.constexpr,  # Product
    TILE: tl.constexpr,  # Tile
):
    # Nothing in the flat loop may be conditional: dead tiles are excluded by their count, and the
    # descriptor clips stores at the expert's last row
    check_tile(TILE)
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    HALF: tl.constexpr = BLOCK_N // 2
    live = live_tiles(map_ptr, num_m)
    num_n = tl.cdiv(N, BLOCK_N)
    for pid in tl.range(tl.program_id(0), live * num_n, tl.num_programs(0), flatten=True):
        pid_m, pid_n = tile_of(pid, live, num_n, TILE.GROUP_M)
        e = tl.load(map_ptr + pid_m)
        rows = rows_of(map_ptr, num_m, pid_m, e)
        n0 = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            b = weight_block(
                w,
                weight,
                e,
                n0,
                k0,
                N,
                K,
                PRODUCT,
                True,
                BLOCK_N,
                BLOCK_K,
            )
            acc = tl.dot(a.load([rows.first, k0]), b, acc, input_precision=PRODUCT.PRECISION)
        start = to_ragged_indices(rows.first, rows.left, 0)
        for i in tl.static_range(2):
            part = piece(acc, i, 2, BLOCK_M, BLOCK_N)
            n = n0 + i * HALF
            part = add_terms(
                part,
                weight,
                lora,
                rows,
                n,
                N,
                N,
                PRODUCT,
                BLOCK_M,
                HALF,
            )
            _store_piece(y, start, n, part, BLOCK_M, HALF)


def up_forward(
    x,
    up,
    bias,
    row_slot,
    tile_map,
    slots: int,
    act: str,
    gated: bool,
    save: bool,
    tile: Tile,
    trained=None,
    *,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
    lora: LowRank | None = None,
):
    """`x` [T, H], `up` [E, 2I or I, H] -> z [R, 2I or I] (empty unless `save`), h [R, I].

    `row_slot` [R] maps rows to slots, and so to tokens. `lora` is added to z. The columns of z are
    in the order of up's rows; `limit` and the arguments after it are defined by
    `moe_runtime.ops.activation`.

    Grid: a program for each tile of the map and BLOCK_N columns of h, in groups of GROUP_M row
    tiles; with JOINED, one per processor. A program gathers its rows of x and multiplies them
    by BLOCK_N columns of gate and as many of up. At least T H elements of x and the weights of the
    experts that have rows are read, R I of h and 2 R I of z written. Loads from L2 or memory are
    R H cdiv(I, BLOCK_N) of x, and 2 H I of weights for each row tile.
    """
    Z = up.shape[1]
    I = Z // 2 if gated else Z
    z = x.new_empty(row_slot.numel(), Z) if save else None
    h = x.new_empty(row_slot.numel(), I)
    form = Form(act, gated, limit or 0.0, up_offset, interleaved)
    _launch_up(
        x,
        up,
        bias,
        row_slot,
        tile_map,
        slots,
        form,
        tile,
        trained,
        lora,
        z,
        h,
    )
    return x.new_empty(0, Z) if z is None else z, h


def gathered_gemm_forward(
    x,
    weight,
    row_slot,
    tile_map,
    slots: int,
    tile: Tile,
) -> torch.Tensor:
    """y[r] = weight[e] x[row_slot[r] // slots]: `x` [T, K], `weight` [E, N, K] -> [R, N].

    The launch of `up_forward`, which describes it, without an activation.
    """
    y = x.new_empty(row_slot.numel(), weight.shape[1])
    form = Form(None, False, 0.0, 0.0, False)
    _launch_up(
        x,
        weight,
        None,
        row_slot,
        tile_map,
        slots,
        form,
        tile,
        None,
        None,
        y,
        None,
    )
    return y


def _launch_up(
    x,
    up,
    bias,
    row_slot,
    tile_map,
    slots,
    form,
    tile,
    trained,
    lora,
    z,
    h,
) -> None:
    num_m = tile_map.shape[1]
    if num_m == 0:
        return
    H = x.shape[1]
    I = up.shape[1] // 2 if form.GATED else up.shape[1]
    up, k_last = last_contiguous(up, True)
    if form.INTERLEAVED:
        tile = in_turns(tile, arch_of(x.device))
    tile = tile._replace(TMA=tile.TMA and trained is None and describable(up))
    stored = [h]
    if z is not None:
        stored = [z[:, :I], z[:, I:], h]
    pair = None
    if tile.TMA and tile.JOINED and form.GATED and not form.INTERLEAVED:
        pair = up.unflatten(1 if k_last else 2, (2, I))
    joined = pair is not None and describable(pair, *stored)
    if tile.JOINED and not joined:  # the shared memory of its output is free
        tile = tile._replace(num_stages=tile.num_stages + 1)
    tile = tile._replace(JOINED=joined, PERSISTENT=joined)
    width = tile.BLOCK_N * 2 if form.INTERLEAVED else tile.BLOCK_N
    w, weight = weight_operand(up, trained, bias, k_last, tile._replace(BLOCK_N=width))
    product = product_of(
        x,
        up,
        k_last,
        H,
        tile,
        lora,
    )
    outputs = []
    if joined:
        block = [1, 2, tile.BLOCK_N, tile.BLOCK_K] if k_last else [1, tile.BLOCK_K, 2, tile.BLOCK_N]
        w = descriptor(pair, block)
        half = [tile.BLOCK_M, tile.BLOCK_N // 2]
        outputs = [create_ragged_descriptor(out, half) for out in stored]
        if z is None:
            outputs = [None, None, *outputs]
    tokens = Gathered(x, row_slot, x.stride(0))
    args = (tokens, w, weight, term_of(lora), tile_map)
    sizes = (num_m, I, H, slots, form)
    programs = grid(tile, num_m, I, x.device)
    with torch.cuda.device_of(x):
        if joined:
            _up_stream_kernel[programs](*args, *outputs, *sizes, **options_of(product, tile))
        else:
            _up_fwd_kernel[programs](*args, z, h, *sizes, **options_of(product, tile))


def grouped_gemm_forward(
    a,
    weight,
    bias,
    tile_map,
    k_last: bool,
    tile: Tile,
    trained=None,
    y=None,
    lora: LowRank | None = None,
) -> torch.Tensor:
    """y[r] = weight[e] a[r] + bias[e], plus `lora`, for the rows of the tile map.

    `a` [R, K], `weight` [E, N, K] with k_last, else [E, K, N] (the transposed product) -> [R, N].
    Rows outside the tile map are not written.

    Grid: as in `up_forward`, over N columns; the stream kernel's programs are always persistent. A
    program multiplies BLOCK_M rows of `a` by BLOCK_N columns of one expert's weight. At least R K
    elements and the weights of the experts that have rows are read, R N written. Loads from L2 or
    memory are R K cdiv(N, BLOCK_N), and N K for each row tile.
    """
    R, K = a.shape
    N = weight.shape[1] if k_last else weight.shape[2]
    y = a.new_empty(R, N) if y is None else y
    num_m = tile_map.shape[1]
    if num_m == 0 or N == 0:
        return y
    weight, k_last = last_contiguous(weight, k_last)
    tma = tile.TMA and trained is None and describable(a, weight)
    streams = tma and tile.PERSISTENT and describable(y)
    tile = tile._replace(TMA=tma, PERSISTENT=streams, JOINED=False)
    w, group = weight_operand(weight, trained, bias, k_last, tile)
    rows = descriptor(a, [tile.BLOCK_M, tile.BLOCK_K]) if tile.TMA else a
    product = product_of(
        a,
        weight,
        k_last,
        K,
        tile,
        lora,
    )
    args = (rows, w, group, term_of(lora), tile_map)
    sizes = (num_m, N, K)
    programs = grid(tile, num_m, N, a.device)
    with torch.cuda.device_of(a):
        if streams:
            stored = create_ragged_descriptor(y, [tile.BLOCK_M, tile.BLOCK_N // 2])
            _grouped_gemm_stream_kernel[programs](
                *args, stored, *sizes, **options_of(product, tile)
            )
        else:
            _grouped_gemm_fwd_kernel[programs](
                *args, y, *sizes, a.stride(0), **options_of(product, tile)
            )
    return y
