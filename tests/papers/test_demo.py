"""The main job from end to end, as `make demo` runs it, at a size of seconds; and the benchmarks,
so that they keep running.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime import cli
from moe_runtime.bench import described, report
from papers import demo
from tests.support.dist_launch import forked

COMMAND = "from moe_runtime import cli; cli.main('papers.cli')"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the tiny demo: their folders and what the first one printed."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "papers"]
    first, second = (
        ["demo", "--preset", "tiny", "--out", folder / name] for name in ("first", "second")
    )
    # a whole start of Python once: its hashes differ from the server's, and so does the order in
    # all sets
    out = [
        subprocess.run([*command, *first], capture_output=True, text=True),
        forked(COMMAND, *second),
    ]
    for run in out:
        assert run.returncode == 0, out[0].stderr + out[1].stderr
    return folder, out[0].stdout


@pytest.mark.slow
def test_the_table_the_folders_and_the_picture(runs):
    folder, printed = runs
    results = json.loads((folder / "first" / "results.json").read_text())
    losses = {row["model"]: row["loss"] for row in results["rows"]}
    rates = ["SFT 0.00035", "SFT 0.0007", "SFT 0.0014"]
    assert list(losses) == ["base", *rates, "MoE", "merged INIT", "merged"]
    assert all(name in printed for name in losses)
    assert "sums solved" in printed
    assert "left in all" in printed
    assert all(losses[name] < losses["base"] for name in (*rates, "merged"))
    best = min(rates, key=lambda name: min(loss for _, loss in results["validation_curves"][name]))
    assert results["best_sft"] == best
    assert f"merged against {best}: " in printed
    assert results["upcycled_error"] <= 1e-5
    for row in results["alpha"]:
        assert abs(sum(row) - 1) < 1e-5
        assert abs(row[0] - results["recipe"]["shared_rate"]) < 1e-6
    assert (folder / "first" / "xft.png").read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in printed


def test_the_merged_folder_is_a_stock_model_that_generates(runs):
    merged = runs[0] / "first" / "merged"
    model = AutoModelForCausalLM.from_pretrained(merged)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"
    ids = tokenizer("Write a Python function", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert out.shape[1] > ids.shape[1]
    base = AutoModelForCausalLM.from_pretrained(runs[0] / "first" / "base")
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in base.named_parameters()
    }


def test_the_upcycled_folder_loads(runs):
    model = AutoModelForCausalLM.from_pretrained(runs[0] / "first" / "moe")
    assert model.config.moe_runtime["stage"] == "moe"


def test_a_second_run_gives_the_same_numbers(runs):
    first, second = (
        json.loads((runs[0] / name / "results.json").read_text()) for name in ("first", "second")
    )
    for row in first["rows"] + second["rows"]:
        row.pop("seconds")
    assert first == second
    weights = [
        AutoModelForCausalLM.from_pretrained(runs[0] / name / "merged").state_dict()
        for name in ("first", "second")
    ]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])


def test_an_existing_folder_is_left_alone(runs, monkeypatch, capsys):
    before = (runs[0] / "first" / "results.json").stat()
    monkeypatch.setattr(
        sys, "argv", ["papers", "demo", "--preset", "tiny", "--out", str(runs[0] / "first")]
    )
    with pytest.raises(SystemExit, match="1"):
        cli.main("papers.cli")
    assert "exists" in capsys.readouterr().err
    assert (runs[0] / "first" / "results.json").stat() == before


@pytest.mark.slow
def test_what_was_finished_before_a_failure_is_not_made_again(runs, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    shutil.copytree(runs[0] / "first.stages", tmp_path / "out.stages")
    with monkeypatch.context() as patch:
        patch.setattr(demo.Stages, "merge", fail)
        with pytest.raises(OSError, match="No space left"):
            demo.run("tiny", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out.stages"]
    assert "steps in" not in capsys.readouterr().out
    monkeypatch.setattr(demo.Stages, "_train", fail)
    demo.run("tiny", tmp_path / "out")
    results = [
        json.loads((folder / "results.json").read_text())
        for folder in (runs[0] / "first", tmp_path / "out")
    ]
    assert results[0] == results[1]


def test_a_sum_is_solved_where_every_label_is_the_likeliest_token():
    labels = torch.tensor([[-100, -100, 2, 1], [-100, 2, 1, -100], [-100, -100, -100, 0]])
    # at each place, of the next one
    said = torch.tensor([[0, 2, 1, 0], [2, 0, 0, 0], [0, 0, 1, 0]])
    assert demo.all_right(torch.nn.functional.one_hot(said, 3).float(), labels) == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "merged, count, at_its_rate",
    [(2.0, 3, "1.0000 higher"), (2.5, 2, "0.5000 higher"), (4.0, 1, "1.0000 lower")],
)
def test_the_verdict_counts_what_the_table_shows(merged, count, at_its_rate):
    losses = {
        "base": 5.0,
        "SFT 0.1": 2.4,
        "SFT 0.2": 3.0,
        "SFT 0.4": 9.0,
        "MoE": 2.1,
        "merged INIT": 2.2,
        "merged": merged,
    }
    rows = [{"model": name, "loss": loss} for name, loss in losses.items()]
    said = demo.verdict(
        {
            "rows": rows,
            "best_sft": "SFT 0.1",
            "against_best_sft": "merged against SFT 0.1: as it is",
        }
    )
    assert f"lower than that of {count} of 3 SFTs" in said
    assert f"SFT's loss is {at_its_rate}" in said
    assert "The best SFT by validation is SFT 0.1.\nmerged against" in said


def test_unknown_preset_is_refused(tmp_path):
    with pytest.raises(ValueError, match="preset must be one of small, tiny"):
        demo.run("huge", tmp_path / "out")


@pytest.mark.slow
def test_every_benchmark_runs(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "bench",
        "--tiny",
        "--benchmark-json",
        tmp_path / "b.json",
    ]
    # pytest-benchmark switches itself off in a worker of xdist, which the environment says we are
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    out = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=ROOT, env=env
    )
    assert out.returncode == 0, out.stdout[-3000:]
    benchmarks = json.loads((tmp_path / "b.json").read_text())["benchmarks"]
    files = {Path(benchmark["fullname"].partition("::")[0]).name for benchmark in benchmarks}
    assert files == {path.name for path in (ROOT / "bench").glob("bench_*.py")}
    for benchmark in benchmarks:
        info = benchmark["extra_info"]
        ours = "whole step" if info["kind"] == "breakdown" else "moe_runtime"
        assert any(ours in name for name in info["rows"])
        for row in info["rows"].values():
            assert row["ms"] > 0
        assert info["kind"] in described.KINDS
        assert info["dtype"] in described.DTYPES.values()
        assert set(info["ceilings"]) == {"TFLOP/s", "GB/s"}
        assert info["commit"]
    told = report.text([tmp_path / "b.json"])
    for benchmark in benchmarks:
        assert f"| {benchmark['name'].partition('[')[0]} |" in told
