"""EWA on a GPU: its averaging and its layer."""

import pytest
import torch

from moe_runtime import MoEConfig
from moe_runtime.modules.ewa import EWAMLP, average_experts_
from tests.support.oracle import relative_error

pytestmark = pytest.mark.gpu


def test_averaging_keeps_equal_experts_and_converges():
    one = torch.randn(4097, device="cuda", dtype=torch.bfloat16)
    weight = one.expand(7, -1).clone()
    for w in average_experts_(weight, 0.3):
        assert torch.equal(w, one)
    weight = torch.randn(11, 4097, device="cuda")
    average_experts_(weight, 10 / 11)
    assert (weight == weight[0]).all()


def test_layer_in_eval_mode_equals_the_cpu_and_trains_without_a_synchronization():
    layer = EWAMLP(
        MoEConfig(hidden_size=64, intermediate_size=96, num_experts=4, top_k=1, gate="topk_softmax")
    ).eval()
    x = torch.randn(3, 17, 64)
    expected = layer(x)
    layer = layer.cuda()
    x = x.cuda()
    assert relative_error(layer(x).cpu(), expected) < 1e-5
    layer.train()(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for p in layer.parameters():
        assert p.grad.abs().sum() > 0
