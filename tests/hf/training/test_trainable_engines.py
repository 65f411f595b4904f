"""Some experts train under DDP, FSDP2 and expert parallelism in two gloo processes, with the result
of one process.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hf import tiny
from tests.support import dist_trainable as worker
from tests.support.dist_launch import Launches

SPREAD = [name for name, scenario in worker.SCENARIOS.items() if scenario.spread]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the folder and each rank's results of a scenario; all scenarios share one launch."""
    launches = Launches(worker.__file__, tmp_path_factory)

    def result(name: str):
        folder = launches(worker.RANKS, *worker.SCENARIOS, "order")
        files = []
        for rank in range(worker.RANKS):
            files.append(folder / f"{name}-rank{rank}.pt")
        return folder / name, [torch.load(file, weights_only=False) for file in files]

    return result


def alone(name: str) -> dict:
    scenario = worker.SCENARIOS[name]
    return worker.alone(scenario.family, scenario.everything, scenario.low)


def check_shares(name: str, ranks: list[dict], expected: dict) -> None:
    """Assert that each rank holds its share of rows and of the optimizer's states."""
    scenario = worker.SCENARIOS[name]
    if scenario.spread:
        for number, counts in per_rank(name, expected).items():
            for values in ranks:  # each rank is padded to the largest number of rows
                for shape in values["shapes"][number]:
                    assert shape[0] == 2 * max(counts)
        return
    states = sum(values["states"] for values in ranks)
    copies = 2 if scenario.engine == "ddp" else 1
    assert states == copies * expected["states"]


@pytest.mark.slow
@pytest.mark.parametrize("name", worker.SCENARIOS)
def test_equals_one_process(name, results):
    """Frozen weights stay bit-identical."""
    _, ranks = results(name)
    expected = alone(name)
    close = 3e-2 if worker.SCENARIOS[name].low else 1e-5

    assert min(expected["norms"]) > worker.MAX_NORM  # make sure that clipping takes effect
    frozen = expected["before"].keys() - expected["gradients"].keys()
    assert any("experts.down_proj" in path for path in frozen)
    for rank, values in enumerate(ranks):
        assert values["receipt"] == expected["receipt"]
        losses = [step[rank] for step in expected["losses"]]
        assert values["losses"] == pytest.approx(losses, rel=close)
        assert values["norms"] == pytest.approx(expected["norms"], rel=close)
        assert values["gradients"].keys() == expected["gradients"].keys()
        for path, gradient in expected["gradients"].items():
            assert gradient.norm() > 0
            assert values["gradients"][path].dtype == gradient.dtype
        tiny.assert_close(values["gradients"], expected["gradients"], close)
        assert values["rows"].keys() == expected["rows"].keys()
        for number, stacks in expected["rows"].items():
            tiny.assert_close(values["rows"][number], stacks, close)
        for path in frozen:
            assert torch.equal(
                values["weights"][path],
                expected["before"][path],
            ), path
    check_shares(name, ranks, expected)


def per_rank(name: str, expected: dict) -> dict[int, list[int]]:
    """Number of trained experts of a layer on each rank."""
    E = 8 if worker.SCENARIOS[name].family == "qwen3_moe" else 4
    counts = {}
    for number, ids in expected["receipt"].experts.items():
        counts[number] = [0] * worker.RANKS
        for e in ids:
            counts[number][e * worker.RANKS // E] += 1
    return counts


def test_ranks_hold_different_numbers_of_them():
    assert per_rank("qwen3-ep2", alone("qwen3-ep2")) == {0: [1, 2], 1: [1, 0]}
    assert per_rank(
        "ours-ddp-ep2-everything",
        alone("ours-ddp-ep2-everything"),
    ) == {
        0: [1, 1],
        1: [2, 1],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in SPREAD if worker.SCENARIOS[name].engine != "fsdp2"]
)
def test_one_checkpoint_of_spread_experts(name, results):
    """It can be saved only after the rows are back in their stacks; then plain from_pretrained
    reads it.
    """
    folder, ranks = results(name)
    folded = alone(name)["folded"]
    for values in ranks:
        assert "trains some experts separately. Call fold_rows(model) first" in values["refused"]
        assert values["ignored"]
        for path in values["ignored"]:
            assert "trained_" in path
    weights = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())

    assert weights.keys() == folded.keys()
    tiny.assert_close(weights, folded, 1e-5)


@pytest.mark.slow
def test_the_other_order_is_refused(results):
    _, ranks = results("order")
    says = "layers.1.mlp.experts already trains some experts separately. Call shard_experts before"
    for values in ranks:
        assert values["same"]
        assert says in values["error"]
