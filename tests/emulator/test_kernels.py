"""Compiled kernels on the emulator, in processes that do not interpret them.

`make test-emulated` and `make stress` run all cases instead of a few.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.csrc.emulator import needs_cxx
from tests.support.captured import captured
from tests.support.stress import STRESS

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
LONG = pytest.mark.skipif(not STRESS, reason="make test-emulated and make stress run it")
pytestmark = [needs_cxx, pytest.mark.stress]


IN_PLACE = ["tests/ops/test_moe_mlp.py::test_gradients_are_added_in_place"]


def lines_of(*arguments: str, program: str = "cases") -> list[dict]:
    """Run tests.emulator.cases, or another program there, and return what it prints."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.emulator.{program}", *arguments]
    found = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                found.append(json.loads(line))
    assert process.returncode == 0
    return found


@pytest.mark.parametrize("arch", ["80", "90", pytest.param("100", marks=LONG)])
def test_a_layer_is_the_equation_in_every_order_of_time(arch):
    found = lines_of(arch, "--quick")
    assert [(line["name"], line["problem"]) for line in found] == [("few", None), ("many", None)]


@pytest.mark.parametrize(
    "arch, part",
    [
        ("90", "stores are not fenced"),
        pytest.param("80", "", marks=LONG),
        pytest.param("90", "", marks=LONG),
        pytest.param("100", "", marks=LONG),
    ],
)
def test_planted_faults_are_caught(arch, part):
    found = lines_of(arch, "--faults", "--only", part)
    assert found
    assert [line["name"] for line in found if not line["problem"]] == []


@LONG
@pytest.mark.parametrize("arch", ["80", "86", "90", "100", "120"])
def test_every_tile_of_the_table(arch):
    found = lines_of(arch)
    assert len(found) >= 6
    assert [line for line in found if line["problem"]] == []


@pytest.mark.parametrize(
    "arch, part",
    [
        ("90", "decode"),
        *(pytest.param(arch, "", marks=LONG) for arch in ("80", "90", "100", "120")),
    ],
)
def test_steps_of_models(arch, part):
    found = lines_of(arch, "--only", part, program="models")
    assert found
    assert [line for line in found if line["problem"]] == []


@LONG
@pytest.mark.parametrize("arch", ["80", "90", "100", "120"])
def test_every_op_conforms(arch):
    """Every op and gradient, through the host code that a GPU would see."""
    env = os.environ | {"MOE_RUNTIME_EMULATE": arch}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    selection = ["-k", "triton and not hypothesis", "tests/conformance", *IN_PLACE]
    done = captured([*command, *selection], cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
