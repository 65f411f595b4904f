"""Weighted sum of experts and its gradient in the weights, each expert read once. The equations: `moe_runtime.ops.merging`.

Bytes moved, the floor: forward (E + 1) P, backward (E + 1) P elements. Sums are float32, in a fixed order, without atomics.
"""

import torch
import triton
import triton.language as tl

BLOCK_P = 2048


@triton.jit
def _merge_experts_fwd_kernel(
    weight_ptr,  # [E, P], any float
    alpha_ptr,  # [E] float32
    out_ptr,  # [P], dtype of weight
    P,
    stride_e,
    E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    mask = p < P
    acc = tl.zeros([BLOCK_P], tl.float32)
    # step the pointer: e * stride_e would overflow int32 from 2^31 elements on
    for e in range(E):
        w = tl.load(weight_ptr + p, mask=mask, other=0.0).to(tl.float32)
        acc += tl.load(alpha_ptr + e) * w
        weight_ptr += stride_e
    tl.store(out_ptr + p, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merge_experts_bwd_alpha_kernel(
    dout_ptr,  # [P], any float
    weight_ptr,  # [E, P], any float
    partial_ptr,  # [E, blocks] float32
    P,
    stride_e,
    blocks,
    E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    mask = p < P
    dout = tl.load(dout_ptr + p, mask=mask, other=0.0).to(tl.float32)
    for _ in range(E):
        w = tl.load(weight_ptr + p, mask=mask, other=0.0).to(tl.float32)
        tl.store(partial_ptr + block, tl.sum(dout * w, 0))
        weight_ptr += stride_e
        partial_ptr += blocks


def merge_experts_forward(weight: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """sum_e alpha[e] weight[e]: `weight` [E, ...], `alpha` [E] float32 -> [...] in weight's dtype."""
    weight, stride_e, P = _rows(weight)
    out = torch.empty(weight.shape[1:], dtype=weight.dtype, device=weight.device)
    if P:
        with torch.cuda.device_of(weight):  # Triton launches on the current device
            _merge_experts_fwd_kernel[(triton.cdiv(P, BLOCK_P),)](
                weight, alpha.contiguous(), out, P, stride_e, E=weight.shape[0], BLOCK_P=BLOCK_P
            )
    return out


def merge_experts_backward_alpha(dout: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dalpha[e] = <dout, weight[e]>: `dout` [...], `weight` [E, ...] -> [E] float32."""
    weight, stride_e, P = _rows(weight)
    blocks = triton.cdiv(P, BLOCK_P)
    partial = torch.empty(weight.shape[0], blocks, dtype=torch.float32, device=weight.device)
    if P:
        with torch.cuda.device_of(weight):
            _merge_experts_bwd_alpha_kernel[(blocks,)](
                dout.contiguous(), weight, partial, P, stride_e, blocks, E=weight.shape[0], BLOCK_P=BLOCK_P
            )
    return partial.sum(1)


def _rows(weight: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Each expert contiguous; the experts themselves may lie anywhere, even on top of each other (stride 0)."""
    if weight.shape[0] and not weight[0].is_contiguous():
        weight = weight.contiguous()
    return weight, weight.stride(0), weight[0].numel()
