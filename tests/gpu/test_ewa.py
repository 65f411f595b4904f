"""EWA on a GPU: its averaging and its layer."""

import pytest
import torch

from moe_runtime import MoEConfig
from moe_runtime.modules.ewa import EWAMLP
from tests.support.oracle import relative_error

pytestmark = pytest.mark.gpu


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
