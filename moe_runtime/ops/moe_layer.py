"""A whole MoE layer with a linear router as one op.

It is one node of a graph, and the router's part of dx needs no separate pass.

    router_logits = x W_router^T
    topk_weight, topk_idx = route(router_logits)
    out = moe_mlp(x, ..., topk_weight, topk_idx)
    dx[t] = sum_k dx_row[slot_row[t, k]] + dlogits[t] W_router,   dW_router = dlogits^T x

See `moe_runtime.ops.routing` and `moe_runtime.ops.moe_mlp` for the equations. dlogits is the
gradient of the weights through `route`, plus that of a balance loss.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime import backends
from moe_runtime.config import GATES, SHARED_GATES, check_choice
from moe_runtime.ops import routing
from moe_runtime.ops.expert_rows import (
    NOWHERE,
    SCHEMA,
    ExpertStacks,
    Gradients,
    check_like,
    gradients_so_far,
)
from moe_runtime.ops.library import (
    Tensors,
    call_op,
    define,
    register,
    register_backward,
    wide_dtype,
)
from moe_runtime.ops.moe_mlp import (
    absent_as_empty,
    adding_to,
    check_experts,
    fake_gradients,
    kernels_of,
    pick,
    remember_leaves,
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
    experts: ExpertStacks,
    top_k: int,
    gate: str = "xft",
    *,
    recompute: bool = False,
    backend: str | None = None,
) -> MoEOutput:
    """Route x [T, H] by `router_weight` and run it through `experts`, all trainable.

    `router_weight` is [E, H], or [E - 1, H] for xft and nonorm. The other arguments are those of
    `route` and `moe_mlp`; router and experts have x's dtype. Raises ValueError for mismatched
    shapes, dtypes or devices.
    """
    check_choice("gate", gate, GATES)
    check_experts(x, experts)
    shape = (experts.up.shape[0] - (gate in SHARED_GATES), x.shape[1])
    check_like(x, [("router_weight", router_weight, shape)])
    routing.check_top_k(top_k, shape[0], gate)
    if experts.shared == "dense" and gate not in SHARED_GATES:
        raise ValueError(
            f"shared='dense' requires gate to be one of {', '.join(SHARED_GATES)}, but got {gate!r}"
        )
    if backends.portable() is not None:
        logits = torch.mm(x, router_weight.t())
        weight, idx = routing.route(logits, top_k, gate)
        return MoEOutput(run_experts(x, experts, weight, idx)[0], logits, weight, idx)
    save = torch.is_grad_enabled() and not recompute and not backends.exporting()
    save = save and (x.requires_grad or router_weight.requires_grad or experts.requires_grad())
    backend = pick(x, experts.up.shape[0], backend, ("route", "dispatch", "combine"))
    outputs = call_op(
        "moe_layer",
        x,
        router_weight,
        *experts.pack(),
        top_k,
        gate,
        save,
        backend,
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


def _forward(x: Tensor, router_weight: Tensor, *arguments: Any) -> Tensors:
    *tensors, top_k, gate, save, backend = arguments
    x = x.contiguous()
    logits = torch.mm(x, router_weight.t())
    experts = ExpertStacks.unpack(tensors)
    kernels = kernels_of(backend)
    if backend == "triton":
        weight, idx, *rest = kernels.layer_forward(
            x,
            experts,
            logits,
            top_k,
            gate,
            save,
        )
    else:
        weight, idx = routing.route_kernel(
            logits,
            None,
            top_k,
            gate,
            _router(backend),
        )
        rest = kernels.forward(x, experts, weight, idx, save)
    out, z, offsets, row_slot = rest
    return out, logits, weight, idx, z, offsets, row_slot


def _forward_fake(x: Tensor, router_weight: Tensor, *arguments: Any) -> Tensors:
    *experts, top_k, _, save, _ = arguments
    E, Z, _ = experts[0].shape
    T = x.shape[0]
    R = T * top_k
    return (
        x.new_empty(x.shape),
        x.new_empty(T, router_weight.shape[0]),
        x.new_empty(T, top_k, dtype=wide_dtype(x.dtype)),
        x.new_empty(T, top_k, dtype=torch.int32),
        x.new_empty(R if save else 0, Z),
        x.new_empty(E + 1, dtype=torch.int32),
        x.new_empty(R, dtype=torch.int32),
    )


def _backward(
    dout: Tensor,
    dlogits: Tensor | None,
    dweight: Tensor | None,
    x: Tensor,
    router_weight: Tensor,
    *arguments: Any,
    into: Gradients = NOWHERE,
) -> Tensors:
    *tensors, logits, topk_weight, topk_idx, z, expert_offsets, row_slot = arguments[:-4]
    need_router, needs, gate, backend = arguments[-4:]
    x = x.contiguous()
    drouter = None

    def router(dweight_of_slots: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal drouter
        if dweight is not None:
            dweight_of_slots = dweight_of_slots + dweight
        total = routing.route_backward_kernel(
            dweight_of_slots,
            logits,
            topk_idx,
            gate,
            _router(backend),
        )
        if dlogits is not None:
            total = total + dlogits
        if need_router:
            drouter = torch.mm(total.t(), x)
        return total, router_weight

    grads = kernels_of(backend).backward(
        dout.contiguous(),
        x,
        ExpertStacks.unpack(tensors),
        topk_weight,
        z,
        expert_offsets,
        row_slot,
        Gradients(*needs),
        router,
        into,
    )
    return absent_as_empty((drouter, *grads._replace(topk_weight=None)), x)


def _backward_fake(
    dout: Tensor,
    dlogits: Tensor | None,
    dweight: Tensor | None,
    x: Tensor,
    router_weight: Tensor,
    *arguments: Any,
) -> Tensors:
    *experts, _, _, _, _, _, _, need_router, needs, _, _ = arguments
    inputs = ExpertStacks.unpack(experts).learned(x).only(Gradients(*needs))
    return fake_gradients((router_weight if need_router else None, *inputs), x)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, router_weight, *arguments, _, ctx.gate, _, ctx.backend = inputs
    out, logits, weight, idx, z, offsets, row_slot = output
    ctx.mark_non_differentiable(idx, z, offsets, row_slot)
    ctx.set_materialize_grads(False)
    ctx.shape = out.shape
    *tensors, ctx.activation, ctx.shared = remember_leaves(ctx, arguments)
    ctx.save_for_backward(
        x,
        router_weight,
        *tensors,
        logits,
        weight,
        idx,
        z,
        offsets,
        row_slot,
    )


def _autograd(
    ctx: Any,
    dout: Tensor | None,
    dlogits: Tensor | None,
    dweight: Tensor | None,
    *_: Any,
) -> tuple:
    x, router_weight, *tensors, logits, weight, idx, z, offsets, row_slot = ctx.saved_tensors
    if dout is None:  # only a loss on the logits or the weights
        dout = x.new_zeros(ctx.shape)
    experts = ExpertStacks._make((*tensors, ctx.activation, ctx.shared))
    need_x, need_router, *flags, _, _, _, _ = ctx.needs_input_grad
    needs = experts.needs(need_x, False, flags)
    into = gradients_so_far(experts.learned(), ctx.accumulating)
    op: Any = torch.ops.moe_runtime.moe_layer_backward
    if into is not NOWHERE:
        op = adding_to(into, _backward)
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
    if not need_router:
        drouter = None
    grads = Gradients(*grads).only(needs).besides(into)
    return grads.x, drouter, *experts.in_place(grads), None, None, None, None


register(
    "moe_layer",
    _forward,
    _forward_fake,
    _autograd,
    _setup_context,
)
register_backward("moe_layer_backward", _backward, _backward_fake)
