"""Create more experts from a few: find the two that differ most, and merge them into a child.

UpIT, Algorithm 2 (the paper omits its body; every assumption is an option of the caller):
    G_ij = <d_i, d_j>,  d_i = W_i - W_base over all tensors
    distance:  cosine 1 - G_ij / sqrt(G_ii G_jj),  l2 sqrt(G_ii + G_jj - 2 G_ij)
    child = W_base + a D(W_j - W_base) + b D(W_k - W_base),  (j, k) the farthest pair, a + b = 1
DARE (arXiv 2311.03099, Eq. 1):
    D(d) = (1 - m) d / (1 - p),  m ~ Bernoulli(p) for each element;  D(d) = 0 for p = 1
    D(d) = (1 - m) d             without rescaling

Element i of a tensor has one 64-bit number of Philox 4x64-10 (Salmon et al., 2011): output i % 4 at
the counter (i // 4 + 1, 0, 0, 0) with the key (seed, stream), one stream per tensor. The low 32
bits are for j, the high ones for k: dropped if below p 2^32. A child is therefore bit-identical for
any order of tensors, block size and device.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_runtime import backends
from moe_runtime.config import check_choice, check_fraction, check_seed
from moe_runtime.ops.expert_rows import matches
from moe_runtime.ops.library import define, kind, register, wide_dtype

METRICS = ("cosine", "l2")
FEW = 64  # experts whose products are computed together
BLOCK = 1 << 17  # elements of all experts that are processed together on the CPU
WHOLE = 1 << 24  # the same on a GPU, where separate experts are stacked first


@torch.no_grad()
def gram(
    experts: Tensor | Sequence[Tensor], base: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Return G [n, n] float64 of `experts` [n, ...], or n tensors [...], minus `base` [...].

    Each is read once. Products and short sums are in float32, long sums in float64 (everything for
    float64). Add the results of a model's tensors to compare whole experts. Not differentiable.
    Raises ValueError for more than FEW experts and for different shapes, dtypes or devices.
    """
    n = len(experts)
    if not 0 < n <= FEW:
        raise ValueError(f"Expected 1 to {FEW} experts, but got {n}")
    first = experts[0]
    for tensor in [first] if isinstance(experts, Tensor) else experts:
        _check_like("experts", tensor, first, "as the first expert")
    if base is not None:
        _check_like("base", base, first, "as the first expert")
        base = base.reshape(-1)
    chosen = backends.pick("gram", first, backend)
    if isinstance(experts, Tensor):
        return torch.ops.moe_runtime.gram(experts.reshape(n, first.numel()), base, chosen)
    rows = [tensor.reshape(-1) for tensor in experts]
    total = torch.zeros(n, n, dtype=torch.float64, device=first.device)
    for part in _parts(first, n):
        stack = torch.stack([row[part] for row in rows])
        base_part = None if base is None else base[part]
        total += torch.ops.moe_runtime.gram(stack, base_part, chosen)
    return total


