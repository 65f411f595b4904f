"""moe_runtime.methods.esft.runs: training on a model folder, what it keeps, and how it resumes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moe_runtime.hf.training import calibration, ranks
from moe_runtime.io.files import read_json
from moe_runtime.methods import esft
from moe_runtime.methods.esft import runs as esft_runs
from moe_runtime.methods.esft.lora import read_lora
from moe_runtime.methods.esft.runs import EsftTraining
from papers.engine.tiny import train_tokenizer
from tests.support import dist_esft
from tests.support.checkpoints import assert_equal
from tests.support.dist_launch import launch
from tests.support.stock_moe import stock

ROWS = [{"prompt": f"Write {i}:\n", "completion": "x" * (1 + i % 7) + f" = {i}"} for i in range(40)]


def write_base(home: Path) -> None:
    """Write a small MoE model, its tokenizer, and ROWS as rows.jsonl."""
    tokenizer = train_tokenizer(["Write 1: x = 1"] * 9, 300)
    stock("deepseek_v2", vocab_size=len(tokenizer)).save_pretrained(home / "base")
    tokenizer.save_pretrained(home / "base")
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a base, examples and a selection."""
    home = tmp_path_factory.mktemp("esft")
    write_base(home)
    scores = esft_runs.score_folder(
        home / "base", home / "rows.jsonl", home / "summary.json", n_tokens=256, max_length=32
    )
    esft.select_experts(scores, 0.4).save(home / "config.json")
    return home


SETTINGS = {
    "steps": 3,
    "batch_size": 4,
    "learning_rate": 1e-2,
    "save_steps": None,
    "per_device_batch_size": 4,
}


def train_alone(home, out, base=None, selection=None, rows=None, options=None, **settings):
    """Train in one process, for three steps by default."""
    return esft_runs.train_folder(
        base or home / "base",
        selection or home / "config.json",
        rows or home / "rows.jsonl",
        out,
        EsftTraining(**SETTINGS | settings),
        max_length=32,
        **options or {},
    )


def adapter_in(folder: Path) -> dict[str, torch.Tensor]:
    return dict(esft.load_adapter(folder).tensors)


def stop(*_, **__):
    raise Killed


@pytest.fixture(scope="module")
def half(home, tmp_path_factory) -> Path:
    """The base in bfloat16."""
    folder = tmp_path_factory.mktemp("half") / "base"
    shutil.copytree(home / "base", folder)
    model = AutoModelForCausalLM.from_pretrained(
        home / "base",
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "flags, dtype, expected",
    [
        ({}, None, torch.float32),
        ({"shared_experts": True, "non_expert_modules": True}, None, torch.float32),
        ({}, "bfloat16", torch.bfloat16),
    ],
    ids=["experts", "everything trainable", "bfloat16 on request"],
)
def test_a_small_learning_rate_trains_a_bfloat16_base(home, half, tmp_path, flags, dtype, expected):
    selection = replace(
        esft.ExpertSelection.load(home / "config.json"),
        **flags,
    )
    train_alone(
        home,
        tmp_path / "out",
        base=half,
        selection=selection,
        learning_rate=1e-5,
        steps=1,
        options={"dtype": dtype},
    )
    model = AutoModelForCausalLM.from_pretrained(half, dtype=expected)
    esft.train_only(model, selection)
    start = esft.adapter_of(model).tensors
    moved = []
    for name, tensor in adapter_in(tmp_path / "out").items():
        assert tensor.dtype == expected
        moved.append((tensor != start[name]).flatten())
    share = torch.cat(moved).double().mean()
    if expected == torch.float32:
        assert share > 0.9
    else:
        assert share < 0.1


def test_the_best_weights_outlive_an_adapter_that_could_not_be_written(home, tmp_path, monkeypatch):
    settings = {"steps": 8, "learning_rate": 0.3, "save_steps": 3}
    whole = train_alone(home, tmp_path / "whole", **settings)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(esft, "save_adapter", stop)
        train_alone(home, tmp_path / "again", **settings)
    again = train_alone(home, tmp_path / "again", **settings)
    assert again.loss == whole.loss
    assert_equal(
        adapter_in(tmp_path / "again"),
        adapter_in(tmp_path / "whole"),
    )


