"""Operands of the grouped matrix products: an expert's weight, and the pieces of a tile.

A weight is read through pointers with any strides or through a tensor descriptor (TMA). Trained
experts' weights may be stored separately from the stack.

Kernel arguments are grouped in NamedTuples of tensors and sizes or, with uppercase names, of
constants. A descriptor cannot be in a group, because Triton's launcher (3.6 to 3.9) looks for
descriptors only among the arguments themselves, nor can a size that must not be specialized.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_runtime.kernels.packed import PackedWeight, packed_block
from moe_runtime.kernels.tiles import Tile, cells, outer, precision, processors


class LowRank(NamedTuple):
    """The low-rank term of a product: low[r] b[e] for each row r of expert e."""

    low: torch.Tensor  # [R, rank], contiguous
    b: torch.Tensor  # [E, rank, N], any strides


class Trained(NamedTuple):
    """Weights of experts that are stored separately from the stack."""

    index: torch.Tensor  # [E] int32: index into `weight`, -1 for an expert of the stack
    weight: torch.Tensor  # [n, ., .], inner strides like the stack's


class Weight(NamedTuple):
    """What a kernel needs to read a weight, besides the stack's pointer or descriptor."""

    trained: torch.Tensor | None  # [n, ., .]: see `Trained`
    trained_index: torch.Tensor | None  # [E] int32
    scale: torch.Tensor | None  # [E, P, groups] float32, of a packed stack
    bias: torch.Tensor | None  # [E, N]
    stride_e: int
    stride_other: int  # between experts of `trained` or of `scale`
    stride_n: int
    stride_k: int


class Term(NamedTuple):
    """A `LowRank` as a kernel argument."""

    low: torch.Tensor  # [R, RANK]
    b: torch.Tensor  # [E, RANK, N]
    stride_e: int
    stride_r: int
    stride_n: int


class Gathered(NamedTuple):
    """Rows in token order that a kernel reads in expert order."""

    data: torch.Tensor  # [T, .]
    row_slot: torch.Tensor  # [R] int32
    stride: int  # between tokens


class Product(NamedTuple):
    """Constants: how a product reads its operands."""

    K_LAST: bool  # the sum runs over the last dimension of the stored weight
    EVEN_K: bool  # BLOCK_K divides the length of the sum
    FORMAT: int | None  # of a packed stack, as `ops.packed` numbers them
    RANK: int  # of the low-rank term; 0 without one
    BLOCK_R: int
    PRECISION: str  # of float32 operands


@triton.jit
def check_tile(TILE: tl.constexpr):
    """Reject at compile time tiles that tensor cores or descriptors do not support."""
    tl.static_assert(TILE.BLOCK_M >= 16 and TILE.BLOCK_N >= 16, "a tile must be at least 16x16")
    tl.static_assert(TILE.BLOCK_K >= 16, "tl.dot requires BLOCK_K >= 16")
    tl.static_assert(TILE.TMA or not TILE.JOINED, "JOINED requires TMA")


@triton.jit
def expert_weight(w, weight, e, TMA: tl.constexpr):
    """The start of expert e's weight: a pointer (with its scales' if packed) or the descriptor."""
    if TMA:
        return w
    elif weight.scale is not None:
        scale = weight.scale + e.to(tl.int64) * weight.stride_other
        return w + e.to(tl.int64) * weight.stride_e, scale
    elif weight.trained is not None:
        index = tl.load(weight.trained_index + e).to(tl.int64)
        trained = weight.trained + index * weight.stride_other
        return tl.where(index < 0, w + e.to(tl.int64) * weight.stride_e, trained)
    else:
        return w + e.to(tl.int64) * weight.stride_e


