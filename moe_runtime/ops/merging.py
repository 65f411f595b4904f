"""Merge experts into one dense weight, and apply the linear layer with it.

XFT, Eq. (3):  W = sum_e alpha_e W_e
XFT, Eq. (5):  alpha_0 = lambda for the shared expert (`shared_rate`), alpha_{e>0} = (1 - lambda)
               softmax(logits)_e
Learned soup:  alpha = softmax(logits) over all experts
XFT, Eq. (4) and (6) learn the logits through these ops, which are differentiable in alpha;
`merge_experts` in W_e as well.

`merged_linear` computes y = x W^T + b with a given W, so that one W serves many calls: dx = dy W,
and dalpha_e = <dW, W_e> with dW = dy^T x, of which the Triton kernel never holds more than a tile.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime import backends
from moe_runtime.config import MoEConfig, check_choice, check_shared_rate
from moe_runtime.native.library import cpp
from moe_runtime.ops import cuda_kernels
from moe_runtime.ops.library import (
    Tensors,
    compute_dtype,
    define,
    kind,
    register,
    register_backward,
    wide_dtype,
)
from moe_runtime.ops.workspace import scratch


def mixing(logits: Tensor, shared_rate: float | None) -> Tensor:
    """Compute mixing coefficients from logits, XFT's Eq. (5), shared expert first.

    Differentiable in `logits`.

    Args:
        logits: [E - 1], one for each expert but the shared one; [E] without `shared_rate`.
        shared_rate: lambda, the shared expert's coefficient, 0 to 1; the others sum to 1 - lambda.
            None is the learned soup: a softmax over all experts.

    Returns:
        alpha [E], which sums to 1, in float32, or float64 with float64 logits.

    Raises:
        ValueError: If `shared_rate` is not from 0 to 1.
    """
    if logits.dim() != 1:
        raise ValueError(
            f"Expected one-dimensional logits, one per expert, but got shape {tuple(logits.shape)}"
        )
    if shared_rate is None:
        return logits.to(wide_dtype(logits.dtype)).softmax(-1)
    check_shared_rate(shared_rate)
    logits = logits.to(wide_dtype(logits.dtype))
    if logits.numel() == 0:  # a single expert gets all the weight
        return logits.new_ones(1)
    return torch.cat([logits.new_full((1,), shared_rate), (1 - shared_rate) * logits.softmax(-1)])


def soup_logits(num_experts: int, shared_rate: float) -> Tensor:
    """Return logits [E] whose softmax is [shared_rate, (1 - shared_rate) / (E - 1), ...]."""
    if num_experts == 1:
        return torch.zeros(1)
    rest = (1 - shared_rate) / (num_experts - 1)
    alpha = torch.tensor([shared_rate] + [rest] * (num_experts - 1), dtype=torch.float64)
    return alpha.clamp_min(torch.finfo(torch.float32).tiny).log().float()


def uniform_mixture(num_experts: int, device: torch.device | None = None) -> Tensor:
    """Return alpha [E] float32 of the uniform mean."""
    return torch.full((num_experts,), 1 / num_experts, dtype=torch.float32, device=device)


def init_mixture(config: MoEConfig, shared_rate: float) -> Tensor:
    """Return alpha [E] before training: [shared_rate, (1 - shared_rate) / (E - 1), ...].

    Raises ValueError for a gate without a shared expert.
    """
    if not config.has_shared_expert:
        raise ValueError(
            f"Gate {config.gate!r} has no shared expert. Pass alpha, or use to_mergeable(soup=True)"
        )
    return mixing(torch.ones(config.num_experts - 1), shared_rate)


def check_mixture(alpha: Tensor, layer: str) -> Tensor:
    """Return the coefficients `alpha` [E] of a layer; raises ValueError unless all are finite.

    The message names the layer.
    """
    if not alpha.isfinite().all():
        raise ValueError(
            f"alpha of {layer} must be finite, but is {alpha.tolist()}. Train the mixing logits "
            "again"
        )
    return alpha


def alpha_rows(alpha: Any, num_layers: int, num_experts: int) -> list[Tensor]:
    """Return an alpha [E] float32 per layer from alpha [E], [L, E] or "uniform".

    Raises ValueError unless each sums to 1.
    """
    if isinstance(alpha, str):
        check_choice("alpha", alpha, ("uniform",))
        alpha = uniform_mixture(num_experts)
    alpha = torch.as_tensor(alpha, dtype=torch.float32)
    if alpha.dim() == 1:
        alpha = alpha.expand(num_layers, -1)
    sums = alpha.sum(-1)
    if alpha.shape != (num_layers, num_experts) or not (sums - 1).abs().max().item() < 1e-4:
        raise ValueError(
            f"Expected alpha [{num_experts}] or [{num_layers}, {num_experts}] with a sum of 1 in "
            f"every layer, but alpha is {tuple(alpha.shape)} with the sums {sums.tolist()}"
        )
    return list(alpha)


def merge_experts(weight: Tensor, alpha: Tensor, *, backend: str | None = None) -> Tensor:
    """Merge experts into one weight, XFT's Eq. (3): sum_e alpha_e W_e.

    Differentiable in both arguments.

    Args:
        weight: [E, ...], any floating-point dtype.
        alpha: [E], one coefficient for each expert.
        backend: "torch", "cpp", "triton" or "cuda"; None selects the default for the device.

    Returns:
        [...], summed in float32 and rounded once to the dtype of `weight`.

    Raises:
        ValueError: If the shapes do not fit.
    """
    if weight.dim() == 0 or weight.shape[0] == 0 or alpha.shape != weight.shape[:1]:
        raise ValueError(
            "Expected alpha [E] and weight [E, ...] with E >= 1, but alpha is "
            f"{tuple(alpha.shape)}, weight {tuple(weight.shape)}"
        )
    alpha = alpha.to(wide_dtype(weight.dtype))
    if backends.portable() is not None:
        terms = alpha.view(-1, *[1] * (weight.dim() - 1)) * weight.to(alpha.dtype)
        return terms.sum(0).to(weight.dtype)
    return torch.ops.moe_runtime.merge_experts(
        weight, alpha, backends.pick("merge_experts", weight, backend)
    )


def merge_rows(rows: Iterable[Tensor], alpha: Tensor) -> Tensor:
    """Compute Eq. (3) for experts given one by one: `rows` E of [...], `alpha` [E] -> [...].

    The rows are overwritten; not differentiable. The result is bit-identical to `merge_experts` of
    the stack. Raises ValueError unless there are as many rows as alphas.
    """
    out: Tensor | None = None
    for row, a in zip(rows, alpha, strict=True):
        # same order and rounding as the torch backend
        part = row.to(wide_dtype(row.dtype)).mul_(a)
        if out is None:
            out = part
        else:
            out.add_(part)
    assert out is not None
    return out.to(row.dtype)


def remerge_experts(
    merged: Tensor,
    weight: Tensor,
    alpha: Tensor,
    seen: Tensor,
    backend: str = "triton",
) -> None:
    """Write sum_e alpha[e] weight[e] into `merged` [...] if `alpha` [E] float32 is not `seen` [E].

    A kernel ("triton", "cuda") compares the two, so that the host does not synchronize. Not
    differentiable.
    """
    alpha = alpha.contiguous()
    seen = seen.contiguous()
    if backend == "cuda":
        cuda_kernels.merge_experts_forward(weight, alpha, out=merged, seen=seen)
        return
    from moe_runtime.kernels.merging import merge_experts_forward

    merge_experts_forward(weight, alpha, out=merged, seen=seen)


class Kept:
    """The attribute `kept` of merged weights that are overwritten in place.

    It has their alpha, and the number of overwrites.

    Autograd's version counter is not used, as the host does not know whether alpha has changed. The
    backward pass of an older graph merges again with its own alpha.
    """

    def __init__(self, seen: Tensor, backend: str):
        self.seen = seen
        self.backend = backend
        self.times = 0

    def remerge(self, merged: Tensor, weight: Tensor, alpha: Tensor) -> None:
        """Update `merged`, which has this attribute, to the mixture of `alpha`."""
        remerge_experts(
            merged,
            weight,
            alpha,
            self.seen,
            self.backend,
        )
        self.seen.copy_(alpha)
        self.times += 1


def merged_linear(
    x: Tensor,
    weight: Tensor,
    alpha: Tensor,
    merged: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Compute x W^T + bias [..., out] of `x` [..., in] with W merged from `weight` [E, out, in].

    `alpha` is [E]. `merged` [out, in] is the detached result of `merge_experts(weight, alpha)` in
    x's dtype (autocast's under autocast); None merges here. Differentiable in x, alpha and `bias`
    [out], and in `weight` if it requires a gradient, which materializes dW. Supports autocast as
    F.linear does. Raises ValueError for mismatched shapes and dtypes.
    """
    _check_linear(x, weight, alpha, merged, bias)
    if (torch.is_grad_enabled() and weight.requires_grad) or backends.portable() is not None:
        return F.linear(x, merge_experts(weight, alpha, backend=backend), bias)
    if merged is None:
        merged = merge_experts(weight.detach(), alpha.detach(), backend=backend)
    x = x.to(compute_dtype(x))
    merged = merged.to(compute_dtype(merged))
    if bias is not None:
        bias = bias.to(compute_dtype(bias))
    exact = x if x.dtype == torch.float64 else weight  # the other may be narrower
    alpha = alpha.to(wide_dtype(exact.dtype))
    # dalpha's two kernels alone would need the whole dW, so they are not a default
    chosen = backends.pick("merge_experts", exact, backend, cuda_fits=False)
    return torch.ops.moe_runtime.merged_linear(
        x,
        weight,
        alpha,
        merged,
        bias,
        chosen,
    )


