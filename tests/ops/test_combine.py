"""Summing rows back to tokens on every backend, in cases that the conformance table does not
draw.
"""

import pytest
import torch

from moe_runtime.ops.combine import combine, gather_rows
from tests.support.oracle import relative_error

OP = "combine"


def test_rows_by_token_and_slot_as_well(backend, device):
    y = torch.randn(12, 5, device=device)
    weight = torch.rand(4, 3, device=device)
    slot_row = torch.randperm(12, device=device).int()
    expected = combine(y, weight, slot_row, backend)
    by_slot = slot_row.view(4, 3)
    assert torch.equal(combine(y, weight, by_slot, backend), expected)
    assert torch.equal(
        combine(
            y,
            weight,
            by_slot.t().contiguous().t(),
            backend,
        ),
        expected,
    )


def test_no_columns(backend, device):
    y = torch.zeros(12, 0, device=device, requires_grad=True)
    weight = torch.zeros(4, 3, device=device, requires_grad=True)
    out = combine(
        y,
        weight,
        torch.arange(12, device=device),
        backend,
    )
    assert out.shape == (4, 0)
    dy, dweight = torch.autograd.grad(out.sum(), (y, weight))
    assert dy.shape == (12, 0)
    assert not dweight.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_in_float32(dtype, backend, device):
    # 1 + 64 * tiny: the terms vanish one by one in the narrow dtype, but not in float32
    eps = torch.finfo(dtype).eps
    tiny = eps / 8
    y = torch.full((65, 4), tiny, dtype=dtype, device=device)
    y[0] = 1
    out = combine(
        y,
        torch.ones(1, 65, device=device),
        torch.arange(65, device=device),
        backend,
    )
    assert relative_error(out.cpu(), torch.full((1, 4), 1 + 64 * tiny)) < eps / 2


@pytest.mark.parametrize(
    ("tokens", "slots"),
    [
        (7, 3),
        (1, 1),
        (0, 2),
    ],
)
def test_gather_rows_and_its_gradient(tokens, slots, backend, device, monkeypatch):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    x = torch.randn(tokens, 5, device=device, requires_grad=True)
    slot_row = torch.randperm(tokens * slots, device=device).int()
    row_token = (torch.argsort(slot_row) // slots).int()
    rows = gather_rows(x, row_token, slot_row)
    expected = x[row_token.long()]
    assert torch.equal(rows, expected)
    weight = torch.randn_like(rows)
    (got_gradient,) = torch.autograd.grad(rows, x, weight)
    (want_gradient,) = torch.autograd.grad(expected, x, weight)
    torch.testing.assert_close(got_gradient, want_gradient)
