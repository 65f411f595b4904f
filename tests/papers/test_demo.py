"""The demo end to end, as `make demo` runs it, in seconds; and the benchmarks, so that they keep
running.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.bench import described, report
from moe_runtime.io.files import read_json
from papers import demo
from tests.support.captured import captured
from tests.support.dist_launch import forked
from tests.support.shared import PYTEST

COMMAND = "from moe_runtime import cli; cli.main('papers.cli')"
WORDS = ["papers", "demo", "--preset", "tiny", "--out"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the tiny demo: its folder and its output."""
    folder = tmp_path_factory.mktemp("demo") / "first"
    # a fresh Python process has other hashes than the server, and so another order in all sets
    command = [sys.executable, "-m", *WORDS, folder]
    done = captured(command)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def results_of(folder: Path) -> dict:
    return read_json(folder / "results.json")


@pytest.mark.slow
def test_the_table_the_folders_and_the_picture(run):
    folder, printed = run
    results = results_of(folder)
    losses = {row["model"]: row["loss"] for row in results["rows"]}
    rates = ["SFT 0.00035", "SFT 0.0007", "SFT 0.0014"]
    assert list(losses) == [
        "base",
        *rates,
        "MoE",
        "merged INIT",
        "merged",
    ]
    for text in (*losses, "sums solved", "left in all"):
        assert text in printed
    for name in (*rates, "merged"):
        assert losses[name] < losses["base"]
    lowest = {}
    for name in rates:
        lowest[min(loss for _, loss in results["validation_curves"][name])] = name
    best = lowest[min(lowest)]
    assert results["best_sft"] == best
    assert f"merged against {best}: " in printed
    assert results["upcycled_error"] <= 1e-5
    for row in results["alpha"]:
        assert sum(row) == pytest.approx(1, abs=1e-5)
        assert row[0] == pytest.approx(results["recipe"]["shared_rate"], abs=1e-6)
    assert (folder / "xft.png").read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in printed


@pytest.mark.slow
def test_a_second_run_gives_the_same(run, tmp_path):
    done = forked(COMMAND, *WORDS[1:], tmp_path / "second")
    assert done.returncode == 0, done.stderr
    first = results_of(run[0])
    second = results_of(tmp_path / "second")
    for row in first["rows"] + second["rows"]:
        row.pop("seconds")
    assert first == second
    merged = AutoModelForCausalLM.from_pretrained(run[0] / "merged").state_dict()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "second" / "merged").state_dict()
    for name, value in merged.items():
        assert torch.equal(value, again[name])


def test_a_sum_is_solved_where_every_label_is_the_likeliest_token():
    labels = torch.tensor(
        [
            [-100, -100, 2, 1],
            [-100, 2, 1, -100],
            [-100, -100, -100, 0],
        ]
    )
    # at each position, for the next one
    likeliest = torch.tensor([[0, 2, 1, 0], [2, 0, 0, 0], [0, 0, 1, 0]])
    logits = torch.nn.functional.one_hot(likeliest, 3).float()
    assert demo.all_right(logits, labels) == [True, False, False]


@pytest.mark.slow
def test_every_benchmark_runs(tmp_path):
    command = [
        *PYTEST,
        "bench",
        "--tiny",
    ]
    command += ["--benchmark-json", str(tmp_path / "b.json")]
    # pytest-benchmark disables itself when the environment says that this is an xdist worker
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    out = captured(command, cwd=ROOT, env=env)
    assert out.returncode == 0, out.stdout[-3000:]
    benchmarks = read_json(tmp_path / "b.json")["benchmarks"]
    table = report.text([tmp_path / "b.json"])
    files = set()
    for benchmark in benchmarks:
        files.add(Path(benchmark["fullname"].partition("::")[0]).name)
        info = benchmark["extra_info"]
        ours = "whole step" if info["kind"] == "breakdown" else "moe_runtime"
        assert ours in " ".join(info["rows"])
        for row in info["rows"].values():
            assert row["ms"] > 0
        assert info["kind"] in described.KINDS
        assert info["dtype"] in described.DTYPES.values()
        assert set(info["ceilings"]) == {"TFLOP/s", "GB/s"}
        assert info["commit"]
        assert f"| {benchmark['name'].partition('[')[0]} |" in table
    assert files == {path.name for path in (ROOT / "bench").glob("bench_*.py")}
