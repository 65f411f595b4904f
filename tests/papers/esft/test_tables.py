"""Each table of ESFT from real, very small trainings: what it holds, that nothing is trained twice,
and what it refuses.
"""

import json
import math
import re
import statistics

import pytest

from moe_runtime.modules import moe as modules_moe
from papers.engine import plots
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
TABLES = {
    "main": (["base", *METHODS], {}),
    "random-experts": (
        [
            "base",
            "ESFT-Token",
            "ESFT-Token, random experts",
            "ESFT-Gate",
            "ESFT-Gate, random experts",
        ],
        {},
    ),
    "sweep-p": (
        ["base", "FFT", "ESFT-Gate, p 0.05", "ESFT-Gate, p 0.3", "LoRA, rank 1", "LoRA, rank 2"],
        {"ps": (0.05, 0.3), "score": "gate", "ranks": (1, 2)},
    ),
    "shared-grid": (list(esft_tables.GRID), {}),
    "group-size": (
        [
            f"{method}, groups of {size}"
            for size in (1, 2)
            for method in ("FFT", "ESFT-Token", "ESFT-Gate")
        ],
        {},
    ),
    "mix-data": ([f"{method}, mix {mix}" for method in METHODS for mix in (0, 1)], {}),
}


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
    assert [entry.name for entry in report.entries] == names and isinstance(report, EsftReport)
    # nothing was trained twice
    assert all(times(out)[name] == written for name, written in before.items())
    assert (out / f"{command}.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((out / f"{command}.json").read_text())
    for method, entry in zip(values["methods"], report.entries, strict=True):
        for seed, result in zip(method["seeds"], entry.results, strict=True):
            folders = [(out / one["folder"]).parent for one in seed["tasks"].values()]
            parts = [json.loads((folder / "result.json").read_text()) for folder in folders]
            if entry.name not in ("base", "nothing (base)"):
                assert [loss for part in parts for loss in part["losses"]] == list(result.losses)
                mean = {
                    of: statistics.fmean(part[of] for part in parts)
                    for of in ("general_loss", "optimizer_bytes")
                }
                assert mean["general_loss"] == pytest.approx(result.general_loss)
                assert mean["optimizer_bytes"] == pytest.approx(result.optimizer_bytes, abs=1)
        assert (
            method["loss"] == entry.loss
            and method["general_loss"] == report.general.entry(entry.name).loss
        )
    losses = {
        entry.name: [result.general_losses for result in entry.results] for entry in report.entries
    }
    want = compare(losses, report.reference, report.entries[0].results[0].general_tokens)
    assert (
        report.general.comparisons == want and len(values["general_comparisons"]) == len(names) - 1
    )
    assert (
        values["held_out_rows"] == 24
        and values["general_rows"] == 12
        and values["tasks"] == ["sums", "words"]
    )
    assert [row[0] for row in report.rows()] == names and {len(row) for row in report.rows()} == {
        len(report.columns())
    }
    assert report.summary and "24 held-out rows of the tasks sums, words" in report.legend()
    assert any(f"seed {len(report.seeds)} of {len(report.seeds)}" in line for line in said)


@pytest.mark.slow
def test_models_are_judged_on_the_tasks_that_they_were_not_tuned_on(recipe, out):
    report, _ = make("other-tasks", recipe, out)
    assert [entry.name for entry in report.entries] == [
        "base",
        *METHODS,
    ] and report.reference == "base"
    stages = esft_tables.Stages(recipe, out, say=lambda text: None)
    base = stages.base()
    other = {"sums": "words", "words": "sums"}
    for task in recipe.tasks:
        assert report.entry("base").results[0].tasks[task].losses == base.tasks[other[task]].losses
        for name, tuned in (
            ("FFT", stages.fft(task, mix=0.0)),
            ("LoRA", stages.lora(task, mix=0.0)),
        ):
            found, *_ = stages._losses(stages._load_tuned(tuned.folder), f"{other[task]}-held_out")
            assert report.entry(name).results[0].tasks[task].losses == found != tuned.losses
    assert "on the others' rows" in report.legend() and len(report.summary) == 4
    with pytest.raises(ValueError, match="at least two tasks, but the recipe has only sums"):
        make(
            "other-tasks",
            recipe.from_dict(
                recipe.to_dict() | {"tasks": {"sums": recipe.tasks["sums"].to_dict()}}
            ),
            out,
        )


def test_the_lora_baseline_runs_in_our_kernels(recipe, out, monkeypatch):
    calls = []
    real = modules_moe.frozen_mlp
    monkeypatch.setattr(
        modules_moe, "frozen_mlp", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs)
    )
    stages = esft_tables.Stages(recipe.change(lora__training__steps=2), out, say=lambda text: None)
    stages.lora("sums", rank=3)
    # two layers of experts in each of two steps, and wherever the model is judged
    assert len(calls) >= 2 * 2


