"""papers.upit.study: each stage is made once, is what its parts alone give, and goes
on after a kill.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from moe_runtime.hf.models.modeling import moe_layers
from moe_runtime.hf.training import fit
from moe_runtime.methods.lora import baseline as lora_baseline
from moe_runtime.methods.upit import buckets as upit_buckets
from moe_runtime.methods.upit import experts as upit_experts
from papers.upit import study as upit_study
from papers.upit.recipe import UpitRecipe, load_recipe
from papers.upit.study import Stages
from tests.support.dist_launch import killed
from tests.support.upit_study import write_study

ROOT = Path(__file__).resolve().parents[3]


class Made:
    """One run of the method for both kinds of experts, and what it said."""

    def __init__(self, folder: Path):
        self.recipe_path = write_study(folder)
        self.said = []
        self.out = folder / "out"
        self.recipe = load_recipe(self.recipe_path)
        self.stages = Stages(self.recipe, self.out, say=self.said.append)
        self.base = self.stages.base()
        self.pools = {form: self.stages.pool(form) for form in self.recipe.forms}
        self.routers = {form: self.stages.routers(form, pool) for form, pool in self.pools.items()}
        self.upit = {form: self.stages.upit(form) for form in self.recipe.forms}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Interpreted kernels would take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_RUNTIME_BACKEND", "torch")
        yield Made(tmp_path_factory.mktemp("upit"))


def loss_of(made, model) -> float:
    return fit.mean_loss(
        *fit.row_losses(
            model, made.stages.held_out, AutoTokenizer.from_pretrained(made.base.folder)
        )
    )


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def test_the_base_is_judged_by_domain(made):
    assert type(load(made.base.folder)) is LlamaForCausalLM
    assert made.base.rows == {"sums": 8, "words": 8}
    assert len(made.base.losses) == 16
    assert made.base.loss == pytest.approx(loss_of(made, load(made.base.folder)), rel=1e-5)
    sums = made.base.losses[:8], made.base.tokens[:8]
    assert made.base.domains["sums"] == pytest.approx(fit.mean_loss(*sums))
    assert made.base.total_seconds == 0


def test_no_row_is_in_two_parts(made):
    for domain in made.recipe.domains:
        parts = [made.stages.part(f"{domain}-{kind}") for kind in ("train", "held_out")]
        assert [len(rows) for rows in parts] == [32, 8]
        assert not set.intersection(*({tuple(row["input_ids"]) for row in rows} for rows in parts))


@pytest.mark.parametrize("form", ["ffn", "lora"])
def test_every_checkpoint_is_there_and_the_last_is_the_tuned_model(made, form):
    prepared = made.stages.prepared(form)
    saved = upit_experts.saved_experts(prepared.folder)
    assert [path.name for path in saved] == [
        "step-2",
        "step-4",
        "step-6",
        "step-8",
    ]
    assert prepared.steps == 8
    if form == "ffn":
        model = load(saved[-1])
    else:
        model = lora_baseline.load_lora(load(made.base.folder), saved[-1])
    assert prepared.loss == pytest.approx(loss_of(made, model), rel=1e-5)
    assert prepared.loss < made.base.loss


@pytest.mark.parametrize("form", ["ffn", "lora"])
def test_the_pool_is_the_last_checkpoints_and_a_child(made, form):
    pool = made.pools[form]
    saved = upit_experts.saved_experts(made.stages.prepared(form).folder)
    assert [Path(path) for path in pool.experts[:2]] == saved[-2:]
    assert pool.parents == [[0, 1]]
    with upit_experts.open_expert(pool.experts[2], made.base.folder) as child:
        assert child.kind == form


@pytest.mark.parametrize("form", ["ffn", "lora"])
def test_each_expert_gets_rows_and_its_vectors_fire_more(made, form):
    dealt = made.stages.buckets(form, made.pools[form])
    routers = made.routers[form]
    rows = made.stages.seed_rows()
    assert len(rows) == 13 == sum(map(len, routers.buckets))
    assert max(map(len, routers.buckets)) == 5
    assert routers.buckets == upit_buckets.fill_buckets(dealt.perplexity) == dealt.buckets
    for before, after in zip(routers.before, routers.after, strict=True):
        assert after > before


@pytest.mark.parametrize("form", ["ffn", "lora"])
def test_what_was_saved_is_what_was_judged(made, form):
    result = made.upit[form]
    model = load(result.folder)
    assert result.loss == pytest.approx(loss_of(made, model), rel=1e-5)
    assert result.loss < made.base.loss
    assert list(moe_layers(model)) == [0, 1]
    assert model.config.moe_runtime["method"] == "upit"
    assert (
        result.parameters == sum(p.numel() for p in model.parameters()) > result.active_parameters
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert result.trained_parameters == trained
    assert (trained == result.parameters) == (form == "ffn")
    prepared = made.stages.prepared(form)
    pool = made.pools[form]
    dealt = made.stages.buckets(form, made.pools[form])
    assert (
        prepared.total_seconds
        < pool.total_seconds
        < dealt.total_seconds
        < made.routers[form].total_seconds
    )
    assert result.total_seconds == pytest.approx(made.routers[form].total_seconds + result.seconds)


def test_only_the_routers_of_self_moe_are_tuned(made, tmp_path):
    result = made.stages.self_moe("ffn")
    before = made.stages._assembled(made.pools["ffn"].experts, None, tmp_path / "moe")
    after = load(result.folder)
    changed = [
        name
        for name, value in before.state_dict().items()
        if not torch.equal(value, after.state_dict()[name])
    ]
    assert changed == [name for name in before.state_dict() if name.endswith("mlp.gate.weight")]
    assert len(changed) == 2
    assert (
        result.trained_parameters == 2 * 3 * 16 == made.stages.self_moe("lora").trained_parameters
    )


def test_copies_begin_as_the_model_that_they_are_of(made, monkeypatch):
    begun = {}
    stages = made.stages.change(
        ffn__post__per_device_batch_size=4, lora__post__per_device_batch_size=4
    )

    def no_training(self, name, model, rows, held_out, training, *args, **more):
        assert training.per_device_batch_size == 4
        assert training.epochs == (2 if name.endswith("PT") else 1)
        begun[name] = loss_of(made, model)
        raise InterruptedError

    monkeypatch.setattr(Stages, "_train", no_training)
    for make, starts in ((stages.upcycled, ("pt", "sft")), (stages.loramoe, ("pt", "sft"))):
        for start in starts:
            with pytest.raises(InterruptedError):
                make(start)
    prepared = {form: made.stages.prepared(form).loss for form in made.recipe.forms}
    assert (
        begun["Upcycle_PT"]
        == pytest.approx(made.base.loss, rel=1e-4)
        == pytest.approx(begun["LoRAMoE_PT"], rel=1e-4)
    )
    assert begun["Upcycle_SFT"] == pytest.approx(prepared["ffn"], rel=1e-4)
    assert begun["LoRAMoE_SFT"] == pytest.approx(prepared["lora"], rel=1e-4)
    assert not list(made.out.glob("*.tmp*"))


def test_tokens_of_every_domain_are_counted(made):
    routed = made.stages.routed(made.upit["ffn"])
    for domain, counts in routed.counts.items():
        tokens = sum(len(row["input_ids"]) for row in made.stages.part(f"{domain}-held_out"))
        assert [sum(row) for row in counts] == [2 * tokens] * 2
        assert len(counts[0]) == 3
    assert list(routed.counts) == ["sums", "words"]
    assert routed.layers == ["0", "1"]


def test_a_second_call_reads_what_is_there(made):
    before = {path: path.stat().st_mtime_ns for path in made.out.rglob("result.json")}
    again = Stages(made.recipe, made.out, say=lambda text: pytest.fail(text))
    for form in made.recipe.forms:
        assert again.pool(form) == made.pools[form]
        assert again.routers(form, made.pools[form]) == made.routers[form]
        assert again.upit(form) == made.upit[form]
    assert {path: path.stat().st_mtime_ns for path in made.out.rglob("result.json")} == before
    assert not list(made.out.glob("*.checkpoints"))


def test_what_a_stage_depends_on_makes_another(made):
    small = {
        "ffn__sft__epochs": 0.5,
        "checkpoints__count": 1,
        "experts__num_experts": 1,
        "experts__top_k": 1,
    }
    half = made.stages.change(**small).prepared("ffn")
    assert half.steps == 4
    assert half.folder != made.stages.prepared("ffn").folder
    assert (
        made.stages.change(checkpoints__which="front").pool("ffn").folder
        != made.pools["ffn"].folder
    )
    assert made.stages.change(expansion__drop=0.2).pool("ffn").folder != made.pools["ffn"].folder
    other = Stages(made.recipe, made.out, seed=1, say=lambda text: None)
    assert other.base() == made.base
    assert other.seed_rows()[0] != made.stages.seed_rows()[0]


def test_too_few_steps_are_refused_before_training(made):
    stages = made.stages.change(checkpoints__count=4, ffn__sft__batch_size=64)
    with pytest.raises(
        ValueError,
        match="checkpoints.count .3. must be at most the 1 steps of ffn.sft on 64 examples",
    ):
        stages.prepared("ffn")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ffn", "lora"])
def test_what_trains_is_float32_and_what_is_saved_bfloat16(made, tmp_path, monkeypatch, form):
    seen = {}
    train = fit.train

    def spy(model, *arguments, **more):
        names = {p.dtype for p in model.parameters() if p.requires_grad}
        seen[more["folder"].name.partition("-")[0]] = names, {p.dtype for p in model.parameters()}
        return train(model, *arguments, **more)

    monkeypatch.setattr(fit, "train", spy)
    other = {"ffn": "lora", "lora": "ffn"}[form]
    recipe = made.recipe.change(
        **{"dtype": "bfloat16", other: None, f"{form}__sft__learning_rate": 2e-5}
    )
    stages = Stages(recipe, tmp_path / "out", say=lambda text: None)
    results = [stages.dense(form), stages.upit(form), stages.self_moe(form)]
    results += [
        stages.upcycled(start) if form == "ffn" else stages.loramoe(start)
        for start in ("pt", "sft")
    ]
    assert {"dense", "prepared", "upit", "self_moe"} < set(seen)
    for trainable, _ in seen.values():
        assert trainable == {torch.float32}
    assert torch.bfloat16 in seen["self_moe"][1]
    assert (torch.bfloat16 in seen["dense"][1]) == (form == "lora")
    assert results[0].loss < stages.base().loss
    for result in results[:2]:
        (file,) = result.folder.glob("*model.safetensors")
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    found = fit.mean_loss(
        *fit.row_losses(load(results[1].folder), stages.held_out, stages.tokenizer)
    )
    assert results[1].loss == pytest.approx(found, rel=1e-3)


def test_a_held_out_row_of_one_domain_is_in_no_others_train_rows(tmp_path):
    path = write_study(tmp_path)
    sums, words = ((tmp_path / f"{name}.jsonl").read_text() for name in ("sums", "words"))
    (tmp_path / "words.jsonl").write_text(words + sums)
    changes = {"domains__words__prompt": "magicoder", "max_length": 512}
    for recipe in (load_recipe(path), load_recipe(path).change(**changes)):
        stages = Stages(recipe, tmp_path / "out", say=lambda text: None)
        assert [len(stages.part(f"{name}-held_out")) for name in ("sums", "words")] == [8, 8]
        trained = stages.tokenizer.batch_decode(
            [*stages.train_rows["input_ids"]], skip_special_tokens=True
        )
        for row in stages.tokenizer.batch_decode(
            [*stages.held_out["input_ids"]], skip_special_tokens=True
        ):
            asked = row.partition("@@ Instruction\n")[2].partition("\n\n@@")[0] or row
            for other in trained:
                assert asked not in other, asked


def test_a_base_of_no_known_family_is_refused_before_tuning(tmp_path):
    path = write_study(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="model_type must be one of llama, .*but got 'gpt2'"):
        Stages(load_recipe(path), tmp_path / "out", say=lambda text: None).dense("ffn")
    assert not [*(tmp_path / "out").glob("dense-*"), *(tmp_path / "out").glob("prepared-*")]


def test_a_run_of_the_whole_method(made):
    said = []
    results = upit_study.run(made.recipe.change(lora=None), made.out, say=said.append)
    assert [one.name for one in results] == ["base", "SFT", "UpIT (FFN)"]
    assert results[2] == made.upit["ffn"]
    assert results[1].steps == 16
    assert str(made.upit["ffn"].folder) in said[-1]
    assert any(line.startswith("UpIT (FFN)") for line in said)


def test_the_python_of_the_docs_runs(made, monkeypatch, capsys):
    text = (ROOT / "docs" / "upit.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for ours, theirs in (("tiny", made.recipe_path), ("runs/upit", made.out)):
        assert f'"{ours}"' in code
        code = code.replace(f'"{ours}"', f'"{theirs}"')
    exec(compile(code.replace("seed=1", "seed=0"), "docs/upit.md", "exec"), {})
    assert str(made.upit["ffn"].domains) in capsys.readouterr().out


def test_the_recipe_of_the_docs_is_one(tmp_path):
    text = (ROOT / "docs" / "upit.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "docs.yaml").write_text(block)
    recipe = load_recipe(tmp_path / "docs.yaml")
    assert list(recipe.domains) == ["code", "math"]
    assert recipe.forms == ("ffn", "lora")
    # what it says beside the folders and domains is what is the default anyway
    for name in ("experts", "checkpoints", "expansion", "router"):
        assert getattr(recipe, name) == UpitRecipe.model_fields[name].get_default(
            call_default_factory=True
        )


KILLED = """
import sys
from papers.upit.study import Stages
Stages(sys.argv[1], sys.argv[2]).prepared("ffn")
"""


@pytest.mark.slow
def test_a_killed_tuning_goes_on_and_keeps_its_experts(tmp_path):
    path = write_study(tmp_path)
    recipe = load_recipe(path).change(
        lora=None, ffn__sft__epochs=4, ffn__sft__save_steps=3, checkpoints__every_epochs=0.5
    )
    path.write_text(json.dumps(recipe.to_dict()))  # JSON is YAML
    out = tmp_path / "out"
    Stages(recipe, out, say=lambda text: None).base()
    killed(
        KILLED,
        path,
        out,
        when=lambda: list(out.glob("prepared-*.checkpoints/checkpoint-*/history.json")),
    )
    assert not list(out.glob("prepared-*/result.json"))
    resumed = Stages(recipe, out, say=lambda text: None).prepared("ffn")
    straight = Stages(
        recipe.change(ffn__sft__save_steps=None), tmp_path / "other", say=lambda text: None
    ).prepared("ffn")
    assert resumed.losses == straight.losses
    assert resumed.history == straight.history
    assert resumed.steps == 32
    ours, theirs = (upit_experts.saved_experts(one.folder) for one in (resumed, straight))
    assert [path.name for path in ours] == [path.name for path in theirs]
    assert len(ours) == 8
    for a, b in zip(ours, theirs, strict=True):
        first = load(a).state_dict()
        second = load(b).state_dict()
        for name, value in first.items():
            assert torch.equal(value, second[name])
    assert not list(out.glob("*.checkpoints"))
