"""The Triton backend of `lora_mlp`'s mixed activation: the base's product is the library's, the rest two kernels
forward and three backward. No host synchronization, no atomics, no row of a single expert in memory."""

from moe_runtime.kernels import lora, lora_backward
from moe_runtime.ops.lora import Base, Gradients, Pairs, mixed_weight


def mixed(x, base: Base, pairs: Pairs, low, topk_weight, topk_idx, E: int, scaling: float, act: str, save: bool):
    """Return z0 [T, 2I] (empty unless `save`) and h [T, I]; fills low[2] with q."""
    z = base.first(x, x.new_empty(x.shape[0], 2 * base.gate.shape[0]))
    weight = mixed_weight(topk_weight, topk_idx, E).contiguous()
    h = lora.lora_forward(z, low, weight, pairs.gate_b, pairs.up_b, pairs.down_a, act, scaling)
    return (z if save else z.new_empty(0, z.shape[1])), h


def mixed_backward(dh, dq, z, pairs: Pairs, low, topk_weight, topk_idx, needs, E: int, scaling: float, act: str):
    """Gradients from `dh` [T, I] and `dq` [T, E r], scaling included, of h and q."""
    halves = (pairs.gate_b, pairs.up_b, pairs.down_a)
    weight = mixed_weight(topk_weight, topk_idx, E).contiguous()
    shared = (dh, dq, z, low, weight, *halves)
    dz, dlow, dweight = lora_backward.lora_backward(*shared, act, scaling)
    wanted = [half is not None and need for half, need in zip(halves, (needs[3], needs[5], needs[6]))]
    return Gradients(dz, dlow, dweight, *lora_backward.lora_backward_w(*shared, wanted, act, scaling))
