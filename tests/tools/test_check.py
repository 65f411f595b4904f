"""`moe-runtime doctor --check`: correct ops pass, and one wrong result of any op fails on each
backend.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from moe_runtime import backends
from moe_runtime.cli.app import app as main_app
from moe_runtime.ops import fusion, merging
from moe_runtime.ops.library import LIB
from moe_runtime.tools import check
from moe_runtime.tools.conformance.cases import CASES

CPU = torch.device("cpu")
SEES = {  # the case that runs an op of the library, if it has another name
    "route_to": "route",
    "fused_nll": "fused_cross_entropy",
    "fused_loss": "fused_cross_entropy",
}


def seen_by(name: str) -> str:
    name = name.partition("_backward")[0]
    return SEES.get(name, name)


@pytest.fixture
def few(monkeypatch):
    """Cases only in float32."""
    monkeypatch.setattr(check, "DTYPES", {name: [torch.float32] for name in backends.BACKENDS})


def failures(op: str, backend: str) -> list[str]:
    (result,), reasons = check.check([op], [backend])
    assert reasons == {}
    assert result.cases > 0
    return result.failures


RUNS = []


for OP, (KERNEL, _) in CASES.items():
    for BACKEND in ("torch", "cpp", "triton"):
        if BACKEND == "torch" or KERNEL in backends.KERNELS[BACKEND]:
            RUNS.append((OP, BACKEND))


def skip_without(op: str, backend: str) -> None:
    if backend == "torch":
        return
    why = backends.why_not(backend, CASES[op][0], CPU)
    if why is not None:
        pytest.skip(why)


# runs only when a graph is retained, and then nothing may write into it
LIBRARY = {name.removeprefix("moe_runtime::") for name in LIB._op_defs} - {"fused_loss_backward"}


# the interpreter takes long for their kernels
SLOW = {
    ("moe_layer", "triton"),
    ("moe_layer_backward", "triton"),
    ("frozen_mlp_backward", "triton"),
    ("lora_mlp_backward", "triton"),
    ("moe_mlp_backward", "triton"),
}
PLANTED = []


for NAME in sorted(LIBRARY):
    for OP, BACKEND in RUNS:
        if seen_by(NAME) == OP:
            marks = [pytest.mark.slow] if (NAME, BACKEND) in SLOW else []
            PLANTED.append(pytest.param(NAME, BACKEND, marks=marks))


# only the first of these results is returned; the others are already bound to the gradient
RESULTS = dict.fromkeys(("moe_mlp", "frozen_mlp", "lora_mlp", "fused_nll", "fused_loss"), 1)
RESULTS["moe_layer"] = 3


class Planted:
    """An op of the library with a wrong result: the one with index `at`."""

    def __init__(self, name: str):
        self.name = name
        self.real = getattr(torch.ops.moe_runtime, name)
        self.at = 0
        self.results = 1
        self.touched = False

    def __call__(self, *args):
        leaves, tree = torch.utils._pytree.tree_flatten(self.real(*args))
        most = RESULTS.get(self.name, len(leaves))
        self.results = max(self.results, most)
        if self.at < most:
            part = leaves[self.at]
            if part.double().norm() > 1e-2:
                self.touched = True
            leaves[self.at] = part * 1.01 if part.is_floating_point() else part.flip(0)
        return torch.utils._pytree.tree_unflatten(leaves, tree)


@pytest.mark.parametrize("name, backend", PLANTED)
def test_a_planted_bug_is_found(name, backend, few, monkeypatch):
    """Each result of each op in turn is off by one percent, or in another order if it is an
    integer.
    """
    case = seen_by(name)
    skip_without(case, backend)
    planted = Planted(name)
    touched = 0
    monkeypatch.setattr(torch.ops.moe_runtime, name, planted)
    while planted.at < planted.results:
        planted.touched = False
        bad = failures(case, backend)
        touched += planted.touched
        assert bool(bad) == planted.touched, f"result {planted.at}: {bad}"
        for line in bad:
            assert f"{case} on {backend}, float32, " in line
        planted.at += 1
    assert touched


def test_a_planted_bug_outside_the_library_is_found(few, monkeypatch):
    real = fusion.fuse_logits
    assert failures("fused_cross_entropy", "torch") == []
    monkeypatch.setattr(fusion, "fuse_logits", lambda *args: real(*args) * 1.01)
    assert failures("fused_cross_entropy", "torch")


def test_a_merge_that_ignores_alpha_is_found(few, monkeypatch):
    remerge = merging.remerge_experts

    def ignore_alpha(out, w, alpha, seen, backend):
        return remerge(out, w, alpha, alpha + 1, backend)

    monkeypatch.setattr(merging, "remerge_experts", ignore_alpha)
    assert ": same:" in failures("merged_linear", "triton")[0]


def doctor_check(*options: str):
    return CliRunner().invoke(main_app, ["doctor", "--check", *options])


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda out: out * float("nan"), "the error is inf times"),
        (lambda out: out[:-1], "the error is inf times"),
        (lambda out: out.unknown, "has no attribute 'unknown'"),
    ],
)
def test_what_else_may_be_wrong(few, monkeypatch, change, says):
    real = torch.ops.moe_runtime.combine
    monkeypatch.setattr(torch.ops.moe_runtime, "combine", lambda *args: change(real(*args)))
    assert says in failures("combine", "torch")[0]


def test_twice_the_allowance_is_a_failure(few, monkeypatch):
    monkeypatch.setattr(check.measure, "errors", lambda *_: {"out": 2.0})
    assert "out: the error is 2 times its allowance" in failures("combine", "torch")[0]


@pytest.fixture
def one_op(few, monkeypatch):
    """Check only `combine` on torch's backend."""
    monkeypatch.setattr(check, "CASES", {"combine": CASES["combine"]})


