"""moe_runtime.methods.fuser_stages: each stage is made once, from its parents, and is judged as it was saved."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.hf import fit
from moe_runtime.methods import fuser_folders, fuser_stages, runs, ultrafuser
from moe_runtime.methods.fuser_recipe import load_recipe
from moe_runtime.methods.fuser_results import of_domain, places_of
from moe_runtime.methods.fuser_stages import Stages
from tests.support import fuser_study


class Made:
    """One run of the stages, and what it said."""

    def __init__(self):
        folder = Path(fuser_study.folder().name)
        self.path, self.out, self.said = folder / "study.yaml", folder / "out", []
        self.recipe = load_recipe(self.path)
        self.stages = Stages(self.recipe, self.out, say=self.said.append)
        self.specialists = [self.stages.specialist(name) for name in self.stages.names]
        self.gate, self.fused = self.stages.gate(), self.stages.fused()
        self.further = self.stages.further("sums")


@pytest.fixture(scope="module")
def made():
    return Made()


def state(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def losses(made, model):
    """Held-out losses row by row, from the text alone."""
    rows, held_out = [row for own in fuser_study.domain_rows().values() for row in own], made.stages.part("held_out")
    decode, found = made.stages.tokenizer.decode, []
    for row in held_out:
        answer = decode(row["response_ids"], skip_special_tokens=True)
        asked = decode(row["prompt_ids"][1], skip_special_tokens=True)
        (own,) = [one for one in rows if one["completion"] == answer and f"# {one['prompt']}\n" == asked]
        with torch.no_grad():
            found.append(model(**model.encode([own["prompt"]], [answer])).loss.item())
    return found


def test_what_was_saved_is_what_was_judged(made):
    for result in (made.gate, made.fused):
        assert result.losses == pytest.approx(losses(made, ultrafuser.load(result.folder)), rel=1e-5)
        assert result.loss == pytest.approx(fit.mean_loss(result.losses, result.tokens))
    for number, result in enumerate((*made.specialists, made.further)):
        model, own = AutoModelForCausalLM.from_pretrained(result.source), made.stages._single("held_out", number % 2)
        assert result.loss == pytest.approx(fit.held_out_loss(model, own, made.stages.tokenizer), rel=1e-5)


def test_each_domain_has_its_losses(made):
    assert made.fused.rows == {"sums": 6, "words": 6} and list(made.fused.domains) == ["sums", "words"]
    for domain, place in places_of(made.fused.rows).items():
        own = of_domain(made.fused, domain)
        assert own.losses == made.fused.losses[place] and own.loss == pytest.approx(made.fused.domains[domain])
    # a specialist learns its own domain
    assert made.specialists[0].domains["sums"] < made.stages.base().domains["sums"]


def test_stage_one_leaves_specialists_and_stage_two_moves_them(made):
    assert made.gate.trained_parameters < 0.05 * made.gate.parameters
    assert made.fused.trained_parameters == made.fused.parameters == made.gate.parameters
    warm, fused = ultrafuser.load(made.gate.folder), ultrafuser.load(made.fused.folder)
    for number, one in enumerate(made.specialists):
        own = state(one.source)
        assert all(torch.equal(tensor, own[name]) for name, tensor in warm.specialists[number].state_dict().items())
        moved = fused.specialists[number].state_dict()
        assert not any(torch.equal(moved[name], own[name]) for name in own)
    assert (
        json.loads((made.gate.folder / "fuser_config.json").read_text())["specialists"][0]["path"]
        == made.specialists[0].source
    )
    assert not any(made.gate.folder.rglob("model*.safetensors"))


def test_stage_two_begins_with_the_gate_of_stage_one(made):
    fuser = made.stages._fuser([one.source for one in made.specialists], made.gate.folder)
    warm = ultrafuser.load(made.gate.folder)
    assert all(torch.equal(a, b) for a, b in zip(fuser.gate.parameters(), warm.gate.parameters(), strict=True))
    fresh = made.stages._fuser([one.source for one in made.specialists])
    assert not torch.equal(fresh.gate.up.weight, warm.gate.up.weight)


def test_what_is_there_is_not_made_again(made, monkeypatch):
    monkeypatch.setattr(fit, "train", None)
    again = Stages(made.recipe, made.out, say=print)
    assert again.fused() == made.fused and again.gate() == made.gate and again.further("sums") == made.further
    assert again.fused().folder != made.fused.folder.parent


def test_other_settings_are_other_stages(made):
    other = made.stages.fused(two_stage=False, balanced=False)
    assert other.folder != made.fused.folder and other.loss != made.fused.loss
    assert other.total_seconds == pytest.approx(other.seconds + sum(one.seconds for one in made.specialists))
    assert made.fused.total_seconds == pytest.approx(
        sum(one.seconds for one in (*made.specialists, made.gate, made.fused))
    )


def test_a_course_is_kept_where_it_is_asked_for(made):
    watched = made.stages.fused(checkpoints=5)
    assert [step for step, _ in watched.course] == [1, 2, 3, 4, 5, 6]
    last = watched.course[-1][1]
    assert last == pytest.approx(watched.domains) and made.fused.course is None


def test_weights_of_held_out_rows(made):
    weights = made.stages.weights(made.fused)
    assert [len(row) for row in weights] == made.fused.tokens
    torch.testing.assert_close(
        torch.tensor([sum(token) for row in weights for token in row]), torch.ones(sum(made.fused.tokens))
    )


def test_given_specialists_are_taken_as_they_are(made, tmp_path):
    """And a run of the method says what came out."""
    given = {
        name: {"template": one.template, "model": result.source}
        for (name, one), result in zip(made.recipe.specialists.items(), made.specialists, strict=True)
    }
    recipe = made.recipe.change(base_model=None, specialist=None, specialists=given)
    said = []
    results = fuser_stages.run(recipe, tmp_path / "out", say=said.append)
    assert [one.source for one in results[:2]] == [one.source for one in made.specialists]
    assert [one.losses for one in results[:2]] == [pytest.approx(one.losses) for one in made.specialists]
    assert results[-1].losses == pytest.approx(made.fused.losses, rel=1e-4)  # the same rows, gate and draws
    assert said[-1] == f"the fused model: {results[-1].folder}"
    assert not any(one.parent.name.startswith("given") for one in (tmp_path / "out").rglob("*.safetensors"))


def test_runs_know_the_method(made, monkeypatch):
    called = []
    monkeypatch.setattr(fuser_stages, "run", lambda path, out, **options: called.append(path))
    runs.run(made.path, made.out)
    assert called == [made.path]


def test_folders_are_fused_and_answer(made, tmp_path):
    sources = [one.source for one in made.specialists]
    receipt = fuser_folders.fuse_folders(
        sources, tmp_path / "new", templates=made.recipe.templates, names=("sums", "words"), copy=True
    )
    assert receipt.names == ("sums", "words") and receipt.gate_parameters == made.gate.trained_parameters
    fuser = ultrafuser.load(tmp_path / "new")
    assert list(fuser.templates) == list(ultrafuser.load(made.fused.folder).templates)
    prompts = ["1 and 2", "turn add 1"]
    (first, second) = fuser_folders.answer(made.fused.folder, prompts, max_new_tokens=4, do_sample=False)
    assert [first] == fuser_folders.answer(made.fused.folder, prompts[:1], max_new_tokens=4, do_sample=False)
    sampled = [
        fuser_folders.answer(made.fused.folder, prompts, seed=seed, max_new_tokens=6, do_sample=True)
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2] and second is not None
    with pytest.raises(ValueError, match="which exists"):
        fuser_folders.fuse_folders(sources, tmp_path / "new")


def test_the_whole_of_a_changed_recipe_is_hashed(made):
    """A change of the data makes other data, one of an untouched stage does not."""
    key = made.stages._key
    other = made.recipe.change(max_length=40)
    assert Stages(other, made.out, say=print)._key != key
    other = replace(made.recipe, stage2=made.recipe.stage2.change(steps=9))
    assert Stages(other, made.out, say=print).gate() == made.gate
