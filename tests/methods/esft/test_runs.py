"""moe_runtime.methods.esft.runs: trainings of a model folder, what they keep, and how they
resume.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moe_runtime.hf.training import ranks
from moe_runtime.methods import esft
from moe_runtime.methods.esft import runs as esft_runs
from moe_runtime.methods.esft.lora import read_lora
from moe_runtime.methods.esft.runs import EsftTraining
from papers.engine.tiny import train_tokenizer
from tests.support import dist_esft
from tests.support.dist_launch import launch
from tests.support.esft_adapter import same
from tests.support.stock_moe import stock

ROWS = [{"prompt": f"Write {i}:\n", "completion": "x" * (1 + i % 7) + f" = {i}"} for i in range(40)]


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a base, rows and a selection."""
    home = tmp_path_factory.mktemp("esft")
    tokenizer = train_tokenizer(["Write 1: x = 1"] * 9, 300)
    stock("deepseek_v2", vocab_size=len(tokenizer)).save_pretrained(home / "base")
    tokenizer.save_pretrained(home / "base")
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    scores = esft_runs.score_folder(
        home / "base", home / "rows.jsonl", home / "summary.json", n_tokens=256, max_length=32
    )
    esft.select_experts(scores, 0.4).save(home / "config.json")
    return home


def train_alone(home, out, **settings):
    """Train in one process, three steps unless said otherwise."""
    config = {
        "steps": 3,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "save_steps": None,
        "per_device_batch_size": 4,
    }
    options = {
        name: settings.pop(name)
        for name in ("dtype", "selection", "rows", "overwrite", "lora")
        if name in settings
    }
    selection = options.pop("selection", home / "config.json")
    rows = options.pop("rows", home / "rows.jsonl")
    base = settings.pop("base", home / "base")
    return esft_runs.train_folder(
        base, selection, rows, out, EsftTraining(**config | settings), max_length=32, **options
    )


@pytest.fixture(scope="module")
def half(home, tmp_path_factory) -> Path:
    """The base in bfloat16."""
    folder = tmp_path_factory.mktemp("half") / "base"
    shutil.copytree(home / "base", folder)
    AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.bfloat16).save_pretrained(
        folder
    )
    return folder


@pytest.mark.parametrize(
    "flags, dtype, want",
    [
        pytest.param({}, None, torch.float32, id="experts"),
        pytest.param(
            {"shared_experts": True, "non_expert_modules": True},
            None,
            torch.float32,
            id="all that may",
        ),
        pytest.param({}, "bfloat16", torch.bfloat16, id="bfloat16 if asked for"),
    ],
)
def test_a_small_learning_rate_trains_a_bfloat16_base(home, half, tmp_path, flags, dtype, want):
    selection = replace(esft.ExpertSelection.load(home / "config.json"), **flags)
    train_alone(
        home,
        tmp_path / "out",
        base=half,
        selection=selection,
        learning_rate=1e-5,
        steps=1,
        dtype=dtype,
    )
    tensors = esft.load_adapter(tmp_path / "out").tensors
    assert {tensor.dtype for tensor in tensors.values()} == {want}
    model = AutoModelForCausalLM.from_pretrained(half, dtype=want)
    esft.train_only(model, selection)
    start = esft.adapter_of(model).tensors
    moved = (
        torch.cat([(tensor != start[name]).flatten() for name, tensor in tensors.items()])
        .double()
        .mean()
    )
    assert moved > 0.9 if want == torch.float32 else moved < 0.1


def test_the_best_weights_outlive_an_adapter_that_could_not_be_written(home, tmp_path, monkeypatch):
    settings = {"steps": 8, "learning_rate": 0.3, "save_steps": 3}
    whole = train_alone(home, tmp_path / "whole", **settings)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(esft, "save_adapter", lambda *_, **__: (_ for _ in ()).throw(Killed))
        train_alone(home, tmp_path / "again", **settings)
    again = train_alone(home, tmp_path / "again", **settings)
    assert again.loss == whole.loss
    first, second = (
        dict(esft.load_adapter(tmp_path / name).tensors) for name in ("whole", "again")
    )
    assert same(first, second)


