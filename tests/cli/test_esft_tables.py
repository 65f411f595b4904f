"""The tables of moe-runtime esft as a user types them: help, what reaches the tables, one clear error for bad input."""

import re

import pytest
from typer.testing import CliRunner

from moe_runtime.cli import runs
from moe_runtime.cli.app import app as main_app
from moe_runtime.methods.esft import tables as esft_tables
from tests.support import cli_tables

TABLES = tuple(esft_tables.COMMANDS)


def invoke(*arguments):
    return CliRunner().invoke(main_app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("verb", TABLES)
def test_help_has_an_example(verb):
    out = invoke("esft", verb, "--help")
    assert out.exit_code == 0 and f"Example: moe-runtime esft {verb}" in out.output


@pytest.fixture
def seen(monkeypatch):
    """The calls that reach the tables."""
    return cli_tables.watch(monkeypatch, esft_tables)


TOP = {"top": 6, "score": "gate"}


@pytest.mark.parametrize(
    "arguments, options",
    [
        *(
            pytest.param((name,), {}, id=name)
            for name in ("main", "random-experts", "counts", "group-size", "mix-data")
        ),
        pytest.param(("sweep-p",), {"score": "both"}, id="sweep-p"),
        pytest.param(
            ("sweep-p", ".1", ".5", "--score", "token", "--rank", 2, "--rank", 4),
            {"ps": [0.1, 0.5], "score": "token", "ranks": [2, 4]},
            id="ps and ranks",
        ),
        pytest.param(("shared-grid",), {"score": "token"}, id="shared-grid"),
        pytest.param(("shared-grid", "--score", "gate"), {"score": "gate"}, id="grid's score"),
        pytest.param(("group-size", 1, 2), {"sizes": [1, 2]}, id="sizes"),
        pytest.param(("sample-size",), TOP, id="sample-size"),
        pytest.param(
            ("sample-size", 64, 128, "--top", 4), {"sizes": [64, 128], "top": 4, "score": "gate"}, id="tokens"
        ),
        pytest.param(("overlap", "--score", "token"), {"top": 6, "score": "token"}, id="overlap"),
        pytest.param(("mix-data", 0, ".5", 1), {"ratios": [0.0, 0.5, 1.0]}, id="ratios"),
    ],
)
def test_a_command_reaches_its_table(seen, tmp_path, arguments, options):
    out = invoke("esft", *arguments, "--out", tmp_path, "--seeds", 2)
    cli_tables.check_call(seen, out, arguments, tmp_path, options)


def test_a_recipe_file_takes_the_presets_place(seen):
    assert invoke("esft", "main", "--recipe", "mine.yaml", "--overwrite").exit_code == 0
    assert seen[0][1] == "mine.yaml" and seen[0][3]["overwrite"] is True


@pytest.mark.parametrize(
    "arguments, match",
    [
        pytest.param(("main", "--seeds", 0), "seeds is 0; want an integer of at least 1", id="no seeds"),
        pytest.param(("main", "--preset", "huge"), "preset is 'huge'; want one of deepseek-v2-lite, tiny", id="preset"),
        pytest.param(("main", "--recipe", "none.yaml"), "recipe is 'none.yaml'; want a YAML file", id="no recipe"),
        pytest.param(("main", "--preset", "tiny", "--recipe", "a.yaml"), "want one of the two", id="both"),
        pytest.param(("sweep-p", "2"), "p is 2.0; want a number above 0", id="p above 1"),
        pytest.param(("group-size", "3"), "group_size is 3, num_experts is 32, top_k is 4; want", id="group"),
    ],
)
def test_bad_input_fails_at_once(tmp_path, arguments, match):
    out = invoke("esft", *arguments, "--out", tmp_path / "out")
    assert isinstance(out.exception, ValueError) and re.search(match, str(out.exception))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe, method", [("tiny", "xft"), ("esft/tiny", "esft"), ("deepseek-v2-lite", "esft")])
def test_run_takes_the_method_that_the_recipe_names(monkeypatch, tmp_path, recipe, method):
    calls = []
    for name, module in runs.STAGES.items():
        monkeypatch.setattr(f"{module}.run", lambda *args, name=name, **options: calls.append((name, *args)))
    assert invoke("run", recipe, "--out", tmp_path).exit_code == 0
    ((name, path, out),) = calls
    assert name == method == path.parent.name and path.stem == recipe.rpartition("/")[2] and out == tmp_path
