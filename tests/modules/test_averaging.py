"""One step of EWA's averaging against the paper's sum in float64: every layout and edge; what it
leaves alone.
"""

import pytest
import torch

from moe_runtime.modules.ewa import average_experts_
from tests.support.oracle import assert_parity


def by_the_paper(weight: torch.Tensor, share: float) -> torch.Tensor:
    """(1 - b) W_i + b / (E - 1) sum_{j != i} W_j, in float64."""
    w = weight.double()
    E = weight.shape[0]
    others = [sum((w[j] for j in range(E) if j != i), torch.zeros_like(w[i])) for i in range(E)]
    return torch.stack([(1 - share) * w[i] + share / (E - 1) * others[i] for i in range(E)])


SHAPES = [
    pytest.param((8, 34, 33), id="XFT: 8 experts"),
    pytest.param((3, 17), id="E = 3, a bias"),
    pytest.param((2, 1), id="one number each"),
    pytest.param((4,), id="experts that are numbers"),
    pytest.param((2, 0, 7), id="no elements"),
    pytest.param((33, 129), id="many experts, odd sizes"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_parity(shape, dtype, device, tolerance):
    weight = torch.randn(shape, device=device).to(dtype)
    want = by_the_paper(weight, 0.3)
    got = average_experts_(weight, 0.3)
    assert got is weight and got.dtype == dtype
    assert_parity({"weight": got}, {"weight": want}, tolerance[dtype])


# c is below and above 1/2, and above 1
@pytest.mark.parametrize("share", [1e-6, 0.3, 0.43, 0.44, 0.7, 1.0])
@pytest.mark.parametrize("E", [2, 3, 8, 11])
def test_mean_stays_and_deviations_shrink_by_the_factor(E, share, device):
    weight = torch.randn(E, 33, 17, device=device)
    before = weight.double()
    average_experts_(weight, share)
    after = weight.double()
    factor = 1 - share * E / (E - 1)
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        after - after.mean(0), factor * (before - before.mean(0)), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    "stored, view",
    [
        pytest.param((6, 33, 34), lambda w: w.transpose(1, 2), id="transposed"),
        pytest.param((34, 33, 6), lambda w: w.permute(2, 0, 1), id="the expert as the fastest dim"),
        pytest.param((12, 34, 33), lambda w: w[::2], id="every other expert"),
        pytest.param((6, 34, 66), lambda w: w[:, :, 1::2], id="strided"),
        pytest.param((8, 34, 33), lambda w: w[1:-1], id="not the first"),
    ],
)
def test_layouts(stored, view, device, tolerance):
    memory = torch.randn(stored, device=device)
    want = memory.double()
    view(want).copy_(by_the_paper(view(memory), 0.3))
    average_experts_(view(memory), 0.3)
    # what lies between is untouched
    assert_parity({"memory": memory}, {"memory": want}, tolerance[torch.float32])


def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    weight = torch.randn(3, 4, 5)
    want = average_experts_(weight.clone(), 0.3)
    torch.compile(lambda w: average_experts_(w, 0.3), fullgraph=True, backend="aot_eager")(weight)
    assert torch.equal(weight, want)