def test_a_run_without_a_checkpoint_may_be_changed_and_the_batch_at_once_always(
    home, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(esft_runs.fit, "train", stop)
        train_alone(home, out)
    assert (tmp_path / "out-checkpoints" / "settings.json").is_file()
    base = shutil.copytree(
        home / "base",
        tmp_path / "base",
    )
    rows = shutil.copy2(
        home / "rows.jsonl",
        tmp_path / "rows.jsonl",
    )
    settings = {"base": base, "rows": rows, "steps": 5, "save_steps": 2}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(esft, "save_adapter", stop)
        train_alone(home, out, **settings)
    for name, what in (("base/model.safetensors", "source"), ("rows.jsonl", "data")):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=f"of another training with a different {what}"):
            train_alone(home, out, **settings)
        shutil.copystat(home / name, tmp_path / name)
    train_alone(home, out, **settings, per_device_batch_size=1)
    notes = tmp_path / "new-checkpoints" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(ValueError, match="has checkpoints of another training"):
        train_alone(home, tmp_path / "new")
    assert notes.is_file()


def test_a_call_killed_before_or_after_its_training_can_be_made_again(home, tmp_path, monkeypatch):
    """The call is killed while writing the settings, or while removing the checkpoints of a
    finished training.
    """
    out = tmp_path / "out"
    checkpoints = tmp_path / "out-checkpoints"
    settings = {"steps": 4, "save_steps": 2}
    (checkpoints / ".settings.json.tmp-1-0").mkdir(parents=True)
    train_alone(home, out, **settings)
    expected = adapter_in(out)
    again = settings | {"options": {"overwrite": True}}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(esft_runs, "shutil", SimpleNamespace(rmtree=stop))
        train_alone(home, out, **again)
    assert list(checkpoints.glob("checkpoint-*"))
    train_alone(home, out, **again)
    assert not checkpoints.exists()
    assert_equal(adapter_in(out), expected)


