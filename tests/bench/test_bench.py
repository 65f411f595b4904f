"""The benchmarks' own machinery: what a GPU run keeps when a variant fails, the process dies or
time runs out; the report.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_runtime import backends
from moe_runtime.bench import (
    bench_mixing,
    bench_qlora,
    bench_step,
    ceilings,
    clock,
    goals,
    machine,
    peers,
    report,
    shapes,
)
from moe_runtime.bench.bench_layer import Layer
from moe_runtime.bench.records import Records, benchmarks
from moe_runtime.native.library import cpp
from moe_runtime.tools import tune

ROOT = Path(__file__).resolve().parents[2]


class Timer:
    """Milliseconds by the order of the variants."""

    def __init__(self, *_):
        pass

    def round(self, functions):
        return [10.0 * (i + 1) for i, function in enumerate(functions) if [function()]]


@pytest.fixture
def gpu(monkeypatch):
    """What the clock asks of CUDA, without it; `lost` holds whether the context is."""
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


def measure(variants, notes=None, rounds=15, seconds=0.31, compare=None):
    return clock.measure_gpu(
        variants, rounds, seconds, pedantic, {} if notes is None else notes, compare
    )


def test_who_fails_is_noted_and_the_others_are_timed(gpu):
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nand more")

    notes = {"peer": "not installed"}
    times, details = measure({"floor": lambda: 0, "fails": fail, "moe_runtime": lambda: 0}, notes)
    assert notes == {
        "peer": "not installed",
        "fails": "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB",
    }
    assert {name: set(seconds) for name, seconds in times.items()} == {
        "floor": {0.01},
        "moe_runtime": {0.02},
    }
    assert len(times["floor"]) == 10  # 0.31 s of 30 ms a round
    memory = {"peak MiB": 4.0, "kept MiB": 0.0}
    assert details == {"floor": memory, "moe_runtime": memory}
    rows = clock.rows_of(times, details, 4e12, 0, {"TFLOP/s": 800.0, "GB/s": 4000.0})
    assert rows["moe_runtime"] == {
        "ms": 20.0,
        "ratio": 2.0,
        "spread": 0.0,
        "iqr": 0.0,
        "TFLOP/s": 200.0,
        **memory,
        "share": 0.25,
    }


def test_without_the_floor_nothing_can_be_said(gpu):
    with pytest.raises(ZeroDivisionError):
        measure({"floor": lambda: 1 / 0, "moe_runtime": lambda: 0})


def test_results_are_compared(gpu):
    right = torch.ones(4, 8)
    wrong = right.clone()
    wrong[0] = 0
    variants = {
        "floor": lambda: torch.ones(1),
        "eager": lambda: wrong,
        "moe_runtime": lambda: right,
    }
    _, details = measure(variants, compare="moe_runtime")
    assert details["eager"]["difference"] == 1.0
    assert details["moe_runtime"]["difference"] == 0.0


class Taken:
    """Stands for `interleaved`: calls every variant and remembers it."""

    def __call__(self, variants, **info):
        self.variants = variants
        for function in variants.values():
            function()


@pytest.mark.parametrize("module", [bench_step, bench_mixing])
def test_a_step_leaves_no_gradients(monkeypatch, module):
    """They would be there before the next call, and out of its peak; also after a step that
    failed.
    """
    made = []
    real = torch.optim.AdamW

    def adamw(parameters, **settings):
        made.append(real(parameters, **settings | {"fused": False}))
        return made[-1]

    monkeypatch.setattr(torch.optim, "AdamW", adamw)
    monkeypatch.setattr(module, "CUDA", False)
    taken = Taken()
    if module is bench_step:
        bench_step.bench_training_step(taken, next(iter(shapes.TINY.values())), torch.float32)
    else:
        bench_mixing.bench_mixing_step(taken, shapes.MIXING_TINY["tiny"])
    left = [p for optimizer in made for group in optimizer.param_groups for p in group["params"]]
    assert left
    for p in left:
        assert p.grad is None
    assert any(optimizer.state for optimizer in made)

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for optimizer in made:
        optimizer.step = fail
    for function in taken.variants.values():
        with pytest.raises(torch.OutOfMemoryError):
            function()
    for p in left:
        assert p.grad is None


def test_a_lost_context_names_its_variant(gpu):
    def lose():
        gpu["lost"] = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(
        clock.ContextLost, match="bad broke the CUDA context: RuntimeError: CUDA error"
    ) as lost:
        measure({"floor": lambda: 0, "bad": lose, "moe_runtime": lambda: 0})
    assert lost.value.variant == "bad"


def test_each_round_on_a_cpu_has_its_order(monkeypatch):
    """Seconds are those of the variant, whatever its place; every run draws the same orders."""
    now = [0.0]
    calls = []

    def call(name, seconds):
        calls.append(name)
        now[0] += seconds

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    variants = {
        name: lambda name=name, s=s: call(name, s)
        for name, s in {"a": 1.0, "b": 2.0, "c": 4.0}.items()
    }
    runs = []
    for _ in range(2):
        calls.clear()
        times, _ = clock.measure_cpu(variants, 20, pedantic)
        assert times == {"a": [1.0] * 20, "b": [2.0] * 20, "c": [4.0] * 20}
        runs.append([tuple(calls[i : i + 3]) for i in range(3, 63, 3)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 6
    for order in runs[0]:
        assert set(order) == set("abc")


def test_which_backend_is_ours(monkeypatch):
    monkeypatch.delenv("MOE_RUNTIME_BACKEND", raising=False)
    want = backends.pick("moe_mlp", torch.empty(0, device=machine.DEVICE))
    found = machine.default("moe_mlp", torch.float32)
    assert found == (f"cpp {cpp.library().variant}" if want == "cpp" else want)
    assert machine.default("moe_mlp", torch.float64) == "torch"
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")
    assert machine.default("moe_mlp", torch.float32) == "torch"
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "fastest")
    assert "backend must be" in machine.default("moe_mlp", torch.float32)


def test_share_is_that_of_the_nearer_ceiling():
    limits = {"TFLOP/s": 4.0, "GB/s": 100.0}
    row = clock.rows_of(
        {"a": [1.0, 3.0, 2.0]}, {"a": {"peak MiB": 5.0}}, 2e12, 100e9, limits, 1000
    )["a"]
    assert row == {
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

print(json.dumps(clock.measure_cpu(variants, 2, pedantic)[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not clock.CLEAR.exists(), reason="no /proc/self/clear_refs")
def test_memory_on_the_cpu_is_what_the_call_takes():
    """Also where the allocator and the pools hold what earlier calls took."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    want = {"floor": (0, 0), "many": (100, 0), "one": (50, 50), "pools": (96, 0)}
    for name, (peak, kept) in want.items():
        assert found[name]["peak MiB"] == pytest.approx(peak, abs=6), name
        assert found[name]["kept MiB"] == pytest.approx(kept, abs=6), name


