"""A whole MoE layer with a linear router as one op: one graph node, and the router's part of dx costs no pass of its own.

    router_logits = x W_router^T;   topk_weight, topk_idx = route(router_logits);   out = moe_mlp(x, ...)
    dx[t] = sum_k dx_row[slot_row[t, k]] + dlogits[t] W_router,   dW_router = dlogits^T x

The equations of the two halves: `moe_runtime.ops.routing`, `moe_runtime.ops.moe_mlp`. dlogits is what `route` passes back from
the gradient of the weights, plus what a balance loss sends to the logits.
"""

from typing import NamedTuple

import torch

from moe_runtime.config import GATES, SHARED_GATES, SHARED_MODES, check_choice
from moe_runtime.ops import routing
from moe_runtime.ops.activation import SCHEMA, Activation
from moe_runtime.ops.expert_rows import Experts
from moe_runtime.ops.library import LIB, register, register_backward
from moe_runtime.ops.moe_mlp import check_weights, kernels_of, pick


class MoEOutput(NamedTuple):
    """What `moe_layer` returns; all but topk_idx carry gradients."""

    out: torch.Tensor  # [T, H]
    router_logits: torch.Tensor  # [T, E or E - 1], in x's dtype
    topk_weight: torch.Tensor  # [T, K] float32
    topk_idx: torch.Tensor  # [T, K] int32


def moe_layer(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k: int,
    gate: str = "xft",
    *,
    act: str = "silu",
    gated: bool = True,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    shared: str = "group",
    recompute: bool = False,
    backend: str | None = None,
) -> MoEOutput:
    """Route x [T, H] by `router_weight` [E, H] ([E - 1, H] for xft, nonorm) and run it through its experts.

    The other arguments are those of `route` and `moe_mlp`; router and experts have x's dtype. Raises ValueError for shapes,
    dtypes or devices that do not fit.
    """
    check_choice("gate", gate, GATES)
    check_choice("shared", shared, SHARED_MODES)
    activation = Activation(act, gated, limit, up_offset, interleaved)
    check_weights(x, gate_up_proj, down_proj, activation, gate_up_bias, down_bias)
    wanted = (gate_up_proj.shape[0] - (gate in SHARED_GATES), x.shape[1])
    if router_weight.shape != wanted or router_weight.dtype != x.dtype or router_weight.device != x.device:
        got = f"{tuple(router_weight.shape)} {router_weight.dtype} on {router_weight.device}"
        raise ValueError(f"router_weight is {got}; want {wanted} {x.dtype} on {x.device}")
    routing.check_top_k(top_k, wanted[0], gate)
    if shared == "dense" and gate not in SHARED_GATES:
        raise ValueError(
            f"shared is 'dense', gate is {gate!r}; want one with a shared expert: {', '.join(SHARED_GATES)}"
        )
    inputs = (x, router_weight, gate_up_proj, down_proj, gate_up_bias, down_bias)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    outputs = torch.ops.moe_runtime.moe_layer(
        *inputs, top_k, gate, *activation, shared, needs_grad and not recompute,
        pick(x, gate_up_proj.shape[0], backend, ("route", "dispatch", "combine")),
    )  # fmt: skip
    return MoEOutput(*outputs[:4])


