"""The README and the pages that it summarizes: equations, families, code, figures, links."""

import re
from pathlib import Path

import pytest

from moe_runtime.hf.models.families import FAMILIES
from tests.hf.dropin.test_layers import stock
from tests.hf.tiny import dense

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_it_is_short():
    assert len(README.splitlines()) <= 180


def test_each_equation_lives_where_the_table_says():
    page = (ROOT / "docs" / "equations.md").read_text()
    places = re.findall(r"`((?:moe_runtime|kernels)/[\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", page)
    assert len(places) >= 60
    for path, names in places:
        text = (ROOT / path).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), f"{path} has no {name}"


def test_dense_families_are_those_of_the_code():
    page = (ROOT / "docs" / "xft.md").read_text()
    supported = page.split("## Supported architectures\n")[1].split("\n## ")[0]
    table = supported.split("|---|")[1]
    assert set(re.findall(r"`([a-z0-9_]+)`", table)) == set(FAMILIES)


HUB = {
    "allenai/OLMoE-1B-7B-0924": "moe",
    "HuggingFaceTB/SmolLM2-135M": "base",
}


@pytest.mark.parametrize("block", range(3))
def test_python_blocks_run(block, tmp_path, monkeypatch):
    """The blocks run unchanged, except that ids of the Hub are replaced by small models."""
    monkeypatch.chdir(tmp_path)
    dense("llama").save_pretrained("base")
    stock().save_pretrained("moe")
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    code = blocks[block]
    for name, folder in HUB.items():
        code = code.replace(f'"{name}"', f'"{folder}"')
    names: dict = {}
    exec(
        compile(
            code,
            f"README.md, Python block {block}",
            "exec",
        ),
        names,
    )
    if block < 2:
        assert names["model"].config._experts_implementation == "moe_runtime"
    else:
        assert (tmp_path / "dense" / "config.json").exists()


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub creates for a page's headings."""
    text = re.sub(
        r"^```.*?^```",
        "",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    links = re.findall(r"\[[^]]+\]\(([^)\s]+)\)", README)
    assert len(links) > 30
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        text = (ROOT / path).read_text() if path and anchor else README
        assert not anchor or anchor in anchors(text), link
