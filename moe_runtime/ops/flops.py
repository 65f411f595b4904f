"""FLOP formulas of the ops for torch.utils.flop_counter.FlopCounterMode, which count matrix
products.

A product of [m, k] and [k, n] counts 2 m n k, and elementwise ops count 0, as in torch. T tokens
with K slots are R = T K rows for any routing: a dropped slot, or the weight gradient of a frozen
expert, is counted as if it were computed, as the formulas see shapes but no values. A
pre-activation that the backward pass recomputes is counted again.
"""

import sys
from math import prod

import torch

from moe_runtime.ops._torch_private import dispatch_modes


def _moe_mlp(x, topk_weight, topk_idx, up, down, *_, **__) -> int:
    return 2 * prod(topk_idx) * (prod(up[1:]) + prod(down[1:]))


def _experts_backward(R: int, up, down, z, needs) -> int:
    need_x, need_up, need_down, *_ = needs
    again = int(z[0] != R)
    # the gradient of h is always computed, as that of the weights depends on it
    return 2 * R * (prod(up[1:]) * (need_x + need_up + again) + prod(down[1:]) * (1 + need_down))


def _moe_mlp_backward(dout, x, topk_weight, up, down, *rest, **_) -> int:
    *_, z, _, _, needs, _ = rest
    return _experts_backward(prod(topk_weight), up, down, z, needs)


def _moe_layer(x, router_weight, up, down, *rest, **_) -> int:
    *_, top_k, _, _, _ = rest
    return 2 * x[0] * (prod(router_weight) + top_k * (prod(up[1:]) + prod(down[1:])))


def _moe_layer_backward(dout, dlogits, dweight, x, router_weight, up, down, *rest, **_) -> int:
    *_, topk_weight, _, z, _, _, need_router, needs, _, _ = rest
    router = 2 * x[0] * prod(router_weight) * (need_router + needs[0])
    return router + _experts_backward(prod(topk_weight), up, down, z, needs)


def _grouped_gemm_backward(dy, x, weight, *rest, **_) -> int:
    *_, (need_x, need_weight, _), _ = rest
    return 2 * x[0] * prod(weight[1:]) * (need_x + need_weight)


def _merged_linear_backward(dout, x, weight, merged, *_, **__) -> int:
    dx = 0 if merged is None else 2 * prod(dout[:-1]) * prod(merged)
    return dx if x is None else dx + 2 * prod(dout[:-1]) * prod(weight[1:]) + 2 * prod(weight)


def _lora(x, base, halves, E: int, K: int) -> tuple[int, list[int]]:
    """Count one of the base's three products, and each half's: over all tokens on the H side, over
    their rows on the I side.
    """
    T = x[0]
    rows = x[0] * min(K, E)
    each = [0 if half is None else 2 * prod(half[1:]) for half in halves]
    return 2 * T * prod(base), [
        n * (T * E if at in (0, 2, 5) else rows) for at, n in enumerate(each)
    ]


def _lora_mlp(x, gate, up, down, gate_bias, up_bias, topk_weight, topk_idx, *rest, **_) -> int:
    base, halves = _lora(x, gate, rest[:6], rest[6], topk_weight[1])
    return 3 * base + sum(halves)


def _lora_mlp_backward(
    dout,
    z,
    low,
    need_x,
    needs,
    x,
    gate,
    up,
    down,
    gate_bias,
    up_bias,
    topk_weight,
    topk_idx,
    *rest,
    **_,
):
    base, halves = _lora(x, gate, rest[:6], rest[6], topk_weight[1])
    again = 2 * base if z[0] != x[0] else 0
    first = halves[0] + halves[2]
    # the rows' pre-activation again, and the gradient of every product's input; dx and the halves'
    # gradients if needed
    inner = 2 * (halves[1] + halves[3]) + halves[4] + halves[5]
    return (
        base
        + again
        + inner
        + need_x * (2 * base + first)
        + sum(n for n, need in zip(halves, needs) if need)
    )


def _pairs(R: int, arguments, needs=None) -> int:
    """Count the products of rank r: one with each half, and in the backward pass also those of
    their gradients.
    """
    halves = [prod(half) // half[0] for half in arguments[10:14] if half is not None]
    if needs is None:
        return 2 * R * sum(halves)
    return 2 * R * (sum(halves) + sum(n for n, need in zip(halves, needs) if need))


def _frozen_mlp(x, topk_weight, topk_idx, *arguments, **_) -> int:
    up = arguments[3]
    down = arguments[7]
    return 2 * prod(topk_idx) * (prod(up[1:]) + prod(down[1:])) + _pairs(prod(topk_idx), arguments)


def _frozen_mlp_backward(dout, x, topk_weight, *arguments, **_) -> int:
    R = prod(topk_weight)
    up = arguments[3]
    down = arguments[7]
    needs = arguments[-2]
    return 2 * R * (prod(up[1:]) * needs[0] + prod(down[1:])) + _pairs(R, arguments, needs[4:])


def _heads(hidden, heads, needs=None) -> int:
    V = min(head[0] for head in heads)
    return sum(2 * prod(h) * V for at, h in enumerate(hidden) if needs is None or needs[at])


def _fused_gradients(*args, **_) -> int:
    hidden, heads, _, _, need_heads, _ = args[-6:]
    return 2 * _heads(hidden, heads) + _heads(hidden, heads, need_heads)


FORMULAS = {
    "moe_mlp": _moe_mlp,
    "moe_mlp_backward": _moe_mlp_backward,
    "moe_layer": _moe_layer,
    "moe_layer_backward": _moe_layer_backward,
    "grouped_gemm": lambda x, weight, *_, **__: 2 * x[0] * prod(weight[1:]),
    "grouped_gemm_backward": _grouped_gemm_backward,
    "frozen_mlp": _frozen_mlp,
    "frozen_mlp_backward": _frozen_mlp_backward,
    "merge_experts": lambda weight, *_, **__: 2 * prod(weight),
    "merge_experts_backward_alpha": lambda dout, weight, *_, **__: 2 * prod(weight),
    "merged_linear": lambda x, weight, alpha, merged, *_, **__: 2 * prod(x[:-1]) * prod(merged),
    "merged_linear_backward": _merged_linear_backward,
    "lora_mlp": _lora_mlp,
    "lora_mlp_backward": _lora_mlp_backward,
    "fused_nll": lambda gate, labels, hidden, heads, *_, **__: _heads(hidden, heads),
    "fused_nll_backward": _fused_gradients,
    "fused_loss": _fused_gradients,
    "gram": lambda experts, *_, **__: 2 * experts[0] * prod(experts),
}


def announce(*_, **__):
    """Register the formulas with torch's counter, which asks each op whether it decomposes before
    it looks for a formula.

    This is not done at import, as the counter's module imports triton (130 ms). Our ops do not
    decompose (NotImplemented).
    """
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is not None:
        ops = torch.ops.moe_runtime
        formulas = {
            getattr(ops, name): counter.shape_wrapper(formula)
            for name, formula in FORMULAS.items()
            if hasattr(ops, name)
        }
        counter.flop_registry |= formulas
        # a counter copies the registry when it is created
        for mode in dispatch_modes():
            if isinstance(mode, counter._FlopCounterMode):
                mode.counter.flop_registry |= formulas
    return NotImplemented