@triton.jit
def weight_block(
    base,  # what `expert_weight` returned
    weight,
    e,
    n0,
    k0,
    N,
    K,
    PRODUCT: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_K, BLOCK_N] of expert e's weight from row k0 and column n0 on; zero outside."""
    if TMA:
        if PRODUCT.K_LAST:
            return tl.trans(tl.reshape(base.load([e, n0, k0]), (BLOCK_N, BLOCK_K)))
        else:
            return tl.reshape(base.load([e, k0, n0]), (BLOCK_K, BLOCK_N))
    elif PRODUCT.FORMAT is not None:
        data, scale = base
        FORMAT: tl.constexpr = PRODUCT.FORMAT
        if PRODUCT.K_LAST:
            stride = weight.stride_n
            block = packed_block(
                data,
                scale,
                n0,
                k0,
                N,
                K,
                stride,
                FORMAT,
                BLOCK_N,
                BLOCK_K,
            )
            return tl.trans(block)
        else:
            stride = weight.stride_k
            return packed_block(
                data,
                scale,
                k0,
                n0,
                K,
                N,
                stride,
                FORMAT,
                BLOCK_K,
                BLOCK_N,
            )
    else:
        n = (n0 + tl.arange(0, BLOCK_N)).to(tl.int64)
        k = (k0 + tl.arange(0, BLOCK_K)).to(tl.int64)
        mask = (n < N)[None, :]
        if not PRODUCT.EVEN_K:
            mask = mask & (k < K)[:, None]
        block = base + (k[:, None] * weight.stride_k + n[None, :] * weight.stride_n)
        return tl.load(block, mask=mask, other=0.0)


