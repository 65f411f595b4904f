"""Some experts train under DDP, FSDP2 and expert parallelism, in two gloo processes: equal to one
process.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hf import tiny
from tests.hf.tiny import distance
from tests.support import dist_trainable as worker
from tests.support.dist_launch import Launches

SPREAD = [name for name, scenario in worker.SCENARIOS.items() if scenario.spread]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By scenario: its folder and what each rank found; all scenarios in one launch."""
    launches = Launches(worker.__file__, tmp_path_factory)

    def result(name: str):
        folder = launches(worker.RANKS, *worker.SCENARIOS, "order")
        files = [folder / f"{name}-rank{rank}.pt" for rank in range(worker.RANKS)]
        return folder / name, [torch.load(file, weights_only=False) for file in files]

    return result


def alone(name: str) -> dict:
    scenario = worker.SCENARIOS[name]
    return worker.alone(scenario.family, scenario.everything, scenario.low)


@pytest.mark.slow
@pytest.mark.parametrize("name", worker.SCENARIOS)
def test_equals_one_process(name, results):
    (_, ranks), want, scenario = results(name), alone(name), worker.SCENARIOS[name]
    close = 3e-2 if scenario.low else 1e-5
    assert min(want["norms"]) > worker.MAX_NORM  # or nothing was clipped
    for rank, got in enumerate(ranks):
        assert got["receipt"] == want["receipt"]
        assert got["rows"].keys() == want["rows"].keys()
        assert got["losses"] == pytest.approx(
            [losses[rank] for losses in want["losses"]], rel=close
        )
        assert got["norms"] == pytest.approx(want["norms"], rel=close)
        assert got["gradients"].keys() == want["gradients"].keys()
        for path, gradient in want["gradients"].items():
            assert gradient.norm() > 0
            assert got["gradients"][path].dtype == gradient.dtype
            assert distance(got["gradients"][path], gradient) < close, path
        for number, stacks in want["rows"].items():
            tiny.assert_close(got["rows"][number], stacks, close)


@pytest.mark.slow
@pytest.mark.parametrize("name", worker.SCENARIOS)
def test_frozen_weights_stay_bit_by_bit(name, results):
    (_, ranks), want = results(name), alone(name)
    frozen = [path for path in want["before"] if path not in want["gradients"]]
    assert any("experts.down_proj" in path for path in frozen)
    for got in ranks:
        for path in frozen:
            assert torch.equal(got["weights"][path], want["before"][path]), path


@pytest.mark.slow
@pytest.mark.parametrize("name", worker.SCENARIOS)
def test_each_rank_holds_its_share(name, results):
    scenario, (_, ranks), want = worker.SCENARIOS[name], results(name), alone(name)
    if scenario.spread:
        for got in ranks:  # as many rows a rank as the one with the most has
            most = {number: 2 * max(counts) for number, counts in per_rank(name, want).items()}
            for number, shapes in got["shapes"].items():
                for shape in shapes:
                    assert shape[0] == most[number]
    states = sum(got["states"] for got in ranks)
    if scenario.engine == "ddp" and not scenario.spread:
        assert states == 2 * want["states"]
    elif not scenario.spread:
        assert states == want["states"]


def per_rank(name: str, want: dict) -> dict[int, list[int]]:
    """How many of a layer's experts that train each rank has."""
    E = 8 if worker.SCENARIOS[name].family == "qwen3_moe" else 4
    ids = want["receipt"].experts
    values = {}
    for n in ids:
        values[n] = [
            sum(e * worker.RANKS // E == rank for e in ids[n]) for rank in range(worker.RANKS)
        ]
    return values


def test_ranks_hold_different_numbers_of_them():
    assert per_rank("qwen3-ep2", alone("qwen3-ep2")) == {0: [1, 2], 1: [1, 0]}
    assert per_rank("ours-ddp-ep2-everything", alone("ours-ddp-ep2-everything")) == {
        0: [1, 1],
        1: [2, 1],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in SPREAD if worker.SCENARIOS[name].engine != "fsdp2"]
)
def test_one_checkpoint_of_spread_experts(name, results):
    """Not before the rows are in their stacks again; then plain from_pretrained reads it."""
    (folder, ranks), want = results(name), alone(name)
    for got in ranks:
        assert (
            "The model trains some experts separately. Call fold_rows(model) first"
            in got["refused"]
        )
        assert got["ignored"]
        assert all("trained_" in path for path in got["ignored"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {path for path, _ in model.named_parameters()} == want["folded"].keys()
    for path, weight in model.named_parameters():
        assert distance(weight, want["folded"][path]) < 1e-5, path


@pytest.mark.slow
def test_the_other_order_is_refused(results):
    _, ranks = results("order")
    for got in ranks:
        assert got["same"]
        assert (
            "layers.1.mlp.experts already trains some experts separately. Call shard_experts before"
            in got["error"]
        )
