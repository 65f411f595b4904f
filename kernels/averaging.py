"""Experts drawn to their mean, in place: the stack is read once and written once. The equation: `moe_runtime.modules.ewa`.

Bytes moved, the floor: 2 E P elements. Sums are float32, in a fixed order, without atomics.
"""

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.merging import MAX_EXPERTS, TILE_BYTES, merge_config

HELD = 256  # experts that a program holds in registers


@triton.jit
def _drawn(w, mean, pull, NEAR: tl.constexpr):
    return w + pull * (mean - w) if NEAR else mean + (1 - pull) * (w - mean)


@triton.jit
def _average_experts_kernel(
    weight_ptr,  # [E, P], any float; read and written
    P,
    stride_e,
    pull,  # float32
    E: tl.constexpr,
    NEAR: tl.constexpr,  # pull < 0.5: which of two forms is exact where it matters
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    first = tl.load(weight_ptr + p, mask=p < P, other=0.0).to(tl.float32)
    e = tl.arange(0, BLOCK_E)
    if E <= BLOCK_E:
        at = weight_ptr + (e.to(tl.int64)[:, None] * stride_e + p[None, :])
        mask = (e < E)[:, None] & (p < P)[None, :]
        w = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        total = tl.sum(tl.where((e < E)[:, None], w - first[None, :], 0.0), 0)
        w = _drawn(w, (first + total / E)[None, :], pull, NEAR)
        tl.store(at, w.to(weight_ptr.dtype.element_ty), mask=mask)
    else:
        total = tl.zeros([BLOCK_P], tl.float32)
        for e0 in range(0, E, BLOCK_E):
            at = weight_ptr + ((e0 + e).to(tl.int64)[:, None] * stride_e + p[None, :])
            mask = (e0 + e < E)[:, None] & (p < P)[None, :]
            w = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(tl.where((e0 + e < E)[:, None], w - first[None, :], 0.0), 0)
        mean = (first + total / E)[None, :]
        for e0 in range(0, E, BLOCK_E):  # the tile once more
            at = weight_ptr + ((e0 + e).to(tl.int64)[:, None] * stride_e + p[None, :])
            mask = (e0 + e < E)[:, None] & (p < P)[None, :]
            w = _drawn(tl.load(at, mask=mask, other=0.0).to(tl.float32), mean, pull, NEAR)
            tl.store(at, w.to(weight_ptr.dtype.element_ty), mask=mask)


def average_config(E: int, P: int, element_size: int) -> dict[str, int]:
    """Return blocks and warps: all experts of a block of columns at once, up to HELD; more are read twice, from DRAM."""
    block = triton.next_power_of_2(E)
    if block <= MAX_EXPERTS or block > HELD:
        return merge_config(E, P, element_size)
    tile = TILE_BYTES // element_size // (1 if P % 16 == 0 else 2)
    return {"BLOCK_E": block, "BLOCK_P": tile // block, "num_warps": 8}


def average_experts(weight: torch.Tensor, pull: float) -> None:
    """W_e += pull (mean - W_e) for every e: `weight` [E, ...] in place, each expert contiguous, none on top of another."""
    E, P = weight.shape[0], weight[0].numel()
    if P:
        config = average_config(E, P, weight.element_size())
        with torch.cuda.device_of(weight):  # Triton launches on the current device
            _average_experts_kernel[(triton.cdiv(P, config["BLOCK_P"]),)](
                weight, P, weight.stride(0), pull, E=E, NEAR=pull < 0.5, **config, enable_fp_fusion=True
            )
