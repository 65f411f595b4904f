"""Sum each token's expert rows with a gather, never a scatter; gradients of both gathers.

The equations are in `moe_runtime.ops.combine`. A lane loads 16 bytes of a row at a time, and the
loads of a token's rows do not depend on each other. Sums are float32, in slot order, without
atomics. T and R are not specialized, so a new number of tokens needs no recompilation.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.compiling import named
from moe_runtime.kernels.tiles import outer, precision

LANES = 128  # per program: four warps
UNROLL = 8  # rows of one token in flight
BLOCK_S = 32  # slots per program when summing the partial gradients of their weights


class SummedRows(NamedTuple):
    """The rows that are summed for each token."""

    y: torch.Tensor | None  # [R, H], any float
    weight: torch.Tensor | None  # [T, K] float32; None: every weight is 1
    slot_row: torch.Tensor  # [T, K], any integer
    num_rows: torch.Tensor | None  # [1] int32: rows from this one on are ignored


@triton.jit
def sum_slots(
    t,
    h,
    rows,
    T,
    H,
    K: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """sum_k weight[t, k] y[slot_row[t, k]] in float32, [BLOCK_T, BLOCK_H]."""
    acc = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for k0 in range(0, K, UNROLL):
        for j in tl.static_range(UNROLL):
            slot = t * K + (k0 + j)
            live = (t < T) & (k0 + j < K)
            row = tl.load(rows.slot_row + slot, mask=live, other=0).to(tl.int64)
            # rows from num_rows on are unwritten, and their weights may have any value
            if rows.num_rows is not None:
                live = live & (row < tl.load(rows.num_rows))
            mask = outer(live, h < H)
            y = tl.load(rows.y + row[:, None] * H + h[None, :], mask=mask, other=0.0).to(tl.float32)
            if rows.weight is not None:
                # 1.0, as y is 0 there: the interpreter ignores `other=0.0` for a single lane
                y = y * tl.load(rows.weight + slot, mask=live, other=1.0)[:, None]
            acc += y
    return acc


@triton.jit(do_not_specialize=["T"], repr=named("combine_fwd"))
def _combine_fwd_kernel(
    rows,  # SummedRows
    out_ptr,  # [T, H], dtype of y
    T,
    H,
    K: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    pid = tl.program_id(0)
    columns = tl.cdiv(H, BLOCK_H)
    t = (pid // columns).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = pid % columns * BLOCK_H + tl.arange(0, BLOCK_H)
    out = sum_slots(
        t,
        h,
        rows,
        T,
        H,
        K,
        UNROLL,
        BLOCK_T,
        BLOCK_H,
    )
    mask = outer(t < T, h < H)
    at = out_ptr + t[:, None] * H + h[None, :]
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(at, out, mask=mask)


@triton.jit(do_not_specialize=["R"], repr=named("combine_bwd"))
def _combine_bwd_kernel(
    dout_ptr,  # [T, H], any float
    y_ptr,  # [R, H], any float
    weight_ptr,  # [R] float32
    slot_row_ptr,  # [R], any integer
    dy_ptr,  # [R, H], dtype of y
    dweight_ptr,  # [R] float32
    R,
    H,
    K,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    # in slot order: the programs that read the same row of dout run together and share it in L2
    s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = tl.load(slot_row_ptr + s, mask=s < R, other=0).to(tl.int64)
    weight = tl.load(weight_ptr + s, mask=s < R, other=0.0)
    acc = tl.zeros([BLOCK_S, BLOCK_H], tl.float32)
    for h0 in range(0, H, BLOCK_H):
        h = h0 + tl.arange(0, BLOCK_H)
        mask = outer(s < R, h < H)
        dout = tl.load(dout_ptr + (s // K)[:, None] * H + h[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        y = tl.load(y_ptr + row[:, None] * H + h[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = (weight[:, None] * dout).to(dy_ptr.dtype.element_ty)
        tl.store(dy_ptr + row[:, None] * H + h[None, :], dy, mask=mask)
        acc += dout * y
    tl.store(dweight_ptr + s, tl.sum(acc, 1), mask=s < R)


@triton.jit(do_not_specialize=["T", "R", "n", "programs"], repr=named("sum_rows"))
def _sum_rows_kernel(
    rows,  # SummedRows of dy, without weights
    partial_ptr,  # [R, n] float32 or None
    dx_ptr,  # [T, H], dtype of dy, or None
    dweight_ptr,  # [R] float32 or None
    T,
    H,
    R,
    n,
    programs,  # that sum rows; later ones sum partials
    K: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < programs:
        if rows.y is not None:
            columns = tl.cdiv(H, BLOCK_H)
            t = (pid // columns).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
            h = pid % columns * BLOCK_H + tl.arange(0, BLOCK_H)
            dx = sum_slots(
                t,
                h,
                rows,
                T,
                H,
                K,
                UNROLL,
                BLOCK_T,
                BLOCK_H,
            )
            mask = outer(t < T, h < H)
            at = dx_ptr + t[:, None] * H + h[None, :]
            tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    elif partial_ptr is not None:
        s = (pid - programs).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
        live = s < R
        row = tl.load(rows.slot_row + s, mask=live, other=0).to(tl.int64)
        if rows.num_rows is not None:
            live = live & (row < tl.load(rows.num_rows))
        acc = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
        for n0 in range(0, n, BLOCK_N):
            column = n0 + tl.arange(0, BLOCK_N)
            mask = outer(live, column < n)
            acc += tl.load(partial_ptr + row[:, None] * n + column[None, :], mask=mask, other=0.0)
        tl.store(dweight_ptr + s, tl.sum(acc, 1), mask=s < R)


@triton.jit(do_not_specialize=["T"], repr=named("sum_rows_router"))
def _sum_rows_router_kernel(
    rows,  # SummedRows of dy, without weights
    dlogits_ptr,  # [T, N], dtype of dy
    router_ptr,  # [N, H], dtype of dy
    dx_ptr,  # [T, H], dtype of dy
    T,
    H,
    N,
    stride_n,  # of router
    K: tl.constexpr,
    UNROLL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tl.static_assert(BLOCK_T >= 16 and BLOCK_H >= 16 and BLOCK_N >= 16, "tl.dot needs blocks >= 16")
    pid = tl.program_id(0)
    columns = tl.cdiv(H, BLOCK_H)
    t = (pid // columns).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = pid % columns * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = sum_slots(
        t,
        h,
        rows,
        T,
        H,
        K,
        UNROLL,
        BLOCK_T,
        BLOCK_H,
    )
    for n0 in range(0, N, BLOCK_N):
        n = (n0 + tl.arange(0, BLOCK_N)).to(tl.int64)
        mask = outer(t < T, n < N)
        at = dlogits_ptr + t[:, None] * N + n[None, :]
        dlogits = tl.load(at, mask=mask, other=0.0)
        mask = outer(n < N, h < H)
        at = router_ptr + n[:, None] * stride_n + h[None, :]
        router = tl.load(at, mask=mask, other=0.0)
        acc = tl.dot(dlogits, router, acc, input_precision=PRECISION)
    mask = outer(t < T, h < H)
    at = dx_ptr + t[:, None] * H + h[None, :]
    dx = acc.to(dx_ptr.dtype.element_ty)
    tl.store(at, dx, mask=mask)


def combine_forward(
    y: torch.Tensor,
    topk_weight: torch.Tensor,
    slot_row: torch.Tensor,
    num_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """`y` [R, H], `topk_weight` [T, K] float32, `slot_row` [R] or [T, K] -> [T, H] in y's dtype.

    `num_rows` [1] int32 is read on the device: slots whose row is not below it are ignored,
    whatever y and the weight contain.

    Grid: tiles of out [T, H], whose size `_tile` returns. A program sums the K rows of its tokens.
    T K H elements are read, T H written.
    """
    T, K = topk_weight.shape
    H = y.shape[1]
    if not y.numel():
        return y.new_zeros(T, H)
    out = y.new_empty(T, H)
    BLOCK_T, BLOCK_H = _tile(y)
    with torch.cuda.device_of(y):  # Triton launches on the current device
        _combine_fwd_kernel[(triton.cdiv(T, BLOCK_T) * triton.cdiv(H, BLOCK_H),)](
            SummedRows(y.contiguous(), topk_weight.contiguous(), slot_row.contiguous(), num_rows),
            out,
            T,
            H,
            K=K,
            UNROLL=min(K, UNROLL),
            BLOCK_T=BLOCK_T,
            BLOCK_H=BLOCK_H,
            enable_fp_fusion=True,
        )
    return out


def combine_backward(
    dout: torch.Tensor, y: torch.Tensor, topk_weight: torch.Tensor, slot_row: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dy [R, H] in y's dtype and dweight [T, K] float32 from `dout` [T, H].

    Other arguments are as in `combine_forward`. Grid: blocks of slots; a program loops over the
    columns of their rows. R H elements of y are read and R H of dy written; T H elements of dout
    are read K times, from L2.
    """
    R, H = y.shape
    dy = y.new_empty(R, H)
    dweight = torch.empty(topk_weight.shape, dtype=torch.float32, device=y.device)
    BLOCK_S, BLOCK_H = _tile(y)
    if R:
        with torch.cuda.device_of(y):
            _combine_bwd_kernel[(triton.cdiv(R, BLOCK_S),)](
                dout.contiguous(),
                y.contiguous(),
                topk_weight.contiguous(),
                slot_row.contiguous(),
                dy,
                dweight,
                R,
                H,
                topk_weight.shape[1],
                BLOCK_S=BLOCK_S,
                BLOCK_H=BLOCK_H,
                enable_fp_fusion=True,
            )
    return dy, dweight


