"""moe-runtime esft as a user types it: from scores to a merged folder, official files, and one
clear error for bad input.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from moe_runtime.cli import esft as cli_esft
from moe_runtime.cli import verbs
from moe_runtime.hf.dropin.layers import numbered_layers
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.files import read_json
from moe_runtime.methods import esft
from moe_runtime.methods.esft import runs as esft_runs
from moe_runtime.methods.esft.scores import ExpertScores
from papers.engine.tiny import train_tokenizer
from tests.support.esft_adapter import random_adapter, same
from tests.support.stock_moe import stock

ROWS = [{"prompt": f"Write {i}:\n", "completion": "x" * (1 + i % 7) + f" = {i}"} for i in range(40)]
TRAIN = (
    "--steps",
    8,
    "--batch-size",
    4,
    "--max-length",
    32,
    "--learning-rate",
    1e-2,
    "--save-steps",
    3,
)


def invoke(*arguments):
    return CliRunner().invoke(cli_esft.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a base, rows, and what score and select make of them."""
    home = tmp_path_factory.mktemp("esft")
    tokenizer = train_tokenizer(["Write 1: x = 1"] * 9, 300)
    stock("deepseek_v2", vocab_size=len(tokenizer)).save_pretrained(home / "base")
    tokenizer.save_pretrained(home / "base")
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sample = ("--data", home / "rows.jsonl", "--n-tokens", 256, "--max-length", 32)
    out = invoke(
        "score",
        home / "base",
        *sample,
        "--out",
        home / "made" / "summary.json",
        "--logs",
        home / "logs",
        "--pairs",
    )
    assert out.exit_code == 0, out.exception
    assert "256 tokens, 2 layers of 8 experts" in out.output
    out = invoke(
        "select",
        "--summary",
        home / "made" / "summary.json",
        "--p",
        0.4,
        "--out",
        home / "config.json",
    )
    assert out.exit_code == 0, out.exception
    return home


@pytest.fixture(scope="module")
def adapter(home) -> Path:
    out = invoke(
        "train",
        home / "base",
        "--config",
        home / "config.json",
        "--data",
        home / "rows.jsonl",
        "--out",
        home / "law",
        *TRAIN,
    )
    assert out.exit_code == 0, out.exception
    before, after = map(
        float, re.search(r"held-out loss: ([\d.]+) -> ([\d.]+)", out.output).groups()
    )
    assert (
        after < before
        and f"next: moe-runtime esft merge {home / 'base'} {home / 'law'}" in out.output
    )
    return home / "law"


def test_the_summary_is_the_official_one_and_follows_from_the_logs(home):
    values = read_json(home / "made" / "summary.json")
    assert set(values["gate_scores"]) == set(values["token_scores"]) == {"1", "2"}
    assert [sum(row.values()) for row in values["token_scores"].values()] == pytest.approx([1, 1])
    scores = ExpertScores.load(home / "made" / "summary.json")
    logged = ExpertScores.from_logs(home / "logs")
    torch.testing.assert_close(scores.gate, logged.gate, atol=5e-5, rtol=0)  # logs have 4 digits
    assert scores.n_tokens == logged.n_tokens == 256


@pytest.mark.parametrize(
    "options, select",
    [
        pytest.param(("--score", "gate", "--p", 0.1), {"p": 0.1}, id="gate"),
        pytest.param(("--score", "token", "--p", 0.2), {"p": 0.2, "score": "token"}, id="token"),
        pytest.param(
            ("--variant", "normalized", "--p", 0.5),
            {"p": 0.5, "variant": "normalized"},
            id="variant",
        ),
        pytest.param(("--group-size", 2, "--p", 0.3), {"p": 0.3, "group_size": 2}, id="groups"),
        pytest.param(
            ("--p", 0.3, "--shared-experts", "--non-expert-modules", "--round", 4),
            {"p": 0.3, "shared_experts": True, "non_expert_modules": True, "round": 4},
            id="flags",
        ),
    ],
)
def test_select_from_a_summary(home, tmp_path, options, select):
    out = invoke(
        "select",
        "--summary",
        home / "made" / "summary.json",
        *options,
        "--out",
        tmp_path / "new" / "config.json",
    )
    assert out.exit_code == 0, out.exception
    want = esft.select_experts(ExpertScores.load(home / "made" / "summary.json"), **select)
    assert esft.ExpertSelection.load(tmp_path / "new" / "config.json") == want
    assert f"{want.num_experts} experts in 2 layers" in out.output