def test_again_is_instant_and_equal(recipe, out):
    # after test_a_table: the stages are there
    first, _ = make("main", recipe, out)
    written = times(out)
    second, said = make("main", recipe, out)
    assert (
        times(out) == written and second.rows() == first.rows() and second.summary == first.summary
    )
    assert not any("steps in" in line for line in said)


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
    assert (
        cells["FFT"][columns.index("share")] == "100.0%"
        and cells["base"][columns.index("trained")] == ""
    )
    assert columns[1:4] == ["sums", "words", "all tasks"]
    bytes_share = (
        report.entry("ESFT-Gate").results[0].optimizer_bytes
        / report.entry("FFT").results[0].optimizer_bytes
    )
    assert bytes_share == pytest.approx(trained["ESFT-Gate"] / trained["FFT"], rel=0.02)


def test_drawn_experts_are_as_many_and_others(recipe, out):
    report, _ = make("random-experts", recipe, out)
    chosen, drawn = (
        report.entry(name).results[0] for name in ("ESFT-Gate", "ESFT-Gate, random experts")
    )
    counts = [
        {task: {n: len(ids) for n, ids in one.experts.items()} for task, one in r.tasks.items()}
        for r in (chosen, drawn)
    ]
    assert counts[0] == counts[1] and chosen.trained_parameters == drawn.trained_parameters
    assert any(chosen.tasks[task].experts != drawn.tasks[task].experts for task in recipe.tasks)
    said = [line.partition(" against ")[0] for line in report.summary]
    assert said == ["ESFT-Token, random experts", "ESFT-Gate, random experts"]


# Table 3: 15.7B, 1.85B, 1.4B, 450M, 1.3B, 2.7B, none, in this order of size
def test_the_grid_trains_what_table_3_says(recipe, out):
    report, _ = make("shared-grid", recipe, out)
    size = {entry.name: entry.results[0].trained_parameters for entry in report.entries}
    relevant = size["relevant"]
    shared = size["shared"]
    others = size["shared, others"] - shared
    assert size["relevant, shared"] == relevant + shared
    assert size["relevant, shared, others"] == relevant + shared + others
    assert (
        size["all experts, shared, others"] == report.entries[0].results[0].parameters
        and size["nothing (base)"] == 0
    )
    assert (
        report.entry("nothing (base)").loss == make("main", recipe, out)[0].entry("base").losses[0]
    )


def test_what_trains_with_all_else_is_tuned_as_fft(recipe, out):
    stages = esft_tables.Stages(recipe.change(fft__learning_rate=2e-3), out, say=lambda text: None)
    rates = {}
    for flag in (False, True):
        made = stages.esft("sums", stages.selection("sums", "token", non_expert_modules=flag))
        made_of = json.loads((made.folder.parent / "result.json").read_text())["made_of"]
        rates[flag] = made_of["settings"]["training"]["learning_rate"]
    assert rates == {False: recipe.esft.learning_rate, True: 2e-3}


