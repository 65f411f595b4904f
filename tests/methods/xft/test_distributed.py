"""Stages in two processes, under DDP and FSDP2, come to what one process comes to; rank 0 alone
writes.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from papers.xft.recipe import load_recipe
from papers.xft.study import Stages
from tests.hf.tiny import distance
from tests.papers.xft.test_study import make_recipe
from tests.support import dist_stages
from tests.support.dist_launch import launch

# not Adam: at first a router's gradient is rounding alone, which Adam makes steps of
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
    """The stages in one process, whose base and rows the others start from."""
    folder = tmp_path_factory.mktemp("alone")
    plan = {
        "sft": SGD | {"optimizer": "adafactor", "learning_rate": 1e-2, "save_steps": 2},
        "tune": SGD,
        "mix": SGD | {"learning_rate": 3e3},
        "ewa__training": SGD,
    }
    recipe = make_recipe(folder, data__held_out_rows=7, data__limit=32, **plan)
    (folder / "recipe.yaml").write_text(json.dumps(recipe.to_dict()))
    stages = Stages(
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


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "names", "kind"), ENGINES)
def test_two_processes_equal_one(engine, names, kind, alone, tmp_path):
    folder, want = alone
    shutil.copytree(folder / "start", tmp_path / "out")
    launch(
        dist_stages.__file__,
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
    for name in names:
        got = first["results"][name]
        near = 1e-5
        # each rank deals out its own tokens; Adafactor divides by gradients that are small
        if name in ("ewa", "sft"):
            near = 1e-3
        assert got.folder.parent.name == want[name].folder.parent.name
        assert len(got.losses) == 7
        assert got.tokens == want[name].tokens
        assert got.steps == want[name].steps
        assert got.losses == pytest.approx(
            want[name].losses,
            rel=near,
        ), name
        assert got.loss != pytest.approx(want["base"].loss, rel=1e-3), name
        assert (got.parameters, got.active_parameters) == (
            want[name].parameters,
            want[name].active_parameters,
        )
        mine, other = (
            AutoModelForCausalLM.from_pretrained(r.folder).state_dict() for r in (got, want[name])
        )
        assert mine.keys() == other.keys()
        for key, value in other.items():
            assert distance(mine[key], value) < near, name
        graded, kinds = first["seen"][name]
        assert kinds == {kind}
        assert all(key.endswith(".mixing_logits") for key in graded) == (name == "mix")
        assert graded
    alpha, other = (torch.tensor(result.alpha) for result in (first["results"]["mix"], want["mix"]))
    assert (other[:, 1:] - 0.25 / 3).abs().max() > 1e-4 > 50 * (alpha - other).abs().max()
    assert not [path for path in (tmp_path / "out").iterdir() if ".tmp-" in path.name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "near"), [({}, 1e-5), ({"optimizer": "adafactor", "learning_rate": 1e-2}, 1e-3)]
)
def test_experts_divided_among_processes_equal_one(settings, near, alone, tmp_path):
    folder, want = alone
    recipe = load_recipe(folder / "recipe.yaml")
    shutil.copytree(folder / "start", tmp_path / "out")
    if settings:
        recipe = recipe.change(tune=SGD | settings)
        shutil.copytree(
            folder / "start",
            tmp_path / "one",
        )
        want = want | {
            "moe": Stages(
                recipe,
                tmp_path / "one",
                say=lambda text: None,
            ).moe()
        }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe.change(tune__ep_size=2).to_dict()))
    launch(
        dist_stages.__file__,
        2,
        tmp_path,
        str(tmp_path),
        "ddp",
        str(tmp_path / "recipe.yaml"),
        "moe",
    )
    first, second = (
        torch.load(
            tmp_path / f"rank{rank}.pt",
            weights_only=False,
        )
        for rank in range(2)
    )
    got = first["results"]["moe"]
    moe = want["moe"]
    assert first["results"] == second["results"]
    assert got.steps == moe.steps
    assert len(got.losses) == 7
    assert got.losses == pytest.approx(moe.losses, rel=near)
    assert got.loss != pytest.approx(want["base"].loss, rel=1e-3)
    mine, other = (AutoModelForCausalLM.from_pretrained(r.folder).state_dict() for r in (got, moe))
    assert mine.keys() == other.keys()
    assert first["seen"]["moe"][1] == {"Parameter", "DTensor"}
    # Adafactor scales up the rounding errors, the processor's own, that are all of a router's
    # gradient over equal experts
    if not settings:
        for key, value in other.items():
            assert distance(mine[key], value) < near


def test_the_shipped_fsdp2_config_is_one():
    from accelerate.commands.config.config_args import load_config_from_file

    path = Path(dist_stages.__file__).parents[2] / "moe_runtime" / "hf" / "training" / "fsdp2.yaml"
    config = load_config_from_file(str(path))
    assert config.distributed_type == "FSDP"
    assert config.fsdp_config["fsdp_version"] == 2
    # accelerate falls back to the model's own list of layers where none is named
    assert (
        "fsdp_transformer_layer_cls_to_wrap" not in yaml.safe_load(path.read_text())["fsdp_config"]
    )
