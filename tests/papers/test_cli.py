"""python -m papers: the commands that do not belong to a table."""

import functools
import importlib

import pytest
from typer.testing import CliRunner

from papers import cli_tables as tables
from papers.cli import app


@pytest.mark.parametrize(
    "recipe, method",
    [
        ("tiny", "xft"),
        ("esft/tiny", "esft"),
        ("sheared-llama-2.7b", "upit"),
    ],
)
def test_run_uses_the_method_that_the_recipe_names(monkeypatch, tmp_path, recipe, method):
    calls = []
    for name in tables.PAPERS:
        study = importlib.import_module(f"papers.{name}.study")
        run = functools.partial(lambda name, *args, **options: calls.append((name, *args)), name)
        monkeypatch.setattr(study, "run", run)
    done = CliRunner().invoke(
        app,
        [
            "run",
            recipe,
            "--out",
            str(tmp_path),
            "--skip-memory-check",
        ],
    )
    assert done.exit_code == 0, done.output
    ((name, path, out),) = calls
    assert name == method
    assert path.stem == recipe.rpartition("/")[2]
    assert out == tmp_path


def test_run_refuses_an_unknown_method(tmp_path):
    (tmp_path / "mine.yaml").write_text("method: dare")
    done = CliRunner().invoke(app, ["run", str(tmp_path / "mine.yaml")])
    assert done.exit_code == 1
    assert "method must be one of xft" in str(done.exception)
