"""bench/gpu.sh without a GPU, by the clock of tests/support/dry_run.py.

In the fast tests, programs that only say that they were called take the place of Python, ncu and
the sanitizer; in the slow ones, every process is real and its GPU is tests/support/fake_gpu.py.
What the steps do is tested elsewhere: the tuner in tests/tools/test_tune.py, the benchmarks in
tests/bench.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_runtime import backends
from moe_runtime.bench import device_check, goals, machine, report, shapes
from moe_runtime.bench.records import LOST, Records
from moe_runtime.config import Layer
from moe_runtime.tools.layer_shapes import LAYERS
from tests.support import dry_run, outcomes
from tests.support.patience import PATIENCE

pytest.importorskip("triton")
from moe_runtime.bench import profile_products
from moe_runtime.tools import tune

ROOT = dry_run.ROOT
SCRIPT = dry_run.SCRIPT
COMMIT = dry_run.COMMIT
# writes its arguments, and a line into --results as a run of pytest does; a word of HANG or DIE in
# its arguments does that
PYTHON = """#!/usr/bin/env bash
[ "$1" != -c ] || exit 0
echo "$*" >>"$CALLS"
case "$*" in *bench.device_check*) echo '{"name": "", "commit": "'$COMMIT'"}' >>"$3" ;; esac
hang() { trap '' INT; echo hang >"$CLOCK.waits"; sleep 100; }
for word in $HANG; do case "$*" in *"$word"*) hang ;; esac; done
results= previous=
for word; do
    case "$previous" in
    --results) results=$word ;;
    --out | --markdown) echo "{}" >"$word" ;;
    esac
    previous=$word
