"""A whole MoE layer with a linear router as one op: one graph node, and the router's part of dx
needs no separate pass.

    router_logits = x W_router^T;   topk_weight, topk_idx = route(router_logits);   out = moe_mlp(x, ...)
    dx[t] = sum_k dx_row[slot_row[t, k]] + dlogits[t] W_router,   dW_router = dlogits^T x

See `moe_runtime.ops.routing` and `moe_runtime.ops.moe_mlp` for the equations. dlogits is the
gradient of the weights through `route`, plus that of a balance loss.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime import backends
from moe_runtime.config import GATES, SHARED_GATES, check_choice
from moe_runtime.ops import routing
from moe_runtime.ops.expert_rows import (
    NOWHERE,
    SCHEMA,
    Experts,
    Gradients,
    accumulating,
    gradients_so_far,
    in_layout_of,
)
from moe_runtime.ops.library import define, kind, register, register_backward, wide_dtype
from moe_runtime.ops.moe_mlp import (
    absent_as_empty,
    adding_to,
    check_experts,
    kernels_of,
    pick,
    run_experts,
)


class MoEOutput(NamedTuple):
    """Result of `moe_layer`; everything except topk_idx is differentiable."""

    out: Tensor  # [T, H]
    router_logits: Tensor  # [T, E or E - 1], in x's dtype
    topk_weight: Tensor  # [T, K] float32
    topk_idx: Tensor  # [T, K] int32


def moe_layer(
    x: Tensor,
    router_weight: Tensor,
    experts: Experts,
    top_k: int,
    gate: str = "xft",
    *,
    recompute: bool = False,
    backend: str | None = None,
) -> MoEOutput:
    """Route x [T, H] by `router_weight` [E, H] ([E - 1, H] for xft, nonorm) and run it through
    `experts`, all trainable.

    The other arguments are those of `route` and `moe_mlp`; router and experts have x's dtype.
    Raises ValueError for mismatched shapes, dtypes or devices.
    """
    check_choice("gate", gate, GATES)
    check_experts(x, experts)
    wanted = (experts.up.shape[0] - (gate in SHARED_GATES), x.shape[1])
    if (
        router_weight.shape != wanted
        or router_weight.dtype != x.dtype
        or router_weight.device != x.device
    ):
        raise ValueError(
            f"Expected {wanted} {x.dtype} on {x.device}, but router_weight is {kind(router_weight)}"
        )
    routing.check_top_k(top_k, wanted[0], gate)
    if experts.shared == "dense" and gate not in SHARED_GATES:
        raise ValueError(
            f"shared='dense' requires gate to be one of {', '.join(SHARED_GATES)}, but got {gate!r}"
        )
    if backends.portable() is not None:
        logits = torch.mm(x, router_weight.t())
        routed = routing.route(logits, top_k, gate)
        return MoEOutput(run_experts(x, experts, *routed)[0], logits, *routed)
    save = torch.is_grad_enabled() and not recompute and not backends.exporting()
    save = save and (x.requires_grad or router_weight.requires_grad or experts.requires_grad())
    backend = pick(x, experts.up.shape[0], backend, ("route", "dispatch", "combine"))
    outputs = torch.ops.moe_runtime.moe_layer(
        x, router_weight, *experts.pack(), top_k, gate, save, backend
    )
    return MoEOutput(*outputs[:4])


define(
    f"moe_layer(Tensor x, Tensor router_weight, {SCHEMA}, int top_k, str gate, bool save, str "
    "backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
define(
    "moe_layer_backward(Tensor dout, Tensor? dlogits, Tensor? dweight, Tensor x, Tensor "
    f"router_weight, {SCHEMA}, Tensor router_logits, Tensor topk_weight, Tensor topk_idx, Tensor "
    "z, Tensor expert_offsets, Tensor row_slot, bool need_router, bool[6] needs, str gate, str "
    "backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _router(backend: str) -> str:
    """Return the backend of the router, as csrc/cpu has no router kernel."""
    return "torch" if backend == "cpp" else backend


def _forward(x, router_weight, *arguments):
    *experts, top_k, gate, save, backend = arguments
    x = x.contiguous()
    logits = torch.mm(x, router_weight.t())
    experts = Experts.unpack(experts)
    kernels = kernels_of(backend)
    if backend == "triton":
        weight, idx, *rest = kernels.layer_forward(x, experts, logits, top_k, gate, save)
    else:
        weight, idx = routing.route_kernel(logits, None, top_k, gate, _router(backend))
        rest = kernels.forward(x, experts, weight, idx, save)
    out, z, offsets, row_slot = rest
    return out, logits, weight, idx, z, offsets, row_slot


def _forward_fake(x, router_weight, *arguments):
    *experts, top_k, _, save, _ = arguments
    (E, Z, _), T, R = experts[0].shape, x.shape[0], x.shape[0] * top_k
    indices = [x.new_empty(size, dtype=torch.int32) for size in ((T, top_k), (E + 1,), (R,))]
    return (
        x.new_empty(x.shape),
        x.new_empty(T, router_weight.shape[0]),
        x.new_empty(T, top_k, dtype=wide_dtype(x.dtype)),
        indices[0],
        x.new_empty(R if save else 0, Z),
        *indices[1:],
    )


def _backward(dout, dlogits, dweight, x, router_weight, *arguments, into: Gradients = NOWHERE):
    (
        *experts,
        router_logits,
        topk_weight,
        topk_idx,
        z,
        expert_offsets,
        row_slot,
        need_router,
        needs,
        gate,
        backend,
    ) = arguments
    x = x.contiguous()
    total = None

    def router(drow_weight):
        nonlocal total
        through = drow_weight if dweight is None else drow_weight + dweight
        total = routing.route_backward_kernel(
            through, router_logits, topk_idx, gate, _router(backend)
        )
        total = total if dlogits is None else total + dlogits
        return total, router_weight

    grads = kernels_of(backend).backward(
        dout.contiguous(),
        x,
        Experts.unpack(experts),
        topk_weight,
        z,
        expert_offsets,
        row_slot,
        Gradients(*needs),
        router,
        into,
    )
    drouter = torch.mm(total.t(), x) if need_router else None
    return absent_as_empty((drouter, *grads._replace(topk_weight=None)), x)


def _backward_fake(dout, dlogits, dweight, x, router_weight, *arguments):
    *experts, _, _, _, _, _, _, need_router, needs, _, _ = arguments
    inputs = Experts.unpack(experts).learned()._replace(x=x).only(Gradients(*needs))
    grads = (
        None if t is None else in_layout_of(t, t.new_empty)
        for t in (router_weight if need_router else None, *inputs)
    )
    return absent_as_empty(grads, x)


def _setup_context(ctx, inputs, output):
    x, router_weight, *experts, _, ctx.gate, _, ctx.backend = inputs
    out, logits, weight, idx, z, offsets, row_slot = output
    ctx.mark_non_differentiable(idx, z, offsets, row_slot)
    ctx.set_materialize_grads(False)
    ctx.shape = out.shape
    experts = Experts.unpack(experts)
    ctx.accumulating = tuple(map(accumulating, experts.learned()[1:3]))
    *tensors, ctx.activation, ctx.shared = experts
    ctx.save_for_backward(x, router_weight, *tensors, logits, weight, idx, z, offsets, row_slot)


def _autograd(ctx, dout, dlogits, dweight, *_):
    x, router_weight, *tensors, logits, weight, idx, z, offsets, row_slot = ctx.saved_tensors
    if dout is None:  # only a loss on the logits or the weights
        dout = x.new_zeros(ctx.shape)
    experts = Experts(*tensors, ctx.activation, ctx.shared)
    need_x, need_router, *flags, _, _, _, _ = ctx.needs_input_grad
    needs = experts.needs(need_x, False, flags)
    into = gradients_so_far(experts.learned(), ctx.accumulating)
    op = torch.ops.moe_runtime.moe_layer_backward if into is NOWHERE else adding_to(into, _backward)
    drouter, *grads = op(
        dout,
        dlogits,
        dweight,
        x,
        router_weight,
        *experts.pack(),
        logits,
        weight,
        idx,
        z,
        offsets,
        row_slot,
        need_router,
        needs,
        ctx.gate,
        ctx.backend,
    )
    grads = Gradients(*grads).only(needs).besides(into)
    return (
        grads.x,
        drouter if need_router else None,
        *experts.in_place(grads),
        None,
        None,
        None,
        None,
    )


register("moe_layer", _forward, _forward_fake, _autograd, _setup_context)
register_backward("moe_layer_backward", _backward, _backward_fake)
