"""`moe-runtime doctor --check`: sound ops pass, and one wrong result of any op fails on each
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
from moe_runtime.ops import balance, fusion, merging, moe_mlp
from moe_runtime.ops.library import LIB
from moe_runtime.tools import check
from moe_runtime.tools.conformance import cases
from moe_runtime.tools.conformance.cases import CASES

CPU = torch.device("cpu")
SEES = {  # the case that runs an op of the library, where it has another name
    "route_to": "route",
    "fused_nll": "fused_cross_entropy",
    "fused_loss": "fused_cross_entropy",
}


def seen_by(name: str) -> str:
    name = name.partition("_backward")[0]
    return SEES.get(name, name)


@pytest.fixture
def few(monkeypatch):
    """Cases in float32 alone."""
    monkeypatch.setattr(check, "DTYPES", {name: [torch.float32] for name in backends.BACKENDS})


def failures(op: str, backend: str) -> list[str]:
    (result,), reasons = check.check([op], [backend])
    assert reasons == {}
    assert result.cases > 0
    return result.failures


RUNS = [
    pytest.param(op, backend, id=f"{op}-{backend}")
    for op, (kernel, _) in CASES.items()
    for backend in ("torch", "cpp", "triton")
    if backend == "torch" or kernel in backends.KERNELS[backend]
]


def skip_without(op: str, backend: str) -> None:
    why = None if backend == "torch" else backends.why_not(backend, CASES[op][0], CPU)
    if why is not None:
        pytest.skip(why)


@pytest.mark.slow
@pytest.mark.parametrize("op, backend", RUNS)
def test_sound_ops_pass(op, backend):
    skip_without(op, backend)
    assert failures(op, backend) == []


# runs only where a graph is kept, which is when nobody may write into it
LIBRARY = sorted(
    {name.removeprefix("moe_runtime::") for name in LIB._op_defs} - {"fused_loss_backward"}
)
PLANTED = [
    pytest.param(name, backend, id=f"{name}-{backend}")
    for name in LIBRARY
    for backend in ("torch", "cpp", "triton")
    if pytest.param(seen_by(name), backend, id=f"{seen_by(name)}-{backend}") in RUNS
]


# of the results of these the first alone is handed out; the others went into the gradient's hands
# before they come here
ONE_RESULT = ("moe_mlp", "frozen_mlp", "lora_mlp", "fused_nll", "fused_loss")


class Planted:
    """An op of the library of whose results one, the one that `at` counts to, is wrong."""

    def __init__(self, name: str):
        self.name = name
        self.real = getattr(torch.ops.moe_runtime, name)
        self.at = 0
        self.results = 1

    def __call__(self, *args):
        leaves, tree = torch.utils._pytree.tree_flatten(self.real(*args))
        most = 1 if self.name in ONE_RESULT else 3 if self.name == "moe_layer" else len(leaves)
        self.results = max(self.results, most)
        if self.at < most:
            part = leaves[self.at]
            self.touched |= bool(part.double().norm() > 1e-2)
            leaves[self.at] = part * 1.01 if part.is_floating_point() else part.flip(0)
        return torch.utils._pytree.tree_unflatten(leaves, tree)


@pytest.mark.parametrize("name, backend", PLANTED)
def test_a_planted_bug_is_found(name, backend, few, monkeypatch):
    """Each result of each op in turn is a hundredth off, or of integers in another order."""
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


OUTSIDE = [  # the case, where a function that is no op of the library is looked up, its name
    ("mixing", cases.ewa, "average_experts_"),
    ("mixing", merging, "mixing"),
    ("fused_cross_entropy", fusion, "fuse_logits"),
    ("balance", balance, "balance_loss"),
    ("balance", balance, "top_k_loss"),
]


@pytest.mark.parametrize("case, module, name", OUTSIDE, ids=[name for *_, name in OUTSIDE])
def test_a_planted_bug_outside_the_library_is_found(case, module, name, few, monkeypatch):
    real = getattr(module, name)
    assert failures(case, "torch") == []
    monkeypatch.setattr(module, name, lambda *args, **options: real(*args, **options) * 1.01)
    assert failures(case, "torch")


def test_a_merge_in_place_that_does_not_look_at_alpha_is_found(few, monkeypatch):
    real = merging.remerge_experts
    monkeypatch.setattr(
        merging,
        "remerge_experts",
        lambda out, w, alpha, seen, backend: real(out, w, alpha, alpha + 1, backend),
    )
    assert ": same:" in failures("merged_linear", "triton")[0]


def test_a_run_of_other_bits_is_found(few, monkeypatch):
    real = moe_mlp.run_experts
    runs = []

    def plant(*args, **options):
        runs.append(1)
        out, offsets = real(*args, **options)
        return (torch.nextafter(out, out + 1) if len(runs) == 2 else out), offsets

    monkeypatch.setattr(moe_mlp, "run_experts", plant)
    assert "runs of other bits" in failures("moe_mlp, repeated", "torch")[0]


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda out: out * float("nan"), "the error is inf times"),
        (lambda out: out.detach(), "the error is inf times"),
        (lambda out: out[:-1], "the error is inf times"),
        (lambda out: out.unknown, "has no attribute 'unknown'"),
        (lambda out: torch.cat([out[:-1], out[:1]]), "the error is "),
    ],
)
def test_what_else_may_be_wrong(few, monkeypatch, change, says):
    real = torch.ops.moe_runtime.combine
    monkeypatch.setattr(torch.ops.moe_runtime, "combine", lambda *args: change(real(*args)))
    assert says in failures("combine", "torch")[0]


@pytest.fixture
def one_op(few, monkeypatch):
    """The check of `combine` on torch's backend and nothing else."""
    monkeypatch.setattr(check, "CASES", {"combine": CASES["combine"]})
    monkeypatch.setattr(check.report, "__defaults__", (check.CASES, *check.report.__defaults__[1:]))