@pytest.mark.parametrize("variant", [None, "v1", "paper", "normalized", "head"])
def test_select_from_official_files_alone(home, tmp_path, variant):
    options = () if variant is None else ("--variant", variant)
    out = invoke(
        "select", "--logs", home / "logs", *options, "--p", 0.3, "--out", tmp_path / "config.json"
    )
    assert out.exit_code == 0, out.exception
    config = read_json(tmp_path / "config.json")
    assert config["variant"] == (variant or "v1") and set(config["experts"]) == {"1", "2"}
    summary = read_json(home / "made" / "summary.json")
    official = {name: summary[name] for name in ("token_scores", "gate_scores")}
    (tmp_path / "official.json").write_text(json.dumps(official))
    if variant != "paper":  # which does not follow from it
        options = (*options, "--p", 0.3, "--out", tmp_path / "again.json")
        out = invoke("select", "--summary", tmp_path / "official.json", *options)
        assert out.exit_code == 0, out.exception
        assert read_json(tmp_path / "again.json")["experts"] == config["experts"]


def test_train_apply_and_merge(home, adapter, tmp_path):
    made = esft.load_adapter(adapter)
    assert made.selection.experts == esft.ExpertSelection.load(home / "config.json").experts
    assert made.num_parameters == made.selection.num_experts * 3 * 32 * 24
    assert not (home / "law-checkpoints").exists()
    out = invoke(
        "apply",
        home / "base",
        adapter,
        "--data",
        home / "rows.jsonl",
        "--max-length",
        32,
        "--limit",
        9,
    )
    assert out.exit_code == 0, out.exception
    assert (
        f"{made.num_parameters:,} parameters" in out.output
        and f"it fits {home / 'base'}" in out.output
    )
    without, with_it = map(
        float,
        re.search(r"loss of 9 examples: ([\d.]+) without, ([\d.]+) with it", out.output).groups(),
    )
    assert with_it < without
    out = invoke("merge", home / "base", adapter, tmp_path / "tuned")
    assert out.exit_code == 0, out.exception
    assert (
        f"the {made.selection.num_experts} experts of {adapter}" in out.output
        and "tokenizer.json" in out.output
    )
    model = AutoModelForCausalLM.from_pretrained(home / "base")
    esft.apply(model, adapter)
    assert same(
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").state_dict()),
        dict(model.state_dict()),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, trains",
    [
        pytest.param(
            ("--shared-experts",), "model.layers.1.mlp.shared_experts.up_proj.weight", id="shared"
        ),
        pytest.param(("--non-expert-modules", "--no-pack"), "model.norm.weight", id="non-expert"),
    ],
)
def test_train_with_the_flags_and_from_an_adapter_s_own_config(
    home, adapter, tmp_path, options, trains
):
    out = invoke(
        "train",
        home / "base",
        "--config",
        adapter / "expert_cfg.json",
        "--data",
        home / "rows.jsonl",
        "--out",
        tmp_path / "more",
        *TRAIN,
        "--held-out",
        home / "rows.jsonl",
        "--prompt",
        "deepseek",
        *options,
    )
    assert out.exit_code == 0, out.exception
    assert trains in esft.load_adapter(tmp_path / "more").tensors


class Killed(Exception):
    pass


def test_the_same_call_goes_on_after_a_crash(home, adapter, tmp_path, monkeypatch):
    arguments = [
        "train",
        home / "base",
        "--config",
        home / "config.json",
        "--data",
        home / "rows.jsonl",
        *TRAIN,
    ]
    real = esft_runs.train_folder

    def stop(step, steps, loss):
        if step == 5:
            raise Killed

    monkeypatch.setattr(
        esft_runs,
        "train_folder",
        lambda *args, **settings: real(*args, **settings | {"on_step": stop}),
    )
    out = invoke(*arguments, "--out", tmp_path / "law")
    assert isinstance(out.exception, Killed) and not (tmp_path / "law").exists()
    assert (tmp_path / "law-checkpoints" / "checkpoint-3" / "expert_cfg.json").is_file()
    monkeypatch.setattr(esft_runs, "train_folder", real)
    out = invoke(*arguments, "--out", tmp_path / "law", "--seed", 1)
    assert isinstance(
        out.exception, ValueError
    ) and "has checkpoints of another training with a different seed" in str(out.exception)
    steps = []
    monkeypatch.setattr(
        esft_runs,
        "train_folder",
        lambda *a, **s: real(*a, **s | {"on_step": lambda step, *_: steps.append(step)}),
    )
    out = invoke(*arguments, "--out", tmp_path / "law")
    assert out.exit_code == 0, out.exception
    assert steps == [4, 5, 6, 7, 8] and not (tmp_path / "law-checkpoints").exists()
    assert same(
        dict(esft.load_adapter(tmp_path / "law").tensors), dict(esft.load_adapter(adapter).tensors)
    )


