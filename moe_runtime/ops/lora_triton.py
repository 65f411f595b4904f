"""The Triton backend of `lora_mlp`'s mixed activation.

Rows of single experts are not materialized.
"""

from typing import Any

from torch import Tensor

from moe_runtime.ops.lora_torch import MixedGradients, Pairs, mixed_weight


def mixed(i: Any, z: Tensor, pairs: Pairs, low: Tensor) -> Tensor:
    """Compute `lora_torch.mixed` in one kernel."""
    from moe_runtime.kernels.lora import lora_forward

    weight = mixed_weight(i.topk_weight, i.topk_idx, i.E).contiguous()
    return lora_forward(
        z,
        low,
        weight,
        pairs.gate_b,
        pairs.up_b,
        pairs.down_a,
        i.act,
        i.scaling,
    )


def mixed_backward(
    i: Any,
    dh: Tensor,
    dq: Tensor | None,
    z: Tensor,
    pairs: Pairs,
    low: Tensor,
    needs: Pairs,
) -> MixedGradients:
    """Compute `lora_torch.mixed_backward` in three kernels."""
    from moe_runtime.kernels import lora_backward

    weight = mixed_weight(i.topk_weight, i.topk_idx, i.E).contiguous()
    shared = (dh, dq, z, low, weight, pairs.gate_b, pairs.up_b, pairs.down_a)
    dz, dlow, dweight = lora_backward.lora_backward(*shared, i.act, i.scaling)
    needed = []
    for name in ("gate_b", "up_b", "down_a"):
        needed.append(getattr(pairs, name) is not None and getattr(needs, name))
    halves = lora_backward.lora_backward_w(*shared, needed, i.act, i.scaling)
    return MixedGradients(dz, dlow, dweight, *halves)
