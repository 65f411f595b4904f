"""papers.esft.study: each stage runs once, equals its parts run separately, and resumes after a
kill.
"""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV2ForCausalLM

from moe_runtime.hf.training import fit
from moe_runtime.methods import esft
from moe_runtime.methods.lora import baseline as lora_baseline
from papers.esft.recipe import load_recipe
from papers.esft.study import EsftStages, join
from tests.support.esft_study import write_study

ROOT = Path(__file__).resolve().parents[3]


class Made:
    """One run of the stages of a task."""

    def __init__(self, folder: Path):
        self.recipe = load_recipe(write_study(folder))
        self.out = folder / "out"
        self.stages = self.again()
        self.base = self.stages.base()
        self.selection = self.stages.selection("sums", "gate")
        self.esft = self.stages.esft("sums", self.selection)
        self.fft = self.stages.fft("sums")
        self.lora = self.stages.lora("sums")

    def again(self, say=lambda text: None, seed=0, **changes) -> EsftStages:
        """Return the same stages with other recipe settings."""
        return EsftStages(
            self.recipe.change(**changes),
            self.out,
            seed=seed,
            say=say,
        )

    def model(self):
        return AutoModelForCausalLM.from_pretrained(self.base.folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_RUNTIME_BACKEND", "torch")
        yield Made(tmp_path_factory.mktemp("esft"))


def loss_of(made, model, part) -> float:
    tokenizer = AutoTokenizer.from_pretrained(made.base.folder)
    rows = fit.row_losses(
        model,
        made.stages.part(part),
        tokenizer,
    )
    return pytest.approx(fit.mean_loss(*rows), rel=1e-5)


def test_what_was_saved_is_what_was_evaluated(made):
    base = made.model()
    assert type(base) is DeepseekV2ForCausalLM
    assert list(made.base.tasks) == ["sums", "words"]
    for task, one in made.base.tasks.items():
        assert one.loss == loss_of(made, base, f"{task}-held_out")
    assert made.base.general_loss == loss_of(made, base, "general-held_out")
    whole = AutoModelForCausalLM.from_pretrained(made.fft.folder)
    adapted = lora_baseline.load_lora(made.model(), made.lora.folder)
    esft.apply(base, made.esft.folder)
    for result, model in ((made.fft, whole), (made.esft, base), (made.lora, adapted)):
        assert result.loss == loss_of(made, model, "sums-held_out")
        assert result.general_loss == loss_of(made, model, "general-held_out")
        assert result.loss < made.base.tasks["sums"].loss


def test_the_adapter_is_the_selection_and_nothing_else(made):
    selected = made.selection.experts
    assert {int(layer): tuple(ids) for layer, ids in made.esft.experts.items()} == selected
    adapter = esft.load_adapter(made.esft.folder)
    assert adapter.selection.experts == selected
    assert adapter.num_parameters == made.esft.trained_parameters


def test_the_scores_are_those_of_the_training_rows(made):
    rows = made.stages.part("sums-train")["input_ids"]
    scored = esft.score_experts(
        made.model(),
        [torch.tensor([row]) for row in rows],
        2048,
    )
    stored = made.stages.scores("sums").scores
    assert stored.n_tokens == scored.n_tokens == sum(map(len, rows)) < 2048
    torch.testing.assert_close(stored.gate, scored.gate, rtol=1e-4, atol=1e-6)
    # in a batch, ties may be broken differently
    torch.testing.assert_close(stored.token, scored.token, rtol=0, atol=2e-3)


def test_joined_results_have_all_rows_and_means(made):
    one = made.esft
    other = one._replace(
        losses=[0.0] * 12,
        general_losses=[0.0] * 12,
        trained_parameters=0,
    )
    both = join(
        "both",
        {
            "a": one,
            "b": other._replace(seconds=one.seconds + 2),
        },
    )
    assert both.losses == [*one.losses, *other.losses]
    assert both.tokens == one.tokens * 2
    assert both.general_losses == pytest.approx([loss / 2 for loss in one.general_losses])
    assert both.loss == pytest.approx(one.loss / 2)
    assert both.seconds == pytest.approx(one.seconds + 1)
    assert both.trained_parameters == round(one.trained_parameters / 2)


def test_the_python_of_the_docs_runs(made, tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "esft.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(made.base.folder)
    exec(compile(code, "docs/esft.md", "exec"), {})
    assert esft.load_adapter(tmp_path / "adapter").num_parameters > 0
    assert "experts" in capsys.readouterr().out
