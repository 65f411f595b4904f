"""The moe-runtime command as a user runs it: its output, its exit code, and bad input, which writes
nothing.
"""

import json
import pwd
import sys
from typing import NamedTuple

import pytest
import torch

from moe_runtime import cli
from moe_runtime.backends import OPS
from moe_runtime.io import console
from moe_runtime.io.files import read_json
from moe_runtime.kernels import tiles  # interpreted or compiled, like the other kernels
from moe_runtime.tools import tune
from tests.hf.tiny import dense
from tests.support.captured import captured


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capfd):
    """Call the command in this process, which saves the imports; test_a_real_process shows that a
    process of its own behaves the same.
    """

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


@pytest.mark.slow
def test_a_real_process(tmp_path):
    command = [
        sys.executable,
        "-m",
        "moe_runtime",
        "xft",
        "upcycle",
        str(tmp_path),
        "out",
    ]
    out = captured(command)
    assert out.returncode == 1
    assert out.stdout == ""
    assert out.stderr.strip().splitlines()[-1].startswith("error: Folder ")
    assert "Traceback" not in out.stderr


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "dense"
    dense("llama").save_pretrained(folder)
    return folder


def succeed(run, *arguments) -> Result:
    """Call the command, which must end with 0."""
    out = run(*arguments)
    assert out.returncode == 0, out.stderr
    return out


def assert_one_line(out: Result, match: str) -> None:
    """Assert that the command ended with one line that says why."""
    assert out.returncode == 1
    assert out.stderr.startswith("error: ")
    assert match in out.stderr
    assert len(out.stderr.splitlines()) == 1


def test_each_folder_feeds_the_next_command(run, base, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "FIRST", 0.0)
    monkeypatch.setattr(console, "EVERY", 0.0)
    moe = tmp_path / "moe"
    out = succeed(
        run,
        "xft",
        "upcycle",
        base,
        moe,
        *"--num-experts 4 --top-k 3".split(),
    )
    assert "next: moe-runtime train" in out.stdout
    assert "upcycling: 100% " in out.stderr
    succeed(
        run,
        "xft",
        "to-mergeable",
        moe,
        tmp_path / "mix",
        "--shared-rate",
        0.6,
    )
    out = succeed(
        run,
        "xft",
        "merge",
        tmp_path / "mix",
        tmp_path / "merged",
    )
    assert "layer 1: alpha 0.6000" in out.stdout
    config = read_json(tmp_path / "merged" / "config.json")
    assert config["model_type"] == "llama"
    assert config["rope_theta"] == 1e5
    assert "moe_runtime" not in config


