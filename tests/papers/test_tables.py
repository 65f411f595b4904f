"""python -m papers METHOD TABLE as a user types it: the arguments reach the tables, and bad input
gives one clear error.
"""

import functools
import importlib
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from papers.cli import app
from papers.cli_tables import TABLES
from papers.engine.tables import Entry, Report
from papers.xft.study import StageResult

ALL = [f"{method} {table.name}" for method, tables in TABLES.items() for table in tables]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def report_of(command: str) -> Report:
    """Return made-up numbers, since the test is about the command line."""
    result = StageResult(
        name="SFT",
        folder=Path("sft-0/model"),
        loss=1.5,
        losses=[1.0, 2.0],
        tokens=[3, 4],
        steps=1,
        seconds=1.0,
        total_seconds=1.0,
        parameters=5,
        active_parameters=5,
        history=[],
        steps_per_second=1.0,
    )
    better = result._replace(
        name="XFT",
        loss=1.0,
        losses=[0.5, 1.5],
    )
    return Report(
        command=command,
        title="a title",
        source="Table 0",
        settings={},
        seeds=(0,),
        entries=[Entry("SFT", [result]), Entry("XFT", [better])],
        reference="SFT",
        summary=["what it says"],
    )


@pytest.fixture
def calls(monkeypatch) -> list:
    """The calls (method, table, recipe, out, options) of the methods' `run`."""
    calls = []

    def run(method, command, recipe, out, **options):
        calls.append((method, command, str(recipe), str(out), options))
        return report_of(command)

    for method in TABLES:
        module = importlib.import_module(f"papers.{method}.tables")
        monkeypatch.setattr(module, "run", functools.partial(run, method))
    return calls


@pytest.mark.parametrize("method", TABLES)
def test_every_table_of_a_method_has_its_verb(method):
    commands = importlib.import_module(f"papers.{method}.tables").COMMANDS
    assert sorted(table.name for table in TABLES[method]) == sorted(commands)


@pytest.mark.parametrize(
    "words, options",
    [
        *((words, {}) for words in ALL),
        ("xft sweep-lambda 0 .25 1", {"shared_rates": [0.0, 0.25, 1.0]}),
        ("esft frontier .1 1 --depth .2", {"factors": [0.1, 1.0], "depths": [0.2]}),
        ("ultrafuser weights --rows 100", {"rows": 100}),
    ],
)
def test_a_verb_reaches_its_table(calls, tmp_path, words, options):
    method, table, *_ = words.split()
    out = invoke(
        *words.split(),
        "--out",
        tmp_path,
        "--seeds",
        2,
    )
    assert out.exit_code == 0, out.exception
    ((*call, given),) = calls
    given.pop("say")
    assert call == [method, table, "tiny", str(tmp_path)]
    assert given == {"seeds": 2, "overwrite": False} | options
    for text in ("a title", "what it says", "no difference found", f"{tmp_path / table}.json"):
        assert text in out.output


@pytest.mark.parametrize(
    "words, match",
    [
        ("xft table1 --preset huge", "preset must be one of .*tiny"),
        ("esft main --preset tiny --recipe a.yaml", "Pass either a preset or a recipe"),
        ("esft frontier 0", "factor must be a number above 0"),
        ("ultrafuser weights --rows 0", "rows must be"),
    ],
)
def test_bad_input_fails_at_once(tmp_path, words, match):
    out = invoke(*words.split(), "--out", tmp_path / "out")
    assert isinstance(out.exception, ValueError)
    assert re.search(match, str(out.exception))
    assert not list(tmp_path.iterdir())
