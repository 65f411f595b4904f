"""Sort slots by expert: a stable counting sort without atomics, and the map of row tiles.

`moe_runtime.ops.dispatch` defines the operation. A slot's key is its expert, or E if it is dropped.
Blocks of BLOCK_S slots:

    less[e, b]        = how many keys of block b are < e
    expert_offsets[e] = sum_b less[e, b]
    start[e, b]       = expert_offsets[e] + sum_{b' < b} (less[e + 1, b'] - less[e, b'])
    slot_row[s]       = start[key_s, b] + how many slots of block b before s have its key

Three launches, or one for a single block; bit-identical from run to run. The comparisons are R * E
integer operations. Sizes that depend on the number of tokens are not specialized, so a new number
of tokens needs no recompilation.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.compiling import named

BLOCK_S = 128  # slots ranked by comparing all pairs
BLOCK_J = 16  # slots compared at a time
BLOCK_E = 32  # experts compared at a time
SCAN = 1024  # blocks of slots scanned at a time
BLOCK_R = 1024
BLOCK_TILES = 64


@triton.jit
def _keys(idx_ptr, s, R, E):
    """Keys of the slots `s`: 0..E, and E + 1 beyond the last slot."""
    # in 64 bits, so that no wider id wraps into 0..E-1 and a narrow type need not represent E
    e = tl.load(idx_ptr + s, mask=s < R, other=0).to(tl.int64)
    key = tl.where((e < 0) | (e >= E), E, e).to(tl.int32)
    return tl.where(s < R, key, E + 1)


@triton.jit
def _less(key, e):
    """For each value of `e`, how many of `key` are smaller."""
    return tl.sum((key[None, :] < e[:, None]).to(tl.int32), 1)


@triton.jit(do_not_specialize=["R", "blocks"], repr=named("dispatch_fwd_count"))
def _dispatch_fwd_count_kernel(
    idx_ptr,  # [R], any integer
    less_ptr,  # [E + 2, blocks] int32
    R,
    E,
    blocks,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    key = _keys(idx_ptr, b * BLOCK_S + tl.arange(0, BLOCK_S), R, E)
    for e0 in range(0, E + 2, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        tl.store(less_ptr + e.to(tl.int64) * blocks + b, _less(key, e), mask=e < E + 2)


@triton.jit(do_not_specialize=["blocks"], repr=named("dispatch_fwd_scan"))
def _dispatch_fwd_scan_kernel(
    less_ptr,  # [E + 2, blocks] int32
    offsets_ptr,  # [E + 1] int32
    start_ptr,  # [E + 1, blocks] int32
    blocks,
    SCAN: tl.constexpr,
):
    e = tl.program_id(0)
    less_ptr += e.to(tl.int64) * blocks
    start_ptr += e.to(tl.int64) * blocks
    total = tl.zeros([SCAN], tl.int32)
    for b0 in range(0, blocks, SCAN):
        b = b0 + tl.arange(0, SCAN)
        total += tl.load(less_ptr + b, mask=b < blocks, other=0)
    row = tl.sum(total, 0)
    tl.store(offsets_ptr + e, row)
    for b0 in range(0, blocks, SCAN):
        b = b0 + tl.arange(0, SCAN)
        low = tl.load(less_ptr + b, mask=b < blocks, other=0)
        count = tl.load(less_ptr + blocks + b, mask=b < blocks, other=0) - low
        tl.store(start_ptr + b, row + tl.cumsum(count, 0) - count, mask=b < blocks)
        row += tl.sum(count, 0)


class Sorted(NamedTuple):
    """Outputs of the sort."""

    offsets: torch.Tensor  # [E + 1] int32
    row_token: torch.Tensor | None  # [R] int32
    row_slot: torch.Tensor  # [R] int32
    slot_row: torch.Tensor  # [R] int32


@triton.jit
def scatter(
    b,
    idx_ptr,
    start_ptr,
    out,
    R,
    E,
    K,
    blocks,
    BLOCK_S: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Sort block b (int64) of slots; other arguments are as in `_dispatch_fwd_scatter_kernel`."""
    i = tl.arange(0, BLOCK_S)
    s = b * BLOCK_S + i
    key = _keys(idx_ptr, s, R, E)
    in_front = tl.zeros([BLOCK_S, BLOCK_J], tl.int32)
    for j0 in range(0, BLOCK_S, BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        other = _keys(idx_ptr, b * BLOCK_S + j, R, E)
        front = (other[None, :] == key[:, None]) & (j[None, :] < i[:, None])
        if start_ptr is None:
            front = front | (other[None, :] < key[:, None])
        in_front += front.to(tl.int32)
    row = tl.sum(in_front, 1)
    if start_ptr is None:
        for e0 in range(0, E + 1, BLOCK_E):
            e = e0 + tl.arange(0, BLOCK_E)
            tl.store(out.offsets + e, _less(key, e), mask=e < E + 1)
    else:
        row += tl.load(start_ptr + key.to(tl.int64) * blocks + b, mask=s < R, other=0)
    slot = s.to(tl.int32)
    tl.store(out.slot_row + s, row, mask=s < R)
    tl.store(out.row_slot + row, slot, mask=s < R)
    if out.row_token is not None:
        tl.store(out.row_token + row, slot // K, mask=s < R)


@triton.jit(do_not_specialize=["R", "blocks"], repr=named("dispatch_fwd_scatter"))
def _dispatch_fwd_scatter_kernel(
    idx_ptr,  # [R], any integer
    start_ptr,  # [E + 1, blocks] int32, None for a single block
    out,  # Sorted; the offsets are written for a single block
    R,
    E,
    K,
    blocks,
    BLOCK_S: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    scatter(
        block,
        idx_ptr,
        start_ptr,
        out,
        R,
        E,
        K,
        blocks,
        BLOCK_S,
        BLOCK_J,
        BLOCK_E,
    )


@triton.jit(do_not_specialize=["R"], repr=named("invert"))
def _invert_kernel(
    row_slot_ptr,  # [R] int32
    slot_row_ptr,  # [R] int32
    R,
    BLOCK_R: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.load(row_slot_ptr + r, mask=r < R, other=0)
    tl.store(slot_row_ptr + slot, r.to(tl.int32), mask=r < R)


@triton.jit
def write_map(
    first_tile_of_block,
    offsets_ptr,
    map_ptr,
    E,
    num_tiles,
    FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write BLOCK_TILES tiles of a map; the arguments are those of `_tile_map_kernel`."""
    tile = first_tile_of_block + tl.arange(0, BLOCK_TILES)
    expert = tl.zeros([BLOCK_TILES], tl.int32)
    first_tile = tl.zeros([BLOCK_TILES], tl.int32)
    end = 0
    for e0 in range(0, E, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        mask = (e >= FIRST) & (e < E)
        rows = tl.load(offsets_ptr + e + 1, mask=mask, other=0) - tl.load(
            offsets_ptr + e, mask=mask, other=0
        )
        tiles = rows // BLOCK_M + (rows % BLOCK_M > 0).to(tl.int32)
        ends = end + tl.cumsum(tiles, 0)
        # experts whose tiles all precede this one: their number is the id of the tile's expert,
        # whose first tile is where the last of them ends
        over = ends[None, :] <= tile[:, None]
        expert += tl.sum(over.to(tl.int32), 1)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(over, ends[None, :], 0), 1))
        end += tl.sum(tiles, 0)
    live = expert < E
    row = (
        tl.load(offsets_ptr + expert, mask=live, other=0)
        + tl.where(live, tile - first_tile, 0) * BLOCK_M
    )
    mask = tile < num_tiles
    tl.store(map_ptr + tile, tl.where(live, expert, -1), mask=mask)
    tl.store(map_ptr + num_tiles + tile, tl.where(live, row, end), mask=mask)
    tl.store(
        map_ptr + 2 * num_tiles + tile,
        tl.load(offsets_ptr + expert + 1, mask=live, other=0),
        mask=mask,
    )


@triton.jit(do_not_specialize=["num_tiles"], repr=named("tile_map"))
def _tile_map_kernel(
    offsets_ptr,  # [E + 1] int32
    map_ptr,  # [3, num_tiles] int32
    E,
    num_tiles,
    FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    write_map(
        tl.program_id(0) * BLOCK_TILES,
        offsets_ptr,
        map_ptr,
        E,
        num_tiles,
        FIRST,
        BLOCK_M,
        BLOCK_TILES,
        BLOCK_E,
    )


@triton.jit
def live_tiles(map_ptr, num_tiles):
    """How many tiles of a map have rows: all, or the number stored in the row of a dead tile."""
    last = num_tiles - 1
    return tl.where(tl.load(map_ptr + last) >= 0, num_tiles, tl.load(map_ptr + num_tiles + last))


class TileRows(NamedTuple):
    """The rows of a tile, inside a kernel."""

    expert: tl.tensor
    first: tl.tensor
    left: tl.tensor  # rows from the first one to the expert's last


@triton.jit
def rows_of(map_ptr, num_tiles, tile, e):
    """The rows of a tile of expert e."""
    first = tl.load(map_ptr + num_tiles + tile)
    return TileRows(e, first, tl.load(map_ptr + 2 * num_tiles + tile) - first)


def dispatch_forward(
    topk_idx: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`topk_idx` [T, K] -> expert_offsets [E + 1], row_token, row_slot, slot_row [R], all int32.

    Grids: a program for each block of BLOCK_S slots, one for each expert (which scans the blocks'
    counts), and one for each block again. R ids are read twice, 2 E R / BLOCK_S counts written and
    read, and 3 R numbers written, two of them scattered.
    """
    idx = topk_idx.contiguous()
    R = idx.numel()
    E = num_experts
    if not R:
        return idx.new_zeros(E + 1, dtype=torch.int32), *(
            idx.new_empty(0, dtype=torch.int32) for _ in range(3)
        )
    offsets = idx.new_empty(E + 1, dtype=torch.int32)
    row_token, row_slot, slot_row = (idx.new_empty(R, dtype=torch.int32) for _ in range(3))
    start = None
    blocks = triton.cdiv(R, BLOCK_S)
    with torch.cuda.device_of(idx):  # Triton launches on the current device
        if blocks > 1:
            less = idx.new_empty(E + 2, blocks, dtype=torch.int32)
            start = idx.new_empty(E + 1, blocks, dtype=torch.int32)
            _dispatch_fwd_count_kernel[(blocks,)](
                idx,
                less,
                R,
                E,
                blocks,
                BLOCK_S=BLOCK_S,
                BLOCK_E=BLOCK_E,
                enable_fp_fusion=True,
            )
            _dispatch_fwd_scan_kernel[(E + 1,)](
                less,
                offsets,
                start,
                blocks,
                SCAN=SCAN,
                enable_fp_fusion=True,
            )
        _dispatch_fwd_scatter_kernel[(blocks,)](
            idx,
            start,
            Sorted(offsets, row_token, row_slot, slot_row),
            R,
            E,
            idx.shape[1],
            blocks,
            BLOCK_S=BLOCK_S,
            BLOCK_J=BLOCK_J,
            BLOCK_E=BLOCK_E,
            enable_fp_fusion=True,
        )
    return offsets, row_token, row_slot, slot_row


def invert(row_slot: torch.Tensor) -> torch.Tensor:
    """slot_row [R] int32, the inverse permutation of `row_slot` [R] int32.

    Grid: blocks of BLOCK_R rows. R numbers are read, R scattered.
    """
    slot_row = torch.empty_like(row_slot)
    R = row_slot.numel()
    if R:
        with torch.cuda.device_of(row_slot):
            _invert_kernel[(triton.cdiv(R, BLOCK_R),)](
                row_slot, slot_row, R, BLOCK_R=BLOCK_R, enable_fp_fusion=True
            )
    return slot_row


def max_tiles(R: int, E: int, BLOCK_M: int) -> int:
    """Return a bound on the tiles of R rows, sum_e ceil(c_e / BLOCK_M)."""
    return R // BLOCK_M + min(E, R)


def tile_map(
    expert_offsets: torch.Tensor, R: int, BLOCK_M: int, first_expert: int = 0
) -> torch.Tensor:
    """`expert_offsets` [E + 1] int32 -> [3, max_tiles] int32: expert, first row, expert's end row.

    Tiles are in row order. A dead tile, beyond the last one with rows, has expert -1 and, as its
    first row, the number of live tiles. No tile has rows of experts below `first_expert`, or
    dropped rows.

    Grid: blocks of BLOCK_TILES tiles. A program reads all E + 1 offsets and writes three numbers
    for each tile.
    """
    E = expert_offsets.numel() - 1
    tiles = max_tiles(R, E, BLOCK_M)
    out = expert_offsets.new_empty(3, tiles)
    if tiles:
        with torch.cuda.device_of(expert_offsets):
            _tile_map_kernel[(triton.cdiv(tiles, BLOCK_TILES),)](
                expert_offsets,
                out,
                E,
                tiles,
                FIRST=first_expert,
                BLOCK_M=BLOCK_M,
                BLOCK_TILES=BLOCK_TILES,
                BLOCK_E=BLOCK_E,
                enable_fp_fusion=True,
            )
    return out
