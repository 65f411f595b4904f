"""One matrix product per expert over rows in expert order.

    y[r] = weight[e] x[r] + bias[e]   for expert_offsets[e] <= r < expert_offsets[e + 1];  y[r] = 0 behind the last expert

The step under `moe_mlp`, for those who put another computation between dispatch and combine.
"""

import itertools

import torch

from moe_runtime import backends
from moe_runtime.ops.library import LIB, register, register_backward


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`x` [R, in], `weight` [E, out, in], `expert_offsets` [E + 1] integers, `bias` [E, out] -> [R, out].

    Differentiable in x, weight and bias. Raises ValueError for shapes, dtypes or offsets' size that do not fit; offsets that
    do not ascend from 0 to at most R are seen by the torch backend only, the kernels do not wait for the GPU to tell.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}; want [R, in] and [E, out, in]")
    if weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(f"weight is {weight.dtype} on {weight.device}, x {x.dtype} on {x.device}; want the same")
    if expert_offsets.shape != (weight.shape[0] + 1,) or expert_offsets.is_floating_point():
        raise ValueError(
            f"expert_offsets is {tuple(expert_offsets.shape)} {expert_offsets.dtype}; want [{weight.shape[0] + 1}] integers"
        )
    if bias is not None and (bias.shape != weight.shape[:2] or bias.dtype != x.dtype):
        raise ValueError(f"bias is {tuple(bias.shape)} {bias.dtype}; want {tuple(weight.shape[:2])} {x.dtype}")
    return torch.ops.moe_runtime.grouped_gemm(
        x, weight, expert_offsets, bias, backends.pick("grouped_gemm", x, backend)
    )


LIB.define("grouped_gemm(Tensor x, Tensor weight, Tensor expert_offsets, Tensor? bias, str backend) -> Tensor")
LIB.define(
    "grouped_gemm_backward(Tensor dy, Tensor x, Tensor weight, Tensor expert_offsets, bool[3] needs, str backend) "
    "-> (Tensor, Tensor, Tensor)"
)


def _segments(expert_offsets: torch.Tensor, R: int):
    bounds = expert_offsets.tolist()
    if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > R:
        raise ValueError(f"expert_offsets is {bounds}; want 0 first, then ascending to at most R = {R}")
    return list(itertools.pairwise(bounds)), bounds[-1]


def _tile(kernel: str, x, out: int, length: int, E: int, expert_offsets):
    """A launch config and the tile map that goes with it."""
    from moe_runtime.kernels import dispatch, tiles

    tile = tiles.choose(kernel, x, out, length, x.shape[0], E)
    return tile, dispatch.tile_map(expert_offsets.int().contiguous(), x.shape[0], tile.BLOCK_M)


def _forward_triton(x, weight, expert_offsets, bias):
    from moe_runtime.kernels.grouped_gemm import grouped_gemm_forward

    E, N, K = weight.shape
    tile, tile_map = _tile("down", x, N, K, E, expert_offsets)
    bias = None if bias is None else bias.contiguous()
    return grouped_gemm_forward(x.contiguous(), weight, bias, tile_map, True, tile, y=x.new_zeros(x.shape[0], N))


def _backward_triton(dy, x, weight, expert_offsets, needs):
    from moe_runtime.kernels import tiles
    from moe_runtime.kernels.grouped_gemm import grouped_gemm_forward
    from moe_runtime.kernels.grouped_gemm_backward import bias_backward, weight_backward

    (R, K), (E, N, _) = x.shape, weight.shape
    dy, x, offsets = dy.contiguous(), x.contiguous(), expert_offsets.int().contiguous()
    dx, dweight, dbias = (x.new_empty(0) for _ in range(3))
    if needs[0]:
        tile, tile_map = _tile("dx", dy, K, N, E, offsets)
        dx = grouped_gemm_forward(dy, weight, None, tile_map, False, tile, y=torch.zeros_like(x))
    if needs[1]:
        dweight = weight_backward(dy, x, None, offsets, 1, None, tiles.choose("dw", x, K, N, R, E))
    if needs[2]:
        dbias = bias_backward(dy, None, None, offsets, 1, False)
    return dx, dweight, dbias


def _forward(x, weight, expert_offsets, bias, backend):
    if backend == "triton":
        return _forward_triton(x, weight, expert_offsets, bias)
    segments, end = _segments(expert_offsets, x.shape[0])
    y = x.new_empty(x.shape[0], weight.shape[1])
    for e, (a, b) in enumerate(segments):
        if a < b:
            torch.mm(x[a:b], weight[e].t(), out=y[a:b])
            if bias is not None:
                y[a:b].add_(bias[e])
    y[end:].zero_()
    return y


def _backward(dy, x, weight, expert_offsets, needs, backend):
    """Gradients of x [R, in], weight [E, out, in] and bias [E, out]; an empty tensor where `needs` says no."""
    if backend == "triton":
        return _backward_triton(dy, x, weight, expert_offsets, needs)
    segments, end = _segments(expert_offsets, x.shape[0])
    shapes = (x.shape, weight.shape, weight.shape[:2])
    dx, dweight, dbias = (x.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs, strict=True))
    for e, (a, b) in enumerate(segments):
        if needs[0] and a < b:
            torch.mm(dy[a:b], weight[e], out=dx[a:b])
        if needs[1]:
            dweight[e].zero_() if a == b else torch.mm(dy[a:b].t(), x[a:b], out=dweight[e])
        if needs[2]:
            dbias[e].copy_(dy[a:b].sum(0))
    if needs[0]:
        dx[end:].zero_()
    return dx, dweight, dbias


def _backward_fake(dy, x, weight, expert_offsets, needs, backend):
    shapes = (x.shape, weight.shape, weight.shape[:2])
    return tuple(x.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs, strict=True))


def _setup_context(ctx, inputs, output):
    x, weight, expert_offsets, _, ctx.backend = inputs
    ctx.save_for_backward(x, weight, expert_offsets)


def _autograd(ctx, dy):
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    grads = torch.ops.moe_runtime.grouped_gemm_backward(dy, *ctx.saved_tensors, needs, ctx.backend)
    dx, dweight, dbias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return dx, dweight, None, dbias, None


def _fake(x, weight, expert_offsets, bias, backend):
    return x.new_empty(x.shape[0], weight.shape[1])


register("grouped_gemm", _forward, _fake, _autograd, _setup_context)
register_backward("grouped_gemm_backward", _backward, _backward_fake)