def _check_linear(
    x: Tensor,
    weight: Tensor,
    alpha: Tensor,
    merged: Tensor | None,
    bias: Tensor | None,
) -> None:
    fits = weight.dim() == 3 and weight.shape[0] > 0 and alpha.shape == weight.shape[:1]
    fits = fits and x.dim() > 0 and x.shape[-1] == weight.shape[2]
    if not fits or not x.device == weight.device == alpha.device:
        raise ValueError(
            "Expected x [..., in], weight [E, out, in] and alpha [E] with E >= 1 on one device, "
            f"but x is {kind(x)}, weight {kind(weight)}, alpha {kind(alpha)}"
        )
    if merged is not None and merged.requires_grad:
        raise ValueError(
            "merged requires grad, but must be detached: alpha's gradient is computed from x and "
            "the experts"
        )
    dtype = compute_dtype(x)
    given = [("merged", merged, weight.shape[1:]), ("bias", bias, weight.shape[1:2])]
    if merged is None:  # weight is merged here
        given.append(("weight", weight, weight.shape))
    for name, tensor, shape in given:
        if tensor is None:
            continue
        fits = tensor.shape == shape and compute_dtype(tensor) == dtype
        if not fits or tensor.device != x.device:
            raise ValueError(
                f"Expected {tuple(shape)} {dtype} on {x.device}, as x, but {name} is {kind(tensor)}"
            )


