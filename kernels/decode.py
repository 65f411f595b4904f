"""Fused kernels for few tokens, as in generation, where launches dominate a layer's time.

Routing, sort and tile map are one launch, the down projection and the weighted sum another:

    out[t] = sum_k weight[t, k] (W_down[e] h[slot_row[t, k]] + b[e]),   e = topk_idx[t, k]

The results agree with those of `kernels.routing`, `kernels.dispatch`, `kernels.grouped_gemm` and
`kernels.combine`, whose functions these kernels call.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.combine import UNROLL, SummedRows, sum_slots
from moe_runtime.kernels.compiling import named
from moe_runtime.kernels.dispatch import (
    BLOCK_E,
    BLOCK_J,
    BLOCK_TILES,
    Sorted,
    live_tiles,
    max_tiles,
    rows_of,
    scatter,
    write_map,
)
from moe_runtime.kernels.operands import (
    add_terms,
    check_tile,
    expert_weight,
    product_of,
    rows_block,
    weight_block,
    weight_operand,
)
from moe_runtime.kernels.routing import route_of, route_operand, route_rows
from moe_runtime.kernels.tiles import Tile, cells, outer

SMALL = 512  # most slots that one program sorts: for more, three launches are faster
# the program is compiled for FEW and for SMALL slots only, not for each power of two of a changing
# batch
FEW = 128
TINY = 128  # most rows whose down projection one program per column block computes


@triton.jit(do_not_specialize=["T", "R", "num_tiles"], repr=named("plan", "ROUTE"))
def _plan_kernel(
    logits_ptr,  # [T, routed experts], any float; None: the ids are given
    weight_ptr,  # [T, SLOTS] float32, written if there are logits
    idx_ptr,  # [T, SLOTS] any integer; int32, and written, if there are logits
    plan,  # Plan
    T,
    R,
    num_tiles,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    FIRST: tl.constexpr,  # first expert with tiles
    ROUTE: tl.constexpr,  # Route, or None if the ids are given
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # one program: each step reads what all threads wrote in the previous one
    if logits_ptr is not None:
        for t0 in range(0, T, ROUTE.BLOCK_T):
            first_token = tl.program_id(0).to(tl.int64) + t0
            route_rows(
                first_token,
                logits_ptr,
                None,
                weight_ptr,
                idx_ptr,
                T,
                ROUTE,
            )
        tl.debug_barrier()
    out = Sorted(plan.expert_offsets, None, plan.row_slot, plan.slot_row)
    block = tl.program_id(0).to(tl.int64)
    scatter(
        block,
        idx_ptr,
        None,
        out,
        R,
        E,
        SLOTS,
        1,
        BLOCK_S,
        BLOCK_J,
        BLOCK_E,
    )
    tl.debug_barrier()
    for tile in range(0, num_tiles, BLOCK_TILES):
        write_map(
            tile,
            plan.expert_offsets,
            plan.tile_map,
            E,
            num_tiles,
            FIRST,
            BLOCK_M,
            BLOCK_TILES,
            BLOCK_E,
        )


@triton.jit(do_not_specialize=["T", "num_m"], repr=named("down_combine", "TILE"))
def _down_combine_kernel(
    h_ptr,  # [R, I]
    w,  # [E, H, I] by its strides
    weight,  # Weight
    map_ptr,  # [3, num_m] int32
    slot_row_ptr,  # [R] int32
    topk_ptr,  # [T, SLOTS] float32
    offsets_ptr,  # [E + 1] int32
    y_ptr,  # [R, H], written and read again
    out_ptr,  # [T, H]
    T,
    num_m,
    E,
    H,
    I,
    SLOTS: tl.constexpr,
    UNROLL: tl.constexpr,
    PRODUCT: tl.constexpr,  # Product
    TILE: tl.constexpr,  # Tile
    BLOCK_T: tl.constexpr,
):
    check_tile(TILE)
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    n0 = tl.program_id(0) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    for tile in range(0, live_tiles(map_ptr, num_m)):
        e = tl.load(map_ptr + tile)
        tile_rows = rows_of(map_ptr, num_m, tile, e)
        live = m < tile_rows.left
        r = tile_rows.first.to(tl.int64) + m
        base = expert_weight(w, weight, e, False)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, I, BLOCK_K):
            h = h_ptr + (r[:, None] * I + k0 + k[None, :])
            a = rows_block(h, live, k0 + k, I, PRODUCT.EVEN_K)
            b = weight_block(
                base,
                weight,
                e,
                n0,
                k0,
                H,
                I,
                PRODUCT,
                False,
                BLOCK_N,
                BLOCK_K,
            )
            acc = tl.dot(a, b, acc, input_precision=PRODUCT.PRECISION)
        acc = add_terms(
            acc,
            weight,
            None,
            tile_rows,
            n0,
            H,
            H,
            PRODUCT,
            BLOCK_M,
            BLOCK_N,
        )
        y = y_ptr + cells(r, H, n)
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=outer(live, n < H))
    # y is written by other threads of this program, never by other programs
    tl.debug_barrier()
    rows = SummedRows(y_ptr, topk_ptr, slot_row_ptr, offsets_ptr + E)
    for t0 in range(0, T, BLOCK_T):
        t = tl.program_id(1).to(tl.int64) + t0 + tl.arange(0, BLOCK_T)
        out = sum_slots(
            t,
            n,
            rows,
            T,
            H,
            SLOTS,
            UNROLL,
            BLOCK_T,
            BLOCK_N,
        )
        mask = outer(t < T, n < H)
        address = out_ptr + cells(t, H, n)
        tl.store(address, out.to(out_ptr.dtype.element_ty), mask=mask)


class Plan(NamedTuple):
    """The order of the rows, and their tiles of BLOCK_M rows."""

    expert_offsets: torch.Tensor  # [E + 1] int32
    row_slot: torch.Tensor  # [R] int32
    slot_row: torch.Tensor  # [R] int32
    tile_map: torch.Tensor  # [3, max_tiles] int32


def _slots_block(R: int) -> int:
    """BLOCK_S for R slots; tests may pass more than SMALL."""
    return FEW if R <= FEW else max(SMALL, triton.next_power_of_2(R))


def plan_forward(
    topk_idx: torch.Tensor | None,
    num_experts: int,
    BLOCK_M: int,
    first_expert: int = 0,
    *,
    logits: torch.Tensor | None = None,
    top_k: int = 0,
    gate: str = "xft",
    shared: int = 0,
) -> tuple[torch.Tensor | None, torch.Tensor, Plan]:
    """Route `logits` [T, .] unless `topk_idx` [T, K] is given, sort at most SMALL slots, map tiles.

    Returns the weights [T, K] float32 (None with `topk_idx`), the ids and the plan, as
    `route_forward`, `dispatch_forward` and `tile_map` return them.

    Grid: one program, which compares all slots with each other. T E logits are read, 5 T K numbers
    written. Expected to save two to four launches, each of which takes longer than its work; to be
    deleted if a decoding step in a CUDA graph is as fast without it.
    """
    source = topk_idx if logits is None else logits
    new = functools.partial(torch.empty, device=source.device, dtype=torch.int32)
    T = source.shape[0]
    if logits is None:
        idx = topk_idx.contiguous()
        weight = None
        route = None
        K = topk_idx.shape[1]
    else:
        K = top_k
        logits = route_operand(logits)
        idx = new(T, K)
        weight = new(T, K, dtype=torch.float32)
        route = route_of(logits, K, gate, shared, False)
        tokens = min(_slots_block(T * K) // triton.next_power_of_2(K), 4096 // route.E_PAD)
        route = route._replace(BLOCK_T=max(1, tokens))
    R = T * K
    tiles = max_tiles(R, num_experts, BLOCK_M)
    plan = Plan(new(num_experts + 1), new(R), new(R), new(3, tiles))
    with torch.cuda.device_of(source):
        _plan_kernel[(1,)](
            logits,
            weight,
            idx,
            plan,
            T,
            R,
            tiles,
            E=num_experts,
            SLOTS=K,
            FIRST=first_expert,
            ROUTE=route,
            BLOCK_M=BLOCK_M,
            BLOCK_S=_slots_block(R),
            BLOCK_J=BLOCK_J,
            BLOCK_TILES=BLOCK_TILES,
            BLOCK_E=BLOCK_E,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return weight, idx, plan


def down_combine_forward(
    h,
    down,
    bias,
    topk_weight,
    plan: Plan,
    tile: Tile,
) -> torch.Tensor:
    """`h` [R, I], `down` [E, H, I], `bias` [E, H], `topk_weight` [T, K] -> out [T, H].

    At most TINY rows. Grid: blocks of at most 16 columns of H, so that every processor has
    one; a program computes its columns of all rows, expert by expert, and then of all tokens.
    The weights of the experts that have rows are read once, h by every program.

    Expected to save one launch of two, which takes longer than computing these few rows; to be
    deleted if a decoding step in a CUDA graph is as fast without it.
    """
    T, K = topk_weight.shape
    E, H, I = down.shape
    out = h.new_empty(T, H)
    y = h.new_empty(h.shape[0], H)
    tile = tile._replace(
        BLOCK_N=min(16, tile.BLOCK_N), num_warps=4, TMA=False, PERSISTENT=False, JOINED=False
    )
    w, weight = weight_operand(down, None, bias, True, tile)
    unroll = min(UNROLL, triton.next_power_of_2(K))
    with torch.cuda.device_of(h):
        _down_combine_kernel[(triton.cdiv(H, tile.BLOCK_N),)](
            h,
            w,
            weight,
            plan.tile_map,
            plan.slot_row,
            topk_weight,
            plan.expert_offsets,
            y,
            out,
            T,
            plan.tile_map.shape[1],
            E,
            H,
            I,
            SLOTS=K,
            UNROLL=unroll,
            PRODUCT=product_of(h, down, True, I, tile),
            TILE=tile,
            BLOCK_T=16,
            num_warps=4,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )
    return out
