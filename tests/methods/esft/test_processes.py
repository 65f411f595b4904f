"""Adapters of a model in two processes, under DDP, FSDP2 and expert parallelism, equal those of one
process.
"""

import pytest
import torch

from moe_runtime.hf.training.trainer import MoETrainer
from moe_runtime.methods import esft
from tests.hf.tiny import distance
from tests.methods.esft.test_train import SELECTION, learned, trainer_of
from tests.support import dist_esft
from tests.support.dist_launch import launch
from tests.support.esft_adapter import same
from tests.support.stock_moe import stock


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, torch.Tensor]:
    trainer = trainer_of(
        MoETrainer, tmp_path_factory.mktemp("alone"), max_steps=4, save_steps=2, optim="sgd"
    )
    trainer.train()
    return learned(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp and expert parallelism", "fsdp2"])
def test_two_processes_save_what_one_does(tmp_path, alone, engine):
    engine = engine.split()[0]
    launch(
        dist_esft.__file__,
        2,
        tmp_path,
        str(tmp_path),
        engine,
    )
    adapter = esft.load_adapter(tmp_path / "adapter")
    assert adapter.tensors.keys() == alone.keys()
    assert adapter.selection == SELECTION
    for name, tensor in alone.items():
        assert distance(adapter.tensors[name], tensor) < 1e-5
    start = stock("deepseek_v2").model.layers[1].mlp.experts.down_proj[7]
    assert distance(adapter.tensors["model.layers.1.mlp.experts.7.down_proj.weight"], start) > 1e-3
    esft.apply(stock("deepseek_v2"), adapter)
    assert same(
        dict(esft.load_adapter(tmp_path / "last").tensors),
        dict(adapter.tensors),
    )
    assert (
        esft.load_adapter(tmp_path / "run" / "checkpoint-2").num_parameters
        == adapter.num_parameters
    )
    if engine == "ddp":
        _is_one_more(esft.load_adapter(tmp_path / "spread"))
        _is_saved_by_the_trainer_that_can(tmp_path)


def _is_one_more(adapter) -> None:
    """Assert that an adapter is the base's experts plus one, the change that the ranks made to the
    distributed experts.
    """
    model = stock("deepseek_v2")
    esft.train_only(model, SELECTION)
    expected = {name: tensor + 1 for name, tensor in esft.adapter_of(model).tensors.items()}
    assert same(dict(adapter.tensors), expected)
    esft.apply(stock("deepseek_v2"), adapter)


def _is_saved_by_the_trainer_that_can(folder) -> None:
    """Assert that only MoETrainer saved what both ranks trained, and that the guard of distributed
    experts is back.
    """
    for rank in range(2):
        found = torch.load(folder / f"spread-{rank}.pt")
        assert "on every rank" in found["errors"][0]
        assert found["is_guarded"]
    for path in (folder / "none").rglob("*"):
        assert not path.is_file()
    saved, last, half = (
        dict(esft.load_adapter(folder / name).tensors)
        for name in ("spread-saved", "spread-last", "spread-run/checkpoint-1")
    )
    assert same(saved, last)
    assert half.keys() == saved.keys()
    assert not same(half, saved)
    assert (folder / "spread-last" / "training_args.bin").is_file()