def test_ceilings_of_a_cpu(monkeypatch):
    # those of a machine take seconds
    monkeypatch.setattr(ceilings, "PRODUCTS", ((128, 64, 32), (256, 64, 64)))
    found = ceilings.ceilings(torch.float32, tiny=True)
    assert found is ceilings.ceilings(torch.float32, True)
    assert set(found) == {"TFLOP/s", "GB/s"}
    for value in found.values():
        assert value > 0
    # the ceilings of a GPU are measured while its memory is empty, and only then
    ceilings.ceilings(torch.float64, False)
    measured = ceilings._measured.cache_info().misses
    assert ceilings.ceilings(torch.float64)
    assert ceilings._measured.cache_info().misses == measured
    assert ceilings.ceilings(torch.bfloat16, tiny=True)["GB/s"] == found["GB/s"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_variants_of_a_layer_agree(dtype):
    """What is timed side by side computes the same, but for its rounding; gradients of x too."""
    layer = Layer(shapes.TINY["tiny"], dtype)
    variants = layer.variants({}) | {"official": layer.official()}
    assert {"transformers batched_mm", "torch grouped_mm"} <= variants.keys()
    want = layer.ours().detach()
    dx = layer.both(layer.ours)()[0]
    for name, variant in variants.items():
        assert tune.worst_row(layer.forward(variant)().detach(), want) < 0.05, name
        assert tune.worst_row(layer.both(variant)()[0], dx) < 0.05, name


def test_peers_are_not_installed_only_where_they_are_not(monkeypatch):
    def build(layer):
        raise ModuleNotFoundError("No module named 'peer'\nand more", name="peer")

    monkeypatch.setattr(peers, "PACKAGES", {"peer": build, "other": build})
    notes: dict = {}
    assert peers.installed(None, notes) == {}
    assert notes == {
        "peer": "not installed",
        "other": "ModuleNotFoundError: No module named 'peer'",
    }


def test_what_is_published_has_no_paths_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "home" / "venv"))
    monkeypatch.chdir(tmp_path)
    text = (
        f"{tmp_path}/a.py, {tmp_path}/home/b.py, {tmp_path}/home/venv/c.py, {tmp_path}-d, "
        f"{machine.ROOT}/e.py"
    )
    assert machine.public(text) == f"./a.py, ~/b.py, PREFIX/c.py, {tmp_path}-d, ./e.py"


