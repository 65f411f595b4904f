"""papers.ultrafuser.tables: each table, its numbers from the stages, its figure, its page."""

import statistics
from pathlib import Path

import pytest

from moe_runtime.io.files import read_json
from papers.ultrafuser import tables as ultrafuser_tables
from papers.ultrafuser.recipe import load_recipe
from papers.ultrafuser.tables import DIRECT, FULL, GATE, TWO_STAGE
from tests.papers.reports import entries_of, rows_of
from tests.support import fuser_study

OPTIONS = {"ablate": {}, "weights": {"rows": 4}}


class Tables:
    """The tables in one folder."""

    def __init__(self):
        folder = Path(fuser_study.folder().name)
        self.recipe = load_recipe(folder / "study.yaml")
        self.out = folder / "out"
        self.reports = {}
        for command, options in OPTIONS.items():
            self.reports[command] = self.run(command, **options)

    def run(self, command, **options):
        options = {"seeds": 1, "say": print} | options
        return ultrafuser_tables.run(
            command,
            self.recipe,
            self.out,
            **options,
        )


@pytest.fixture(scope="module")
def tables():
    return Tables()


@pytest.mark.slow
def test_ablate_compares_all_with_the_full_method(tables):
    report = tables.reports["ablate"]
    assert entries_of(report) == [
        "specialist sums",
        "specialist words",
        "sums, tuned further",
        "words, tuned further",
        GATE,
        DIRECT,
        TWO_STAGE,
        FULL,
    ]
    assert report.reference == FULL
    rows = rows_of(report)
    for entry in report.entries:
        (result,) = entry.results
        cells = [float(cell.rstrip("+-")) for cell in rows[entry.name][1:4]]
        assert cells == pytest.approx([*result.domains.values(), result.loss], abs=1e-4)
    assert rows[FULL][6] == "reference"
    assert len({row[3] for row in rows.values()}) == len(rows)


def test_weights_are_means_over_tokens(tables):
    report = tables.reports["weights"]
    stages = ultrafuser_tables.UltrafuserStages(
        tables.recipe,
        tables.out,
        say=print,
    )
    weights = stages.weights(stages.fused())
    # of the second domain's first examples
    tokens = [token for row in weights[6:10] for token in row]
    means = [statistics.fmean(column) for column in zip(*tokens, strict=True)]
    assert report.mean[0][1] == pytest.approx(means)
    assert report.tokens["words"] == len(tokens)
    rows = report.by_row[0][1]
    assert len(rows) == 4
    for row in report.rows():
        assert sum(float(cell) for cell in row[2:]) == pytest.approx(1, abs=2e-3)
    assert report.domains == {"sums": "sums", "words": "words"}
    leads = sum(row[1] > row[0] for row in rows)
    assert f"words leads on {leads} of 4 rows" in "\n".join(report.summary)


@pytest.mark.parametrize("command", OPTIONS)
def test_pictures_and_numbers_are_there(tables, command):
    assert (tables.out / f"{command}.png").read_bytes().startswith(b"\x89PNG")
    report = tables.reports[command]
    values = read_json(tables.out / f"{command}.json")
    assert values["summary"] == report.summary
    assert report.legend()
    assert values["settings"]["seeds"] == [0]
    assert rows_of(report)
