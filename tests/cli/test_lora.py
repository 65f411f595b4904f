"""The verbs of `moe-runtime lora`: what they write, print and refuse."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.methods.lora.baseline import load_lora
from tests.support.cli import run_verb as invoke
from tests.support.peft_adapter import adapted, as_written_by
from tests.support.stock_moe import batch


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A base, an adapter for it, the same adapter as PEFT 0.18 would have written it, and the
    logits of the adapted model.
    """
    folder = tmp_path_factory.mktemp("lora")
    made = adapted(folder)
    as_written_by("0.18.0", folder / "adapter", folder / "old", transposed=False)
    with torch.no_grad():
        return folder, made(**batch()).logits


def test_an_old_adapter_is_converted_exported_and_merged(home, tmp_path):
    folder, expected = home
    out = invoke(
        "lora",
        "convert",
        folder / "base",
        folder / "old",
        tmp_path / "new",
    )
    assert out.exit_code == 0, out.output
    assert "peft_version 0.18.0, with old axes in A and B of 4 stacks" in out.output, out.output
    files = (folder / "base", tmp_path / "new", tmp_path / "merged")
    out = invoke(
        "lora",
        "export",
        *files,
        "--to",
        "merged",
        "--json",
    )
    assert json.loads(out.stdout)["experts"] == 16, out.output
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    for model in (merged, load_lora(base, tmp_path / "new").eval()):
        with torch.no_grad():
            torch.testing.assert_close(model(**batch()).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "words, match",
    [
        ("convert base adapter new", "has the axes of PEFT 0.20 and later"),
        ("convert base base new", "Adapter 'base' has no adapter_config.json"),
        ("export base adapter new --to ollama", "to must be"),
        ("export base adapter adapter --to merged", "already exists"),
        ("export base adapter base --to merged --overwrite", "is or contains base, which is read"),
    ],
)
def test_bad_input_is_one_error_and_nothing_is_written(home, monkeypatch, words, match):
    monkeypatch.chdir(home[0])
    before = {path: path.stat().st_mtime_ns for path in home[0].rglob("*")}
    out = invoke("lora", *words.split())
    assert isinstance(out.exception, ValueError), out.exception
    assert re.search(match, str(out.exception)), out.exception
    assert "\n" not in str(out.exception)
    assert {path: path.stat().st_mtime_ns for path in home[0].rglob("*")} == before
