"""papers.xft.study: each stage is made once, is what its parts alone give, and goes on
after a kill.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from moe_runtime.hf.dropin.replay import record_routing
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.fit import mean_loss, pair_collator, row_losses
from moe_runtime.io.files import read_json
from moe_runtime.methods import xft
from papers.engine.stages import made_once
from papers.engine.tiny import train_tokenizer
from papers.xft import recipe as recipe_module
from papers.xft import study as xft_study
from papers.xft.recipe import Recipe
from papers.xft.study import Stages
from tests.hf.tiny import distance
from tests.papers.xft.test_recipe import blocks
from tests.support.dist_launch import killed

WORDS = ["add", "mul", "sub", "neg", "pow", "div", "mod", "inv"]
STEPS = {"learning_rate": 3e-3, "batch_size": 4, "optimizer": "adamw_torch", "steps": 6}


def write_rows(path: Path, count: int = 40) -> Path:
    """Rows in the columns of evol-codealpaca, all different."""
    rows = [
        {
            "instruction": f"Write {word} of {{{i}}}.",
            "output": f"def {word}{i}(x):\n    return {word}(x, {i})\n",
        }
        for i in range(count // len(WORDS) + 1)
        for word in WORDS
    ][:count]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_base(folder: Path) -> Path:
    """A random Llama of two layers, tied, with its tokenizer, as a base to tune."""
    tokenizer = train_tokenizer(
        ["def add(x): return x + 1", "@@ Instruction Response Write"] * 9, 280
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_theta=1e5,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_recipe(folder: Path, **changes) -> Recipe:
    """A recipe of seconds on the two of above."""
    values = {
        "base_model": str(write_base(folder / "base")),
        "data": {
            "train": str(write_rows(folder / "rows.jsonl")),
            "held_out_rows": 8,
            "prompt": "plain",
            "max_length": 64,
        },
        "experts": {"num_experts": 4, "top_k": 3},
        "sft": STEPS | {"steps": 8},
        "tune": STEPS,
        "mix": STEPS | {"steps": 2, "learning_rate": 0.5},
        "evaluations": 2,
    }
    return Recipe.from_dict(values).change(**changes)


class Made:
    """One run of all stages, and what it said."""

    def __init__(self, folder: Path):
        self.recipe = make_recipe(folder)
        self.said = []
        self.stages = Stages(self.recipe, folder / "out", say=self.said.append)
        self.base, self.sft, self.moe = self.stages.base(), self.stages.sft(), self.stages.moe()
        self.init, self.mix = self.stages.merge(self.moe), self.stages.mix(self.moe)
        self.ewa = self.stages.ewa()
        self.all = (self.base, self.sft, self.moe, self.init, self.mix, self.ewa)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("stages"))


def weights(result) -> dict:
    return AutoModelForCausalLM.from_pretrained(result.folder).state_dict()


def test_each_stage_is_a_folder_that_transformers_loads(made):
    assert len({result.folder for result in made.all}) == len(made.all)
    for result in made.all:
        model, tokenizer = (
            c.from_pretrained(result.folder) for c in (AutoModelForCausalLM, AutoTokenizer)
        )
        assert type(model).__name__ == (
            "MoeRuntimeLlamaForCausalLM" if result is made.moe else "LlamaForCausalLM"
        )
        assert len(tokenizer) == model.config.vocab_size
        assert mean_loss(*row_losses(model, made.stages.held_out, tokenizer)) == pytest.approx(
            result.loss, rel=1e-5
        )
        assert result.parameters == sum(p.numel() for p in model.parameters())
        assert read_json(result.folder / "config.json")["dtype"] == "float32"


def test_no_row_is_trained_on_and_judged_by(made):
    train, held = (
        {tuple(row["input_ids"]) for row in rows}
        for rows in (made.stages.train_rows, made.stages.held_out)
    )
    assert len(train) == 32
    assert len(held) == 8
    assert not train & held


def test_rows_to_learn_mixing_on_are_held_back_from_tuning_alone(made):
    recipe = made.recipe.change(mix_rows=5)
    stages = Stages(recipe, made.stages.out, say=lambda text: None)
    rows = {}
    stages._train = lambda name, model, train_rows, *_, **__: (
        rows.update({name: train_rows}) or real(name, model, train_rows, *_)
    )
    real = made.stages._train
    stages.sft(steps=1)
    moe = stages.moe()
    mixed = stages.mix(moe)
    sets = {name: {tuple(ids) for ids in of["input_ids"]} for name, of in rows.items()}
    assert {name: len(ids) for name, ids in sets.items()} == {"sft": 32, "moe": 27, "mix": 5}
    assert sets["moe"] | sets["mix"] == sets["sft"]
    assert stages.base() == made.base
    assert moe.folder != made.moe.folder
    assert mixed.alpha != made.mix.alpha
    with pytest.raises(ValueError, match="mix_rows .32. leaves no training examples"):
        Stages(recipe.change(mix_rows=32), made.stages.out).base()


@pytest.fixture
def joined(tmp_path, monkeypatch) -> Stages:
    return joined_stages(tmp_path, monkeypatch)


def joined_stages(tmp_path: Path, monkeypatch) -> Stages:
    """Stages on a joined source of made-up rows, some of which are too long to keep, with two
    experts per token.
    """
    words = {"code": "def", "prose": "once", "arithmetic": "1 + 1"}
    long = "x" * 99
    part = [
        {"prompt": f"{word} {i} {long * (i % 5 == 3)}", "completion": word}
        for i in range(12)
        for word in words.values()
    ]
    monkeypatch.setitem(xft_study.SOURCES, "+".join(words), lambda: (part[:24], part[24:]))
    changes = {
        "data__train": "+".join(words),
        "data__limit": 18,
        "data__held_out_rows": 5,
        "data__validation_rows": 3,
    }
    recipe = make_recipe(tmp_path, experts={"num_experts": 4, "top_k": 2}, **changes)
    return Stages(recipe, tmp_path / "out", say=lambda text: None)


def test_the_domains_of_a_joined_source(joined):
    begins = {"def": 0, "onc": 1, "1 +": 2}
    for part in ("train", "held_out", "validation"):
        texts = joined.tokenizer.batch_decode(
            [*joined.part(part)["input_ids"]], skip_special_tokens=True
        )
        assert joined.domains_of(part) == [begins[text[:3]] for text in texts]
        assert joined.part(part).column_names == ["input_ids", "labels"]
    base = joined.base()
    ordered = joined.by_domain(base)
    places = joined.domains_of("held_out")
    assert list(ordered.rows) == list(joined.domains)
    assert sum(ordered.rows.values()) == len(places) == 5
    start = 0
    for place, count in enumerate(ordered.rows.values()):
        of_domain = [loss for loss, found in zip(base.losses, places) if found == place]
        assert ordered.losses[start : start + count] == of_domain
        start += count


def test_tuning_by_domain_trains_the_expert_of_the_domain_alone(joined):
    model = AutoModelForCausalLM.from_pretrained(joined.base().folder)
    xft.upcycle(model, num_experts=4, top_k=2)
    stack = model.model.layers[1].mlp.experts.down_proj
    rows = [row for row, place in zip(joined.train_rows, joined.domains_of("train")) if place == 1]
    batch = pair_collator(joined.tokenizer)(rows)
    with (
        xft_study.routed_by_domain(model, joined._known_domains()),
        record_routing(model) as record,
    ):
        model(**batch).loss.backward()
    for calls in record.ids.values():
        for ids in calls:
            assert (ids == torch.tensor([2, 0])).all()
    assert [bool(grad.any()) for grad in stack.grad] == [True, False, True, False]
    moe = joined.moe(by_domain=True)
    own = joined.moe()
    assert moe.folder != own.folder
    assert moe.losses != own.losses
    assert moe.validation != moe.loss
    model = ranks.load_model(moe.folder, "float32")
    assert mean_loss(*row_losses(model, joined.held_out, joined.tokenizer)) == pytest.approx(
        moe.loss
    )


def test_averages_of_an_sft(made):
    sft = made.stages.sft(averages=True)
    ema, swa = (made.stages.average(sft, kind) for kind in ("ema", "swa"))
    assert sft.losses == made.sft.losses
    assert sft.folder != made.sft.folder
    assert len({sft.loss, ema.loss, swa.loss}) == 3
    assert ema.total_seconds == sft.seconds
    assert weights(swa).keys() == weights(sft).keys()


def test_validation_rows_choose_the_best_step_and_judge_nothing(tmp_path):
    far = {
        "sft__learning_rate": 1.0,
        "sft__schedule": "constant",
        "sft__keep_best": True,
        "evaluations": 4,
    }
    recipe = make_recipe(tmp_path, data__validation_rows=6, **far)
    stages = Stages(recipe, tmp_path / "out", say=lambda text: None)
    train, held, chosen = (
        {tuple(ids) for ids in stages.part(name)["input_ids"]}
        for name in ("train", "held_out", "validation")
    )
    assert (len(train), len(held), len(chosen)) == (
        26,
        8,
        6,
    )
    assert not train & held | train & chosen | held & chosen
    sft = stages.sft()
    model = AutoModelForCausalLM.from_pretrained(sft.folder)
    best = mean_loss(*row_losses(model, stages.part("validation"), stages.tokenizer))
    losses = [loss for _, loss in sft.history]
    assert best == pytest.approx(min(losses), rel=1e-5)
    assert len(losses) == 4
    assert min(losses) < losses[-1]
    assert sft.loss == pytest.approx(
        mean_loss(*row_losses(model, stages.held_out, stages.tokenizer)), rel=1e-5
    )


def test_a_gate_that_cannot_be_merged_is_refused_before_anything_is_trained(tmp_path):
    recipe = make_recipe(tmp_path, experts={"num_experts": 4, "top_k": 2, "gate": "topk_softmax"})
    with pytest.raises(ValueError, match="gate must be one of xft"):
        xft_study.run(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_is_kept(tmp_path):
    made_once(
        tmp_path / "stage",
        "result.json",
        lambda folder: {"loss": float("nan"), "losses": [float("inf")]},
    )
    values = read_json(tmp_path / "stage" / "result.json")
    assert values["loss"] != values["loss"]
    assert values["losses"] == [float("inf")]


def test_the_merges_are_xft_merge(made):
    def merged(**how):
        return xft.merge(AutoModelForCausalLM.from_pretrained(made.moe.folder), **how).state_dict()

    for result, how in ((made.init, {"shared_rate": 0.75}), (made.mix, {"alpha": made.mix.alpha})):
        want = merged(**how)
        got = weights(result)
        assert want.keys() == got.keys()
        for name in want:
            assert torch.equal(want[name], got[name])
    assert made.init.alpha == [pytest.approx([0.75, *[0.25 / 3] * 3])] * 2
    for row in made.mix.alpha:
        assert row[0] == 0.75
        assert sum(row) == pytest.approx(1)
        assert row[1:] != pytest.approx([0.25 / 3] * 3, abs=1e-4)


def test_bad_settings_of_experts_and_merges(made):
    with pytest.raises(ValueError, match="shared_rate must be from 0 to 1"):
        made.stages.mix(made.moe, shared_rate=2)
    with pytest.raises(ValueError, match=r"top_k must be at most num_experts .4., but got 5"):
        made.stages.moe(top_k=5)


def test_ewa_is_the_mean_of_its_experts(made):
    base = weights(made.base)
    ewa = weights(made.ewa)
    for name, value in base.items():
        assert distance(ewa[name], value) > 0
    assert not list(made.stages.out.glob("ewa-*/experts"))


def test_a_second_call_reads_what_is_there(made):
    before = {path: path.stat().st_mtime_ns for path in made.stages.out.rglob("result.json")}
    again = Stages(made.recipe, made.stages.out, say=lambda text: pytest.fail(text))
    moe = again.moe()
    assert moe == made.moe
    assert again.mix(moe) == made.mix
    assert again.sft() == made.sft
    assert again.ewa() == made.ewa
    # how a training is carried out does not make another stage of it
    recipe = made.recipe.change(
        tune__per_device_batch_size=2, tune__save_steps=5, tune__gradient_checkpointing=True
    )
    assert Stages(recipe, made.stages.out, say=lambda text: pytest.fail(text)).moe() == made.moe
    assert {
        path: path.stat().st_mtime_ns for path in made.stages.out.rglob("result.json")
    } == before
    assert not list(made.stages.out.glob("*.checkpoints"))


def test_what_a_stage_depends_on_makes_another(made):
    out = made.stages.out
    assert made.stages.sft(steps=1).folder != made.sft.folder
    assert made.stages.moe(top_k=2).folder != made.moe.folder
    assert made.stages.mix(made.moe, shared_rate=0.5).folder != made.mix.folder
    other = Stages(made.recipe.change(tune__steps=1), out, seed=1, say=lambda text: None)
    assert other.base() == made.base  # every seed tunes the same base
    assert other.moe().folder != made.moe.folder
    assert (
        Stages(made.recipe.change(data__max_length=48), out, say=lambda text: None).base().folder
        != made.base.folder
    )


def test_a_refused_stage_leaves_nothing(made):
    moe = made.stages.moe(gate="topk_softmax", top_k=2)
    with pytest.raises(ValueError, match="no shared expert"):
        made.stages.mix(moe)
    assert not [path for path in made.stages.out.iterdir() if ".tmp-" in path.name]


def test_the_python_of_the_docs_runs(tmp_path, monkeypatch, capsys):
    (code,) = blocks("recipes.md", "python")
    small = make_recipe(tmp_path)
    monkeypatch.setattr(recipe_module, "load_recipe", lambda name: {"tiny": small}[name])
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, "docs/recipes.md", "exec"), names)
    assert names["merged"].folder.is_relative_to("runs/xft")
    assert "held-out loss" in capsys.readouterr().out


KILLED = """
import sys
from papers.xft import study
from papers.xft.recipe import load_recipe
stages = study.Stages(load_recipe(sys.argv[1]), sys.argv[2])
print(stages.moe().losses)
"""


@pytest.mark.slow
def test_a_killed_training_goes_on_from_its_checkpoint(tmp_path):
    recipe = make_recipe(tmp_path, tune__steps=40, tune__save_steps=3, tune__warmup_steps=2)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe.to_dict()))  # JSON is YAML
    out = tmp_path / "out"
    Stages(recipe, out, say=lambda text: None).base()
    checkpoint = "moe-*.checkpoints/checkpoint-*/history.json"
    killed(KILLED, tmp_path / "recipe.yaml", out, when=lambda: list(out.glob(checkpoint)))
    (done,) = {path.parents[1] for path in out.glob("moe-*.checkpoints/checkpoint-*/history.json")}
    assert not [path for path in out.glob("moe-*") if (path / "result.json").exists()]
    before = max(int(path.parent.name.partition("-")[2]) for path in done.glob("*/history.json"))
    assert before < 40
    (done / f"checkpoint-{before + 90}").mkdir()  # cut off while it was written
    resumed = Stages(recipe, out, say=lambda text: None).moe()
    straight = Stages(
        recipe.change(tune__save_steps=None), tmp_path / "other", say=lambda text: None
    ).moe()
    assert resumed.losses == straight.losses
    assert resumed.steps == 40
    first = weights(resumed)
    second = weights(straight)
    for name, value in first.items():
        assert torch.equal(value, second[name])
    assert [step for step, _ in resumed.history] == [20, 40]
    assert not list(out.glob("*.checkpoints"))
    assert not [path for path in out.iterdir() if ".tmp-" in path.name]