done
[ -z "$results" ] || echo '{"name": "call", "began": true}' >>"$results"
status=0
for rule in $DIE; do  # WORD:STATUS, once each
    mark=$CALLS.${rule//[^a-z0-9]/_}
    case "$*" in *"${rule%:*}"*) [ -e "$mark" ] || { : >"$mark"; status=${rule#*:}; } ;; esac
done
if [ $status = 101 ]; then exit 1; fi  # as pytest-timeout ends a process in the middle of a test
[ -z "$results" ] || [ $status -gt 1 ] || echo '{"name": "call", "outcome": "passed"}' >>"$results"
exit $status
"""
PROGRAM = """#!/usr/bin/env bash
echo "${0##*/} $*" >>"$CALLS"
hang() { trap '' INT; echo hang >"$CLOCK.waits"; sleep 100; }
for word in $HANG; do case "$0" in *"$word"*) hang ;; esac; done
previous=
for word; do
    [ "$previous" != --log-file ] || echo '"ID","Kernel Name"' >"$word"
    previous=$word
done
echo 9.0
"""


@pytest.fixture
def start(tmp_path):
    """Call as start(part, LIMIT=..., ...); returns the running script. The folder of its results is
    tmp_path / "out".
    """
    env = dry_run.environment(tmp_path, str(tmp_path / "bin" / "python"))
    programs = tmp_path / "bin"
    for name in ("python", "ncu", "compute-sanitizer", "nvidia-smi"):
        (programs / name).write_text(PYTHON if name == "python" else PROGRAM)
        (programs / name).chmod(0o755)
    env |= {"CALLS": str(tmp_path / "calls"), "HANG": "", "DIE": ""}
    running = []

    def call(*parts: str, script: Path = SCRIPT, **variables: str) -> subprocess.Popen:
        command = ["bash", str(script), *parts]
        pipe = subprocess.PIPE
        running.append(
            subprocess.Popen(
                command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env | variables
            )
        )
        return running[-1]

    yield call
    for process in running:
        process.kill()


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_all_steps_run_in_order_into_few_files(start, tmp_path):
    process = start("first", "second", "third")
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    wanted = [
        "device_check",
        "tools.check",
        "test_frozen_mlp.py -k user_gets",
        "test_repeats",
        "bench_layer.py --shapes",
        "bench_kernels.py --shapes",
        "ncu ",
        "tune_layers",
        "bench.report",
        "device_check",
        "tests/gpu --ignore",
        "test_tuning",
        "tests/ops tests/modules",
        "qwen3-30b-a3b,olmoe,mixtral-8x7b,xft-dscoder-1.3b",
        "--shape all",
        "--tool memcheck",
        "bench.report",
        "bench_qlora.py --shapes",
        "bench_xft.py",
        "native.build cuda --archs 90",
        "tests/gpu/test_cuda.py",
        "memcheck",
        "racecheck",
        "bench_cuda.py",
        "ncu ",
        "bench.report",
    ]
    made = iter(calls(tmp_path))
    for word in wanted:
        assert any(
            re.search(re.escape(word).replace(r"\ user", ".*user"), line) for line in made
        ), f"{word}:\n{said}"
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(names) <= 8 and all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)
    assert [name for name in names if COMMIT in name] == [
        name for name in names if name.endswith(("-gpu.json", "-gpu.md"))
    ]
    for name in ("gpu.log", "gpu.jsonl", "gpu-ncu.csv"):
        assert COMMIT in (tmp_path / "out" / name).read_text()


@pytest.mark.parametrize("part", ["first", "second", "third"])
def test_parts_end_in_time_whatever_hangs(start, tmp_path, part):
    """Every program but the first hangs, and ignores Ctrl-C."""
    process = start(
        part, HANG="pytest tools.check tune report native.build ncu sanitizer nvidia-smi"
    )
    said, _ = process.communicate(timeout=PATIENCE)
    assert int((tmp_path / "clock").read_text()) <= 570_000, said
    assert process.returncode in (124, 137), said
    steps = re.findall(r"^(\w+): exit status (\d+)", said, re.MULTILINE)
    assert len(steps) == {"first": 9, "second": 7, "third": 10}[part]
    assert (tmp_path / "out" / "gpu.jsonl").read_text().startswith('{"name": "", "commit"')


def test_time_that_is_left_over_goes_to_the_next_step(start, tmp_path):
    process = start("first")
    process.communicate(timeout=PATIENCE)
    budgets = [
        float(found[1])
        for line in calls(tmp_path)
        if (found := re.search(r"--budget ([\d.]+)", line))
    ]
    seconds = [
        float(found[1])
        for line in calls(tmp_path)
        if (found := re.search(r"--seconds ([\d.]+) ", line))
    ]
    # of layers (it and what comes before have 390 s together), of kernels with what that left over;
    # the tuner's
    assert budgets[0] == pytest.approx(0.8 * 390, rel=0.05) and budgets[1] == pytest.approx(
        0.8 * 440, rel=0.05
    )
    # of ops_check, which starts no process after them
    assert seconds[0] == pytest.approx(0.8 * 110, rel=0.1)
    assert seconds[-1] == pytest.approx(0.8 * 560, rel=0.05)


def test_processes_that_die_are_restarted(start, tmp_path):
    process = start("first", DIE="bench_layer:99 test_moe_mlp:139 tune:3 bench_kernels:101")
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    for word in ("bench_layer", "test_moe_mlp", "bench_kernels"):
        first, second = (line for line in calls(tmp_path) if word in line)
        assert "--restarted" in second and "--restarted" not in first
    assert sum("tune_layers" in line for line in calls(tmp_path)) == 2
    assert (
        len((tmp_path / "out" / "gpu.jsonl").read_text().splitlines()) == 1 + 4 + 4 + 3
    )  # device, and what began and ended; thrice it did not end


@pytest.mark.parametrize(
    "part, die, status, says",
    [
        pytest.param(
            "first",
            "test_moe_mlp:1 bench_layer:1",
            1,
            "report: exit status 0",
            id="a-failure-ends-no-part",
        ),
        pytest.param(
            "first", "device_check:77", 1, "no GPU", id="without-a-gpu-nothing-else-is-tried"
        ),
        pytest.param(
            "first",
            "test_moe_mlp:98",
            98,
            "results cannot be written",
            id="nothing-runs-whose-results-are-lost",
        ),
        pytest.param(
            "first", "test_repeats:5", 0, "repeats: exit status 0", id="nothing-was-left-to-run"
        ),
        pytest.param("fourth", "", 2, "Choose from first", id="no-such-part"),
    ],
)
def test_how_parts_end(start, tmp_path, part, die, status, says):
    process = start(part, DIE=die)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == status and says in said
    assert "77" not in die or len(calls(tmp_path)) == 1


def test_results_that_cannot_be_written_are_told_at_once(start, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gpu.jsonl").mkdir()
    process = start("first")
    said, _ = process.communicate(timeout=PATIENCE)
    assert (
        process.returncode == 2
        and "gpu.jsonl cannot be written" in said
        and len(said.splitlines()) == 1
    )
    assert not (tmp_path / "calls").exists()


def test_results_of_an_earlier_run_are_taken_along(start, tmp_path):
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "gpu.jsonl").write_text('{"name": "bench_x", "failed": "no"}\n')
    start("goals", RESUME=str(earlier)).communicate(timeout=PATIENCE)
    assert (tmp_path / "out" / "gpu.jsonl").read_text() == (earlier / "gpu.jsonl").read_text()


def test_shapes_and_layers_of_the_script_exist():
    text = SCRIPT.read_text()
    for line in re.findall(r"bench/bench_\w+\.py --shapes (\S+)", text):
        assert set(line.rstrip(";").split(",")) <= {
            *shapes.layers(),
            *shapes.ADAPTERS_GPU,
            *shapes.QLORA_GPU,
        }
    assert set(re.findall(r"counters_of (\w[\w.-]+)", text)) <= LAYERS.keys()
    known = {name.lower() for name in LAYERS} | {"all"}
    for line in re.findall(r"--shape (\S+)", text):
        assert set(line.split(",")) <= known
    for path in re.findall(r"(?:tests|bench)/[\w/]+\.py", text):
        assert (ROOT / path).is_file(), path
    for step in re.findall(
        r"(\w+)=\d+", "".join(re.findall(r'echo "(check=.*?|report=\d+)"', text))
    ):
        assert re.search(rf"^{step}\(\)", text, re.MULTILINE), step


def test_the_commit_may_be_passed_in(monkeypatch):
    monkeypatch.setenv("COMMIT", COMMIT)
    assert machine.commit() == COMMIT and tune.versions.__wrapped__()["commit"] == COMMIT


def test_a_copy_without_git_is_of_an_unknown_commit(start, tmp_path):
    copy = tmp_path / "copy" / "bench" / "gpu.sh"
    copy.parent.mkdir(parents=True)
    copy.write_text(SCRIPT.read_text())
    said, _ = start("goals", script=copy, COMMIT="").communicate(timeout=PATIENCE)
    assert "goals of commit unknown" in said


OUTCOMES = """
import os
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2, "why"
def test_dies(): os._exit(int(os.environ["STATUS"]))
def test_after(): pass
"""


def test_outcomes_are_written_as_they_come(tmp_path):
    """A process that dies keeps what it wrote; the next one runs neither what passed nor what
    killed it.
    """
    (tmp_path / "test_some.py").write_text(OUTCOMES)
    results = tmp_path / "r.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.support.outcomes",
    ]
    command += [
        "--results",
        str(results),
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    env = os.environ | {"STATUS": "139", "COMMIT": COMMIT, "PYTHONPATH": f"{ROOT}"}
    statuses = [
        subprocess.run(command + more, env=env, capture_output=True).returncode
        for more in ([], ["--restarted"])
    ]
    assert statuses == [139, 1]
    lines = [
        line for line in map(json.loads, results.read_text().splitlines()) if "outcome" in line
    ]
    assert [(line["name"].split("::")[1], line["outcome"]) for line in lines] == [
        ("test_passes", "passed"),
        ("test_fails", "failed"),
        ("test_dies", "failed"),
        ("test_fails", "failed"),
        ("test_after", "passed"),
    ]
    assert "why" in lines[1]["why"] and lines[2]["why"] == "the process died"
    assert {line["commit"] for line in lines} == {COMMIT}


# what stands in for packages that are not there
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("httpx", "datasets", "trl", "accelerate", "peft"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def test_without_transformers_only_what_needs_it_is_skipped(tmp_path):
    """httpx, and with it transformers, cannot be imported: tests of the kernels are collected,
    benchmarks have notes.
    """
    (tmp_path / "without.py").write_text(WITHOUT)
    results = tmp_path / "r.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "without"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "COMMIT": COMMIT}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST")}
    collect = [
        *command,
        "--collect-only",
        "tests/gpu",
        "bench/bench_layer.py",
        "--shapes",
        "fine,coarse",
    ]
    found = subprocess.run(collect, cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.returncode == 0 and "error" not in found.stdout.lower(), found.stdout[-3000:]
    assert "test_moe_mlp.py" in found.stdout and "test_ultrafuser" not in found.stdout
    order = re.findall(r"bench_layer.py::(\w+)\[(\w+)-bf16", found.stdout)
    functions = ("bench_forward", "bench_forward_backward")
    assert order == [(function, shape) for shape in ("fine", "coarse") for function in functions]
    Records(results).write("bench_training_step[tiny-bf16]", began=True)  # and died
    run = [
        "--tiny",
        "--restarted",
        "--results",
        str(results),
        "bench/bench_layer.py",
        "bench/bench_step.py",
    ]
    run += ["-k", "bf16 and not backward"]
    ran = subprocess.run([*command, *run], cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    layers = [line["extra_info"] for line in lines if "extra_info" in line]
    assert layers and all(
        "cannot be imported" in info["notes"]["transformers eager"] for info in layers
    )
    assert all("moe_runtime" in info["rows"] and info["commit"] == COMMIT for info in layers)
    assert [line["name"] for line in lines if "skipped" in line] == [
        "bench_decoder_layer[tiny-bf16]"
    ]
    assert [line["name"] for line in lines if "failed" in line] == [
        "bench_training_step[tiny-bf16]"
    ]


def test_report_goes_to_a_file_and_goals_to_the_terminal(tmp_path, capsys):
    lines = tmp_path / "gpu.jsonl"
    page = tmp_path / "r.md"
    for name, outcome in (("a", "passed"), ("b", "failed"), ("c", "failed"), ("c", "passed")):
        Records(lines).write(name, outcome=outcome, why="of\nthat")
    report.main([str(lines), "--out", str(tmp_path / "r.json"), "--markdown", str(page)])
    assert (
        "Tests: 2 passed, 1 failed\n* b: of that" in page.read_text()
        and "2 passed" in capsys.readouterr().out
    )
    assert json.loads((tmp_path / "r.json").read_text()) == {"benchmarks": []}


def test_device_check_of_a_machine_with_a_gpu(tmp_path, monkeypatch, capsys):
    lines = tmp_path / "gpu.jsonl"
    about = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, total_memory=139 << 30, L2_cache_size=60 << 20
    )
    monkeypatch.setattr(machine, "CUDA", True)
    monkeypatch.setattr(machine, "missing", lambda package: "cannot be imported: no httpx")
    monkeypatch.setattr(machine, "describe", lambda: {"machine": "GPU", "commit": COMMIT})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(backends, "why_not", lambda *_: None)
    assert device_check.main([str(lines)]) == 0
    said = capsys.readouterr().out
    assert "capability: 9.0" in said and "transformers cannot be imported: no httpx" in said
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert found[0]["device"]["commit"] == COMMIT and found[1]["transformers"].startswith("cannot")
    monkeypatch.setattr(backends, "why_not", lambda *_: "too old")
    assert device_check.main([]) == device_check.NO_GPU


def test_profiled_products_are_one_launch_each(monkeypatch, capsys):
    """In the interpreter, where a profiler's start and stop are counted."""
    seen = []
    monkeypatch.setattr(tune, "find_gpu", lambda: (torch.device("cpu"), None))
    monkeypatch.setitem(LAYERS, "tiny", Layer(32, 16, 4, 2))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    profile_products.main(["tiny", "16"])
    assert seen == ["start", "stop"] * 6
    assert re.findall(r"tokens, (\w+):", capsys.readouterr().out) == list(tune.PRODUCTS)


def test_a_lost_context_ends_the_process(monkeypatch):
    plugin = object.__new__(outcomes.Outcomes)
    codes = []
    plugin.failed = True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda: (_ for _ in ()).throw(RuntimeError("lost"))
    )
    monkeypatch.setattr(os, "_exit", codes.append)
    plugin.pytest_runtest_logfinish()
    plugin.pytest_runtest_logfinish()  # of a test that passed
    assert codes == [outcomes.LOST]


