"""Gram matrix of n experts, and the sum of two parents' differences with random dropout.

The equations are in `moe_runtime.ops.expansion`. The random numbers depend only on key and element
(Philox 4x64-10), so the dropped elements do not depend on tile, device or order.
"""

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.compiling import named
from moe_runtime.kernels.tiles import outer

# columns whose products are summed in float32; the sums of chunks are added in float64
CHUNK = 1 << 13


@triton.jit(repr=named("gram"))
def _gram_kernel(
    weight_ptr,  # [n, P], any float
    base_ptr,  # [P], dtype of weight, or None
    partial_ptr,  # [chunks, n, n] float32
    P,
    stride_e,
    n,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
):
    tl.static_assert(BLOCK_N >= 16 and CHUNK % BLOCK_P == 0, "blocks >= 16 that divide CHUNK")
    chunk = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_N)
    at = weight_ptr + e.to(tl.int64)[:, None] * stride_e
    acc = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    for p0 in range(0, CHUNK, BLOCK_P):
        p = chunk * CHUNK + p0 + tl.arange(0, BLOCK_P)
        mask = outer(e < n, p < P)
        w = tl.load(at + p[None, :], mask=mask, other=0.0)
        if base_ptr is not None:
            base = tl.load(base_ptr + p, mask=p < P, other=0.0).to(tl.float32)
            # also in rows beyond the last, which are not stored
            w = w.to(tl.float32) - base[None, :]
        # products of 16-bit numbers are exact in float32; those of float32 must not be rounded to
        # tf32
        acc = tl.dot(w, tl.trans(w), acc, input_precision="ieee")
    other = tl.arange(0, BLOCK_N)
    partial_ptr += chunk * n * n + e.to(tl.int64)[:, None] * n + other[None, :]
    tl.store(partial_ptr, acc, mask=outer(e < n, other < n))


@triton.jit
def _is_kept(draw, threshold):
    """Whether a 32-bit draw keeps an element."""
    return draw.to(tl.int64) >= threshold


@triton.jit(do_not_specialize=["seed", "stream", "threshold", "skipped"], repr=named("dare_merge"))
def _dare_merge_kernel(
    first_ptr,  # [P], any float
    second_ptr,  # [P], dtype of first
    base_ptr,  # [P], dtype of first, or None
    out_ptr,  # [P], dtype of first
    P,
    seed,  # 63 bits, as is stream
    stream,
    threshold,  # of 2^32: lower draws drop an element
    first_scale,  # float32
    second_scale,
    skipped,  # counters of the elements before the first
    BLOCK_C: tl.constexpr,  # counters: four elements each
):
    block = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C) + skipped
    zero = (block * 0).to(tl.uint64)
    key = zero + seed.to(tl.uint64)
    stream_key = zero + stream.to(tl.uint64)
    counter = (block + 1).to(tl.uint64)
    a, b, c, d = tl.philox_impl(
        counter,
        zero,
        zero,
        zero,
        key,
        stream_key,
        10,
    )
    # numbers 4 block to 4 block + 3, in order
    draw = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK_C * 4,))
    p = tl.program_id(0).to(tl.int64) * (BLOCK_C * 4) + tl.arange(0, BLOCK_C * 4)
    mask = p < P
    first = tl.load(first_ptr + p, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_ptr + p, mask=mask, other=0.0).to(tl.float32)
    if base_ptr is not None:
        base = tl.load(base_ptr + p, mask=mask, other=0.0).to(tl.float32)
        first -= base
        second -= base
    first = tl.where(_is_kept(draw & 0xFFFFFFFF, threshold), first * first_scale, 0.0)
    second = tl.where(_is_kept(draw >> 32, threshold), second * second_scale, 0.0)
    out = first + second
    if base_ptr is not None:
        out = base + out
    tl.store(out_ptr + p, out.to(out_ptr.dtype.element_ty), mask=mask)


def gram_forward(weight: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    """<weight[i] - base, weight[j] - base> of all pairs, [n, n] float64.

    `weight` [n, P], rows contiguous, `base` [P] or None.

    Grid: chunks of CHUNK columns; a program computes all n n sums of its chunk. n P elements are
    read (and P of the base), n n for each chunk written.
    """
    n, P = weight.shape
    chunks = triton.cdiv(P, CHUNK)
    partial = torch.empty(chunks, n, n, dtype=torch.float32, device=weight.device)
    if P:
        with torch.cuda.device_of(weight):  # Triton launches on the current device
            _gram_kernel[(chunks,)](
                weight,
                base,
                partial,
                P,
                weight.stride(0),
                n,
                CHUNK=CHUNK,
                **gram_config(n, weight, base),
                enable_fp_fusion=True,
            )
    return partial.sum(0, dtype=torch.float64)


def gram_config(n: int, weight: torch.Tensor, base: torch.Tensor | None) -> dict[str, int]:
    """Return blocks, warps and stages: as many columns at a time as fit with n rows."""
    block_n = max(16, triton.next_power_of_2(n))
    narrow = weight.dtype.itemsize == 2 and base is None
    columns = (1 << 13 if narrow else 1 << 12) // block_n
    return {
        "BLOCK_N": block_n,
        "BLOCK_P": max(32, min(columns, 256)),
        "num_warps": 4,
        "num_stages": 3 if narrow else 2,
    }


def dare_merge_forward(
    first,
    second,
    base,
    seed: int,
    stream: int,
    threshold: int,
    first_scale: float,
    second_scale: float,
    start: int = 0,
):
    """base + drop(first - base) first_scale + drop(second - base) second_scale, in first's dtype.

    All tensors are contiguous. `start`, a multiple of 4, is the index of the first element in the
    random stream.

    Grid: blocks of 4 BLOCK_C elements. 3 P elements are read (2 P without a base), P written.
    """
    out = torch.empty_like(first)
    P = first.numel()
    BLOCK_C = 256
    if P:
        with torch.cuda.device_of(first):
            # no fused multiply-add, as the bits must equal those of the torch backend
            _dare_merge_kernel[(triton.cdiv(P, 4 * BLOCK_C),)](
                first,
                second,
                base,
                out,
                P,
                seed,
                stream,
                threshold,
                first_scale,
                second_scale,
                start // 4,
                BLOCK_C=BLOCK_C,
                num_warps=4,
                enable_fp_fusion=False,
            )
    return out
