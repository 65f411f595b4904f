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
from tests.support.captured import captured
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
    return captured(command, cwd=ROOT, env=env)


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
