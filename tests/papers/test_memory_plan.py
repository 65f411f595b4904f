"""Recipes and several GPUs: the machines that recipes name, and what `run` refuses."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from moe_runtime.tools.memory_plan import RESERVED
from papers import memory_plan
from papers.cli import app
from papers.engine.recipe import METHODS

# config.json of the bases, with the fields that determine sizes
BASES = yaml.safe_load((Path(__file__).parents[1] / "data/bases.yaml").read_text())
RECIPES = [
    path
    for path in sorted(METHODS.glob("*/recipes/*.yaml"))
    if "base_model: null" not in path.read_text()
]
RECIPES += [METHODS / "ultrafuser/recipes/ultrafuser-13b.yaml"]
MACHINE = re.compile(
    r"^# Machine: (\d+) GPUs? of (\d+) GB(?:, (\w+))?(?: \((\w+)\))?", re.MULTILINE
)


@pytest.fixture
def bases(tmp_path, monkeypatch):
    """A folder in which the bases' ids are folders with only a config."""
    for name, config in BASES.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output, result.exception


def test_a_run_is_given_the_memory_that_is_free(monkeypatch):
    free = SimpleNamespace(available=8_000)
    monkeypatch.setattr(memory_plan.torch.cuda, "is_available", lambda: False)
    assert 0 < memory_plan.machine()[1] < memory_plan.psutil.virtual_memory().total
    monkeypatch.setattr(memory_plan.psutil, "virtual_memory", lambda: free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory_plan.machine()[1] == 4_000


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_machine_of_recipe(path, bases):
    text = path.read_text()
    planner = memory_plan.planner_of(memory_plan.recipe_of(str(path)))
    run = {name for name, one in planner.stages.items() if one.runs}
    covered = set()
    fullest = 0.0
    for gpus, size, engine, stage in MACHINE.findall(text):
        assert not engine or engine in planner.engines
        for name in run:
            if stage in ("", name):
                share = planner.share(name, engine or "ddp", int(gpus))
                assert share.total + RESERVED <= int(size) * 1e9, (name, share)
                covered.add(name)
                fullest = max(fullest, share.total / (int(size) * 1e9))
    assert covered == run
    assert fullest > 0.4  # the machine is no larger than necessary


@pytest.fixture
def small(tmp_path):
    """A recipe of UpIT on a folder with a config and no weights."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(BASES["small"]))
    text = (METHODS / "upit/recipes/tiny.yaml").read_text()
    text = re.sub(r"(pretrain|lora):\n(  .*\n)+", "", text)
    text = text.replace("base_model: null", f"base_model: {tmp_path / 'base'}")
    (tmp_path / "small.yaml").write_text(text)
    return tmp_path / "small.yaml"


def test_recipe_by_stage_and_engine(small):
    code, text, _ = run("memory", small, "--gpus", 2, "--gpu-memory", 80, "--json")
    assert code == 0
    lines = {}
    for line in json.loads(text[text.index("[") :]):
        lines[line["stage"], line["engine"]] = line
    assert {stage for stage, _ in lines} == {"ffn sft", "ffn init", "ffn post"}
    whole = lines["ffn post", "ddp"]
    half = lines["ffn post", "fsdp2"]
    for part in ("weights", "gradients", "optimizer"):
        assert half[part] == (whole[part] + 1) // 2
    assert whole["buffers"] == whole["gradients"]
    code, text, _ = run("memory", small, "--gpus", 2, "--gpu-memory", 1.5)
    assert code == 1
    assert "DOES NOT FIT" in text
    code, _, error = run("memory", "none.yaml")
    assert code
    assert "none.yaml" in str(error)


def test_run_refuses_before_it_writes(small, tmp_path, monkeypatch):
    planner = memory_plan.planner_of(memory_plan.recipe_of(str(small)))
    needed = planner.share("ffn post", "ddp", 1).total + RESERVED
    monkeypatch.setattr(memory_plan, "machine", lambda: (1, 1, "ddp"))
    memory_plan.check(memory_plan.recipe_of(str(small)))  # too small to be counted
    memory_plan.check(memory_plan.recipe_of("upit/tiny"))  # pre-trains its base
    monkeypatch.setattr(memory_plan, "SMALL", 0)
    monkeypatch.setattr(memory_plan, "machine", lambda: (1, needed - 1, "ddp"))
    code, _, error = run("run", small, "--out", tmp_path / "out")
    assert code
    assert isinstance(error, ValueError)
    assert "stage ffn post needs" in str(error)
    assert not (tmp_path / "out").exists()
