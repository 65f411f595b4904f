"""papers/demo_real.py: the whole demo on a tiny random Llama, killed and resumed, and what it
refuses before it writes.
"""

import functools
import json
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from moe_runtime import cli
from papers import demo_real
from papers.engine import corpora
from papers.engine.everyday import TASKS, task_rows
from papers.engine.tiny import small_llama, train_tokenizer
from papers.xft.recipe import load_recipe
from tests.support.dist_launch import times

SMALL = {
    "steps": 2,
    "batch_size": 4,
    "save_steps": 1,
    "evaluations": [2],
}
MODELS = ["base", "SFT", "SFT_time", "MoE", "INIT", "merged"]


def write_model(folder: Path) -> Path:
    """Write a random Llama of two layers with a tokenizer that knows the tasks' words."""
    texts = []
    for name in ("intent", "json", "arithmetic"):
        for row in task_rows(name, train=16, held_out=1).train:
            texts.append(row["prompt"] + row["completion"])
    tokenizer = train_tokenizer(texts, 320)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_layers": 2,
        "max_length": 256,
    }
    small_llama(tokenizer, seed=0, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe(**changes):
    """The shipped recipe, reduced to seconds."""
    small = load_recipe("smollm2").change(
        layers=[1], data__limit=16, data__held_out_rows=4, mix__steps=1, mix__batch_size=4
    )
    for key, value in SMALL.items():
        small = small.change(**{f"sft__{key}": value, f"tune__{key}": value})
    return small.change(**changes)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, a file in GSM8K's format, and the small recipe; a few packages stand in for the
    standard library.
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
    with (folder / "gsm8k.jsonl").open("w") as file:
        for i in range(12):
            row = {
                "question": f"How much is {i} and 1?",
                "answer": f"It is {i + 1}.\n#### {i + 1}",
            }
            print(json.dumps(row), file=file)
    (folder / "small.yaml").write_text(json.dumps(recipe().to_dict()))
    return folder


def command(home: Path, out: Path, *more: str) -> list[str]:
    paths = {
        "--model": home / "model",
        "--recipe": home / "small.yaml",
        "--out": out,
    }
    words = ["demo-real", *more]
    for option, path in paths.items():
        words += [option, str(path)]
    return words


def call(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Run the command in this process; return its exit code and its output."""
    monkeypatch.setattr(sys, "argv", ["papers", *words])
    with pytest.raises(SystemExit) as end:
        cli.main("papers.cli")
    return (end.value.code or 0, *capsys.readouterr())


def test_whole_demo(home, tmp_path, monkeypatch, capsys):
    """GSM8K is a fifth task; a second call runs nothing again and prints the same table."""
    monkeypatch.setattr(demo_real, "TOKENS", dict.fromkeys(demo_real.TOKENS, 4))
    monkeypatch.setattr(demo_real, "MEASURED", 2)
    out = tmp_path / "out"
    words = command(
        home,
        out,
        "--gsm8k",
        str(home / "gsm8k.jsonl"),
    )
    code, printed, errors = call(monkeypatch, capsys, *words)
    assert code == 0, errors
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
    # the trained tasks are also evaluated: five tasks, with 4 training examples and one held-out
    # example each
    (tasks,) = out.glob("tasks-*")
    trained = (tasks / "train.jsonl").read_text()
    assert len(trained.splitlines()) == 20
    held_out = json.loads((tasks / "gsm8k-held_out.jsonl").read_text())
    answer = json.loads((out / "eval/merged/gsm8k.jsonl").read_text())
    assert held_out["prompt"] in answer["asked"]
    assert answer["expected"] == held_out["completion"]
    assert held_out["prompt"] not in trained
    text = (out / "transcript.md").read_text()
    assert text.count("* before: ") == text.count("* after: ") == 5
    assert held_out["prompt"] in text
    assert (out / "real.png").read_bytes().startswith(b"\x89PNG")
    table = printed[printed.index("Held-out loss of the answers") :]
    for name in MODELS:
        assert f" {name} " in table
    assert "SFT_time against merged: " in table
    AutoModelForCausalLM.from_pretrained(out / "merged")

    before = times(out)
    code, printed, _ = call(monkeypatch, capsys, *words)
    assert code == 0
    assert printed[printed.index("Held-out loss of the answers") :] == table
    assert times(out) == before
    assert "measuring" not in printed


def test_what_it_refuses_before_anything_is_written(home, tmp_path, monkeypatch, capsys):
    home = shutil.copytree(home, tmp_path / "home")
    (home / "model/chat_template.jinja").unlink()
    out = tmp_path / "out"
    code, _, error = call(monkeypatch, capsys, *command(home, out))
    assert code == 1, error
    assert error.startswith("error: ")
    assert "has no chat template. Put a chat_template.jinja into" in error
    assert not out.is_dir()
