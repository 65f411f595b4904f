"""The experts of one MoE layer over frozen stacks, dense or packed, with LoRA on every expert.

    out[t] = sum_k topk_weight[t, k] FFN_{topk_idx[t, k]}(x[t])
    FFN_e as in `ops.moe_mlp`, but each of its products is
    y = W_e x + b_e + B_e A_e x                     (LoRA, arXiv 2106.09685, Eq. 3, per expert)

Neither W_e + B_e A_e nor a gradient of W_e is ever materialized. With low = x A_e^T [R, r] saved by
the forward pass:

    d_low = dy B_e;   dA_e = d_low^T x;   dB_e = dy^T low;   dx = dy W_e + d_low A_e

B includes the scaling alpha / r. Here A is [E, r, in] and B is [E, r, out], which is B_e^T. PEFT's
A [E r, in] has the same memory layout, and its B [out, r E], whose expert index is the fastest, is
passed as `.t().view(r, E, out).transpose(0, 1)`; any strides are supported. Concatenate several
adapters along r. x, the pre-activation, low, weights and indices are saved for the backward pass.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_runtime import backends
from moe_runtime.ops import frozen_mlp_torch, packed
from moe_runtime.ops.expert_rows import check_like, check_sizes
from moe_runtime.ops.frozen_rows import (
    SCHEMA,
    FrozenExperts,
    FrozenGradients,
    Pair,
    Stack,
    in_order_of,
    weight_of,
)
from moe_runtime.ops.library import (
    Tensors,
    call_op,
    define,
    register,
    register_backward,
    wide_dtype,
)
from moe_runtime.ops.moe_mlp import absent_as_empty, check_slots


def frozen_mlp(
    x: Tensor,
    experts: FrozenExperts,
    topk_weight: Tensor,
    topk_idx: Tensor,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run x [T, H] through frozen `experts` -> out [T, H], expert_offsets [E + 1] int32.

    `topk_weight` and `topk_idx` [T, K] are as in `moe_mlp`. Biases and pairs have x's dtype; dense
    stacks may have another one and are converted one expert at a time. Differentiable in x,
    topk_weight, biases and pairs. Raises ValueError for mismatched shapes, dtypes or devices, and
    for a stack that requires a gradient.
    """
    _check(x, experts)
    check_slots(x, topk_weight, topk_idx)
    topk_weight = topk_weight.to(wide_dtype(x.dtype))
    if backends.portable() is not None:
        out = frozen_mlp_reference(x, experts, topk_weight, topk_idx)
        return out, x.new_zeros(experts.up.shape[0] + 1, dtype=torch.int32)
    learned = experts.learned()._replace(x=x, topk_weight=topk_weight)
    save = torch.is_grad_enabled() and not backends.exporting()
    save = save and any([t is not None and t.requires_grad for t in learned])
    backend = backends.pick("frozen_mlp", x, backend)
    out, *_, offsets, _ = call_op(
        "frozen_mlp",
        x,
        topk_weight,
        topk_idx,
        *experts.pack(),
        save,
        backend,
    )
    return out, offsets


def frozen_mlp_reference(
    x: Tensor, experts: FrozenExperts, topk_weight: Tensor, topk_idx: Tensor
) -> Tensor:
    """Compute the equation above as a sum over experts with materialized weights, with autograd."""
    out = torch.zeros_like(x)

    def linear(
        rows: Tensor,
        stack: Stack,
        pair: Pair | None,
        bias: Tensor | None,
        e: int,
    ) -> Tensor:
        weight = weight_of(stack, e, x.dtype, "reference")
        if pair is not None:
            weight = weight + pair.b[e].t() @ pair.a[e]
        y = rows @ weight.t()
        if bias is not None:
            y = y + bias[e]
        return y

    for e in range(experts.up.shape[0]):
        h = experts.activation.apply(
            linear(
                x,
                experts.up,
                experts.up_lora,
                experts.up_bias,
                e,
            )
        )
        y = linear(
            h,
            experts.down,
            experts.down_lora,
            experts.down_bias,
            e,
        )
        weight = torch.where(topk_idx == e, topk_weight, 0).sum(1, keepdim=True)
        out = out + weight.to(x.dtype) * y
    return out


def _check(x: Tensor, experts: FrozenExperts) -> None:
    """Raise ValueError unless x [T, H] and the experts' stacks, biases and pairs match."""
    experts.activation.check()
    up = experts.up
    down = experts.down
    E, Z, I = check_sizes(
        x,
        up.shape,
        down.shape,
        experts.activation.gated,
        ("up", "down"),
    )
    H = x.shape[1]
    up_rank, down_rank = _ranks(experts)
    shapes = (
        (E, Z),
        (E, H),
        (E, up_rank, H),
        (E, up_rank, Z),
        (E, down_rank, I),
        (E, down_rank, H),
    )
    check_like(x, zip(FrozenGradients._fields[2:], experts.learned()[2:], shapes))
    _check_stack(x, "up", up)
    _check_stack(x, "down", down)


def _check_stack(x: Tensor, name: str, stack: Stack) -> None:
    """Raise ValueError unless `stack` is frozen, on x's device, and whole if it is packed."""
    problem = None
    if stack.data.requires_grad:
        problem = "requires a gradient"
    elif stack.data.device != x.device:
        problem = f"is on {stack.data.device}"
    if problem is not None:
        raise ValueError(f"Expected a frozen stack on {x.device}, but {name} {problem}")
    if stack.format:
        shape = list(stack.shape)
        packed.check_tensors(stack.data, stack.scales, stack.format, f"{name} {shape}")
        if list(packed.shape_of(stack.data, stack.format)) != shape:
            raise ValueError(
                f"data of {name} is {list(stack.data.shape)}, which is not {shape} in "
                f"{stack.format}"
            )