def test_p_that_is_not_reached_is_said(home, tmp_path):
    arguments = ("select", "--summary", home / "made" / "summary.json", "--out")
    out = invoke(*arguments, tmp_path / "some.json", "--p", 0.1)
    sums = ExpertScores.load(home / "made" / "summary.json").gate.sum(1)
    assert f"scores of a layer sum to {sums.min():.3f} to {sums.max():.3f}" in out.output
    assert "warning" not in out.output and max(sums) < 0.99
    out = invoke(*arguments, tmp_path / "all.json", "--p", 1.0)
    said = (
        f"warning: p is 1.0, but the scores sum to only {sums.min():.3f} to {sums.max():.3f} in 2 "
        "of 2 layers (all)"
    )
    assert said in out.output
    out = invoke(*arguments, tmp_path / "share.json", "--p", 1.0, "--variant", "normalized")
    assert out.exit_code == 0 and "warning" not in out.output


def test_a_number_of_experts_in_place_of_p(home, tmp_path):
    arguments = ("select", "--summary", home / "made" / "summary.json", "--out")
    out = invoke(*arguments, tmp_path / "three.json", "--experts", 3)
    assert out.exit_code == 0 and "3 to 3 in a layer" in out.output
    for wrong in ([], ["--p", 0.1, "--experts", 3]):
        out = invoke(*arguments, tmp_path / "wrong.json", *wrong)
        assert isinstance(out.exception, ValueError) and "Pass either --p" in str(out.exception)


def test_a_selection_of_another_model_is_refused_before_training(home, tmp_path):
    other = tmp_path / "other"
    tokenizer = train_tokenizer(["Write 1: x = 1"] * 9, 300)
    stock("olmoe", vocab_size=len(tokenizer), num_hidden_layers=3).save_pretrained(other)
    tokenizer.save_pretrained(other)
    arguments = (
        "train",
        other,
        "--data",
        home / "rows.jsonl",
        "--out",
        tmp_path / "law",
        *TRAIN,
        "--config",
    )
    out = invoke(*arguments, home / "config.json")
    assert isinstance(out.exception, ValueError)
    assert "for a model whose model_type is 'deepseek_v2', but the model's is 'olmoe'" in str(
        out.exception
    )
    values = read_json(home / "config.json")
    del values["moe_runtime"]  # as older and official files
    (tmp_path / "old.json").write_text(json.dumps(values))
    out = invoke(*arguments, tmp_path / "old.json")
    assert isinstance(out.exception, ValueError)
    assert "has 2 layers, while the model has 3, also layer 0" in str(out.exception)
    assert not (tmp_path / "law").exists()


def test_what_logs_do_not_say(home, tmp_path):
    arguments = ("select", "--logs", home / "logs", "--p", 0.3, "--out")
    out = invoke(
        *arguments, tmp_path / "config.json", "--layers", "2", "--top-k", 2, "--num-experts", 9
    )
    assert out.exit_code == 0, out.exception
    logged = ExpertScores.from_logs(home / "logs", layers=[2], top_k=2, num_experts=9)
    want = esft.select_experts(logged, 0.3)
    assert esft.ExpertSelection.load(tmp_path / "config.json") == want and set(want.experts) == {2}
    assert verbs.numbers("1, 3,5-7") == [1, 3, 5, 6, 7]


