"""papers.esft.study: each stage is made once, is what its parts alone give, and goes
on after a kill.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV2ForCausalLM

from moe_runtime.hf.training import fit
from moe_runtime.methods import esft
from moe_runtime.methods.lora import baseline as lora_baseline
from papers.esft import study as esft_study
from papers.esft.recipe import load_recipe
from papers.esft.study import Stages, join
from tests.support.dist_launch import killed
from tests.support.esft_study import write_study

ROOT = Path(__file__).resolve().parents[3]


class Made:
    """One run of the stages of a task, and what it said."""

    def __init__(self, folder: Path):
        self.recipe = load_recipe(write_study(folder))
        self.said = []
        self.out = folder / "out"
        self.stages = Stages(self.recipe, self.out, say=self.said.append)
        self.base = self.stages.base()
        self.selection = self.stages.selection("sums", "gate")
        self.esft = self.stages.esft("sums", self.selection)
        self.fft, self.lora = self.stages.fft("sums"), self.stages.lora("sums")
        self.all = (self.esft, self.fft, self.lora)

    def model(self):
        return AutoModelForCausalLM.from_pretrained(self.base.folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_RUNTIME_BACKEND", "torch")
        yield Made(tmp_path_factory.mktemp("esft"))


def loss_of(made, model, part) -> float:
    tokenizer = AutoTokenizer.from_pretrained(made.base.folder)
    return fit.mean_loss(*fit.row_losses(model, made.stages.part(part), tokenizer))


def test_the_base_is_judged_on_every_task(made):
    assert list(made.base.tasks) == ["sums", "words"]
    assert type(made.model()) is DeepseekV2ForCausalLM
    for task, one in made.base.tasks.items():
        assert one.loss == pytest.approx(loss_of(made, made.model(), f"{task}-held_out"), rel=1e-5)
    assert made.base.general_loss == pytest.approx(
        loss_of(made, made.model(), "general-held_out"), rel=1e-5
    )
    assert made.base.losses == [loss for one in made.base.tasks.values() for loss in one.losses]


def test_what_was_saved_is_what_was_judged(made):
    whole = AutoModelForCausalLM.from_pretrained(made.fft.folder)
    applied = made.model()
    adapted = lora_baseline.load_lora(made.model(), made.lora.folder)
    esft.apply(applied, made.esft.folder)
    for result, model in ((made.fft, whole), (made.esft, applied), (made.lora, adapted)):
        assert result.loss == pytest.approx(loss_of(made, model, "sums-held_out"), rel=1e-5)
        assert result.general_loss == pytest.approx(
            loss_of(made, model, "general-held_out"), rel=1e-5
        )
        assert result.loss < made.base.tasks["sums"].loss


def test_the_adapter_is_the_selection_and_nothing_else(made):
    selected = made.selection.experts
    assert {int(layer): tuple(ids) for layer, ids in made.esft.experts.items()} == selected
    adapter = esft.load_adapter(made.esft.folder)
    assert adapter.selection.experts == selected
    assert adapter.num_parameters == made.esft.trained_parameters
    before = made.model()
    after = made.model()
    esft.apply(after, adapter)
    then = after.state_dict()
    for name, value in before.state_dict().items():
        if ".experts." not in name or "shared" in name:
            assert torch.equal(value, then[name]), name
            continue
        layer = int(name.split(".")[2])
        changed = {e for e in range(len(value)) if not torch.equal(value[e], then[name][e])}
        assert changed <= set(selected[layer])


def test_the_scores_are_those_of_the_training_rows(made):
    rows = [row["input_ids"] for row in made.stages.part("sums-train")]
    found = esft.score_experts(made.model(), [torch.tensor([row]) for row in rows], 2048)
    kept = made.stages.scores("sums").scores
    assert kept.n_tokens == found.n_tokens == sum(map(len, rows)) < 2048
    torch.testing.assert_close(kept.gate, found.gate, rtol=1e-4, atol=1e-6)
    # a tie may fall either way in a batch
    torch.testing.assert_close(kept.token, found.token, rtol=0, atol=2e-3)


def test_no_row_is_in_two_parts(made):
    for task in ("sums", "words", "general"):
        parts = [made.stages.part(f"{task}-{kind}") for kind in ("train", "validation", "held_out")]
        kinds = [{tuple(row["input_ids"]) for row in rows} for rows in parts]
        assert [len(rows) for rows in parts] == [30, 6, 12]
        assert not kinds[0] & kinds[1] | kinds[0] & kinds[2] | kinds[1] & kinds[2]


def test_a_second_call_reads_what_is_there(made):
    before = {path: path.stat().st_mtime_ns for path in made.out.rglob("result.json")}
    again = Stages(made.recipe, made.out, say=lambda text: pytest.fail(text))
    assert again.base() == made.base
    assert again.fft("sums") == made.fft
    assert again.lora("sums") == made.lora
    assert again.selection("sums", "gate") == made.selection
    assert again.esft("sums", made.selection) == made.esft
    assert {path: path.stat().st_mtime_ns for path in made.out.rglob("result.json")} == before
    assert not list(made.out.glob("*.checkpoints"))


def test_what_a_stage_depends_on_makes_another(made):
    few = Stages(made.recipe.change(p__token=0.05), made.out, say=lambda text: None)
    assert few.selection("sums", "token") != made.stages.selection("sums", "token")
    alone = Stages(made.recipe.change(mix=0.0), made.out, say=lambda text: None)
    assert alone.esft("sums", made.selection).folder != made.esft.folder
    assert made.stages.lora("sums", rank=1).folder != made.lora.folder
    other = Stages(
        made.recipe.change(esft__weight_decay=0.0), made.out, seed=1, say=lambda text: None
    )
    assert other.base() == made.base  # every seed tunes the same base
    assert other.esft("sums", made.selection).folder != made.esft.folder
    assert (
        Stages(made.recipe.change(esft__save_steps=2), made.out, say=lambda text: None).fft("sums")
        == made.fft
    )


def test_joined_results_have_all_rows_and_means(made):
    other = made.esft._replace(
        losses=[0.0] * 12,
        general_losses=[0.0] * 12,
        seconds=made.esft.seconds + 2,
        trained_parameters=0,
    )
    both = join("both", {"a": made.esft, "b": other})
    assert both.losses == [*made.esft.losses, *other.losses]
    assert both.tokens == made.esft.tokens * 2
    assert both.general_losses == pytest.approx([loss / 2 for loss in made.esft.general_losses])
    assert (
        both.loss
        == pytest.approx(fit.mean_loss(both.losses, both.tokens))
        == pytest.approx(made.esft.loss / 2)
    )
    assert both.seconds == pytest.approx(made.esft.seconds + 1)
    assert both.trained_parameters == round(made.esft.trained_parameters / 2)
    assert both.tasks["b"] is other


def test_a_run_of_the_whole_method(made, tmp_path):
    said = []
    base, sums, words = esft_study.run(made.recipe, made.out, say=said.append)
    assert base == made.base
    assert sums == made.esft
    assert words.experts != sums.experts
    assert any(str(sums.folder) in line for line in said)
    assert any(line.startswith("words") for line in said)


def test_the_python_of_the_docs_runs(made, tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "esft.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(made.base.folder)
    exec(compile(code, "docs/esft.md", "exec"), {})
    assert esft.load_adapter(tmp_path / "adapter").num_parameters > 0
    assert "experts" in capsys.readouterr().out


def test_the_recipe_of_the_docs_is_one(made, tmp_path):
    text = (ROOT / "docs" / "esft.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "docs.yaml").write_text(block)
    recipe = load_recipe(tmp_path / "docs.yaml")
    plain = load_recipe("deepseek-v2-lite")
    assert list(recipe.tasks) == ["law"]
    assert (recipe.p, recipe.scores, recipe.mix) == (
        plain.p,
        plain.scores,
        plain.mix,
    )
    assert recipe.fft.learning_rate == plain.fft.learning_rate
    assert recipe.esft.weight_decay == plain.esft.weight_decay


KILLED = """
import sys
from papers.esft.study import Stages
stages = Stages(sys.argv[1], sys.argv[2])
stages.esft("sums", stages.selection("sums", "gate"))
"""


@pytest.mark.slow
def test_a_killed_training_goes_on_from_its_checkpoint(tmp_path):
    path = write_study(tmp_path)
    recipe = load_recipe(path).change(esft__steps=24, esft__save_steps=3, evaluations=8)
    path.write_text(json.dumps(recipe.to_dict()))  # JSON is YAML
    out = tmp_path / "out"
    Stages(recipe, out, say=lambda text: None).scores("sums")
    killed(
        KILLED,
        path,
        out,
        when=lambda: list(out.glob("esft-*.checkpoints/checkpoint-*/history.json")),
    )
    assert not list(out.glob("esft-*/result.json"))
    (checkpoints,) = {
        path.parents[1] for path in out.glob("esft-*.checkpoints/checkpoint-*/history.json")
    }
    last = fit.last_checkpoint(checkpoints)
    weights = sum(path.stat().st_size for path in last.glob("*.safetensors"))
    # the selected experts alone
    assert 0 < weights < 60_000 < (tmp_path / "base" / "model.safetensors").stat().st_size
    resumed = Stages(recipe, out, say=lambda text: None)
    straight = Stages(
        recipe.change(esft__save_steps=None), tmp_path / "other", say=lambda text: None
    )
    one, other = (
        stages.esft("sums", stages.selection("sums", "gate")) for stages in (resumed, straight)
    )
    assert one.losses == other.losses
    assert one.history == other.history
    assert one.steps == 24
    first, second = (esft.load_adapter(result.folder).tensors for result in (one, other))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name])
    assert not list(out.glob("*.checkpoints"))
