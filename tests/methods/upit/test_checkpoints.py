"""moe_runtime.methods.upit.checkpoints: what is saved, when, by which process, and in how much
memory.
"""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from moe_runtime.io.files import read_json
from moe_runtime.methods.upit.checkpoints import ExpertCheckpoints, save_expert, saved_steps
from tests.hf.tiny import VOCAB, dense
from tests.support.checkpoints import tensors
from tests.support.dist_launch import launch

LORA = {"r": 2, "target_modules": ["gate_proj", "down_proj"], "init_lora_weights": False}


def rows(count: int = 16) -> Dataset:
    ids = torch.randint(
        3,
        VOCAB,
        (count, 8),
        generator=torch.Generator().manual_seed(0),
    ).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def trainer(model, folder: Path, *callbacks, kind=Trainer, tokenizer=None, **settings):
    """Return a trainer for 8 steps, 4 per epoch."""
    arguments = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 4,
    } | settings
    arguments = TrainingArguments(output_dir=str(folder), **arguments)
    return kind(
        model=model,
        args=arguments,
        callbacks=[*callbacks],
        train_dataset=rows(),
        eval_dataset=rows(4),
        processing_class=tokenizer,
    )


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key])
        assert a[key].dtype == b[key].dtype


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in saved_steps(folder)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    dense("llama").save_pretrained(folder)
    return folder


def loaded(base: Path):
    return AutoModelForCausalLM.from_pretrained(base)


@pytest.mark.parametrize(
    "every, settings, want",
    [
        pytest.param(
            {},
            {},
            [1, 2, 3, 4, 5, 6, 7, 8],
            id="a quarter of an epoch",
        ),
        pytest.param(
            {"every_epochs": 0.5},
            {},
            [2, 4, 6, 8],
            id="half an epoch",
        ),
        pytest.param(
            {"every_epochs": 0.6}, {}, [3, 5, 8], id="an interval that is no whole number of steps"
        ),
        pytest.param(
            {"every_epochs": 0.5},
            {"gradient_accumulation_steps": 2},
            [1, 2, 3, 4],
            id="accumulation",
        ),
        pytest.param(
            {"every_steps": 3},
            {},
            [3, 6, 8],
            id="steps, and the last one",
        ),
    ],
)
def test_intervals(base, tmp_path, every, settings, want):
    callback = ExpertCheckpoints(tmp_path / "experts", **every)
    trainer(
        loaded(base),
        tmp_path / "run",
        callback,
        **settings,
    ).train()
    assert steps(tmp_path / "experts") == want
    record = read_json(tmp_path / "experts" / f"step-{want[-1]}" / "expert.json")
    per_epoch = 4 / settings.get("gradient_accumulation_steps", 1)
    assert record["step"] == want[-1]
    assert record["epoch"] == pytest.approx(want[-1] / per_epoch)


@pytest.mark.parametrize(
    "dtype",
    [None, torch.bfloat16],
    ids=str,
)
@pytest.mark.parametrize(
    "family, changes",
    [
        pytest.param("llama", {"tie_word_embeddings": True}, id="tied"),
        pytest.param("gpt_neox", {}, id="a head with another name"),
        pytest.param("gemma3_text", {}, id="a rope per layer type"),
        pytest.param("phi3", {}, id="fused"),
    ],
)
def test_a_folder_is_what_save_pretrained_writes(tmp_path, family, changes, dtype):
    model = dense(family, **changes)
    save_expert(
        model,
        tmp_path / "ours",
        dtype=dtype,
        max_shard_size=20_000,
    )
    model.to(dtype).save_pretrained(tmp_path / "theirs")
    assert_same(
        tensors(tmp_path / "ours"),
        tensors(tmp_path / "theirs"),
    )
    ours, theirs = (read_json(tmp_path / name / "config.json") for name in ("ours", "theirs"))
    assert {key: ours[key] for key in theirs} == theirs
    names = {path.name for path in (tmp_path / "theirs").iterdir()} - {"model.safetensors"}
    assert names <= {path.name for path in (tmp_path / "ours").iterdir()}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours").dtype == (dtype or torch.float32)


def test_a_peft_model_saves_its_adapter(base, tmp_path):
    import peft

    model = peft.get_peft_model(
        loaded(base),
        peft.LoraConfig(**LORA),
    )
    trainer(
        model,
        tmp_path / "run",
        ExpertCheckpoints(tmp_path / "experts", every_steps=4),
        learning_rate=1e-3,
    ).train()
    assert steps(tmp_path / "experts") == [4, 8]
    again = peft.PeftModel.from_pretrained(
        loaded(base),
        tmp_path / "experts" / "step-8",
    )
    assert_same(
        peft.get_peft_model_state_dict(again),
        peft.get_peft_model_state_dict(model),
    )
    record = read_json(tmp_path / "experts" / "step-4" / "expert.json")
    assert (record["kind"], record["base"]) == ("lora", str(base))