define("merge_experts(Tensor weight, Tensor alpha, str backend) -> Tensor")
define("merge_experts_backward_alpha(Tensor dout, Tensor weight, str backend) -> Tensor")


def _merge(weight: Tensor, alpha: Tensor, backend: str) -> Tensor:
    if backend == "triton":
        from moe_runtime.kernels.merging import merge_experts_forward

        return merge_experts_forward(weight, alpha)
    if backend == "cuda":
        return cuda_kernels.merge_experts_forward(weight, alpha)
    if backend == "cpp":
        return _merge_cpp(weight, alpha)
    out = torch.empty(weight.shape[1:], dtype=weight.dtype, device=weight.device)
    rows = weight.reshape(weight.shape[0], out.numel())
    flat = out.view(-1)
    total, term = torch.empty(2, block_size(out), dtype=alpha.dtype, device=weight.device)
    # expert by expert, in blocks that stay in the cache; the rounding does not depend on the block
    # size
    for block in blocks(out):
        acc = total[: block.stop - block.start]
        part = term[: block.stop - block.start]
        for e, row in enumerate(rows):
            scaled = acc if e == 0 else part
            source = row[block]
            if row.dtype != acc.dtype:
                source = scaled.copy_(source)
            torch.mul(source, alpha[e], out=scaled)
            if e:
                acc.add_(scaled)
        flat[block] = acc
    return out


def block_size(one: Tensor) -> int:
    """Return how many elements of `one` expert to process at a time, to fit each core's cache."""
    size = 1 << 24
    if one.device.type == "cpu":
        size = (1 << 15) * torch.get_num_threads()
    return max(min(size, one.numel()), 1)


