"""moe-runtime xft as a user types it: every verb's help, what reaches the tables, and one clear error for bad input."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from moe_runtime.cli import xft
from moe_runtime.cli.app import app as main_app
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.files import read_json
from moe_runtime.methods.xft import tables as xft_tables
from tests.support import cli_tables, official_xft

TABLES = tuple(xft_tables.COMMANDS)


def invoke(*arguments):
    return CliRunner().invoke(xft.app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("verb", [*TABLES, "import-official", "export-official"])
def test_help_has_an_example(verb):
    out = invoke(verb, "--help")
    assert out.exit_code == 0 and f"Example: moe-runtime xft {verb}" in out.output


@pytest.fixture
def seen(monkeypatch):
    """The calls that reach the tables."""
    return cli_tables.watch(monkeypatch, xft_tables)


@pytest.mark.parametrize(
    "arguments, options",
    [
        *(
            pytest.param((name,), {}, id=name)
            for name in ("table1", "ablate-gate", "ablate-merge", "budget", "ewa-schedule")
        ),
        pytest.param(("sweep-lambda",), {}, id="lambdas by default"),
        pytest.param(("sweep-lambda", 0, ".25", 1), {"shared_rates": [0.0, 0.25, 1.0]}, id="lambdas"),
        pytest.param(("sweep-topk", 2, 3), {"top_ks": [2, 3]}, id="top_ks"),
        pytest.param(("routing-stats",), {"texts": [], "tokens": 16384}, id="routing-stats"),
        pytest.param(
            ("routing-stats", "--data", "a.jsonl", "--data", "b.jsonl", "--tokens", 9),
            {"texts": ["a.jsonl", "b.jsonl"], "tokens": 9},
            id="texts",
        ),
    ],
)
def test_a_command_reaches_its_table(seen, tmp_path, arguments, options):
    out = invoke(*arguments, "--out", tmp_path, "--seeds", 2)
    cli_tables.check_call(seen, out, arguments, tmp_path, options)


def test_a_recipe_file_takes_the_presets_place(seen, tmp_path):
    assert invoke("table1", "--recipe", "mine.yaml", "--overwrite").exit_code == 0
    assert seen[0][1] == "mine.yaml" and seen[0][3]["overwrite"] is True


@pytest.mark.parametrize(
    "arguments, match",
    [
        pytest.param(("table1", "--seeds", 0), "seeds is 0; want an integer of at least 1", id="no seeds"),
        pytest.param(("table1", "--preset", "huge"), "preset is 'huge'; want one of .*tiny", id="unknown preset"),
        pytest.param(("table1", "--recipe", "none.yaml"), "recipe is 'none.yaml'; want", id="no recipe"),
        pytest.param(("table1", "--preset", "tiny", "--recipe", "a.yaml"), "want one of the two", id="both"),
        pytest.param(("sweep-lambda", "2"), "lambda is 2; want different numbers from 0 to 1", id="lambda above 1"),
        pytest.param(("sweep-topk", "9"), "top_k is 9", id="more than there are"),
        pytest.param(("routing-stats", "--data", "no.jsonl"), "data is 'no.jsonl', which is no file", id="no text"),
    ],
)
def test_bad_input_fails_at_once(tmp_path, arguments, match):
    out = invoke(*arguments, "--out", tmp_path / "out")
    assert isinstance(out.exception, ValueError) and re.search(match, str(out.exception))
    assert not list(tmp_path.iterdir())


def test_official_folders_in_and_out(tmp_path):
    _, tensors = official_xft.write_moe(tmp_path / "theirs")
    out = invoke("import-official", tmp_path / "theirs", tmp_path / "ours", "--rope-theta", 5e4)
    assert out.exit_code == 0 and f"wrote {tmp_path / 'ours'}: " in out.output
    assert read_json(tmp_path / "ours" / "config.json")["rope_theta"] == 5e4
    out = invoke("export-official", tmp_path / "ours", tmp_path / "back")
    assert isinstance(out.exception, ValueError) and "keep_rope" in str(out.exception)
    out = invoke("export-official", tmp_path / "ours", tmp_path / "back", "--keep-rope", "--max-shard-size", "50KB")
    assert out.exit_code == 0, out.exception
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    with Checkpoint(tmp_path / "back") as back:
        assert set(back.keys()) == set(tensors) and all(torch.equal(back.get(k), v) for k, v in tensors.items())


def test_export_is_of_the_form_that_is_asked_for(tmp_path):
    official_xft.write_moe(tmp_path / "theirs")
    assert invoke("import-official", tmp_path / "theirs", tmp_path / "ours").exit_code == 0
    assert invoke("export-official", tmp_path / "ours", tmp_path / "back").exit_code == 0

    def export(*arguments):
        return CliRunner().invoke(main_app, ["export", str(tmp_path / "ours"), str(tmp_path / "out"), *arguments])

    for arguments, match in (
        ((), "gate is 'xft'; want .*Mixtral"),
        (("--to", "gguf"), "to is 'gguf'; want one of mixtral, "),
    ):
        out = export(*arguments)
        assert isinstance(out.exception, ValueError) and re.search(match, str(out.exception))
        assert not (tmp_path / "out").exists()
    out = export("--to", "official", "--json")
    assert out.exit_code == 0 and json.loads(out.stdout)["path"] == str(tmp_path / "out"), out.exception
    for path in (tmp_path / "back").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_weighted_model_with_its_experts_in_another_folder(tmp_path):
    official_xft.write_weighted(tmp_path / "theirs", tmp_path / "made")
    (tmp_path / "made").rename(tmp_path / "moved")
    assert invoke("import-official", tmp_path / "theirs", tmp_path / "ours").exit_code != 0
    out = invoke("import-official", tmp_path / "theirs", tmp_path / "ours", "--ffn-folder", tmp_path / "moved")
    assert out.exit_code == 0, out.exception
    assert read_json(tmp_path / "ours" / "config.json")["moe_runtime"]["stage"] == "mergeable"


@pytest.mark.parametrize("verb", ["import-official", "export-official"])
def test_a_folder_that_is_no_model_is_refused(verb, tmp_path):
    (tmp_path / "empty").mkdir()
    out = invoke(verb, tmp_path / "empty", tmp_path / "out")
    assert isinstance(out.exception, ValueError) and not (tmp_path / "out").exists()
