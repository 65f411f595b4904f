"""The shared expert's elementwise steps where torch computes its matmuls: every token is one of its rows, in order.

Expert 0 sorts first and sees each token once, so its rows are 0..T-1 of every buffer in expert order. Equations:
`moe_runtime.ops.moe_mlp`.
"""

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.activation import activate, below, shifted
from moe_runtime.kernels.grouped_gemm_backward import store_dz
from moe_runtime.kernels.operands import pairs

BLOCK_T = 16


@triton.jit(do_not_specialize=["T"])
def _shared_activation_fwd_kernel(
    z_ptr,  # [T, 2I or I]
    h_ptr,  # [T, I]
    T, I,
    GATED: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = (t < T)[:, None] & (i < I)[None, :]
    width = I * 2 if GATED else I
    if INTERLEAVED:
        c = tl.program_id(1) * (BLOCK_I * 2) + tl.arange(0, BLOCK_I * 2)
        z = z_ptr + (t[:, None] * width + c[None, :])
        both = tl.load(z, mask=(t < T)[:, None] & (c < width)[None, :], other=0.0).to(tl.float32)
        gate, up = pairs(both, BLOCK_T, BLOCK_I)
    else:
        z = z_ptr + (t[:, None] * width + i[None, :])
        gate = tl.load(z, mask=mask, other=0.0).to(tl.float32)
    h = activate(below(gate, LIMIT), ACT)
    if GATED:
        if not INTERLEAVED:
            up = tl.load(z + I, mask=mask, other=0.0).to(tl.float32)
        h = h * shifted(up, LIMIT, UP_OFFSET)
    tl.store(h_ptr + (t[:, None] * I + i[None, :]), h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _shared_dz_kernel(
    dh_ptr,  # [T, I]
    weight_ptr,  # [T, SLOTS] float32, the shared expert's last
    z_ptr,  # [T, 2I or I]
    dz_ptr,  # [T, 2I or I]
    wh_ptr,  # [T, I]: weight * h
    partial_ptr,  # [T, cdiv(I, BLOCK_I)] float32
    T, I,
    SLOTS: tl.constexpr, GATED: tl.constexpr, WH: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_T
    i0 = tl.program_id(1) * BLOCK_I
    t = tl.arange(0, BLOCK_T)
    i = i0 + tl.arange(0, BLOCK_I)
    live = row + t < T
    at = (row + t).to(tl.int64)
    dh = tl.load(dh_ptr + (at[:, None] * I + i[None, :]), mask=live[:, None] & (i < I)[None, :], other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at * SLOTS + (SLOTS - 1), mask=live, other=0.0)
    dot = store_dz(dh, weight, row, i0, I, T - row, z_ptr, dz_ptr, wh_ptr, GATED, WH, ACT, LIMIT, UP_OFFSET,
                   INTERLEAVED, BLOCK_T, BLOCK_I)  # fmt: skip
    tl.store(partial_ptr + at * tl.cdiv(I, BLOCK_I) + tl.program_id(1), dot, mask=live)


def shared_activation_forward(
    z: torch.Tensor, h: torch.Tensor, act: str, gated: bool,
    *, limit: float | None = None, up_offset: float = 0.0, interleaved: bool = False,
) -> None:  # fmt: skip
    """Fill h [T, I] with act(gate) * up of z [T, 2I], or act(z) of z [T, I]."""
    T, I = h.shape
    BLOCK_I = min(256, max(16, triton.next_power_of_2(I)))
    with torch.cuda.device_of(z):
        _shared_activation_fwd_kernel[(triton.cdiv(T, BLOCK_T), triton.cdiv(I, BLOCK_I))](
            z, h, T, I, GATED=gated, ACT=act, LIMIT=limit or 0.0, UP_OFFSET=up_offset, INTERLEAVED=interleaved,
            BLOCK_T=BLOCK_T, BLOCK_I=BLOCK_I, enable_fp_fusion=True,
        )  # fmt: skip


def shared_dz_backward(
    dh, topk_weight, z, dz, wh, partial, act: str, gated: bool, BLOCK_I: int,
    *, limit: float | None = None, up_offset: float = 0.0, interleaved: bool = False,
) -> None:  # fmt: skip
    """Fill dz, weight * h (unless `wh` is None) and `partial` [T, cdiv(I, BLOCK_I)] as `dz_backward` does, from dh [T, I]."""
    T, I = dh.shape
    with torch.cuda.device_of(dh):
        _shared_dz_kernel[(triton.cdiv(T, BLOCK_T), triton.cdiv(I, BLOCK_I))](
            dh, topk_weight, z, dz, wh, partial, T, I, SLOTS=topk_weight.shape[1], GATED=gated, WH=wh is not None, ACT=act,
            LIMIT=limit or 0.0, UP_OFFSET=up_offset, INTERLEAVED=interleaved, BLOCK_T=BLOCK_T, BLOCK_I=BLOCK_I,
            enable_fp_fusion=True,
        )  # fmt: skip
