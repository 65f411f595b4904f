"""moe-runtime, the command, as a user runs it: what it prints, its exit code, and that bad input
writes nothing.
"""

import json
import pwd
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

import moe_runtime.kernels.tiles  # noqa: F401  interpreted or compiled, as the other kernels are
from moe_runtime import cli
from moe_runtime.backends import OPS
from moe_runtime.io import console
from moe_runtime.kernels import tiles  # interpreted or compiled, as the other kernels are
from moe_runtime.methods.xft.presets import PRESETS
from moe_runtime.tools import tune
from tests.hf.tiny import dense


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capfd):
    """Call the command in this process, which has the imports; test_a_real_process shows that it is
    the same.
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
    out = subprocess.run(command, capture_output=True, text=True)
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
    """The command ended with one line that says why."""
    assert out.returncode == 1
    assert out.stderr.startswith("error: ")
    assert match in out.stderr
    assert len(out.stderr.splitlines()) == 1


def test_the_way_of_folders(run, base, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "FIRST", 0.0)
    monkeypatch.setattr(console, "EVERY", 0.0)
    moe = tmp_path / "moe"
    out = succeed(
        run,
        "xft",
        "upcycle",
        base,
        moe,
        *"--num-experts 4 --top-k 3 --check".split(),
    )
    assert "relative error" in out.stdout
    assert "next: moe-runtime train" in out.stdout
    assert "checking: 50% 1/2" in out.stderr
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
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["rope_theta"] == 1e5
    assert "moe_runtime" not in config


def test_a_preset_and_what_is_given_beside_it(run, base, tmp_path):
    configs = []
    for options in ("", "--router linear --no-noisy-gate"):
        out = tmp_path / f"moe{len(configs)}"
        words = f"--num-experts 4 --top-k 3 --preset xft-official {options}"
        succeed(
            run,
            "xft",
            "upcycle",
            base,
            out,
            *words.split(),
        )
        config = json.loads((out / "config.json").read_text())
        configs.append(config["moe_runtime"]["config"])
    official, ours = configs
    assert official.items() >= PRESETS["xft-official"].items()
    assert ours == official | {"router": "linear", "noisy_gate": False}


@pytest.mark.parametrize(
    "words, match",
    [
        ("{base} {out} --top-k 9", "top_k must be"),
        ("{base} {out} --gate best", "gate must be one of xft"),
        ("{base} {out} --preset best", "preset must be one of xft-paper"),
        ("{base} {out} --layers a-b", "layers must be numbers and ranges"),
        ("{base} {out} --balance-loss cv2", "balance_loss_coef is 0.0"),
        ("{tmp} {out}", "has no config.json"),
        ("{base} {base}", "--overwrite"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(run, base, tmp_path, words, match):
    before = sorted(base.iterdir())
    words = words.format(base=base, out=tmp_path / "out", tmp=tmp_path)
    assert_one_line(run("xft", "upcycle", *words.split()), match)
    assert sorted(base.iterdir()) == before
    assert not list(tmp_path.iterdir())


def test_folders_of_other_models_are_refused_with_the_reason(run, base, tmp_path):
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "config.json").write_text(json.dumps({"model_type": "opt"}))
    out = run("xft", "upcycle", tmp_path / "opt", tmp_path / "out")
    assert_one_line(out, "but got 'opt'")
    out = run("xft", "merge", base, tmp_path / "out")
    assert_one_line(out, "Expected the folder of an upcycled model")
    files = ("--model", tmp_path / "none", "--data", tmp_path / "none.jsonl")
    out = run("train", *files, "--output_dir", tmp_path / "out")
    assert out.returncode
    assert "none" in out.stderr
    assert "Traceback" not in out.stderr
    assert not (tmp_path / "out").exists()


def test_doctor_names_every_op_and_why(run):
    out = run("doctor")
    report = json.loads(run("doctor", "--json").stdout)
    assert out.returncode == bool(report["problems"])
    assert set(report["problems"]) <= {"cpu library"}
    assert set(report["backends"]) == set(OPS)
    for op, value in report["backends"].items():
        assert op in out.stdout
        assert value.split(";")[0] in ("torch", "triton", "cuda", "cpp")
    out = run("doctor", MOE_RUNTIME_BACKEND="triton", TRITON_INTERPRET="0")
    assert "error: backend 'triton' cannot run merge_experts: the tensor is on" in out.stdout
    out = run("doctor", MOE_RUNTIME_BACKEND="fast")
    assert "backend must be one of torch, triton, cuda" in out.stdout


SIZES = "--hidden-size 40 --intermediate-size 32 --num-experts 3 --top-k 2 --tokens 16".split()


@pytest.mark.parametrize(
    "words, match",
    [
        ("", "--num-experts, --top-k is missing. Pass only --shape"),
        ("--shape gpt-5", "shape must be one of xft-dscoder-1.3b, "),
        ("--shape olmoe {sizes}", ". Pass only --shape, or --model"),
        ("--model {base}", "--num-experts, --top-k is missing in {base}"),
        ("{sizes} --tokens 4k", "such as 4096,16384, but got '4k'"),
        ("{sizes} --dtype int8", "dtype must be one of bfloat16"),
        ("{sizes} --top-k 4", "top_k must be at most num_experts (3), but got 4"),
        ("--shape all", "`tune` requires a CUDA GPU"),
    ],
)
def test_tune_refuses_bad_input_in_one_line(run, base, tmp_path, words, match):
    if "CUDA" in match and torch.cuda.is_available():
        pytest.skip("there is one")
    words = words.format(base=base, sizes=" ".join(SIZES))
    out = run("tune", *words.split(), XDG_CACHE_HOME=str(tmp_path))
    assert_one_line(out, match.format(base=base))
    assert not list(tmp_path.iterdir())


def test_tune_without_a_home_writes_nowhere(run, clock, monkeypatch, tmp_path):
    def getpwuid(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    assert_one_line(run("tune", *SIZES), "This user has no home folder (HOME is None) to store")
    assert not list(tmp_path.iterdir())
    out = succeed(
        run,
        "tune",
        *SIZES,
        "--out",
        "tiles.json",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["tiles.json"]
    assert "no home folder and no XDG_CACHE_HOME" in out.stdout.splitlines()[-1]


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """A GPU that is the interpreter, and a clock that stops the run in the round that a
    test names.
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


