"""papers.ultrafuser.tables: each table, its numbers taken from the stages, its
picture, its page.
"""

import json
import re
import statistics
from pathlib import Path

import pytest

from papers.ultrafuser import tables as ultrafuser_tables
from papers.ultrafuser import weights_study as ultrafuser_weights_study
from papers.ultrafuser.recipe import load_recipe
from papers.ultrafuser.tables import DIRECT, FULL, GATE, TWO_STAGE
from papers.ultrafuser.weights_study import TokenWeights
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
    assert [entry.name for entry in report.entries] == made and report.reference == FULL
    rows = {row[0]: row for row in report.rows()}
    assert all(len(row) == len(report.columns()) for row in rows.values())
    for entry in report.entries:
        (result,) = entry.results
        cells = rows[entry.name]
        assert [float(cell.rstrip("+-")) for cell in cells[1:3]] == pytest.approx(
            [*result.domains.values()], abs=1e-4
        )
        assert float(cells[3]) == pytest.approx(result.loss, abs=1e-4)
    assert rows[FULL][6] == "reference" and len({row[3] for row in rows.values()}) == len(rows)


def test_weights_are_means_over_tokens(tables):
    report = tables.reports["weights"]
    stages = ultrafuser_tables.Stages(tables.recipe, tables.out, say=print)
    found = stages.weights(stages.fused())
    own = [token for row in found[6:10] for token in row]  # the second domain's first four rows
    assert report.mean[0][1] == pytest.approx(
        [statistics.fmean(of) for of in zip(*own, strict=True)]
    )
    assert report.tokens["words"] == len(own) and len(report.by_row[0][1]) == 4
    for row in report.rows():
        assert sum(float(cell) for cell in row[2:]) == pytest.approx(1, abs=2e-3)
    assert report.domains == {"sums": "sums", "words": "words"}
    leads = re.search(r"words leads on (\d) of 4 rows", "\n".join(report.summary))
    assert int(leads[1]) == sum(row[1] > row[0] for row in report.by_row[0][1])


def test_the_page_shows_the_responses(tables):
    page = (tables.out / "weights.html").read_text()
    stages = ultrafuser_tables.Stages(tables.recipe, tables.out, say=print)
    assert page.count("<pre>") == 6 and "<h2>words</h2>" in page and "http" not in page
    row = stages.part("held_out")[6]
    text = re.sub(r"<[^>]+>", "", page.split("<h2>words</h2>")[1].split("</pre>")[0])
    assert text.strip() == stages.tokenizer.decode(row["response_ids"]).replace(
        "<", "&lt;"
    ).replace(">", "&gt;")


@pytest.mark.parametrize("command", OPTIONS)
def test_pictures_and_numbers_are_there(tables, command):
    assert (tables.out / f"{command}.png").read_bytes()[:4] == b"\x89PNG"
    report = tables.reports[command]
    values = tables.json(command)
    assert (
        values["summary"] == report.summary
        and report.legend()
        and values["settings"]["seeds"] == [0]
    )
    assert all(len(row) == len(report.columns()) for row in report.rows())


def test_a_table_is_read_again(tables, monkeypatch):
    monkeypatch.setattr("moe_runtime.hf.training.fit.train", None)
    again = tables.run("ablate", say=print)
    assert again.rows() == tables.reports["ablate"].rows()


@pytest.mark.parametrize(
    "command, options, match",
    [
        pytest.param("weights", {"rows": 0}, "rows must be an integer of at least 1", id="rows"),
        pytest.param("weights", {"rows": 3}, "created with other settings", id="another report"),
    ],
)
def test_bad_options_fail_before_anything(tables, command, options, match):
    with pytest.raises(ValueError, match=match):
        tables.run(command, say=print, **options)


def test_pieces_are_the_text():
    from tests.methods.ultrafuser.fusers import tokenizer

    text = "a é 文 def\n"
    ids = tokenizer().encode(text, add_special_tokens=False)
    pieces = ultrafuser_weights_study.pieces_of(tokenizer(), ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text and "文" in pieces


def test_a_token_has_the_colour_of_its_specialist():
    text = TokenWeights(
        prompt="a < b", pieces=["<", "", "c"], weights=[[0.1, 0.9], [0.5, 0.5], [0.75, 0.25]]
    )
    page = ultrafuser_weights_study.page(("x", "y"), {"d": [text]})
    assert '<span style="--c:var(--c1);--s:0.800" title="x 0.10, y 0.90">&lt;</span>' in page
    assert '<span style="--c:var(--c0);--s:0.500" title="x 0.75, y 0.25">c</span>' in page
    assert "a &lt; b" in page and page.count("<span") == 4  # two of the scale
