"""papers.ultrafuser.study: each stage runs once, uses its parents, and is evaluated as it was
saved.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.hf.training import fit
from moe_runtime.io.files import read_json
from moe_runtime.methods import ultrafuser
from papers.engine.domains import of_domain, places_of
from papers.ultrafuser import study as ultrafuser_study
from papers.ultrafuser.recipe import load_recipe
from papers.ultrafuser.study import UltrafuserStages
from tests.support import fuser_study


class Made:
    """One run of the stages."""

    def __init__(self):
        folder = Path(fuser_study.folder().name)
        self.out = folder / "out"
        self.recipe = load_recipe(folder / "study.yaml")
        self.stages = UltrafuserStages(self.recipe, self.out, say=print)
        self.specialists = [self.stages.specialist(name) for name in self.stages.names]
        self.sources = [one.source for one in self.specialists]
        self.gate = self.stages.gate()
        self.fused = self.stages.fused()
        self.further = self.stages.further("sums")


@pytest.fixture(scope="module")
def made():
    return Made()


def losses(made, model):
    """Compute held-out losses example by example, from only the text."""
    prompts = {}
    for rows in fuser_study.domain_rows().values():
        for row in rows:
            prompts[f"# {row['prompt']}\n", row["completion"]] = row["prompt"]
    decode = made.stages.tokenizer.decode
    computed = []
    for row in made.stages.part("held_out"):
        answer = decode(row["response_ids"], skip_special_tokens=True)
        shown = decode(row["prompt_ids"][1], skip_special_tokens=True)
        with torch.no_grad():
            out = model(**model.encode([prompts[shown, answer]], [answer]), reduction="mean")
        computed.append(out.loss.item())
    return pytest.approx(computed, rel=1e-5)


def test_what_was_saved_is_what_was_evaluated(made):
    for result in (made.gate, made.fused):
        assert result.losses == losses(made, ultrafuser.load(result.folder))
        assert result.loss == pytest.approx(fit.mean_loss(result.losses, result.tokens))
    for number, result in enumerate((*made.specialists, made.further)):
        model = AutoModelForCausalLM.from_pretrained(result.source)
        rows = made.stages._single("held_out", number % 2)
        mean = fit.mean_loss(*fit.row_losses(model, rows, made.stages.tokenizer))
        assert result.loss == pytest.approx(mean, rel=1e-5)
    assert made.fused.rows == {"sums": 6, "words": 6}
    for domain, place in places_of(made.fused.rows).items():
        of = of_domain(made.fused, domain)
        assert of.losses == made.fused.losses[place]
        assert of.loss == pytest.approx(made.fused.domains[domain])
    # a specialist learns its own domain
    assert made.specialists[0].domains["sums"] < made.stages.base().domains["sums"]
    weights = made.stages.weights(made.fused)
    assert [len(row) for row in weights] == made.fused.tokens
    for row in weights:
        for token in row:
            assert sum(token) == pytest.approx(1)


def test_stage_one_leaves_specialists_and_stage_two_moves_them(made):
    assert made.gate.trained_parameters < 0.05 * made.gate.parameters
    assert made.fused.trained_parameters == made.fused.parameters == made.gate.parameters
    warm = ultrafuser.load(made.gate.folder)
    fused = ultrafuser.load(made.fused.folder)
    for number, source in enumerate(made.sources):
        before = AutoModelForCausalLM.from_pretrained(source).state_dict()
        moved = fused.specialists[number].state_dict()
        for name, tensor in warm.specialists[number].state_dict().items():
            assert torch.equal(tensor, before[name])
            assert not torch.equal(tensor, moved[name])
    config = read_json(made.gate.folder / "fuser_config.json")
    assert config["specialists"][0]["path"] == made.sources[0]
    assert not any(made.gate.folder.rglob("model*.safetensors"))
    # stage two starts with the gate of stage one, which is initialized by the seed
    begun = made.stages._fuser(
        made.sources,
        "float32",
        made.gate.folder,
    )
    for a, b in zip(
        begun.gate.parameters(),
        warm.gate.parameters(),
        strict=True,
    ):
        assert torch.equal(a, b)


def given(made, *models, **changes):
    """Return the recipe with given specialists: `models`, or those that the run trained."""
    specialists = {}
    for name, model in zip(
        made.stages.names,
        models or made.sources,
        strict=True,
    ):
        template = made.recipe.specialists[name].template
        specialists[name] = {"template": template, "model": str(model)}
    return made.recipe.change(
        base_model=None,
        specialist=None,
        specialists=specialists,
        **changes,
    )


class Caught(Exception):
    """A training that was about to start."""


@pytest.fixture
def caught(monkeypatch):
    """The arguments of the next training: the model and the settings."""
    calls = []

    def train(model, *arguments, **settings):
        calls.append((model, settings))
        raise Caught

    monkeypatch.setattr(fit, "train", train)
    return calls


def test_every_training_draws_as_the_recipe_says(made, caught):
    """Draws depend on its seed; specialists that are tuned further use the same draws as the fused
    ones.
    """
    stage1 = fuser_study.STEPS | {"steps": 3}
    recipe = given(
        made,
        further=fuser_study.STEPS,
        stage1=stage1,
    )
    stages = UltrafuserStages(
        recipe,
        made.out,
        seed=3,
        say=print,
    )

    def drawn(make, **options):
        with pytest.raises(Caught):
            make(**options)
        sampler = caught.pop()[1]["trainer"].keywords["sampler"]
        return sampler.seed, sampler.names

    balanced = (3, ("sums", "words"))
    assert drawn(lambda: stages.further("words")) == balanced
    assert drawn(stages.gate) == balanced
    assert drawn(stages.fused, two_stage=False) == balanced
    assert drawn(stages.gate, balanced=False) == (3, ("",))


def write_lines(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chats(path, system=False):
    """Return chats, in groups of four that start with the same exchange."""
    rows = []
    for i in range(40):
        turns = [
            {"role": "user", "content": f"{i % 10} and 1"},
            {"role": "assistant", "content": str(i % 10 + 1)},
            {"role": "user", "content": f"more {i}"},
            {"role": "assistant", "content": "no"},
        ]
        if system and i == 17:
            turns.insert(0, {"role": "system", "content": "be brief"})
        rows.append({"messages": turns})
    return write_lines(path, rows)


def test_no_prompt_is_in_both_parts(made, tmp_path):
    """Chats differ after their first exchange, in one domain or two."""
    path = chats(tmp_path / "chats.jsonl")
    recipe = made.recipe.change(
        domains__sums__train=path, domains__words__train=path, domains__words__held_out_rows=2
    )
    rows = ultrafuser_study.study_rows(made.stages.encoder, recipe)
    held_out = {str(prompts) for prompts in rows["held_out"]["prompt_ids"]}
    train = {str(prompts) for prompts in rows["train"]["prompt_ids"]}
    assert held_out
    assert train
    assert held_out.isdisjoint(train)
    recipe = recipe.change(domains__sums__held_out_rows=39)
    with pytest.raises(ValueError, match="domains.sums: No examples are left: 1 have a held-out"):
        ultrafuser_study.study_rows(made.stages.encoder, recipe)


def test_given_specialists_are_taken_as_they_are(made, tmp_path):
    """A run of the method also prints the results."""
    lines = []
    out = tmp_path / "out"
    results = ultrafuser_study.run(
        given(made),
        out,
        say=lines.append,
    )
    for one, before in zip(results[:2], made.specialists, strict=True):
        assert one.source == before.source
        assert one.losses == pytest.approx(before.losses)
    # the same examples, gate and draws
    fused = results[-1]
    assert fused.losses == pytest.approx(made.fused.losses, rel=1e-4)
    assert lines[-1] == f"the fused model: {out / 'model'}, which is {fused.folder}"
    assert (out / "model").resolve() == fused.folder.resolve()
    for one in out.rglob("*.safetensors"):
        assert not one.parent.name.startswith("given")
