"""papers.esft.frontier: results of trainings evaluated at several points, which examples choose,
and the report of real, small trainings.
"""

import json
import math
from pathlib import Path

import pytest

from papers.engine import plots
from papers.engine.compare import compare
from papers.engine.tables import Entry
from papers.esft import frontier
from papers.esft.frontier import Course, Frontier, curve, general_at
from tests.papers.reports import columns_of

pytestmark = pytest.mark.usefixtures("quick")
TASK = (2.0, 1.5, 1.0)
ROWS = 8


def course(general=(3.0, 3.2, 3.6), validation=None, task=TASK, rate=0.1, spread=0.0) -> Course:
    """Return a course of three points; general example r is `spread` r higher from the first step
    on.
    """
    history = []
    for i in range(3):
        losses = {
            "task-validation": [task[i]],
            "task-held_out": [task[i]],
        }
        for kind, means in (("validation", validation or general), ("held_out", general)):
            step = spread * (i > 0)
            losses[f"general-{kind}"] = [means[i] + step * row for row in range(ROWS)]
        history.append((10 * i, losses))
    tokens = {name: [2] * len(losses) for name, losses in history[0][1].items()}
    return Course(
        "c",
        Path("c"),
        rate,
        task[-1],
        [1],
        1.0,
        12,
        history,
        tokens,
    )


@pytest.mark.parametrize(
    "depth, value",
    [
        (0.25, 3.1),
        (0.5, 3.2),
        (0.75, 3.4),
        (1.0, 3.6),
    ],
)
def test_a_level_lies_between_two_points(depth, value):
    assert course().at(depth, "held_out") == pytest.approx([value] * ROWS)
    both = Entry("a", [course(), course((3.0, 3.4, 3.8))])
    assert general_at(both, depth) == pytest.approx(value + 0.1 * min(depth / 0.5, 1))
    assert curve(both)[1] == pytest.approx((10, 1.5, 3.3))


@pytest.mark.parametrize(
    "task", [(2.0, 1.9, 1.8), (2.0, math.nan, math.nan)], ids=["shallow", "diverged"]
)
def test_a_level_is_reached_only_if_every_seed_reaches_it(task):
    assert course(task=task).at(0.5, "held_out") is None
    assert general_at(Entry("a", [course(), course(task=task)]), 0.5) == math.inf
    # the level was reached before the loss rose again
    assert course(task=(2.0, 1.0, 1.9)).at(0.5, "held_out") == pytest.approx([3.1] * ROWS)


def report_of(**ladders) -> Frontier:
    entries = {}
    for name, ladder in ladders.items():
        entries[name.replace("_", "-")] = [Entry("x", [one]) for one in ladder]
    return Frontier(
        command="frontier",
        title="t",
        source="s",
        settings={},
        seeds=(0,),
        task="sums",
        depths=(0.5, 1.0),
        ladders=entries,
    )


def test_validation_rows_select_and_held_out_rows_evaluate(tmp_path):
    worse = course(
        (3.0, 3.5, 4.0),
        validation=(3.0, 3.1, 3.3),
        rate=0.3,
        spread=0.01,
    )
    shallow = course(task=(2.0, 1.4, 1.2))
    report = report_of(
        ESFT_Token=[course(rate=0.1), course((3.0, 3.1, 3.2), (3.0, 4.0, 5.0))],
        LoRA=[course(), worse],
        FFT=[shallow],
    )
    half = report.chosen[0.5]
    assert half["LoRA"].results == [worse]
    assert half["ESFT-Token"].results[0].rate == 0.1
    assert list(report.chosen[1.0]) == ["ESFT-Token", "LoRA"]
    losses = {
        "ESFT-Token": [course().at(0.5, "held_out")],
        "LoRA": [worse.at(0.5, "held_out")],
        "FFT": [shallow.at(0.5, "held_out")],
    }
    assert report.comparisons[0.5] == compare(losses, "ESFT-Token", [2] * ROWS)
    rows = {(row[0], row[3], row[4]) for row in report.rows()}
    assert ("LoRA", "3.5350*+", "4.0350*+") in rows
    assert ("ESFT-Token", "3.2000*", "3.6000*") in rows
    assert ("LoRA", "3.2000", "3.6000") in rows
    assert {deep for name, _, deep in rows if name == "FFT"} == {""}
    columns_of(report)
    lines = frontier.summary(report)
    assert "LoRA +0.3350 [" in lines[0]
    assert "higher" in lines[0]
    assert "FFT" not in lines[1]
    plots.save(frontier.picture(report), tmp_path / "a.png")
    values = json.loads(json.dumps(report.to_dict()))
    assert values["comparisons"]["0.5"][0]["verdict"] == "higher"
    assert values["ladders"]["FFT"]["0.1"][1][1] is None
