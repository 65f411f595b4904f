"""transformers' own expert-parallel plan with experts_implementation="moe_runtime", on 2 and 4 gloo
processes.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hf.tiny import distance
from tests.support import dist_transformers_plan as worker
from tests.support.dist_launch import Launches

CASES = [
    pytest.param(ranks, family, name, id=f"{family}-{name}-{ranks}")
    for ranks in (2, 4)
    for family in worker.FAMILIES
    for name in worker.plans(ranks)
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    launches = Launches(worker.__file__, tmp_path_factory)

    def of(ranks: int):
        folder = launches(ranks)
        return folder, [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]

    return of


def in_one_process(folder, batches: list[torch.Tensor]):
    """Run the stock model; return logits and loss by rank, and gradients of the mean loss."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        experts_implementation="eager",
    )
    outputs = [model(ids, labels=ids) for ids in batches]
    (sum(output.loss for output in outputs) / len(batches)).backward()
    return outputs, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "family", "name"), CASES)
def test_equals_one_process(ranks, family, name, results):
    folder, found = results(ranks)
    plan = worker.plans(ranks)[name]
    outputs, gradients = in_one_process(
        folder / family,
        worker.batches(plan, ranks),
    )
    for got, expected in zip(
        (result[family, name] for result in found),
        outputs,
        strict=True,
    ):
        assert got["ours"] == {"moe_runtime"}
        assert set(got["experts"].values()) == {(8 if family == "qwen3_moe" else 4) // ranks}
        assert distance(got["logits"], expected.logits) < 1e-5
        assert got["loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
        assert got["gradients"].keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            assert gradient.norm() > 0, parameter
            assert (
                distance(
                    got["gradients"][parameter],
                    gradient,
                )
                < 1e-5
            ), parameter