def test_doctor_prints_a_table_and_ends_in_1_for_a_wrong_op(one_op, monkeypatch):
    monkeypatch.setattr("moe_runtime.tools.doctor.report", lambda: {"devices": {}, "problems": {}})
    monkeypatch.setattr("moe_runtime.tools.doctor.summary", dict)
    done = doctor_check()
    assert done.exit_code == 0
    for text in ("worst error / allowance", "0 failed", "combine", "torch"):
        assert text in done.stdout
    real = torch.ops.moe_runtime.combine
    monkeypatch.setattr(torch.ops.moe_runtime, "combine", lambda *args: real(*args) * 1.001)
    done = doctor_check()
    assert done.exit_code == 1
    assert "FAILED" in done.stdout
    assert "combine on torch, float32, case " in done.stdout
    done = doctor_check("--json")
    report = json.loads(done.stdout)["check"]
    assert done.exit_code == 1
    assert report["failures"]
    assert report["results"][0]["op"] == "combine"


def test_kernels_are_interpreted_in_a_process_that_needs_no_command_line(
    one_op, monkeypatch, tmp_path
):
    for name in ("typer", "transformers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    (result,), left = check._children(("triton",), True)
    assert left == []
    assert (result.op, result.backend) == ("combine", "interpreter")
    assert result.failures == []
    assert result.cases >= 8
    monkeypatch.setattr(sys, "executable", "false")
    assert "failed with exit code 1: no output" in check.report(interpret=True)["failures"][0]


@pytest.fixture
def played(one_op, monkeypatch):
    """Processes that compile are replaced by ones that answer immediately; returns the commands
    that ran.
    """
    ran = []
    wrong = "combine on triton, bfloat16: out is wrong"
    result = check.Result("combine", "triton", 2, "inf", "", [wrong])._asdict()
    answer = json.dumps({"results": [result]})

    def play(command, env, **_):
        ran.append((command[4:], env["TRITON_INTERPRET"]))
        return subprocess.CompletedProcess(command, 1, answer, "")

    def why_not(name, *_):
        return "not built" if name == "cuda" else None

    monkeypatch.setattr(subprocess, "run", play)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "interpreted", lambda: False)
    monkeypatch.setattr(backends, "why_not", why_not)
    monkeypatch.setattr(check, "check", lambda *_: ([], {}))
    return ran


def test_on_a_gpu_each_op_has_a_process(played, capsys):
    report = check.report()
    options = "--json --ops combine --backends torch triton cuda".split()
    assert played == [(["moe_runtime.tools.check", *options], "0")]
    assert report["failures"] == ["combine on triton, bfloat16: out is wrong"]
    (result,) = report["results"]
    assert (result["op"], result["cases"]) == ("combine", 2)
    assert report["not checked"] == {"cuda": "not built"}
    assert "combine: 2 cases, 1 failed" in capsys.readouterr().out


def test_no_process_starts_after_the_time_is_over(played, capsys):
    report = check.report(seconds=-1.0)
    assert played == []
    assert report["results"] == []
    assert "not checked in -1 s: combine" in capsys.readouterr().out