def test_records_know_what_is_done_and_what_broke(tmp_path):
    path = tmp_path / "deep" / "r.jsonl"
    records = Records(path)
    assert records.lines() == []
    assert Records(None).done() == set()
    records.write("a", extra_info={"rows": {"x": {"ms": 1.0}}})
    records.write("b", broken={"peer": "illegal access"})
    records.write("c", skipped="does not fit")
    with path.open("a") as file:
        file.write('{"name": "d", "extra_in')  # the process died here
    assert Records(path).done() == {"a", "c"}
    assert Records(path).broken("b") == {"peer": "illegal access"}
    assert [bench["name"] for bench in benchmarks(path)] == ["a"]
    assert report.rows_of(path) == {("a", "x"): {"ms": 1.0}}


def run_bench(*arguments) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "bench/bench_merging.py",
        "--tiny",
    ]
    # pytest-benchmark switches itself off in a worker of xdist, which the environment says we are
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, env=env
    )


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_and_ends_in_time(tmp_path):
    lines = tmp_path / "r.jsonl"
    out = tmp_path / "out.json"
    assert "3 skipped" in run_bench("--results", lines, "--budget", 0).stdout
    assert not Records(lines).done()
    assert Records(lines).unfinished() is None  # who ran out of time has not died
    assert "1 passed" in run_bench("--results", lines, "-k", "dalpha").stdout
    done = run_bench("--results", lines)
    assert "2 passed, 1 deselected" in done.stdout, done.stdout[-2000:]
    names = {
        "bench_merge_experts[tiny-dalpha]",
        "bench_merge_experts[tiny-merge]",
        "bench_merged_linear[tiny]",
    }
    assert {bench["name"] for bench in benchmarks(lines)} == names
    report.main([str(lines), "--out", str(out)])
    assert report.rows_of(out) == report.rows_of(lines)


ALL = goals.GOALS + goals.CPU_GOALS


def goal_rows(share=0.95, ratio=3.0) -> dict:
    """Rows of every benchmark that a goal asks for."""
    row = {
        "ms": 1.0,
        "share": share,
        "ratio": 1.0,
        "peak MiB": 1.0,
        "total MiB": 1.0,
        "estimate MiB": 1.0,
    }
    variants = {
        "moe_runtime": row,
        "moe_runtime triton": row,
        "moe_runtime cuda": {"ms": 1 / ratio},
        "transformers grouped_mm": {"ms": ratio},
        goals.PEFT: {"ms": 2 * ratio, "peak MiB": 20.0},
        goals.NF4: row,
        "moe_runtime torch": row | {"peak MiB": 1.0},
        goals.NAIVE: {"ms": ratio, "peak MiB": 10.0},
        "moe_runtime, apart": row | {"kept MiB": 3.0},
        "official": {"ms": ratio},
        "LoRA per slot": {"ms": ratio},
        "dense SFT step (floor)": {"ms": 1.0},
        "copy (floor)": {"ms": 1.0},
        "all experts (floor)": {"ms": ratio, "kept MiB": 101.0},
        "no expert": {"ms": 1.0, "kept MiB": 1.0},
    }
    return {
        (name, variant): row
        for goal in ALL
        for name in goal.benchmarks
        for variant, row in variants.items()
    }


@pytest.mark.parametrize("wanted", [goals.GOALS, goals.CPU_GOALS], ids=["gpu", "cpu"])
def test_goals_met(wanted):
    lines = goals.goals(goal_rows(), wanted).splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == len(wanted) + 1
    for line in lines[2:-1]:
        assert re.fullmatch(r" ([1-9]\d*) of \1 ", line.split("|")[5])
    for line in lines:
        assert not line.startswith("*")


def test_goals_missed():
    missed = goals.goals(goal_rows(share=0.6, ratio=0.9))
    assert "bench_forward[XFT-DSCoder-1.3B-16384-bf16] is 0.60, 25% off" in missed
    assert "bench_forward_backward[OLMoE-4096-bf16] is 0.90, 55% off" in missed
    assert "bench_forward_backward[fine-bf16] is 0.60, 20% off" in goals.goals(
        goal_rows(share=0.6), goals.CPU_GOALS
    )
    empty = goals.goals({})
    assert "0 of 0 | 16 |" in empty
    assert "*" not in empty


