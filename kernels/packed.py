"""Tiles of packed weights, decoded when loaded; `moe_runtime.ops.packed` defines the formats.

One layout serves both directions: a tile is decoded as [rows, columns], with neighbors of a row in
one byte, and transposed if the sum runs along the row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.tiles import Tile, cells, outer

FP8 = 2  # as ops.packed numbers the formats
NF4 = tl.constexpr(  # the value of each code, as in ops.packed
    (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    )
)


class PackedWeight(NamedTuple):
    """A packed stack as an argument of launchers."""

    data: torch.Tensor  # [E, P, Q / 2] uint8, or [E, P, Q] in 8 bits
    scale: torch.Tensor  # [E, P, groups] float32
    format: int
    shape: tuple[int, int, int]  # E, out, in
    transposed: bool  # [E, P, Q] is [E, in, out]


def fit_packed(tile: Tile, kernel: str, form: int) -> Tile:
    """Fit a launch config to weights that are decoded in registers: at most 128 columns, no TMA.

    At most 64 columns where more spill on sm_80 (Triton 3.6): for up and dz, and for FP8, whose
    decoding needs the most registers.
    """
    widest = 64 if kernel in ("up", "dz") or form == FP8 else 128
    return tile._replace(
        BLOCK_N=min(tile.BLOCK_N, widest),
        BLOCK_K=min(tile.BLOCK_K, 64),
        num_stages=min(tile.num_stages, 3),
        TMA=False,
        PERSISTENT=False,
        JOINED=False,
    )


@triton.jit
def _nf4(code):
    """The value of each code 0..15, from a table in shared memory: selects need more registers."""
    i = tl.arange(0, 16)
    table = tl.where(i < 1, NF4[0], NF4[1])
    for k in tl.static_range(2, 16):
        table = tl.where(i < k, table, NF4[k])
    return tl.gather(table, code, 0)


@triton.jit
def _scaled(
    value,
    scale,
    r,
    live,
    c0,
    Q,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """`value` [ROWS, COLS] times its groups' scales; its first column c0 is a multiple of COLS."""
    groups = tl.cdiv(Q, GROUP)
    if COLS <= GROUP:
        mask = live & (c0 < Q)
        s = tl.load(scale + r * groups + c0 // GROUP, mask=mask, other=0.0)
        return value * s[:, None]
    else:
        N: tl.constexpr = COLS // GROUP
        g = c0 // GROUP + tl.arange(0, N)
        mask = outer(live, g < groups)
        s = tl.load(scale + r[:, None] * groups + g[None, :], mask=mask, other=0.0)
        value = tl.reshape(value, (ROWS, N, GROUP)) * s[:, :, None]
        return tl.reshape(value, (ROWS, COLS))


@triton.jit
def packed_block(
    data,
    scale,
    r0,
    c0,
    P,
    Q,
    stride,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """[ROWS, COLS] float32 of an expert's weight [P, Q] from row r0, column c0 on; zero outside."""
    r = (r0 + tl.arange(0, ROWS)).to(tl.int64)
    live = r < P
    if FORMAT < 2:  # two codes per byte
        c = c0 // 2 + tl.arange(0, COLS // 2)
        p = tl.load(data + cells(r, stride, c), mask=outer(live, c < Q // 2), other=0)
        p = p.to(tl.int32)
        if FORMAT == 0:
            code = tl.reshape(tl.join(p >> 4, p & 15), (ROWS * COLS,))
            return _scaled(
                tl.reshape(_nf4(code), (ROWS, COLS)),
                scale,
                r,
                live,
                c0,
                Q,
                64,
                ROWS,
                COLS,
            )
        else:
            code = tl.reshape(tl.join(p & 15, p >> 4), (ROWS, COLS))
            # the three bits below the sign are exponent and mantissa; 2^126 moves the exponent
            # into float32's range, exactly
            bits = ((code & 8) << 28) | ((code & 7) << 22)
            value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
            return _scaled(
                value,
                scale,
                r,
                live,
                c0,
                Q,
                32,
                ROWS,
                COLS,
            )
    else:
        c = c0 + tl.arange(0, COLS)
        p = tl.load(data + cells(r, stride, c), mask=outer(live, c < Q), other=0)
        if FORMAT == 2:
            p = p.to(tl.int32)
            bits = ((p & 128) << 24) | ((p & 127) << 20)
            value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
            value = tl.where((p & 127) == 127, float("nan"), value)
            return _scaled(
                value,
                scale,
                r,
                live,
                c0,
                Q,
                128,
                ROWS,
                COLS,
            )
        else:
            value = p.to(tl.int8, bitcast=True).to(tl.float32)
            return value * tl.load(scale + r, mask=live, other=0.0)[:, None]
