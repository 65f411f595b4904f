"""A table marks methods that had another budget than its reference."""

import json

import pytest

from papers.engine.fairness import budget_of
from tests.papers.test_tables import report_of


def stage(out, name, steps=0, parents=(), of=None, **training):
    """Write a stage's record and return its folder."""
    training = {"batch_size": 8, "schedule": "linear"} | training
    made_of = {"settings": {"training": training, "of": of}, "parents": parents}
    folder = out / name
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps({"steps": steps, "made_of": made_of}))
    return folder


def test_a_budget_is_that_of_all_stages_but_the_base(tmp_path):
    stage(tmp_path, "base-0", 2000)
    stage(tmp_path, "moe-0", 52, ["base-0"])
    mix = stage(tmp_path, "mix-0", 8, ["moe-0", "moe-0"], schedule="constant")
    assert budget_of(mix) == (60, 480, "constant and linear", "last step")
    assert budget_of(tmp_path / "none") is None
    stage(tmp_path, "sft-0", 52, ["base-0"], keep_best=True)
    for kind, weights in (("ema", "EMA"), ("last", "last step")):
        average = stage(tmp_path, f"average-{kind}", parents=["sft-0"], of=kind)
        assert budget_of(average) == (52, 416, "linear", weights)


@pytest.mark.parametrize(
    "other, text",
    [
        ({}, ""),
        ({"steps": 40}, "steps 40 against 120, examples 320 against 960"),
        ({"batch_size": 4}, "examples 480 against 960"),
        ({"schedule": "constant"}, "schedule constant against linear"),
        ({"keep_best": True}, "weights best step against last step"),
    ],
)
def test_an_unfair_comparison_is_marked(tmp_path, other, text):
    stage(tmp_path, "sft-0", 120)
    stage(tmp_path, "xft-0", **{"steps": 120} | other)
    report = report_of("table1")
    for entry, name in zip(report.entries, ("sft-0", "xft-0"), strict=True):
        entry.results[0] = entry.results[0]._replace(folder=tmp_path / name / "model")
    report.__post_init__()
    assert report.unequal == ({"XFT": text} if text else {})
    assert [row[0] for row in report.rows()] == ["SFT", "XFT ≠" if text else "XFT"]
    assert report.to_dict()["other_budgets"] == report.unequal
    line = f"≠ XFT had another budget than SFT: {text}"
    assert report.fairness() == [line] * bool(text)
