"""The launcher of kernels/expansion.py that multiplies experts: every number of them, and what it
reads.
"""

import numpy as np
import pytest
import torch

from tests.support.oracle import relative_error

pytest.importorskip("triton")

from moe_runtime import backends
from moe_runtime.kernels import expansion
from tests.support import interp_san


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


@pytest.mark.skipif(not backends.interpreted(), reason="counts the interpreter's loads")
def test_each_expert_is_read_once(monkeypatch):
    n = 5
    P = 9001
    found = []
    weight = torch.randn(n, P + 3)[:, :P]
    base = torch.randn(P)
    check = interp_san._Launch.check

    def count(self, kind, ptr, mask, size):
        if kind == "load":
            live = mask.data.astype(bool)
            found.append(np.broadcast_to(ptr.data, live.shape)[live].ravel())
        return check(self, kind, ptr, mask, size)

    monkeypatch.setattr(interp_san._Launch, "check", count)
    expansion.gram_forward(weight, base)
    addresses = np.sort(np.concatenate(found))
    want = [tensor.data_ptr() + 4 * np.arange(P) for tensor in (*weight, base)]
    assert np.array_equal(addresses, np.sort(np.concatenate(want)).astype(addresses.dtype))
