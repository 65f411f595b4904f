"""LoRA experts over one base that runs once per token: their mixed activation. Its gradients are in `kernels.lora_backward`.

The equations are in `moe_runtime.ops.lora`. The base's part arrives as z = [gate; up], computed before. Each result is a sum
over tokens, columns of I or experts, and has a kernel that recomputes each expert's tile of z from the base's and the rank-r
factors: no row of a single expert and no partial sum is ever in memory, and there are no atomics. Every token passes through
every expert; those that it has not chosen have weight 0. E is not a constexpr: its loop, unrolled, would use all registers.
"""

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.activation import activate
from moe_runtime.kernels.tiles import precision, tile_of


@triton.jit
def with_lora(z, low_ptr, b, at, mask, scaling, PRECISION: tl.constexpr):
    """z + scaling low b of one expert, [BLOCK_T, BLOCK_I] float32."""
    low = tl.load(low_ptr + at, mask=mask, other=0.0)
    return z + scaling * tl.dot(low, b, tl.zeros_like(z), input_precision=PRECISION)


@triton.jit
def expert_z(gate, up, low_ptr, plane, gate_b_ptr, up_b_ptr, low_at, low_mask, b_at, b_mask, scaling,
              PRECISION: tl.constexpr):  # fmt: skip
    """An expert's gate and up, [BLOCK_T, BLOCK_I] float32, from the base's; the pointers are at the expert's."""
    if gate_b_ptr is not None:
        b = tl.load(gate_b_ptr + b_at, mask=b_mask, other=0.0)
        gate = with_lora(gate, low_ptr, b, low_at, low_mask, scaling, PRECISION)
    if up_b_ptr is not None:
        b = tl.load(up_b_ptr + b_at, mask=b_mask, other=0.0)
        up = with_lora(up, low_ptr + plane, b, low_at, low_mask, scaling, PRECISION)
    return gate, up


