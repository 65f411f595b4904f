"""Token-to-expert routing: select K experts and their weights per token from router logits.

With s = softmax_r(router_logits[t, r]) over the routed experts, s_max = max_r s_r and S = the
experts of the largest logits:

    xft                  w_r = softmax_{r in S}(s_r) * s_max     XFT, Eq. (2)
    nonorm               w_r = s_r                               XFT, Table 4 "- Normalization"
    topk_softmax         w_r = softmax_{r in S}(router_logits_r) XFT, Table 4 "- Shared Expert"
    softmax_topk         w_r = s_r                               XFT, Eq. (1)
    softmax_topk_renorm  w_r = s_r / sum_{r in S} s_r            Mixtral, UpIT
    sigmoid_topk         w_r = sigmoid(router_logits_r)          DeepSeek-V3 without its scale

The shared expert of xft and nonorm has the weight 1 - s_max.

The softmax of the XFT paper is over the selected *probabilities*, not over the logits. With xft and
nonorm, expert 0 is shared: router_logits has E - 1 columns, column r belongs to expert r + 1, and K
includes the shared expert, which comes last. Experts are in descending order of logit, ties to the
lower id, NaN first. The math is float32 for every dtype of the logits (float64 stays float64),
without a float32 copy of the logits. Experts selected by the caller, topk_idx, replace S in their
order, and s_max is that of the first one: passing the ids that `route` returned does not change the
result. An expert may be given several times in a row; S then contains it as often.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime import backends
from moe_runtime.config import GATES, SHARED_GATES, check_choice
from moe_runtime.ops import cuda_kernels
from moe_runtime.ops.library import call_op, define, kind, register, register_backward, wide_dtype


class Routing(NamedTuple):
    """The weight and the expert of each of a token's K slots.

    Attributes:
        topk_weight: [T, K] float32, or float64 with float64 logits.
        topk_idx: [T, K] int32.
    """

    topk_weight: Tensor  # [T, K] float32
    topk_idx: Tensor  # [T, K] int32


def route(
    router_logits: Tensor,
    top_k: int,
    gate: str = "xft",
    noise: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str | None = None,
    topk_idx: Tensor | None = None,
) -> Routing:
    """Select the experts of each token and compute their weights, best expert first.

    The module has the equation of each gate; the default is XFT's Eq. (2). Differentiable in the
    logits and the noise. The math is in float32, or in float64 with float64 logits.

    Args:
        router_logits: [T, E]; [T, E - 1] for "xft" and "nonorm", whose shared expert has no logit.
        top_k: Experts per token K, a shared expert included.
        gate: "xft", "nonorm", "topk_softmax", "softmax_topk", "softmax_topk_renorm" or
            "sigmoid_topk".
        noise: Added to the logits, in their shape.
        bias: [E], for "sigmoid_topk": affects which experts are selected, but not their weights.
        backend: "torch", "cpp", "triton" or "cuda"; None selects the default for the device.
        topk_idx: [T, K], experts to use instead of selecting them; those of an earlier call give
            its result.

    Returns:
        Weights and experts [T, K]; a shared expert is in the last slot.

    Raises:
        ValueError: If a shape does not fit, or top_k or gate is invalid.

    Example:
        >>> weight, idx = route(torch.randn(10, 7), top_k=6)  # E = 8, one of them shared
        >>> weight.shape, idx.dtype
        (torch.Size([10, 6]), torch.int32)
    """
    _check(
        router_logits,
        top_k,
        gate,
        noise,
        bias,
        topk_idx,
    )
    if noise is not None:
        router_logits = router_logits + noise
    if router_logits.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        router_logits = router_logits.float()
    if backends.portable() is not None:
        return route_reference(
            _wide(router_logits),
            top_k,
            gate,
            bias,
            topk_idx,
        )
    routed = router_logits.shape[1]
    chosen = backends.pick("route", router_logits, backend, cuda_fits=cuda_kernels.fits(routed))
    if chosen == "cuda":
        cuda_kernels.check_experts(routed)
    if topk_idx is not None:
        topk_idx = topk_idx.to(router_logits.device, torch.int32)
        weight = torch.ops.moe_runtime.route_to(router_logits, topk_idx, gate, chosen)
        return Routing(weight, topk_idx)
    return Routing(
        *call_op(
            "route",
            router_logits,
            bias,
            top_k,
            gate,
            chosen,
        )
    )


def check_top_k(top_k: int, routed: int, gate: str) -> None:
    """Raise ValueError unless `gate` can select top_k of `routed` experts and the shared one."""
    shared = int(gate in SHARED_GATES)
    if not (1 <= top_k - shared <= routed or (top_k == shared == 1 and routed == 0)):
        bounds = "from 2 to E, including the shared expert," if shared else "from 1 to E"
        raise ValueError(
            f"top_k must be {bounds} for gate {gate!r} and router_logits [T, {routed}], but got "
            f"{top_k}"
        )


def _check(
    router_logits: Tensor,
    top_k: int,
    gate: str,
    noise: Tensor | None,
    bias: Tensor | None,
    topk_idx: Tensor | None,
) -> None:
    check_choice("gate", gate, GATES)
    if router_logits.dim() != 2 or not router_logits.is_floating_point():
        raise ValueError(
            "Expected router_logits [T, E] of a floating dtype, but router_logits is "
            f"{kind(router_logits)}"
        )
    routed = router_logits.shape[1]
    check_top_k(top_k, routed, gate)
    shape = (router_logits.shape[0], top_k)
    fits = noise is None or noise.shape == router_logits.shape
    if bias is not None:
        fits = fits and gate == "sigmoid_topk" and bias.shape == router_logits.shape[1:]
    if topk_idx is not None:
        fits = fits and topk_idx.shape == shape and not topk_idx.is_floating_point()
    if not fits:
        raise ValueError(
            f"Expected noise {tuple(router_logits.shape)}, bias [{routed}] with gate "
            f"'sigmoid_topk' alone and topk_idx {shape} of integers, but noise is {kind(noise)}, "
            f"bias is {kind(bias)}, gate is {gate!r} and topk_idx is {kind(topk_idx)}"
        )


def route_reference(
    router_logits: Tensor,
    top_k: int,
    gate: str = "xft",
    bias: Tensor | None = None,
    topk_idx: Tensor | None = None,
) -> Routing:
    """Compute the equations above line by line, in the logits' dtype, with autograd.

    `router_logits` [T, E or E - 1], `bias` and `topk_idx` are as in `route`.
    """
    k = top_k - (gate in SHARED_GATES)
    if topk_idx is not None:
        idx = topk_idx[:, :k].long() - int(gate in SHARED_GATES)
    else:
        choice = router_logits if bias is None else router_logits.sigmoid() + bias
        if backends.portable() is None:
            # unlike topk, sort orders equal values and gives distinct ids for NaN rows
            idx = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        else:  # other runtimes know topk
            idx = choice.topk(k, -1).indices
    selected_logits = router_logits.gather(1, idx)
    s = router_logits.softmax(-1).gather(1, idx)
    s_max = s[:, :1] if k else s.new_zeros(s.shape[0], 1)
    if gate == "xft":
        weight = s.softmax(-1) * s_max
    elif gate in ("nonorm", "softmax_topk"):
        weight = s
    elif gate == "sigmoid_topk":
        weight = selected_logits.sigmoid()
    else:
        # softmax_topk_renorm too: s / sum of s would divide 0 by 0 where every probability of the
        # caller's experts underflows
        weight = selected_logits.softmax(-1)
    if gate in SHARED_GATES:
        shared = torch.zeros_like(idx[:, :1]) if k else idx.new_zeros(idx.shape[0], 1)
        weight = torch.cat([weight, 1 - s_max], -1)
        idx = torch.cat([idx + 1, shared], -1)
    return Routing(weight, idx.int())


define(
    "route(Tensor router_logits, Tensor? bias, int top_k, str gate, str backend) -> (Tensor, "
    "Tensor)"
)
define("route_to(Tensor router_logits, Tensor topk_idx, str gate, str backend) -> Tensor")
define(
    "route_backward(Tensor dweight, Tensor router_logits, Tensor topk_idx, str gate, str backend, "
    "bool forced=False) -> Tensor"
)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(wide_dtype(logits.dtype))


def _kernels(backend: str, router_logits: Tensor) -> Any:
    """Return the module of the launchers; None if torch computes.

    torch also computes if the shared expert is the only one.
    """
    if backend == "torch" or not router_logits.shape[1]:
        return None
    if backend == "cuda":
        return cuda_kernels
    from moe_runtime.kernels import routing

    return routing


def route_kernel(
    router_logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    gate: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Run the op `route` without checks: `router_logits` [T, E or E - 1] -> weights, ids [T, K]."""
    if kernels := _kernels(backend, router_logits):
        return kernels.route_forward(
            router_logits,
            bias,
            top_k,
            gate,
            int(gate in SHARED_GATES),
        )
    weight, idx = route_reference(_wide(router_logits), top_k, gate, bias)
    return weight.contiguous(), idx.contiguous()


