"""Weighted sum of experts, and the gradient of its weights, also directly from a linear layer.

The equations are in `moe_runtime.ops.merging`. Each expert is read once. Sums are float32, in a
fixed order, without atomics.
"""

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.compiling import named
from moe_runtime.kernels.tiles import arch_of, cells, outer, precision, tile_of

MAX_EXPERTS = 8  # experts whose loads are in flight together
TILE_BYTES = 1 << 15  # of the experts, per program


@triton.jit(repr=named("merge_experts_fwd"))
def _merge_experts_fwd_kernel(
    weight_ptr,  # [E, P], any float
    alpha_ptr,  # [E] float32
    seen_ptr,  # [E] float32 or None
    out_ptr,  # [P], any float
    P,
    stride_e,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # `out` already holds the weight merged with `seen`: nothing to do if alpha is unchanged
    if seen_ptr is not None:
        changed = 0
        for e0 in range(0, E, BLOCK_E):
            e = e0 + tl.arange(0, BLOCK_E)
            alpha = tl.load(alpha_ptr + e, mask=e < E, other=0.0)
            changed += tl.sum(
                (alpha != tl.load(seen_ptr + e, mask=e < E, other=0.0)).to(tl.int32), 0
            )
        if changed == 0:
            return
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    acc = tl.zeros([BLOCK_P], tl.float32)
    for e0 in range(0, E, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        mask = outer(e < E, p < P)
        w = tl.load(weight_ptr + cells(e.to(tl.int64), stride_e, p), mask=mask, other=0.0).to(
            tl.float32
        )
        acc += tl.sum(tl.load(alpha_ptr + e, mask=e < E, other=0.0)[:, None] * w, 0)
    tl.store(out_ptr + p, acc.to(out_ptr.dtype.element_ty), mask=p < P)


@triton.jit(repr=named("merge_experts_bwd_alpha"))
def _merge_experts_bwd_alpha_kernel(
    dout_ptr,  # [P], any float
    weight_ptr,  # [E, P], any float
    partial_ptr,  # [E, blocks] float32
    P,
    stride_e,
    blocks,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    dout = tl.load(dout_ptr + p, mask=p < P, other=0.0).to(tl.float32)
    for e0 in range(0, E, BLOCK_E):
        e = (e0 + tl.arange(0, BLOCK_E)).to(tl.int64)
        mask = outer(e < E, p < P)
        w = tl.load(weight_ptr + cells(e, stride_e, p), mask=mask, other=0.0).to(tl.float32)
        tl.store(partial_ptr + (e * blocks + block), tl.sum(w * dout[None, :], 1), mask=e < E)


@triton.jit(do_not_specialize=["T"], repr=named("merged_linear_bwd_alpha"))
def _merged_linear_bwd_alpha_kernel(
    dout_ptr,  # [T, N], any float
    x_ptr,  # [T, K], dtype of dout
    weight_ptr,  # [E, N, K], any float
    partial_ptr,  # [E, tiles] float32
    T,
    N,
    K,
    stride_e,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tl.static_assert(BLOCK_N >= 16 and BLOCK_K >= 16 and BLOCK_T >= 16, "tl.dot needs sizes >= 16")
    tile = tl.program_id(0)
    tile_n, tile_k = tile_of(tile, tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K), 8)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    dw = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for t0 in range(0, T, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        row = t.to(tl.int64)
        # loaded transposed, as tl.trans after the load would prevent cp.async on Ampere
        mask = outer(n < N, t < T)
        dout = tl.load(dout_ptr + (row[None, :] * N + n[:, None]), mask=mask, other=0.0)
        mask = outer(t < T, k < K)
        x = tl.load(x_ptr + cells(row, K, k), mask=mask, other=0.0)
        dw = tl.dot(dout, x, dw, input_precision=PRECISION)
    offset = cells(n.to(tl.int64), K, k)
    mask = outer(n < N, k < K)
    # two stages: while one expert's tile is summed, the next is loaded into shared memory and needs
    # no registers
    for _ in tl.range(E, num_stages=2):
        w = tl.load(weight_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(partial_ptr + tile, tl.sum(dw * w))
        weight_ptr += stride_e
        partial_ptr += tl.num_programs(0)


def merge_experts_forward(
    weight: torch.Tensor,
    alpha: torch.Tensor,
    out: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum_e alpha[e] weight[e]: `weight` [E, ...], `alpha` [E] float32 -> `out` [...].

    `out` has weight's dtype unless given. With `seen` [E] float32 the kernel compares it with alpha
    on the device, and leaves `out` unchanged if they are equal.

    Grid: blocks of BLOCK_P elements; a program sums its block over all experts. E P elements are
    read, P written.
    """
    weight, stride_e, P = _rows(weight)
    out = (
        torch.empty(weight.shape[1:], dtype=weight.dtype, device=weight.device)
        if out is None
        else out
    )
    if P:
        config = merge_config(weight.shape[0], P, weight.element_size())
        with torch.cuda.device_of(weight):  # Triton launches on the current device
            _merge_experts_fwd_kernel[(triton.cdiv(P, config["BLOCK_P"]),)](
                weight,
                alpha.contiguous(),
                seen,
                out,
                P,
                stride_e,
                E=weight.shape[0],
                **config,
                enable_fp_fusion=True,
            )
    return out


def merge_experts_backward_alpha(dout: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dalpha[e] = <dout, weight[e]>: `dout` [...], `weight` [E, ...] -> [E] float32.

    Grid: blocks of BLOCK_P elements; a program multiplies its block of every expert. (E + 1) P
    elements are read.
    """
    weight, stride_e, P = _rows(weight)
    config = merge_config(weight.shape[0], P, weight.element_size())
    blocks = triton.cdiv(P, config["BLOCK_P"])
    partial = torch.empty(weight.shape[0], blocks, dtype=torch.float32, device=weight.device)
    if P:
        with torch.cuda.device_of(weight):
            _merge_experts_bwd_alpha_kernel[(blocks,)](
                dout.contiguous(),
                weight,
                partial,
                P,
                stride_e,
                blocks,
                E=weight.shape[0],
                **config,
                enable_fp_fusion=True,
            )
    return partial.sum(1)


def merged_linear_backward_alpha(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, config: dict | None = None
) -> torch.Tensor:
    """dalpha[e] = <dout^T x, weight[e]>: `dout` [T, N], `x` [T, K], `weight` [E, N, K] -> [E].

    The result is float32. `config` overrides `linear_config`.

    Grid: the tiles of [N, K]. A program sums a tile of dout^T x over T, which is never stored, and
    multiplies it by every expert's. At least T (N + K) + E N K elements are read. Loads from L2 or
    memory are T N cdiv(K, BLOCK_K) of dout and T K cdiv(N, BLOCK_N) of x.
    """
    weight, stride_e, _ = _rows(weight)
    T = dout.shape[0]
    E, N, K = weight.shape
    if not T * N * K:
        return torch.zeros(E, dtype=torch.float32, device=weight.device)
    if config is None:
        config = linear_config(
            arch_of(x.device),
            x.dtype,
            weight.dtype,
            precision(x),
            T,
            N,
            K,
        )
    tiles = triton.cdiv(N, config["BLOCK_N"]) * triton.cdiv(K, config["BLOCK_K"])
    partial = torch.empty(E, tiles, dtype=torch.float32, device=weight.device)
    with torch.cuda.device_of(weight):
        _merged_linear_bwd_alpha_kernel[(tiles,)](
            dout.contiguous(),
            x.contiguous(),
            weight,
            partial,
            T,
            N,
            K,
            stride_e,
            E=E,
            **config,
            enable_fp_fusion=True,
        )
    return partial.sum(1)


def merge_config(E: int, P: int, element_size: int) -> dict[str, int]:
    """Return the merging kernels' constants: a thread loads 16 bytes of each of BLOCK_E experts."""
    block = min(triton.next_power_of_2(E), MAX_EXPERTS)
    # unless 16 divides P, loads are element by element, and a long row of them spills
    return {
        "BLOCK_E": block,
        "BLOCK_P": min(TILE_BYTES // (block * element_size), 1024 if P % 16 else 4096),
        "num_warps": 8,
    }


def linear_config(
    arch: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    precision: str,
    T: int,
    N: int,
    K: int,
) -> dict:
    """Return the linear backward's constants and options on sm_`arch` (0: the interpreter)."""
    if arch == 0:
        config = (32, 32, 16, 4, 1)
    elif dtype == torch.float32 and precision == "tf32":
        config = (64, 128, 32, 8, 3)
    elif dtype == torch.float32 or N % 16 or K % 16:
        # unaligned loads are element by element, and the pointers of a wide tile spill
        config = (64, 64, 32, 8, 2)
    elif arch in (90, 100, 103) and weight_dtype.itemsize == 2:
        # wide, to read less from L2; needs 196 KiB of shared memory
        config = (128, 256, 64, 8, 4)
    else:
        config = (128, 128, 64, 8, 3)
    *blocks, warps, stages = config
    sizes = (max(16, triton.next_power_of_2(size)) for size in (N, K, T))
    block_n, block_k, block_t = map(min, blocks, sizes)
    return {
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "BLOCK_T": block_t,
        "PRECISION": precision,
        "num_warps": warps if block_n * block_k >= 4096 else 4,
        "num_stages": stages,
    }


def _rows(weight: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return `weight` with contiguous experts, their stride, which may be 0, and their length."""
    if weight.shape[0] and not weight[0].is_contiguous():
        weight = weight.contiguous()
    return weight, weight.stride(0), weight[0].numel()
