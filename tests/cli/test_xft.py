"""`moe-runtime xft` as a user types it: official folders in and out, and one clear error for bad
input.
"""

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


def invoke(verb: str, *folders, options: str = ""):
    return CliRunner().invoke(xft.app, [verb, *map(str, folders), *options.split()])


def succeed(*arguments, options: str = "") -> str:
    """Run a verb that must succeed, and return its output."""
    out = invoke(*arguments, options=options)
    assert out.exit_code == 0, out.exception
    return out.stdout


def refused(match: str, *arguments, options: str = "") -> None:
    """Run a verb that must raise one error and write nothing."""
    out = invoke(*arguments, options=options)
    assert isinstance(out.exception, ValueError), out.output
    assert re.search(match, str(out.exception))
    assert not Path(arguments[-1]).exists()


def test_official_folders_in_and_out(tmp_path):
    _, tensors = official_xft.write_moe(tmp_path / "theirs")
    ours = tmp_path / "ours"
    back = tmp_path / "back"
    output = succeed("import-official", tmp_path / "theirs", ours, options="--rope-theta 5e4")
    assert f"wrote {ours}: " in output
    assert read_json(ours / "config.json")["rope_theta"] == 5e4
    for options, match in {
        "": "gate is 'xft', but .*mixtral",
        "--keep-rope": "--keep-rope is not valid with --to mixtral",
        "--to official --check": "--check is not valid with --to official",
        "--to official": "keep_rope",
    }.items():
        refused(
            match,
            "export",
            ours,
            back,
            options=options,
        )
    options = "--to official --keep-rope --max-shard-size 50KB --json"
    assert json.loads(succeed("export", ours, back, options=options))["path"] == str(back)
    assert len(list(back.glob("*.safetensors"))) > 1
    with Checkpoint(back) as source:
        assert set(source.keys()) == set(tensors)
        for key, value in tensors.items():
            assert torch.equal(source.get(key), value)
    (tmp_path / "empty").mkdir()
    for verb in ("import-official", "export"):
        refused("", verb, tmp_path / "empty", tmp_path / "out")


EXPORTS = []


for LINE in (Path(__file__).resolve().parents[2] / "docs" / "xft.md").read_text().splitlines():
    if re.match(r"\| `[a-z_]+`.* (yes|no) \|$", LINE):
        GATES, *WAYS = LINE.strip("| ").split(" | ")
        EXPORTS += [(gate, *WAYS) for gate in re.findall(r"`(\w+)`", GATES)]


@pytest.mark.parametrize("gate, merges, families, official", EXPORTS)
def test_each_gate_exports_to_what_the_page_says(gate, merges, families, official, tmp_path):
    """docs/xft.md lists the families."""
    dense("llama", mlp_bias=None, rope_theta=1e4).save_pretrained(tmp_path / "base")
    moe = tmp_path / "moe"
    options = f"--num-experts 3 --top-k 2 --gate {gate}"
    succeed("upcycle", tmp_path / "base", moe, options=options)
    source = moe
    if merges != "yes":
        source = tmp_path / "mixing"
        succeed("to-mergeable", moe, source, options="--soup")
    succeed("merge", source, tmp_path / "merged")
    possible = set(re.findall(r"`(\w+)`", families))
    if official == "yes":
        possible.add("official")
    for to in {"mixtral", "official"} | possible:
        out = invoke("export", moe, tmp_path / to, options=f"--as {to}")
        assert (out.exit_code == 0) == (to in possible), out.exception


@pytest.mark.parametrize(
    "options, fails",
    [
        ("--for qwen3_moe", None),
        ("--for qwen3_moe --gate softmax_topk", None),
        ("--for qwen3_moe --gate xft", "gate is 'xft', but qwen3_moe supports only"),
        ("--num-experts 1 --top-k 1", "num_experts must be at least 2, but got 1"),
    ],
)
def test_upcycling_for_a_family_selects_what_it_computes(options, fails, tmp_path):
    dense("qwen3").save_pretrained(tmp_path / "base")
    moe = tmp_path / "moe"
    if fails is not None:
        refused(
            fails,
            "upcycle",
            tmp_path / "base",
            moe,
            options=options,
        )
        return
    to = options.split()[1]
    succeed("upcycle", tmp_path / "base", moe, options=options)
    output = succeed("export", moe, tmp_path / "out", options=f"--to {to} --check --json")
    receipt = json.loads(output)
    assert receipt["logits_error"] < 1e-5
