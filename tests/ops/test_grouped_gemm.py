"""One matrix product per expert: rows and weights that belong to no expert."""

import torch

from moe_runtime.ops.grouped_gemm import grouped_gemm

OP = "grouped_gemm"


def test_rows_behind_the_last_expert_may_hold_anything(backend, device):
    x = torch.randn(6, 5, device=device)
    x[4:] = float("nan")
    x.requires_grad_()
    weight = torch.randn(2, 4, 5, device=device, requires_grad=True)
    offsets = torch.tensor([0, 3, 4], device=device)
    y = grouped_gemm(x, weight, offsets, backend=backend)
    dx, dweight = torch.autograd.grad(y.square().sum(), (x, weight))
    assert y.isfinite().all()
    assert dweight.isfinite().all()
    assert not y[4:].any()
    assert not dx[4:].any()


def test_unassigned_rows_get_zero(backend, device):
    """Rows without an expert in the map get zero, in memory filled with NaN."""
    x = torch.randn(9, 33, device=device)
    weight = torch.randn(4, 17, 33, device=device)
    trained = torch.randn(5, 17, 33, device=device, requires_grad=True)
    offsets = torch.tensor([0, 5, 5, 5, 9], device=device)
    places = torch.tensor([-1, 3, -1, 1], dtype=torch.int32, device=device)
    y = grouped_gemm(
        x,
        weight,
        offsets,
        backend=backend,
        trainable=places,
        trained=trained,
    )
    (gradient,) = torch.autograd.grad(y.square().sum(), trained)
    assert gradient.isfinite().all()
    # expert 1, which has row 3, gets no rows of x
    assert gradient.flatten(1).any(1).tolist() == [False, True, False, False, False]
