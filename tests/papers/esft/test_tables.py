"""Each table of ESFT from real, very small trainings: what it holds, that nothing is trained twice,
and what it refuses.
"""

import json
import statistics

import pytest

from papers.engine.compare import compare
from papers.engine.tables import Entry
from papers.esft import tables as esft_tables
from papers.esft.recipe import load_recipe
from papers.esft.tables import EsftReport
from tests.support.dist_launch import times
from tests.support.esft_study import write_study

pytestmark = pytest.mark.usefixtures("quick")
METHODS = ("FFT", "LoRA", "ESFT-Token", "ESFT-Gate")
# name -> methods, options
TABLES = {"main": (["base", *METHODS], {})}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return load_recipe(write_study(tmp_path_factory.mktemp("study"))).change(evaluations=1)


def make(command, recipe, out, **options):
    said = []
    return esft_tables.run(command, recipe, out, say=said.append, **{"seeds": 1} | options), said


@pytest.mark.slow
@pytest.mark.parametrize("command", TABLES)
def test_a_table(command, recipe, out):
    names, options = TABLES[command]
    before = times(out)
    report, said = make(command, recipe, out, **options)
    assert [entry.name for entry in report.entries] == names
    assert isinstance(report, EsftReport)
    # nothing was trained twice
    for name, written in before.items():
        assert times(out)[name] == written
    assert (out / f"{command}.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((out / f"{command}.json").read_text())
    for method, entry in zip(values["methods"], report.entries, strict=True):
        for seed, result in zip(method["seeds"], entry.results, strict=True):
            folders = [(out / one["folder"]).parent for one in seed["tasks"].values()]
            parts = [json.loads((folder / "result.json").read_text()) for folder in folders]
            if entry.name != "base":
                assert [loss for part in parts for loss in part["losses"]] == list(result.losses)
                mean = {
                    of: statistics.fmean(part[of] for part in parts)
                    for of in ("general_loss", "optimizer_bytes")
                }
                assert mean["general_loss"] == pytest.approx(result.general_loss)
                assert mean["optimizer_bytes"] == pytest.approx(result.optimizer_bytes, abs=1)
        assert method["loss"] == entry.loss
        assert method["general_loss"] == report.general.entry(entry.name).loss
    losses = {
        entry.name: [result.general_losses for result in entry.results] for entry in report.entries
    }
    want = compare(losses, report.reference, report.entries[0].results[0].general_tokens)
    assert report.general.comparisons == want
    assert len(values["general_comparisons"]) == len(names) - 1
    assert values["held_out_rows"] == 24
    assert values["general_rows"] == 12
    assert values["tasks"] == ["sums", "words"]
    assert [row[0] for row in report.rows()] == names
    assert {len(row) for row in report.rows()} == {len(report.columns())}
    assert report.summary
    assert "24 held-out rows of the tasks sums, words" in report.legend()
    assert any(f"seed {len(report.seeds)} of {len(report.seeds)}" in line for line in said)


def test_again_is_instant_and_equal(recipe, out):
    # after test_a_table: the stages are there
    first, _ = make("main", recipe, out)
    written = times(out)
    second, said = make("main", recipe, out)
    assert times(out) == written
    assert second.rows() == first.rows()
    assert second.summary == first.summary
    for line in said:
        assert "steps in" not in line


def test_what_the_methods_of_main_train(recipe, out):
    report, _ = make("main", recipe, out)
    trained = {entry.name: entry.results[0].trained_parameters for entry in report.entries}
    assert (
        trained["base"]
        == 0
        < trained["ESFT-Token"]
        < trained["FFT"]
        == report.entries[0].results[0].parameters
    )
    cells = {row[0]: row for row in report.rows()}
    columns = [name for name, _ in report.columns()]
    assert cells["FFT"][columns.index("share")] == "100.0%"
    assert cells["base"][columns.index("trained")] == ""
    assert columns[1:4] == ["sums", "words", "all tasks"]
    bytes_share = (
        report.entry("ESFT-Gate").results[0].optimizer_bytes
        / report.entry("FFT").results[0].optimizer_bytes
    )
    assert bytes_share == pytest.approx(trained["ESFT-Gate"] / trained["FFT"], rel=0.02)


def test_counts(recipe, out):
    report, _ = make("counts", recipe, out)
    assert [row[0] for row in report.rows()] == [
        "sums, gate",
        "sums, token",
        "words, gate",
        "words, token",
    ]
    (found,) = report.found
    stages = esft_tables.Stages(recipe, out, say=lambda text: None)
    for name, counts in zip(found.tasks, found.counts, strict=True):
        selection = stages.selection(*name.split(", "))
        assert counts == [len(selection.experts[layer]) for layer in found.layers]
    for name in ("counts.png", "counts-gate-mass.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "counts.json").read_text())["found"][0]["counts"] == found.counts


@pytest.mark.parametrize(
    "command, options, match",
    [
        ("table1", {}, "command must be one of main"),
        ("main", {"seeds": 0}, "seeds must be an integer of at least 1"),
        ("frontier", {"factors": (0.0, 1.0)}, "factor must be a number above 0, but got 0"),
        ("frontier", {"depths": (0.1, 0.1)}, "depth must have one or more different values"),
    ],
)
def test_bad_input_trains_nothing(command, options, match, recipe, tmp_path):
    with pytest.raises(ValueError, match=match):
        esft_tables.run(command, recipe, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_a_report_of_other_settings_is_not_replaced_unasked(recipe, out):
    before = (out / "main.json").read_bytes()
    with pytest.raises(ValueError, match=r"created with other settings \(seeds\).*overwrite=True"):
        make("main", recipe, out, seeds=2)
    assert (out / "main.json").read_bytes() == before


def other(report: EsftReport, change, **fields) -> EsftReport:
    """A report of other numbers: `change` makes the results of an entry."""
    entries = [Entry(entry.name, change(entry)) for entry in report.entries]
    names = ("command", "title", "source", "settings", "seeds", "reference", "summary", "extra")
    return EsftReport(entries=entries, **{name: getattr(report, name) for name in names} | fields)


def test_tasks_that_a_model_answers_have_a_column(recipe, out):
    report, _ = make("main", recipe, out, overwrite=True)
    assert not report.solved
    assert "exact match" in report.legend()
    assert "0 on sums, words" in report.legend()

    def solved(entry) -> list:
        (one,) = entry.results
        flags = [int(entry.name == "LoRA")] * 9 + [0] * 3
        tasks = one.tasks | {"sums": one.tasks["sums"]._replace(exact=flags)}
        return [one._replace(tasks=tasks, exact=flags + one.tasks["words"].exact)]

    some = other(report, solved)
    columns = [name for name, _ in some.columns()]
    rows = {row[0]: row for row in some.rows()}
    assert columns[1:5] == ["sums", "words", "exact sums", "all tasks"]
    assert {len(row) for row in rows.values()} == {len(columns)}
    assert rows["LoRA"][3] == "0.750+"
    assert rows["FFT"][3] == "0.000"
    assert "0 on words" in some.legend()
    values = some.to_dict()["methods"][2]
    assert values["seeds"][0]["tasks"]["sums"]["exact_match"] == 0.75
    assert values["exact_match"] == 0.375
