"""Load metrics of experts against plain Python; tests/hf/dropin/test_stats.py tests the counter
behind them.
"""

import math

import pytest
import torch

from moe_runtime.hf.dropin.stats import load_entropy


@pytest.mark.parametrize(
    "shape",
    [
        (1,),
        (3, 1),
        (2, 3, 1),
    ],
)
def test_a_layer_of_one_expert_is_balanced(shape):
    found = load_entropy(torch.full(shape, 7))
    assert torch.equal(found, torch.ones(shape[:-1], dtype=torch.float64))


def test_entropy_of_each_layer_over_that_of_even_shares():
    p = torch.tensor([1, 2, 5], dtype=torch.float64) / 8
    expected = -(p * p.log()).sum().item() / math.log(4)
    counts = torch.tensor([[1, 2, 5, 0], [4, 4, 4, 4]])
    assert load_entropy(counts).tolist() == pytest.approx([expected, 1.0], rel=1e-12)
