"""moe-runtime xft as a user types it: official folders in and out, and one clear error for bad
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


def invoke(*arguments):
    return CliRunner().invoke(xft.app, [str(argument) for argument in arguments])


def test_official_folders_in_and_out(tmp_path):
    _, tensors = official_xft.write_moe(tmp_path / "theirs")
    out = invoke("import-official", tmp_path / "theirs", tmp_path / "ours", "--rope-theta", 5e4)
    assert out.exit_code == 0
    assert f"wrote {tmp_path / 'ours'}: " in out.output
    assert read_json(tmp_path / "ours" / "config.json")["rope_theta"] == 5e4
    out = invoke("export", tmp_path / "ours", tmp_path / "back", "--to", "official")
    assert isinstance(out.exception, ValueError)
    assert "keep_rope" in str(out.exception)
    options = "--to official --keep-rope --max-shard-size 50KB".split()
    out = invoke("export", tmp_path / "ours", tmp_path / "back", *options)
    assert out.exit_code == 0, out.exception
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    with Checkpoint(tmp_path / "back") as back:
        assert set(back.keys()) == set(tensors)
        for k, v in tensors.items():
            assert torch.equal(back.get(k), v)


def test_export_is_of_the_form_that_is_asked_for(tmp_path):
    official_xft.write_moe(tmp_path / "theirs")
    assert invoke("import-official", tmp_path / "theirs", tmp_path / "ours").exit_code == 0
    for arguments, match in (
        ((), "gate is 'xft', but .*mixtral"),
        (("--to", "gguf"), "to must be one of mixtral, "),
        (("--keep-rope",), "--keep-rope is not valid with --to mixtral"),
        (("--to", "official", "--check"), "--check are not valid with --to official"),
    ):
        out = invoke("export", tmp_path / "ours", tmp_path / "out", *arguments)
        assert isinstance(out.exception, ValueError)
        assert re.search(match, str(out.exception))
        assert not (tmp_path / "out").exists()
    out = invoke("export", tmp_path / "ours", tmp_path / "out", "--to", "official", "--json")
    assert out.exit_code == 0, out.exception
    assert json.loads(out.stdout)["path"] == str(tmp_path / "out"), out.exception


def test_a_weighted_model_with_its_experts_in_another_folder(tmp_path):
    official_xft.write_weighted(tmp_path / "theirs", tmp_path / "made")
    (tmp_path / "made").rename(tmp_path / "moved")
    assert invoke("import-official", tmp_path / "theirs", tmp_path / "ours").exit_code != 0
    folders = (tmp_path / "theirs", tmp_path / "ours")
    out = invoke("import-official", *folders, "--ffn-folder", tmp_path / "moved")
    assert out.exit_code == 0, out.exception
    assert read_json(tmp_path / "ours" / "config.json")["moe_runtime"]["stage"] == "mergeable"


@pytest.mark.parametrize("verb", ["import-official", "export"])
def test_a_folder_that_is_no_model_is_refused(verb, tmp_path):
    (tmp_path / "empty").mkdir()
    out = invoke(verb, tmp_path / "empty", tmp_path / "out")
    assert isinstance(out.exception, ValueError)
    assert not (tmp_path / "out").exists()


PAGE = Path(__file__).resolve().parents[2] / "docs" / "xft.md"
EXPORTS = [
    line.strip("| ").split(" | ")
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| `[a-z_]+`.* (yes|no) \|$", line)
]


@pytest.mark.parametrize(
    "gate, ways", [(gate, line[1:]) for line in EXPORTS for gate in re.findall(r"`(\w+)`", line[0])]
)
def test_upcycle_says_what_each_gate_exports_to_and_so_it_is(gate, ways, tmp_path):
    dense("llama", mlp_bias=None, rope_theta=1e4).save_pretrained(tmp_path / "base")
    options = f"--num-experts 3 --top-k 2 --gate {gate}".split()
    done = invoke("upcycle", tmp_path / "base", tmp_path / "moe", *options)
    said = next(line for line in done.output.splitlines() if line.startswith("exports: "))
    said = dict(part.split(": ", 1) for part in said.removeprefix("exports: ").split("; "))
    merged = said.pop("xft merge to a dense model")
    assert merged == ways[0].replace("`", "")
    source = tmp_path / "moe"
    if merged != "yes":
        source = tmp_path / "mixing"
        assert invoke("to-mergeable", tmp_path / "moe", source, "--soup").exit_code == 0
    assert invoke("merge", source, tmp_path / "merged").exit_code == 0
    possible = {*re.findall(r"`(\w+)`", ways[1]), *(["official"] if ways[2] == "yes" else [])}
    assert {name.rpartition(" ")[2] for name, why in said.items() if why == "yes"} == possible
    for to in {"mixtral", "official"} | possible:
        out = invoke("export", tmp_path / "moe", tmp_path / to, "--as", to)
        assert (out.exit_code == 0) == (to in possible), out.exception
        if to == "mixtral" and to not in possible:
            assert said["xft export --to mixtral"] == "no, " + str(out.exception).partition(". ")[0]
            assert ". Use xft merge for a dense model, xft export --to official, " in str(
                out.exception
            )


@pytest.mark.parametrize(
    "to, more, fails",
    [
        ("qwen3_moe", (), None),
        ("glm4_moe", ("--top-k", 2), None),
        ("qwen3_moe", ("--gate", "softmax_topk"), None),
        ("qwen3_moe", ("--gate", "xft"), "gate is 'xft', but qwen3_moe supports only"),
        (
            "qwen3_moe",
            ("--preset", "xft-official"),
            "router is 'mlp', but qwen3_moe supports only 'linear'",
        ),
        ("qwen2_moe", (), "base is 'qwen3', but qwen2_moe supports only"),
        ("deepseek_v3", (), "latent attention"),
    ],
)
def test_upcycling_for_a_family_selects_what_it_computes(to, more, fails, tmp_path):
    dense("qwen3").save_pretrained(tmp_path / "base")
    out = invoke("upcycle", tmp_path / "base", tmp_path / "moe", "--for", to, *more)
    if fails is not None:
        assert re.search(fails, str(out.exception))
        assert not (tmp_path / "moe").exists()
        return
    assert f"xft export --to {to}: yes" in out.output, out.exception
    out = invoke("export", tmp_path / "moe", tmp_path / "out", "--to", to, "--check", "--json")
    receipt = json.loads(out.stdout)
    assert receipt["exact"]
    assert receipt["logits_error"] < 1e-5


def test_one_expert_is_the_dense_model(tmp_path):
    dense("llama").save_pretrained(tmp_path / "base")
    out = invoke("upcycle", tmp_path / "base", tmp_path / "moe", "--num-experts", 1, "--top-k", 1)
    assert (
        str(out.exception)
        == "num_experts must be at least 2, but got 1, which is the dense model itself"
    )
    assert not (tmp_path / "moe").exists()