def test_doctor_prints_a_table_and_ends_in_1_for_a_wrong_op(one_op, monkeypatch):
    monkeypatch.setattr("moe_runtime.tools.doctor.report", lambda: {"devices": {}, "problems": {}})
    found = CliRunner().invoke(main_app, ["doctor", "--check"])
    assert found.exit_code == 0
    assert "worst error / allowance" in found.stdout
    assert "0 failed" in found.stdout
    assert "combine" in found.stdout
    assert "torch" in found.stdout
    real = torch.ops.moe_runtime.combine
    monkeypatch.setattr(torch.ops.moe_runtime, "combine", lambda *args: real(*args) * 1.001)
    found = CliRunner().invoke(main_app, ["doctor", "--check"])
    assert found.exit_code == 1
    assert "FAILED" in found.stdout
    assert "combine on torch, float32, case " in found.stdout
    found = CliRunner().invoke(main_app, ["doctor", "--check", "--json"])
    report = json.loads(found.stdout)["check"]
    assert found.exit_code == 1
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
    assert (result.op, result.backend, result.failures) == (
        "combine",
        "interpreter",
        [],
    )
    assert result.cases >= 8
    monkeypatch.setattr(sys, "executable", "false")
    assert "failed with exit code 1: no output" in check.report(interpret=True)["failures"][0]


@pytest.fixture
def played(one_op, monkeypatch):
    """Processes that compile are played by ones that answer at once; returns the commands
    that ran.
    """
    ran = []

    def play(command, env, **_):
        ran.append((command[4:], env["TRITON_INTERPRET"]))
        result = check.Result(
            "combine", "triton", 2, float("inf"), "", ["combine on triton, bfloat16: out is wrong"]
        )
        return subprocess.CompletedProcess(
            command, 1, json.dumps({"results": [result._asdict() | {"worst": "inf"}]}), ""
        )

    monkeypatch.setattr(subprocess, "run", play)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "interpreted", lambda: False)
    monkeypatch.setattr(
        backends, "why_not", lambda name, *_: "not built" if name == "cuda" else None
    )
    monkeypatch.setattr(check, "_cases_of", lambda *_: [(torch.float32, 0)] * 5)
    monkeypatch.setattr(check, "check", lambda *_: ([], {}))
    return ran


def test_on_a_gpu_the_cases_of_an_op_are_divided_among_processes(played, tmp_path, capsys):
    """What each of them found is printed and written as it ends."""
    lines = tmp_path / "lines.jsonl"
    report = check.report(lines=lines)
    options = ["--json", "--ops", "combine", "--backends", "torch", "triton", "cuda"]
    wanted = [
        (["moe_runtime.tools.check", *options, "--part", f"{number}/3"], "0") for number in range(3)
    ]
    assert sorted(played) == wanted
    assert report["failures"] == ["combine on triton, bfloat16: out is wrong"] * 3
    assert [(one["op"], one["cases"]) for one in report["results"]] == [("combine", 6)]
    assert report["not checked"] == {"cuda": "not built"}
    assert "combine (2 of 3): 2 cases" in capsys.readouterr().out
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {line["outcome"] for line in written} == {"failed"}
    assert len(written) == 3


def test_no_process_starts_after_the_time_is_over(played, capsys):
    report = check.report(seconds=-1.0)
    assert played == []
    assert report["results"] == []
    assert "not checked in -1 s: combine (1 of 3), combine (2 of 3)" in capsys.readouterr().out


def test_parts_have_every_case_once(few):
    whole = check._cases_of("combine", "torch", CPU)
    parts = [check.check(["combine"], ["torch"], (number, 3))[0][0].cases for number in range(3)]
    assert sum(parts) == len(whole)
    assert max(parts) - min(parts) <= 1
