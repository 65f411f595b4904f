"""Products in bfloat16 are computed in float32 where PyTorch's are slow, and LoRA experts and
frozen ones stay within the tolerances of their equations.
"""

import pytest
import torch

from moe_runtime.ops import products
from moe_runtime.tools.conformance.draw import Draw
from tests.conformance.test_ops import check, skip_without


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


def test_a_product_is_rounded_once(slow):
    a, b, c = torch.randn(3, 33, 33).bfloat16()
    product = a.float() @ b.float()
    assert torch.equal(products.mm(a, b), product.bfloat16())
    assert torch.equal(products.mm(a, b, out=torch.empty_like(a)), product.bfloat16())
    expected = (c.float() + 2 * product).bfloat16()
    torch.testing.assert_close(products.addmm(c, a, b, out=c, alpha=2), expected)


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("name", ["lora_mlp", "frozen_mlp", "moe_mlp"])
def test_ops_are_their_equations(slow, name, backend):
    skip_without(name, backend, "cpu")
    for number in range(6):
        check(name, backend, "cpu", Draw.numbered(torch.bfloat16, number))
