"""The cpp backend of merging: bit-identical to torch in the forward pass, within rounding of
float64 in the backward pass, on every instruction set and layout.
"""

import pytest
import torch

from moe_runtime.ops import merging
from moe_runtime.ops.merging import merge_experts
from tests.support.merging import CASES, merge_mismatches
from tests.support.oracle import assert_same, relative_error

pytestmark = pytest.mark.usefixtures("cpu_library")
BLOCK = 4096  # of csrc/cpu/kernels.h
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("E, P", CASES)
def test_bits_match_torch_and_the_gradient_float64(E, P, dtype, variant):
    assert not merge_mismatches(E, P, dtype)


LAYOUTS = [
    pytest.param(
        (6, 33, 34),
        lambda w: w.transpose(1, 2),
        True,
        id="transposed",
    ),
    pytest.param(
        (6, 5, 7, 3),
        lambda w: w.permute(0, 2, 3, 1),
        True,
        id="three dims permuted",
    ),
    pytest.param(
        (12, 34, 33),
        lambda w: w[::2],
        True,
        id="every other expert",
    ),
    pytest.param(
        (6, 68, 33),
        lambda w: w.chunk(2, 1)[1],
        True,
        id="a half of each expert",
    ),
    pytest.param(
        (1, 34, 33),
        lambda w: w.expand(6, -1, -1),
        True,
        id="E views of one expert",
    ),
    pytest.param(
        (34, 33, 6),
        lambda w: w.permute(2, 0, 1),
        False,
        id="the expert is the fastest dim",
    ),
    pytest.param(
        (6, 34, 66),
        lambda w: w[:, :, 1::2],
        False,
        id="strided",
    ),
    pytest.param(
        (6, 34, 1),
        lambda w: w.expand(-1, -1, 33),
        False,
        id="one element per row",
    ),
]


@DTYPES
@pytest.mark.parametrize("stored, view, whole", LAYOUTS)
def test_layouts_are_read_where_they_are(stored, view, whole, dtype):
    weight = view(torch.randn(stored).to(dtype))
    plain = weight.contiguous()
    shape = weight.shape[1:]
    alpha = torch.randn(6)
    out = merge_experts(weight, alpha, backend="cpp")
    assert out.is_contiguous()
    assert torch.equal(out, merge_experts(plain, alpha, backend="torch"))
    dout = torch.randn(shape).to(dtype)
    reversed_dims = tuple(reversed(range(len(shape))))
    turned = torch.randn(shape[::-1]).to(dtype).permute(reversed_dims)
    for upstream in (dout, dout.flatten()[0].expand(shape), turned):
        got = merging._merge_backward_alpha_cpp(upstream, weight)
        expected = merging._merge_backward_alpha_cpp(upstream.contiguous(), plain)
        assert relative_error(got, expected) < 1e-5
    assert (merging._as_stored(weight)[0].data_ptr() == weight.data_ptr()) == whole


@DTYPES
def test_threads_change_no_bit(dtype, monkeypatch, variant):
    P = 11 * BLOCK + 77
    weight = torch.randn(9, P).to(dtype)
    alpha = torch.randn(9)
    dout = torch.randn(P).to(dtype)

    def results(threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return [merging._merge_cpp(weight, alpha), merging._merge_backward_alpha_cpp(dout, weight)]

    expected = results(1)
    for threads in (2, 3, 8, 64):
        for _ in range(3):
            assert_same(results(threads), expected)


@pytest.mark.parametrize(
    "given",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    ],
)
@DTYPES
def test_the_gradient_may_come_in_another_dtype(dtype, given, variant):
    weight = torch.randn(11, 5003).to(dtype)
    dout = torch.randn(5003).to(given)
    got = merging._merge_backward_alpha_cpp(dout, weight)
    assert relative_error(got, weight.double() @ dout.double()) < 1e-6


def merged(weight, alpha, dout, backend):
    """Return the merged weight and the gradient of alpha."""
    alpha = alpha.clone().requires_grad_()
    out = merge_experts(weight, alpha, backend=backend)
    (dalpha,) = torch.autograd.grad(out, alpha, dout)
    return out.detach(), dalpha


@DTYPES
@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        -float("inf"),
        3e38,
    ],
)
def test_nan_and_infinity_propagate_as_in_torch(value, dtype, variant):
    weight = torch.randn(9, 300).to(dtype)
    alpha = torch.randn(9)
    alpha[4] = 0.0  # times infinity is NaN
    weight[4, 7] = value
    weight[0, 130] = value
    weight[8, 299] = -value
    dout = torch.randn(300).to(dtype)
    for _ in range(2):
        out, dalpha = merged(weight, alpha, dout, "cpp")
        want_out, want_dalpha = merged(weight, alpha, dout, "torch")
        assert_same(out, want_out)
        torch.testing.assert_close(
            dalpha,
            want_dalpha,
            rtol=1e-4,
            atol=1e-5,
            equal_nan=True,
        )
        alpha[4] = value
        dout[299] = value


def test_long_sums_keep_float32s_last_digits(variant):
    """Values of one sign: a float32 that sums a million of them one by one is off by a
    thousandth.
    """
    weight = torch.rand(2, 1_000_003)
    dout = torch.rand(1_000_003)
    expected = weight.double() @ dout.double()
    got = merging._merge_backward_alpha_cpp(dout, weight)
    torchs = weight.mv(dout)
    bound = ((torchs - expected).abs() / expected).max().item()
    assert ((got - expected).abs() / expected).max() <= max(bound, 2e-7)
