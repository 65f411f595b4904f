"""The benchmark harness: what a GPU run keeps when a variant fails, the process dies or time runs
out, and the report.
"""

import functools
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from moe_runtime.bench import ceilings, clock, goals, machine, report, shapes
from moe_runtime.bench.bench_layer import LayerVariants
from moe_runtime.bench.records import ABOUT, Records, benchmarks
from moe_runtime.tools import tune
from tests.support.captured import captured
from tests.support.shared import PYTEST

ROOT = Path(__file__).resolve().parents[2]


class Timer:
    """Return fixed milliseconds according to the order of the variants."""

    def __init__(self, *_):
        pass

    def round(self, functions):
        return [10.0 * (i + 1) for i, function in enumerate(functions) if [function()]]


@pytest.fixture
def gpu(monkeypatch):
    """Replace the CUDA calls that the clock makes; `lost` says whether the context is lost."""
    state = {"lost": False}

    def synchronize(*_):
        if state["lost"]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(tune, "EventTimer", Timer)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5 << 20)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return state


def pedantic(function, rounds):
    for _ in range(rounds):
        function()


def measure(variants, notes=None, compare=None):
    """Time variants for 0.31 s."""
    return clock.measure_gpu(
        variants,
        15,
        0.31,
        pedantic,
        {} if notes is None else notes,
        compare,
    )


def test_a_failing_variant_is_noted_and_the_others_are_timed(gpu):
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nand more")

    notes = {"peer": "not installed"}
    variants = {
        "floor": lambda: 0,
        "fails": fail,
        "moe_runtime": lambda: 0,
    }
    times, details = measure(variants, notes)
    failed = notes.pop("fails")
    assert failed == "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"
    assert notes == {"peer": "not installed"}
    # 10 rounds of 30 ms
    assert times == {"floor": [0.01] * 10, "moe_runtime": [0.02] * 10}
    memory = {"peak MiB": 4.0, "kept MiB": 0.0}
    assert details == {"floor": memory, "moe_runtime": memory}
    rows = clock.rows_of(
        times,
        details,
        4e12,
        0,
        {"TFLOP/s": 800.0, "GB/s": 4000.0},
    )
    assert rows["moe_runtime"] == memory | {
        "ms": 20.0,
        "ratio": 2.0,
        "spread": 0.0,
        "iqr": 0.0,
        "TFLOP/s": 200.0,
        "share": 0.25,
    }
    with pytest.raises(ZeroDivisionError):  # every ratio is relative to the floor
        measure({"floor": lambda: 1 / 0, "moe_runtime": lambda: 0})


def test_a_lost_context_names_its_variant(gpu):
    def lose():
        gpu["lost"] = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(clock.VariantCrashed, match="bad broke the CUDA context: Runtime") as lost:
        measure(
            {
                "floor": lambda: 0,
                "bad": lose,
                "moe_runtime": lambda: 0,
            }
        )
    assert lost.value.variant == "bad"


@pytest.fixture
def spend(monkeypatch):
    """Return spend(seconds), which alone advances the clock of the CPU's timing."""
    now = [0.0]

    def spend(seconds):
        now[0] += seconds

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    return spend


def test_each_round_on_a_cpu_has_its_order(spend):
    """Times are attributed to the right variant in any order; every run draws the same orders."""
    calls = []

    def call(name, seconds):
        calls.append(name)
        spend(seconds)

    variants = {}
    for name, seconds in {"a": 1.0, "b": 2.0, "c": 4.0}.items():
        variants[name] = functools.partial(call, name, seconds)
    runs = []
    for _ in range(2):
        calls.clear()
        times, _ = clock.measure_cpu(variants, 20, pedantic, {})
        assert times == {
            "a": [1.0] * 20,
            "b": [2.0] * 20,
            "c": [4.0] * 20,
        }
        runs.append(["".join(calls[i : i + 3]) for i in range(3, 63, 3)])
    assert runs[0] == runs[1]
    assert set(runs[0]) == {"abc", "acb", "bac", "bca", "cab", "cba"}


def test_a_variant_that_takes_too_long_on_a_cpu_is_left_out(spend):
    variants = {
        "fast": functools.partial(spend, 1.0),
        "moe_runtime": functools.partial(spend, clock.PATIENCE + 1),
        "slow": functools.partial(spend, clock.PATIENCE + 6),
    }
    notes = {}
    times, details = clock.measure_cpu(variants, 3, pedantic, notes)
    assert times == {"fast": [1.0] * 3, "moe_runtime": [16.0] * 3}
    assert details.keys() == times.keys()
    assert notes == {"slow": "one call takes 21 s"}


