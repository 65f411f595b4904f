"""papers/summary.py: which settings and controls count, and what the seeds say."""

import json
from pathlib import Path

import pytest

from papers.summary import picture, row_of, write

ROOT = Path(__file__).resolve().parents[2]


def method(name: str, losses: list[float], validation: list[float] | None = None) -> dict:
    seeds = []
    for number, loss in enumerate(losses):
        seeds.append({"loss": loss})
        if validation:
            seeds[-1]["validation"] = validation[number]
    return {"name": name, "seeds": seeds}


OVERFIT = [
    method("base", [0.1, 0.1], [0.1, 0.1]),
    method("MoE, 0.1", [0.1, 0.1], [0.1, 0.1]),
    method("SFT last, 0.1", [0.9, 0.7], [0.1, 0.1]),
    method("SWA, 0.1", [0.5, 0.7], [9.0, 9.0]),
    method("XFT last, 0.1, lambda 0.5", [0.1, 0.1], [0.1, 0.1]),
    method("XFT, 0.1, lambda 0.5", [0.1, 0.1], [0.8, 0.8]),
    method("XFT, 0.1, lambda 0.9", [0.4, 0.8], [0.7, 0.7]),
]
BUDGET = [
    method("base", [0.1, 0.1]),
    method("SFT", [0.5, 0.5]),
    method("SFT, epochs: 1", [0.3, 0.3]),
    method("UpIT, stage 1 annealed", [0.1, 0.1]),
    method("UpIT", [0.4, 0.5]),
]
FRONTIER = {
    "0.12": [{"name": "FFT", "difference": 0.1, "by_seed": [0.1, 0.1]}],
    "0.15": [
        {"name": "ESFT-Gate", "difference": -0.1, "by_seed": [-0.1, -0.1]},
        {"name": "FFT", "difference": 0.3, "by_seed": [0.2, 0.4]},
        {"name": "LoRA, rank 2", "difference": 0.5, "by_seed": [0.5, 0.5]},
    ],
    "0.18": [],
}


@pytest.fixture
def reports(tmp_path):
    """The JSON files of three tables."""
    tables = {
        "overfit": {"methods": OVERFIT},
        "budget": {"methods": BUDGET},
        "frontier": {"ladders": {}, "comparisons": FRONTIER},
    }
    paths = []
    for name, table in tables.items():
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps({"command": name} | table))
    return paths


def test_validation_chooses_ours_and_held_out_rows_the_control(reports):
    overfit, budget, frontier = map(row_of, reports)
    assert overfit.ours == "XFT, 0.1, lambda 0.9: 0.6000"
    assert overfit.best_control == "SWA, 0.1: 0.6000"
    assert overfit.differences == pytest.approx([-0.1, 0.1])
    assert budget.best_control == "SFT, epochs: 1: 0.3000"
    assert budget.differences == pytest.approx([0.1, 0.2])
    assert frontier.task.endswith("0.15 below the base's")
    assert frontier.best_control == "FFT"
    assert frontier.differences == [-0.2, -0.4]
    verdicts = [one.verdict for one in (overfit, budget, frontier)]
    assert verdicts == ["undecided", "worse with every seed", "better with every seed"]
    assert frontier._replace(differences=[-0.2]).verdict == "one seed"


def test_the_table_and_the_picture(reports, tmp_path):
    lines = write(tmp_path, reports)
    assert [line.count("|") for line in lines] == [7] * 5
    assert "| -0.2000, -0.4000 | better with every seed |" in lines[-1]
    assert (tmp_path / "summary.svg").read_text().endswith("</svg>\n")
    title = picture([*map(row_of, reports)]).get_suptitle()
    assert title == "Better than the best control with every seed: 1 of 3 methods"


def test_without_validation_rows_nothing_chooses(tmp_path):
    methods = [method(name, [0.5]) for name in ("XFT, 1", "XFT, 2", "SFT, 1")]
    (tmp_path / "a.json").write_text(json.dumps({"command": "overfit", "methods": methods}))
    with pytest.raises(ValueError, match="No validation rows choose .* 'XFT, 1'"):
        row_of(tmp_path / "a.json")


def test_another_report_is_an_error(tmp_path):
    (tmp_path / "table1.json").write_text('{"command": "table1"}')
    with pytest.raises(ValueError, match="the table in table1.json must be .*'table1'"):
        row_of(tmp_path / "table1.json")


def test_the_docs_quote_the_published_reports():
    text = (ROOT / "docs/methods.md").read_text()
    for name, verdict in {
        "smollm2-overfit": "undecided",
        "smollm2-ablate": "worse with every seed",
        "smollm2-upit": "undecided",
        "esft-frontier": "better with every seed",
    }.items():
        row = row_of(ROOT / f"papers/results/{name}.json")
        assert row.verdict == verdict
        for difference in row.differences:
            assert f"{abs(difference):.4f}" in text
