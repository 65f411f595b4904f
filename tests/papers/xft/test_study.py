"""papers.xft.study: each stage runs once, equals its parts run separately, and resumes after a
kill.
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
from papers.engine.tiny import train_tokenizer
from papers.xft import recipe as recipe_module
from papers.xft import study as xft_study
from papers.xft.recipe import Recipe
from papers.xft.study import XftStages
from tests.papers.xft.test_recipe import blocks
from tests.support.dist_launch import times

WORDS = ["add", "mul", "sub", "neg", "pow", "div", "mod", "inv"]
STEPS = {
    "learning_rate": 3e-3,
    "batch_size": 4,
    "optimizer": "adamw_torch",
    "steps": 6,
}


def write_rows(path: Path, count: int = 40) -> Path:
    """Write distinct examples in the columns of evol-codealpaca."""
    with path.open("w") as file:
        for i in range(count):
            word = WORDS[i % len(WORDS)]
            answer = f"def {word}{i}(x):\n    return {word}(x, {i})\n"
            row = {
                "instruction": f"Write {word} of {{{i}}}.",
                "output": answer,
            }
            print(json.dumps(row), file=file)
    return path


def write_base(folder: Path) -> Path:
    """Write a random Llama of two layers with tied weights, and its tokenizer, as a base to
    tune.
    """
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
    """Return a recipe that takes seconds, on these examples and this base."""
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
    """One run of all stages."""

    def __init__(self, folder: Path):
        self.recipe = make_recipe(folder)
        self.out = folder / "out"
        self.stages = self.again()
        self.base = self.stages.base()
        self.sft = self.stages.sft()
        self.moe = self.stages.moe()
        self.init = self.stages.merge(self.moe)
        self.mix = self.stages.mix(self.moe)
        self.ewa = self.stages.ewa()
        self.all = (self.base, self.sft, self.moe, self.init, self.mix, self.ewa)

    def again(self, say=lambda text: None, seed=0, **changes) -> XftStages:
        """Return the same stages with other recipe settings."""
        return XftStages(
            self.recipe.change(**changes),
            self.out,
            seed=seed,
            say=say,
        )


def loss_of(stages, result, part="held_out"):
    """Return the loss of a saved model."""
    model = ranks.load_model(result.folder, "float32")
    losses = row_losses(model, stages.part(part), stages.tokenizer)
    return pytest.approx(mean_loss(*losses), rel=1e-5)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("stages"))


def weights(result) -> dict:
    return AutoModelForCausalLM.from_pretrained(result.folder).state_dict()


def test_each_stage_is_a_folder_that_transformers_loads(made):
    assert len({result.folder for result in made.all}) == len(made.all)
    for result in made.all:
        model = AutoModelForCausalLM.from_pretrained(result.folder)
        kind = "MoeRuntimeLlamaForCausalLM" if result is made.moe else "LlamaForCausalLM"
        assert type(model).__name__ == kind
        assert len(AutoTokenizer.from_pretrained(result.folder)) == model.config.vocab_size
        assert result.loss == loss_of(made.stages, result)
        assert result.parameters == sum(p.numel() for p in model.parameters())
        assert read_json(result.folder / "config.json")["dtype"] == "float32"
    assert weights(made.ewa).keys() == weights(made.base).keys()
    assert made.ewa.loss != made.base.loss
    assert not list(made.out.glob("ewa-*/experts"))


def ids_of(rows) -> set[tuple]:
    return {tuple(ids) for ids in rows["input_ids"]}


def test_rows_to_learn_mixing_on_are_held_back_from_tuning_alone(made, monkeypatch):
    rows = {}
    train = XftStages._train

    def spy(self, name, model, train_rows, *arguments, **more):
        rows[name] = ids_of(train_rows)
        return train(
            self,
            name,
            model,
            train_rows,
            *arguments,
            **more,
        )

    monkeypatch.setattr(XftStages, "_train", spy)
    stages = made.again(mix_rows=5)
    stages.sft(steps=1)
    moe = stages.moe()
    mixed = stages.mix(moe)
    assert len(rows["sft"]) == 32
    assert len(rows["moe"]) == 27
    assert len(rows["mix"]) == 5
    assert rows["moe"] | rows["mix"] == rows["sft"]
    assert rows["sft"].isdisjoint(ids_of(stages.held_out))
    assert stages.base() == made.base
    assert moe.folder != made.moe.folder
    assert mixed.alpha != made.mix.alpha


def joined_stages(tmp_path: Path, monkeypatch) -> XftStages:
    """Stages on a joined source of made-up examples, some too long to keep, with two experts per
    token.
    """
    words = {
        "code": "def",
        "prose": "once",
        "arithmetic": "1 + 1",
    }
    rows = []
    for i in range(12):
        long = "x" * 99 if i % 5 == 3 else ""
        for word in words.values():
            rows.append(
                {
                    "prompt": f"{word} {i} {long}",
                    "completion": word,
                }
            )
    monkeypatch.setitem(xft_study.SOURCES, "+".join(words), lambda: (rows[:24], rows[24:]))
    recipe = make_recipe(
        tmp_path,
        experts={"num_experts": 4, "top_k": 2},
        data__train="+".join(words),
        data__limit=18,
        data__held_out_rows=5,
        data__validation_rows=3,
    )
    return XftStages(recipe, tmp_path / "out", say=lambda text: None)


def test_tuning_by_domain_trains_the_expert_of_the_domain_alone(tmp_path, monkeypatch):
    stages = joined_stages(tmp_path, monkeypatch)
    begins = {"def": 0, "onc": 1, "1 +": 2}
    for part in ("train", "held_out", "validation"):
        ids = list(stages.part(part)["input_ids"])
        texts = stages.tokenizer.batch_decode(ids, skip_special_tokens=True)
        assert stages.domains_of(part) == [begins[text[:3]] for text in texts]
    base = stages.base()
    ordered = stages.by_domain(base)
    assert list(ordered.rows) == list(stages.domains)
    places = stages.domains_of("held_out")
    assert list(ordered.rows.values()) == [places.count(place) for place in range(3)]
    by_place = sorted(zip(places, range(5), base.losses))
    assert ordered.losses == [loss for _, _, loss in by_place]

    model = AutoModelForCausalLM.from_pretrained(base.folder)
    xft.upcycle(model, num_experts=4, top_k=2)
    stack = model.model.layers[1].mlp.experts.down_proj
    rows = [row for row, at in zip(stages.train_rows, stages.domains_of("train")) if at == 1]
    batch = pair_collator(stages.tokenizer)(rows)
    routed = xft_study.routed_by_domain(model, stages._known_domains())
    with routed, record_routing(model) as record:
        model(**batch).loss.backward()
    for calls in record.ids.values():
        for ids in calls:
            assert (ids == torch.tensor([2, 0])).all()
    assert [bool(grad.any()) for grad in stack.grad] == [True, False, True, False]
    moe = stages.moe(by_domain=True)
    plain = stages.moe()
    assert moe.folder != plain.folder
    assert moe.losses != plain.losses
    assert moe.validation != moe.loss
    assert moe.loss == loss_of(stages, moe)


def test_validation_rows_only_choose_the_best_step(tmp_path):
    far = {
        "learning_rate": 1.0,
        "schedule": "constant",
        "keep_best": True,
    }
    changes = {f"sft__{key}": value for key, value in far.items()}
    recipe = make_recipe(
        tmp_path,
        data__validation_rows=6,
        evaluations=4,
        **changes,
    )
    stages = XftStages(recipe, tmp_path / "out", say=lambda text: None)
    parts = [ids_of(stages.part(name)) for name in ("train", "held_out", "validation")]
    assert [len(part) for part in parts] == [26, 8, 6]
    assert len(set.union(*parts)) == 40
    sft = stages.sft()
    losses = [loss for _, loss in sft.history]
    assert len(losses) == 4
    assert min(losses) < losses[-1]
    assert min(losses) == loss_of(stages, sft, "validation")
    assert sft.loss == loss_of(stages, sft)


def test_what_is_refused_leaves_nothing(made, tmp_path):
    vanilla = {
        "num_experts": 4,
        "top_k": 2,
        "gate": "topk_softmax",
    }
    with pytest.raises(ValueError, match="gate must be one of xft"):
        xft_study.run(made.recipe.change(experts=vanilla), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(made.out.glob("*.tmp-*"))


def test_the_merges_are_xft_merge(made):
    for result, how in ((made.init, {"shared_rate": 0.75}), (made.mix, {"alpha": made.mix.alpha})):
        moe = AutoModelForCausalLM.from_pretrained(made.moe.folder)
        merged = xft.merge(moe, **how).state_dict()
        stored = weights(result)
        assert merged.keys() == stored.keys()
        for name, value in merged.items():
            assert torch.equal(value, stored[name])
    assert made.init.alpha == [pytest.approx([0.75, *[0.25 / 3] * 3])] * 2
    for row in made.mix.alpha:
        assert row[0] == 0.75
        assert sum(row) == pytest.approx(1)
        assert row[1:] != pytest.approx([0.25 / 3] * 3, abs=1e-4)


def test_a_second_call_reads_what_is_there(made):
    before = times(made.out)
    again = made.again(say=lambda text: pytest.fail(text))
    assert again.moe() == made.moe
    assert again.mix(made.moe) == made.mix
    assert again.sft() == made.sft
    assert again.ewa() == made.ewa
    # options of how a training is run do not define another stage
    settings = {
        "per_device_batch_size": 2,
        "save_steps": 5,
        "gradient_checkpointing": True,
    }
    changes = {f"tune__{key}": value for key, value in settings.items()}
    assert made.again(say=lambda text: pytest.fail(text), **changes).moe() == made.moe
    assert times(made.out) == before
    assert not list(made.out.glob("*.checkpoints"))


def test_what_a_stage_depends_on_makes_another(made):
    assert made.stages.sft(steps=1).folder != made.sft.folder
    assert made.stages.moe(top_k=2).folder != made.moe.folder
    assert made.stages.mix(made.moe, shared_rate=0.5).folder != made.mix.folder
    other = made.again(seed=1, tune__steps=1)
    assert other.base() == made.base  # every seed tunes the same base
    assert other.moe().folder != made.moe.folder
    assert made.again(data__max_length=48).base().folder != made.base.folder
    averaged = made.stages.sft(averages=True)
    assert averaged.losses == made.sft.losses
    assert averaged.folder != made.sft.folder
    ema = made.stages.average(averaged, "ema")
    swa = made.stages.average(averaged, "swa")
    assert len({averaged.loss, ema.loss, swa.loss}) == 3
    assert ema.total_seconds == averaged.seconds


def test_the_python_of_the_docs_runs(tmp_path, monkeypatch, capsys):
    (code,) = blocks("papers/recipes.md", "python")
    small = make_recipe(tmp_path)
    monkeypatch.setattr(recipe_module, "load_recipe", lambda name: {"tiny": small}[name])
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, "docs/papers/recipes.md", "exec"), names)
    assert names["merged"].folder.is_relative_to("runs/xft")
    assert "held-out loss" in capsys.readouterr().out