define(
    f"frozen_mlp(Tensor x, Tensor topk_weight, Tensor topk_idx, {SCHEMA}, bool save, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
define(
    f"frozen_mlp_backward(Tensor dout, Tensor x, Tensor topk_weight, {SCHEMA}, Tensor z, Tensor "
    "up_low, Tensor down_low, Tensor expert_offsets, Tensor row_slot, bool[8] needs, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _kernels_of(backend: str) -> Any:
    if backend in ("torch", "cpp"):
        return frozen_mlp_torch
    from moe_runtime.ops import frozen_mlp_triton

    return frozen_mlp_triton


def _ranks(experts: FrozenExperts) -> tuple[int, int]:
    up = experts.up_lora
    down = experts.down_lora
    return 0 if up is None else up.a.shape[1], 0 if down is None else down.a.shape[1]


def _forward(x: Tensor, topk_weight: Tensor, topk_idx: Tensor, *arguments: Any) -> Tensors:
    *experts, save, backend = arguments
    return _kernels_of(backend).forward(
        x.contiguous(),
        FrozenExperts.unpack(experts),
        topk_weight.contiguous(),
        topk_idx.contiguous(),
        save,
        backend,
    )


def _forward_fake(x: Tensor, topk_weight: Tensor, topk_idx: Tensor, *arguments: Any) -> Tensors:
    experts = FrozenExperts.unpack(arguments[:-2])
    save = arguments[-2]
    up_rank, down_rank = _ranks(experts)
    R = topk_idx.shape[0] * topk_idx.shape[1]
    rows = R if save else 0
    return (
        x.new_empty(x.shape),
        x.new_empty(rows, experts.up.shape[1]),
        x.new_empty(rows, up_rank),
        x.new_empty(rows, down_rank),
        topk_idx.new_empty(experts.up.shape[0] + 1, dtype=torch.int32),
        topk_idx.new_empty(R, dtype=torch.int32),
    )


def _backward(dout: Tensor, x: Tensor, topk_weight: Tensor, *arguments: Any) -> Tensors:
    *experts, z, up_low, down_low, expert_offsets, row_slot, needs, backend = arguments
    grads = _kernels_of(backend).backward(
        dout.contiguous(),
        x.contiguous(),
        FrozenExperts.unpack(experts),
        topk_weight.contiguous(),
        z,
        (up_low, down_low),
        expert_offsets,
        row_slot,
        FrozenGradients(*needs),
        backend,
    )
    return absent_as_empty(grads, x)


def _backward_fake(dout: Tensor, x: Tensor, topk_weight: Tensor, *arguments: Any) -> Tensors:
    *experts, _, _, _, _, _, needs, _ = arguments
    inputs = FrozenExperts.unpack(experts).learned()._replace(x=x, topk_weight=topk_weight)
    # the kernels always return that of the weights
    inputs = inputs.only([needs[0], True, *needs[2:]])
    return absent_as_empty([None if t is None else in_order_of(t) for t in inputs], x)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, topk_weight, _, *arguments, _, ctx.backend = inputs
    ctx.mark_non_differentiable(*output[1:])
    # otherwise autograd would fill a gradient of z's size with zeros
    ctx.set_materialize_grads(False)
    tensors: list[Tensor] = []
    ctx.arguments = []  # a _Saved for each tensor and list of tensors
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors.append(argument)
            argument = _Saved()
        elif isinstance(argument, Sequence) and any([isinstance(t, Tensor) for t in argument]):
            tensors += argument
            argument = _Saved(len(argument))
        ctx.arguments.append(argument)
    ctx.save_for_backward(x, topk_weight, *output[1:], *tensors)


class _Saved:
    """Position of a saved tensor, or of a list of them, among the arguments."""

    def __init__(self, count: int | None = None):
        self.count = count

    def take(self, tensors: Iterator[Tensor]) -> Tensor | list[Tensor]:
        if self.count is None:
            return next(tensors)
        return list(itertools.islice(tensors, self.count))


def _autograd(ctx: Any, dout: Tensor | None, *_: Any) -> tuple:
    grads: list[Any] = []
    for need in ctx.needs_input_grad:
        grads.append([None] * len(need) if isinstance(need, (list, tuple)) else None)
    if dout is None:
        return tuple(grads)
    saved = ctx.saved_tensors  # read once, as checkpointing unpacks at every access
    x, topk_weight, z, up_low, down_low, expert_offsets, row_slot = saved[:7]
    rest = iter(saved[7:])
    arguments = [a.take(rest) if isinstance(a, _Saved) else a for a in ctx.arguments]
    first = 3 + 2 * len(Stack._fields)
    # of x, topk_weight, biases and pairs among the op's arguments
    positions = [0, 1, *range(first, first + 6)]
    needs = [bool(ctx.needs_input_grad[at]) for at in positions]
    made = torch.ops.moe_runtime.frozen_mlp_backward(
        dout,
        x,
        topk_weight,
        *arguments,
        z,
        up_low,
        down_low,
        expert_offsets,
        row_slot,
        needs,
        ctx.backend,
    )
    for at, need, grad in zip(positions, needs, made):
        if need:
            grads[at] = grad
    return tuple(grads)


register(
    "frozen_mlp",
    _forward,
    _forward_fake,
    _autograd,
    _setup_context,
)
register_backward("frozen_mlp_backward", _backward, _backward_fake)
