"""The exchange of tokens between ranks, on 2 and 4 gloo processes, against the whole batch in one
process.
"""

import functools

import pytest
import torch

from moe_runtime.ops.moe_mlp import moe_mlp_reference
from tests.support import dist_all_to_all as worker
from tests.support.dist_launch import Launches
from tests.support.oracle import relative_error


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each rank, by number of ranks."""
    launches = Launches(worker.__file__, tmp_path_factory)

    def of(ranks: int) -> list[dict]:
        folder = launches(ranks)
        return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]

    return of


@functools.cache
def in_one_process(name: str, ranks: int, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Return output and gradients of all ranks' tokens together, in float64 from the values in
    `dtype`.
    """
    parts = [worker.case(name, rank, dtype) for rank in range(ranks)]
    inputs = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    leaves = {key: stack.double() for key, stack in worker.stacks(dtype).items()}
    leaves |= {"x": inputs["x"].double(), "weight": inputs["weight"].double()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    out = moe_mlp_reference(
        leaves["x"],
        leaves["up"],
        leaves["down"],
        leaves["weight"],
        inputs["idx"],
        gate_up_bias=leaves["up_bias"],
        down_bias=leaves["down_bias"],
    )
    out.backward(inputs["dout"].double())
    grads = {key: leaf.grad for key, leaf in leaves.items()}
    return {"out": out.detach(), "grads": grads, "idx": inputs["idx"]}


def check(ranks: list[dict], expected: dict, scale: float, tolerance: float) -> None:
    """Compare the results of the ranks; gradients of the stacks are `scale` times the sum."""
    out = torch.cat([rank["out"] for rank in ranks])
    assert relative_error(out, expected["out"]) < tolerance
    for key in ("x", "weight"):
        grad = torch.cat([rank["grads"][key] for rank in ranks])
        assert relative_error(grad, expected["grads"][key]) < tolerance, key
    for rank in ranks:
        for key in worker.stacks():
            grad = rank["grads"][key]
            assert relative_error(grad, expected["grads"][key] * scale) < tolerance, key


def counts_of(idx: torch.Tensor, experts: int) -> list[int]:
    """Count the slots of each expert."""
    return [int((idx == e).sum()) for e in range(experts)]


def scale_of(gradients: str, ranks: int) -> float:
    return 1 / ranks if gradients == "mean" else 1.0


@pytest.mark.parametrize("gradients", ["mean", "sum"])
@pytest.mark.parametrize("name", worker.TOKENS)
@pytest.mark.parametrize(
    ("ranks", "ndim"),
    [
        pytest.param(2, 1, id="2"),
        pytest.param(4, 1, id="4"),
        pytest.param(4, 2, id="2x2"),
    ],
)
def test_equals_one_process(ranks, ndim, name, gradients, results):
    """A rank without tokens, an expert without tokens and dropped slots get gradients of zero, not
    None.
    """
    expected = in_one_process(name, ranks)
    got = [result[name, ndim, gradients] for result in results(ranks)]
    check(got, expected, scale_of(gradients, ranks), 1e-12)
    for rank, result in enumerate(got):
        idx = worker.case(name, rank)["idx"]
        assert result["offsets"].diff().tolist() == counts_of(idx, worker.E)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_dtypes(dtype, ranks, results, tolerance):
    got = [result[str(dtype).removeprefix("torch.")] for result in results(ranks)]
    assert got[0]["out"].dtype == dtype
    assert got[0]["grads"]["weight"].dtype == torch.float32
    check(
        got,
        in_one_process("ragged", ranks, dtype),
        1 / ranks,
        tolerance[dtype],
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_go_where_they_are_sent(ranks, results):
    for rank, result in enumerate(results(ranks)):
        rows = result["rows"]
        there = []
        for sender in range(ranks):
            there += [10 * sender + rank] * (sender + rank + 1)
        assert rows["there"].flatten().tolist() == there
        assert torch.equal(rows["back"], 2 * rows["sent"])
        assert rows["grad"].flatten().tolist() == list(
            range(
                0,
                2 * len(rows["sent"]),
                2,
            )
        )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("columns", r"Experts must be Shard\(0\)"),
        ("mixed", "placed differently"),
        ("half", "All stacks of a layer must have the same placements"),
        ("ragged", "Expected num_experts to be divisible by the 2 ranks, but got 3"),
    ],
)
def test_refuses(name, says, results):
    with pytest.raises(ValueError, match=says):
        raise ValueError(results(2)[0]["refusals"][name])
