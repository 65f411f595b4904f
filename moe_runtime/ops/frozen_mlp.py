"""The experts of one MoE layer over frozen stacks, dense or packed, with low-rank terms: LoRA on
every expert.

    out[t] = sum_k topk_weight[t, k] FFN_{topk_idx[t, k]}(x[t]);   FFN_e as in `ops.moe_mlp`, but each of its products is
    y = W_e x + b_e + B_e A_e x                                              (LoRA, arXiv 2106.09685, Eq. 3, per expert)

Neither W_e + B_e A_e nor a gradient of W_e is ever materialized. With low = x A_e^T [R, r] saved by
the forward pass:

    d_low = dy B_e;   dA_e = d_low^T x;   dB_e = dy^T low;   dx = dy W_e + d_low A_e

B includes the scaling alpha / r. Here A is [E, r, in] and B is [E, r, out], which is B_e^T. PEFT's
A [E r, in] has the same memory layout, and its B [out, r E], whose expert index is the fastest, is
passed as `.t().view(r, E, out).transpose(0, 1)`; any strides are supported. Concatenate several
adapters along r. x, the pre-activation, low, weights and indices are saved for the backward pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime import backends
from moe_runtime.ops import frozen_mlp_torch, packed
from moe_runtime.ops.frozen_rows import (
    SCHEMA,
    FrozenExperts,
    FrozenGradients,
    Pair,
    Stack,
    in_order_of,
    weight_of,
)
from moe_runtime.ops.library import define, kind, register, register_backward, wide_dtype
from moe_runtime.ops.moe_mlp import check_slots


def frozen_mlp(
    x: Tensor,
    experts: FrozenExperts,
    topk_weight: Tensor,
    topk_idx: Tensor,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run x [T, H] through frozen `experts` -> out [T, H] in x's dtype, expert_offsets [E + 1]
    int32.

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
    save = torch.is_grad_enabled() and not backends.exporting()
    save = save and any(
        t is not None and t.requires_grad
        for t in experts.learned()._replace(x=x, topk_weight=topk_weight)
    )
    backend = backends.pick("frozen_mlp", x, backend)
    out, *_, offsets, _ = torch.ops.moe_runtime.frozen_mlp(
        x, topk_weight, topk_idx, *experts.pack(), save, backend
    )
    return out, offsets


def frozen_mlp_reference(x, experts: FrozenExperts, topk_weight, topk_idx):
    """Compute the equation above as a sum over experts with materialized weights, in the inputs'
    dtype, with autograd.
    """
    out = torch.zeros_like(x)

    def linear(rows, stack, pair: Pair | None, bias, e):
        weight = weight_of(stack, e, x.dtype, "reference")
        weight = weight if pair is None else weight + pair.b[e].t() @ pair.a[e]
        return rows @ weight.t() if bias is None else rows @ weight.t() + bias[e]

    for e in range(experts.up.shape[0]):
        h = experts.activation.apply(linear(x, experts.up, experts.up_lora, experts.up_bias, e))
        y = linear(h, experts.down, experts.down_lora, experts.down_bias, e)
        out = out + torch.where(topk_idx == e, topk_weight, 0).sum(1, keepdim=True).to(x.dtype) * y
    return out


def _check(x, experts: FrozenExperts) -> None:
    experts.activation.check()
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"Expected x [T, H] of a floating dtype, but x is {kind(x)}")
    up = experts.up
    down = experts.down
    H = x.shape[1]
    E, _, I = down.shape if len(down.shape) == 3 else (0, 0, 0)
    Z = I * (1 + experts.activation.gated)
    if E == 0 or I == 0 or tuple(up.shape) != (E, Z, H) or tuple(down.shape) != (E, H, I):
        got = f"up is {tuple(up.shape)}, down {tuple(down.shape)}, x {tuple(x.shape)}"
        sizes = (
            f"up [E, {'2I' if experts.activation.gated else 'I'}, H], down [E, H, I] and x [T, H] "
            "with E >= 1 and I >= 1"
        )
        raise ValueError(f"Expected {sizes}, but {got}")
    expected = {"up_bias": (E, Z), "down_bias": (E, H)}
    for name, pair, (out, into) in (
        ("up", experts.up_lora, (Z, H)),
        ("down", experts.down_lora, (H, I)),
    ):
        r = 0 if pair is None else pair.a.shape[1]
        expected |= {f"{name}_a": (E, r, into), f"{name}_b": (E, r, out)}
    for name, tensor in experts.learned()._asdict().items():
        if tensor is None:
            continue
        if tensor.shape != expected[name] or tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(
                f"Expected {expected[name]} {x.dtype} on {x.device}, as x, but {name} is "
                f"{kind(tensor)}"
            )
    for name, stack in (("up", up), ("down", down)):
        if stack.data.requires_grad or stack.data.device != x.device:
            if stack.data.requires_grad:
                got = "requires a gradient"
            else:
                got = f"is on {stack.data.device}"
            raise ValueError(f"Expected a frozen stack on {x.device}, but {name} {got}")
        if stack.format:
            packed.check_tensors(
                stack.data, stack.scales, stack.format, f"{name} {list(stack.shape)}"
            )
            if packed.shape_of(stack.data, stack.format) != tuple(stack.shape):
                raise ValueError(
                    f"data of {name} is {list(stack.data.shape)}, which is not {list(stack.shape)} "
                    f"in {stack.format}"
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


def _kernels_of(backend: str):
    if backend in ("torch", "cpp"):
        return frozen_mlp_torch
    from moe_runtime.ops import frozen_mlp_triton

    return frozen_mlp_triton


def _ranks(experts: FrozenExperts) -> tuple[int, int]:
    return tuple(
        0 if pair is None else pair.a.shape[1] for pair in (experts.up_lora, experts.down_lora)
    )


def _forward(x, topk_weight, topk_idx, *arguments):
    *experts, save, backend = arguments
    run = _kernels_of(backend).forward
    return run(
        x.contiguous(),
        FrozenExperts.unpack(experts),
        topk_weight.contiguous(),
        topk_idx.contiguous(),
        save,
        backend,
    )


def _forward_fake(x, topk_weight, topk_idx, *arguments):
    *experts, save, _ = arguments
    experts = FrozenExperts.unpack(experts)
    R = topk_idx.shape[0] * topk_idx.shape[1]
    kept = R if save else 0
    return (
        x.new_empty(x.shape),
        x.new_empty(kept, experts.up.shape[1]),
        *(x.new_empty(kept, r) for r in _ranks(experts)),
        topk_idx.new_empty(experts.up.shape[0] + 1, dtype=torch.int32),
        topk_idx.new_empty(R, dtype=torch.int32),
    )


def _backward(dout, x, topk_weight, *arguments):
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
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


def _backward_fake(dout, x, topk_weight, *arguments):
    *experts, _, _, _, _, _, needs, _ = arguments
    inputs = FrozenExperts.unpack(experts).learned()._replace(x=x, topk_weight=topk_weight)
    asked = inputs.only(FrozenGradients(*needs)._replace(topk_weight=True))
    return tuple(x.new_empty(0) if t is None else in_order_of(t) for t in asked)


def _setup_context(ctx, inputs, output):
    x, topk_weight, _, *experts, _, ctx.backend = inputs
    _, z, up_low, down_low, expert_offsets, row_slot = output
    ctx.mark_non_differentiable(*output[1:])
    # otherwise autograd would fill a gradient of z's size with zeros
    ctx.set_materialize_grads(False)
    tensors = [
        t for part in experts for t in (part if _is_list(part) else [part]) if isinstance(t, Tensor)
    ]
    ctx.arguments = [
        _Saved(len(a)) if _is_list(a) else _Saved() if isinstance(a, Tensor) else a for a in experts
    ]
    ctx.save_for_backward(x, topk_weight, z, up_low, down_low, expert_offsets, row_slot, *tensors)


def _is_list(argument) -> bool:
    return isinstance(argument, Sequence) and any(isinstance(t, Tensor) for t in argument)


class _Saved:
    """Position of a saved tensor, or of a list of them, among the arguments."""

    def __init__(self, count: int | None = None):
        self.count = count

    def take(self, tensors):
        return next(tensors) if self.count is None else [next(tensors) for _ in range(self.count)]


def _autograd(ctx, dout, *_):
    none = [
        [None] * len(need) if isinstance(need, (list, tuple)) else None
        for need in ctx.needs_input_grad
    ]
    if dout is None:
        return tuple(none)
    saved = ctx.saved_tensors  # read once, as checkpointing unpacks at every access
    (x, topk_weight, *kept, expert_offsets, row_slot), rest = saved[:7], iter(saved[7:])
    arguments = [a.take(rest) if isinstance(a, _Saved) else a for a in ctx.arguments]
    first = 3 + 2 * len(Stack._fields)
    # of x, topk_weight, biases and pairs among the op's arguments
    places = [0, 1, *range(first, first + 6)]
    needs = [bool(ctx.needs_input_grad[at]) for at in places]
    grads = torch.ops.moe_runtime.frozen_mlp_backward(
        dout, x, topk_weight, *arguments, *kept, expert_offsets, row_slot, needs, ctx.backend
    )
    for at, need, grad in zip(places, needs, grads):
        none[at] = grad if need else None
    return tuple(none)


register("frozen_mlp", _forward, _forward_fake, _autograd, _setup_context)
register_backward("frozen_mlp_backward", _backward, _backward_fake)
