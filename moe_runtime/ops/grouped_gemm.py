"""One matrix product per expert over rows in expert order.

    y[r] = weight[e] x[r] + bias[e]   for expert_offsets[e] <= r < expert_offsets[e + 1]
    y[r] = 0                          after the last expert

The building block of `moe_mlp`, for other computations between dispatch and combine. Also here the
weights of trained experts may be stored separately: trained[trainable[e]] is then the weight of e
if trainable[e] >= 0.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from moe_runtime import backends
from moe_runtime.ops.expert_rows import check_trained, trained_rows, weight_at
from moe_runtime.ops.library import Tensors, define, inputs_of, kind, register, register_backward
from moe_runtime.ops.products import mm


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    bias: Tensor | None = None,
    backend: str | None = None,
    *,
    trainable: Tensor | None = None,
    trained: Tensor | None = None,
) -> Tensor:
    """Multiply rows of `x` [R, in] by their expert's `weight` [E, out, in] -> [R, out].

    `expert_offsets` is [E + 1] of integers, `bias` [E, out]. Differentiable in x, weight and bias.
    With `trained` [n, out, in] and `trainable` [E] int32 (an expert's row there, or -1) it is
    differentiable in trained instead of weight, and a frozen expert's bias gets a zero gradient.
    Raises ValueError for mismatched shapes and dtypes. Offsets that do not ascend from 0 to at most
    R are detected by the torch backend only, as the kernels do not synchronize with the GPU.
    """
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[2]
    fits = fits and weight.dtype == x.dtype and weight.device == x.device
    fits = fits and expert_offsets.shape == (len(weight) + 1,)
    if bias is not None:
        fits = fits and bias.shape == weight.shape[:2] and bias.dtype == x.dtype
    if not fits or expert_offsets.is_floating_point():
        raise ValueError(
            "Expected x [R, in], weight [E, out, in] and bias [E, out] of one dtype and device, "
            f"and expert_offsets [E + 1] of integers, but x is {kind(x)}, weight {kind(weight)}, "
            f"bias {kind(bias)} and expert_offsets {kind(expert_offsets)}"
        )
    check_trained(weight, trainable, trained, masks=False)
    return torch.ops.moe_runtime.grouped_gemm(
        x,
        weight,
        expert_offsets,
        bias,
        trainable,
        trained,
        backends.pick("grouped_gemm", x, backend),
    )


_TRAINED = "Tensor? trainable, Tensor? trained"
define(
    f"grouped_gemm(Tensor x, Tensor weight, Tensor expert_offsets, Tensor? bias, {_TRAINED}, str "
    "backend) -> Tensor"
)
define(
    f"grouped_gemm_backward(Tensor dy, Tensor x, Tensor weight, Tensor expert_offsets, {_TRAINED}, "
    "bool[3] needs, str backend) -> (Tensor, Tensor, Tensor)"
)
Inputs = inputs_of("grouped_gemm")
BackwardInputs = inputs_of("grouped_gemm_backward")


def _segments(expert_offsets: Tensor, R: int) -> tuple[list[tuple[int, int]], int]:
    """Return the first row and the end of each expert, and the end of the last one."""
    bounds = expert_offsets.tolist()
    if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > R:
        raise ValueError(f"expert_offsets must ascend from 0 to at most R = {R}, but got {bounds}")
    return list(itertools.pairwise(bounds)), bounds[-1]


def _tile(
    kernel: str,
    x: Tensor,
    out: int,
    length: int,
    E: int,
    expert_offsets: Tensor,
) -> tuple:
    """Return a launch config and its tile map."""
    from moe_runtime.kernels import dispatch, tiles

    tile = tiles.choose(
        kernel,
        x,
        out,
        length,
        x.shape[0],
        E,
    )
    return tile, dispatch.tile_map(expert_offsets.int().contiguous(), x.shape[0], tile.BLOCK_M)


def one_layout(stack: Tensor, separate: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return `stack` [E, N, K] and `separate` [n, N, K] with equal inner strides.

    `stack` is copied unless it is contiguous in either order.
    """
    if separate is None or separate.stride()[1:] == stack.stride()[1:]:
        return stack, separate
    if stack[0].is_contiguous():
        return stack, separate.contiguous()
    if stack[0].t().is_contiguous():
        return stack, separate.transpose(1, 2).contiguous().transpose(1, 2)
    return stack.contiguous(), separate.contiguous()


def _separate(weight: Tensor, trainable: Tensor | None, trained: Tensor | None) -> tuple:
    """Return the weights for the kernels: the stack, and the separate rows."""
    if trained is None or trainable is None:
        return weight, None
    from moe_runtime.kernels.operands import Trained

    weight, trained = one_layout(weight, trained)
    return weight, Trained(trainable.contiguous(), trained)


def _forward(*arguments: Any) -> Tensor:
    i = Inputs(*arguments)
    x = i.x
    weight = i.weight
    E, N, K = weight.shape
    if i.backend == "triton":
        from moe_runtime.kernels.grouped_gemm import grouped_gemm_forward

        tile, tile_map = _tile(
            "down",
            x,
            N,
            K,
            E,
            i.expert_offsets,
        )
        weight, separate = _separate(weight, i.trainable, i.trained)
        bias = None if i.bias is None else i.bias.contiguous()
        y = x.new_zeros(x.shape[0], N)
        x = x.contiguous()
        return grouped_gemm_forward(
            x,
            weight,
            bias,
            tile_map,
            True,
            tile,
            separate,
            y=y,
        )
    segments, end = _segments(i.expert_offsets, x.shape[0])
    rows = trained_rows(E, i.trainable)
    y = x.new_empty(x.shape[0], N)
    for e, (a, b) in enumerate(segments):
        if a < b:
            mm(x[a:b], weight_at(e, rows[e], weight, i.trained).t(), out=y[a:b])
            if i.bias is not None:
                y[a:b].add_(i.bias[e])
    y[end:].zero_()
    return y


def _backward_triton(dy: Tensor, i: Any) -> Tensors:
    from moe_runtime.kernels import tiles
    from moe_runtime.kernels.grouped_gemm import grouped_gemm_forward
    from moe_runtime.kernels.grouped_gemm_backward import bias_backward, weight_backward

    R, K = i.x.shape
    E, N, _ = i.weight.shape
    weight, separate = _separate(i.weight, i.trainable, i.trained)
    index = None
    n = None
    if separate is not None:
        index = separate.index
        n = i.trained.shape[0]
    dy = dy.contiguous()
    x = i.x.contiguous()
    offsets = i.expert_offsets.int().contiguous()
    dx, dweight, dbias = (x.new_empty(0) for _ in range(3))
    need_x, need_weight, need_bias = i.needs
    if need_x:
        tile, tile_map = _tile(
            "dx",
            dy,
            K,
            N,
            E,
            offsets,
        )
        dx = torch.zeros_like(x)
        grouped_gemm_forward(
            dy,
            weight,
            None,
            tile_map,
            False,
            tile,
            separate,
            y=dx,
        )
    if need_weight:
        if not need_x:
            # the first launch creates the CUDA context of autograd's thread, which tensor
            # descriptors need
            x.new_zeros(1)
        tile = tiles.choose(
            "dw",
            x,
            K,
            N,
            R,
            E,
        )
        dweight = weight_backward(
            dy,
            x,
            None,
            offsets,
            1,
            None,
            tile,
            index,
            n,
        )
    if need_bias:
        dbias = bias_backward(
            dy,
            None,
            None,
            offsets,
            1,
            False,
            index,
        )
    return dx, dweight, dbias


def _new_gradients(dy: Tensor, *arguments: Any) -> Tensors:
    """Allocate the gradients of x, the trained weights and bias; empty if not in `needs`."""
    i = BackwardInputs(dy, *arguments)
    learned = i.weight if i.trained is None else i.trained
    shapes = (i.x.shape, learned.shape, i.weight.shape[:2])
    return tuple(i.x.new_empty(shape if need else (0,)) for shape, need in zip(shapes, i.needs))


def _backward(dy: Tensor, *arguments: Any) -> Tensors:
    """Compute the gradients of x, of weight or trained, and of bias; empty if not in `needs`."""
    i = BackwardInputs(dy, *arguments)
    if i.backend == "triton":
        return _backward_triton(dy, i)
    x = i.x
    need_x, need_weight, need_bias = i.needs
    segments, end = _segments(i.expert_offsets, x.shape[0])
    rows = trained_rows(i.weight.shape[0], i.trainable)
    dx, dweight, dbias = _new_gradients(dy, *arguments)
    for row in set(range(dweight.shape[0])).difference(rows):  # rows of no expert
        dweight[row].zero_()
    for e, (a, b) in enumerate(segments):
        row = rows[e]
        if need_x and a < b:
            mm(dy[a:b], weight_at(e, row, i.weight, i.trained), out=dx[a:b])
        if need_weight and row >= 0:
            if a == b:
                dweight[row].zero_()
            else:
                mm(dy[a:b].t(), x[a:b], out=dweight[row])
        if need_bias:
            if row < 0:
                dbias[e].zero_()
            else:
                dbias[e].copy_(dy[a:b].sum(0))
    if need_x:
        dx[end:].zero_()
    return dx, dweight, dbias


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    i = Inputs(*inputs)
    ctx.backend = i.backend
    ctx.save_for_backward(
        i.x,
        i.weight,
        i.expert_offsets,
        i.trainable,
        i.trained,
    )


def _autograd(ctx: Any, dy: Tensor) -> tuple:
    saved = ctx.saved_tensors
    flags = Inputs(*ctx.needs_input_grad)
    learned = "weight" if saved[-1] is None else "trained"
    names = ("x", learned, "bias")
    needs = [getattr(flags, name) for name in names]
    made = torch.ops.moe_runtime.grouped_gemm_backward(dy, *saved, needs, ctx.backend)
    grads = {name: grad for name, need, grad in zip(names, needs, made) if need}
    return tuple(Inputs(**grads))


def _fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


register(
    "grouped_gemm",
    _forward,
    _fake,
    _autograd,
    _setup_context,
)
register_backward("grouped_gemm_backward", _backward, _new_gradients)
