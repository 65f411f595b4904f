"""papers.ultrafuser.tables: each table, its numbers taken from the stages, its
picture, its page.
"""

import json
import re
import statistics
from pathlib import Path

import pytest

from papers.ultrafuser import tables as ultrafuser_tables
from papers.ultrafuser.recipe import load_recipe
from papers.ultrafuser.tables import DIRECT, FULL, GATE, TWO_STAGE
from tests.support import fuser_study

OPTIONS = {"ablate": {}, "weights": {"rows": 4}}


class Tables:
    """The tables in one folder."""

    def __init__(self):
        folder = Path(fuser_study.folder().name)
        self.recipe = load_recipe(folder / "study.yaml")
        self.out = folder / "out"
        self.said = []
        self.reports = {}
        for command, options in OPTIONS.items():
            self.reports[command] = self.run(command, say=self.said.append, **options)

    def run(self, command, **options):
        return ultrafuser_tables.run(command, self.recipe, self.out, **{"seeds": 1} | options)

    def json(self, command):
        return json.loads((self.out / f"{command}.json").read_text())


@pytest.fixture(scope="module")
def tables():
    return Tables()


@pytest.mark.slow
def test_ablate_compares_all_with_the_full_method(tables):
    report = tables.reports["ablate"]
    made = [
        "specialist sums",
        "specialist words",
        "sums, tuned further",
        "words, tuned further",
        GATE,
        DIRECT,
        TWO_STAGE,
        FULL,
    ]
    assert [entry.name for entry in report.entries] == made
    assert report.reference == FULL
    rows = {row[0]: row for row in report.rows()}
    for row in rows.values():
        assert len(row) == len(report.columns())
    for entry in report.entries:
        (result,) = entry.results
        cells = rows[entry.name]
        assert [float(cell.rstrip("+-")) for cell in cells[1:3]] == pytest.approx(
            [*result.domains.values()], abs=1e-4
        )
        assert float(cells[3]) == pytest.approx(result.loss, abs=1e-4)
    assert rows[FULL][6] == "reference"
    assert len({row[3] for row in rows.values()}) == len(rows)


def test_weights_are_means_over_tokens(tables):
    report = tables.reports["weights"]
    stages = ultrafuser_tables.Stages(tables.recipe, tables.out, say=print)
    found = stages.weights(stages.fused())
    own = [token for row in found[6:10] for token in row]  # the second domain's first four rows
    assert report.mean[0][1] == pytest.approx(
        [statistics.fmean(of) for of in zip(*own, strict=True)]
    )
    assert report.tokens["words"] == len(own)
    assert len(report.by_row[0][1]) == 4
    for row in report.rows():
        assert sum(float(cell) for cell in row[2:]) == pytest.approx(1, abs=2e-3)
    assert report.domains == {"sums": "sums", "words": "words"}
    leads = re.search(r"words leads on (\d) of 4 rows", "\n".join(report.summary))
    assert int(leads[1]) == sum(row[1] > row[0] for row in report.by_row[0][1])


@pytest.mark.parametrize("command", OPTIONS)
def test_pictures_and_numbers_are_there(tables, command):
    assert (tables.out / f"{command}.png").read_bytes()[:4] == b"\x89PNG"
    report = tables.reports[command]
    values = tables.json(command)
    assert values["summary"] == report.summary
    assert report.legend()
    assert values["settings"]["seeds"] == [0]
    for row in report.rows():
        assert len(row) == len(report.columns())


def test_a_table_is_read_again(tables, monkeypatch):
    monkeypatch.setattr("moe_runtime.hf.training.fit.train", None)
    again = tables.run("ablate", say=print)
    assert again.rows() == tables.reports["ablate"].rows()


@pytest.mark.parametrize(
    "command, options, match",
    [
        ("weights", {"rows": 0}, "rows must be an integer of at least 1"),
        ("weights", {"rows": 3}, "created with other settings"),
    ],
)
def test_bad_options_fail_before_anything(tables, command, options, match):
    with pytest.raises(ValueError, match=match):
        tables.run(command, say=print, **options)
