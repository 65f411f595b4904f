"""Stages in two processes, under DDP and FSDP2, give the results of one process; only rank 0
writes.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from papers.xft.recipe import load_recipe
from papers.xft.study import XftStages
from tests.hf.tiny import distance
from tests.papers.xft.test_study import make_recipe
from tests.support import dist_stages
from tests.support.dist_launch import launch

# not Adam, because a router's first gradient is only rounding error, which Adam amplifies to full
# steps
SGD = {"optimizer": "sgd", "learning_rate": 0.3, "batch_size": 4, "steps": 4}
ENGINES = [
    pytest.param(
        "ddp",
        ("sft", "moe", "mix", "ewa"),
        "Parameter",
        id="ddp",
    ),
    pytest.param("fsdp2", ("sft", "moe", "mix"), "DTensor", id="fsdp2"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Run the stages in one process; the other runs start from its base and examples."""
    folder = tmp_path_factory.mktemp("alone")
    recipe = make_recipe(
        folder,
        data__held_out_rows=7,
        data__limit=32,
        sft=SGD | {"optimizer": "adafactor", "learning_rate": 1e-2, "save_steps": 2},
        tune=SGD,
        mix=SGD | {"learning_rate": 3e3},
        ewa__training=SGD,
    )
    (folder / "recipe.yaml").write_text(json.dumps(recipe.to_dict()))
    stages = XftStages(
        recipe,
        folder / "out",
        say=lambda text: None,
    )
    base = stages.base()
    sft = stages.sft()
    moe = stages.moe()
    shutil.copytree(
        folder / "out", folder / "start", ignore=shutil.ignore_patterns("sft-*", "moe-*", ".locks")
    )
    return folder, {
        "base": base,
        "sft": sft,
        "moe": moe,
        "mix": stages.mix(moe),
        "ewa": stages.ewa(),
    }


def run(folder: Path, engine: str, recipe: Path, *names: str) -> list[dict]:
    """Run stages in two processes; return the results of each."""
    launch(dist_stages.__file__, 2, folder, str(folder), engine, str(recipe), *names)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def assert_equal(got, expected, base, near: float) -> None:
    """Assert that a stage's result and its model equal those of one process."""
    assert got.folder.parent.name.partition("-")[0] == expected.folder.parent.name.partition("-")[0]
    assert len(got.losses) == 7
    assert (got.tokens, got.steps) == (expected.tokens, expected.steps)
    assert got.losses == pytest.approx(expected.losses, rel=near)
    assert got.loss != pytest.approx(base.loss, rel=1e-3)
    assert got.active_parameters == expected.active_parameters
    mine, other = (
        AutoModelForCausalLM.from_pretrained(r.folder).state_dict() for r in (got, expected)
    )
    assert mine.keys() == other.keys()
    for key, value in other.items():
        assert distance(mine[key], value) < near, key


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "names", "kind"), ENGINES)
def test_two_processes_equal_one(engine, names, kind, alone, tmp_path):
    folder, expected = alone
    shutil.copytree(folder / "start", tmp_path / "out")
    first, second = run(tmp_path, engine, folder / "recipe.yaml", *names)
    assert first["results"] == second["results"]
    assert first["said"]
    assert not second["said"]
    for name in names:
        # each rank shuffles its own tokens; Adafactor divides by small gradients
        near = 1e-3 if name in ("ewa", "sft") else 1e-5
        assert_equal(first["results"][name], expected[name], expected["base"], near)
        graded, kinds = first["seen"][name]
        assert kinds == {kind}
        assert graded
        assert all(key.endswith(".mixing_logits") for key in graded) == (name == "mix")
    alpha, other = (
        torch.tensor(result.alpha) for result in (first["results"]["mix"], expected["mix"])
    )
    assert (other[:, 1:] - 0.25 / 3).abs().max() > 1e-4 > 50 * (alpha - other).abs().max()
    assert not [path for path in (tmp_path / "out").iterdir() if ".tmp-" in path.name]


@pytest.mark.slow
def test_experts_divided_among_processes_equal_one(alone, tmp_path):
    folder, expected = alone
    recipe = load_recipe(folder / "recipe.yaml").change(tune__ep_size=2)
    shutil.copytree(folder / "start", tmp_path / "out")
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe.to_dict()))
    first, second = run(tmp_path, "ddp", tmp_path / "recipe.yaml", "moe")
    assert first["results"] == second["results"]
    assert_equal(first["results"]["moe"], expected["moe"], expected["base"], 1e-5)
    assert first["seen"]["moe"][1] == {"Parameter", "DTensor"}
