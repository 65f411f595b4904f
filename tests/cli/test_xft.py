"""moe-runtime xft as a user types it: official folders in and out, and one clear error for bad input."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moe_runtime.cli import xft
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.files import read_json
from tests.hf.tiny import dense
from tests.support import official_xft


def invoke(*arguments):
    return CliRunner().invoke(xft.app, [str(argument) for argument in arguments])


def test_official_folders_in_and_out(tmp_path):
    _, tensors = official_xft.write_moe(tmp_path / "theirs")
    out = invoke("import-official", tmp_path / "theirs", tmp_path / "ours", "--rope-theta", 5e4)
    assert out.exit_code == 0 and f"wrote {tmp_path / 'ours'}: " in out.output
    assert read_json(tmp_path / "ours" / "config.json")["rope_theta"] == 5e4
    out = invoke("export", tmp_path / "ours", tmp_path / "back", "--to", "official")
    assert isinstance(out.exception, ValueError) and "keep_rope" in str(out.exception)
    out = invoke("export", tmp_path / "ours", tmp_path / "back", "--to", "official", "--keep-rope", "--max-shard-size", "50KB")
    assert out.exit_code == 0, out.exception
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    with Checkpoint(tmp_path / "back") as back:
        assert set(back.keys()) == set(tensors) and all(torch.equal(back.get(k), v) for k, v in tensors.items())


def test_export_is_of_the_form_that_is_asked_for(tmp_path):
    official_xft.write_moe(tmp_path / "theirs")
    assert invoke("import-official", tmp_path / "theirs", tmp_path / "ours").exit_code == 0
    for arguments, match in (
        ((), "gate is 'xft', but .*Mixtral"),
        (("--to", "gguf"), "to must be one of mixtral, "),
        (("--keep-rope",), "--keep-rope is only valid with --to official"),
    ):
        out = invoke("export", tmp_path / "ours", tmp_path / "out", *arguments)
        assert isinstance(out.exception, ValueError) and re.search(match, str(out.exception))
        assert not (tmp_path / "out").exists()
    out = invoke("export", tmp_path / "ours", tmp_path / "out", "--to", "official", "--json")
    assert out.exit_code == 0 and json.loads(out.stdout)["path"] == str(tmp_path / "out"), out.exception


def test_a_weighted_model_with_its_experts_in_another_folder(tmp_path):
    official_xft.write_weighted(tmp_path / "theirs", tmp_path / "made")
    (tmp_path / "made").rename(tmp_path / "moved")
    assert invoke("import-official", tmp_path / "theirs", tmp_path / "ours").exit_code != 0
    out = invoke("import-official", tmp_path / "theirs", tmp_path / "ours", "--ffn-folder", tmp_path / "moved")
    assert out.exit_code == 0, out.exception
    assert read_json(tmp_path / "ours" / "config.json")["moe_runtime"]["stage"] == "mergeable"


@pytest.mark.parametrize("verb", ["import-official", "export"])
def test_a_folder_that_is_no_model_is_refused(verb, tmp_path):
    (tmp_path / "empty").mkdir()
    out = invoke(verb, tmp_path / "empty", tmp_path / "out")
    assert isinstance(out.exception, ValueError) and not (tmp_path / "out").exists()


PAGE = Path(__file__).resolve().parents[2] / "docs" / "xft.md"
EXPORTS = [
    line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if re.match(r"\| `[a-z_]+`.* (yes|no) \|$", line)
]


@pytest.mark.parametrize("gate, ways", [(gate, line[1:]) for line in EXPORTS for gate in re.findall(r"`(\w+)`", line[0])])
def test_upcycle_says_what_each_gate_exports_to_and_so_it_is(gate, ways, tmp_path):
    dense("llama", mlp_bias=None, rope_theta=1e4).save_pretrained(tmp_path / "base")
    done = invoke("upcycle", tmp_path / "base", tmp_path / "moe", "--num-experts", 3, "--top-k", 2, "--gate", gate)
    said = next(line for line in done.output.splitlines() if line.startswith("exports: "))
    words = re.fullmatch("exports: xft merge .*: (.+); xft export --to mixtral: (.+); xft export --to official: (.+)", said)
    arguments = (("merge",), ("export",), ("export", "--to", "official"))
    for said, way, (verb, *more) in zip(words.groups(), ways, arguments, strict=True):
        assert re.split(", gate (?:is|must)", said)[0] == way.replace("`", "")
        source = tmp_path / "moe"
        if way.startswith("after"):
            source = tmp_path / "mixing"
            assert invoke("to-mergeable", tmp_path / "moe", source, "--soup").exit_code == 0
        out = invoke(verb, source, tmp_path / "".join([verb, *more]), *more)
        assert (out.exit_code == 0) == (way != "no"), out.exception
        if verb == "export" and not more and way == "no":
            assert ". Use xft merge for a dense model, xft export --to official, or start with --gate " in str(out.exception)


def test_one_expert_is_the_dense_model(tmp_path):
    dense("llama").save_pretrained(tmp_path / "base")
    out = invoke("upcycle", tmp_path / "base", tmp_path / "moe", "--num-experts", 1, "--top-k", 1)
    assert str(out.exception) == "num_experts must be at least 2, but got 1, which is the dense model itself"
    assert not (tmp_path / "moe").exists()