def test_a_run_without_a_checkpoint_may_be_changed_and_the_batch_at_once_always(
    home, tmp_path, monkeypatch
):
    def stop(*_, **__):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(esft_runs.fit, "train", stop)
        train_alone(home, tmp_path / "out")
    assert (tmp_path / "out-checkpoints" / "settings.json").is_file()
    base = shutil.copytree(home / "base", tmp_path / "base")
    settings = {"base": base, "steps": 5, "save_steps": 2}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(esft, "save_adapter", stop)
        train_alone(home, tmp_path / "out", **settings)
    (base / "model.safetensors").touch()
    with pytest.raises(ValueError, match="checkpoints of another training with a different source"):
        train_alone(home, tmp_path / "out", **settings)
    stamp = (home / "base" / "model.safetensors").stat()
    os.utime(base / "model.safetensors", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    train_alone(home, tmp_path / "out", **settings, per_device_batch_size=1)
    (tmp_path / "new-checkpoints").mkdir()
    (tmp_path / "new-checkpoints" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="has checkpoints of another training"):
        train_alone(home, tmp_path / "new")
    assert (tmp_path / "new-checkpoints" / "notes.txt").is_file()


def test_a_call_killed_before_or_after_its_training_can_be_made_again(home, tmp_path, monkeypatch):
    """While the settings are written, and while the checkpoints of a training that ended are
    removed.
    """
    settings = {"steps": 4, "learning_rate": 1e-2, "save_steps": 2}
    left = tmp_path / "out-checkpoints" / ".settings.json.tmp-1-0"
    left.mkdir(parents=True)
    train_alone(home, tmp_path / "out", **settings)
    want = dict(esft.load_adapter(tmp_path / "out").tensors)

    def killed(folder, **_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(esft_runs, "shutil", SimpleNamespace(rmtree=killed))
        train_alone(home, tmp_path / "out", overwrite=True, **settings)
    assert sorted(path.name for path in (tmp_path / "out-checkpoints").glob("checkpoint-*"))
    train_alone(home, tmp_path / "out", overwrite=True, **settings)
    assert not (tmp_path / "out-checkpoints").exists()
    assert same(dict(esft.load_adapter(tmp_path / "out").tensors), want)


def test_all_tokens_are_scored_those_of_long_prompts_too(home, tmp_path):
    rows = [{"prompt": "Write " * 60 + str(i), "completion": "x"} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for packed, want in ((True, 300), (False, 12 * 24)):
        scores = esft_runs.score_folder(
            home / "base",
            tmp_path / "rows.jsonl",
            tmp_path / "out.json",
            n_tokens=300,
            max_length=24,
            packed=packed,
        )
        assert scores.n_tokens == want


LORA = {"steps": 4, "lora": (2, 4.0), "learning_rate": 1e-2}


def test_lora_of_the_selected_experts_is_trained_checked_and_merged(home, tmp_path):
    done = train_alone(home, tmp_path / "law", **LORA)
    selection = esft.ExpertSelection.load(home / "config.json")
    assert done.loss < done.loss_before and done.trained_parameters < done.total_parameters
    config = json.loads((tmp_path / "law" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4.0) and read_lora(
        tmp_path / "law"
    ).selection == selection
    with pytest.raises(ValueError, match="exists"):
        train_alone(home, tmp_path / "law", **LORA)
    found = esft_runs.check_folder(
        home / "base", tmp_path / "law", home / "rows.jsonl", limit=4, max_length=32
    )
    assert found.adapter.selection == selection and found.loss < found.base_loss
    receipt = esft.merge(home / "base", tmp_path / "law", tmp_path / "merged")
    assert receipt.experts == selection.num_experts and receipt.changed == found.tensors
    (tmp_path / "law" / "expert_cfg.json").unlink()
    with pytest.raises(ValueError, match="Cannot read the JSON file .*expert_cfg.json"):
        esft.merge(home / "base", tmp_path / "law", tmp_path / "again")


@pytest.mark.slow
def test_a_killed_training_of_lora_resumes(home, tmp_path, monkeypatch):
    train_alone(home, tmp_path / "whole", save_steps=2, **LORA)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(esft, "save_lora", lambda *_, **__: (_ for _ in ()).throw(Killed))
        train_alone(home, tmp_path / "out", save_steps=2, **LORA)
    for changed in ({"lora": (3, 4.0)}, {"lora": None}):
        with pytest.raises(
            ValueError, match="checkpoints of another training with a different lora"
        ):
            train_alone(home, tmp_path / "out", save_steps=2, **LORA | changed)
    train_alone(home, tmp_path / "out", save_steps=2, **LORA)
    assert same(
        *(load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "whole"))
    )


@pytest.mark.slow
def test_two_processes_train_the_lora_of_one(home, tmp_path):
    for name in ("base", "rows.jsonl"):
        (tmp_path / name).symlink_to(home / name)
    launch(dist_esft.__file__, 2, tmp_path, str(tmp_path), "lora")
    selection = esft.ExpertSelection(experts={1: (5, 2)})
    settings = {"per_device_batch_size": 4, "optimizer": "sgd"}
    train_alone(home, tmp_path / "alone", selection=selection, lora=(2, 4.0), **settings)
    alone = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    for name in ("law", "law-ep2"):  # with all experts on both, and with each rank's
        both = load_file(tmp_path / name / "adapter_model.safetensors")
        assert both.keys() == alone.keys() and read_lora(tmp_path / name).selection == selection
        for key, tensor in alone.items():
            torch.testing.assert_close(both[key], tensor, rtol=1e-3, atol=1e-6)
        assert any(tensor.any() for key, tensor in both.items() if "lora_B" in key)
        assert not (tmp_path / f"{name}-checkpoints").exists()
    train_alone(
        home, tmp_path / "rows", selection=selection, **settings | {"optimizer": "adamw_torch"}
    )
    both, alone = (esft.load_adapter(tmp_path / name).tensors for name in ("rows-ep2", "rows"))
    assert both.keys() == alone.keys()
    for key, tensor in alone.items():
        torch.testing.assert_close(both[key], tensor, rtol=1e-3, atol=1e-4)


def test_ep_size_that_does_not_divide_is_refused_before_anything_is_loaded(
    home, tmp_path, monkeypatch
):
    monkeypatch.setattr(esft_runs, "_load", None)
    with pytest.raises(ValueError, match="ep_size must divide the run's 1 processes, but got 2"):
        train_alone(home, tmp_path / "out", ep_size=2)
    monkeypatch.setattr(ranks, "state", lambda: SimpleNamespace(num_processes=9))
    monkeypatch.setattr(ranks, "engine", lambda: "MULTI_CPU")
    with pytest.raises(
        ValueError, match="ep_size must divide the 8 experts of the layers in .*base, but got 3"
    ):
        train_alone(home, tmp_path / "out", ep_size=3)
    assert not (tmp_path / "out").exists()
