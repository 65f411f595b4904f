"""The launcher of kernels/expansion.py that multiplies experts: any number of experts, and what it
reads.
"""

import pytest
import torch

from tests.support.oracle import relative_error

pytest.importorskip("triton")

from moe_runtime.kernels import expansion


@pytest.mark.parametrize("with_base", [False, True], ids=["", "base"])
@pytest.mark.parametrize(
    "n, P",
    [
        (1, 1),
        (2, 8192),
        (5, 8193),
        (16, 300),
        (33, 500),
        (64, 130),
    ],
)
def test_every_number_of_experts(n, P, with_base, device):
    weight = torch.randn(n, P + 3, device=device)[:, :P]
    base = None
    rows = weight.double()
    if with_base:
        base = torch.randn(P, device=device)
        rows = rows - base.double()
    assert relative_error(expansion.gram_forward(weight, base), rows @ rows.t()) < 2e-6