def test_share_is_that_of_the_nearer_ceiling():
    limits = {"TFLOP/s": 4.0, "GB/s": 100.0}
    times = {"a": [1.0, 3.0, 2.0]}
    rows = clock.rows_of(
        times,
        {"a": {"peak MiB": 5.0}},
        2e12,
        100e9,
        limits,
        1000,
    )
    assert rows["a"] == {
        "ms": 2000.0,
        "ratio": 1.0,
        "spread": 1.0,
        "TFLOP/s": 1.0,
        "GB/s": 50.0,
        "tokens/s": 500.0,
        "peak MiB": 5.0,
        "share": 0.5,
    }
    assert clock.rows_of({"a": [1.0]}, {}, 2e12, 0, limits)["a"]["share"] == 0.5
    assert "share" not in clock.rows_of({"a": [1.0]}, {}, 0, 0, limits)["a"]


def test_the_best_ceiling_counts(monkeypatch):
    peaks = [0.12, 0.23, 0.2]
    monkeypatch.setattr(ceilings, "CUDA", False)
    monkeypatch.setattr(ceilings, "_BEST", {})
    monkeypatch.setattr(ceilings, "_products", lambda *_: 0.1)
    monkeypatch.setattr(ceilings, "_peak", lambda *_: peaks.pop(0))
    best = [ceilings.ceilings(torch.float32, tiny=True)["TFLOP/s"] for _ in range(3)]
    assert best == [0.12, 0.23, 0.23]


