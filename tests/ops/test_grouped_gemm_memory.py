"""The grouped GEMMs read and write the right element beyond 2^31, where tests/test_lints.py cannot
tell that an offset is wide enough.

Far elements are in memory that is not allocated until it is touched, so each launch touches only a
few.
"""

import os

import pytest
import torch

from tests.support.rows import (
    assert_rounded_once,
    bias_rows,
    dz_rows,
    make_rows,
    product_rows,
    sparse,
    tile_map,
    weight_rows,
)

pytest.importorskip("triton")
from moe_runtime.kernels import grouped_gemm, grouped_gemm_backward, operands
from moe_runtime.kernels.tiles import Tile
from tests.ops import test_grouped_gemm_kernel as near

# on a GPU a wrong index ends the process instead of being reported, and far elements need real
# memory
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter"
)
TILE = Tile(16, 16, 16)
HALF = torch.float16
FORM = {"act": "gelu", "gated": False, "tile": TILE}
# row * stride is 2^31 - 1 (the following elements cross the limit), 2^31, 2^31 + 1, and every
# factor fits in int32
FAR = [
    pytest.param(1, 2**31 - 1, id="2^31 - 1"),
    pytest.param(2, 2**30, id="2^31"),
    pytest.param(3, 715827883, id="2^31 + 1"),
]


def half(*shape):
    return torch.randn(shape).to(HALF)


@pytest.fixture
def room():
    try:
        sparse(9 * 2**30, torch.uint8)
    except MemoryError:
        pytest.skip("the largest of these tensors needs more memory than the machine has")


@pytest.fixture
def unfilled(monkeypatch, room):
    """Launchers may allocate gigabytes, so torch.empty must not touch their pages."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


def far(shape, stride):
    """Zeros of `shape`, strided over memory that is not allocated."""
    size = 1
    for n, s in zip(shape, stride, strict=True):
        size += (n - 1) * s
    return sparse(size, HALF).as_strided(shape, stride)


def check_weight_gradient(dy, x, rows, gather=None):
    order = (rows.row_slot, rows.offsets, rows.slots)
    dw = grouped_gemm_backward.weight_backward(dy, x, *order, gather, TILE)
    assert_rounded_once(
        dw,
        weight_rows(
            dy,
            x,
            rows,
            gather,
            len(rows.offsets) - 1,
        ),
    )


def check_bias_gradient(dy, weight, rows):
    order = (rows.row_slot, rows.offsets, rows.slots)
    of_tokens = weight is not None
    db = grouped_gemm_backward.bias_backward(dy, weight, *order, of_tokens)
    assert_rounded_once(
        db,
        bias_rows(
            dy,
            weight,
            rows,
            of_tokens,
            len(rows.offsets) - 1,
        ),
    )


@pytest.mark.parametrize("row, stride", FAR)
def test_token_rows(row, stride, room):
    """x of the up projection and of dW_up, and dout of dz and of dW_down, are gathered by token."""
    rows = make_rows([row], row + 2, 2)
    rows.row_slot[:] = torch.arange(2 * row + 2).flip(0).int()  # the last tokens first
    x = far((row + 1, 20), (stride, 1))
    x[:] = torch.randn(row + 1, 20)
    x[row, 0] = 3.0
    near.check_up(rows, x, half(1, 8, 20), **FORM)
    weight = torch.rand(row + 1, 2)
    z = half(2 * row + 2, 8)
    near.check_dz(
        rows,
        x,
        half(1, 20, 8),
        weight,
        z,
        **FORM,
    )
    check_weight_gradient(z, x, rows, "x")
    check_weight_gradient(x, z, rows, "dy")
    check_bias_gradient(x, weight, rows)


@pytest.mark.parametrize("is_trained", [False, True], ids=["stack", "trained weights"])
@pytest.mark.parametrize("e, stride", FAR)
def test_experts(e, stride, is_trained, room):
    rows = make_rows([0] * e + [5], 0, 1)
    tiles = tile_map(rows.offsets, 5, 16)
    x = half(5, 20)
    a = half(5, 8)
    w = far((e + 1, 8, 20), (stride, 20, 1))
    w[e] = torch.randn(8, 20)
    whole = w.clone(memory_format=torch.contiguous_format)
    trained = None
    if is_trained:
        trained = operands.Trained(torch.arange(e + 1, dtype=torch.int32), w)
        w = torch.full((e + 1, 8, 20), float("nan"), dtype=HALF)
    near.check_up(
        rows,
        x,
        w,
        trained=trained,
        whole=whole,
        **FORM,
    )
    y = grouped_gemm.grouped_gemm_forward(a, w, None, tiles, False, TILE, trained)
    assert_rounded_once(
        y,
        product_rows(
            a,
            whole.transpose(1, 2),
            None,
            rows,
        ),
    )
    weight = torch.rand(5, 1)
    dz, *_ = grouped_gemm_backward.dz_backward(
        a, w, None, weight, rows.row_slot, tiles, x, "gelu", False, False, TILE, trained
    )
    assert_rounded_once(
        dz,
        dz_rows(
            a,
            whole,
            None,
            weight,
            x,
            rows,
            "gelu",
            False,
        )[0],
    )


@pytest.mark.parametrize("k_last", [True, False])
@pytest.mark.parametrize("row, stride", FAR)
def test_rows_and_columns_of_a_weight(row, stride, k_last, room):
    rows = make_rows([5], 0, 1)
    tiles = tile_map(rows.offsets, 5, 16)
    w = far((1, row + 1, 20), (0, stride, 1))
    w[0] = torch.randn(row + 1, 20)
    weight = w.clone(memory_format=torch.contiguous_format)
    if not k_last:
        weight = weight.transpose(1, 2)
    a = half(5, weight.shape[2])
    y = grouped_gemm.grouped_gemm_forward(a, w, None, tiles, k_last, TILE)
    assert_rounded_once(y, product_rows(a, weight, None, rows))


def test_partial_gradients_of_the_weights(unfilled, monkeypatch):
    monkeypatch.setattr(grouped_gemm_backward, "check_tile", lambda tile: None)
    # a block of two columns (no GPU has one) makes `partial` large before z is: it is two thirds of
    # z's size
    row = 2**30 - 1
    tile = TILE._replace(BLOCK_N=2)
    rows = make_rows([2], 0, 1)
    row_slot = sparse(row + 2, torch.int32)
    row_slot[row:] = rows.row_slot
    tiles = torch.tensor(
        [
            [0],
            [row],
            [row + 2],
        ],
        dtype=torch.int32,
    )
    dout = half(2, 20)
    down = half(1, 20, 3)
    weight = torch.rand(2, 1)
    z = far((row + 2, 3), (3, 1))
    z[row:] = torch.randn(2, 3)
    dz, _, partial = grouped_gemm_backward.dz_backward(
        dout, down, None, weight, row_slot, tiles, z, "gelu", False, False, tile
    )
    want_dz, _, want_dweight = dz_rows(
        dout,
        down,
        None,
        weight,
        z[row:],
        rows,
        "gelu",
        False,
    )
    assert_rounded_once(dz[row:], want_dz)
    sums = partial[row:].double().sum(1)
    torch.testing.assert_close(sums, want_dweight, rtol=1e-4, atol=1e-4)
