"""`moe-runtime ultrafuser` as a user types it: the arguments reach the method, and bad input gives
one clear error.
"""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest

from moe_runtime.io.files import read_json
from moe_runtime.methods import ultrafuser
from moe_runtime.methods.ultrafuser import runs
from tests.methods.ultrafuser import fusers
from tests.support.cli import run_verb

invoke = functools.partial(run_verb, "ultrafuser")


def test_train_runs_the_recipe(monkeypatch, tmp_path):
    calls = []

    def train_folder(*arguments, **options):
        calls.append((*arguments, options.pop("seed")))
        return runs.TrainReceipt(tmp_path / "model", {})

    monkeypatch.setattr(runs, "train_folder", train_folder)
    assert invoke("train", "--config", "mine.yaml", "--out", tmp_path, "--seed", 3).exit_code == 0
    assert calls == [(Path("mine.yaml"), tmp_path, 3)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two specialists with their tokenizer, as folders."""
    home = tmp_path_factory.mktemp("specialists")
    folders = [home / "a", home / "b"]
    for folder, model in zip(folders, fusers.specialists(2), strict=True):
        model.save_pretrained(folder)
        shutil.copytree(folder, home / "bare", dirs_exist_ok=True)  # has no tokenizer
        fusers.tokenizer().save_pretrained(folder)
    # and one with a vocabulary that equals the others' only at the beginning
    other = shutil.copytree(folders[1], home / "other")
    values = read_json(other / "tokenizer.json")
    words = values["model"]
    words["vocab"]["de"] = len(words["vocab"]) + len(values["added_tokens"])
    words["merges"].insert(0, ["d", "e"])
    (other / "tokenizer.json").write_text(json.dumps(values))
    return folders


def test_fuse_makes_a_folder_that_generates(sources, tmp_path):
    templates = ("--template", "ultralm", "--template", "{prompt}: ")
    out = invoke(
        "fuse",
        *sources,
        *templates,
        "--gate",
        "linear",
        "--out",
        tmp_path / "f",
    )
    assert out.exit_code == 0, out.exception
    assert f"wrote {tmp_path / 'f'}: a, b; a gate of" in out.output
    fuser = ultrafuser.load(tmp_path / "f")
    assert list(fuser.templates) == ["User: {prompt}\nAssistant:", "{prompt}: "]
    assert fuser.gate.kind == "linear"
    assert not any((tmp_path / "f").rglob("model.safetensors"))
    prompts = ("--prompt", "1 + 1", "--prompt", "def add")
    out = invoke(
        "generate",
        tmp_path / "f",
        *prompts,
        "--max-new-tokens",
        4,
    )
    assert out.exit_code == 0, out.exception
    expected = fuser.complete(["1 + 1", "def add"], max_new_tokens=4, do_sample=False)
    assert out.stdout == "".join(f"{text}\n" for text in expected)


def test_a_file_of_prompts_is_answered_in_batches(sources, tmp_path):
    assert invoke("fuse", *sources, "--out", tmp_path / "f").exit_code == 0
    question = [{"role": "user", "content": "1 + 1"}]
    chats = [question, [*question, {"role": "assistant", "content": "2"}]]
    chats.append([{"role": "user", "content": "def add" * 3}])
    text = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    (tmp_path / "chats.jsonl").write_text(text)
    answers = tmp_path / "answers.jsonl"
    files = ("--data", tmp_path / "chats.jsonl", "--out", answers)
    out = invoke(
        "generate",
        tmp_path / "f",
        *files,
        "--max-new-tokens",
        4,
        "--batch-size",
        2,
    )
    assert out.exit_code == 0, out.exception
    fuser = ultrafuser.load(tmp_path / "f")
    lines = answers.read_text().splitlines()
    for line, prompt in zip(lines, (question, question, chats[2]), strict=True):
        (alone,) = fuser.complete([prompt], max_new_tokens=4, do_sample=False)
        assert json.loads(line) == {"prompt": prompt, "answer": alone}


def test_fuse_copies_and_names(sources, tmp_path):
    options = "--name x --name y --copy --seed 1".split()
    out = invoke(
        "fuse",
        *sources,
        *options,
        "--out",
        tmp_path / "f",
    )
    assert out.exit_code == 0, out.exception
    assert (tmp_path / "f" / "specialists" / "y" / "model.safetensors").is_file()
    assert ultrafuser.load(tmp_path / "f").names == ("x", "y")


@pytest.mark.parametrize(
    "line, match",
    [
        ("train --config none.yaml --out out", "'none.yaml' does not exist"),
        ("generate . --prompt a", "fuser_config.json .No such file"),
        ("generate .", "but got prompt None, data None"),
        ("fuse {a} ./b --out f", "/b' is neither a folder nor a Hub id"),
        ("fuse {a} {bare} --out f", "bare' has no tokenizer. Save"),
        ("fuse {a} {other} --out f", "encodes a text to other ids"),
    ],
)
def test_bad_input_fails_at_once(sources, tmp_path, monkeypatch, line, match):
    monkeypatch.chdir(tmp_path)
    folder = sources[0].parent
    names = {name: folder / name for name in ("a", "bare", "other")}
    out = invoke(*line.format(**names).split())
    assert isinstance(out.exception, ValueError), out.output
    assert re.search(match, str(out.exception)), out.exception
    assert not list(tmp_path.iterdir())