@pytest.mark.parametrize(
    "packed, n_tokens",
    [(True, 300), (False, 12 * 24)],
)
def test_all_tokens_are_scored_those_of_long_prompts_too(home, tmp_path, packed, n_tokens):
    rows = [{"prompt": "Write " * 60 + str(i), "completion": "x"} for i in range(12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = esft_runs.score_folder(
        home / "base",
        data,
        tmp_path / "out.json",
        n_tokens=300,
        max_length=24,
        packed=packed,
    )
    assert scores.n_tokens == n_tokens


def test_scored_rows_are_drawn_at_random(home, tmp_path, monkeypatch):
    drawn = []

    def note(ids, *_, **__):
        drawn.extend(ids)
        raise Killed

    monkeypatch.setattr(calibration, "sample_batches", note)
    with pytest.raises(Killed):
        esft_runs.score_folder(
            home / "base", home / "rows.jsonl", tmp_path / "out.json", n_tokens=64, max_length=32
        )
    assert "Write 0:" not in ranks.load_tokenizer(home / "base").decode(drawn[0])


def test_one_packed_example_in_five_begins_without_bos(home):
    tokenizer = ranks.load_tokenizer(home / "base")
    rows = (home / "rows.jsonl", None, 4096, True, "plain", "assistant")
    train, validation = esft_runs._split_rows(tokenizer, *rows)
    assert (len(train), len(validation)) == (1, 1)
    assert 25 < train[0]["input_ids"].count(tokenizer.bos_token_id) < 39


LORA = {"steps": 4, "options": {"lora": (2, 4.0)}}


def test_lora_of_the_selected_experts_is_trained_checked_and_merged(home, tmp_path):
    base = home / "base"
    law = tmp_path / "law"
    done = train_alone(home, law, **LORA)
    selection = esft.ExpertSelection.load(home / "config.json")
    assert done.loss < done.loss_before
    assert done.trained_parameters < done.total_parameters
    config = read_json(law / "adapter_config.json")
    assert config["r"] == 2
    assert config["lora_alpha"] == 4.0
    with pytest.raises(ValueError, match="exists"):
        train_alone(home, law, **LORA)
    checked = esft_runs.check_folder(
        base,
        law,
        home / "rows.jsonl",
        limit=4,
        max_length=32,
    )
    assert checked.adapter.selection == selection
    assert checked.loss < checked.base_loss
    receipt = esft.merge(base, law, tmp_path / "merged")
    assert receipt.experts == selection.num_experts
    assert receipt.changed == checked.tensors
    (law / "expert_cfg.json").unlink()
    with pytest.raises(ValueError, match="Cannot read the JSON file .*expert_cfg.json"):
        esft.merge(base, law, tmp_path / "again")


def train_ranks(home, out, ranks: dict) -> dict:
    """Train LoRA of two experts, of rank 2 unless a file says otherwise; return its tensors."""
    file = out.with_suffix(".json")
    file.write_text(json.dumps(ranks))
    selection = esft.ExpertSelection(experts={1: (5, 2)})
    train_alone(home, out, selection=selection, options={"lora": (2, 4.0), "lora_ranks": file})
    return load_file(out / "adapter_model.safetensors")


def test_a_file_has_the_ranks_of_experts(home, tmp_path):
    used = []
    for name, matrix in train_ranks(home, tmp_path / "law", {"1.5": 3}).items():
        if ".lora_B." in name:
            used.append(matrix.view(len(matrix), 3, 8).any(0).sum(0).tolist())
    assert used == [[0, 0, 2, 0, 0, 3, 0, 0]] * 2


@pytest.mark.parametrize(
    "ranks, match",
    [
        ({"1.4": 3}, "law.json has a rank for 1.4, which is not a selected layer.expert"),
        ({"1.5": 0}, "rank must be"),
        ({"1.5": "3"}, "rank must be"),
    ],
)
def test_a_wrong_file_of_ranks_is_refused(home, tmp_path, ranks, match):
    with pytest.raises(ValueError, match=match):
        train_ranks(home, tmp_path / "law", ranks)
    assert not (tmp_path / "law").exists()


@pytest.mark.slow
def test_a_killed_training_of_lora_resumes(home, tmp_path, monkeypatch):
    settings = LORA | {"save_steps": 2}
    train_alone(home, tmp_path / "whole", **settings)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(esft, "save_lora", stop)
        train_alone(home, tmp_path / "out", **settings)
    for lora in ((3, 4.0), None):
        with pytest.raises(ValueError, match="of another training with a different lora"):
            train_alone(
                home,
                tmp_path / "out",
                **settings | {"options": {"lora": lora}},
            )
    train_alone(home, tmp_path / "out", **settings)
    file = "adapter_model.safetensors"
    assert_equal(
        load_file(tmp_path / "out" / file),
        load_file(tmp_path / "whole" / file),
    )


@pytest.mark.slow
def test_two_processes_train_the_lora_of_one(home, tmp_path):
    for name in ("base", "rows.jsonl"):
        (tmp_path / name).symlink_to(home / name)
    launch(
        dist_esft.__file__,
        2,
        tmp_path,
        str(tmp_path),
        "lora",
    )
    selection = esft.ExpertSelection(experts={1: (5, 2)})
    train_alone(
        home,
        tmp_path / "alone",
        selection=selection,
        options={"lora": (2, 4.0)},
        optimizer="sgd",
    )
    alone = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    for name in ("law", "law-ep2"):  # with all experts on both, and with each rank's own
        both = load_file(tmp_path / name / "adapter_model.safetensors")
        assert read_lora(tmp_path / name).selection == selection
        torch.testing.assert_close(
            both,
            alone,
            rtol=1e-3,
            atol=1e-6,
        )
        assert [key for key, tensor in both.items() if "lora_B" in key and tensor.any()]
        assert not (tmp_path / f"{name}-checkpoints").exists()
    train_alone(
        home,
        tmp_path / "rows",
        selection=selection,
        optimizer="adamw_torch",
    )
    both = adapter_in(tmp_path / "rows-ep2")
    torch.testing.assert_close(
        both,
        adapter_in(tmp_path / "rows"),
        rtol=1e-3,
        atol=1e-4,
    )


def test_ep_size_that_does_not_divide_is_refused_before_anything_is_loaded(
    home, tmp_path, monkeypatch
):
    monkeypatch.setattr(ranks, "load_model", None)
    with pytest.raises(ValueError, match="ep_size must divide the run's 1 processes, but got 2"):
        train_alone(home, tmp_path / "out", ep_size=2)
    monkeypatch.setattr(
        ranks,
        "state",
        lambda: SimpleNamespace(num_processes=9),
    )
    monkeypatch.setattr(ranks, "engine", lambda: "MULTI_CPU")
    with pytest.raises(ValueError, match="ep_size must divide the 8 experts .*base, but got 3"):
        train_alone(home, tmp_path / "out", ep_size=3)
    assert not (tmp_path / "out").exists()
