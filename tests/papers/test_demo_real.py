"""papers/demo_real.py: the whole demo on a tiny random Llama, killed and resumed, and what it
refuses before it writes.
"""

import functools
import json
import shutil
import sys
from pathlib import Path

import pytest

from moe_runtime import cli
from moe_runtime.io.files import read_json
from papers import demo_real
from papers.engine import corpora, everyday
from papers.engine.everyday import TASKS, task_rows
from papers.engine.tiny import small_llama, train_tokenizer
from papers.xft.recipe import load_recipe
from tests.support.dist_launch import times

SMALL = {
    "epochs": 1,
    "batch_size": 4,
    "save_steps": 1,
    "evaluations": [2],
}


def write_model(folder: Path) -> Path:
    """Write a random Llama of two layers with a tokenizer that knows the tasks' words."""
    texts = []
    for name in ("intent", "json", "arithmetic"):
        for row in task_rows(name, train=16, held_out=1).train:
            texts.append(row["prompt"] + row["completion"])
    tokenizer = train_tokenizer(texts, 320)
    small_llama(
        tokenizer, seed=0, hidden_size=32, intermediate_size=32, num_layers=2, max_length=256
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe(**changes):
    """The shipped recipe, reduced to seconds."""
    small = load_recipe("smollm2").change(
        layers=[1],
        data__limit=8,
        data__held_out_rows=8,
        data__validation_rows=4,
        data__untouched_rows=2,
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
        patch.setattr(everyday, "FUNCTIONS", 8)
        yield write_inputs(tmp_path_factory.mktemp("real"))


def write_inputs(folder: Path) -> Path:
    """Write model and small.yaml."""
    write_model(folder / "model")
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
    """A second call runs nothing again and prints the same table."""
    monkeypatch.setattr(demo_real, "NEW_TOKENS", 4)
    monkeypatch.setattr(demo_real, "ASKED", 2)
    out = tmp_path / "out"
    words = command(home, out)
    code, printed, errors = call(monkeypatch, capsys, *words)
    assert code == 0, errors
    table = read_json(out / "overfit.json")
    rows = {row["name"]: row for row in table["methods"]}
    merges = [name for name in rows if name.startswith("XFT, ")]
    assert (len(rows), len(merges)) == (13, 3)
    for row in rows.values():
        assert list(row["domains"]) == list(TASKS)
        assert row["untouched"][0] > 0
    # what has the last step too is not marked
    assert not [name for name in table["other_budgets"] if " last, " in name]
    assert "experts without tokens: " in "\n".join(table["summary"])
    chosen = min(merges, key=lambda name: rows[name]["seeds"][0]["validation"])
    assert (out / "XFT").resolve().parent.name == rows[chosen]["seeds"][0]["folder"].split("/")[0]
    text = (out / "transcript.md").read_text()
    assert text.count("* before: ") == text.count("* after: ") == 5
    shown = printed[printed.index("Exact match of generated answers") :]

    before = times(out)
    _, printed, _ = call(monkeypatch, capsys, *words)
    assert printed[printed.index("Exact match of generated answers") :] == shown
    assert times(out).items() >= before.items()


def test_what_it_refuses_before_anything_is_written(home, tmp_path, monkeypatch, capsys):
    home = shutil.copytree(home, tmp_path / "home")
    (home / "model/chat_template.jinja").unlink()
    out = tmp_path / "out"
    code, _, error = call(monkeypatch, capsys, *command(home, out))
    assert code == 1, error
    assert error.startswith("error: ")
    assert "has no chat template. Put a chat_template.jinja into" in error
    assert not out.is_dir()