def test_every_goal_of_a_gpu_has_a_step_that_measures_it(tmp_path):
    """As collected where torch says that there is a GPU."""
    env = dry_run.environment(tmp_path, sys.executable) | {
        "PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}"
    }
    files = re.findall(r"bench/bench_\w+\.py(?! --shapes)", SCRIPT.read_text())
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *dict.fromkeys(files),
    ]
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-3000:]
    collected = [line.rpartition("::")[2] for line in found.stdout.splitlines() if "::" in line]
    wanted = {name for goal in goals.GOALS for name in goal.benchmarks}
    assert wanted <= set(collected), f"no step measures {sorted(wanted - set(collected))}"
    first = [line for line in found.stdout.splitlines() if "::" in line][: len(wanted)]
    assert {line.rpartition("::")[2] for line in first} == wanted  # before all others


# where each fault hits `first`, and what the file says of it
FAULTS = {
    "few_rows_and_many[5]=segv": "crashed while running",
    "bench_forward[OLMoE-16384=lost": "illegal memory access",
    "bench_forward_backward[OLMoE-16384=segv": "the process died",
    "bench_forward[Qwen3-30B-A3B-4096=oom": "does not fit",
    "dx|90|bfloat16|2048|1536|1024|False_256x128x64,_8_warps,_3_stages,_TMA=segv": None,
    "Mixtral-8x7B-16384-dispatch=hang": "the process died",
}


