"""papers.upit.study: each stage runs once, equals its parts run separately, and resumes after a
kill.
"""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from moe_runtime.hf.models.modeling import moe_layers
from moe_runtime.hf.training import fit
from moe_runtime.methods.lora import baseline as lora_baseline
from moe_runtime.methods.upit import buckets as upit_buckets
from moe_runtime.methods.upit import experts as upit_experts
from papers.upit.recipe import load_recipe
from papers.upit.study import UpitStages
from tests.support.upit_study import write_study

ROOT = Path(__file__).resolve().parents[3]


class Made:
    """One run of the method for both kinds of experts."""

    def __init__(self, folder: Path):
        self.recipe_path = write_study(folder)
        self.out = folder / "out"
        self.recipe = load_recipe(self.recipe_path)
        self.stages = self.again()
        self.base = self.stages.base()
        self.pools = {}
        self.routers = {}
        self.upit = {}
        for form in self.recipe.forms:
            self.pools[form] = self.stages.pool(form)
            self.routers[form] = self.stages.routers(form, self.pools[form])
            self.upit[form] = self.stages.upit(form)

    def again(self, say=lambda text: None, seed=0) -> UpitStages:
        """Return the same stages in another object."""
        return UpitStages(
            self.recipe,
            self.out,
            seed=seed,
            say=say,
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Use PyTorch, since interpreted kernels would take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_RUNTIME_BACKEND", "torch")
        yield Made(tmp_path_factory.mktemp("upit"))


def loss_of(made, model) -> float:
    tokenizer = AutoTokenizer.from_pretrained(made.base.folder)
    rows = fit.row_losses(model, made.stages.held_out, tokenizer)
    return pytest.approx(fit.mean_loss(*rows), rel=1e-5)


def test_the_base_is_evaluated_by_domain(made):
    base = made.base
    assert type(load(base.folder)) is LlamaForCausalLM
    assert base.rows == {"sums": 8, "words": 8}
    assert len(base.losses) == 16
    assert base.loss == loss_of(made, load(base.folder))
    sums = fit.mean_loss(base.losses[:8], base.tokens[:8])
    assert base.domains["sums"] == pytest.approx(sums)
    assert base.total_seconds == 0


@pytest.mark.parametrize("form", ["ffn", "lora"])
def test_each_stage_is_made_of_the_one_before(made, form):
    prepared = made.stages.prepared(form)
    saved = upit_experts.saved_experts(prepared.folder)
    assert [path.name for path in saved] == ["step-2", "step-4", "step-6", "step-8"]
    assert prepared.steps == 8
    if form == "ffn":
        tuned = load(saved[-1])
    else:
        tuned = lora_baseline.load_lora(load(made.base.folder), saved[-1])
    assert prepared.loss == loss_of(made, tuned)
    assert prepared.loss < made.base.loss
    # the pool is the last checkpoints and a child of theirs
    pool = made.pools[form]
    assert [Path(path) for path in pool.experts[:2]] == saved[-2:]
    assert pool.parents == [[0, 1]]
    assert upit_experts.open_expert(pool.experts[2], made.base.folder).kind == form
    # each expert gets examples, and its vectors respond more to them
    dealt = made.stages.buckets(form, pool)
    routers = made.routers[form]
    assert len(made.stages.seed_rows()) == 13 == sum(map(len, routers.buckets))
    assert max(map(len, routers.buckets)) == 5
    assert routers.buckets == upit_buckets.fill_buckets(dealt.perplexity) == dealt.buckets
    for before, after in zip(routers.before, routers.after, strict=True):
        assert after > before
    # what was saved is what was evaluated
    result = made.upit[form]
    model = load(result.folder)
    assert result.loss == loss_of(made, model)
    assert result.loss < made.base.loss
    assert list(moe_layers(model)) == [0, 1]
    assert model.config.moe_runtime["method"] == "upit"
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert result.active_parameters < result.parameters
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert result.trained_parameters == trained
    assert (trained == result.parameters) == (form == "ffn")
    stages = (prepared, pool, dealt, routers, result)
    seconds = [one.total_seconds for one in stages]
    assert seconds == sorted(seconds)
    assert seconds[-1] == pytest.approx(seconds[-2] + result.seconds)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def test_only_the_routers_of_self_moe_are_tuned(made, tmp_path):
    result = made.stages.self_moe("ffn")
    before = made.stages._assembled(made.pools["ffn"].experts, None, tmp_path / "moe").state_dict()
    changed = 0
    for name, value in load(result.folder).state_dict().items():
        is_router = name.endswith("mlp.gate.weight")
        assert torch.equal(value, before[name]) != is_router, name
        changed += is_router
    assert changed == 2
    assert result.trained_parameters == 2 * 3 * 16
    assert made.stages.self_moe("lora").trained_parameters == 2 * 3 * 16


def test_copies_start_as_the_copied_model(made, monkeypatch):
    begun = {}
    stages = made.stages.change(
        ffn__post__per_device_batch_size=4, lora__post__per_device_batch_size=4
    )

    def no_training(self, name, model, rows, held_out, training, *args, **more):
        assert training.per_device_batch_size == 4
        assert training.epochs == (2 if name.endswith("PT") else 1)
        begun[name] = loss_of(made, model).expected
        raise InterruptedError

    monkeypatch.setattr(UpitStages, "_train", no_training)
    for make in (stages.upcycled, stages.loramoe):
        for start in ("pt", "sft"):
            with pytest.raises(InterruptedError):
                make(start)
    tuned = {form: made.stages.prepared(form).loss for form in made.recipe.forms}
    assert begun == pytest.approx(
        {
            "Upcycle_PT": made.base.loss,
            "Upcycle_SFT": tuned["ffn"],
            "LoRAMoE_PT": made.base.loss,
            "LoRAMoE_SFT": tuned["lora"],
        },
        rel=1e-4,
    )
    assert not list(made.out.glob("*.tmp*"))


@pytest.mark.slow
def test_what_trains_is_float32_and_what_is_saved_bfloat16(made, tmp_path, monkeypatch):
    seen = {}
    train = fit.train

    def spy(model, *arguments, **more):
        trainable = {p.dtype for p in model.parameters() if p.requires_grad}
        assert trainable == {torch.float32}
        stage = more["folder"].name.partition("-")[0]
        seen[stage] = {p.dtype for p in model.parameters()}
        return train(model, *arguments, **more)

    monkeypatch.setattr(fit, "train", spy)
    stages = UpitStages(
        made.recipe.change(dtype="bfloat16", lora=None, ffn__sft__learning_rate=2e-5),
        tmp_path / "out",
        say=lambda text: None,
    )
    dense = stages.dense("ffn")
    upit = stages.upit("ffn")
    stages.self_moe("ffn")
    stages.upcycled("sft")
    assert {"dense", "prepared", "upit", "self_moe"} < set(seen)
    assert torch.bfloat16 in seen["self_moe"]
    assert torch.bfloat16 not in seen["dense"]
    assert dense.loss < stages.base().loss
    for result in (dense, upit):
        (file,) = result.folder.glob("*model.safetensors")
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    rows = fit.row_losses(
        load(upit.folder),
        stages.held_out,
        stages.tokenizer,
    )
    assert upit.loss == pytest.approx(fit.mean_loss(*rows), rel=1e-3)


def texts_of(stages, rows) -> list[str]:
    return stages.tokenizer.batch_decode(list(rows["input_ids"]), skip_special_tokens=True)


def test_a_held_out_row_of_one_domain_is_in_no_others_train_rows(tmp_path):
    recipe = load_recipe(write_study(tmp_path)).change(
        domains__words__prompt="magicoder", max_length=512
    )
    with (tmp_path / "words.jsonl").open("a") as file:
        file.write((tmp_path / "sums.jsonl").read_text())
    stages = UpitStages(recipe, tmp_path / "out", say=lambda text: None)
    for domain in ("sums", "words"):
        assert len(stages.part(f"{domain}-held_out")) == 8
    trained = "\n".join(texts_of(stages, stages.train_rows))
    for row in texts_of(stages, stages.held_out):
        prompt = row.partition("@@ Instruction\n")[2].partition("\n\n@@")[0] or row
        assert prompt not in trained


def test_the_python_of_the_docs_runs(made, monkeypatch, capsys):
    text = (ROOT / "docs" / "papers" / "upit-tables.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for ours, theirs in (("tiny", made.recipe_path), ("runs/upit", made.out)):
        assert f'"{ours}"' in code
        code = code.replace(f'"{ours}"', f'"{theirs}"')
    exec(
        compile(
            code.replace("seed=1", "seed=0"),
            "docs/papers/upit-tables.md",
            "exec",
        ),
        {},
    )
    assert str(made.upit["ffn"].domains) in capsys.readouterr().out