def test_a_sweep_trains_more_and_more(recipe, out):
    report, _ = make("sweep-p", recipe, out, **TABLES["sweep-p"][1])
    x = report.extra["x"]
    assert x["ESFT-Gate, p 0.05"] < x["ESFT-Gate, p 0.3"] and x["LoRA, rank 2"] == pytest.approx(
        2 * x["LoRA, rank 1"]
    )
    assert report.extra["x_log"] and "FFT" not in x


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
    page = (out / "counts.html").read_text()
    assert "<h2>words</h2>" in page and "turn " in re.sub("<[^>]*>", "", page)
    for name in ("counts.png", "counts-gate-mass.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "counts.json").read_text())["found"][0]["counts"] == found.counts


def test_overlap_and_sample_size(recipe, out):
    report, _ = make("overlap", recipe, out, top=3, seeds=2)
    assert len(report.found) == 2 and all(one.top == 3 for one in report.found)
    mean = statistics.fmean(one.shared[0][1] for one in report.found)
    assert report.rows()[0] == (
        "sums",
        f"{statistics.fmean(one.shared[0][0] for one in report.found):.2f}",
        f"{mean:.2f}",
    )
    report, _ = make("sample-size", recipe, out, sizes=(32, 8), top=3)
    assert [name for name, _ in report.columns()] == ["task", "8", "32"] and len(report.rows()) == 2
    assert all(0 <= value <= 3 for row in report.found[0].shared for value in row)
    written = times(out)
    again, _ = make("sample-size", recipe, out, sizes=(8, 32), top=3)
    assert again.rows() == report.rows() and times(out) == written
    with pytest.raises(
        ValueError,
        match="sizes must be at most .*, the tokens in half of the examples of '.*', but got 512",
    ):
        make("sample-size", recipe, out, overwrite=True)


@pytest.mark.parametrize(
    "command, options, match",
    [
        pytest.param("table1", {}, "command must be one of main", id="no such table"),
        pytest.param("main", {"seeds": 0}, "seeds must be an integer of at least 1", id="no seeds"),
        pytest.param(
            "sweep-p", {"ps": (0.1, 1.5)}, "p must be above 0 and at most 1", id="p above 1"
        ),
        pytest.param(
            "sweep-p", {"ps": (0.1, 0.1)}, "p must have one or more different values", id="p twice"
        ),
        pytest.param("sweep-p", {"ps": (math.nan,)}, "p must be", id="p is no number"),
        pytest.param(
            "sweep-p", {"ranks": (0,)}, "rank must be an integer of at least 1", id="rank"
        ),
        pytest.param(
            "sweep-p", {"score": "both of"}, "score must be one of gate, token, both", id="score"
        ),
        pytest.param(
            "shared-grid", {"score": "both"}, "score must be one of gate, token", id="grid's score"
        ),
        pytest.param(
            "group-size",
            {"sizes": (1, 4)},
            "must divide num_experts .8. and top_k .2., but got 4",
            id="groups",
        ),
        pytest.param(
            "group-size",
            {"sizes": ()},
            "group_size must have one or more different values, but got none",
            id="no group",
        ),
        pytest.param(
            "mix-data", {"ratios": (-1.0,)}, "mix must be a number of at least 0", id="mix"
        ),
        pytest.param(
            "sample-size", {"sizes": (0,)}, "sizes must be an integer of at least 1", id="sizes"
        ),
        pytest.param("overlap", {"top": 0}, "top must be an integer of at least 1", id="top"),
        pytest.param(
            "frontier",
            {"factors": (0.0, 1.0)},
            "factor must be a number above 0, but got 0",
            id="factor",
        ),
        pytest.param(
            "frontier",
            {"depths": (0.1, 0.1)},
            "depth must have one or more different values",
            id="depth twice",
        ),
    ],
)
def test_bad_input_trains_nothing(command, options, match, recipe, tmp_path):
    with pytest.raises(ValueError, match=match):
        esft_tables.run(command, recipe, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_the_tiny_study_allows_the_papers_group_sizes():
    tiny = load_recipe("tiny")
    assert esft_tables.COMMANDS["group-size"].check(tiny) == {"sizes": (1, 2, 4)}
    assert esft_tables.COMMANDS["sweep-p"].check(tiny)["ranks"] == (1, 2, 8)
    with pytest.raises(
        ValueError, match="top must be at most the 32 routed experts of a layer, but got 33"
    ):
        esft_tables.COMMANDS["overlap"].check(tiny, top=33)


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
    assert (
        not report.solved
        and "exact match" in report.legend()
        and "0 on sums, words" in report.legend()
    )

    def solved(entry) -> list:
        (one,) = entry.results
        flags = [int(entry.name == "LoRA")] * 9 + [0] * 3
        tasks = one.tasks | {"sums": one.tasks["sums"]._replace(exact=flags)}
        return [one._replace(tasks=tasks, exact=flags + one.tasks["words"].exact)]

    some = other(report, solved)
    columns = [name for name, _ in some.columns()]
    rows = {row[0]: row for row in some.rows()}
    assert columns[1:5] == ["sums", "words", "exact sums", "all tasks"] and {
        len(row) for row in rows.values()
    } == {len(columns)}
    assert (
        rows["LoRA"][3] == "0.750+" and rows["FFT"][3] == "0.000" and "0 on words" in some.legend()
    )
    values = some.to_dict()["methods"][2]
    assert (
        values["seeds"][0]["tasks"]["sums"]["exact_match"] == 0.75
        and values["exact_match"] == 0.375
    )


def test_two_seeds_have_a_spread(recipe, out, tmp_path):
    report, _ = make("main", recipe, out, overwrite=True)

    def second(entry) -> list:
        (one,) = entry.results
        more = {
            "general_loss": one.general_loss + 1,
            "general_losses": [loss + 1 for loss in one.general_losses],
        }
        return [one, one._replace(**more, trained_parameters=one.trained_parameters + 10)]

    both = other(report, second, seeds=(0, 1))
    fft = both.general.entry("FFT")
    assert fft.loss == pytest.approx(
        report.general.entry("FFT").loss + 0.5
    ) and fft.sd == pytest.approx(0.5**0.5)
    methods = both.to_dict()["methods"]
    assert [len(method["seeds"]) for method in methods] == [2] * 5 and methods[1][
        "general_loss"
    ] == fft.loss
    assert methods[1]["trained_parameters"] == report.entry("FFT").results[0].trained_parameters + 5
    assert "±" in both.rows()[1][7] and "2 seeds" in both.legend()
    plots.save(plots.dots(both), tmp_path / "two.png")


def test_a_method_that_diverged_on_general_text(recipe, out, tmp_path):
    report, _ = make("main", recipe, out, overwrite=True)
    nan = {"general_losses": [math.nan] * 12, "general_loss": math.nan}
    bad = other(
        report,
        lambda entry: [r._replace(**nan) if entry.name == "LoRA" else r for r in entry.results],
    )
    plots.save(plots.dots(bad), tmp_path / "nan.png")
    assert (
        bad.general.comparison("LoRA").verdict == "not finite"
        and bad.comparisons == report.comparisons
    )
    assert bad.to_dict()["methods"][2]["general_loss"] is None


def test_tasks_beyond_three_have_no_columns(recipe, out):
    report, _ = make("main", recipe, out, overwrite=True)
    many = other(
        report,
        lambda e: [
            r._replace(tasks={str(i): r.tasks["sums"] for i in range(4)}) for r in e.results
        ],
    )
    assert [name for name, _ in many.columns()][:2] == ["method", "all tasks"]
    assert {len(row) for row in many.rows()} == {len(many.columns())} and list(
        many.to_dict()["tasks"]
    ) == list("0123")
