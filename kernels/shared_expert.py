"""Elementwise steps of a shared expert whose matmuls torch computes.

Expert 0 sorts first and sees each token once, so its rows are 0..T-1 of every buffer in expert
order. The equations are in `moe_runtime.ops.moe_mlp`.
"""

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.activation import Form, activate, below, shifted
from moe_runtime.kernels.compiling import named
from moe_runtime.kernels.dispatch import TileRows
from moe_runtime.kernels.grouped_gemm_backward import Dz, store_dz
from moe_runtime.kernels.operands import pairs
from moe_runtime.kernels.tiles import cells, outer

BLOCK_T = 16


@triton.jit(do_not_specialize=["T"], repr=named("shared_activation_fwd", "FORM"))
def _shared_activation_fwd_kernel(
    z_ptr,  # [T, 2I or I]
    h_ptr,  # [T, I]
    T,
    I,
    FORM: tl.constexpr,  # Form
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = outer(t < T, i < I)
    width = I * 2 if FORM.GATED else I
    if FORM.INTERLEAVED:
        c = tl.program_id(1) * (BLOCK_I * 2) + tl.arange(0, BLOCK_I * 2)
        z = z_ptr + cells(t, width, c)
        z_mask = outer(t < T, c < width)
        both = tl.load(z, mask=z_mask, other=0.0).to(tl.float32)
        gate, up = pairs(both, BLOCK_T, BLOCK_I)
    else:
        z = z_ptr + cells(t, width, i)
        gate = tl.load(z, mask=mask, other=0.0).to(tl.float32)
    ACT: tl.constexpr = FORM.ACT
    h = activate(below(gate, FORM.LIMIT), ACT)
    if FORM.GATED:
        if not FORM.INTERLEAVED:
            up = tl.load(z + I, mask=mask, other=0.0).to(tl.float32)
        h = h * shifted(up, FORM.LIMIT, FORM.UP_OFFSET)
    tl.store(h_ptr + cells(t, I, i), h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"], repr=named("shared_dz", "FORM"))
def _shared_dz_kernel(
    dh_ptr,  # [T, I]
    topk_ptr,  # [T, SLOTS] float32, the shared expert's last
    out,  # Dz of rows 0..T-1
    partial_ptr,  # [T, cdiv(I, BLOCK_I)] float32
    T,
    I,
    SLOTS: tl.constexpr,
    FORM: tl.constexpr,  # Form
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_T
    i0 = tl.program_id(1) * BLOCK_I
    i = i0 + tl.arange(0, BLOCK_I)
    t = (row + tl.arange(0, BLOCK_T)).to(tl.int64)
    live = t < T
    mask = outer(live, i < I)
    dh = tl.load(dh_ptr + cells(t, I, i), mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(topk_ptr + t * SLOTS + (SLOTS - 1), mask=live, other=0.0)
    dot = store_dz(
        dh,
        weight,
        TileRows(0, row, T - row),
        i0,
        I,
        out,
        FORM,
        BLOCK_T,
        BLOCK_I,
    )
    tl.store(partial_ptr + t * tl.cdiv(I, BLOCK_I) + tl.program_id(1), dot, mask=live)


def shared_activation_forward(
    z: torch.Tensor,
    h: torch.Tensor,
    act: str,
    gated: bool,
    *,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
) -> None:
    """Fill h [T, I] with act(gate) * up of z [T, 2I], or act(z) of z [T, I].

    Grid: blocks of BLOCK_T tokens by at most 256 columns, one per program. 3 T I elements move.
    """
    T, I = h.shape
    BLOCK_I = min(256, max(16, triton.next_power_of_2(I)))
    form = Form(act, gated, limit or 0.0, up_offset, interleaved)
    with torch.cuda.device_of(z):
        _shared_activation_fwd_kernel[(triton.cdiv(T, BLOCK_T), triton.cdiv(I, BLOCK_I))](
            z,
            h,
            T,
            I,
            FORM=form,
            BLOCK_T=BLOCK_T,
            BLOCK_I=BLOCK_I,
            enable_fp_fusion=True,
        )


def shared_dz_backward(
    dh,
    topk_weight,
    z,
    dz,
    wh,
    partial,
    act: str,
    gated: bool,
    BLOCK_I: int,
    *,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
) -> None:
    """Fill dz, weight * h (unless `wh` is None) and `partial` from dh [T, I], like `dz_backward`.

    Grid: blocks of BLOCK_T tokens by BLOCK_I columns, one per program, which is a column of
    `partial` [T, cdiv(I, BLOCK_I)]. 3 T I elements of dh and z are read, 3 T I written.
    """
    T, I = dh.shape
    form = Form(act, gated, limit or 0.0, up_offset, interleaved)
    with torch.cuda.device_of(dh):
        _shared_dz_kernel[(triton.cdiv(T, BLOCK_T), triton.cdiv(I, BLOCK_I))](
            dh,
            topk_weight,
            Dz(z, dz, wh),
            partial,
            T,
            I,
            SLOTS=topk_weight.shape[1],
            FORM=form,
            BLOCK_T=BLOCK_T,
            BLOCK_I=BLOCK_I,
            enable_fp_fusion=True,
        )
