"""moe-runtime, the command, as a user runs it: what it prints, its exit code, and that bad input writes nothing."""

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

from moe_runtime import cli
from moe_runtime.backends import OPS
from tests.hf.tiny import dense


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capfd):
    """Call the command in this process, which has the imports; test_a_real_process shows that it is the same."""

    def call(*arguments, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["moe-runtime", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out = capfd.readouterr()
        return Result(stop.value.code or 0, out.out, out.err)

    return call


def test_a_real_process(tmp_path):
    command = [sys.executable, "-m", "moe_runtime.cli", "upcycle", str(tmp_path), str(tmp_path / "out")]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 1 and out.stdout == ""
    assert out.stderr.strip().splitlines()[-1].startswith("error: model is ") and "Traceback" not in out.stderr


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "dense"
    dense("llama").save_pretrained(folder)
    return folder


def test_the_way_of_folders(run, base, tmp_path):
    out = run("upcycle", base, tmp_path / "moe", "--num-experts", 4, "--top-k", 3, "--check")
    assert out.returncode == 0, out.stderr
    assert "relative error" in out.stdout and "next: moe-runtime train" in out.stdout
    out = run("to-mergeable", tmp_path / "moe", tmp_path / "mix", "--shared-rate", 0.6)
    assert out.returncode == 0, out.stderr
    out = run("merge", tmp_path / "mix", tmp_path / "merged")
    assert out.returncode == 0 and "layer 1: alpha 0.6000" in out.stdout, out.stderr
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["rope_theta"] == 1e5 and "moe_runtime" not in config


@pytest.mark.parametrize(
    "arguments, match",
    [
        pytest.param(("{base}", "{out}", "--top-k", 9), "top_k is 9", id="K > E"),
        pytest.param(("{base}", "{out}", "--gate", "best"), "gate is 'best'; want one of xft", id="unknown gate"),
        pytest.param(("{base}", "{out}", "--layers", "a-b"), "layers is 'a-b'", id="bad layers"),
        pytest.param(("{base}", "{out}", "--balance-loss", "cv2"), "balance_loss_coef is 0.0", id="a loss times zero"),
        pytest.param(("{tmp}", "{out}"), "has no config.json", id="no model"),
        pytest.param(("{base}", "{base}"), "--overwrite", id="target exists"),
        pytest.param(("{base}", "{out}", "--max-shard-size", "much"), "much", id="bad size"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(run, base, tmp_path, arguments, match):
    names = {"base": base, "out": tmp_path / "out", "tmp": tmp_path}
    before = sorted(base.iterdir())
    out = run("upcycle", *(str(argument).format(**names) for argument in arguments))
    assert out.returncode == 1 and match in out.stderr
    assert out.stderr.startswith("error: ") and len(out.stderr.splitlines()) == 1
    assert sorted(base.iterdir()) == before and not list(tmp_path.iterdir())


def test_unknown_architecture_is_refused_with_the_reason(run, tmp_path):
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "config.json").write_text(json.dumps({"model_type": "opt"}))
    out = run("upcycle", tmp_path / "opt", tmp_path / "out")
    assert out.returncode == 1 and "opt has no MLP module of its own" in out.stderr and not (tmp_path / "out").exists()


def test_merge_of_a_dense_folder_is_refused(run, base, tmp_path):
    out = run("merge", base, tmp_path / "out")
    assert out.returncode == 1 and "want an upcycled model's folder" in out.stderr


def test_doctor_names_every_op_and_why(run):
    out = run("doctor")
    assert out.returncode == 0 and all(op in out.stdout for op in OPS) and "torch" in out.stdout
    report = json.loads(run("doctor", "--json").stdout)
    assert set(report["backends"]) == set(OPS)
    assert all(value.split(";")[0] in ("torch", "triton", "cuda") for value in report["backends"].values())


def test_doctor_says_that_an_asked_backend_cannot_run(run):
    out = run("doctor", MOE_RUNTIME_BACKEND="triton", TRITON_INTERPRET="0")
    assert "error: backend is 'triton' for merge_experts, but the tensor is on the CPU" in out.stdout
    out = run("doctor", MOE_RUNTIME_BACKEND="fast")
    assert "backend is 'fast'; want one of torch, triton, cuda" in out.stdout


@pytest.mark.parametrize("verb", ["", "demo", "upcycle", "to-mergeable", "merge", "doctor"])
def test_help_has_an_example(run, verb):
    out = run(*filter(None, [verb]), "--help")
    assert out.returncode == 0 and (not verb or f"Example: moe-runtime {verb}" in out.stdout)


def test_train_without_arguments_and_with_a_folder_that_is_none(run, tmp_path):
    out = run(
        "train", "--model", tmp_path / "none", "--data", tmp_path / "none.jsonl", "--output_dir", tmp_path / "out"
    )
    assert out.returncode != 0 and "none" in out.stderr and "Traceback" not in out.stderr
    assert not (tmp_path / "out").exists()


def test_help_is_quick():
    code = "import sys; from moe_runtime import cli; print([m for m in ('torch', 'transformers', 'trl') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr
