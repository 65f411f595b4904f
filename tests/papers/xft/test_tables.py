"""Each table of XFT from real, very small trainings: what it holds, that it goes on after a kill,
and what it refuses.
"""

import json
import math
from pathlib import Path

import pytest

from papers.engine import plots, tables
from papers.engine.compare import compare
from papers.engine.tables import Entry, Report
from papers.xft import tables as xft_tables
from papers.xft.recipe import load_recipe
from papers.xft.study import Result
from tests.papers.xft.test_study import joined_stages
from tests.support.dist_launch import killed, times
from tests.support.xft_study import write_study

pytestmark = pytest.mark.usefixtures("quick")
TRAINING = {
    "learning_rate": 3e-3,
    "batch_size": 16,
    "optimizer": "adamw_torch",
    "max_grad_norm": 1.0,
}
TWO_SEEDS = {"seeds": 2}
# name -> methods, options; the tables whose stages the others hold too come late
TABLES = {
    "sweep-lambda": (
        ["SFT", "MoE", "XFT, lambda 0.5", "XFT, lambda 1"],
        TWO_SEEDS | {"shared_rates": (0.5, 1.0)},
    ),
    "ablate-gate": (
        [
            "SFT",
            "MoE (xft)",
            "no normalization (nonorm)",
            "no shared expert (topk_softmax)",
            "no shared expert (softmax_topk)",
        ],
        {},
    ),
    "table1": (["base", "SFT", "EWA", "MoE", "XFT"], {}),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe file: a random base of two layers, sums to learn, a few steps of everything."""
    stages = {"sft": TRAINING | {"steps": 6}, "tune": TRAINING | {"steps": 4}}
    mix = TRAINING | {"steps": 2, "learning_rate": 0.1}  # the first step of a warmup moves nothing
    return write_study(tmp_path_factory.mktemp("recipe"), **stages, mix=mix)


def make(command, recipe, out, **options):
    said = []
    report = xft_tables.run(command, recipe, out, say=said.append, **{"seeds": 1} | options)
    return report, said


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "table1")) for name in TABLES],
)
def test_a_table(command, recipe, out):
    names, options = TABLES[command]
    before = times(out)
    report, said = make(command, recipe, out, **options)
    assert [entry.name for entry in report.entries] == names
    # nothing was trained twice
    for name, written in before.items():
        assert times(out)[name] == written
    assert (out / f"{command}.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((out / f"{command}.json").read_text())
    for method, entry in zip(values["methods"], report.entries, strict=True):
        stored = [
            json.loads((out / seed["folder"]).parent.joinpath("result.json").read_text())
            for seed in method["seeds"]
        ]
        assert [one["loss"] for one in stored] == entry.losses
        assert method["loss"] == entry.loss
        assert [one["losses"] for one in stored] == [
            list(result.losses) for result in entry.results
        ]
        assert method["perplexity"] == pytest.approx(math.exp(method["loss"]))
    losses = {entry.name: [result.losses for result in entry.results] for entry in report.entries}
    assert report.comparisons == compare(
        losses, report.reference, report.entries[0].results[0].tokens
    )
    assert values["held_out_rows"] == 20
    assert values["environment"]["packages"]["torch"]
    assert [row[0] for row in report.rows()] == names
    assert {len(row) for row in report.rows()} == {len(report.columns())}
    n = len(report.seeds)
    assert report.summary
    assert any(f"seed {n} of {n}" in line for line in said)


@pytest.mark.slow
def test_the_experiments_of_few_examples(tmp_path, monkeypatch):
    stages = joined_stages(tmp_path, monkeypatch)
    report, _ = make("overfit", stages.recipe, stages.out)
    rates = ("0.0015", "0.003", "0.006")
    kinds = ("SFT", "EMA", "SWA", "MoE", "XFT")
    names = [f"{kind}, {rate}" for rate in rates for kind in kinds]
    assert [entry.name for entry in report.entries] == names + [
        f"XFT, 0.003, lambda {rate}" for rate in ("0", "0.25", "0.5")
    ]
    assert report.reference == "SFT, 0.003"
    assert list(report.domains) == [
        "code",
        "prose",
        "arithmetic",
    ]
    by_validation = {
        kind: min(
            (f"{kind}, {rate}" for rate in rates),
            key=lambda name: report.entry(name).results[0].validation,
        )
        for kind in kinds
    }
    others = ("SFT", "EMA", "SWA")
    said = [f"{kind}, {rate} against XFT, {rate}" for rate in rates for kind in others]
    said += [f"{by_validation[kind]} against {by_validation['XFT']}" for kind in others]
    assert [line.partition(":")[0] for line in report.summary if " against " in line] == said
    written = times(stages.out)
    report, _ = make("mix-rows", stages.recipe, stages.out)
    assert all(times(stages.out)[name] == when for name, when in written.items())
    four = "INIT", "learned, own", "INIT, fewer", "learned, held back"
    assert [entry.name for entry in report.entries] == [
        "SFT",
        *(f"by {way}: {n}" for way in ("router", "domain") for n in four),
    ]
    assert len(report.summary) == 12
    assert min(report.extra["largest_move_of_alpha"].values()) > 0
    assert (
        report.entry("SFT").results[0].losses == stages.by_domain(stages.sft(averages=True)).losses
    )
    with_one_domain, _ = make(
        "mix-rows",
        stages.recipe.change(data__train=str(tmp_path / "rows.jsonl")),
        tmp_path / "other",
    )
    assert len(with_one_domain.entries) == 5


def test_lambda_one_ignores_the_other_experts(recipe, out):
    report, _ = make("sweep-lambda", recipe, out, overwrite=True, **TABLES["sweep-lambda"][1])
    for result in report.entry("XFT, lambda 1").results:
        for row in result.alpha:
            assert row == [1, 0, 0, 0]
    for result in report.entry("XFT, lambda 0.5").results:
        for row in result.alpha:
            assert row[0] == pytest.approx(0.5)


def test_with_two_experts_per_token_the_gate_without_normalization_is_the_full_one(recipe, out):
    two = load_recipe(recipe).change(experts={"num_experts": 4, "top_k": 2})
    report, _ = make("ablate-gate", two, out, overwrite=True)
    one = report.comparison("no normalization (nonorm)")
    assert one.difference == pytest.approx(0, abs=1e-5)
    assert one.verdict == "no difference found"


KILLED = """
import sys
from papers.xft import tables as xft_tables
xft_tables.run("sweep-lambda", sys.argv[1], sys.argv[2], seeds=1, shared_rates=(0.5, 1.0))
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_as_one_that_was_not(recipe, out, tmp_path):
    killed(KILLED, recipe, tmp_path, when=lambda: list(tmp_path.glob("sft-*/result.json")))
    assert not (tmp_path / "sweep-lambda.json").exists()
    finished = times(tmp_path)
    assert len(finished) < 5
    options = {"shared_rates": (0.5, 1.0)}
    resumed, _ = make("sweep-lambda", recipe, tmp_path, **options)
    assert {name: times(tmp_path)[name] for name in finished} == finished
    assert len(times(tmp_path)) == 5
    whole, _ = make("sweep-lambda", recipe, out, overwrite=True, **options)
    assert [entry.losses for entry in resumed.entries] == [entry.losses for entry in whole.entries]
    assert resumed.comparisons == whole.comparisons
    assert resumed.summary == whole.summary


@pytest.mark.parametrize(
    "command, options, match",
    [
        ("table2", {}, "command must be one of table1"),
        ("table1", {"seeds": 0}, "seeds must be an integer of at least 1"),
        ("sweep-lambda", {"shared_rates": (0.5, 1.5)}, "lambda must be"),
        ("sweep-lambda", {"shared_rates": (math.nan,)}, "lambda must be"),
        ("sweep-lambda", {"shared_rates": (0.5, 0.5)}, "lambda must have .*different values"),
    ],
)
def test_bad_input_trains_nothing(command, options, match, recipe, tmp_path):
    with pytest.raises(ValueError, match=match):
        xft_tables.run(command, recipe, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", TABLES)
def test_a_recipe_without_shared_expert_is_refused(command, recipe, tmp_path):
    vanilla = load_recipe(recipe).change(
        experts={"num_experts": 4, "top_k": 3, "gate": "topk_softmax"}
    )
    with pytest.raises(ValueError, match="gate must be .*but got 'topk_softmax'"):
        xft_tables.run(command, vanilla, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_report_of_other_settings_is_not_replaced_unasked(recipe, out):
    make("sweep-lambda", recipe, out, overwrite=True, **TABLES["sweep-lambda"][1])
    before = (out / "sweep-lambda.json").read_bytes()
    with pytest.raises(
        ValueError, match=r"created with other settings \(shared_rates\).*overwrite=True"
    ):
        make("sweep-lambda", recipe, out, seeds=2, shared_rates=(0.5,))
    assert (out / "sweep-lambda.json").read_bytes() == before
    report, _ = make("sweep-lambda", recipe, out, shared_rates=(0.5,), overwrite=True)
    assert [entry.name for entry in report.entries] == ["SFT", "MoE", "XFT, lambda 0.5"]


# what follows is about the report alone: numbers made up, no model
def result(name, losses, **changes) -> Result:
    tokens = [10 + i for i in range(len(losses))]
    loss = sum(loss * count for loss, count in zip(losses, tokens)) / sum(tokens)
    values = {
        "name": name,
        "folder": Path(f"out/{name}-0/model"),
        "loss": loss,
        "losses": losses,
        "tokens": tokens,
        "steps": 4,
        "seconds": 2.0,
        "total_seconds": 3.0,
        "parameters": 10,
        "active_parameters": 10,
        "history": [(2, 2.0), (4, 1.5)],
        "alpha": None,
        "steps_per_second": 2.0,
    }
    return Result(**values | changes)


def report_of(losses: dict, **fields) -> Report:
    entries = [
        Entry(name, [result(name, rows) for rows in seeds]) for name, seeds in losses.items()
    ]
    seeds = tuple(range(len(entries[0].results)))
    values = {
        "command": "table1",
        "title": "t",
        "source": "s",
        "settings": {},
        "reference": "SFT",
    } | fields
    return Report(seeds=seeds, entries=entries, **values)


ROWS = [1.0 + i / 20 for i in range(20)]


def test_a_method_that_diverged_is_said_drawn_and_written(tmp_path):
    report = report_of(
        {"SFT": [ROWS, ROWS], "bad": [[math.nan] * 20, ROWS], "huge": [[800.0] * 20, [900.0] * 20]}
    )
    assert report.comparison("bad").verdict == "not finite"
    assert math.isnan(report.entry("bad").sd)
    assert report.rows()[1][-3:] == ("", "", "not finite")
    assert report.entry("huge").perplexity == math.inf
    assert "not finite" in tables.verdict(report, "bad")
    assert "gained" not in tables.verdict(report, "bad")
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["methods"][1]["loss"] is None
    assert values["comparisons"][0]["difference"] is None
    for draw in (plots.dots, plots.curves):
        plots.save(draw(report), tmp_path / "bad.png")


@pytest.mark.parametrize(
    "shift, word",
    [(-0.1, "XFT gained"), (0.1, "did not help here"), (0.0, "shows no gain here")],
    ids=["-", "+", "0"],
)
def test_what_is_said_about_the_result(shift, word):
    report = report_of({"SFT": [ROWS], "XFT": [[loss + shift for loss in ROWS]]})
    assert tables.verdict(report, "XFT").count(word) == 1


def test_one_seed_has_no_spread(tmp_path):
    report = report_of({"SFT": [ROWS], "XFT": [ROWS]})
    assert "±" not in report.rows()[0][1]
    assert "one seed" in report.legend()
    plots.save(plots.dots(report), tmp_path / "a" / "one.png")
    assert (tmp_path / "a" / "one.png").stat().st_size > 1000


def test_methods_judged_on_other_rows_are_refused():
    entries = [
        Entry("SFT", [result("SFT", ROWS)]),
        Entry("XFT", [result("XFT", ROWS, tokens=[5] * 20)]),
    ]
    with pytest.raises(ValueError, match="different held-out examples"):
        Report(
            command="table1",
            title="t",
            source="s",
            settings={},
            seeds=(0,),
            entries=entries,
            reference="SFT",
        )
