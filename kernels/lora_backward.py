"""Gradients of LoRA experts over one base: of the base's z, the ranks and the experts' matrices.

The equations are in `moe_runtime.ops.lora`; `kernels.lora` describes what is recomputed rather than
stored.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.activation import activate_grad
from moe_runtime.kernels.compiling import named
from moe_runtime.kernels.lora import (
    LoraExperts,
    LoraTile,
    Offsets,
    base_z,
    check_lora_tile,
    constants,
    expert_z,
    lora_config,
    low_offsets,
    matrix_offsets,
    outer_offsets,
    weigh,
    with_lora,
)
from moe_runtime.kernels.tiles import cells, outer, tile_of


class LoraGradients(NamedTuple):
    """Gradients of the experts' matrices, each [E, R, I] or None."""

    gate_b: torch.Tensor | None
    up_b: torch.Tensor | None
    down_a: torch.Tensor | None


@triton.jit
def _load_dh(dh_ptr, t, i, T, I):
    """A tile of dh, [BLOCK_T, BLOCK_I] float32."""
    mask = outer(t < T, i < I)
    dh = tl.load(dh_ptr + cells(t.to(tl.int64), I, i), mask=mask, other=0.0)
    return dh.to(tl.float32)


@triton.jit(do_not_specialize=["T", "plane"], repr=named("lora_bwd_z", "ACT", "TILE"))
def _lora_bwd_z_kernel(
    dh_ptr,  # [T, I]: of the mixed activation, before the experts' down projections
    dq_ptr,  # [T, E * R], scaling included, or None
    experts,  # LoraExperts
    dz_ptr,  # [T, 2I]
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
    down_a_ptr = experts.down_a
    gate, up = base_z(experts.z, t, i, T, I)
    dh = _load_dh(dh_ptr, t, i, T, I)
    dgate = tl.zeros([BLOCK_T, BLOCK_I], tl.float32)
    dup = tl.zeros([BLOCK_T, BLOCK_I], tl.float32)
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
        da = dh
        if down_a_ptr is not None:
            a = tl.load(down_a_ptr + at.b, mask=at.b_mask, other=0.0)
            da = with_lora(
                dh,
                dq_ptr,
                a,
                at,
                1.0,
                PRECISION,
            )
            dq_ptr += R
            down_a_ptr += stride_e
        value, slope = activate_grad(g, ACT)
        dup += weigh(weight, da * value)
        dgate += weigh(weight, da * u * slope)
        low_ptr += R
        if gate_b_ptr is not None:
            gate_b_ptr += stride_e
        if up_b_ptr is not None:
            up_b_ptr += stride_e
    mask = outer(t < T, i < I)
    dz_ptr += cells(t, I * 2, i)
    tl.store(dz_ptr, dgate.to(dz_ptr.dtype.element_ty), mask=mask)
    tl.store(dz_ptr + I, dup.to(dz_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "plane"], repr=named("lora_bwd_low", "ACT", "TILE"))
def _lora_bwd_low_kernel(
    dh_ptr,  # [T, I]
    dq_ptr,  # [T, E * R], scaling included, or None
    experts,  # LoraExperts
    dlow_ptr,  # [2, T, E * R]: of gate and of up, each if it has a B
    dweight_ptr,  # [T, E] float32
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
    dweight = tl.zeros([BLOCK_T], tl.float32)
    dgate = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    dup = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
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
        da = _load_dh(dh_ptr, t, i, T, I)
        if experts.down_a is not None:
            a = tl.load(experts.down_a + at.b, mask=at.b_mask, other=0.0)
            da = with_lora(
                da,
                dq_ptr,
                a,
                at,
                1.0,
                PRECISION,
            )
        value, slope = activate_grad(g, ACT)
        dweight += tl.sum(da * value * u, 1)
        if experts.gate_b is not None:
            b = tl.load(experts.gate_b + at.b, mask=at.b_mask, other=0.0)
            dg = weigh(weight, da * u * slope).to(b.dtype)
            dgate = tl.dot(dg, tl.trans(b), dgate, input_precision=PRECISION)
        if experts.up_b is not None:
            b = tl.load(experts.up_b + at.b, mask=at.b_mask, other=0.0)
            du = weigh(weight, da * value).to(b.dtype)
            dup = tl.dot(du, tl.trans(b), dup, input_precision=PRECISION)
    tl.store(dweight_ptr + (t * E + e), dweight, mask=t < T)
    if experts.gate_b is not None:
        dgate = (scaling * dgate).to(dlow_ptr.dtype.element_ty)
        tl.store(dlow_ptr + low_at, dgate, mask=low_mask)
    if experts.up_b is not None:
        dup = (scaling * dup).to(dlow_ptr.dtype.element_ty)
        tl.store(dlow_ptr + plane + low_at, dup, mask=low_mask)


@triton.jit
def _sum_into(acc, low_ptr, at, rows, PRECISION: tl.constexpr):
    """acc + low^T rows, [BLOCK_R, BLOCK_I] float32."""
    low = tl.load(low_ptr + at.low, mask=at.low_mask, other=0.0)
    return tl.dot(tl.trans(low), rows.to(low.dtype), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "plane"], repr=named("lora_bwd_w", "ACT", "TILE"))
def _lora_bwd_w_kernel(
    dh_ptr,  # [T, I]
    dq_ptr,  # [T, E * R], scaling included, or None
    experts,  # LoraExperts
    grads,  # LoraGradients
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
    e = (tl.program_id(0) % E).to(tl.int64)
    i = tl.program_id(0) // E * BLOCK_I + tl.arange(0, BLOCK_I)
    r = tl.arange(0, BLOCK_R)
    b_at, b_mask = matrix_offsets(e, r, i, R, I)
    gate_b = tl.zeros([BLOCK_R, BLOCK_I], tl.float32)
    up_b = tl.zeros([BLOCK_R, BLOCK_I], tl.float32)
    down_a = tl.zeros([BLOCK_R, BLOCK_I], tl.float32)
    for t0 in range(0, T, BLOCK_T):
        t = (t0 + tl.arange(0, BLOCK_T)).to(tl.int64)
        low_at, low_mask = low_offsets(
            e,
            t,
            r,
            T,
            R,
            E,
        )
        at = Offsets(low_at, low_mask, b_at, b_mask)
        weight = tl.load(experts.weight + (t * E + e), mask=t < T, other=0.0)[:, None]
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
        da = _load_dh(dh_ptr, t, i, T, I)
        if experts.down_a is not None:
            a = tl.load(experts.down_a + at.b, mask=at.b_mask, other=0.0)
            da = with_lora(
                da,
                dq_ptr,
                a,
                at,
                1.0,
                PRECISION,
            )
        value, slope = activate_grad(g, ACT)
        if grads.gate_b is not None:
            rows = weigh(weight, da * u * slope)
            gate_b = _sum_into(gate_b, experts.low, at, rows, PRECISION)
        if grads.up_b is not None:
            rows = weigh(weight, da * value)
            up_b = _sum_into(up_b, experts.low + plane, at, rows, PRECISION)
        if grads.down_a is not None:
            rows = weigh(weight, value * u)
            down_a = _sum_into(down_a, dq_ptr, at, rows, PRECISION)
    if grads.gate_b is not None:
        gate_b = (scaling * gate_b).to(grads.gate_b.dtype.element_ty)
        tl.store(grads.gate_b + b_at, gate_b, mask=b_mask)
    if grads.up_b is not None:
        up_b = (scaling * up_b).to(grads.up_b.dtype.element_ty)
        tl.store(grads.up_b + b_at, up_b, mask=b_mask)
    if grads.down_a is not None:
        down_a = down_a.to(grads.down_a.dtype.element_ty)
        tl.store(grads.down_a + b_at, down_a, mask=b_mask)


def lora_backward(
    dh,
    dq,
    z,
    low,
    weight,
    gate_b,
    up_b,
    down_a,
    act: str,
    scaling: float,
    config: LoraTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dz [T, 2I], dlow [2, T, E * r] of gate and of up, and dweight [T, E] float32.

    `dh` [T, I] and `dq` [T, E * r], scaling included, are the gradients of `lora_forward`'s h and
    q. dlow is zero where B is None.

    Grids: the tiles of dz [T, I], then BLOCK_T tokens of one expert each, as in `lora_forward`. At
    least 5 T I elements move for dz, and 3 T I + 3 E r I for the others.
    """
    T, E = weight.shape
    I = z.shape[1] // 2
    width = low.shape[2]
    rank = width // E
    dz = torch.empty_like(z)
    dweight = torch.empty_like(weight)
    if gate_b is None or up_b is None:
        dlow = z.new_zeros(2, T, width)
    else:
        dlow = z.new_empty(2, T, width)
    if not T:
        return dz, dlow, dweight
    experts = LoraExperts(
        z,
        low,
        weight,
        gate_b,
        up_b,
        down_a,
    )
    sizes = (T, I, rank, E)
    with torch.cuda.device_of(z):
        tile = config or lora_config("bwd", z, I, rank)
        grid = (triton.cdiv(T, tile.BLOCK_T) * triton.cdiv(I, tile.BLOCK_I),)
        strides = (width, T * width, rank * I)
        _lora_bwd_z_kernel[grid](
            dh,
            dq,
            experts,
            dz,
            *sizes,
            *strides,
            scaling,
            **constants(act, tile),
        )
        tile = config or lora_config("low", z, I, rank)
        grid = (triton.cdiv(T, tile.BLOCK_T) * E,)
        _lora_bwd_low_kernel[grid](
            dh,
            dq,
            experts,
            dlow,
            dweight,
            *sizes,
            T * width,
            scaling,
            **constants(act, tile),
        )
    return dz, dlow, dweight


def lora_backward_w(
    dh,
    dq,
    z,
    low,
    weight,
    gate_b,
    up_b,
    down_a,
    needs,
    act: str,
    scaling: float,
    config: LoraTile | None = None,
) -> list[torch.Tensor | None]:
    """Return the gradients of `gate_b`, `up_b` and `down_a` [E, r, I]; None unless in `needs`.

    Grid: blocks of BLOCK_I columns of one expert; a program sums over all tokens. At least 3 T I
    elements and 3 E r I are read, which the experts' programs share in L2, and 3 E r I written.
    """
    T, E = weight.shape
    I = z.shape[1] // 2
    width = low.shape[2]
    rank = width // E
    grads = [
        torch.empty_like(w) if need else None for w, need in zip((gate_b, up_b, down_a), needs)
    ]
    if any(needs):
        experts = LoraExperts(
            z,
            low,
            weight,
            gate_b,
            up_b,
            down_a,
        )
        tile = config or lora_config("bwd_w", z, I, rank)
        with torch.cuda.device_of(z):
            _lora_bwd_w_kernel[(E * triton.cdiv(I, tile.BLOCK_I),)](
                dh,
                dq,
                experts,
                LoraGradients(*grads),
                T,
                I,
                rank,
                E,
                T * width,
                scaling,
                **constants(act, tile),
            )
    return grads