@pytest.mark.parametrize(
    "words, match",
    [
        ("{base} {out} --top-k 9", "top_k must be"),
        ("{base} {out} --preset best", "preset must be one of xft-paper"),
        ("{base} {out} --balance-loss cv2", "balance_loss_coef is 0.0"),
        ("{base} {base}", "--overwrite"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(run, base, tmp_path, words, match):
    before = sorted(base.iterdir())
    words = words.format(base=base, out=tmp_path / "out")
    assert_one_line(run("xft", "upcycle", *words.split()), match)
    assert sorted(base.iterdir()) == before
    assert not list(tmp_path.iterdir())


def test_doctor_names_every_op_and_why(run):
    out = run("doctor")
    report = json.loads(run("doctor", "--json").stdout)
    assert out.returncode == 0
    assert report["problems"] == {}
    assert set(report["hints"]) <= {"cpu library"}
    assert set(report["backends"]) == set(OPS)
    for op, value in report["backends"].items():
        assert op in out.stdout
        assert value.split(";")[0] in ("torch", "triton", "cuda", "cpp")
    out = run("doctor", "--verbose", MOE_RUNTIME_BACKEND="triton", TRITON_INTERPRET="0")
    assert "error: backend 'triton' cannot run merge_experts: the tensor is on" in out.stdout
    out = run("doctor", MOE_RUNTIME_BACKEND="fast")
    assert "backend must be one of torch, triton, cuda" in out.stdout


@pytest.fixture(scope="module")
def sizes(tmp_path_factory) -> list[str]:
    """Options of `tune` for the layer of a folder that holds only a config."""
    folder = tmp_path_factory.mktemp("layer") / "layer"
    folder.mkdir()
    config = {"model_type": "mixtral", "hidden_size": 40, "intermediate_size": 32}
    config |= {"num_local_experts": 3, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return ["--model", str(folder), "--tokens", "16"]


@pytest.mark.parametrize(
    "words, match",
    [
        ("", "Pass either --shape or --model"),
        ("--shape gpt-5", "shape must be one of xft-dscoder-1.3b, "),
        ("--shape olmoe --tokens 4k", "such as 0-3,8, but got '4k'"),
        ("--shape olmoe --dtype int8", "dtype must be one of bfloat16"),
        ("--shape all", "`tune` requires a CUDA GPU"),
    ],
)
def test_tune_refuses_bad_input_in_one_line(run, tmp_path, words, match):
    if "CUDA" in match and torch.cuda.is_available():
        pytest.skip("there is one")
    out = run("tune", *words.split(), XDG_CACHE_HOME=str(tmp_path))
    assert_one_line(out, match)
    assert not list(tmp_path.iterdir())


def test_tune_without_a_home_writes_nowhere(run, clock, sizes, monkeypatch, tmp_path):
    def getpwuid(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    assert_one_line(run("tune", *sizes), "This user has no home folder (HOME is None) to store")
    assert not list(tmp_path.iterdir())
    succeed(run, "tune", *sizes, "--out", "tiles.json")
    assert [path.name for path in tmp_path.iterdir()] == ["tiles.json"]


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Replace the GPU by the interpreter, and the clock by one that interrupts the run in the round
    that the test chooses.
    """

    class Clock:
        left = 10**6

        def round(self, functions):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return [5.0 if function.args[0].BLOCK_M == 32 else 8.0 for function in functions]

    clock = Clock()
    monkeypatch.setattr(tune, "find_gpu", lambda: (torch.device("cpu"), clock))
    monkeypatch.setattr(tune, "ROUNDS", 2)
    monkeypatch.setattr(tune, "PRODUCTS", ("up", "down"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiles.read_tuned.cache_clear()
    yield clock
    tiles.read_tuned.cache_clear()
    tiles.lookup.cache_clear()


def test_tune_resumes_after_an_interruption_and_doctor_finds_the_file(run, clock, sizes, tmp_path):
    path = tmp_path / "moe_runtime" / "tiles.json"
    assert f"built in; {path} has none for this device" in run("doctor", "--verbose").stdout
    clock.left = 3
    out = run("tune", *sizes)
    assert out.returncode == 130
    assert out.stdout.startswith("[1/2] layer, 16 tokens, bfloat16: up: 32x32x32, ")
    assert "[2/2]" not in out.stdout
    clock.left = 10**6
    lines = succeed(run, "tune", *sizes).stdout.splitlines()
    assert lines[-1] == f"{path}: 1 kept, 1 measured"
    assert lines[1].endswith("5.000 ms; built in 8.000 ms (measured)")
    assert "built in" in run("doctor", "--verbose").stdout  # this process has cached the file
    tiles.read_tuned.cache_clear()
    assert f"{path}: 2 measured here" in run("doctor", "--verbose").stdout
    lines = succeed(run, "tune", *sizes, "--overwrite").stdout.splitlines()
    assert lines[-1] == f"{path}: 2 measured"
    path.write_text("{")
    tiles.read_tuned.cache_clear()
    assert f"error: {path} is not a file of `moe-runtime tune`" in run("doctor", "--verbose").stdout
    assert_one_line(run("tune", *sizes), f"{path} is not a file of")
    assert path.read_text() == "{"


def test_tune_ends_where_the_context_is_lost(run, clock, sizes, monkeypatch):
    def lost(*_):
        raise tune.ContextLost(tune.Tile(16, 32, 32), "illegal memory access")

    monkeypatch.setattr(tune, "measure", lost)
    out = run("tune", *sizes)
    assert out.returncode == 3
    assert "illegal memory access). Rerun the command" in out.stderr


def test_openmps_threads_spin_less_where_cores_are_shared(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "LOAD", tmp_path / "loadavg")
    for load, count in (("9 9 9 1/99", "10000"), ("9 9 9 9999/9999", "1000")):
        cli.LOAD.write_text(load)
        monkeypatch.setattr(cli.os, "environ", {})
        cli._set_environment()
        assert cli.os.environ["GOMP_SPINCOUNT"] == count