@triton.jit
def joined_block(
    w,
    e,
    n0,
    k0,
    K_LAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_K, 2 BLOCK_N]: BLOCK_N columns of gate and as many of up.

    One descriptor of [E, 2, I, H] or [E, H, 2, I] loads both.
    """
    if K_LAST:
        return tl.trans(tl.reshape(w.load([e, 0, n0, k0]), (BLOCK_N * 2, BLOCK_K)))
    else:
        return tl.reshape(w.load([e, k0, 0, n0]), (BLOCK_K, BLOCK_N * 2))


@triton.jit
def rows_block(pointers, live, k, K, EVEN_K: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of rows, columns k; zero for rows that are not live and beyond K."""
    mask = live[:, None]
    if not EVEN_K:
        mask = mask & (k < K)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def halves(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def piece(
    tile, INDEX: tl.constexpr, PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Columns [INDEX, INDEX + 1) * BLOCK_N / PIECES of a tile; PIECES is a power of two.

    An epilogue in pieces does not spill. No data moves between threads.
    """
    if PIECES == 1:
        return tile
    else:
        HALF: tl.constexpr = PIECES // 2
        left, right = halves(tile, BLOCK_M, BLOCK_N)
        if INDEX < HALF:
            return piece(left, INDEX, HALF, BLOCK_M, BLOCK_N // 2)
        else:
            return piece(right, INDEX - HALF, HALF, BLOCK_M, BLOCK_N // 2)


@triton.jit
def pairs(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The even and the odd columns of a tile [BLOCK_M, 2 BLOCK_N]: interleaved gate and up."""
    return tl.split(tl.reshape(tile, (BLOCK_M, BLOCK_N, 2)))


@triton.jit
def low_rank(
    lora,
    rows,
    n0,
    N,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """low b of a tile's rows and of columns from n0 on, [BLOCK_M, BLOCK_N] float32."""
    RANK: tl.constexpr = PRODUCT.RANK
    BLOCK_R: tl.constexpr = PRODUCT.BLOCK_R
    m = tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    low = lora.low + rows.first.to(tl.int64) * RANK
    b = lora.b + rows.expert.to(tl.int64) * lora.stride_e
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for r0 in tl.static_range(0, RANK, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        left = tl.load(low + cells(m, RANK, r), mask=outer(m < rows.left, r < RANK), other=0.0)
        offset = r.to(tl.int64)[:, None] * lora.stride_r + n.to(tl.int64)[None, :] * lora.stride_n
        right = tl.load(b + offset, mask=outer(r < RANK, n < N), other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRODUCT.PRECISION)
    return acc


@triton.jit
def add_terms(
    tile,
    weight,
    lora,
    rows,
    n0,
    END,  # end of the columns that belong to this part of the row
    N,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`tile` [BLOCK_M, BLOCK_N] plus bias and low-rank term of its columns, which start at n0."""
    if weight.bias is not None:
        n = n0 + tl.arange(0, BLOCK_N)
        bias = weight.bias + rows.expert.to(tl.int64) * N
        tile += tl.load(bias + n, mask=n < END, other=0.0).to(tl.float32)[None, :]
    if lora is not None:
        tile += low_rank(
            lora,
            rows,
            n0,
            END,
            PRODUCT,
            BLOCK_M,
            BLOCK_N,
        )
    return tile


def term_of(lora: LowRank | None) -> Term | None:
    """Return a low-rank term as a kernel argument."""
    return None if lora is None else Term(lora.low, lora.b, *lora.b.stride())


def product_of(
    x: torch.Tensor,
    weight,
    k_last: bool,
    K: int,
    tile: Tile,
    lora: LowRank | None = None,
) -> Product:
    """Return the constants of a product of x's rows with `weight`, a sum of K terms."""
    form = weight.format if isinstance(weight, PackedWeight) else None
    rank = 0 if lora is None else lora.low.shape[1]
    block_r = min(64, max(16, triton.next_power_of_2(rank)))
    return Product(
        k_last,
        K % tile.BLOCK_K == 0,
        form,
        rank,
        block_r,
        precision(x),
    )


def options_of(product: Product, tile: Tile) -> dict:
    """Return the launch's constants PRODUCT and TILE, and its options."""
    return {
        "PRODUCT": product,
        "TILE": tile,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }


def describable(*tensors: torch.Tensor) -> bool:
    """Whether tensor descriptors support these tensors.

    Pointers and strides must be multiples of 16 bytes, the last stride 1, no dimension expanded.
    """
    for t in tensors:
        if not isinstance(t, torch.Tensor) or t.numel() == 0 or t.stride(-1) != 1:
            return False
        if t.data_ptr() % 16 or any(s <= 0 or s * t.element_size() % 16 for s in t.stride()[:-1]):
            return False
    return True


def last_contiguous(weight: torch.Tensor, k_last: bool) -> tuple[torch.Tensor, bool]:
    """Return the same product with the last dimension of `weight` [E, a, b] contiguous if possible.

    Descriptors require it.
    """
    if isinstance(weight, PackedWeight):
        return weight, k_last != weight.transposed
    if weight.stride(1) == 1 and weight.stride(2) != 1:
        return weight.transpose(1, 2), not k_last
    return weight, k_last


def descriptor(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Return the tensor's descriptor, for loads and stores of blocks of this shape."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def weight_operand(
    weight, trained: Trained | None, bias: torch.Tensor | None, k_last: bool, tile: Tile
) -> tuple[torch.Tensor | TensorDescriptor, Weight]:
    """Return `weight` [E, ., .] as a kernel argument: a pointer or, if `tile.TMA`, a descriptor.

    `k_last`: the sum runs over the last dimension. BLOCK_N is that of the weight's block.
    """
    stack = weight.data if isinstance(weight, PackedWeight) else weight
    stride_e, *strides = stack.stride()
    stride_n, stride_k = strides if k_last else strides[::-1]
    group = Weight(
        None,
        None,
        None,
        bias,
        stride_e,
        0,
        stride_n,
        stride_k,
    )
    if isinstance(weight, PackedWeight):
        group = group._replace(scale=weight.scale, stride_other=weight.scale.stride(0))
    elif trained is not None:
        stride = trained.weight.stride(0)
        group = group._replace(
            trained=trained.weight, trained_index=trained.index, stride_other=stride
        )
    if tile.TMA:
        block = [tile.BLOCK_N, tile.BLOCK_K] if k_last else [tile.BLOCK_K, tile.BLOCK_N]
        stack = descriptor(stack, [1, *block])
    return stack, group


def grid(tile: Tile, num_m: int, N: int, device: torch.device) -> tuple[int]:
    """Return the launch grid: all tiles or, if PERSISTENT, at most one program per processor."""
    programs = num_m * triton.cdiv(N, tile.BLOCK_N)
    return (min(programs, processors(device)) if tile.PERSISTENT else programs,)
