"""`moe-runtime esft` as a user types it: from scores to a merged folder, official files, and one
clear error for bad input.
"""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from moe_runtime.cli import esft as cli_esft
from moe_runtime.io.files import read_json
from moe_runtime.methods import esft
from moe_runtime.methods.esft import runs as esft_runs
from moe_runtime.methods.esft.scores import ExpertScores
from tests.methods.esft.test_runs import write_base
from tests.support.esft_adapter import same

TRAIN = "--steps 8 --batch-size 4 --max-length 32 --learning-rate 1e-2 --save-steps 3"


def invoke(line: str, **folders):
    """Run a command line in which {names} stand for folders."""
    return CliRunner().invoke(cli_esft.app, line.format(**folders).split())


def succeed(line: str, **folders) -> str:
    """Run a command line that must succeed, and return its output."""
    out = invoke(line, **folders)
    assert out.exit_code == 0, out.exception
    return out.output


def refused(line: str, match: str, **folders) -> None:
    """Run a command line that must raise one error."""
    out = invoke(line, **folders)
    assert isinstance(out.exception, ValueError), out.output
    assert re.search(match, str(out.exception)), out.exception


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a base, examples, and the output of `score` and `select`."""
    home = tmp_path_factory.mktemp("esft")
    write_base(home)
    output = succeed(
        "score {home}/base --data {home}/rows.jsonl --tokens 256 --max-length 32 "
        "--out {home}/made/summary.json",
        home=home,
    )
    assert "256 tokens, 2 layers of 8 experts" in output
    succeed("select --summary {home}/made/summary.json --p .4 --out {home}/config.json", home=home)
    return home


@pytest.fixture(scope="module")
def adapter(home) -> Path:
    files = "--config {home}/config.json --data {home}/rows.jsonl"
    output = succeed(f"train {{home}}/base {files} --out {{home}}/law {TRAIN}", home=home)
    losses = re.search(r"held-out loss: ([\d.]+) -> ([\d.]+)", output)
    assert float(losses[2]) < float(losses[1])
    assert f"next: moe-runtime esft merge {home / 'base'} {home / 'law'}" in output
    return home / "law"


@pytest.mark.parametrize(
    "options, select, warns",
    [
        ("--score token --p 0.2", {"p": 0.2, "score": "token"}, False),
        ("--p 1.0", {"p": 1.0}, True),
        ("--variant normalized --p 1.0", {"p": 1.0, "variant": "normalized"}, False),
        (
            "--p 0.3 --shared-experts --non-expert-modules --round 4",
            {"p": 0.3, "shared_experts": True, "non_expert_modules": True, "round": 4},
            False,
        ),
        ("--experts 3", {"experts_per_layer": 3}, False),
    ],
)
def test_select_from_a_summary(home, tmp_path, options, select, warns):
    summary = home / "made" / "summary.json"
    config = tmp_path / "new" / "config.json"
    output = succeed(f"select --summary {summary} {options} --out {config}")
    expected = esft.select_experts(ExpertScores.load(summary), **select)
    assert esft.ExpertSelection.load(config) == expected
    assert f"{expected.num_experts} experts in 2 layers" in output
    assert ("warning: p is 1.0, but the scores sum to only" in output) == warns


def test_unused_experts_are_left_out_on_request(tmp_path):
    table = {"1": {"0": 0.5, "1": 0.0}}
    summary = {"token_scores": table, "gate_scores": table}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    files = f"--summary {tmp_path}/summary.json --out {tmp_path}/config.json"
    succeed(f"select {files} --p 1.0 --skip-unused")
    assert read_json(tmp_path / "config.json")["experts"] == {"1": [0]}


def test_train_apply_and_merge(home, adapter, tmp_path):
    made = esft.load_adapter(adapter)
    assert made.selection.experts == esft.ExpertSelection.load(home / "config.json").experts
    assert made.num_parameters == made.selection.num_experts * 3 * 32 * 24
    assert not (home / "law-checkpoints").exists()
    data = f"--data {home}/rows.jsonl --max-length 32 --limit 9"
    output = succeed(f"apply {home}/base {adapter} {data}")
    assert f"{made.num_parameters:,} parameters" in output
    assert f"it fits {home / 'base'}" in output
    losses = re.search(r"loss of 9 examples: ([\d.]+) without, ([\d.]+) with it", output)
    assert float(losses[2]) < float(losses[1])
    output = succeed(f"merge {home}/base {adapter} {tmp_path}/tuned")
    assert f"the {made.selection.num_experts} experts of {adapter}" in output
    model = AutoModelForCausalLM.from_pretrained(home / "base")
    esft.apply(model, adapter)
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert same(dict(tuned.state_dict()), dict(model.state_dict()))


class Killed(Exception):
    pass


def test_a_rerun_resumes_after_a_crash(home, adapter, tmp_path, monkeypatch):
    files = f"--config {home}/config.json --data {home}/rows.jsonl --out {tmp_path}/law"
    line = f"train {home}/base {files} {TRAIN}"
    train_folder = esft_runs.train_folder
    steps = []

    def counted(*args, **settings):
        return train_folder(*args, **settings | {"on_step": on_step})

    def on_step(step, *_):
        steps.append(step)
        if steps == [1, 2, 3, 4, 5]:
            raise Killed

    monkeypatch.setattr(esft_runs, "train_folder", counted)
    assert isinstance(invoke(line).exception, Killed)
    assert not (tmp_path / "law").exists()
    assert (tmp_path / "law-checkpoints" / "checkpoint-3" / "expert_cfg.json").is_file()
    refused(f"{line} --seed 1", "has checkpoints of another training with a different seed")
    steps.clear()
    succeed(line)
    assert steps == [4, 5, 6, 7, 8]
    assert not (tmp_path / "law-checkpoints").exists()
    resumed = esft.load_adapter(tmp_path / "law").tensors
    assert same(dict(resumed), dict(esft.load_adapter(adapter).tensors))


BAD = [
    ("select --summary made/summary.json --p 1.5 --out new.json", "p must be above 0"),
    ("select --summary made/summary.json --out new.json", "Pass either --p"),
    ("select --p 0.1 --summary made/summary.json --out config.json", "config.json already exists"),
    ("score base --data none.jsonl --out new.json", "none.jsonl' does not exist"),
    ("train base --config bad.json --data rows.jsonl --out new", r"experts \[99\] of layer 1"),
    ("train base --config config.json --data rows.jsonl --out base", "already exists"),
    ("apply base base", "Cannot read the JSON file .*expert_cfg.json"),
]


@pytest.mark.parametrize("words, match", BAD)
def test_bad_input_is_one_error_and_nothing_is_written(home, monkeypatch, words, match):
    monkeypatch.chdir(home)
    Path("bad.json").write_text(json.dumps({"experts": {"1": [99]}}))
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    refused(words, match)
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == before