class Killed(Exception):
    """Simulates the end of a process."""


class Kill(TrainerCallback):
    """Ends training when the Trainer has saved a step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise Killed


def test_a_resumed_training_writes_each_checkpoint_once(base, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8}

    def run(name: str, *callbacks, resume: bool = False):
        callback = ExpertCheckpoints(tmp_path / name, every_steps=2)
        model = loaded(base)
        trainer(
            model,
            tmp_path / f"{name}-run",
            callback,
            *callbacks,
            **settings,
        ).train(resume_from_checkpoint=resume)

    run("whole")
    with pytest.raises(Killed):
        run("killed", Kill())
    assert steps(tmp_path / "killed") == [2, 4]
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*/*")}
    run("killed", resume=True)  # from step 3
    assert steps(tmp_path / "killed") == steps(tmp_path / "whole") == [2, 4, 6, 8]
    for path, time in written.items():
        assert path.stat().st_mtime_ns == time
    for path in saved_steps(tmp_path / "whole"):
        assert_same(
            tensors(path),
            tensors(tmp_path / "killed" / path.name),
        )


@pytest.mark.parametrize(
    "first",
    [True, False],
    ids=["before", "after"],
)
def test_a_training_that_stops_early_saves_its_last_step_and_not_its_best(base, tmp_path, first):
    """The greatest loss counts as the best, which is that of step 2; training ends at step 4."""
    stop = EarlyStoppingCallback(1)
    experts = ExpertCheckpoints(tmp_path / "experts", every_steps=3)
    run = trainer(
        loaded(base),
        tmp_path / "run",
        *([experts, stop] if first else [stop, experts]),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
    )
    run.train()
    assert steps(tmp_path / "experts") == [3, 4]
    assert_same(
        tensors(tmp_path / "experts" / "step-4"), tensors(tmp_path / "run" / "checkpoint-4")
    )
    assert run.state.best_model_checkpoint.endswith("checkpoint-2")


@pytest.mark.parametrize(
    "arguments, words",
    [
        pytest.param(
            {"every_epochs": 0.5, "every_steps": 3},
            "every_epochs is 0.5, every_steps is 3",
            id="two intervals",
        ),
        pytest.param({"every_steps": 0}, "every_steps must be", id="no interval"),
        pytest.param({"every_epochs": float("nan")}, "every_epochs must be", id="not a number"),
        pytest.param({"dtype": "int8"}, "dtype is 'int8'", id="not a floating-point dtype"),
    ],
)
def test_bad_settings_are_named(tmp_path, arguments, words):
    with pytest.raises(ValueError) as error:
        ExpertCheckpoints(tmp_path, **arguments)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "change, settings, words",
    [
        pytest.param(
            lambda m: m,
            {"base": "nowhere/at-all"},
            "base 'nowhere/at-all'",
            id="no base",
        ),
        pytest.param(
            lambda m: nn.Linear(2, 2),
            {},
            "not a model of transformers",
            id="no model",
        ),
    ],
)
def test_models_that_cannot_be_saved_are_refused_before_the_first_step(
    base, tmp_path, change, settings, words
):
    callback = ExpertCheckpoints(
        tmp_path / "experts",
        **{"base": base} | settings,
    )
    with pytest.raises(ValueError) as error:
        callback.on_train_begin(
            None,
            type("State", (), {"epoch": 0, "global_step": 0})(),
            None,
            model=change(loaded(base)),
        )
    assert words in str(error.value)
    assert not (tmp_path / "experts").exists()


@pytest.fixture(scope="module")
def two_ranks(base, tmp_path_factory):
    """The files that two processes have saved."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).parents[2] / "support" / "dist_expert_checkpoints.py"
    launch(script, 2, folder, str(folder), str(base))
    return folder


def test_two_processes_save_once_what_one_saves(base, tmp_path, two_ranks):
    callback = ExpertCheckpoints(tmp_path / "one", every_steps=2)
    trainer(
        loaded(base),
        tmp_path / "run",
        callback,
        max_steps=3,
    ).train()
    for path in saved_steps(tmp_path / "one"):
        one = tensors(path)
        two = tensors(two_ranks / "ddp" / path.name)
        assert one.keys() == two.keys()
        torch.testing.assert_close(
            one,
            two,
            rtol=1e-4,
            atol=1e-5,
        )