LIB.define(
    "moe_layer(Tensor x, Tensor router_weight, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, int top_k, "
    f"str gate, {SCHEMA}, str shared, bool save, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIB.define(
    "moe_layer_backward(Tensor dout, Tensor? dlogits, Tensor? dweight, Tensor x, Tensor router_weight, Tensor up, Tensor down, "
    "Tensor? up_bias, Tensor? down_bias, Tensor router_logits, Tensor topk_weight, Tensor topk_idx, Tensor z, "
    f"Tensor expert_offsets, Tensor row_slot, bool[6] needs, str gate, {SCHEMA}, str shared, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _router(backend: str) -> str:
    """Return the backend of the router: csrc/cpu has none of its own."""
    return "torch" if backend == "cpp" else backend


def _forward(
    x, router_weight, up, down, up_bias, down_bias, top_k, gate,
    act, gated, limit, up_offset, interleaved, shared, save, backend,
):  # fmt: skip
    activation = Activation(act, gated, limit, up_offset, interleaved)
    experts = Experts(up, down, up_bias, down_bias, activation, shared)
    x = x.contiguous()
    logits = torch.mm(x, router_weight.t())
    weight, idx = routing.route_kernel(logits, None, top_k, gate, _router(backend))
    out, z, offsets, row_slot = kernels_of(backend).forward(x, experts, weight, idx, save)
    return out, logits, weight, idx, z, offsets, row_slot


def _forward_fake(
    x, router_weight, up, down, up_bias, down_bias, top_k, gate,
    act, gated, limit, up_offset, interleaved, shared, save, backend,
):  # fmt: skip
    T, R = x.shape[0], x.shape[0] * top_k
    indices = [x.new_empty(size, dtype=torch.int32) for size in ((T, top_k), (up.shape[0] + 1,), (R,))]
    return (
        x.new_empty(x.shape),
        x.new_empty(T, router_weight.shape[0]),
        x.new_empty(T, top_k, dtype=torch.promote_types(x.dtype, torch.float32)),
        indices[0],
        x.new_empty(R if save else 0, up.shape[1]),
        *indices[1:],
    )


def _backward(
    dout, dlogits, dweight, x, router_weight, up, down, up_bias, down_bias, router_logits, topk_weight, topk_idx,
    z, expert_offsets, row_slot, needs, gate, act, gated, limit, up_offset, interleaved, shared, backend,
):  # fmt: skip
    activation = Activation(act, gated, limit, up_offset, interleaved)
    experts = Experts(up, down, up_bias, down_bias, activation, shared)
    x, total = x.contiguous(), None

    def router(drow_weight):
        nonlocal total
        through = drow_weight if dweight is None else drow_weight + dweight
        total = routing.route_backward_kernel(through, router_logits, topk_idx, gate, _router(backend))
        total = total if dlogits is None else total + dlogits
        return total, router_weight

    needs_experts = [needs[0], needs[2], needs[3], True, needs[4], needs[5]]
    grads = kernels_of(backend).backward(
        dout.contiguous(), x, experts, topk_weight, z, expert_offsets, row_slot, needs_experts, router
    )
    drouter = torch.mm(total.t(), x) if needs[1] else None
    parts = (grads.x, drouter, grads.up, grads.down, grads.up_bias, grads.down_bias)
    return tuple(x.new_empty(0) if grad is None else grad for grad in parts)


def _backward_fake(dout, dlogits, dweight, x, router_weight, up, down, up_bias, down_bias, *rest):
    needs = rest[6]
    inputs = (x, router_weight, up, down, up_bias, down_bias)
    return tuple(x.new_empty(0) if t is None or not need else t.new_empty(t.shape) for t, need in zip(inputs, needs))


def _setup_context(ctx, inputs, output):
    tensors, (ctx.gate, *ctx.activation, ctx.shared, _, ctx.backend) = inputs[:6], inputs[7:]
    out, logits, weight, idx, z, offsets, row_slot = output
    ctx.mark_non_differentiable(idx, z, offsets, row_slot)
    ctx.set_materialize_grads(False)
    ctx.shape = out.shape
    ctx.save_for_backward(*tensors, logits, weight, idx, z, offsets, row_slot)


def _autograd(ctx, dout, dlogits, dweight, *_):
    saved = ctx.saved_tensors
    if dout is None:  # only a loss on the logits or the weights
        dout = saved[0].new_zeros(ctx.shape)
    needs = list(ctx.needs_input_grad[:6])
    op = torch.ops.moe_runtime.moe_layer_backward
    grads = op(dout, dlogits, dweight, *saved, needs, ctx.gate, *ctx.activation, ctx.shared, ctx.backend)
    return *(grad if need else None for grad, need in zip(grads, needs)), *[None] * 10


register("moe_layer", _forward, _forward_fake, _autograd, _setup_context)
register_backward("moe_layer_backward", _backward, _backward_fake)
