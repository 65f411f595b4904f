"""Mixed activation of LoRA experts over one base that runs once per token.

The equations are in `moe_runtime.ops.lora`, the gradients in `kernels.lora_backward`. The base's
pre-activation z = [gate; up] is an input. Each result is a sum over tokens, columns of I or
experts, and has a kernel that recomputes each expert's tile of z from the base's and the rank-r
factors: no row of a single expert and no partial sum is stored, and there are no atomics. Every
token passes through every expert, with weight 0 unless it has chosen the expert. E is not a
constexpr, since its unrolled loop would use all registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.activation import activate
from moe_runtime.kernels.compiling import named
from moe_runtime.kernels.tiles import cells, outer, precision, tile_of


class LoraTile(NamedTuple):
    """A launch config: BLOCK_T tokens by BLOCK_I columns, for ranks up to BLOCK_R."""

    BLOCK_T: int
    BLOCK_I: int
    BLOCK_R: int
    PRECISION: str  # of float32 operands
    num_warps: int
    num_stages: int


class LoraExperts(NamedTuple):
    """Inputs of every kernel: the base's pre-activation, and what the experts add to it."""

    z: torch.Tensor  # [T, 2I]
    low: torch.Tensor  # [3, T, E * R]: x A^T of gate, of up; q
    weight: torch.Tensor  # [T, E] float32
    gate_b: torch.Tensor | None  # [E, R, I]
    up_b: torch.Tensor | None  # [E, R, I]
    down_a: torch.Tensor | None  # [E, R, I]


class Offsets(NamedTuple):
    """Offsets and masks, in a kernel, of the tiles of `low` and of an expert's matrix."""

    low: tl.tensor  # [BLOCK_T, BLOCK_R]
    low_mask: tl.tensor
    b: tl.tensor  # [BLOCK_R, BLOCK_I]
    b_mask: tl.tensor


@triton.jit
def check_lora_tile(TILE: tl.constexpr):
    """Reject at compile time tiles that tensor cores cannot multiply."""
    tl.static_assert(TILE.BLOCK_T >= 16 and TILE.BLOCK_I >= 16, "a tile must be at least 16x16")
    tl.static_assert(TILE.BLOCK_R >= 16, "tl.dot requires BLOCK_R >= 16")


@triton.jit
def with_lora(
    z,
    low_ptr,
    b,
    at,
    scaling,
    PRECISION: tl.constexpr,
):
    """z + scaling low b of one expert, [BLOCK_T, BLOCK_I] float32."""
    low = tl.load(low_ptr + at.low, mask=at.low_mask, other=0.0)
    return z + scaling * tl.dot(low, b, tl.zeros_like(z), input_precision=PRECISION)


@triton.jit
def expert_z(
    gate,
    up,
    low_ptr,
    plane,
    gate_b_ptr,
    up_b_ptr,
    at,
    scaling,
    PRECISION: tl.constexpr,
):
    """An expert's gate and up, [BLOCK_T, BLOCK_I] float32, from the base's.

    `plane`, T E R, is the offset in `low` of up's part from gate's.
    """
    if gate_b_ptr is not None:
        b = tl.load(gate_b_ptr + at.b, mask=at.b_mask, other=0.0)
        gate = with_lora(
            gate,
            low_ptr,
            b,
            at,
            scaling,
            PRECISION,
        )
    if up_b_ptr is not None:
        b = tl.load(up_b_ptr + at.b, mask=at.b_mask, other=0.0)
        up = with_lora(
            up,
            low_ptr + plane,
            b,
            at,
            scaling,
            PRECISION,
        )
    return gate, up