def test_other_weights_if_asked_for(home, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(home / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    random_adapter(model).save(tmp_path / "adapter")
    out = invoke("merge", home / "base", tmp_path / "adapter", tmp_path / "out")
    assert isinstance(out.exception, ValueError) and "for a base with other weights" in str(
        out.exception
    )
    out = invoke("merge", home / "base", tmp_path / "adapter", tmp_path / "out", "--any-weights")
    assert out.exit_code == 0, out.exception
    with Checkpoint(tmp_path / "out") as merged:
        name = f"model.layers.{min(numbered_layers(model))}.mlp.experts.1.up_proj.weight"
        assert torch.equal(merged.get(name), esft.load_adapter(tmp_path / "adapter").tensors[name])


@pytest.mark.slow
def test_lora_of_the_selected_experts(home, tmp_path):
    files = "--config", home / "config.json", "--data", home / "rows.jsonl"
    steps = *TRAIN, "--steps", 2, "--save-steps", 0
    out = invoke(
        "train",
        home / "base",
        *files,
        "--out",
        tmp_path / "law",
        *steps,
        "--lora",
        "--rank",
        3,
        "--alpha",
        6,
    )
    assert out.exit_code == 0, out.exception
    config = read_json(tmp_path / "law" / "adapter_config.json")
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 6, "LORA")
    selection = esft.ExpertSelection.load(home / "config.json")
    out = invoke("apply", home / "base", tmp_path / "law", "--json")
    assert json.loads(out.stdout)["selection"] == selection.to_dict(), out.output
    share = json.loads(out.stdout)["parameters"]
    trained = 3 * selection.num_experts * (32 + 2 * 24 + 24 + 32)
    assert share == trained
    out = invoke("merge", home / "base", tmp_path / "law", tmp_path / "merged")
    assert out.exit_code == 0 and f"with the {selection.num_experts} experts of" in out.output, (
        out.exception
    )


BAD = [
    ("select --summary made/summary.json --p 1.5 --out new.json", "p must be above 0"),
    ("select --summary made/summary.json --p 0 --out new.json", "p must be"),
    ("select --p 0.1 --out new.json", "Pass either --summary, or --logs"),
    (
        "select --p 0.1 --summary made/summary.json --logs logs --out new.json",
        "Pass either --summary, or --logs",
    ),
    ("select --p 0.1 --summary none.json --out new.json", "Cannot read the JSON file none.json"),
    (
        "select --p 0.1 --summary made/summary.json --top-k 2 --out new.json",
        "Pass either --summary, or --logs",
    ),
    ("select --p 0.1 --logs logs --layers 1,x --out new.json", "layers must be numbers"),
    ("select --p 0.1 --summary made/summary.json --score x --out new.json", "score must be"),
    ("select --p 0.1 --summary made/summary.json --out config.json", "config.json already exists"),
    ("score base --data rows.jsonl --out config.json", "config.json already exists"),
    ("score base --data rows.jsonl --out new.json --logs logs", "logs already exists"),
    ("score base --data none.jsonl --out new.json", "none.jsonl' does not exist"),
    ("score base --data rows.jsonl --out new.json --n-tokens 0", "n_tokens must be"),
    ("score nowhere --data rows.jsonl --out new.json", "has no config.json"),
    (
        "train base --config none.json --data rows.jsonl --out new",
        "Cannot read the JSON file none.json",
    ),
    (
        f"train base --config bad.json --data rows.jsonl --out new {' '.join(map(str, TRAIN))}",
        r"experts \[99\] of layer 1",
    ),
    ("train base --config config.json --data rows.jsonl --out base", "already exists"),
    (
        "train base --config config.json --data rows.jsonl --out base --overwrite",
        "is or contains base, which is read",
    ),
    ("train base --config config.json --data rows.jsonl --out new --dtype int8", "dtype must be"),
    (
        "train base --config config.json --data rows.jsonl --out new --prompt x "
        f"{' '.join(map(str, TRAIN))}",
        "prompt must be",
    ),
    (
        "train base --config config.json --data rows.jsonl --out new --rank 4",
        "rank .4. and alpha .None. require --lora",
    ),
    ("train base --config config.json --data rows.jsonl --out new --lora --rank 0", "rank must be"),
    (
        "train base --config config.json --data rows.jsonl --out new --lora --alpha nan",
        "alpha must be",
    ),
    (
        "train base --config config.json --data rows.jsonl --out new --lora --shared-experts",
        "shared_experts is True, but LoRA",
    ),
    ("apply base base", "Cannot read the JSON file .*expert_cfg.json"),
    ("merge base base new", "Cannot read the JSON file .*expert_cfg.json"),
]


@pytest.mark.parametrize("words, match", BAD)
def test_bad_input_is_one_error_and_nothing_is_written(home, monkeypatch, words, match):
    monkeypatch.chdir(home)
    Path("bad.json").write_text(json.dumps({"experts": {"1": [99]}}))
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    out = invoke(*words.split())
    assert isinstance(out.exception, ValueError) and re.search(match, str(out.exception)), (
        out.exception
    )
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == before