MEMORY = """
import json, sys
import torch
from moe_runtime.bench import clock
from moe_runtime.ops import workspace

like, kept = torch.empty(0), []

def scratch():
    workspace.scratch("a", (64 << 18,), like).fill_(1)
    workspace.lease((32 << 18,), like).fill_(1)

variants = {
    "floor": lambda: kept.append(torch.ones(1)),
    "many": lambda: [torch.ones(1 << 17) for _ in range(200)] and None,  # 100 MiB from the heap
    "one": lambda: torch.ones(50 << 18),
    "pools": scratch,
}

def pedantic(one_round, rounds):
    for _ in range(rounds):
        one_round()

print(json.dumps(clock.measure_cpu(variants, 2, pedantic, {})[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not clock.CLEAR.exists(), reason="no /proc/self/clear_refs")
def test_memory_on_the_cpu_is_what_the_call_takes():
    """The peak does not depend on memory that earlier calls left in the allocator or in pools."""
    done = captured([sys.executable, "-c", MEMORY], cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout)
    expected = {
        "floor": (0, 0),
        "many": (100, 0),
        "one": (50, 50),
        "pools": (96, 0),
    }
    for name, (peak, held) in expected.items():
        assert measured[name]["peak MiB"] == pytest.approx(peak, abs=6), name
        assert measured[name]["kept MiB"] == pytest.approx(held, abs=6), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_variants_of_a_layer_agree(dtype):
    """Variants that are timed side by side compute the same output and gradient of x, up to
    rounding.
    """
    layer = LayerVariants(shapes.TINY["tiny"], dtype)
    variants = layer.variants({}) | {"official": layer.official()}
    assert {"transformers batched_mm", "torch grouped_mm"} <= variants.keys()
    want = layer.ours().detach()
    dx = layer.both(layer.ours)()[0]
    for name, variant in variants.items():
        assert tune.worst_row(layer.forward(variant)().detach(), want) < 0.05, name
        assert tune.worst_row(layer.both(variant)()[0], dx) < 0.05, name


def test_what_is_published_has_no_paths_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "home" / "venv"))
    monkeypatch.chdir(tmp_path)
    for path, public in {
        f"{tmp_path}/a.py": "./a.py",
        f"{tmp_path}/home/b.py": "~/b.py",
        f"{tmp_path}/home/venv/c.py": "PREFIX/c.py",
        f"{tmp_path}-d": f"{tmp_path}-d",
        f"{machine.ROOT}/e.py": "./e.py",
    }.items():
        assert machine.public(f"a {path}, b") == f"a {public}, b"


def test_records_and_their_report(tmp_path, capsys):
    path = tmp_path / "deep" / "r.jsonl"
    records = Records(path)
    assert records.lines() == []
    assert Records(None).done() == set()
    row = {
        "ms": 1.0,
        "ratio": 1.0,
        "spread": 0.0,
        "share": 0.5,
        "peak MiB": 7.0,
        "difference": 0.5,
    }
    info = dict.fromkeys(ABOUT, "x") | {
        "machine": "H200",
        "ceilings": {"GB/s": 4300.0},
        "rows": {"floor": row},
        "notes": {"peer": "not installed"},
    }
    records.write("bench_x[a]", extra_info=info)
    records.write("bench_x[b]", broken={"peer": "illegal access"})
    records.write("bench_x[c]", skipped="does not fit")
    records.write("bench_x[d]", failed="boom")
    with path.open("a") as file:
        file.write('{"name": "e", "extra_in')  # the process died here
    assert Records(path).done() == {"bench_x[a]", "bench_x[c]", "bench_x[d]"}
    assert Records(path).broken("bench_x[b]") == {"peer": "illegal access"}
    assert [bench["name"] for bench in benchmarks(path)] == ["bench_x[a]"]
    assert report.rows_of(path) == {("bench_x[a]", "floor"): row}
    report.main([str(path)])
    text = capsys.readouterr().out
    assert "| a | 1.000 ms, 50%, 7 MiB, differs by 5e-01 |" in text
    assert "bench_x[a]: peer: not installed" in text
    assert "machine H200, commit x, date x, ceilings of x 4,300 GB/s" in text
    assert "failed: bench_x[d]: boom" in text


def run_bench(*arguments) -> str:
    command = [
        *PYTEST,
        "bench/bench_merging.py",
        "--tiny",
        *map(str, arguments),
    ]
    # pytest-benchmark disables itself when the environment says that this is an xdist worker
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return captured(command, cwd=ROOT, env=env).stdout


@pytest.mark.slow
def test_a_rerun_resumes_and_stops_in_time(tmp_path):
    lines = tmp_path / "r.jsonl"
    out = tmp_path / "out.json"
    assert "3 skipped" in run_bench("--results", lines, "--budget", 0)
    assert not Records(lines).done()
    assert Records(lines).unfinished() is None  # running out of time does not count as a crash
    assert "1 passed" in run_bench("--results", lines, "-k", "dalpha")
    assert "2 passed, 1 deselected" in run_bench("--results", lines)
    assert {bench["name"] for bench in benchmarks(lines)} == {
        "bench_merge_experts[tiny-dalpha]",
        "bench_merge_experts[tiny-merge]",
        "bench_merged_linear[tiny]",
    }
    report.main([str(lines), "--out", str(out)])
    assert report.rows_of(out) == report.rows_of(lines)


ALL = goals.GOALS + goals.CPU_GOALS


def goal_rows(share=0.95, ratio=3.0) -> dict:
    """Results of every benchmark that a goal refers to."""
    row = dict.fromkeys(("ms", "ratio", "peak MiB", "total MiB", "estimate MiB"), 1.0)
    row["share"] = share
    variants = {
        "moe_runtime": row,
        "moe_runtime triton": row,
        "moe_runtime cuda": {"ms": 1 / ratio},
        "transformers grouped_mm": {"ms": ratio},
        goals.PEFT: {"ms": 2 * ratio, "peak MiB": 20.0},
        goals.NF4: row,
        "moe_runtime torch": row,
        goals.NAIVE: {"ms": ratio, "peak MiB": 10.0},
        "moe_runtime, apart": row | {"kept MiB": 3.0},
        "official": {"ms": ratio},
        "LoRA per slot": {"ms": ratio},
        "dense SFT step (floor)": {"ms": 1.0},
        "copy (floor)": {"ms": 1.0},
        "all experts (floor)": {"ms": ratio, "kept MiB": 101.0},
        "no expert": {"ms": 1.0, "kept MiB": 1.0},
    }
    rows = {}
    for goal in ALL:
        for name in goal.benchmarks:
            for variant, values in variants.items():
                rows[name, variant] = values
    return rows


def test_goals():
    for listed in (goals.GOALS, goals.CPU_GOALS):
        lines = goals.goals(goal_rows(), listed).splitlines()
        assert len([line for line in lines if line.startswith("| ")]) == len(listed) + 1
        for line in lines[2:-1]:
            assert re.fullmatch(r" ([1-9]\d*) of \1 ", line.split("|")[5])
    missed = goals.goals(goal_rows(share=0.6, ratio=0.9))
    assert "bench_forward[XFT-DSCoder-1.3B-16384-bf16] is 0.60, 25% off" in missed
    assert "bench_forward_backward[OLMoE-4096-bf16] is 0.90, 55% off" in missed
    assert "0 of 0 | 16 |" in goals.goals({})


def test_goals_ask_for_benchmarks_that_exist():
    """The names are built as pytest builds them, from the functions and the shapes."""
    names = set(shapes.sweep(shapes.CPU, shapes.SWEEP_CPU))
    for table in (shapes.ADAPTERS_CPU, shapes.ADAPTERS_GPU, shapes.QLORA_GPU, shapes.layers()):
        names |= set(table)
    for table in (shapes.plans(), shapes.GPU, shapes.CPU, shapes.FUSION_GPU, shapes.FUSION_CPU):
        names |= set(table)
    begins = tuple(f"{name}-" for name in (*names, *shapes.MIXING_STEP))
    text = "".join(path.read_text() for path in (ROOT / "bench").glob("bench_*.py"))
    for goal in ALL:
        for name in goal.benchmarks:
            function, _, rest = name.rstrip("]").partition("[")
            assert f"def {function}(" in text
            assert not rest or f"{rest}-".startswith(begins), name