def sum_rows(
    dy: torch.Tensor | None,
    slot_row: torch.Tensor,
    partial: torch.Tensor | None,
    T: int,
    K: int,
    num_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dx[t] = sum_k dy[slot_row[t, k]] [T, H]; dweight[t, k] = sum_n partial[slot_row[t, k], n].

    One launch computes both; each is None if its argument, `dy` [R, H] or `partial` [R, n] float32,
    is None. dx has dy's dtype, dweight [T, K] is float32. `num_rows` is as in `combine_forward`: a
    slot that it excludes adds nothing to dx, and its dweight is 0.

    Grid: the tiles of dx, then blocks of BLOCK_S slots of dweight. T K H elements of dy and T K n
    of partial are read, T H and T K written.
    """
    R = T * K
    H = 0 if dy is None else dy.shape[1]
    n = 0 if partial is None else partial.shape[1]
    dx = None if dy is None else dy.new_empty(T, H) if R else dy.new_zeros(T, H)
    dweight = None if partial is None else partial.new_empty(T, K)
    BLOCK_T, BLOCK_H = (1, 1) if dy is None else _tile(dy)
    programs = triton.cdiv(T, BLOCK_T) * triton.cdiv(H, BLOCK_H)
    grid = programs + (0 if partial is None else triton.cdiv(R, BLOCK_S))
    if R and grid:
        with torch.cuda.device_of(slot_row):
            _sum_rows_kernel[(grid,)](
                SummedRows(_contiguous(dy), None, slot_row.contiguous(), num_rows),
                _contiguous(partial),
                dx,
                dweight,
                T,
                H,
                R,
                n,
                programs,
                K=K,
                UNROLL=min(K, UNROLL),
                BLOCK_T=BLOCK_T,
                BLOCK_H=BLOCK_H,
                BLOCK_S=BLOCK_S,
                BLOCK_N=min(triton.next_power_of_2(max(n, 1)), 32),
                enable_fp_fusion=True,
            )
    return dx, dweight


def sum_rows_and_router(
    dy: torch.Tensor,
    slot_row: torch.Tensor,
    T: int,
    K: int,
    num_rows: torch.Tensor | None,
    dlogits: torch.Tensor,
    router_weight: torch.Tensor,
) -> torch.Tensor:
    """dx[t] = sum_k dy[slot_row[t, k]] + dlogits[t] router_weight, [T, H], rounded once.

    `dlogits` [T, N], `router_weight` [N, H] and dx have dy's dtype; other arguments are as in
    `sum_rows`.

    Grid: tiles of 16 tokens by at most 256 columns of dx. A program sums its rows and multiplies.
    At least T K H elements of dy, T N and N H are read, T H written.
    """
    H, N = dy.shape[1], router_weight.shape[0]
    dx = dy.new_empty(T, H)
    if router_weight.stride(1) != 1:
        router_weight = router_weight.contiguous()
    BLOCK_H = min(256, max(16, triton.next_power_of_2(H)))
    if dx.numel():
        with torch.cuda.device_of(dy):
            _sum_rows_router_kernel[(triton.cdiv(T, 16) * triton.cdiv(H, BLOCK_H),)](
                SummedRows(dy.contiguous(), None, slot_row.contiguous(), num_rows),
                dlogits.contiguous(),
                router_weight,
                dx,
                T,
                H,
                N,
                router_weight.stride(0),
                K=K,
                UNROLL=min(K, 4),
                PRECISION=precision(dy),
                BLOCK_T=16,
                BLOCK_H=BLOCK_H,
                BLOCK_N=min(64, max(16, triton.next_power_of_2(max(N, 1)))),
                enable_fp_fusion=True,
            )
    return dx


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _tile(y: torch.Tensor) -> tuple[int, int]:
    """Return rows and columns per program, 16 bytes per lane: one row, or several short ones."""
    width = LANES * 16 // y.element_size()
    columns = min(triton.next_power_of_2(max(y.shape[1], 16)), width)
    return width // columns, columns
