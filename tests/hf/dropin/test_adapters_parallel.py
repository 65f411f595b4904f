"""PEFT's adapters of expert stacks under DDP, FSDP2, expert parallelism: the ranks train one adapter, that of one process."""

import functools

import pytest
import torch
from peft import PeftModel

from tests.hf.tiny import distance
from tests.support import dist_adapters as worker
from tests.support.dist_launch import Launches
from tests.support.stock_moe import stock

alone = functools.cache(worker.alone)
RANKS = {name: 4 if scenario.mesh and 4 in (scenario.mesh[1], 2 * scenario.mesh[0]) else 2
         for name, scenario in worker.SCENARIOS.items()}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    launches = Launches(worker.__file__, tmp_path_factory)

    def result(name: str):
        ranks = RANKS[name]
        folder = launches(ranks, *[other for other, count in RANKS.items() if count == ranks])
        return folder / name, [torch.load(folder / f"{name}-rank{rank}.pt", weights_only=False) for rank in range(ranks)]

    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", worker.SCENARIOS)
def test_equals_one_process(name, results, tmp_path):
    folder, ranks = results(name)
    scenario = worker.SCENARIOS[name]
    want = alone(scenario._replace(engine="", mesh=None, packed="first"), RANKS[name])
    for rank, got in enumerate(ranks):
        assert [step[0] for step in got["losses"]] == pytest.approx([step[rank] for step in want["losses"]], rel=1e-5)
        assert got["weights"].keys() == want["weights"].keys()
        for parameter, weight in want["weights"].items():
            assert distance(got["weights"][parameter], weight) < 1e-5, parameter
            assert torch.equal(got["weights"][parameter], ranks[0]["weights"][parameter]), parameter
            assert want["gradients"][parameter].norm() > 0, parameter
            assert distance(got["gradients"][parameter], want["gradients"][parameter]) < 1e-4, parameter  # of the third step
    if scenario.engine == "ddp":  # what rank 0 saves is the whole adapter, which stock PEFT reads
        model = PeftModel.from_pretrained(stock(scenario.family, num_hidden_layers=2), folder)
        for parameter, weight in want["weights"].items():
            assert distance(model.get_parameter(parameter), weight) < 1e-5, parameter
