"""The interpreter that the kernel tests run in, and what tests/support fixes and checks in it."""

import itertools
import math
import os

import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
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
def _loop_kernel(x_ptr, out_ptr, P, BLOCK_P: tl.constexpr):
    acc = tl.zeros([BLOCK_P], tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        acc += tl.load(x_ptr + p, mask=p < P, other=0.0)
    tl.store(out_ptr + tl.arange(0, BLOCK_P), acc)


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


def test_loop_to_a_runtime_bound():
    x = torch.randn(40)
    out = torch.empty(16)
    _loop_kernel[(1,)](x, out, 40, BLOCK_P=16)
    torch.testing.assert_close(out.sum(), x.sum())


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


def test_remembered_types_are_those_described_first():
    """tests/support/interp_fast.py describes each shape once; shapes and element types must not get
    mixed up.
    """
    elements = [
        tl.float32,
        tl.bfloat16,
        tl.int32,
        tl.pointer_type(tl.float32),
    ]
    for element in elements + elements:
        for shape in ([4], [4, 8], [8, 4], [4]):
            block = tl.block_type(element, shape)
            assert (list(block.shape), block.numel, block.scalar) == (
                shape,
                math.prod(shape),
                element,
            )
            assert block == tl.block_type(element, tuple(shape))
            assert block != tl.block_type(element, [2])
            value = tl.tensor(None, block)
            assert ([size.value for size in value.shape], value.numel.value) == (
                shape,
                math.prod(shape),
            )
            assert value.type is block
            assert value.dtype == element
        scalar = tl.tensor(None, element)
        assert (len(scalar.shape), scalar.numel.value, scalar.dtype) == (0, 1, element)
        for _ in range(2):
            with pytest.raises(ValueError, match="power of 2"):
                tl.block_type(element, [3])
    assert [interpreter._get_np_dtype(element).name for element in elements] == [
        "float32",
        "uint16",
        "int32",
        "uint64",
    ]


def replaced(function):
    """Return the function that tests/support/interp_fast.py replaces by `function`."""
    (first,) = [
        c.cell_contents
        for c in function.__closure__
        if getattr(c.cell_contents, "__name__", "") == function.__name__
    ]
    return first


@pytest.mark.parametrize(
    "dtype",
    [
        tl.int1,
        tl.int32,
        tl.int64,
        tl.uint32,
        tl.float16,
        tl.float32,
        tl.float64,
    ],
    ids=str,
)
def test_remembered_constants_are_those_made_first(dtype):
    """Values that compare equal are distinguished by their Python type, and zeros by their sign."""
    semantic = interpreter.interpreter_semantic
    make = replaced(TritonSemantic.scalar_constant)
    if dtype.is_int():
        values = [1, 0, 1, True, 0, False]
    else:
        values = [0.5, 1, 1.0, -2.5, 0, 0.0, -0.0]
    for value in values + values:
        found = semantic.scalar_constant(value, dtype)
        expected = make(semantic, value, dtype)
        assert found.type == expected.type
        assert found.handle.dtype == expected.handle.dtype
        assert found.handle.data.dtype == expected.handle.data.dtype
        assert found.handle.data.tobytes() == expected.handle.data.tobytes()


def test_mixed_types_are_promoted_as_in_triton():
    semantic = interpreter.interpreter_semantic
    look = TritonSemantic.computation_type_impl
    types = [
        tl.int1,
        tl.int8,
        tl.int32,
        tl.int64,
        tl.uint8,
        tl.uint32,
        tl.float16,
        tl.bfloat16,
        tl.float32,
        tl.float64,
    ]
    first = replaced(look)
    for a, b, a_scalar, b_scalar in itertools.product(
        types,
        types,
        (False, True),
        (False, True),
    ):
        for _ in range(2):
            assert look(semantic, a, a_scalar, b, b_scalar, False) == first(
                semantic, a, a_scalar, b, b_scalar, False
            )
    for dtype in types:
        pair = [
            semantic.scalar_constant(1, tl.int32).to(
                dtype,
                _semantic=semantic,
            )
            for _ in range(2)
        ]
        left, right = semantic.binary_op_type_checking_impl(*pair, div_or_mod=True)
        assert left.dtype == right.dtype == first(semantic, dtype, False, dtype, False, True)
