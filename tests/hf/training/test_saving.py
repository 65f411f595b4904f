"""Files that a trainer writes into a folder with existing files, and when it is stopped."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainingArguments

from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.saving import (
    StopCallback,
    last_whole_checkpoint,
    stopping_with_a_checkpoint,
)
from moe_runtime.hf.training.trainer import MoETrainer
from moe_runtime.io import signals
from moe_runtime.io.files import atomic_model
from tests.hf.tiny import VOCAB, dense


def contents(folder: Path, *left_out: str) -> dict[str, bytes]:
    values = {}
    for path in folder.iterdir():
        if path.is_file() and path.name not in left_out:
            values[path.name] = path.read_bytes()
    return values


def put(folder: Path, files: dict[str, str]) -> None:
    """Save a model made of these files, as a trainer does."""
    with atomic_model(folder) as tmp:
        for name, text in files.items():
            (tmp / name).write_text(text)


def lora(model):
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=2,
            target_modules=["q_proj"],
            task_type="CAUSAL_LM",
        ),
    )


@pytest.mark.parametrize("mine, most", [(0, 143), (143, 143), (200, 200)])
def test_ranks_agree_on_the_largest_code(monkeypatch, mine, most):
    kinds = torch.distributed.ReduceOp

    def with_143(code, op):
        codes = [int(code), 143]
        code.fill_({kinds.MAX: max, kinds.SUM: sum}[op](codes))

    monkeypatch.setattr(torch.distributed, "all_reduce", with_143)
    monkeypatch.setattr(
        ranks,
        "state",
        lambda: SimpleNamespace(num_processes=2, device="cpu"),
    )

    assert ranks.largest(mine) == most


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_an_adapter_saved_beside_its_base_leaves_the_base(tmp_path, max_shard_size):
    dense("llama").save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "1GB")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n\nWhat I wrote.\n")
    before = contents(tmp_path, "README.md")
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    for _ in range(2):
        MoETrainer(lora(dense("llama")), args).save_model()
        after = contents(tmp_path)
        assert before.items() <= after.items()
        assert {
            "adapter_model.safetensors",
            "adapter_config.json",
        } <= after.keys()
        for text in ("What I wrote.", "license: mit", "library_name: peft"):
            assert text in after["README.md"].decode()
    # a model saved next to an adapter leaves the adapter and the card alone
    MoETrainer(dense("llama"), args).save_model()
    last = contents(tmp_path)
    for name, value in after.items():
        if name.startswith("adapter_") or name == "README.md":
            assert last[name] == value
    weights = [name for name in last if name.startswith("model")]

    assert weights == ["model.safetensors"]


def test_older_weights_of_the_same_kind_go(tmp_path):
    shards = {f"model-0000{i}-of-00002.safetensors": "m" for i in (1, 2)}
    put(tmp_path, {"adapter_model.bin": "a", "adapter_config.json": "{}"})
    put(tmp_path, shards | {"config.json": "{}"})
    put(tmp_path, {"model.safetensors": "n", "config.json": "[]"})
    put(
        tmp_path,
        {"adapter_model.safetensors": "b", "adapter_config.json": "{}"},
    )

    assert sorted(contents(tmp_path)) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize(
    "weights, config",
    [
        ("model.safetensors", "config.json"),
        ("adapter_model.safetensors", "adapter_config.json"),
    ],
    ids=["model", "adapter"],
)
def test_weights_never_stand_under_another_config(tmp_path, monkeypatch, weights, config):
    replace = os.replace
    seen = set()

    def note():
        files = contents(tmp_path)
        if weights in files and config in files:
            seen.add((files[weights], files[config]))

    def watched(source, target):
        note()
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    for number, setting in enumerate("aab"):
        put(
            tmp_path,
            {weights: f"{number}", config: setting, "other.json": "{}"},
        )
    note()

    # an equal config does not have to be removed first
    assert seen == {(b"0", b"a"), (b"1", b"a"), (b"2", b"b")}


EPOCH = 8  # steps
ROWS = torch.randint(
    3,
    VOCAB,
    (2 * EPOCH, 8),
    generator=torch.Generator().manual_seed(0),
).tolist()
ROWS = Dataset.from_dict({"input_ids": ROWS, "labels": ROWS})


class Seen(TrainerCallback):
    """Sends SIGTERM in the step `stop`; records the steps that were saved and evaluated."""

    def __init__(self, stop: int):
        self.stop = stop
        self.saved = []
        self.evaluated = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_save(self, args, state, control, **kwargs):
        self.saved.append(state.global_step)

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluated.append(state.global_step)


def train(folder: Path, stop: int, resume: bool | None = None, callbacks=(), **settings) -> Seen:
    """Train for two epochs, interrupted in a step."""
    seen = Seen(stop)
    args = TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    trainer = MoETrainer(
        dense("llama"), args, train_dataset=ROWS, eval_dataset=ROWS, callbacks=[*callbacks, seen]
    )
    with pytest.raises(signals.Terminated), stopping_with_a_checkpoint(trainer):
        trainer.train(resume_from_checkpoint=resume)
    return seen


@pytest.mark.parametrize("stop", [3, EPOCH])
@pytest.mark.parametrize("strategy", ["epoch", "steps", "best"])
def test_a_stop_saves_its_step_once_and_evaluates_nothing(tmp_path, strategy, stop):
    every = {"eval_strategy": "epoch"}
    if strategy == "steps":
        every = {
            "eval_strategy": "steps",
            "eval_steps": stop,
            "save_steps": stop,
        }
    seen = train(
        tmp_path,
        stop,
        save_strategy=strategy,
        metric_for_best_model="loss",
        **every,
    )

    assert seen.saved == [stop]
    assert seen.evaluated == []
    assert last_whole_checkpoint(tmp_path) == tmp_path / f"checkpoint-{stop}"


def test_a_signal_in_the_last_step_lets_the_training_finish():
    callback = StopCallback(SimpleNamespace(asked=signals.Terminated()))
    control = TrainerControl()
    callback.on_step_end(None, SimpleNamespace(global_step=4, max_steps=4), control)
    assert not control.should_save and not control.should_training_stop
    callback.on_step_end(None, SimpleNamespace(global_step=3, max_steps=4), control)
    assert control.should_save and control.should_training_stop


def test_an_incomplete_checkpoint_evicts_no_complete_one(tmp_path):
    settings = {
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
    }
    train(tmp_path, 4, **settings)
    half = tmp_path / "checkpoint-7"
    half.mkdir()
    (half / "model.safetensors").write_text("half")
    train(tmp_path, 6, True, **settings)

    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
