"""Parameters that are active per token; test_lora_moe.py covers LoRA experts."""

import pytest

from moe_runtime.hf.dropin.layers import sizes
from moe_runtime.methods import xft
from moe_runtime.methods.xft import baselines
from tests.hf import tiny


def test_ewa_has_one_active_expert():
    model = tiny.dense()
    dense = sum(p.numel() for p in model.parameters())
    receipt = baselines.to_ewa(model, num_experts=4)
    assert sizes(model) == (receipt.moe_parameters, receipt.active_parameters)
    assert receipt.dense_parameters == dense
    assert receipt.moe_parameters > receipt.active_parameters == dense


def count(model, part: str = "") -> int:
    return sum(p.numel() for name, p in model.named_parameters() if part in name)


@pytest.mark.parametrize("top_k", [2, 3, 4])
def test_a_moe_model_has_top_k_active_experts_and_routers(top_k):
    model = tiny.dense()
    mlps = count(model, ".mlp.")
    dense = count(model)
    receipt = xft.upcycle(model, num_experts=4, top_k=top_k)
    routers = count(model, ".gate.")
    assert sizes(model) == (dense + 3 * mlps + routers, dense + (top_k - 1) * mlps + routers)
    assert sizes(model) == (receipt.moe_parameters, receipt.active_parameters)