@triton.jit
def base_z(z_ptr, t, i, T, I):
    """The base's gate and up of a tile, [BLOCK_T, BLOCK_I] float32 each."""
    at = cells(t.to(tl.int64), I * 2, i)
    mask = outer(t < T, i < I)
    gate = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(z_ptr + (at + I), mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def weigh(weight, tile):
    """weight * tile, 0 where the weight is 0, as experts that are not chosen may produce NaN."""
    return tl.where(weight == 0, 0.0, weight * tile)


@triton.jit
def outer_offsets(
    t,
    i,
    r,
    T,
    I,
    R,
    width,
):
    """`Offsets` of the first expert; the kernel advances its pointers to the next ones."""
    low = cells(t.to(tl.int64), width, r)
    low_mask = outer(t < T, r < R)
    b = cells(r.to(tl.int64), I, i)
    b_mask = outer(r < R, i < I)
    return Offsets(low, low_mask, b, b_mask)


@triton.jit
def low_offsets(
    e,
    t,
    r,
    T,
    R,
    E,
):
    """Offsets and mask of expert e's tile of `low`."""
    return cells(t.to(tl.int64) * E + e, R, r), outer(t < T, r < R)


@triton.jit
def matrix_offsets(e, r, i, R, I):
    """Offsets and mask of the tile of expert e's matrix."""
    return cells(e.to(tl.int64) * R + r, I, i), outer(r < R, i < I)


@triton.jit(do_not_specialize=["T", "plane"], repr=named("lora_fwd", "ACT", "TILE"))
def _lora_fwd_kernel(
    experts,  # LoraExperts
    h_ptr,  # [T, I]
    T,
    I,
    R,
    E,
    width,  # E * R
    plane,  # T * width
    stride_e,  # R * I
    scaling,
    ACT: tl.constexpr,
    TILE: tl.constexpr,  # LoraTile
):
    check_lora_tile(TILE)
    BLOCK_T: tl.constexpr = TILE.BLOCK_T
    BLOCK_I: tl.constexpr = TILE.BLOCK_I
    PRECISION: tl.constexpr = TILE.PRECISION
    tile_t, tile_i = tile_of(tl.program_id(0), tl.cdiv(T, BLOCK_T), tl.cdiv(I, BLOCK_I), 8)
    t = tile_t.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    at = outer_offsets(
        t,
        i,
        tl.arange(0, TILE.BLOCK_R),
        T,
        I,
        R,
        width,
    )
    low_ptr = experts.low
    gate_b_ptr = experts.gate_b
    up_b_ptr = experts.up_b
    gate, up = base_z(experts.z, t, i, T, I)
    mixed = tl.zeros([BLOCK_T, BLOCK_I], tl.float32)
    for e in range(E):
        weight = tl.load(experts.weight + (t * E + e), mask=t < T, other=0.0)[:, None]
        g, u = expert_z(
            gate,
            up,
            low_ptr,
            plane,
            gate_b_ptr,
            up_b_ptr,
            at,
            scaling,
            PRECISION,
        )
        mixed += weigh(weight, activate(g, ACT) * u)
        low_ptr += R
        if gate_b_ptr is not None:
            gate_b_ptr += stride_e
        if up_b_ptr is not None:
            up_b_ptr += stride_e
    mask = outer(t < T, i < I)
    h = h_ptr + cells(t, I, i)
    tl.store(h, mixed.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "plane"], repr=named("lora_fwd_low", "ACT", "TILE"))
def _lora_fwd_low_kernel(
    experts,  # LoraExperts; the third plane of `low` is written
    T,
    I,
    R,
    E,
    plane,  # T * E * R
    scaling,
    ACT: tl.constexpr,
    TILE: tl.constexpr,  # LoraTile
):
    check_lora_tile(TILE)
    BLOCK_T: tl.constexpr = TILE.BLOCK_T
    BLOCK_I: tl.constexpr = TILE.BLOCK_I
    BLOCK_R: tl.constexpr = TILE.BLOCK_R
    PRECISION: tl.constexpr = TILE.PRECISION
    # the programs of a tile of tokens run side by side and share its z in L2
    e = (tl.program_id(0) % E).to(tl.int64)
    t = (tl.program_id(0) // E).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    low_at, low_mask = low_offsets(
        e,
        t,
        r,
        T,
        R,
        E,
    )
    weight = tl.load(experts.weight + (t * E + e), mask=t < T, other=0.0)[:, None]
    q = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for i0 in range(0, I, BLOCK_I):
        i = i0 + tl.arange(0, BLOCK_I)
        b_at, b_mask = matrix_offsets(e, r, i, R, I)
        at = Offsets(low_at, low_mask, b_at, b_mask)
        g, u = base_z(experts.z, t, i, T, I)
        g, u = expert_z(
            g,
            u,
            experts.low,
            plane,
            experts.gate_b,
            experts.up_b,
            at,
            scaling,
            PRECISION,
        )
        a = tl.load(experts.down_a + at.b, mask=at.b_mask, other=0.0)
        h = weigh(weight, activate(g, ACT) * u)
        q = tl.dot(h.to(a.dtype), tl.trans(a), q, input_precision=PRECISION)
    q = q.to(experts.low.dtype.element_ty)
    tl.store(experts.low + plane + plane + low_at, q, mask=low_mask)