def blocks(one: Tensor) -> Iterator[slice]:
    """Return slices of `block_size` that cover one expert's elements."""
    step = block_size(one)
    size = one.numel()
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _merge_cpp(weight: Tensor, alpha: Tensor) -> Tensor:
    """Run `merge_experts` with csrc/cpu/merging.h, bit-identical to the torch backend."""
    stack, order = _as_stored(weight)
    alpha = alpha.contiguous()
    out = stack.new_empty(stack.shape[1:])
    cpp.library().handle.moert_cpu_merge(
        cpp.DTYPES[weight.dtype],
        stack.data_ptr(),
        stack.stride(0),
        alpha.data_ptr(),
        stack.shape[0],
        out.numel(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out.permute(sorted(range(out.dim()), key=order.__getitem__)).contiguous()


def _merge_backward_alpha_cpp(dout: Tensor, weight: Tensor) -> Tensor:
    """Return <dout, weight[e]> [E] float32 for `dout` [...], `weight` [E, ...]."""
    stack, order = _as_stored(weight)
    dout = dout.permute(order).contiguous()
    if dout.dtype not in cpp.DTYPES:
        dout = dout.float()
    E = stack.shape[0]
    P = dout.numel()
    calls = cpp.library().handle
    dalpha = dout.new_empty(E, dtype=torch.float32)
    space = scratch("dalpha", (calls.moert_cpu_merge_gradient_bytes(E, P),), dout, torch.uint8)
    calls.moert_cpu_merge_gradient(
        cpp.DTYPES[weight.dtype],
        cpp.DTYPES[dout.dtype],
        dout.data_ptr(),
        stack.data_ptr(),
        stack.stride(0),
        E,
        P,
        space.data_ptr(),
        dalpha.data_ptr(),
        torch.get_num_threads(),
    )
    return dalpha


def _as_stored(weight: Tensor) -> tuple[Tensor, list[int]]:
    """Return the experts as contiguous blocks in memory order, and the permutation of the dims."""
    order = sorted(range(1, weight.dim()), key=weight.stride, reverse=True)
    stack = weight.permute(0, *order)
    if not stack[0].is_contiguous():
        stack = stack.contiguous()
    return stack, [dim - 1 for dim in order]


def _merge_backward_alpha(dout: Tensor, weight: Tensor, backend: str) -> Tensor:
    if backend == "triton":
        from moe_runtime.kernels.merging import merge_experts_backward_alpha

        return merge_experts_backward_alpha(dout, weight)
    if backend == "cuda":
        return cuda_kernels.merge_experts_backward_alpha(dout, weight)
    if backend == "cpp":
        return _merge_backward_alpha_cpp(dout, weight)
    dtype = _alpha_dtype(dout, weight)
    if torch.is_grad_enabled():  # a graph that may be differentiated again must not write in place
        dout = dout.reshape(-1).to(dtype)
        return torch.stack([dout.dot(w.reshape(-1).to(dtype)) for w in weight])
    rows = weight.reshape(weight.shape[0], dout.numel())
    dout = dout.reshape(-1).to(dtype)
    if weight.dtype == dtype:
        return rows.mv(dout)
    dalpha = torch.zeros(weight.shape[0], dtype=dtype, device=weight.device)
    # a block of all experts at a time: no float32 copy of the stack
    step = max(block_size(dout) // weight.shape[0], 1)
    wide = torch.empty(weight.shape[0], step, dtype=dtype, device=weight.device)
    for start in range(0, dout.numel(), step):
        block = slice(start, start + step)
        part = rows[:, block]
        dalpha.addmv_(wide[:, : part.shape[1]].copy_(part), dout[block])
    return dalpha


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    weight, alpha, ctx.backend = inputs
    ctx.save_for_backward(weight, alpha)


def _autograd(ctx: Any, dout: Tensor) -> tuple:
    weight, alpha = ctx.saved_tensors
    dweight = None
    dalpha = None
    need_weight, need_alpha, _ = ctx.needs_input_grad
    if need_weight:
        dweight = (alpha.view(-1, *[1] * dout.dim()) * dout.to(alpha.dtype)).to(weight.dtype)
    if need_alpha:
        if torch.is_grad_enabled():  # create_graph=True: the op has no gradient of its own
            dalpha = _merge_backward_alpha(dout, weight, "torch")
        else:
            dalpha = torch.ops.moe_runtime.merge_experts_backward_alpha(dout, weight, ctx.backend)
    return dweight, dalpha, None


def _alpha_dtype(dout: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(wide_dtype(dout.dtype), wide_dtype(weight.dtype))


# contiguous, however the stack is stored
register(
    "merge_experts",
    _merge,
    lambda weight, *_: weight.new_empty(weight.shape[1:]),
    _autograd,
    _setup_context,
)
register_backward(
    "merge_experts_backward_alpha",
    _merge_backward_alpha,
    lambda dout, weight, _: weight.new_empty(len(weight), dtype=_alpha_dtype(dout, weight)),
)


define(
    "merged_linear(Tensor x, Tensor weight, Tensor alpha, Tensor merged, Tensor? bias, str "
    "backend) -> Tensor"
)
define(
    "merged_linear_backward(Tensor dout, Tensor? x, Tensor? weight, Tensor? merged, bool bias, "
    "str backend) -> (Tensor, Tensor, Tensor)"
)


def _linear_backward(
    dout: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    merged: Tensor | None,
    bias: bool,
    backend: str,
) -> Tensors:
    """Return dx if `merged` is given, dalpha if x and the experts are, dbias with `bias`.

    The others are empty.
    """
    dout = dout.reshape(dout.shape[:-1].numel(), dout.shape[-1])
    dx, dalpha, dbias = (dout.new_empty(0) for _ in range(3))
    if merged is not None:
        dx = dout @ merged
    if x is not None and weight is not None:
        x = x.reshape(dout.shape[0], x.shape[-1])
        if backend == "triton":
            from moe_runtime.kernels.merging import merged_linear_backward_alpha

            dalpha = merged_linear_backward_alpha(dout, x, weight)
        else:
            dalpha = _merge_backward_alpha(dout.t() @ x, weight, backend)
    if bias:
        dbias = dout.sum(0)
    return dx, dalpha, dbias


def _linear_backward_fake(dout: Tensor, *arguments: Any) -> Tensors:
    x, weight, merged, bias, _ = arguments
    dx, dalpha, dbias = (dout.new_empty(0) for _ in range(3))
    if merged is not None:
        dx = dout.new_empty(dout.shape[:-1].numel(), merged.shape[1])
    if x is not None and weight is not None:
        dalpha = weight.new_empty(weight.shape[0], dtype=_alpha_dtype(dout, weight))
    if bias:
        dbias = dout.new_empty(dout.shape[-1])
    return dx, dalpha, dbias


def _linear_setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, alpha, merged, _, ctx.backend = inputs
    need_x, _, need_alpha, _, ctx.need_bias, *_ = ctx.needs_input_grad
    ctx.x_shape = x.shape
    ctx.kept = getattr(merged, "kept", None)
    ctx.times = ctx.kept and ctx.kept.times
    if not need_alpha:
        x = weight = alpha = None
    if not need_x:
        merged = None
    ctx.save_for_backward(x, weight, alpha, merged)


def _linear_autograd(ctx: Any, dout: Tensor) -> tuple:
    x, weight, alpha, merged = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        if merged is not None and alpha is not None:
            merged = merge_experts(weight, alpha).to(dout.dtype)
        grads = _linear_backward(
            dout,
            x,
            weight,
            merged,
            ctx.need_bias,
            "torch",
        )
    else:
        is_older = ctx.kept is not None and ctx.kept.times != ctx.times
        if is_older and merged is not None and alpha is not None:
            ctx.kept.remerge(merged, weight, alpha)
        grads = torch.ops.moe_runtime.merged_linear_backward(
            dout,
            x,
            weight,
            merged,
            ctx.need_bias,
            ctx.backend,
        )
    dx = None if merged is None else grads[0].view(ctx.x_shape)
    dalpha = None if x is None else grads[1]
    dbias = grads[2] if ctx.need_bias else None
    return dx, None, dalpha, None, dbias, None


register(
    "merged_linear",
    # contiguous: with matrix tiles, torch 2.13 multiplies what follows a row of odd length by zero
    lambda x, weight, alpha, merged, bias, backend: F.linear(x.contiguous(), merged, bias),
    lambda x, weight, alpha, merged, *_: x.new_empty(*x.shape[:-1], merged.shape[0]),
    _linear_autograd,
    _linear_setup_context,
)
register_backward("merged_linear_backward", _linear_backward, _linear_backward_fake)
