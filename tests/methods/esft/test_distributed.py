"""A study's stages in two processes, under DDP and FSDP2, come to what one process comes to; rank 0
alone writes.
"""

import json
import shutil

import pytest
import torch

from moe_runtime.methods import esft
from papers.esft.recipe import load_recipe
from papers.esft.study import Stages
from tests.hf.tiny import distance
from tests.support import dist_esft_stages
from tests.support.dist_launch import launch
from tests.support.esft_study import write_study

# not Adam, which makes steps of rounding; without decay, which SGD would add to the gradients
SGD = {"optimizer": "sgd", "learning_rate": 0.5, "batch_size": 6, "steps": 5, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The stages in one process, whose base and rows the others start from."""
    folder = tmp_path_factory.mktemp("alone")
    trainings = {
        "fft": SGD,
        "lora__training": SGD | {"learning_rate": 3.0},
        "esft": SGD | {"learning_rate": 100.0},
    }
    recipe = load_recipe(write_study(folder)).change(
        **trainings,
        tasks__sums__held_out_rows=7,
    )
    (folder / "recipe.yaml").write_text(json.dumps(recipe.to_dict()))
    stages = Stages(
        recipe,
        folder / "out",
        say=lambda text: None,
    )
    base = stages.base()
    selection = stages.selection("sums", "gate")
    shutil.copytree(
        folder / "out", folder / "start", ignore=shutil.ignore_patterns("scores-*", ".locks")
    )
    made = {
        "esft": stages.esft("sums", selection),
        "fft": stages.fft("sums"),
        "lora": stages.lora("sums"),
    }
    return folder, base, stages.scores("sums").scores.gate, made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ("ddp", ("esft", "fft", "lora")),
        ("fsdp2", ("esft", "fft")),
        ("ep", ("esft", "fft", "lora")),
    ],
    ids=["ddp", "fsdp2", "ep"],
)
def test_two_processes_equal_one(engine, names, alone, tmp_path):
    folder, base, gate, want = alone
    shutil.copytree(folder / "start", tmp_path / "out")
    launch(
        dist_esft_stages.__file__,
        2,
        tmp_path,
        str(tmp_path),
        engine,
        str(folder / "recipe.yaml"),
        *names,
    )
    first, second = (
        torch.load(
            tmp_path / f"rank{rank}.pt",
            weights_only=False,
        )
        for rank in range(2)
    )
    assert first["results"] == second["results"]
    assert first["said"]
    assert not second["said"]
    torch.testing.assert_close(
        first["gate"],
        gate,
        rtol=1e-4,
        atol=1e-6,
    )
    for name in names:
        got = first["results"][name]
        one = want[name]
        assert (got.folder.parent.name == one.folder.parent.name) == (engine != "ep")
        assert len(got.losses) == 7
        assert got.losses == pytest.approx(one.losses, rel=1e-4)
        assert got.steps == one.steps
        assert got.general_losses == pytest.approx(one.general_losses, rel=1e-4)
        assert got.loss != pytest.approx(
            base.tasks["sums"].loss,
            rel=3e-4,
        ), name
        # every rank has as many rows as the one with the most experts
        padded = engine == "ep" and name == "esft"
        assert got.trained_parameters == one.trained_parameters or padded
        assert got.experts == one.experts
    mine, other = (
        esft.load_adapter(result.folder).tensors
        for result in (first["results"]["esft"], want["esft"])
    )
    assert mine.keys() == other.keys()
    for key, value in other.items():
        assert distance(mine[key], value) < 1e-4
    assert not [path for path in (tmp_path / "out").iterdir() if ".tmp-" in path.name]
