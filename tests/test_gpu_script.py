"""bench/gpu.sh without a GPU: its plan, with the stand-ins and the clock of
tests/support/dry_run.py, and one tiny run of what it starts.

The steps themselves are tested elsewhere: the tuner in tests/tools/test_tune.py, the benchmarks in
tests/bench.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from moe_runtime.bench import bench_tokens, goals, shapes
from moe_runtime.bench.records import Records
from moe_runtime.tools.layer_shapes import LAYERS
from tests.support import dry_run
from tests.support.patience import PATIENCE
from tests.support.shared import PYTEST

pytest.importorskip("triton")

ROOT = dry_run.ROOT
SCRIPT = dry_run.SCRIPT
COMMIT = dry_run.COMMIT


@pytest.fixture
def start(tmp_path):
    """Call as start(part, LIMIT=..., ...); returns the exit status and the script's output. The
    folder of its results is tmp_path / "out".
    """
    env = dry_run.environment(tmp_path)

    def run(*parts: str, script: Path = SCRIPT, **variables: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", str(script), *parts],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env | variables,
            timeout=PATIENCE,
        )
        return done.returncode, done.stdout

    return run


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


ORDER = r"""device_check
tools\.check
test_every_op\.py -k .*user_gets
test_repeats
bench_layer\.py --shapes
bench_kernels\.py --shapes
bench_tokens\.py --shapes
ncu
tune_layers
bench\.report
device_check
tests/gpu --ignore
test_tuning
tests/ops tests/modules
qwen3-30b-a3b,olmoe,mixtral-8x7b,xft-dscoder-1\.3b
--shape all
--tool memcheck
bench\.report
bench_qlora\.py --shapes
bench_xft\.py
native\.build cuda --archs 90
tests/gpu/test_cuda\.py
memcheck
racecheck
bench_cuda\.py
ncu
bench\.report""".splitlines()


def test_all_steps_run_in_order_into_few_files(start, tmp_path):
    status, printed = start("first", "second", "third")
    assert status == 0, printed
    made = iter(calls(tmp_path))
    for pattern in ORDER:
        assert any(re.search(pattern, line) for line in made), f"{pattern}:\n{printed}"
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(names) <= 8
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
        assert (COMMIT in name) == name.endswith(("-gpu.json", "-gpu.md"))
    for name in ("gpu.log", "gpu.jsonl", "gpu-ncu.csv"):
        assert COMMIT in (tmp_path / "out" / name).read_text()


@pytest.mark.parametrize(
    "part, count",
    [("first", 9), ("second", 7), ("third", 10)],
)
def test_parts_end_in_time_whatever_hangs(start, tmp_path, part, count):
    """Every program except the first one hangs and ignores Ctrl-C."""
    everything = "pytest tools.check tune report native.build ncu sanitizer nvidia-smi"
    status, printed = start(part, HANG=everything)
    assert int((tmp_path / "clock").read_text()) <= 570_000, printed
    assert status in (124, 137), printed
    assert (
        len(
            re.findall(
                r"^(\w+): exit status (\d+)",
                printed,
                re.MULTILINE,
            )
        )
        == count
    )
    assert (tmp_path / "out" / "gpu.jsonl").read_text().startswith('{"name": "", "commit"')


def test_unused_time_goes_to_the_next_step(start, tmp_path):
    start("first")
    text = "\n".join(calls(tmp_path))
    budgets = []
    for number in re.findall(r"--budget ([\d.]+)", text):
        budgets.append(float(number))
    # for layers (they and the earlier steps share 390 s), then for kernels, including unused time
    assert budgets[0] == pytest.approx(0.8 * 390, rel=0.05)
    assert budgets[1] == pytest.approx(0.8 * 440, rel=0.05)
    seconds = [float(number) for number in re.findall(r"--seconds ([\d.]+)", text)]
    # for ops_check, which starts no process afterwards, and for the tuner
    assert seconds[0] == pytest.approx(0.8 * 110, rel=0.1)
    assert seconds[-1] == pytest.approx(0.8 * 560, rel=0.05)


def test_processes_that_die_are_restarted(start, tmp_path):
    dying = "bench_layer:99 test_moe_mlp:139 tune:3 bench_kernels:101"
    status, printed = start("first", DIE=dying)
    assert status == 0, printed
    for word in ("bench_layer", "test_moe_mlp", "bench_kernels"):
        first, second = (line for line in calls(tmp_path) if word in line)
        assert "--restarted" in second
        assert "--restarted" not in first
    assert sum("tune_layers" in line for line in calls(tmp_path)) == 2
    # the device, and the start and end of each; three did not end
    assert len(records(tmp_path / "out" / "gpu.jsonl")) == 1 + 5 + 5 + 3


@pytest.mark.parametrize(
    "part, die, expected, says",
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
def test_how_parts_end(start, tmp_path, part, die, expected, says):
    status, printed = start(part, DIE=die)
    assert status == expected
    assert says in printed
    assert "77" not in die or len(calls(tmp_path)) == 1


def test_shapes_layers_files_and_steps_of_the_script_exist():
    text = SCRIPT.read_text()
    known = {*shapes.layers(), *bench_tokens.GPU_SHAPES, *shapes.ADAPTERS_GPU, *shapes.QLORA_GPU}
    for line in re.findall(r"bench/bench_\w+\.py --shapes (\S+)", text):
        assert set(line.rstrip(";").split(",")) <= known
    assert set(re.findall(r"counters_of (\w[\w.-]+)", text)) <= LAYERS.keys()
    for line in re.findall(r"--shape (\S+)", text):
        assert set(line.split(",")) <= {name.lower() for name in LAYERS} | {"all"}
    for path in re.findall(r"(?:tests|bench)/[\w/]+\.py", text):
        assert (ROOT / path).is_file(), path
    plans = "".join(re.findall(r'echo "(check=.*?|report=\d+)"', text))
    for step in re.findall(r"(\w+)=\d+", plans):
        assert re.search(rf"^{step}\(\)", text, re.MULTILINE), step


OUTCOMES = """
import os
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2, "why"
def test_dies(): os._exit(int(os.environ["STATUS"]))
def test_after(): pass
"""


def run_pytest(folder: Path, *words, **variables: str) -> subprocess.CompletedProcess:
    """Run pytest in a process that also imports from `folder`."""
    env = {}
    for name, value in os.environ.items():
        if not name.startswith("PYTEST"):
            env[name] = value
    env |= {"PYTHONPATH": f"{ROOT}:{folder}", "COMMIT": COMMIT} | variables
    command = [
        *PYTEST,
        *map(str, words),
    ]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )


def test_outcomes_are_written_as_they_come(tmp_path):
    """A process that dies keeps its results; the next one runs neither the passed tests nor the one
    that killed it.
    """
    (tmp_path / "test_some.py").write_text(OUTCOMES)
    results = tmp_path / "r.jsonl"
    words = [
        "-p",
        "tests.support.outcomes",
        "--results",
        results,
        "-c",
        os.devnull,
    ]
    words += ["--rootdir", tmp_path, tmp_path]
    assert run_pytest(tmp_path, *words, STATUS="139").returncode == 139
    assert run_pytest(tmp_path, *words, "--restarted").returncode == 1
    lines = [line for line in records(results) if "outcome" in line]
    assert [(line["name"].split("::")[1], line["outcome"]) for line in lines] == [
        ("test_passes", "passed"),
        ("test_fails", "failed"),
        ("test_dies", "failed"),
        ("test_fails", "failed"),
        ("test_after", "passed"),
    ]
    assert "why" in lines[1]["why"]
    assert lines[2]["why"] == "the process died"
    assert {line["commit"] for line in lines} == {COMMIT}


# stand-ins for missing packages
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("httpx", "datasets", "trl", "accelerate", "peft"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def test_a_tiny_run_without_transformers_skips_only_what_needs_it(tmp_path):
    """httpx, and therefore transformers, cannot be imported: the kernel tests are collected, and
    benchmarks have notes.
    """
    (tmp_path / "without.py").write_text(WITHOUT)
    words = [
        "-p",
        "without",
        "--collect-only",
        "tests/gpu",
        "bench/bench_layer.py",
    ]
    done = run_pytest(tmp_path, *words, "--shapes", "fine,coarse")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "error" not in done.stdout.lower()
    assert "test_moe_mlp.py" in done.stdout
    assert "test_ultrafuser" not in done.stdout
    order = re.findall(r"bench_layer.py::(\w+)\[(\w+)-bf16", done.stdout)
    functions = ("bench_forward", "bench_forward_backward")
    assert order == [(function, shape) for shape in ("fine", "coarse") for function in functions]
    results = tmp_path / "r.jsonl"
    Records(results).write(
        "bench_training_step[tiny-bf16]",
        began=True,
    )  # and died
    words = ["-p", "without", "--tiny", "--restarted", "--results", results]
    words += [
        "bench/bench_layer.py",
        "bench/bench_step.py",
        "-k",
        "bf16 and not backward",
    ]
    done = run_pytest(tmp_path, *words)
    assert done.returncode == 0, done.stdout[-3000:]
    lines = records(results)
    layers = [line["extra_info"] for line in lines if "extra_info" in line]
    assert layers
    for info in layers:
        assert "cannot be imported" in info["notes"]["transformers eager"]
        assert "moe_runtime" in info["rows"]
        assert info["commit"] == COMMIT
    for outcome, name in (("skipped", "bench_decoder_layer"), ("failed", "bench_training_step")):
        names = [line["name"] for line in lines if outcome in line]
        assert names == [f"{name}[tiny-bf16]"]


# as much of a GPU as collecting the benchmarks needs
WITH_GPU = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_name = lambda *_: "GPU"
torch.cuda.get_device_capability = lambda *_: (9, 0)
"""


def test_every_goal_of_a_gpu_has_a_step_that_measures_it(tmp_path):
    """Collected as if torch reported a GPU."""
    (tmp_path / "gpu.py").write_text(WITH_GPU)
    files = dict.fromkeys(
        re.findall(
            r"bench/bench_\w+\.py(?! --shapes)",
            SCRIPT.read_text(),
        )
    )
    done = run_pytest(tmp_path, "-p", "gpu", "--collect-only", *files)
    assert done.returncode == 0, done.stdout[-3000:]
    collected = re.findall(r"::(\S+)$", done.stdout, re.MULTILINE)
    measured = set()
    for goal in goals.GOALS:
        for name in goal.benchmarks:
            measured.add(name)
    assert measured <= set(collected), f"no step measures {sorted(measured - set(collected))}"
    assert set(collected[: len(measured)]) == measured  # before all others
