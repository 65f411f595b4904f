"""Mixing coefficients and merged weights: the papers' claims, rounding, offsets, refusals."""

import math

import numpy as np
import pytest
import torch

from moe_runtime.ops.merging import merge_experts, merge_rows, mixing, soup_logits
from tests.support.oracle import assert_parity, mixing_oracle
from tests.support.shared import BEYOND_INT32

OP = "merge_experts"
FLOATS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        *FLOATS,
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "shape",
    [
        (8, 34, 33),
        (1, 17, 33),
        (4,),
        (2, 0, 7),
        (33, 129),
    ],
    ids=str,
)
def test_rows_one_by_one_are_the_stack_bit_by_bit(shape, dtype):
    weight = torch.randn(shape).to(dtype)
    alpha = torch.randn(shape[0]).softmax(-1)
    expected = merge_experts(weight, alpha, backend="torch")
    got = merge_rows((row.clone() for row in weight), alpha)
    assert got.dtype == dtype
    assert torch.equal(got, expected)


def test_another_number_of_rows_than_alphas_is_refused():
    for count in (2, 4):
        with pytest.raises(ValueError, match=r"zip\(\) argument 2"):
            merge_rows(iter(torch.ones(count, 5)), torch.ones(3))


def test_experts_stored_fastest(backend, device, tolerance):
    """Expert strides that no other case has, and the gradient of a sum."""
    weight = torch.randn(34, 33, 6, device=device).permute(2, 0, 1).requires_grad_()
    alpha = torch.randn(6, device=device, requires_grad=True)
    out = merge_experts(weight, alpha, backend=backend)
    dweight, dalpha = torch.autograd.grad(out.sum(), (weight, alpha))
    got = {"out": out, "dweight": dweight, "dalpha": dalpha}
    wide = weight.double()
    expected = {
        "out": torch.tensordot(alpha.double(), wide, 1),
        "dweight": alpha.double().view(6, 1, 1).expand(6, 34, 33),
        "dalpha": wide.sum((1, 2)),
    }
    assert_parity(got, expected, tolerance[torch.float32])


def test_sums_in_float32_and_rounds_once(backend, device):
    weight = torch.randn(8, 64, 33, device=device).bfloat16()
    alpha = torch.rand(8, device=device).softmax(-1)
    expected = torch.tensordot(alpha.double(), weight.double(), 1)
    got = merge_experts(weight, alpha, backend=backend)
    rounding = (expected.bfloat16().double() - expected).norm()
    assert (got.double() - expected).norm() <= 1.01 * rounding


@pytest.mark.parametrize("shared_rate", [0.0, 0.3, 0.75, 0.85, 1.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equal_experts_merge_to_themselves(dtype, shared_rate, backend, device):
    one = torch.randn(34, 33, device=device).to(dtype)
    alpha = mixing(3 * torch.randn(7, device=device), shared_rate)
    got = merge_experts(
        one.expand(8, -1, -1),
        alpha,
        backend=backend,
    )
    if dtype == torch.float32:
        torch.testing.assert_close(got, one, rtol=1e-6, atol=0)
    else:  # the float32 sum is closer to `one` than to its neighbors in the narrow dtype
        assert torch.equal(got, one)


def test_rate_one_is_the_shared_expert_exactly_and_rate_zero_never_sees_it(backend, device):
    weight = torch.randn(8, 34, 33, device=device)
    logits = torch.randn(7, device=device, requires_grad=True)
    merged = merge_experts(weight, mixing(logits, 1.0), backend=backend)
    assert torch.equal(merged, weight[0])
    (gradient,) = torch.autograd.grad(merged.square().sum(), logits)
    assert not gradient.any()
    other = weight.clone()
    other[0] = 1e30
    alpha = mixing(logits, 0.0)
    expected = merge_experts(weight, alpha, backend=backend)
    assert torch.equal(merge_experts(other, alpha, backend=backend), expected)


@pytest.mark.parametrize("shared_rate", [0.0, 0.5, 0.75, 0.85, 1.0, None])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_mixing_follows_the_formula(n, shared_rate):
    logits = 2 * torch.randn(n)
    alpha = mixing(logits, shared_rate)
    assert alpha.dtype == torch.float32
    expected = mixing_oracle(logits.tolist(), shared_rate)
    assert alpha.tolist() == pytest.approx(
        expected,
        rel=1e-6,
        abs=1e-7,
    )
    assert alpha.sum().item() == pytest.approx(1.0, abs=1e-6)
    assert alpha.min() >= 0


@pytest.mark.parametrize(
    "E, rate",
    [
        (8, 0.75),
        (4, 0.85),
        (2, 0.5),
        (1, 0.75),
        (8, 0.0),
        (8, 1.0),
    ],
)
def test_soup_starts_at_the_mixture_that_xft_fixes(E, rate):
    alpha = mixing(soup_logits(E, rate), None)
    expected = [1.0]
    if E > 1:
        expected = [rate] + [(1 - rate) / (E - 1)] * (E - 1)
    assert alpha.tolist() == pytest.approx(
        expected,
        rel=1e-5,
        abs=1e-6,
    )
    assert math.isfinite(alpha.sum().item())


@pytest.mark.parametrize(
    "weight, alpha, words",
    [
        pytest.param((8, 3), (7,), r"alpha is \(7,\)", id="alpha of another E"),
        pytest.param((8, 3), (8, 1), r"alpha is \(8, 1\)", id="alpha with an extra dim"),
        pytest.param((), (), r"weight \(\)", id="a number"),
        pytest.param((0, 3), (0,), r"weight \(0, 3\)", id="no experts"),
    ],
)
def test_bad_arguments_are_named(weight, alpha, words):
    with pytest.raises(ValueError, match=words):
        merge_experts(torch.randn(weight), torch.rand(alpha))


@BEYOND_INT32
def test_offsets_beyond_int32(stride, backend):
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/test_merging.py covers it on a GPU")
    # untouched pages from calloc take no memory
    dtype = torch.bfloat16 if backend == "cpp" else torch.float16
    memory = torch.from_numpy(np.zeros(stride + 8, dtype=np.int16)).view(dtype)
    weight = memory.as_strided((2, 5), (stride, 1))
    weight[0] = torch.arange(5)
    weight[1] = torch.arange(5, 10)
    alpha = torch.tensor([0.5, 2.0], requires_grad=True)
    out = merge_experts(weight, alpha, backend=backend)
    assert out.tolist() == [10, 12.5, 15, 17.5, 20]
    (dalpha,) = torch.autograd.grad(
        out,
        alpha,
        torch.ones(5, dtype=dtype),
    )
    assert dalpha.tolist() == [10, 35]