def test_goals_ask_for_benchmarks_that_exist():
    """Their names, as pytest makes them of the functions and the shapes."""
    swept = shapes.sweep(shapes.CPU, shapes.SWEEP_CPU)
    tables = (
        shapes.ADAPTERS_CPU,
        shapes.ADAPTERS_GPU,
        shapes.QLORA_GPU,
        shapes.layers(),
        shapes.plans(),
        shapes.GPU,
        shapes.CPU,
        shapes.FUSION_GPU,
        shapes.FUSION_CPU,
        swept,
        shapes.MIXING_STEP,
    )
    whole = {name for table in tables for name in table}
    text = "".join(path.read_text() for path in (ROOT / "bench").glob("bench_*.py"))
    for goal in ALL:
        for name in goal.benchmarks:
            function, _, rest = name.rstrip("]").partition("[")
            assert f"def {function}(" in text
            assert not rest or any(f"{rest}-".startswith(f"{shape}-") for shape in whole), name


@pytest.mark.parametrize(
    "setting", ["fp32-adamw", pytest.param("bf16-adafactor", marks=pytest.mark.slow)]
)
def test_a_model_of_packed_experts_holds_what_is_estimated(setting):
    """Weights, adapters and the optimizer's state after a step, but for NF4's tables and
    attention's frequencies.
    """
    size = shapes.TUNING_TINY["tiny"]
    (where, dtype, name) = bench_qlora.SETTINGS[setting]
    model = bench_qlora.adapted(bench_qlora.draw(bench_qlora.blank(size)), where, dtype)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}
    optimizer = bench_qlora.optimizer_of(model, name)
    bench_step.train(model, torch.zeros(2, 8, dtype=torch.long), optimizer)
    found = bench_qlora.estimate(size, setting)
    held = found.experts + found.rest + found.adapters + found.optimizer
    assert 0 <= clock.held_bytes(model, optimizer) - held <= 1040
    assert found.peak > held


def test_tables_show_what_is_off(tmp_path, capsys):
    row = {"ms": 1.0, "ratio": 1.0, "spread": 0.0, "share": 0.5, "peak MiB": 7.0, "difference": 0.5}
    info = {
        "machine": "H200",
        "rounds": 5,
        "rows": {"floor": row},
        "notes": {"peer": "not installed"},
    }
    info["ceilings"] = {"GB/s": 4300.0}
    path = tmp_path / "r.jsonl"
    Records(path).write("bench_x[a]", extra_info=info)
    Records(path).write("bench_x[b]", failed="boom")
    report.main([str(path)])
    out = capsys.readouterr().out
    assert "| a | 1.000 ms, 50%, 7 MiB, differs by 5e-01 |" in out
    assert "bench_x[a]: peer: not installed" in out
    assert "machine H200, ceilings 4,300 GB/s" in out
    assert "failed: bench_x[b]: boom" in out
    assert json.loads(path.read_text().splitlines()[0])["name"] == "bench_x[a]"


def cuda_lines(path, faster=1.5, but=None):
    """Results of every benchmark of bench_cuda.py; the one named `but` is slower."""
    from moe_runtime.bench.bench_cuda import KERNELS

    for name in (
        f"bench_cuda_kernel[{shape}-{kernel}]" for shape in shapes.plans() for kernel in KERNELS
    ):
        rows = {
            "moe_runtime triton": {"ms": faster if name != but else 0.9},
            "moe_runtime cuda": {"ms": 1.0},
        }
        about = {"machine": "NVIDIA H200", "date": "2026-11-22", "torch": "2.11", "triton": "3.6"}
        Records(path).write(name, extra_info={"rows": rows, **about})


@pytest.mark.parametrize(
    "faster, but, ops",
    [
        pytest.param(1.5, None, ["combine", "dispatch", "merge_experts", "route"], id="everywhere"),
        pytest.param(1.02, None, [], id="by noise"),
        pytest.param(
            1.5,
            "bench_cuda_kernel[OLMoE-512-dalpha]",
            ["combine", "dispatch", "route"],
            id="not everywhere",
        ),
    ],
)
def test_table_of_cuda_names_what_is_faster_everywhere(tmp_path, faster, but, ops):
    lines = tmp_path / "r.jsonl"
    table = tmp_path / "table.json"
    cuda_lines(lines, faster, but)
    report.main([str(lines), "--cuda-table", str(table)])
    about = {
        "device": "NVIDIA H200",
        "date": "2026-11-22",
        "torch": "2.11",
        "triton": "3.6",
        "times_faster": 1.5,
    }
    assert json.loads(table.read_text())["measured"] == [{"op": op} | about for op in ops]
    # half of the shapes is not everywhere
    lines.write_text("\n".join(lines.read_text().splitlines()[::2]) + "\n")
    report.main([str(lines), "--cuda-table", str(table)])
    assert json.loads(table.read_text())["measured"] == []