def _parts(tensor: Tensor, count: int) -> Iterator[slice]:
    """Return slices of a tensor's elements, of which `count` tensors are stacked at a time."""
    step = WHOLE
    if tensor.device.type == "cpu":
        step = max(BLOCK // count, 1024)
    return (slice(start, start + step) for start in range(0, tensor.numel(), step))


def _check_like(name: str, tensor: Tensor, first: Tensor, how: str) -> None:
    """Raise ValueError unless `tensor` has the shape, floating dtype and device of `first`."""
    if not matches(tensor, first.shape, first) or not first.is_floating_point():
        raise ValueError(
            f"Expected {kind(first)}, {how}, of a floating dtype, but {name} is {kind(tensor)}"
        )


@torch.no_grad()
def gram_row(experts: Sequence[Tensor], child: Tensor, base: Tensor | None = None) -> Tensor:
    """Return the last row [n + 1] float64 of G of the n `experts` and of `child`, all [...].

    It has the precision of `gram`. Each is read once. Runs in torch on any device. Not
    differentiable.
    """
    rows = [tensor.reshape(-1) for tensor in (*experts, child)]
    wide = wide_dtype(child.dtype)
    total = torch.zeros(len(rows), dtype=torch.float64, device=child.device)
    for part in _parts(child, len(rows)):
        stack = torch.stack([row[part] for row in rows]).to(wide)
        if base is not None:
            stack -= base.reshape(-1)[part].to(wide)
        total += (stack @ stack[-1]).double()
    return total


def distances(gram: Tensor, metric: str = "cosine") -> Tensor:
    """Return the distances [n, n] float64 of all pairs, 0 on the diagonal.

    A zero vector has cosine distance 1 to others.
    """
    check_choice("metric", metric, METRICS)
    gram = gram.double()
    square = gram.diagonal().clamp_min(0)
    if metric == "l2":
        distance = (square[:, None] + square[None, :] - 2 * gram).clamp_min(0).sqrt()
    else:
        norm = square.sqrt()
        norm = norm[:, None] * norm[None, :]
        distance = 1 - torch.where(norm > 0, gram / norm, 0).clamp(-1, 1)
    return distance.fill_diagonal_(0)


def farthest_pair(distance: Tensor) -> tuple[int, int]:
    """Return the pair i < j with the largest `distance` [n, n], the first of equals.

    Raises ValueError for NaN.
    """
    values = distance.detach().double().cpu().numpy()
    i, j = np.triu_indices(len(values), 1)
    if len(values) < 2 or np.isnan(values[i, j]).any():
        raise ValueError(
            f"distance must be [n, n] with n >= 2 and without NaN, but got {values.shape} or NaN"
        )
    best = int(values[i, j].argmax())
    return int(i[best]), int(j[best])


def check_drop(drop: float) -> None:
    """Raise ValueError unless `drop` is a number from 0 to 1."""
    check_fraction("drop", drop, "the probability that a difference is dropped")


@torch.no_grad()
def dare_merge(
    first: Tensor,
    second: Tensor,
    base: Tensor | None = None,
    *,
    weights: tuple[float, float],
    drop: float = 0.5,
    rescale: bool = True,
    seed: int,
    tensor: str | int,
    start: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Return the child [...] of `first` and `second` [...], which were trained from `base`.

    Without `base` they start from zero, as LoRA matrices do. `weights` are a and b, `drop` is p.
    `tensor` selects the stream of random numbers for `seed`: a tensor's name or any number. A part
    of a tensor that begins at its element `start`, a multiple of 4, gets that part of the child.
    Computed in float32 (float64 for float64) and rounded once. Not differentiable. Raises
    ValueError for different shapes, dtypes or devices, and for numbers out of range.
    """
    _check_like("second", second, first, "as first")
    if base is not None:
        _check_like("base", base, first, "as first")
    check_drop(drop)
    if len(weights) != 2 or not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights must be two finite numbers, but got {weights!r}")
    stream = stream_of(tensor)
    check_seed("seed", seed)
    check_seed("tensor", stream)
    if start < 0 or start % 4:
        raise ValueError(
            f"start (the first element of this part) must be a multiple of 4, but got {start}"
        )
    threshold = round(drop * (1 << 32))
    scale = 1.0
    if rescale and drop < 1:
        scale = 1 / (1 - drop)
    first_scale = weights[0] * scale
    second_scale = weights[1] * scale
    backend = backends.pick("dare_merge", first, backend)
    return torch.ops.moe_runtime.dare_merge(
        first,
        second,
        base,
        seed,
        stream,
        threshold,
        first_scale,
        second_scale,
        backend,
        start,
    )


def stream_of(tensor: str | int) -> int:
    """Return the number of a tensor's stream: itself, or 63 bits of its name's BLAKE2b hash."""
    if not isinstance(tensor, str):
        return tensor
    return int.from_bytes(hashlib.blake2b(tensor.encode(), digest_size=8).digest(), "little") >> 1


def draws(seed: int, stream: int, start: int, count: int) -> np.ndarray:
    """Return the random numbers [count, 2] uint32 of elements from `start` on, for both parents.

    `start` is a multiple of 4.
    """
    bits = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=[start // 4, 0, 0, 0])
    raw = bits.random_raw(-(-count // 4) * 4)[:count]
    return raw.astype("<u8", copy=False).view("<u4").reshape(count, 2)


define("gram(Tensor experts, Tensor? base, str backend) -> Tensor")
define(
    "dare_merge(Tensor first, Tensor second, Tensor? base, int seed, int stream, int threshold, "
    "float first_scale, float second_scale, str backend, int start=0) -> Tensor"
)


def _gram(experts: Tensor, base: Tensor | None, backend: str) -> Tensor:
    rows = experts if experts.stride(1) == 1 else experts.contiguous()
    if base is not None:
        base = base.contiguous()
    if backend == "triton":
        from moe_runtime.kernels.expansion import gram_forward

        products = gram_forward(rows, base)
    else:
        products = _gram_by_blocks(rows, base)
    return (products + products.t()) / 2


def _gram_by_blocks(rows: Tensor, base: Tensor | None) -> Tensor:
    n, P = rows.shape
    wide = wide_dtype(rows.dtype)
    total = torch.zeros(n, n, dtype=torch.float64, device=rows.device)
    step = max(BLOCK // n, 1024)
    for start in range(0, P, step):
        part = rows[:, start : start + step].to(wide)
        if base is not None:
            part = part - base[start : start + step].to(wide)
        total += (part @ part.t()).double()
    return total


def _gram_fake(experts: Tensor, *_: Any) -> Tensor:
    return experts.new_empty(len(experts), len(experts), dtype=torch.float64)


def _dare_merge(
    first: Tensor,
    second: Tensor,
    base: Tensor | None,
    seed: int,
    stream: int,
    threshold: int,
    first_scale: float,
    second_scale: float,
    backend: str,
    start: int = 0,
) -> Tensor:
    first = first.contiguous()
    second = second.contiguous()
    if base is not None:
        base = base.contiguous()
    if backend == "triton":
        from moe_runtime.kernels.expansion import dare_merge_forward

        return dare_merge_forward(
            first,
            second,
            base,
            seed,
            stream,
            threshold,
            first_scale,
            second_scale,
            start,
        )
    out = torch.empty_like(first)
    for at in range(0, first.numel(), BLOCK):
        block = slice(at, min(at + BLOCK, first.numel()))
        drop = draws(seed, stream, start + at, block.stop - at) < threshold
        origin = None if base is None else base.view(-1)[block]
        child = _difference(first.view(-1)[block], origin, first_scale, drop[:, 0])
        child.add_(_difference(second.view(-1)[block], origin, second_scale, drop[:, 1]))
        if origin is not None:
            child.add_(origin.to(child.dtype))
        out.view(-1)[block] = child
    return out


def _difference(parent: Tensor, origin: Tensor | None, scale: float, drop: np.ndarray) -> Tensor:
    """Return scale times the difference of a block [n] from `origin`, 0 where `drop` [n]."""
    delta = parent.to(wide_dtype(parent.dtype), copy=True)
    if origin is not None:
        delta.sub_(origin.to(delta.dtype))
    return delta.mul_(scale).masked_fill_(torch.from_numpy(drop).to(delta.device), 0.0)


def _dare_merge_fake(first: Tensor, *_: Any) -> Tensor:
    return first.new_empty(first.shape)


register("gram", _gram, _gram_fake)
register("dare_merge", _dare_merge, _dare_merge_fake)
