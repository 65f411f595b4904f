"""Each table of ESFT from real, very small trainings: its contents, that nothing is trained twice,
and refusals.
"""

import functools
import statistics

import pytest

from moe_runtime.io.files import read_json
from papers.esft import tables as esft_tables
from papers.esft.recipe import load_recipe
from tests.papers.reports import assert_compared, assert_made_once, entries_of, made_by, rows_of
from tests.support.esft_study import write_study

pytestmark = pytest.mark.usefixtures("quick")
METHODS = (
    "FFT",
    "LoRA",
    "ESFT-Token",
    "ESFT-Token, random experts",
    "ESFT-Gate",
    "ESFT-Gate, random experts",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return load_recipe(write_study(tmp_path_factory.mktemp("study"))).change(evaluations=1)


make = functools.partial(made_by, esft_tables.run)


@pytest.fixture(scope="module")
def main(recipe, out):
    """The table of all methods, which runs first."""
    report, _ = make("main", recipe, out)
    return report


@pytest.mark.slow
def test_main(main, recipe, out):
    assert entries_of(main) == ["base", *METHODS]
    assert (out / "main.png").read_bytes().startswith(b"\x89PNG")
    values = read_json(out / "main.json")
    for method, entry in zip(values["methods"], main.entries, strict=True):
        assert method["loss"] == entry.loss
        assert method["general_loss"] == main.general.entry(entry.name).loss
        if entry.name != "base":
            assert_of_stages(
                out,
                method["seeds"][0],
                entry.results[0],
            )
    assert_compared(main.general)
    assert len(values["general_comparisons"]) == len(METHODS)
    assert values["held_out_rows"] == 24
    assert values["general_rows"] == 12
    assert values["tasks"] == ["sums", "words"]
    assert list(rows_of(main)) == ["base", *METHODS]
    assert main.summary
    assert "24 held-out rows of the tasks sums, words" in main.legend()
    assert_made_once(make, main, recipe, out)


def assert_of_stages(out, seed: dict, result) -> None:
    """Assert that a method's numbers equal those of its stages, task by task."""
    parts = []
    losses = []
    for task in seed["tasks"].values():
        parts.append(read_json((out / task["folder"]).parent / "result.json"))
        losses += parts[-1]["losses"]
    assert losses == list(result.losses)
    general = statistics.fmean(part["general_loss"] for part in parts)
    assert general == pytest.approx(result.general_loss)
    optimizer = statistics.fmean(part["optimizer_bytes"] for part in parts)
    assert optimizer == pytest.approx(result.optimizer_bytes, abs=1)


def test_what_the_methods_of_main_train(main):
    results = {entry.name: entry.results[0] for entry in main.entries}
    trained = {name: result.trained_parameters for name, result in results.items()}
    assert trained["base"] == 0 < trained["ESFT-Token"] < trained["FFT"]
    assert trained["FFT"] == results["base"].parameters
    assert trained["ESFT-Token"] == trained["ESFT-Token, random experts"]
    assert "sums, by token scores: " in "\n".join(main.summary)


def test_a_selection_of_all_experts_is_refused(recipe, out):
    stages = esft_tables.EsftStages(recipe.change(p__gate=0.9999), out, say=lambda text: None)
    with pytest.raises(ValueError, match=r"p.gate = 0.9999 selects all 8 routed experts.*sums"):
        stages.selection("sums", "gate")


def test_counts(recipe, out):
    report, _ = make("counts", recipe, out)
    names = ["sums, gate", "sums, token", "words, gate", "words, token"]
    assert list(rows_of(report)) == names
    (counted,) = report.found
    stages = esft_tables.EsftStages(recipe, out, say=lambda text: None)
    for name, counts in zip(counted.tasks, counted.counts, strict=True):
        selection = stages.selection(*name.split(", "))
        assert counts == [len(selection.experts[layer]) for layer in counted.layers]
    for name in ("counts.png", "counts-gate-mass.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert read_json(out / "counts.json")["found"][0]["counts"] == counted.counts