@pytest.mark.slow
def test_first_with_real_processes_and_all_that_may_go_wrong(tmp_path):
    """Optional packages are hidden; a segfault, a lost context, no memory and a hang cost only
    themselves.
    """
    env = dry_run.environment(
        tmp_path, sys.executable, " ".join(FAULTS), "datasets trl accelerate peft"
    )
    status, said = dry_run.run(["first"], env)
    assert status != 0 and dry_run.elapsed(env) <= 570, said[-3000:]
    steps = dict(re.findall(r"^(\w+): exit status (\d+)", said, re.MULTILINE))
    assert steps["check"] == steps["ops_check"] == steps["counters"] == steps["report"] == "0", (
        said[-3000:]
    )
    assert len(list((tmp_path / "out").iterdir())) <= 8
    lines = [json.loads(line) for line in (tmp_path / "out" / "gpu.jsonl").read_text().splitlines()]
    for fault, says in FAULTS.items():
        name = fault.partition("=")[0]
        if says:
            about = [line for line in lines if name in line["name"]]
            texts = [
                str(line[key])
                for line in about
                for key in ("why", "failed", "skipped")
                if key in line
            ]
            assert any(says in text for text in texts), (fault, texts)
    measured = [line for line in lines if "extra_info" in line]
    assert {line["extra_info"]["commit"] for line in measured} == {COMMIT}
    # 8 shapes forward and backward, but for the three of FAULTS
    layers = [
        line["name"]
        for line in measured
        if line["name"].startswith(("bench_forward[", "bench_forward_backward["))
    ]
    assert len(layers) == len(set(layers)) == 13
    passed = [line["name"] for line in lines if line.get("outcome") == "passed"]
    assert len(passed) == len(set(passed)) > 20
    tuned = json.loads((tmp_path / "out" / "gpu-tiles.json").read_text())["devices"]["NVIDIA H200"]
    assert (
        tuned["broken"]
        and tuned["tiles"]
        and all(entry["commit"] == COMMIT for entry in tuned["tiles"].values())
    )