@triton.jit
def base_z(z_ptr, t, i, T, I):
    """The base's gate and up of a tile, [BLOCK_T, BLOCK_I] float32 each."""
    at = t.to(tl.int64)[:, None] * (I * 2) + i[None, :]
    mask = (t < T)[:, None] & (i < I)[None, :]
    gate = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(z_ptr + (at + I), mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def weigh(weight, tile):
    """weight * tile, not a product with zero: an expert that a token has not chosen may be anything."""
    return tl.where(weight == 0, 0.0, weight * tile)


@triton.jit(do_not_specialize=["T", "plane"])
def _lora_fwd_kernel(
    z_ptr,  # [T, 2I]
    low_ptr,  # [3, T, E * R]: x A^T of gate, of up
    weight_ptr,  # [T, E] float32
    gate_b_ptr,  # [E, R, I] or None
    up_b_ptr,  # [E, R, I] or None
    h_ptr,  # [T, I]
    T, I, R, E,
    width,  # E * R
    plane,  # T * width
    stride_e,  # R * I
    scaling,
    ACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    tile_t, tile_i = tile_of(tl.program_id(0), tl.cdiv(T, BLOCK_T), tl.cdiv(I, BLOCK_I), 8)
    t = tile_t.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    r = tl.arange(0, BLOCK_R)
    low_at, low_mask = t[:, None] * width + r[None, :], (t < T)[:, None] & (r < R)[None, :]
    b_at, b_mask = r.to(tl.int64)[:, None] * I + i[None, :], (r < R)[:, None] & (i < I)[None, :]
    gate, up = base_z(z_ptr, t, i, T, I)
    mixed = tl.zeros([BLOCK_T, BLOCK_I], tl.float32)
    for e in range(E):
        weight = tl.load(weight_ptr + (t * E + e), mask=t < T, other=0.0)[:, None]
        g, u = expert_z(
            gate,
            up,
            low_ptr,
            plane,
            gate_b_ptr,
            up_b_ptr,
            low_at,
            low_mask,
            b_at,
            b_mask,
            scaling,
            PRECISION,
        )
        mixed += weigh(weight, activate(g, ACT) * u)
        low_ptr += R
        if gate_b_ptr is not None:
            gate_b_ptr += stride_e
        if up_b_ptr is not None:
            up_b_ptr += stride_e
    at = t[:, None] * I + i[None, :]
    tl.store(h_ptr + at, mixed.to(h_ptr.dtype.element_ty), mask=(t < T)[:, None] & (i < I)[None, :])


@triton.jit(do_not_specialize=["T", "plane"])
def _lora_fwd_low_kernel(
    z_ptr,  # [T, 2I]
    low_ptr,  # [3, T, E * R]; the third plane is written
    weight_ptr,  # [T, E] float32
    gate_b_ptr,  # [E, R, I] or None
    up_b_ptr,  # [E, R, I] or None
    down_a_ptr,  # [E, R, I]
    T, I, R, E,
    plane,  # T * E * R
    scaling,
    ACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # the experts of a tile of tokens side by side: what they read of z they find in L2
    e = (tl.program_id(0) % E).to(tl.int64)
    t = (tl.program_id(0) // E).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    low_at, low_mask = (t * E + e)[:, None] * R + r[None, :], (t < T)[:, None] & (r < R)[None, :]
    weight = tl.load(weight_ptr + (t * E + e), mask=t < T, other=0.0)[:, None]
    q = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for i0 in range(0, I, BLOCK_I):
        i = i0 + tl.arange(0, BLOCK_I)
        b_at, b_mask = (e * R + r)[:, None] * I + i[None, :], (r < R)[:, None] & (i < I)[None, :]
        g, u = base_z(z_ptr, t, i, T, I)
        g, u = expert_z(
            g,
            u,
            low_ptr,
            plane,
            gate_b_ptr,
            up_b_ptr,
            low_at,
            low_mask,
            b_at,
            b_mask,
            scaling,
            PRECISION,
        )
        a = tl.load(down_a_ptr + b_at, mask=b_mask, other=0.0)
        h = weigh(weight, activate(g, ACT) * u)
        q = tl.dot(h.to(a.dtype), tl.trans(a), q, input_precision=PRECISION)
    tl.store(low_ptr + plane + plane + low_at, q.to(low_ptr.dtype.element_ty), mask=low_mask)


def lora_forward(
    z, low, weight, gate_b, up_b, down_a, act: str, scaling: float, config: dict | None = None
) -> torch.Tensor:
    """Return h [T, I], the mixed activation; fills low[2] with q = its part of rank r, unless `down_a` is None.

    `z` [T, 2I], `low` [3, T, E * r] (x A^T of gate, of up), `weight` [T, E] float32; `gate_b`, `up_b`, `down_a` [E, r, I] or
    None. `config` takes the place of `lora_config`'s.
    """
    (T, I), E, width = (z.shape[0], z.shape[1] // 2), weight.shape[1], low.shape[2]
    rank, h = width // E, z.new_empty(T, I)
    if not T:
        return h
    sizes = (T, I, rank, E)
    with torch.cuda.device_of(z):  # Triton launches on the current device
        c = config or lora_config("fwd", z, I, rank)
        _lora_fwd_kernel[(triton.cdiv(T, c["BLOCK_T"]) * triton.cdiv(I, c["BLOCK_I"]),)](
            z,
            low,
            weight,
            gate_b,
            up_b,
            h,
            *sizes,
            width,
            T * width,
            rank * I,
            scaling,
            ACT=act,
            **c,
            enable_fp_fusion=True,
        )
        if down_a is not None:
            c = config or lora_config("low", z, I, rank)
            _lora_fwd_low_kernel[(triton.cdiv(T, c["BLOCK_T"]) * E,)](
                z,
                low,
                weight,
                gate_b,
                up_b,
                down_a,
                *sizes,
                T * width,
                scaling,
                ACT=act,
                **c,
                enable_fp_fusion=True,
            )
    return h


# kernels -> tokens, columns of I, warps. A product that feeds another has its warps along the tokens, 16 each
_BLOCKS = {"fwd": (64, 32, 4), "bwd": (32, 128, 8), "low": (64, 32, 4), "bwd_w": (32, 64, 4)}


def lora_config(kernel: str, z: torch.Tensor, I: int, rank: int) -> dict:
    """Return blocks, precision, warps and stages of the kernels "fwd", "bwd", "low" (both directions) or "bwd_w"."""
    block_t, block_i, warps = _BLOCKS[kernel]
    block_r = max(16, triton.next_power_of_2(rank))
    if z.device.type == "cpu":  # the interpreter
        block_t, block_i, warps = 16, 32, 4
    elif z.dtype == torch.float32 or I % 16 or rank % 8 or block_r > 32:
        # where 8 does not divide a row's length loads are element by element, and a wide tile of pointers spills
        block_t, block_i = 32, 32
    return {
        "BLOCK_T": block_t,
        "BLOCK_I": min(block_i, max(16, triton.next_power_of_2(I))),
        "BLOCK_R": block_r,
        "PRECISION": precision(z),
        "num_warps": warps,
        "num_stages": 2,
    }
