"""python -m papers METHOD TABLE as a user types it: what reaches the tables, and one clear error
for bad input.
"""

import importlib
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from papers.cli import app
from papers.cli_tables import TABLES
from papers.engine.tables import Entry, Report
from papers.xft.study import Result

ALL = [f"{method} {table.name}" for method, tables in TABLES.items() for table in tables]
FIRST = [f"{method} {tables[0].name}" for method, tables in TABLES.items()]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def report_of(command: str) -> Report:
    """Numbers made up: what is tested is what the command line does with them."""
    entries = []
    for name, losses in {"SFT": [1.0, 2.0], "XFT": [0.5, 1.5]}.items():
        result = Result(
            name=name,
            folder=Path("sft-0/model"),
            loss=sum(losses) / 2,
            losses=losses,
            tokens=[3, 4],
            steps=1,
            seconds=1.0,
            total_seconds=1.0,
            parameters=5,
            active_parameters=5,
            history=[],
            steps_per_second=1.0,
        )
        entries.append(Entry(name, [result]))
    return Report(
        command=command,
        title="a title",
        source="Table 0",
        settings={},
        seeds=(0,),
        entries=entries,
        reference="SFT",
        summary=["what it says"],
    )


@pytest.fixture
def calls(monkeypatch) -> list:
    """The calls (method, table, recipe, out, options) that reach `run` of the methods."""
    calls = []
    for method in TABLES:

        def run(command, recipe, out, method=method, **options):
            calls.append((method, command, str(recipe), str(out), options))
            return report_of(command)

        monkeypatch.setattr(importlib.import_module(f"papers.{method}.tables"), "run", run)
    return calls


@pytest.mark.parametrize("method", TABLES)
def test_every_table_of_a_method_has_its_verb(method):
    commands = importlib.import_module(f"papers.{method}.tables").COMMANDS
    assert sorted(table.name for table in TABLES[method]) == sorted(commands)


@pytest.mark.parametrize(
    "words, options",
    [
        *(pytest.param(words, {}, id=words) for words in ALL),
        ("xft sweep-lambda 0 .25 1", {"shared_rates": [0.0, 0.25, 1.0]}),
        ("esft frontier .1 1 --depth .2", {"factors": [0.1, 1.0], "depths": [0.2]}),
        ("ultrafuser weights --rows 100", {"rows": 100}),
    ],
)
def test_a_verb_reaches_its_table(calls, tmp_path, words, options):
    out = invoke(*words.split(), "--out", tmp_path, "--seeds", 2)
    assert out.exit_code == 0, out.exception
    ((*call, given),) = calls
    given.pop("say")
    assert call == [*words.split()[:2], "tiny", str(tmp_path)]
    assert given == {"seeds": 2, "overwrite": False} | options
    for text in ("a title", "what it says", "no difference found"):
        assert text in out.output
    assert f"{tmp_path / words.split()[1]}.json" in out.output


@pytest.mark.parametrize("words", FIRST)
def test_a_recipe_file_takes_the_presets_place(calls, words):
    assert invoke(*words.split(), "--recipe", "mine.yaml", "--overwrite").exit_code == 0
    ((_, _, recipe, out, options),) = calls
    assert (recipe, out) == ("mine.yaml", f"runs/{words.split()[0]}")
    assert options["overwrite"] is True


@pytest.mark.parametrize(
    "words, match",
    [
        ("xft table1 --seeds 0", "seeds must be"),
        ("xft table1 --preset huge", "preset must be one of .*tiny"),
        ("upit main --preset huge", "preset must be one of budget, llama-2-7b-lora, sheared"),
        ("esft main --recipe none.yaml", "Recipe 'none.yaml' does not exist"),
        (
            "esft main --preset tiny --recipe a.yaml",
            "Pass either a preset or a recipe, but got preset 'tiny' and recipe 'a.yaml'",
        ),
        ("xft sweep-lambda 2", "lambda must be"),
        ("esft frontier 0", "factor must be a number above 0"),
        ("upit budget --preset llama-2-7b-lora", "form must be"),
        ("ultrafuser weights --rows 0", "rows must be"),
    ],
)
def test_bad_input_fails_at_once(tmp_path, words, match):
    out = invoke(*words.split(), "--out", tmp_path / "out")
    assert isinstance(out.exception, ValueError)
    assert re.search(match, str(out.exception))
    assert not list(tmp_path.iterdir())
