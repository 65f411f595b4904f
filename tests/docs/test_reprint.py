"""tests/support/reprint.py, which prints the tables of docs/ again."""

from pathlib import Path

import pytest

from tests.support import cli, reprint
from tests.support.fences import parse_verb

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [pytest.param(path, id=path.stem) for path in sorted(DOCS.glob("*-tables.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_every_table_is_one_that_is_printed_again(page):
    text = page.read_text()
    commands = [found[1] for found in reprint.TABLE.finditer(text)]
    assert len(commands) == text.count("┡"), "a table without its command"
    assert len(commands) >= 2, "a table without its command"
    for command in commands:
        parse_verb(command.split(), program=cli.PAPERS)


def test_a_table_is_replaced_and_the_rest_of_the_page_stays(tmp_path, monkeypatch):
    box = "┏━━━┓\n┃ a ┃\n┡━━━┩\n│ {} │\n└───┘\n"
    fence = "`python -m papers xft {0}`\n\n```text\n{1}```\n"
    first = fence.format("table1 --seeds 1", "{}")
    text = f"# Page\n\n{first}\n* one is 1\n\n{fence.format('budget', 'x')}"
    page = tmp_path / "page.md"
    page.write_text(text.format(box.format(1)))
    calls = []

    def app(words, standalone_mode):
        calls.append(words)
        print("[   0 s] seed 1\n\x1b[3mA title\x1b[0m")
        print(f"{box.format(2)}3 rows.\nnumbers: out/a.json")

    monkeypatch.setattr("papers.cli.app", app)
    assert reprint.reprint(page, Path("out"), only="table1") == 1
    assert calls == [["xft", "table1", "--seeds", "1", "--out", "out"]]
    assert page.read_text() == text.format(box.format(2) + "3 rows.\n")
