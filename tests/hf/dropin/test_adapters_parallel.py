"""PEFT's adapters on expert stacks, dense and packed, under DDP, FSDP2 and expert parallelism: all
ranks train one adapter.
"""

import functools

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh

import moe_runtime
from moe_runtime.hf.dropin.parallel import save_pretrained, shard_experts
from tests.hf.tiny import distance
from tests.support import dist_adapters as worker
from tests.support.dist_launch import Launches, fake_group
from tests.support.stock_moe import stock

alone = functools.cache(worker.alone)
RANKS = {
    name: 4 if scenario.mesh and 4 in (scenario.mesh[1], 2 * scenario.mesh[0]) else 2
    for name, scenario in worker.SCENARIOS.items()
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    launches = Launches(worker.__file__, tmp_path_factory)

    def result(name: str):
        ranks = RANKS[name]
        folder = launches(
            ranks,
            *[other for other, count in RANKS.items() if count == ranks],
        )
        return folder / name, [
            torch.load(folder / f"{name}-rank{rank}.pt", weights_only=False)
            for rank in range(ranks)
        ]

    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", worker.SCENARIOS)
def test_equals_one_process(name, results, tmp_path):
    folder, ranks = results(name)
    scenario = worker.SCENARIOS[name]
    expected = alone(
        scenario._replace(engine="", mesh=None, packed="first"),
        RANKS[name],
    )
    for rank, got in enumerate(ranks):
        assert [step[0] for step in got["losses"]] == pytest.approx(
            [step[rank] for step in expected["losses"]], rel=1e-5
        )
        assert got["weights"].keys() == expected["weights"].keys()
        for parameter, weight in expected["weights"].items():
            assert distance(got["weights"][parameter], weight) < 1e-5, parameter
            assert torch.equal(
                got["weights"][parameter],
                ranks[0]["weights"][parameter],
            ), parameter
            assert expected["gradients"][parameter].norm() > 0, parameter
            # of the third step
            assert (
                distance(
                    got["gradients"][parameter],
                    expected["gradients"][parameter],
                )
                < 1e-4
            ), parameter
    if scenario.engine == "ddp":  # rank 0 saves the whole adapter, which stock PEFT can read
        model = PeftModel.from_pretrained(
            worker.base(scenario.family, scenario.format),
            folder,
        )
        for parameter, weight in expected["weights"].items():
            assert (
                distance(
                    model.get_parameter(parameter),
                    weight,
                )
                < 1e-5
            ), parameter


PACKED = [name for name, scenario in worker.SCENARIOS.items() if scenario.format and scenario.mesh]


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_ranks_hold_their_shares_and_save_the_bytes_of_one_process(name, results):
    folder, ranks = results(name)
    scenario = worker.SCENARIOS[name]
    model = worker.base(scenario.family, scenario.format)
    moe_runtime.quantize_experts(model, scenario.format)
    tensors = {
        f"base_model.model.{n}": t
        for n, t in (*model.named_parameters(), *model.named_buffers())
        if "experts" in n
    }
    wrapped = {
        n.replace(
            ".experts.",
            ".experts.base_layer.base_layer.",
        ): tensor.nbytes
        for n, tensor in tensors.items()
    }
    owners = scenario.mesh[1]
    replicas = scenario.mesh[0] if scenario.engine == "fsdp2" else 1
    for got in ranks:
        own = {n: size for n, size in got["held"].items() if not n.endswith("_packed4")}
        assert own.keys() == wrapped.keys()
        for n, size in own.items():  # NF4's scales of scales are not sharded
            parts = 1 if n[-1] in "123" else owners * (1 if "_packed" in n else replicas)
            assert size == wrapped[n] // parts, n
    expected = model.state_dict()
    saved = moe_runtime.load_quantized(f"{folder}-quantized").state_dict()

    assert expected.keys() == saved.keys()
    for key in expected:
        assert torch.equal(
            expected[key].view(torch.uint8),
            saved[key].view(torch.uint8),
        )


@pytest.fixture
def four():
    """A mesh of four ranks that do not exist."""
    with fake_group(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))


def test_ranks_start_with_the_adapters_of_the_first(four, monkeypatch):
    config = LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    model = get_peft_model(stock(num_hidden_layers=1), config)
    sent = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: sent.append(src))
    shard_experts(model, four["ep"])
    assert sent == [0] * 4


def test_packed_stacks_refuse_what_would_be_wrong(four, tmp_path):
    model = worker.base("qwen3_moe", "nf4")
    moe_runtime.quantize_experts(model, "nf4")
    whole = model.state_dict()

    assert shard_experts(model, four["ep"]) == 2
    experts = model.model.layers[0].mlp.experts
    first = experts.down_proj
    assert shard_experts(model, four["ep"]) == 2
    assert experts.down_proj is first
    with pytest.raises(
        RuntimeError,
        match="down_proj is quantized and distributed, but 'down_proj_packed0' is missing",
    ):
        model.load_state_dict(whole)
    with pytest.raises(
        ValueError,
        match=r"save_quantized\(model, folder\) on every rank",
    ):
        save_pretrained(model, tmp_path / "whole")
    with pytest.raises(ValueError, match="it is already quantized"):
        moe_runtime.quantize_experts(model, "nf4")