def _route_fake(
    router_logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    gate: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    T = router_logits.shape[0]
    weight = router_logits.new_empty(T, top_k, dtype=wide_dtype(router_logits.dtype))
    return weight, router_logits.new_empty(T, top_k, dtype=torch.int32)


def route_to_kernel(router_logits: Tensor, topk_idx: Tensor, gate: str, backend: str) -> Tensor:
    """Return topk_weight [T, K] of the given experts `topk_idx` [T, K]."""
    K = topk_idx.shape[1]
    if kernels := _kernels(backend, router_logits):
        shared = int(gate in SHARED_GATES)
        return kernels.route_forward(
            router_logits,
            None,
            K,
            gate,
            shared,
            topk_idx,
        )[0]
    routing = route_reference(_wide(router_logits), K, gate, topk_idx=topk_idx)
    return routing.topk_weight.contiguous()


def route_backward_kernel(
    dweight: Tensor,
    router_logits: Tensor,
    topk_idx: Tensor,
    gate: str,
    backend: str,
    forced: bool = False,
) -> Tensor:
    """Return the gradient of router_logits from `dweight` [T, K].

    `forced` means that the caller of `route` passed `topk_idx`.
    """
    if kernels := _kernels(backend, router_logits):
        shared = int(gate in SHARED_GATES)
        return kernels.route_backward(
            dweight,
            router_logits,
            topk_idx,
            gate,
            shared,
            forced,
        )
    return _logits_gradient(dweight, router_logits.contiguous(), topk_idx, gate)


def _logits_gradient(dweight: Tensor, router_logits: Tensor, topk_idx: Tensor, gate: str) -> Tensor:
    """Compute the gradient of `route` for all logits in closed form, itself differentiable."""
    grad = _wide_gradient(dweight, _wide(router_logits), topk_idx, gate)
    return grad.to(router_logits.dtype)


def _wide_gradient(dweight: Tensor, router_logits: Tensor, topk_idx: Tensor, gate: str) -> Tensor:
    shared = int(gate in SHARED_GATES)
    k = topk_idx.shape[1] - shared
    idx = topk_idx[:, :k].long() - shared
    dw = dweight[:, :k]
    if k == 0:
        return torch.zeros_like(router_logits)
    # the gradients of slots with the same expert add up: the caller's ids may repeat
    if gate in ("topk_softmax", "softmax_topk_renorm"):
        w = router_logits.gather(1, idx).softmax(-1)
        dselected = w * (dw - (w * dw).sum(-1, keepdim=True))
        return torch.zeros_like(router_logits).scatter_add(1, idx, dselected)
    if gate == "sigmoid_topk":
        w = router_logits.gather(1, idx).sigmoid()
        return torch.zeros_like(router_logits).scatter_add(1, idx, dw * w * (1 - w))
    p = router_logits.softmax(-1)
    ds = dw.clone()
    if gate == "xft":
        s = p.gather(1, idx)
        q = s.softmax(-1)
        s_max = s[:, :1]
        ds = s_max * q * (dw - (q * dw).sum(-1, keepdim=True))
        ds[:, 0] += (q * dw).sum(-1)
    if shared:
        ds[:, 0] -= dweight[:, k]
    dp = torch.zeros_like(p).scatter_add(1, idx, ds)
    return p * (dp - (dp * p).sum(-1, keepdim=True))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    router_logits, _, _, ctx.gate, ctx.backend = inputs
    ctx.save_for_backward(router_logits, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dweight: Tensor | None, _: Any) -> tuple:
    return _dlogits(ctx, dweight, False), None, None, None, None


def _dlogits(ctx: Any, dweight: Tensor | None, forced: bool) -> Tensor | None:
    if dweight is None:
        return None
    router_logits, topk_idx = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True: the op has no gradient of its own
        return _logits_gradient(dweight, router_logits, topk_idx, ctx.gate)
    return torch.ops.moe_runtime.route_backward(
        dweight,
        router_logits,
        topk_idx,
        ctx.gate,
        ctx.backend,
        forced,
    )


def _route_to_fake(router_logits: Tensor, topk_idx: Tensor, gate: str, backend: str) -> Tensor:
    return router_logits.new_empty(topk_idx.shape, dtype=wide_dtype(router_logits.dtype))


def _setup_context_to(ctx: Any, inputs: tuple, output: Tensor) -> None:
    router_logits, topk_idx, ctx.gate, ctx.backend = inputs
    ctx.save_for_backward(router_logits, topk_idx)


def _autograd_to(ctx: Any, dweight: Tensor | None) -> tuple:
    return _dlogits(ctx, dweight, True), None, None, None


register(
    "route",
    route_kernel,
    _route_fake,
    _autograd,
    _setup_context,
)
register(
    "route_to",
    route_to_kernel,
    _route_to_fake,
    _autograd_to,
    _setup_context_to,
)
register_backward(
    "route_backward",
    route_backward_kernel,
    lambda dweight, logits, *_: logits.new_empty(logits.shape),
)
