"""One step of EWA's averaging against the paper's sum in float64: every layout and edge case, and
what it must not change.
"""

import pytest
import torch

from moe_runtime.modules.ewa import average_experts_
from moe_runtime.tools.conformance.oracle import averaged
from tests.support.oracle import assert_parity

SHAPES = [
    pytest.param((8, 34, 33), id="XFT: 8 experts"),
    pytest.param((3, 17), id="E = 3, a bias"),
    pytest.param((2, 1), id="one element each"),
    pytest.param((4,), id="scalar experts"),
    pytest.param((2, 0, 7), id="no elements"),
    pytest.param((33, 129), id="many experts, odd sizes"),
]


# the pull of 8 experts is below and above 1/2, and above 1
@pytest.mark.parametrize(
    "share",
    [1e-6, 0.3, 0.44, 0.7, 1.0],
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES)
def test_parity(shape, dtype, share, device, tolerance):
    weight = torch.randn(shape, device=device).to(dtype)
    expected = averaged(weight.double(), share)
    result = average_experts_(weight, share)
    assert result is weight
    assert result.dtype == dtype
    assert_parity(
        {"weight": result},
        {"weight": expected},
        tolerance[dtype],
    )


@pytest.mark.parametrize(
    "stored, view",
    [
        pytest.param(
            (6, 33, 34),
            lambda w: w.transpose(1, 2),
            id="transposed",
        ),
        pytest.param(
            (34, 33, 6),
            lambda w: w.permute(2, 0, 1),
            id="the expert is the fastest dim",
        ),
        pytest.param(
            (12, 34, 33),
            lambda w: w[::2],
            id="every other expert",
        ),
        pytest.param(
            (6, 34, 66),
            lambda w: w[:, :, 1::2],
            id="strided",
        ),
    ],
)
def test_layouts(stored, view, device, tolerance):
    memory = torch.randn(stored, device=device)
    expected = memory.double()
    view(expected).copy_(averaged(view(expected), 0.3))
    average_experts_(view(memory), 0.3)
    # the elements in between do not change
    assert_parity(
        {"memory": memory},
        {"memory": expected},
        tolerance[torch.float32],
    )
