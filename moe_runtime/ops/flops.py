"""FLOP formulas of the ops for torch.utils.flop_counter.FlopCounterMode: their matrix products.

A product of [m, k] and [k, n] counts 2 m n k, and elementwise ops count 0, as in torch. T tokens
with K slots are R = T K rows for any routing: a dropped slot, or the weight gradient of a frozen
expert, is counted as if it were computed, as the formulas see shapes but no values. A
pre-activation that the backward pass recomputes is counted again.

Each formula gets the arguments of its op by name, with a shape in place of each tensor.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any


def _moe_mlp(i: Any) -> int:
    return 2 * prod(i.topk_idx) * (prod(i.up[1:]) + prod(i.down[1:]))


def _experts_backward(R: int, i: Any) -> int:
    need_x, need_up, need_down, *_ = i.needs
    recomputed = i.z[0] != R
    up = need_x + need_up + recomputed
    # the gradient of h is always computed, as that of the weights depends on it
    return 2 * R * (prod(i.up[1:]) * up + prod(i.down[1:]) * (1 + need_down))


def _moe_mlp_backward(i: Any) -> int:
    return _experts_backward(prod(i.topk_weight), i)


def _moe_layer(i: Any) -> int:
    expert = prod(i.up[1:]) + prod(i.down[1:])
    return 2 * i.x[0] * (prod(i.router_weight) + i.top_k * expert)


def _moe_layer_backward(i: Any) -> int:
    router = 2 * i.x[0] * prod(i.router_weight) * (i.need_router + i.needs[0])
    return router + _experts_backward(prod(i.topk_weight), i)


def _grouped_gemm(i: Any) -> int:
    return 2 * i.x[0] * prod(i.weight[1:])


def _grouped_gemm_backward(i: Any) -> int:
    need_x, need_weight, _ = i.needs
    return _grouped_gemm(i) * (need_x + need_weight)


def _merge_experts(i: Any) -> int:
    return 2 * prod(i.weight)


def _merged_linear(i: Any) -> int:
    return 2 * prod(i.x[:-1]) * prod(i.merged)


def _merged_linear_backward(i: Any) -> int:
    rows = prod(i.dout[:-1])
    total = 0
    if i.merged is not None:
        total += 2 * rows * prod(i.merged)
    if i.x is not None:
        total += 2 * rows * prod(i.weight[1:]) + 2 * prod(i.weight)
    return total


def _lora_halves(i: Any) -> list[int]:
    """Count the product of each half: over all tokens on the H side, over rows on the I side."""
    tokens = i.x[0] * i.E
    rows = i.x[0] * min(i.topk_weight[1], i.E)
    halves = (i.gate_a, i.gate_b, i.up_a, i.up_b, i.down_a, i.down_b)
    counts = []
    for half, n in zip(halves, (tokens, rows, tokens, rows, rows, tokens)):
        counts.append(0 if half is None else 2 * prod(half[1:]) * n)
    return counts


def _lora_mlp(i: Any) -> int:
    return 6 * i.x[0] * prod(i.gate) + sum(_lora_halves(i))


def _lora_mlp_backward(i: Any) -> int:
    base = 2 * i.x[0] * prod(i.gate)  # one of its three products
    gate_a, gate_b, up_a, up_b, down_a, down_b = halves = _lora_halves(i)
    # the rows' pre-activation again, and the gradient of every product's input
    total = base + 2 * (gate_b + up_b) + down_a + down_b
    if i.z[0] != i.x[0]:
        total += 2 * base
    if i.need_x:
        total += 2 * base + gate_a + up_a
    return total + sum([n for n, need in zip(halves, i.needs) if need])


def _low_rank(R: int, i: Any, needs: Sequence[bool] = ()) -> int:
    """Count a product of R rows with each half of the pairs, and one more for each of `needs`."""
    halves = [
        0 if half is None else prod(half[1:]) for half in (i.up_a, i.up_b, i.down_a, i.down_b)
    ]
    return 2 * R * (sum(halves) + sum([n for n, need in zip(halves, needs) if need]))


def _frozen_mlp(i: Any) -> int:
    R = prod(i.topk_idx)
    return 2 * R * (prod(i.up_shape[1:]) + prod(i.down_shape[1:])) + _low_rank(R, i)


def _frozen_mlp_backward(i: Any) -> int:
    R = prod(i.topk_weight)
    stacks = prod(i.up_shape[1:]) * i.needs[0] + prod(i.down_shape[1:])
    return 2 * R * stacks + _low_rank(R, i, i.needs[4:])


def _heads(i: Any, needs: Sequence[bool] | None = None) -> int:
    V = min(head[0] for head in i.heads)
    needs = needs or [True] * len(i.hidden)
    return sum([2 * prod(h) * V for h, need in zip(i.hidden, needs) if need])


def _fused_gradients(i: Any) -> int:
    return 2 * _heads(i) + _heads(i, i.need_heads)


def _gram(i: Any) -> int:
    return 2 * i.experts[0] * prod(i.experts)


FORMULAS: dict[str, Callable[[Any], int]] = {
    "moe_mlp": _moe_mlp,
    "moe_mlp_backward": _moe_mlp_backward,
    "moe_layer": _moe_layer,
    "moe_layer_backward": _moe_layer_backward,
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_backward": _grouped_gemm_backward,
    "frozen_mlp": _frozen_mlp,
    "frozen_mlp_backward": _frozen_mlp_backward,
    "merge_experts": _merge_experts,
    "merge_experts_backward_alpha": _merge_experts,
    "merged_linear": _merged_linear,
    "merged_linear_backward": _merged_linear_backward,
    "lora_mlp": _lora_mlp,
    "lora_mlp_backward": _lora_mlp_backward,
    "fused_nll": _heads,
    "fused_nll_backward": _fused_gradients,
    "fused_loss": _fused_gradients,
    "gram": _gram,
}
