"""hf/training/trainer.py and sft.py: transformers' Trainer and TRL's SFTTrainer on upcycled and on
mergeable models.
"""

import contextlib
import csv
import json
import math
import re
import shutil

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from moe_runtime.hf import MoESFTTrainer, MoETrainer, RouterStatsCallback, train_command
from moe_runtime.hf.dropin.balance import use_balance_loss
from moe_runtime.hf.dropin.experts import patch
from moe_runtime.hf.dropin.replay import record_routing
from moe_runtime.hf.models import swap
from moe_runtime.hf.models.modeling import moe_layers
from moe_runtime.hf.training import sft
from moe_runtime.hf.training.fit import pair_collator
from moe_runtime.io import console
from moe_runtime.io.rows import encode, read_rows, tokenize_pairs
from moe_runtime.methods.xft import folders as xft
from moe_runtime.ops import moe_layer, moe_mlp
from moe_runtime.ops.expert_rows import accumulate_into_grad
from papers.engine.tiny import train_tokenizer
from tests.hf import tiny
from tests.support.dist_launch import forked
from tests.support.stock_moe import stock

datasets.disable_progress_bars()
ROWS = [
    {"prompt": f"add {i} to {j}:\n", "completion": f"{i + j} is it" + "!" * i}
    for i in range(5)
    for j in range(2)
]
TOKENIZER = train_tokenizer([row["prompt"] + row["completion"] for row in ROWS], 280)
BALANCE = {"balance_loss": "switch", "balance_loss_coef": 0.1}
COMMON = {
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


def upcycled(**settings):
    """A tiny upcycled Llama with the tokenizer's vocabulary, and a balance loss unless told
    otherwise.
    """
    return tiny.upcycled(changes={"vocab_size": len(TOKENIZER)}, **BALANCE | settings)


def mergeable():
    model = upcycled()
    swap.moe_to_mergeable(model)
    return model


def rows(places=None):
    return datasets.Dataset.from_list([ROWS[i] for i in places] if places else ROWS)


def trainer_of(
    kind,
    model,
    folder,
    places=None,
    train=None,
    eval_set=None,
    callbacks=None,
    parts=None,
    **settings,
):
    """A trainer of class MoETrainer ("trainer"), MoESFTTrainer ("sft") or transformers' own
    ("plain").
    """
    train = rows(places) if train is None else train
    parts = (parts or {}) | {"callbacks": callbacks}
    if kind == "sft":
        args = SFTConfig(
            str(folder),
            **{"bf16": False, "gradient_checkpointing": False, "max_length": 64}
            | COMMON
            | settings,
        )
        return MoESFTTrainer(
            model,
            args,
            train_dataset=train,
            eval_dataset=eval_set,
            processing_class=TOKENIZER,
            **parts,
        )
    train = tokenize_pairs(TOKENIZER, train, 64, row_ids=True)
    eval_set = eval_set and tokenize_pairs(TOKENIZER, eval_set, 64)
    cls = MoETrainer if kind == "trainer" else Trainer
    args = TrainingArguments(str(folder), **COMMON | settings)
    return cls(model, args, pair_collator(TOKENIZER), train, eval_set, TOKENIZER, **parts)


def run(*args, **kwargs):
    trainer = trainer_of(*args, **kwargs)
    trainer.train()
    return trainer


def logged(trainer, name="loss"):
    values = []
    for entry in trainer.state.log_history:
        if name in entry and "train_loss" not in entry:
            values.append(entry[name])
    return values


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step, as the optimizer sees them."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.__dict__.setdefault("grads", tiny.gradients(model))


def gradients(kind, model, folder, **settings):
    keep = Gradients()
    run(kind, model, folder, callbacks=[keep], max_steps=1, max_grad_norm=0.0, **settings)
    assert any(".mlp.gate.weight" in name for name in keep.grads)
    return keep.grads


KINDS = pytest.mark.parametrize("kind", ["trainer", "sft"])


@KINDS
@pytest.mark.parametrize(
    "settings, coef",
    [
        pytest.param({}, 0.0, id="switch"),
        pytest.param({"balance_loss": "cv2", "noisy_gate": True}, 0.0, id="cv2-noisy"),
        pytest.param({}, 0.1, id="with-the-pooled-loss"),
        pytest.param({"balance_loss": "none"}, 0.1, id="pooled-only"),
    ],
)
def test_the_parts_of_the_loss_are_logged_apart(kind, settings, coef, tmp_path):
    model = upcycled(**settings)
    model.config.router_aux_loss_coef, model.config.output_router_logits = coef, bool(coef)
    steps = {
        "gradient_accumulation_steps": 2,
        "logging_steps": 2,
        "max_steps": 4,
        "per_device_eval_batch_size": 2,
    }
    trainer = run(kind, model, tmp_path, eval_set=rows([1, 9, 3]), **steps)
    metrics = trainer.evaluate()
    parts = [logged(trainer, name) for name in ("loss", "lm_loss", "balance_loss")]
    assert [len(values) for values in parts] == [2, 2, 2]
    assert min(parts[2]) > 1e-3
    for loss, lm_loss, balance_loss in zip(*parts, strict=True):
        assert abs(loss - lm_loss - balance_loss) < 1e-5
    assert abs(metrics["eval_loss"] - metrics["eval_lm_loss"] - metrics["eval_balance_loss"]) < 1e-5
    assert metrics["eval_balance_loss"] > 1e-3


@KINDS
@pytest.mark.parametrize("coef", [0.0, 0.1], ids=["balance", "balance-and-pooled"])
def test_the_first_loss_is_the_models_own(kind, coef, tmp_path):
    model = upcycled()
    model.config.router_aux_loss_coef, model.config.output_router_logits = coef, bool(coef)
    batch = pair_collator(TOKENIZER)(list(tokenize_pairs(TOKENIZER, rows([0, 7]), 64)))
    with torch.no_grad():
        want = model.train()(**batch)
    trainer = run(kind, model, tmp_path, [0, 7], max_steps=1)
    got = [logged(trainer, name)[0] for name in ("loss", "lm_loss", "balance_loss")]
    assert got == pytest.approx(
        [want.loss.item(), want.lm_loss.item(), want.aux_loss.item()], rel=1e-6
    )


@pytest.mark.parametrize("name", [None, "qwen3_moe", "gpt_oss"])
def test_gradients_added_in_place_train_the_same_model(name, tmp_path, monkeypatch):
    """Bit by bit, with gradient clipping and an optimizer that drops the gradients after
    each step.
    """
    trained = []
    added = []
    adding_to = moe_mlp.adding_to
    for module in (moe_mlp, moe_layer):
        monkeypatch.setattr(
            module, "adding_to", lambda into, *args: added.append(into) or adding_to(into, *args)
        )
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    for enabled in (False, True):
        torch.manual_seed(0)
        model = upcycled() if name is None else stock_moe(name)
        patch(model)
        accumulate_into_grad(model.parameters(), enabled)
        run("trainer", model, tmp_path / str(enabled), max_steps=2, **split)
        assert bool(added) == enabled
        trained.append(dict(model.named_parameters()))
    for key, weight in trained[0].items():
        assert weight.equal(trained[1][key])


@pytest.mark.parametrize("kind", ["trainer", "sft", "plain"])
@pytest.mark.parametrize(
    "settings, places",
    [
        pytest.param({"balance_loss": "none"}, [0, 3, 7, 9], id="rows-of-many-lengths"),
        # the mean over micro-batches of a balance loss is that of the whole batch when they are all
        # alike
        pytest.param({}, [4] * 4, id="switch"),
        pytest.param({"balance_loss": "cv2"}, [4] * 4, id="cv2"),
    ],
)
def test_accumulation_gives_the_gradients_of_the_whole_batch(kind, settings, places, tmp_path):
    whole = gradients(
        kind, upcycled(**settings), tmp_path, places=places, per_device_train_batch_size=4
    )
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    parts = gradients(kind, upcycled(**settings), tmp_path, places=places, **split)
    tiny.assert_close(parts, whole, 2e-5)


@KINDS
def test_a_balance_loss_is_weighted_by_the_tokens_of_its_micro_batch(kind, tmp_path):
    places = [0, 3, 7, 9]
    model = upcycled()
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    got = gradients(kind, upcycled(), tmp_path, places=places, **split)
    batches = []
    for row in tokenize_pairs(TOKENIZER, rows(places), 64):
        batches.append(pair_collator(TOKENIZER)([row]))
    tokens = [batch["labels"][:, 1:].ne(-100).sum() for batch in batches]
    for batch, count in zip(batches, tokens, strict=True):
        out = model.train()(**batch)
        ((out.lm_loss + out.aux_loss) * count / sum(tokens)).backward()
    for name, parameter in model.named_parameters():
        assert tiny.distance(got[name], parameter.grad) < 2e-5, name
    router = next(name for name in got if ".mlp.gate." in name)
    without = gradients(kind, upcycled(balance_loss="none"), tmp_path, places=places, **split)
    assert tiny.distance(without[router], got[router]) > 1e-2


@KINDS
def test_checkpointing_changes_neither_losses_nor_counts(kind, tmp_path):
    results = []
    for on in (False, True):
        trainer = run(kind, upcycled(), tmp_path / str(on), gradient_checkpointing=on)
        results.append((logged(trainer), (tmp_path / str(on) / "router_stats.csv").read_text()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert results[0][1] == results[1][1]


@KINDS
def test_reentrant_checkpointing_is_refused_with_a_balance_loss(kind, tmp_path):
    with pytest.raises(ValueError, match="use_reentrant"):
        run(
            kind,
            upcycled(),
            tmp_path,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": True},
        )


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["autocast", "bf16-weights"])
def test_bf16(kind, dtype, tmp_path):
    trainer = run(kind, upcycled().to(dtype), tmp_path, bf16=True)
    losses = logged(trainer)
    assert losses[-1] < losses[0]
    assert all(map(math.isfinite, losses + logged(trainer, "balance_loss")))
    full = run(kind, upcycled(), tmp_path)
    assert losses == pytest.approx(logged(full), rel=5e-2)


@KINDS
@pytest.mark.parametrize("noisy", [False, True], ids=["no-noise", "noise"])
@pytest.mark.parametrize("stage", ["moe", "mergeable"])
def test_a_resumed_run_is_the_uninterrupted_one(kind, noisy, stage, tmp_path):
    if stage == "mergeable" and noisy:
        noisy = False  # it has no router; the second run is one with gradient accumulation
        settings = {"gradient_accumulation_steps": 2}
    else:
        settings = {}

    def model():
        model = upcycled(noisy_gate=noisy)
        if stage == "mergeable":
            swap.moe_to_mergeable(model)
        return model

    # 10 rows, 5 batches an epoch: step 4 lies inside the first epoch, step 8 inside the second
    settings |= {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    whole = run(kind, model(), tmp_path / "run", **settings)
    weights = tiny.weights(whole.model)
    history = [logged(whole, name) for name in ("loss", "grad_norm")]
    stats = (tmp_path / "run" / "router_stats.csv").read_text() if stage == "moe" else None
    resumed = trainer_of(kind, model(), tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert [logged(resumed, name) for name in ("loss", "grad_norm")] == history
    assert len(history[0]) == 8
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    start = dict(model().named_parameters())
    assert any(not torch.equal(start[name], weight) for name, weight in weights.items())
    assert stats is None or (tmp_path / "run" / "router_stats.csv").read_text() == stats


@pytest.mark.parametrize("kind", ["trainer", "sft", "plain"])
def test_mixing_training_moves_the_mixing_logits_alone(kind, tmp_path):
    model = mergeable()
    before = tiny.weights(model)
    trainer = run(kind, model, tmp_path, weight_decay=0.1, bf16=True)
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    mixing = {name: p for name, p in model.named_parameters() if name.endswith(".mixing_logits")}
    assert len(mixing) == 2
    assert optimized == {id(p) for p in mixing.values()}
    assert len(trainer.optimizer.state) == 2
    for p in mixing.values():
        assert p.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in mixing), name
    assert not (tmp_path / "router_stats.csv").exists()


class Poison(TrainerCallback):
    """Makes a weight, or a gradient of it, NaN in one step."""

    def __init__(self, step, gradient=False):
        self.step = step
        self.gradient = gradient

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step and not self.gradient:
            model.get_output_embeddings().weight.data[5] = math.nan

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step and self.gradient:
            model.get_output_embeddings().weight.grad[5] = math.nan


@KINDS
@pytest.mark.parametrize("with_ids", [True, False], ids=["rows-known", "rows-unknown"])
def test_a_nan_loss_stops_and_leaves_the_checkpoint(kind, with_ids, tmp_path):
    if with_ids and kind == "sft":
        train = rows().add_column("row_id", list(range(100, 110)))
    else:
        train = rows()
    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 8}
    trainer = trainer_of(kind, upcycled(), tmp_path, train=train, callbacks=[Poison(3)], **settings)
    if not with_ids and kind == "trainer":
        trainer.train_dataset = trainer.train_dataset.remove_columns("row_id")
    router = moe_layers(trainer.model)[0].gate.weight
    with pytest.raises(ValueError, match="loss is nan at step 3") as error:
        trainer.train()
    message = str(error.value)
    assert f"resume from {tmp_path / 'checkpoint-2'}" in message
    assert ("batch of the examples" in message) == with_ids
    if with_ids:
        named = message.partition("examples ")[2].partition(".")[0].split(", ")
        assert len(named) == 2
        for i in named:
            assert int(i) in (range(100, 110) if kind == "sft" else range(10))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    for p in saved.parameters():
        assert torch.isfinite(p).all()
    assert torch.equal(moe_layers(saved)[0].gate.weight, router)  # the optimizer did not see step 3


@KINDS
def test_router_statistics_change_no_loss(kind, tmp_path):
    on, off = (
        run(kind, upcycled(noisy_gate=True), tmp_path / str(s), parts={"router_stats": s})
        for s in (True, False)
    )
    assert logged(on) == logged(off)
    assert len(logged(on)) == 3
    for a, b in zip(on.model.parameters(), off.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not logged(off, "router/max_violation")
    assert not (tmp_path / "False" / "router_stats.csv").exists()
    for m in on.model.modules():
        assert not m._forward_pre_hooks


class Seen(TrainerCallback):
    """A reporting callback: keeps the logs it gets."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


@pytest.mark.parametrize("kind", ["trainer", "sft", "plain"])
def test_router_statistics_are_those_of_the_batches(kind, tmp_path):
    model = upcycled()
    records = []
    masks = []

    def keep_ids(module, args, out):
        if module.training:
            records.append(out.topk_idx)

    def keep_mask(module, args, kwargs):
        if module.training:
            masks.append(kwargs["attention_mask"].clone())

    for block in moe_layers(model).values():
        block.gate.register_forward_hook(keep_ids)
    model.register_forward_pre_hook(keep_mask, with_kwargs=True)
    stats = RouterStatsCallback(per_layer=True)
    seen = Seen()
    callbacks = [stats, seen] if kind == "plain" else [seen, stats]
    settings = {"max_steps": 4, "logging_steps": 2, "gradient_accumulation_steps": 2}
    trainer = run(
        kind,
        model,
        tmp_path,
        places=range(8),
        eval_set=rows([0]),
        eval_strategy="steps",
        eval_steps=2,
        callbacks=callbacks,
        **settings,
    )
    counts = torch.zeros(2, 2, 4, dtype=torch.int64)  # [log, layer, expert]
    assert len(masks) == 8
    assert any((mask == 0).any() for mask in masks)
    assert len(records) == 2 * len(masks)
    for call, ids in enumerate(records):
        kept = ids[masks[call // 2].flatten().bool()].flatten().long()
        counts[call // 8, call % 2] += torch.bincount(kept, minlength=4)
    with open(tmp_path / "router_stats.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["slots"]) for line in lines] == counts.flatten().tolist()
    assert [int(line["step"]) for line in lines] == [2] * 8 + [4] * 8
    worst = (counts[..., 1:].double() / counts[..., 1:].double().mean(-1, keepdim=True)).amax(
        (1, 2)
    )
    assert logged(trainer, "router/max_violation") == pytest.approx(worst.tolist())
    assert logged(trainer, "router/1/load/2") == pytest.approx(
        (counts[:, 1, 2] / counts[:, 1].sum(-1)).tolist()
    )
    reported = [logs for logs in seen.logs if "loss" in logs]
    assert len(reported) == 2
    for logs in reported:
        assert "router/min_entropy" in logs


def test_lora_keeps_the_balance_loss(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["mlp.gate"], task_type="CAUSAL_LM"
    )
    trainer = run("sft", upcycled(), tmp_path, parts={"peft_config": lora})
    assert min(logged(trainer, "balance_loss")) > 1e-3
    routers = {
        name: p
        for name, p in trainer.model.named_parameters()
        if ".gate." in name and p.requires_grad
    }
    assert len(routers) == 2
    for p in routers.values():
        assert trainer.optimizer.state[p]["exp_avg"].abs().sum() > 0
    with open(tmp_path / "router_stats.csv", newline="") as file:
        assert len(list(csv.reader(file))) == 1 + 3 * 2 * 4


def stock_moe(name="qwen3_moe", **changes):
    return stock(name, vocab_size=len(TOKENIZER), **changes)


STOCK_LOSS = {"balance_loss": "per_layer", "balance_loss_coef": 0.1}


@KINDS
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_stock_model_trains_with_a_loss_per_layer(kind, name, tmp_path):
    batch = pair_collator(TOKENIZER)(list(tokenize_pairs(TOKENIZER, rows([0, 7]), 64)))
    model = stock_moe(name)
    use_balance_loss(model, "per_layer", 0.1)
    with torch.no_grad():
        want = model(**batch)
    trainer = run(kind, stock_moe(name), tmp_path, [0, 7], max_steps=1, parts=dict(STOCK_LOSS))
    got = [logged(trainer, name)[0] for name in ("loss", "lm_loss", "balance_loss")]
    want = [want.loss.item(), want.lm_loss.item(), 0.1 * want.aux_loss.item()]
    assert got == pytest.approx(want, rel=1e-5)
    assert want[2] > 0.1
    assert len(logged(trainer, "router/max_violation")) == 1


@pytest.mark.parametrize("kind", ["trainer", "sft"])
def test_a_stock_models_loss_does_not_grow_with_accumulation(kind, tmp_path):
    step = {"places": [4] * 4, "parts": STOCK_LOSS}
    whole = gradients(kind, stock_moe(), tmp_path, per_device_train_batch_size=4, **step)
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    parts = gradients(kind, stock_moe(), tmp_path, **split, **step)
    none = gradients(kind, stock_moe(), tmp_path, per_device_train_batch_size=4, places=[4] * 4)
    for name, want in whole.items():
        assert tiny.distance(parts[name], want) < 2e-5, name
        assert ".gate." not in name or tiny.distance(none[name], want) > 1e-3


def test_trls_own_trainer_takes_the_loss_per_layer(tmp_path):
    batch = pair_collator(TOKENIZER)(list(tokenize_pairs(TOKENIZER, rows([0, 7]), 64)))
    model = stock_moe()
    use_balance_loss(model, "per_layer", 0.1)
    with torch.no_grad():
        want = model(**batch)
    args = SFTConfig(
        str(tmp_path),
        bf16=False,
        gradient_checkpointing=False,
        max_length=64,
        **COMMON | {"max_steps": 1},
    )
    trainer = SFTTrainer(model, args, train_dataset=rows([0, 7]), processing_class=TOKENIZER)
    trainer.train()
    assert logged(trainer)[0] == pytest.approx(want.loss.item(), rel=1e-5)
    assert logged(trainer, "aux_loss")[0] == pytest.approx(want.aux_loss.item(), rel=1e-5)


def test_stock_statistics_in_a_plain_trainer_are_those_of_the_batches(tmp_path):
    model = stock_moe()
    masks = []
    model.register_forward_pre_hook(
        lambda m, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with record_routing(model) as record:
        run(
            "plain",
            model,
            tmp_path,
            places=range(6),
            callbacks=[RouterStatsCallback()],
            max_steps=3,
            logging_steps=3,
        )
    want = torch.zeros(2, 8, dtype=torch.int64)
    for layer, calls in enumerate(record.ids.values()):
        for ids, mask in zip(calls, masks, strict=True):
            want[layer] += torch.bincount(ids[mask.flatten().bool()].flatten(), minlength=8)
    assert any((mask == 0).any() for mask in masks)
    with open(tmp_path / "router_stats.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["slots"]) for line in lines] == want.flatten().tolist()


UNMARKED = TOKENIZER.chat_template.replace("{% generation %}", "").replace(
    "{% endgeneration %}", ""
)
CHAT = [{"role": "user", "content": "add 1 to 2"}, {"role": "assistant", "content": "3 is it"}]


SHAREGPT = [{"from": "human", "value": "add 1 to 2"}, {"from": "gpt", "value": "3 is it"}]


@pytest.mark.parametrize(
    "row, settings",
    [
        pytest.param({"messages": CHAT}, {}, id="messages"),
        pytest.param({"messages": CHAT}, {"assistant_only_loss": True}, id="trls-option"),
        pytest.param({"messages": CHAT}, {"train_on": "all"}, id="all-of-messages"),
        pytest.param({"conversations": SHAREGPT}, {}, id="sharegpt"),
        pytest.param({"prompt": CHAT[:1], "completion": CHAT[1:]}, {}, id="prompt-of-messages"),
        pytest.param(
            {"prompt": "add 1 to 2\n", "completion": "3 is it"}, {}, id="prompt-completion"
        ),
        pytest.param(
            {"prompt": "add 1 to 2\n", "completion": "3 is it"},
            {"completion_only_loss": False},
            id="trls-word-for-all",
        ),
        pytest.param(
            {"instruction": "add", "input": "1 to 2", "output": "3 is it"}, {}, id="alpaca"
        ),
        pytest.param({"question": "add 1 to 2", "answer": "3 is it"}, {}, id="question-answer"),
        pytest.param({"text": "add 1 to 2\n3 is it"}, {}, id="text"),
        pytest.param({"text": "add 1 to 2\n3 is it"}, {"packing": True}, id="packed"),
    ],
)
def test_sft_trains_on_what_all_commands_do(row, settings, tmp_path, monkeypatch):
    """Read by --data or handed to TRL as it is, of a template with {% generation %} or without."""
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    settings, parts = (
        dict(settings),
        {"train_on": settings["train_on"]} if "train_on" in settings else {},
    )
    settings.pop("train_on", None)
    train_on = "all" if parts or "completion_only_loss" in settings else "assistant"
    read = read_rows(tmp_path / "rows.jsonl")
    raw = datasets.Dataset.from_list([row] * 8)
    ids, labels = encode(TOKENIZER, read[0], train_on=train_on)
    for rows, template in (
        (read, TOKENIZER.chat_template),
        (raw, UNMARKED),
        (raw.to_iterable_dataset(), UNMARKED),
    ):
        monkeypatch.setattr(TOKENIZER, "chat_template", template)
        trainer = trainer_of(
            "sft", upcycled(), tmp_path / "out", train=rows, max_steps=1, parts=parts, **settings
        )
        batch = next(iter(trainer.get_train_dataloader()))
        # of a packed row the first of several
        got = batch["labels"][0].tolist()
        count = len(ids)
        assert batch["input_ids"][0].tolist()[:count] == ids
        assert got[:count] in (labels, [-100, *labels[1:]])
        assert set(got[count:]) <= {-100} or settings.get("packing")
        if rows is read:
            trainer.train()
            assert logged(trainer, "balance_loss")[0] > 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved upcycled model with its tokenizer, and a data file beside it."""
    folder = tmp_path_factory.mktemp("folder")
    upcycled().save_pretrained(folder / "moe")
    TOKENIZER.save_pretrained(folder / "moe")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def words(model, data, options: str) -> list[str]:
    """The arguments of the command."""
    return f"--model {model} --data {data} --report_to none {options}".split()


def test_the_command_trains_a_folder_and_saves_one(folder, tmp_path):
    (tmp_path / "train.yaml").write_text(
        "max_steps: 3\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-2\n"
    )
    options = f"--config {tmp_path}/train.yaml --max_steps 2 --logging_steps 1"
    argv = words(folder / "moe", folder / "rows.jsonl", f"{options} --output_dir {tmp_path}/out")
    code = "import sys; from moe_runtime.hf import train_command; train_command(sys.argv[1:])"
    done = forked(code, *argv)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"saved MoeRuntimeLlamaForCausalLM to {tmp_path / 'out'} after step 2" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    start = AutoModelForCausalLM.from_pretrained(folder / "moe")
    assert type(model) is type(start)
    moved = []
    for (name, a), b in zip(model.named_parameters(), start.parameters(), strict=True):
        if not torch.equal(a, b):
            moved.append(name)
    assert any(".gate.weight" in name for name in moved)
    assert any(".experts.down_proj" in name for name in moved)
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "balance_loss" in entry] == [1, 2]
    assert (tmp_path / "out" / "router_stats.csv").exists()
    assert (tmp_path / "out" / "tokenizer.json").exists()


NOTHING = [CHAT[0], {"role": "assistant", "content": None}]
REFUSED = {
    "null": ({"text": None}, "", "line 2 of .*bad.jsonl: text is null, but expected a string"),
    "content": ({"messages": NOTHING}, "", "line 2 of .*: the content of turn 2 is null"),
    "no-answer": (
        {"messages": CHAT[:1]},
        "",
        r"line 2 of .*: the roles are \['user'\], but expected at least one assistant turn",
    ),
    "tracker": (
        None,
        "--report_to wandb",
        "'wandb' of report_to is not installed. Install it, or pass .*none",
    ),
    "no-template": (
        {"messages": CHAT},
        "",
        "The tokenizer has no chat template, .* Pass --chat_template_path",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_command_refuses_in_one_line_before_it_trains(name, folder, tmp_path, monkeypatch):
    bad, options, says = REFUSED[name]
    monkeypatch.setattr(MoESFTTrainer, "train", None)
    model = folder / "moe"
    data = folder / "rows.jsonl"
    if name == "no-template":
        model = shutil.copytree(model, tmp_path / "moe")
        (model / "chat_template.jinja").unlink()
    if bad is not None:
        data = tmp_path / "bad.jsonl"
        good = {"messages": CHAT} if "messages" in bad else {"text": "2"}
        data.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    with pytest.raises(ValueError, match=says) as error:
        train_command(words(model, data, f"--output_dir {tmp_path}/out {options}"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_command_trains_a_chat_on_its_answers(folder, tmp_path, monkeypatch):
    """Of a template given by its file, and of all tokens where that is asked for."""
    model = shutil.copytree(folder / "moe", tmp_path / "moe")
    (model / "chat_template.jinja").unlink()
    (tmp_path / "chat.jinja").write_text(UNMARKED)
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 2)
    batches = []

    def train(self, **_):
        batches.append(next(iter(self.get_train_dataloader())))
        raise ZeroDivisionError

    monkeypatch.setattr(MoESFTTrainer, "train", train)
    options = f"--output_dir {tmp_path}/out --chat_template_path {tmp_path}/chat.jinja"
    for more in ("", " --train-on all"):
        with pytest.raises(ZeroDivisionError):
            train_command(words(model, tmp_path / "rows.jsonl", options + more))
    part, whole = (
        TOKENIZER.decode(batch["labels"][0][batch["labels"][0] != -100]) for batch in batches
    )
    assert part == "3 is it</s>"
    assert whole == TOKENIZER.apply_chat_template(CHAT, tokenize=False)


def test_the_command_evaluates_resumes_and_says_how_long_it_takes(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(console, "FIRST", 0.0)
    monkeypatch.setattr(console, "EVERY", 0.0)
    data = folder / "rows.jsonl"
    argv = (
        f"--model_name_or_path {folder}/moe --data {data} --eval_data {data} --eval_strategy steps "
        f"--eval_steps 2 --output_dir {tmp_path} --save_steps 1 --report_to none --no_router_stats"
    ).split()
    assert train_command([*argv, "--max_steps", "2"]) == tmp_path
    capsys.readouterr()
    assert (
        train_command([*argv, "--max_steps", "4", "--resume_from_checkpoint", "true"]) == tmp_path
    )
    said = capsys.readouterr()
    assert "after step 4" in said.out
    card = (tmp_path / "README.md").read_text()
    assert f'from_pretrained("OWNER/{tmp_path.name}")' in card
    assert "2404.15247" in card
    assert "None" not in card
    assert "moe-runtime train --model_name_or_path moe --data rows.jsonl" in card
    assert "| steps | 4 |" in card
    lines = [line for line in said.err.splitlines() if line.startswith("training: ")]
    assert lines[0].startswith("training: 50% 2/4 [")
    assert re.fullmatch(r"training: 75% 3/4 \[\d\d:\d\d<\d\d:\d\d, +\S+(step/s|s/step)\]", lines[1])
    assert lines[-1].startswith("training: done in ")
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_balance_loss" in entry] == [
        2,
        4,
    ]
    assert not (tmp_path / "router_stats.csv").exists()


def test_the_command_does_not_replace_the_model_that_it_begins_with(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = tiny.contents(folder)
    for name in ("moe", str(folder / "moe")):
        with pytest.raises(
            ValueError, match="^output_dir moe/ is .*moe, the model to train. Pass another folder"
        ):
            train_command(["--model", name, "--data", "rows.jsonl", "--output_dir", "moe/"])
    assert tiny.contents(folder) == before


def test_the_command_replaces_no_earlier_run_and_resumes_the_latest_one(
    folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    files = words(folder / "moe", folder / "rows.jsonl", "--no_router_stats")
    with pytest.raises(
        ValueError, match="^output_dir None is not a folder. Pass --output_dir FOLDER$"
    ):
        train_command(files)
    argv = [*files, "--output_dir", "out", "--save_steps", "2"]
    with pytest.raises(
        ValueError, match="^output_dir out has no complete checkpoint. Run without --resume$"
    ):
        train_command([*argv, "--resume"])
    assert not list(tmp_path.iterdir())
    train_command([*argv, "--max_steps", "4"])
    before = tiny.contents(tmp_path)
    both = ["--resume", "--overwrite"]
    for more, match in (
        ((), "already exists. .*, or --overwrite .*, or --resume to continue from checkpoint-4$"),
        (both, "either"),
    ):
        with pytest.raises(ValueError, match=match):
            train_command([*argv, "--max_steps", "2", *more])
    inside = ["--model", "out/checkpoint-4", *argv[2:], "--overwrite"]
    with pytest.raises(
        ValueError, match="^output_dir out contains out/checkpoint-4, the model to train"
    ):
        train_command(inside)
    assert tiny.contents(tmp_path) == before
    # the earlier run's checkpoint of a later step is gone
    train_command([*argv, "--max_steps", "2", "--overwrite", "--seed", "7"])
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    seen = []
    monkeypatch.setattr(
        sft.console,
        "bar",
        lambda *args, **options: contextlib.nullcontext(lambda step, *_: seen.append(step)),
    )
    train_command([*argv, "--max_steps", "3", "--resume"])
    assert seen[0] == 2


@KINDS
@pytest.mark.parametrize("value", [True, False])
def test_training_leaves_use_cache_in_the_config_as_it_was(kind, value, tmp_path):
    model = upcycled()
    model.config.use_cache = value
    seen = []

    def hook(module, args, kwargs):
        seen.append(kwargs["use_cache"])

    model.base_model.register_forward_pre_hook(hook, with_kwargs=True)
    trainer = run(
        kind,
        model,
        tmp_path,
        save_strategy="steps",
        save_steps=1,
        max_steps=1,
        eval_set=rows([1, 2]),
    )
    trainer.evaluate()
    trainer.save_model(tmp_path / "moe")
    xft.merge_folder(tmp_path / "moe", tmp_path / "dense")
    for folder in (tmp_path / "checkpoint-1", tmp_path / "moe", tmp_path / "dense"):
        assert json.loads((folder / "config.json").read_text()).get("use_cache", True) is value
    assert set(seen) == {False}  # and no batch keeps one


def test_lora_has_targets_and_a_diverged_training_is_said(folder, tmp_path, capsys):
    options = "--no_router_stats --max_steps 3 --save_strategy no"
    argv = words(folder / "moe", folder / "rows.jsonl", options)
    diverging = f"--output_dir {tmp_path}/whole --learning_rate 1000 --no_stop_on_nan"
    train_command([*argv, *diverging.split()])
    guess = math.log(len(TOKENIZER))
    said = (
        f"warning: the training diverged, as a uniform guess has loss {guess:.2f}. Lower "
        "--learning_rate, which is 1000.0"
    )
    assert said in capsys.readouterr().err
    train_command([*argv, "--output_dir", str(tmp_path), "--overwrite", "--use_peft"])
    assert "diverged" not in capsys.readouterr().err
    found = json.loads((tmp_path / "adapter_config.json").read_text())
    assert found["lora_dropout"] == 0
    assert {name.rpartition(".")[2] for name in found["target_modules"]} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