def test_tune_is_stopped_goes_on_and_doctor_knows_the_file(run, clock, tmp_path):
    path = tmp_path / "moe_runtime" / "tiles.json"
    assert f"built in; {path} has none for this device" in run("doctor").stdout
    clock.left = 3
    out = run("tune", *SIZES)
    assert out.returncode == 130
    assert out.stdout.startswith("[1/2] layer, 16 tokens, bfloat16: up: 32x32x32, ")
    assert "[2/2]" not in out.stdout
    clock.left = 10**6
    lines = succeed(run, "tune", *SIZES).stdout.splitlines()
    assert lines[-1] == f"{path}: 1 kept, 1 measured"
    assert lines[1].endswith("5.000 ms; built in 8.000 ms (measured)")
    assert "built in" in run("doctor").stdout  # this process has read the file already
    tiles.read_tuned.cache_clear()
    assert f"{path}: 2 measured here" in run("doctor").stdout
    path.write_text("{")
    tiles.read_tuned.cache_clear()
    assert f"error: {path} is not a file of `moe-runtime tune`" in run("doctor").stdout
    assert_one_line(run("tune", *SIZES), f"{path} is not a file of")
    assert path.read_text() == "{"


def test_tune_reads_sizes_from_a_model_and_writes_elsewhere(run, clock, base, tmp_path):
    succeed(
        run,
        "xft",
        "upcycle",
        base,
        tmp_path / "moe",
        "--num-experts",
        4,
        "--top-k",
        3,
    )
    options = ("--tokens", 16, "--top-k", 2, "--out", tmp_path / "t.json")
    out = succeed(
        run,
        "tune",
        "--model",
        tmp_path / "moe",
        *options,
    )
    assert "moe, 16 tokens, bfloat16: down" in out.stdout
    devices = json.loads((tmp_path / "t.json").read_text())["devices"]
    (entry, *_) = devices["interpreter"]["tiles"].values()
    assert entry["layer"] == {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_experts": 4,
        "top_k": 2,
        "shared": True,
        "gated": True,
    }


def test_tune_ends_where_the_context_is_lost(run, clock, monkeypatch):
    def lost(*_):
        raise tune.ContextLost(tune.Tile(16, 32, 32), "illegal memory access")

    monkeypatch.setattr(tune, "measure", lost)
    out = run("tune", *SIZES)
    assert out.returncode == 3
    assert "illegal memory access). Rerun the command" in out.stderr
