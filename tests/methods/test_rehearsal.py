"""Rehearsals: every paper-size recipe runs to its final model, on small bases and small data sets
with the same format.
"""

import importlib
import math
import re

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from moe_runtime.methods import esft, ultrafuser
from papers.cli import app
from papers.engine.recipe import METHODS
from papers.memory_plan import recipe_of
from tests.support import dist_rehearsal, rehearsal
from tests.support.dist_launch import launch

PATHS = [
    path
    for path in sorted(METHODS.glob("*/recipes/*.yaml"))
    if re.search(
        "^# Machine",
        path.read_text(),
        re.MULTILINE,
    )
]
PATHS = [path for path in PATHS if not path.stem.startswith("smollm2")]  # not from a paper
MAGICODER = (
    "You are an exceptionally intelligent coding assistant that consistently delivers accurate "
    "and reliable responses"
)
DEEPSEEK = "User: Write a .*\n\nAssistant: def "
# class of the final model, and the beginning of its first example
EXPECTED = {
    "deepseek-coder-1.3b": ("LlamaForCausalLM", rehearsal.DEEPSEEK_BOS + MAGICODER),
    "stablecode-3b": ("StableLmForCausalLM", re.escape("<|endoftext|>") + MAGICODER),
    "tinyllama-1.1b": ("LlamaForCausalLM", "<s> ?" + MAGICODER),
    "deepseek-v2-lite": ("DeepseekV2ForCausalLM", rehearsal.DEEPSEEK_BOS + DEEPSEEK),
    "sheared-llama-2.7b": ("MoeRuntimeLlamaForCausalLM", "<s> ?" + DEEPSEEK),
    "llama-2-7b-lora": ("MoeRuntimeLlamaForCausalLM", "<s> ?" + DEEPSEEK),
    "ultrafuser-13b": (None, None),
}


def test_every_recipe_is_rehearsed():
    assert {path.stem for path in PATHS} == set(EXPECTED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    PATHS,
    ids=lambda path: path.stem,
)
def test_recipe_end_to_end(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(str(path))
    rehearsal.save_hub(tmp_path, recipe)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(rehearsal.divided(recipe).to_dict()))
    engine = re.search(
        r"^# Machine: .* GB(?:, (\w+))?",
        path.read_text(),
        re.MULTILINE,
    )[1]
    if engine is None:
        done = CliRunner().invoke(app, ["run", "mine.yaml", "--out", "out"])
        assert done.exit_code == 0, (done.output, done.exception)
    else:
        (tmp_path / "out").mkdir()
        launch(
            dist_rehearsal.__file__,
            2,
            tmp_path,
            "out",
            engine,
            recipe.method,
            "mine.yaml",
        )
    # a single process finds existing results, whichever engine made them
    study = importlib.import_module(f"papers.{recipe.method}.study")
    before = {one: one.stat().st_mtime_ns for one in (tmp_path / "out").rglob("result.json")}
    results = study.run(
        "mine.yaml",
        tmp_path / "out",
        say=lambda text: None,
    )
    assert {
        one: one.stat().st_mtime_ns for one in (tmp_path / "out").rglob("result.json")
    } == before
    for one in results:
        assert math.isfinite(one.loss)
    base = results[0]
    last = results[-1]
    assert last.loss != base.loss
    assert last.steps > 0
    _check(
        recipe,
        path.stem,
        base,
        last,
        tmp_path / "out",
    )


def _check(recipe, name: str, base, last, out) -> None:
    kind, begins = EXPECTED[name]
    if recipe.method == "ultrafuser":
        fuser = ultrafuser.load(last.folder)
        assert len(fuser.specialists) == 3
        for p in fuser.specialists.parameters():
            assert p.dtype == torch.bfloat16
        assert last.source != base.source
        assert last.trained_parameters > 0
        return
    ids = AutoTokenizer.from_pretrained(next(out.glob("data-*")) / "tokenizer")
    part = {"xft": "train", "esft": "code-train", "upit": "code-train"}[recipe.method]
    study = importlib.import_module(f"papers.{recipe.method}.study")
    stages = getattr(study, f"{recipe.method.title()}Stages")(
        "mine.yaml", out, say=lambda text: None
    )
    assert re.match(
        begins,
        ids.decode(stages.part(part)[0]["input_ids"]),
    ), ids.decode(stages.part(part)[0]["input_ids"])
    if recipe.method == "esft":
        folder = base.folder
    else:
        folder = last.folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert type(model).__name__ == kind
    assert model.dtype == torch.bfloat16
    config = AutoConfig.from_pretrained(recipe.base_model)
    assert model.config.rope_parameters == config.rope_parameters
    assert model.config.vocab_size == config.vocab_size
    if recipe.method == "esft":
        adapter = esft.apply(model, last.folder)
        assert adapter is not None
