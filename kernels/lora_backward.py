"""Gradients of LoRA experts over one base: of the base's pre-activation, the rank-r activations and the experts' own matrices.

The equations are in `moe_runtime.ops.lora`; `kernels.lora` says what is recomputed and what is never in memory.
"""

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.activation import activate_grad
from moe_runtime.kernels.lora import base_z, expert_z, lora_config, weigh, with_lora
from moe_runtime.kernels.tiles import tile_of


@triton.jit(do_not_specialize=["T", "plane"])
def _lora_bwd_z_kernel(
    dh_ptr,  # [T, I]: of the mixed activation, before the experts' own down projections
    dq_ptr,  # [T, E * R], scaling included, or None
    z_ptr,  # [T, 2I]
    low_ptr,  # [3, T, E * R]
    weight_ptr,  # [T, E] float32
    gate_b_ptr,  # [E, R, I] or None
    up_b_ptr,  # [E, R, I] or None
    down_a_ptr,  # [E, R, I] or None
    dz_ptr,  # [T, 2I]
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
    tile_mask = (t < T)[:, None] & (i < I)[None, :]
    gate, up = base_z(z_ptr, t, i, T, I)
    dh = tl.load(dh_ptr + (t[:, None] * I + i[None, :]), mask=tile_mask, other=0.0).to(tl.float32)
    dgate = tl.zeros([BLOCK_T, BLOCK_I], tl.float32)
    dup = tl.zeros([BLOCK_T, BLOCK_I], tl.float32)
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
        da = dh
        if down_a_ptr is not None:
            a = tl.load(down_a_ptr + b_at, mask=b_mask, other=0.0)
            da = with_lora(dh, dq_ptr, a, low_at, low_mask, 1.0, PRECISION)
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
    dz_ptr += t[:, None] * (I * 2) + i[None, :]
    tl.store(dz_ptr, dgate.to(dz_ptr.dtype.element_ty), mask=tile_mask)
    tl.store(dz_ptr + I, dup.to(dz_ptr.dtype.element_ty), mask=tile_mask)


@triton.jit(do_not_specialize=["T", "plane"])
def _lora_bwd_low_kernel(
    dh_ptr,  # [T, I]
    dq_ptr,  # [T, E * R], scaling included, or None
    z_ptr,  # [T, 2I]
    low_ptr,  # [3, T, E * R]
    weight_ptr,  # [T, E] float32
    gate_b_ptr,  # [E, R, I] or None
    up_b_ptr,  # [E, R, I] or None
    down_a_ptr,  # [E, R, I] or None
    dlow_ptr,  # [2, T, E * R]: of gate where it has a B, of up where it has one
    dweight_ptr,  # [T, E] float32
    T, I, R, E,
    plane,  # T * E * R
    scaling,
    ACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    e = (tl.program_id(0) % E).to(tl.int64)
    t = (tl.program_id(0) // E).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    low_at, low_mask = (t * E + e)[:, None] * R + r[None, :], (t < T)[:, None] & (r < R)[None, :]
    weight = tl.load(weight_ptr + (t * E + e), mask=t < T, other=0.0)[:, None]
    dweight = tl.zeros([BLOCK_T], tl.float32)
    dgate = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    dup = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
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
        da = tl.load(
            dh_ptr + (t[:, None] * I + i[None, :]),
            mask=(t < T)[:, None] & (i < I)[None, :],
            other=0.0,
        )
        da = da.to(tl.float32)
        if down_a_ptr is not None:
            a = tl.load(down_a_ptr + b_at, mask=b_mask, other=0.0)
            da = with_lora(da, dq_ptr, a, low_at, low_mask, 1.0, PRECISION)
        value, slope = activate_grad(g, ACT)
        dweight += tl.sum(da * value * u, 1)
        if gate_b_ptr is not None:
            b = tl.load(gate_b_ptr + b_at, mask=b_mask, other=0.0)
            dg = weigh(weight, da * u * slope).to(b.dtype)
            dgate = tl.dot(dg, tl.trans(b), dgate, input_precision=PRECISION)
        if up_b_ptr is not None:
            b = tl.load(up_b_ptr + b_at, mask=b_mask, other=0.0)
            du = weigh(weight, da * value).to(b.dtype)
            dup = tl.dot(du, tl.trans(b), dup, input_precision=PRECISION)
    tl.store(dweight_ptr + (t * E + e), dweight, mask=t < T)
    if gate_b_ptr is not None:
        tl.store(dlow_ptr + low_at, (scaling * dgate).to(dlow_ptr.dtype.element_ty), mask=low_mask)
    if up_b_ptr is not None:
        tl.store(
            dlow_ptr + plane + low_at, (scaling * dup).to(dlow_ptr.dtype.element_ty), mask=low_mask
        )


@triton.jit
def _sum_into(acc, low_ptr, at, mask, rows, PRECISION: tl.constexpr):
    """acc + low^T rows, [BLOCK_R, BLOCK_I] float32."""
    low = tl.load(low_ptr + at, mask=mask, other=0.0)
    return tl.dot(tl.trans(low), rows.to(low.dtype), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "plane"])
def _lora_bwd_w_kernel(
    dh_ptr,  # [T, I]
    dq_ptr,  # [T, E * R], scaling included, or None
    z_ptr,  # [T, 2I]
    low_ptr,  # [3, T, E * R]
    weight_ptr,  # [T, E] float32
    gate_b_ptr,  # [E, R, I] or None
    up_b_ptr,  # [E, R, I] or None
    down_a_ptr,  # [E, R, I] or None
    dgate_b_ptr,  # [E, R, I] or None
    dup_b_ptr,  # [E, R, I] or None
    ddown_a_ptr,  # [E, R, I] or None
    T, I, R, E,
    plane,  # T * E * R
    scaling,
    ACT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    e = (tl.program_id(0) % E).to(tl.int64)
    i = tl.program_id(0) // E * BLOCK_I + tl.arange(0, BLOCK_I)
    r = tl.arange(0, BLOCK_R)
    b_at, b_mask = (e * R + r)[:, None] * I + i[None, :], (r < R)[:, None] & (i < I)[None, :]
    dgate_b = tl.zeros([BLOCK_R, BLOCK_I], tl.float32)
    dup_b = tl.zeros([BLOCK_R, BLOCK_I], tl.float32)
    ddown_a = tl.zeros([BLOCK_R, BLOCK_I], tl.float32)
    for t0 in range(0, T, BLOCK_T):
        t = (t0 + tl.arange(0, BLOCK_T)).to(tl.int64)
        at, mask = (t * E + e)[:, None] * R + r[None, :], (t < T)[:, None] & (r < R)[None, :]
        weight = tl.load(weight_ptr + (t * E + e), mask=t < T, other=0.0)[:, None]
        g, u = base_z(z_ptr, t, i, T, I)
        g, u = expert_z(
            g, u, low_ptr, plane, gate_b_ptr, up_b_ptr, at, mask, b_at, b_mask, scaling, PRECISION
        )
        da = tl.load(
            dh_ptr + (t[:, None] * I + i[None, :]),
            mask=(t < T)[:, None] & (i < I)[None, :],
            other=0.0,
        )
        da = da.to(tl.float32)
        if down_a_ptr is not None:
            a = tl.load(down_a_ptr + b_at, mask=b_mask, other=0.0)
            da = with_lora(da, dq_ptr, a, at, mask, 1.0, PRECISION)
        value, slope = activate_grad(g, ACT)
        if dgate_b_ptr is not None:
            dgate_b = _sum_into(
                dgate_b, low_ptr, at, mask, weigh(weight, da * u * slope), PRECISION
            )
        if dup_b_ptr is not None:
            dup_b = _sum_into(
                dup_b, low_ptr + plane, at, mask, weigh(weight, da * value), PRECISION
            )
        if ddown_a_ptr is not None:
            ddown_a = _sum_into(ddown_a, dq_ptr, at, mask, weigh(weight, value * u), PRECISION)
    if dgate_b_ptr is not None:
        tl.store(
            dgate_b_ptr + b_at, (scaling * dgate_b).to(dgate_b_ptr.dtype.element_ty), mask=b_mask
        )
    if dup_b_ptr is not None:
        tl.store(dup_b_ptr + b_at, (scaling * dup_b).to(dup_b_ptr.dtype.element_ty), mask=b_mask)
    if ddown_a_ptr is not None:
        tl.store(ddown_a_ptr + b_at, ddown_a.to(ddown_a_ptr.dtype.element_ty), mask=b_mask)


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
    config: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dz [T, 2I], dlow [2, T, E * r] of gate and of up (zeros where its B is None) and dweight [T, E] float32.

    `dh` [T, I] and `dq` [T, E * r], scaling included, are the gradients of `lora_forward`'s h and q.
    """
    (T, I), E, width = (z.shape[0], z.shape[1] // 2), weight.shape[1], low.shape[2]
    rank, dz, dweight = width // E, torch.empty_like(z), torch.empty_like(weight)
    whole = gate_b is not None and up_b is not None
    dlow = z.new_empty(2, T, width) if whole else z.new_zeros(2, T, width)
    if not T:
        return dz, dlow, dweight
    inputs, sizes = (dh, dq, z, low, weight, gate_b, up_b, down_a), (T, I, rank, E)
    with torch.cuda.device_of(z):
        c = config or lora_config("bwd", z, I, rank)
        _lora_bwd_z_kernel[(triton.cdiv(T, c["BLOCK_T"]) * triton.cdiv(I, c["BLOCK_I"]),)](
            *inputs,
            dz,
            *sizes,
            width,
            T * width,
            rank * I,
            scaling,
            ACT=act,
            **c,
            enable_fp_fusion=True,
        )
        c = config or lora_config("low", z, I, rank)
        _lora_bwd_low_kernel[(triton.cdiv(T, c["BLOCK_T"]) * E,)](
            *inputs, dlow, dweight, *sizes, T * width, scaling, ACT=act, **c, enable_fp_fusion=True
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
    config: dict | None = None,
) -> list[torch.Tensor | None]:
    """Return the gradients of `gate_b`, `up_b`, `down_a` [E, r, I] that `needs` (three bools) asks for; else None."""
    (T, I), E, width = (z.shape[0], z.shape[1] // 2), weight.shape[1], low.shape[2]
    rank = width // E
    grads = [
        torch.empty_like(w) if need else None for w, need in zip((gate_b, up_b, down_a), needs)
    ]
    if any(needs):
        c = config or lora_config("bwd_w", z, I, rank)
        with torch.cuda.device_of(z):
            _lora_bwd_w_kernel[(E * triton.cdiv(I, c["BLOCK_I"]),)](
                dh, dq, z, low, weight, gate_b, up_b, down_a, *grads, T, I, rank, E, T * width, scaling, ACT=act, **c,
                enable_fp_fusion=True,
            )  # fmt: skip
    return grads
