"""The interpreter that the kernel tests run in, and what tests/support fixes and checks in it."""

import os

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.support.rows import sparse

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels run on the GPU here"
)


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    square = n[:, None] * N + n[None, :]
    acc = tl.dot(
        tl.load(a_ptr + square),
        tl.load(b_ptr + square),
        tl.zeros([N, N], tl.float32),
        input_precision="ieee",
    )
    tl.store(
        out_ptr + square,
        acc.to(out_ptr.dtype.element_ty),
    )


@triton.jit
def _copy_kernel(x_ptr, out_ptr, P, BLOCK_P: tl.constexpr):
    p = tl.arange(0, BLOCK_P)
    tl.store(out_ptr + p, tl.load(x_ptr + p, mask=p < P))


@triton.jit
def _add_kernel(x_ptr, out_ptr, BLOCK_P: tl.constexpr):
    p = tl.arange(0, BLOCK_P)
    tl.store(
        out_ptr + p,
        tl.load(x_ptr + p) + tl.load(x_ptr + p),
    )


@triton.jit
def _race_kernel(x_ptr, out_ptr, READ: tl.constexpr):
    i = tl.program_id(0)
    if READ:
        tl.store(out_ptr + i, tl.load(out_ptr + 1 - i))
    else:
        tl.store(out_ptr, tl.load(x_ptr + i))


@triton.jit
def _block_kernel(x, out_ptr, row, col, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(
        out_ptr + n[:, None] * N + n[None, :],
        tl.reshape(x.load([0, row, col]), (N, N)),
    )


@triton.jit
def _far_kernel(x_ptr, out_ptr, stride, WIDE: tl.constexpr):
    i = tl.arange(0, 4)
    if WIDE:
        i = i.to(tl.int64)
    tl.store(
        out_ptr + tl.arange(0, 4),
        tl.load(x_ptr + i * stride),
    )


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float8_e4m3fn,
    ],
)
def test_dot_is_right(dtype, tolerance):
    a = torch.randn(16, 16).to(dtype)
    b = torch.randn(16, 16).to(dtype)
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, out, N=16)
    expected = a.double() @ b.double()
    assert (out - expected).norm() / expected.norm() < tolerance[torch.float32]


def test_bf16_store_rounds_to_nearest_even():
    a = torch.randn(16, 16)
    b = torch.eye(16)
    out = torch.empty(16, 16, dtype=torch.bfloat16)
    _dot_kernel[(1,)](a, b, out, N=16)
    assert torch.equal(out, a.bfloat16())


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16],
)
def test_masked_load_without_other_is_poison(dtype):
    x = torch.ones(16, dtype=dtype)
    out = torch.zeros(16, dtype=dtype)
    _copy_kernel[(1,)](x, out, 13, BLOCK_P=16)
    assert out[:13].eq(1).all()
    assert out[13:].isnan().all()


def test_bf16_arithmetic_is_refused():
    x = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="upcast"):
        _add_kernel[(1,)](
            x,
            torch.empty_like(x),
            BLOCK_P=16,
        )


@pytest.mark.parametrize(
    "x, out, kind",
    [
        pytest.param(13, 16, "load", id="load-past-end"),
        pytest.param(16, 13, "store", id="store-past-end"),
    ],
)
def test_out_of_bounds_is_caught(x, out, kind):
    # views into larger storage, where torch would not notice
    x = torch.ones(32)[:x]
    out = torch.empty(32)[:out]
    with pytest.raises(Exception, match=f"{kind} out of bounds: 3 lane"):
        _copy_kernel[(1,)](x, out, 16, BLOCK_P=16)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16],
)
def test_descriptor_is_zero_outside(dtype):
    x = torch.ones(2, 24, 16, dtype=dtype)
    out = torch.empty(16, 16, dtype=dtype)
    _block_kernel[(1,)](
        TensorDescriptor(
            x,
            [2, 24, 16],
            [384, 16, 1],
            [1, 16, 16],
        ),
        out,
        20,
        -8,
        N=16,
    )
    expected = torch.zeros(16, 16, dtype=dtype)
    expected[:4, 8:] = 1  # not the next matrix, and not the previous row
    assert torch.equal(out, expected)


def test_descriptor_of_more_than_its_tensor_is_caught():
    x = torch.ones(1, 16, 16)[:, :13]
    with pytest.raises(Exception, match="load out of bounds: 48 lane"):
        _block_kernel[(1,)](
            TensorDescriptor(
                x,
                [1, 16, 16],
                [256, 16, 1],
                [1, 16, 16],
            ),
            torch.empty(16, 16),
            0,
            0,
            N=16,
        )


def test_int32_offsets_wrap_and_are_caught():
    x = sparse(3 * 2**30 + 1, torch.uint8)
    out = torch.empty(4, dtype=torch.uint8)
    x[:: 2**30] = torch.arange(4, dtype=torch.uint8)
    _far_kernel[(1,)](x, out, 2**30, WIDE=True)
    assert out.tolist() == [0, 1, 2, 3]
    with pytest.raises(Exception, match="load out of bounds: 2 lane"):
        _far_kernel[(1,)](x, out, 2**30, WIDE=False)


@pytest.mark.parametrize(
    "read, what",
    [(False, "write race"), (True, "read/write race")],
)
def test_races_are_caught(read, what):
    with pytest.raises(AssertionError, match=what):
        _race_kernel[(2,)](
            torch.ones(2),
            torch.ones(2),
            READ=read,
        )


def test_unwritten_memory_is_nan():
    assert torch.empty(64).isnan().all()