def lora_forward(
    z,
    low,
    weight,
    gate_b,
    up_b,
    down_a,
    act: str,
    scaling: float,
    config: LoraTile | None = None,
) -> torch.Tensor:
    """Return h [T, I], the mixed activation, and fill low[2] with q, its rank-r part.

    `z` [T, 2I], `low` [3, T, E * r] (x A^T of gate, of up), `weight` [T, E] float32; `gate_b`,
    `up_b`, `down_a` [E, r, I] or None; without `down_a` there is no q. `config` overrides
    `lora_config`.

    Grids: the tiles of h [T, I], then of q, BLOCK_T tokens of one expert each. A program of the
    first loops over the experts, one of the second over the columns of I. At least 3 T I elements
    move for h, and (2 T I + E r I) for q, where the experts' programs share z in L2.
    """
    T, E = weight.shape
    I = z.shape[1] // 2
    width = low.shape[2]
    rank = width // E
    h = z.new_empty(T, I)
    if not T:
        return h
    experts = LoraExperts(
        z,
        low,
        weight,
        gate_b,
        up_b,
        down_a,
    )
    sizes = (T, I, rank, E)
    with torch.cuda.device_of(z):  # Triton launches on the current device
        tile = config or lora_config("fwd", z, I, rank)
        grid = (triton.cdiv(T, tile.BLOCK_T) * triton.cdiv(I, tile.BLOCK_I),)
        strides = (width, T * width, rank * I)
        _lora_fwd_kernel[grid](
            experts,
            h,
            *sizes,
            *strides,
            scaling,
            **constants(act, tile),
        )
        if down_a is not None:
            tile = config or lora_config("low", z, I, rank)
            grid = (triton.cdiv(T, tile.BLOCK_T) * E,)
            _lora_fwd_low_kernel[grid](experts, *sizes, T * width, scaling, **constants(act, tile))
    return h


# kernel -> tokens, columns of I, warps. A product that feeds another has 16 tokens per warp
_BLOCKS = {"fwd": (64, 32, 4), "bwd": (32, 128, 8), "low": (64, 32, 4), "bwd_w": (32, 64, 4)}


def constants(act: str, tile: LoraTile) -> dict:
    """Return the constants and options of a launch."""
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return {"ACT": act, "TILE": tile, "enable_fp_fusion": True, **options}


def lora_config(kernel: str, z: torch.Tensor, I: int, rank: int) -> LoraTile:
    """Return the launch config of "fwd", "bwd", "low" (both directions) or "bwd_w"."""
    block_t, block_i, warps = _BLOCKS[kernel]
    block_r = max(16, triton.next_power_of_2(rank))
    if z.device.type == "cpu":  # the interpreter
        block_t, block_i, warps = 16, 32, 4
    elif z.dtype == torch.float32 or I % 16 or rank % 8 or block_r > 32:
        # unless 8 divides a row's length, loads are element by element, and the pointers of a wide
        # tile spill
        block_t, block_i = 32, 32
    block_i = min(block_i, max(16, triton.next_power_of_2(I)))
    return LoraTile(
        block_t,
        block_i,
        block_r,
        precision(z),
        warps,
        2,
    )
