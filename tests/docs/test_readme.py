"""What the README says is there: equations, families, commands, code blocks, the methods' tables, figures, links."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from moe_runtime.hf.models.families import FAMILIES
from tests.hf import stock as stock_families
from tests.hf.dropin.test_layers import stock
from tests.hf.tiny import dense

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "bench" / "results"


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def test_each_equation_lives_where_the_table_says():
    places = re.findall(r"`((?:moe_runtime|kernels)/[\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", section("Where each equation lives"))
    assert len(places) >= 15
    for path, names in places:
        text = (ROOT / path).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), f"{path} has no {name}"


def test_families_are_those_of_the_code():
    table = section("What runs where").split("**Dense models that become mixtures**")[1]
    assert set(re.findall(r"`([a-z0-9_]+)`", table)) == set(FAMILIES)


def test_stock_families_are_those_of_the_installed_transformers():
    details = section("What runs where").split("<details>")[1].split("</details>")[0]
    served, others = details.split("Compared with")[1].split("Not served")
    served, others = (set(re.findall(r"`([a-z0-9_]+)`", text)) - {"patch"} for text in (served, others))
    written_with = re.search(r"transformers ([\d.]+)", (ROOT / "docs" / "families.md").read_text())[1].rstrip(".")
    missing = set(stock_families.FAMILIES) - served
    if transformers.__version__ == written_with:
        assert served == set(stock_families.FAMILIES) and others == set(stock_families.OTHERS)
        counts = re.findall(r"(\d+) families", README + (ROOT / "docs" / "index.md").read_text())
        assert len(counts) >= 3 and {int(count) for count in counts} == {len(served)}
    else:  # an older one has fewer, a newer one more
        assert not missing or Version(transformers.__version__) > Version(written_with)


@pytest.mark.parametrize("block", range(3))
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dense("llama").save_pretrained("base")
    stock().save_pretrained("moe-model")
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[block]
    names: dict = {}
    exec(compile(code, f"README.md, Python block {block}", "exec"), names)
    if block == 1:
        assert (tmp_path / "dense" / "config.json").exists()
    elif block == 0:
        assert names["model"].config._experts_implementation == "moe_runtime"
    else:
        assert names["out"].shape == (20, 64) and torch.allclose(names["weight"].sum(1), torch.ones(20))
        torch.testing.assert_close(names["out"].view_as(names["y"]), names["y"])


def test_all_python_blocks_are_run():
    assert README.count("```python") == 3


def test_cpu_figures_are_those_of_the_newest_file():
    newest = max(RESULTS.glob("*-cpu.json"))
    rows = {
        (bench["name"], name): row
        for bench in json.loads(newest.read_text())["benchmarks"]
        for name, row in bench["extra_info"]["rows"].items()
    }
    table, page = section("Performance"), (ROOT / "docs" / "performance.md").read_text()
    assert newest.name in table and newest.name in page
    report, goals = (importlib.import_module(f"moe_runtime.bench.{name}") for name in ("report", "goals"))
    assert report.cpu_table(rows) in table and report.steps_table(rows) in table
    assert goals.goals(rows, goals.CPU_GOALS).strip() in page


def box_table(page: str, command: str) -> list[dict[str, str]]:
    """The rows of the table that a command printed, as docs/ has it: column -> text."""
    text = (ROOT / "docs" / page).read_text()
    printed = re.search(rf"^`{re.escape(command)}`\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    lines = [line for line in printed.splitlines() if line[:1] in ("┃", "│")]
    head, *rows = ([cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.parametrize("page", [pytest.param(f"{name}-tables.md", id=name) for name in ("xft", "esft", "upit", "ultrafuser")])
def test_the_methods_tables_are_those_that_were_printed(page):
    part = next(part for part in section("The four methods").split("\n### ") if f"docs/{page}" in part)
    command = re.search(r"```bash\n(.*?)\n```", part)[1]
    printed = {row["method"]: row for row in box_table(page, command.removesuffix(" --seeds 3"))}
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*$", part, re.MULTILINE))
    assert len(rows) >= 5
    for row in rows:
        assert row == [printed[row[0]][column] for column in head]


def test_nothing_is_left_to_fill_in_and_pictures_are_there():
    assert "<!--" not in README and "held-out functions of the standard library" in section("Two commands")
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert "docs/way.svg" in pictures and "docs/demo.png" in pictures
    for path in pictures:
        head = (ROOT / path).read_bytes()[:8]
        assert head.startswith((b"<svg", b"<?xml") if path.endswith(".svg") else b"\x89PNG"), path


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    links = re.findall(r"(?<!!)\[[^]]+\]\(([^)\s]+)\)", README)
    assert len(links) > 30
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        assert not anchor or anchor in anchors((ROOT / path).read_text() if path else README), link
