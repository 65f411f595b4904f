"""Each table of XFT from real, very small trainings: its contents, that it resumes after a kill,
and refusals.
"""

import functools
import math

import pytest

from moe_runtime.io.files import read_json
from papers.xft import tables as xft_tables
from tests.papers.reports import assert_compared, entries_of, made_by, rows_of
from tests.papers.xft.test_study import joined_stages
from tests.support.dist_launch import times
from tests.support.xft_study import write_study

pytestmark = pytest.mark.usefixtures("quick")
TRAINING = {
    "learning_rate": 3e-3,
    "batch_size": 16,
    "optimizer": "adamw_torch",
    "max_grad_norm": 1.0,
}
TWO_SEEDS = {"seeds": 2}
# name -> methods, options; tables that reuse stages of other tables come late
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
    "ensemble": (
        ["SFT", "SFT, other order", "ensemble of both", "merge of both", "MoE", "XFT"],
        {},
    ),
    "table1": (["base", "SFT", "EWA", "MoE", "XFT"], {}),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe file: a random base of two layers, sums to learn, a few steps of everything."""
    stages = {
        "sft": TRAINING | {"steps": 6},
        "tune": TRAINING | {"steps": 4},
    }
    # the first warmup step has a learning rate of 0
    mix = TRAINING | {"steps": 2, "learning_rate": 0.1}
    return write_study(
        tmp_path_factory.mktemp("recipe"),
        **stages,
        mix=mix,
    )


make = functools.partial(made_by, xft_tables.run)


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "table1")) for name in TABLES],
)
def test_a_table(command, recipe, out):
    names, options = TABLES[command]
    before = times(out)
    report, lines = make(
        command,
        recipe,
        out,
        **options,
    )
    assert entries_of(report) == names
    # nothing is trained twice
    assert times(out).items() >= before.items()
    assert (out / f"{command}.png").read_bytes().startswith(b"\x89PNG")
    values = read_json(out / f"{command}.json")
    for method, entry in zip(values["methods"], report.entries, strict=True):
        assert method["loss"] == entry.loss
        assert method["perplexity"] == pytest.approx(math.exp(entry.loss))
        for seed, result in zip(method["seeds"], entry.results, strict=True):
            folder = (out / seed["folder"]).parent
            stored = read_json(folder / "result.json")
            assert stored["loss"] == result.loss
            assert stored["losses"] == list(result.losses)
    assert_compared(report)
    assert values["held_out_rows"] == 20
    assert values["environment"]["packages"]["torch"]
    assert list(rows_of(report)) == names
    n = len(report.seeds)
    assert report.summary
    assert f"seed {n} of {n}" in "\n".join(lines)
    if command == "sweep-lambda":
        for result in report.entry("XFT, lambda 1").results:
            assert result.alpha == [[1, 0, 0, 0]] * len(result.alpha)
        for result in report.entry("XFT, lambda 0.5").results:
            assert [row[0] for row in result.alpha] == pytest.approx([0.5] * len(result.alpha))


@pytest.mark.slow
def test_the_experiments_of_few_examples(tmp_path, monkeypatch):
    stages = joined_stages(tmp_path, monkeypatch)
    report, _ = make("overfit", stages.recipe, stages.out)
    names = ["base"]
    for rate in ("0.0015", "0.003", "0.006"):
        names += [f"{kind}, {rate}" for kind in ("SFT", "SFT last", "EMA", "SWA")]
        for step in (" last", ""):
            names.append(f"MoE{step}, {rate}")
            names += [f"XFT{step}, {rate}, lambda {merge:g}" for merge in xft_tables.MERGES]
    assert entries_of(report) == names
    assert report.reference == "SFT last, 0.003"
    assert list(report.domains) == ["code", "prose", "arithmetic"]
    written = times(stages.out)
    report, _ = make("mix-rows", stages.recipe, stages.out)
    assert times(stages.out).items() >= written.items()
    names = ["SFT"]
    for key in ("router", "domain"):
        names += [f"by {key}: {n}" for n in ("INIT", "learned, own", "INIT, fewer")]
        names.append(f"by {key}: learned, held back")
    assert entries_of(report) == names
    assert min(report.extra["largest_move_of_alpha"].values()) > 0
