"""The op `grouped_gemm` by the Triton kernels against float64 loops over rows, and under torch.library."""

from functools import partial

import pytest
import torch

from moe_runtime.ops.grouped_gemm import grouped_gemm
from tests.ops.test_grouped_gemm import by_rows, check_apart, check_rows_of_nobody, run
from tests.support.oracle import assert_parity

pytest.importorskip("triton")


def in_order(leaves):
    return leaves


LAYOUTS = [
    pytest.param({}, in_order, torch.int32, id="contiguous"),
    pytest.param({"x": (33, 24)}, lambda v: v | {"x": v["x"].t()}, torch.int64, id="x transposed"),
    pytest.param({"weight": (4, 33, 17)}, lambda v: v | {"weight": v["weight"].transpose(1, 2)}, torch.int32, id="in x out"),
    pytest.param({"bias": (1, 17)}, lambda v: v | {"bias": v["bias"].expand(4, -1)}, torch.int64, id="one bias, expanded"),
    pytest.param({"bias": (17, 4)}, lambda v: v | {"bias": v["bias"].t()}, torch.int32, id="bias transposed"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes, view, offsets_dtype", LAYOUTS)
def test_parity(shapes, view, offsets_dtype, dtype, tolerance, device):
    """Rows behind the last expert give zero and get zero."""
    shapes = {"x": (24, 33), "weight": (4, 17, 33), "bias": (4, 17)} | shapes
    leaves = {name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()}
    offsets, dy = torch.tensor([0, 5, 5, 18, 20], dtype=offsets_dtype), torch.randn(24, 17).to(dtype)
    got = run(partial(grouped_gemm, backend="triton"), leaves, offsets.to(device), dy.to(device), view)
    want = run(by_rows, {name: leaf.cpu().double() for name, leaf in leaves.items()}, offsets, dy.double(), view)
    assert_parity({name: t.cpu() for name, t in got.items()}, want, tolerance[dtype] / 2)
    assert not got["y"][20:].any()


def test_strided_offsets(device):
    offsets = torch.tensor([0, 5, 5, 18, 24], dtype=torch.int32, device=device)
    x, weight = torch.randn(24, 33, device=device), torch.randn(4, 17, 33, device=device, requires_grad=True)
    a, b = (grouped_gemm(x, weight, o, backend="triton") for o in (offsets, torch.stack([offsets, offsets], 1)[:, 0]))
    assert torch.equal(a, b)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), weight)[0] for y in (a, b)))


def test_no_rows_and_with_a_gradient_of_stride_zero(device):
    weight = torch.randn(4, 17, 33, device=device, requires_grad=True)
    y = grouped_gemm(
        weight.new_zeros(0, 33), weight, torch.zeros(5, dtype=torch.int32, device=device), backend="triton"
    )
    assert y.shape == (0, 17) and not torch.autograd.grad(y.sum(), weight)[0].any()
    x, offsets = torch.randn(6, 33, device=device), torch.tensor([0, 2, 2, 4, 6], device=device)
    grads = [
        torch.autograd.grad(grouped_gemm(x, weight, offsets, backend=b).sum(), weight)[0] for b in ("torch", "triton")
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("needs", [[True, True, True], [True, False, False], [False, False, True]], ids=str)
def test_opcheck(needs, device):
    x, weight, bias = (torch.randn(s, device=device) for s in ((7, 4), (3, 2, 4), (3, 2)))
    offsets = torch.tensor([0, 3, 3, 6], device=device)
    leaves = [t.clone().requires_grad_(need) for t, need in zip((x, weight, bias), needs, strict=True)]
    torch.library.opcheck(torch.ops.moe_runtime.grouped_gemm, (*leaves[:2], offsets, leaves[2], None, None, "triton"))
    args = (torch.randn(7, 2, device=device), x, weight, offsets, None, None, needs, "triton")
    torch.library.opcheck(torch.ops.moe_runtime.grouped_gemm_backward, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_weights_that_train_lie_apart(layout, bias, dtype, tolerance, device):
    check_apart("triton", layout, bias, dtype, tolerance, device)


def test_rows_of_nobody_get_zero(device):
    check_rows_of_nobody("triton", device)
