"""How evenly slots fall on experts, by plain Python; the runs of the counter behind it are in
tests/hf/dropin/test_stats.py.
"""

import math

import pytest
import torch

from moe_runtime.hf.dropin.stats import load_entropy


@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 3, 1)])
def test_a_layer_of_one_expert_is_balanced(shape):
    found = load_entropy(torch.full(shape, 7))
    assert found.dtype == torch.float64 and torch.equal(
        found, torch.ones(shape[:-1], dtype=torch.float64)
    )


def test_entropy_of_each_layer_over_that_of_even_shares():
    counts = [[1, 2, 5, 0], [4, 4, 4, 4]]
    shares = [[n / sum(row) for n in row if n] for row in counts]
    want = [-sum(p * math.log(p) for p in row) / math.log(4) for row in shares]
    assert load_entropy(torch.tensor(counts)).tolist() == pytest.approx(want, rel=1e-12)
