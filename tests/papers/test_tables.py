"""python -m papers METHOD TABLE as a user types it: what reaches the tables, and one clear error
for bad input.
"""

import importlib
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from papers.cli import app as main_app
from papers.cli_tables import TABLES
from papers.engine.tables import Entry, Report
from papers.xft.study import Result


def invoke(*arguments):
    return CliRunner().invoke(main_app, ["paper", *(str(argument) for argument in arguments)])


def report_of(command: str) -> Report:
    """Numbers made up: what is tested is what the command line does with them."""
    values = {
        "folder": Path("sft-0/model"),
        "tokens": [3, 4],
        "steps": 1,
        "seconds": 1.0,
        "total_seconds": 1.0,
    }
    values |= {
        "parameters": 5,
        "active_parameters": 5,
        "history": [],
        "alpha": None,
        "steps_per_second": 1.0,
    }
    rows = {"SFT": [1.0, 2.0], "XFT": [0.5, 1.5]}
    results = {
        name: Result(name=name, loss=sum(losses) / 2, losses=losses, **values)
        for name, losses in rows.items()
    }
    entries = [Entry(name, [result]) for name, result in results.items()]
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
def seen(monkeypatch) -> list:
    """The calls (method, table, recipe, out, options) that reach `run` of the methods."""
    calls = []
    for method in TABLES:

        def run(command, recipe, out, method=method, **options):
            calls.append((method, command, str(recipe), str(out), options))
            return report_of(command)

        monkeypatch.setattr(
            importlib.import_module(f"moe_runtime.methods.{method}.tables"), "run", run
        )
    return calls


@pytest.mark.parametrize("method", TABLES)
def test_every_table_of_a_method_has_its_verb(method):
    commands = importlib.import_module(f"moe_runtime.methods.{method}.tables").COMMANDS
    assert sorted(table.name for table in TABLES[method]) == sorted(commands)


TOP = {"top": 6, "score": "gate"}
GIVEN = {  # options of their own that are passed on without any given
    "xft routing-stats": {"tokens": 16384},
    "esft sweep-p": {"score": "both"},
    "esft shared-grid": {"score": "token"},
    "esft sample-size": TOP,
    "esft other-tasks": {"mix": 0.0},
    "esft overlap": TOP,
    "ultrafuser stability": {"checkpoints": 12},
}
ALONE = [f"{method} {table.name}" for method, tables in TABLES.items() for table in tables]


@pytest.mark.parametrize(
    "words, options",
    [
        *(pytest.param(words, GIVEN.get(words, {}), id=words) for words in ALONE),
        ("xft sweep-lambda 0 .25 1", {"shared_rates": [0.0, 0.25, 1.0]}),
        ("xft sweep-topk 2 3", {"top_ks": [2, 3]}),
        (
            "xft routing-stats --data a.jsonl --data b --tokens 9",
            {"texts": ["a.jsonl", "b"], "tokens": 9},
        ),
        (
            "esft sweep-p .1 .5 --score token --rank 2 --rank 4",
            {"ps": [0.1, 0.5], "score": "token", "ranks": [2, 4]},
        ),
        ("esft shared-grid --score gate", {"score": "gate"}),
        ("esft group-size 1 2", {"sizes": [1, 2]}),
        ("esft sample-size 64 128 --top 4", {"sizes": [64, 128], "top": 4, "score": "gate"}),
        ("esft overlap --score token", {"top": 6, "score": "token"}),
        ("esft mix-data 0 .5 1", {"ratios": [0.0, 0.5, 1.0]}),
        ("esft frontier .1 1 --depth .2", {"factors": [0.1, 1.0], "depths": [0.2]}),
        ("upit ckpt front back --form lora", {"form": "lora", "strategies": ["front", "back"]}),
        ("upit experts --experts 4 --active 1 --active 2", {"sizes": [4], "active": [1, 2]}),
        ("upit data .5 1", {"shares": [0.5, 1.0]}),
        ("upit epochs 2,2 1,.5", {"pairs": [(2.0, 2.0), (1.0, 0.5)]}),
        ("ultrafuser weights --rows 100", {"rows": 100}),
        ("ultrafuser stability --checkpoints 6", {"checkpoints": 6}),
    ],
)
def test_a_verb_reaches_its_table(seen, tmp_path, words, options):
    out = invoke(*words.split(), "--out", tmp_path, "--seeds", 2)
    assert out.exit_code == 0, out.exception
    ((*call, given),) = seen
    given.pop("say")
    assert (
        call == [*words.split()[:2], "tiny", str(tmp_path)]
        and given == {"seeds": 2, "overwrite": False} | options
    )
    assert (
        "a title" in out.output
        and "what it says" in out.output
        and "no difference found" in out.output
    )
    assert f"{tmp_path / words.split()[1]}.json" in out.output


@pytest.mark.parametrize(
    "words", [f"{method} {tables[0].name}" for method, tables in TABLES.items()]
)
def test_a_recipe_file_takes_the_presets_place(seen, words):
    assert invoke(*words.split(), "--recipe", "mine.yaml", "--overwrite").exit_code == 0
    assert (
        seen[0][2:4] == ("mine.yaml", f"runs/{words.split()[0]}")
        and seen[0][4]["overwrite"] is True
    )


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
        ("xft sweep-topk 9", "top_k must be"),
        ("xft routing-stats --data no.jsonl", "Data 'no.jsonl'"),
        ("esft sweep-p 2", "p must be"),
        ("esft group-size 3", "group_size must divide"),
        ("upit ckpt last", "strategy must be"),
        ("upit router none none", "strategy must have"),
        ("upit expand --form dense", "form must be"),
        ("upit expand --form ffn --preset llama-2-7b-lora", "form must be"),
        ("upit experts --experts 2 --active 3", "must be at most experts .2., but got 3"),
        ("upit data 2", "share must be"),
        ("upit epochs 2", "epochs must be"),
        ("upit epochs .25,2", "checkpoints.count must be at most"),
        ("ultrafuser weights --rows 0", "rows must be"),
        ("ultrafuser stability --checkpoints 999", "checkpoints must be at least 2"),
    ],
)
def test_bad_input_fails_at_once(tmp_path, words, match):
    out = invoke(*words.split(), "--out", tmp_path / "out")
    assert isinstance(out.exception, ValueError) and re.search(match, str(out.exception)), (
        out.exception
    )
    assert not list(tmp_path.iterdir())


def test_epochs_that_are_no_numbers_do_not_parse():
    out = invoke("upit", "epochs", "a,b")
    assert (
        out.exit_code == 2
        and "Invalid value for 'pairs': Value error, could not convert string to float: 'a'"
        in out.stderr
    )
