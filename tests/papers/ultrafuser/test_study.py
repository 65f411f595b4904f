"""papers.ultrafuser.study: each stage is made once, from its parents, and is judged as
it was saved.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM

from moe_runtime.hf.training import fit
from moe_runtime.methods import ultrafuser
from papers.engine.domains import of_domain, places_of
from papers.engine.tiny import small_llama, train_tokenizer
from papers.ultrafuser import study as ultrafuser_study
from papers.ultrafuser.recipe import load_recipe
from papers.ultrafuser.study import Stages
from tests.support import fuser_study


class Made:
    """One run of the stages, and what it said."""

    def __init__(self):
        folder = Path(fuser_study.folder().name)
        self.path = folder / "study.yaml"
        self.out = folder / "out"
        self.said = []
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
    rows = [row for own in fuser_study.domain_rows().values() for row in own]
    held_out = made.stages.part("held_out")
    decode = made.stages.tokenizer.decode
    found = []
    for row in held_out:
        answer = decode(row["response_ids"], skip_special_tokens=True)
        asked = decode(row["prompt_ids"][1], skip_special_tokens=True)
        (own,) = [
            one for one in rows if one["completion"] == answer and f"# {one['prompt']}\n" == asked
        ]
        with torch.no_grad():
            found.append(model(**model.encode([own["prompt"]], [answer])).loss.item())
    return found


def test_what_was_saved_is_what_was_judged(made):
    for result in (made.gate, made.fused):
        assert result.losses == pytest.approx(
            losses(made, ultrafuser.load(result.folder)), rel=1e-5
        )
        assert result.loss == pytest.approx(fit.mean_loss(result.losses, result.tokens))
    for number, result in enumerate((*made.specialists, made.further)):
        model = AutoModelForCausalLM.from_pretrained(result.source)
        own = made.stages._single("held_out", number % 2)
        assert result.loss == pytest.approx(
            fit.mean_loss(*fit.row_losses(model, own, made.stages.tokenizer)), rel=1e-5
        )


def test_each_domain_has_its_losses(made):
    assert made.fused.rows == {"sums": 6, "words": 6}
    assert list(made.fused.domains) == [
        "sums",
        "words",
    ]
    for domain, place in places_of(made.fused.rows).items():
        own = of_domain(made.fused, domain)
        assert own.losses == made.fused.losses[place]
        assert own.loss == pytest.approx(made.fused.domains[domain])
    # a specialist learns its own domain
    assert made.specialists[0].domains["sums"] < made.stages.base().domains["sums"]


def test_stage_one_leaves_specialists_and_stage_two_moves_them(made):
    assert made.gate.trained_parameters < 0.05 * made.gate.parameters
    assert made.fused.trained_parameters == made.fused.parameters == made.gate.parameters
    warm = ultrafuser.load(made.gate.folder)
    fused = ultrafuser.load(made.fused.folder)
    for number, one in enumerate(made.specialists):
        own = state(one.source)
        for name, tensor in warm.specialists[number].state_dict().items():
            assert torch.equal(tensor, own[name])
        moved = fused.specialists[number].state_dict()
        for name in own:
            assert not torch.equal(moved[name], own[name])
    assert (
        json.loads((made.gate.folder / "fuser_config.json").read_text())["specialists"][0]["path"]
        == made.specialists[0].source
    )
    assert not any(made.gate.folder.rglob("model*.safetensors"))


def test_stage_two_begins_with_the_gate_of_stage_one(made):
    fuser = made.stages._fuser(
        [one.source for one in made.specialists], "float32", made.gate.folder
    )
    warm = ultrafuser.load(made.gate.folder)
    for a, b in zip(fuser.gate.parameters(), warm.gate.parameters(), strict=True):
        assert torch.equal(a, b)
    fresh, other = (
        Stages(made.recipe, made.out, seed=seed, say=print)._fuser(
            [one.source for one in made.specialists], "float32"
        )
        for seed in (0, 1)
    )
    assert not torch.equal(fresh.gate.up.weight, warm.gate.up.weight)
    assert not torch.equal(fresh.gate.up.weight, other.gate.up.weight)


def given(made, *models, **changes):
    """The recipe with specialists that are given: `models`, or those that it made."""
    pairs = zip(
        made.recipe.specialists.items(),
        models or [one.source for one in made.specialists],
        strict=True,
    )
    specialists = {
        name: {"template": one.template, "model": str(model)} for (name, one), model in pairs
    }
    return made.recipe.change(base_model=None, specialist=None, specialists=specialists, **changes)


class Caught(Exception):
    """A training that was about to begin."""


@pytest.fixture
def caught(monkeypatch):
    """What the next training is called with: the model and the settings."""
    calls = []

    def train(model, *arguments, **settings):
        calls.append((model, settings))
        raise Caught

    monkeypatch.setattr(fit, "train", train)
    return calls


def test_without_balance_neither_stage_has_it(made):
    plain = made.stages.fused(balanced=False)
    (parent,) = json.loads((plain.folder.parent / "result.json").read_text())["made_of"]["parents"]
    assert (
        parent
        == made.stages.gate(balanced=False).folder.parent.name
        != made.gate.folder.parent.name
    )


def test_every_training_draws_as_the_recipe_says(made, caught):
    """By its seed, with its replacement; those tuned further as the fused ones."""
    recipe = given(
        made, replacement=True, further=fuser_study.STEPS, stage1=fuser_study.STEPS | {"steps": 3}
    )
    stages = Stages(recipe, made.out, seed=3, say=print)
    for make in (
        lambda: stages.further("words"),
        stages.gate,
        lambda: stages.fused(two_stage=False),
    ):
        with pytest.raises(Caught):
            make()
        drawn = caught.pop()[1]["trainer"].keywords["sampler"]
        assert (drawn.seed, drawn.replacement, drawn.names) == (3, True, ("sums", "words"))
        with pytest.raises(Caught):
            stages.gate(balanced=False)
        drawn = caught.pop()[1]["trainer"].keywords["sampler"]
        assert (drawn.seed, drawn.replacement, drawn.names) == (3, False, (0,))


def test_a_specialist_tunes_in_float32(made, caught, tmp_path):
    with pytest.raises(Caught):
        Stages(given(made, dtype="bfloat16"), tmp_path, say=print).further("sums")
    assert {p.dtype for p in caught[0][0].parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def strangers(made, tmp_path_factory):
    """Folders of a wider model, and of one with another tokenizer."""
    folders = {name: tmp_path_factory.mktemp("strangers") / name for name in ("wide", "foreign")}
    wide = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_layers": 1,
        "max_length": 48,
        "seed": 1,
    }
    small_llama(made.stages.tokenizer, **wide).save_pretrained(folders["wide"])
    made.stages.tokenizer.save_pretrained(folders["wide"])
    own = train_tokenizer(["quite other words"] * 9, 290)
    small_llama(own, **wide | {"hidden_size": 32}).save_pretrained(folders["foreign"])
    own.save_pretrained(folders["foreign"])
    return folders


@pytest.mark.parametrize(
    "model, match",
    [
        ("{wide}", "The hidden sizes differ .32 of .*sums.model, 64 of .* but joint is False"),
        ("{foreign}", "of 'words' is .*Specialists must have the same vocabulary"),
        ("./none", "specialists.words.model './none' does not exist. Pass"),
        ("{wide}/none", "specialists.words.model .*/none' does not exist. Pass"),
        ("tests/none", "specialists.words.model 'tests/none' does not exist"),
        ("tests", "specialists.words.model 'tests' has no config.json. Pass"),
    ],
)
def test_models_that_do_not_fit_fail_before_anything(made, strangers, tmp_path, model, match):
    model = model.format(**strangers)
    with pytest.raises(ValueError, match=match):
        Stages(given(made, made.specialists[0].source, model), tmp_path / "out", say=print)
    assert not (tmp_path / "out").exists()


def test_a_joint_gate_fuses_several_sizes_in_one_stage(made, strangers, tmp_path):
    recipe = given(made, made.specialists[0].source, strangers["wide"], joint=True, two_stage=False)
    results = ultrafuser_study.run(recipe, tmp_path / "out", say=print)
    assert len(results) == 3
    assert not any(tmp_path.glob("out/gate-*"))
    assert ultrafuser.load(tmp_path / "out" / "model").gate.hidden_sizes == (32, 64)
    (tmp_path / "out" / "model").unlink()
    (tmp_path / "out" / "model").mkdir()
    with pytest.raises(ValueError, match="exists and is not a link"):
        ultrafuser_study.run(recipe, tmp_path / "out", say=print)


@pytest.mark.parametrize("engine", ["FSDP1", "DEEPSPEED"])
def test_engines_that_do_not_work_are_refused(made, monkeypatch, tmp_path, engine):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType[engine.removesuffix("1")])
    monkeypatch.setattr(
        AcceleratorState, "fsdp_plugin", SimpleNamespace(fsdp_version=1), raising=False
    )
    with pytest.raises(ValueError, match=f"distributed_type NO, MULTI_GPU .* but it is {engine}"):
        Stages(made.recipe, tmp_path / "out", say=print)
    assert not (tmp_path / "out").exists()


def chats(path, system=False):
    """Chats of which four at a time begin with the same exchange."""
    rows = []
    for i in range(40):
        texts = [f"{i % 10} and 1", str(i % 10 + 1), f"more {i}", "no"]
        turns = [
            {"role": "assistant" if n % 2 else "user", "content": text}
            for n, text in enumerate(texts)
        ]
        rows.append(
            {"messages": [{"role": "system", "content": "be brief"}] * (system and i == 17) + turns}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_no_prompt_is_in_both_parts(made, tmp_path):
    """Of chats that differ after their first exchange, in one domain or two."""
    path = chats(tmp_path / "chats.jsonl")
    recipe = made.recipe.change(
        domains__sums__train=path, domains__words__train=path, domains__words__held_out_rows=2
    )
    found = ultrafuser_study.study_rows(made.stages.encoder, recipe)
    held_out, train = (
        {str(prompts) for prompts in found[part]["prompt_ids"]} for part in ("held_out", "train")
    )
    assert held_out
    assert train
    assert held_out.isdisjoint(train)
    with pytest.raises(
        ValueError, match="domains.sums: No examples are left: 1 have a held-out prompt"
    ):
        ultrafuser_study.study_rows(
            made.stages.encoder, recipe.change(domains__sums__held_out_rows=39)
        )


@pytest.mark.parametrize("key", ["completion", "messages"])
def test_a_bad_row_is_named_where_it_stands(made, tmp_path, key):
    path = tmp_path / "bad.jsonl"
    match = r"example 18 of '.*bad.jsonl': "
    if key == "messages":
        chats(path, system=True)
        match += ".*does not support the turns system, user"
    else:
        rows = [{"prompt": f"{i} and", "completion": None if i == 17 else "x"} for i in range(20)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        match = "line 18 of .*bad.jsonl: completion is null, but expected a string"
    with pytest.raises(ValueError, match=f"domains.sums: {match}"):
        ultrafuser_study.study_rows(
            made.stages.encoder, made.recipe.change(domains__sums__train=str(path))
        )


def test_what_is_there_is_not_made_again(made, monkeypatch):
    monkeypatch.setattr(fit, "train", None)
    again = Stages(made.recipe, made.out, say=print)
    assert again.fused() == made.fused
    assert again.gate() == made.gate
    assert again.further("sums") == made.further
    assert again.fused().folder != made.fused.folder.parent


def test_other_settings_are_other_stages(made):
    other = made.stages.fused(two_stage=False, balanced=False)
    assert other.folder != made.fused.folder
    assert other.loss != made.fused.loss
    assert other.total_seconds == pytest.approx(
        other.seconds + sum(one.seconds for one in made.specialists)
    )
    assert made.fused.total_seconds == pytest.approx(
        sum(one.seconds for one in (*made.specialists, made.gate, made.fused))
    )


def test_weights_of_held_out_rows(made):
    weights = made.stages.weights(made.fused)
    assert [len(row) for row in weights] == made.fused.tokens
    torch.testing.assert_close(
        torch.tensor([sum(token) for row in weights for token in row]),
        torch.ones(sum(made.fused.tokens)),
    )


def test_given_specialists_are_taken_as_they_are(made, tmp_path):
    """And a run of the method says what came out."""
    recipe = given(made)
    said = []
    results = ultrafuser_study.run(recipe, tmp_path / "out", say=said.append)
    assert [one.source for one in results[:2]] == [one.source for one in made.specialists]
    assert [one.losses for one in results[:2]] == [
        pytest.approx(one.losses) for one in made.specialists
    ]
    # the same rows, gate and draws
    assert results[-1].losses == pytest.approx(made.fused.losses, rel=1e-4)
    assert (
        said[-1] == f"the fused model: {tmp_path / 'out' / 'model'}, which is {results[-1].folder}"
    )
    assert (tmp_path / "out" / "model").resolve() == results[-1].folder.resolve()
    for one in (tmp_path / "out").rglob("*.safetensors"):
        assert not one.parent.name.startswith("given")


def test_runs_know_the_method(made, monkeypatch):
    called = []
    monkeypatch.setattr(ultrafuser_study, "run", lambda path, out, **options: called.append(path))
    ultrafuser_study.run(made.path, made.out)
    assert called == [made.path]


def test_the_whole_of_a_changed_recipe_is_hashed(made):
    """A change of the data makes other data, one of an untouched stage does not."""
    key = made.stages._key
    other = made.recipe.change(max_length=40)
    assert Stages(other, made.out, say=print)._key != key
    other = made.recipe.model_copy(update={"stage2": made.recipe.stage2.change(steps=9)})
    assert Stages(other, made.out, say=print).gate() == made.gate