@pytest.mark.slow
def test_a_machine_that_is_taken_back_and_the_call_after_it(tmp_path):
    env = dry_run.environment(
        tmp_path, sys.executable, "bench_forward_backward[OLMoE-4096=taken"
    ) | {"ARGS": "-k OLMoE-4096"}
    results = tmp_path / "out" / "gpu.jsonl"
    status, said = dry_run.run(["bench"], env)
    assert status == -9 and "bench_forward[OLMoE-4096-bf16]" in results.read_text(), said[-3000:]
    status, said = dry_run.run(["bench"], env)
    assert status == 0, said[-3000:]
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    measured = [line["name"] for line in lines if "extra_info" in line]
    assert (
        len(measured) == len(set(measured))
        and "bench_forward_backward[OLMoE-4096-bf16]" in measured
    )


@pytest.mark.slow
def test_a_context_that_a_benchmark_loses_outside_of_its_timing_ends_the_process(tmp_path):
    env = dry_run.environment(tmp_path, sys.executable, "bench_route[OLMoE=lost") | {
        "PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}"
    }
    results = tmp_path / "r.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--results",
        str(results),
        "--seconds",
        "0",
    ]
    command += ["bench/bench_routing.py", "-k", "OLMoE or Mixtral"]
    statuses = [
        subprocess.run(command, cwd=ROOT, env=env, capture_output=True).returncode for _ in range(3)
    ]
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert statuses == [LOST, LOST, 5] and [line["name"] for line in lines if "failed" in line] == [
        "bench_route[OLMoE-forward]",
        "bench_route[OLMoE-backward]",
    ]
    assert sum("extra_info" in line for line in lines) == 2
