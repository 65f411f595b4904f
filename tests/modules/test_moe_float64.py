"""Autocast leaves float64 alone, in torch's layers and in this one."""

import torch

from moe_runtime.config import MoEConfig
from moe_runtime.modules.moe import MoE


def test_autocast_leaves_float64_alone():
    layer = MoE(
        MoEConfig(hidden_size=8, intermediate_size=6, num_experts=4, top_k=2), dtype=torch.float64
    )
    x = torch.randn(13, 8, dtype=torch.float64)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        whole = layer(x)
        routing = layer.gate(x)
        parts = layer.experts(
            x,
            routing.topk_idx,
            routing.topk_weight,
        )
    assert torch.equal(whole, expected)
    assert parts.dtype == torch.float64
