"""The site of docs/ builds without a warning, loads nothing from other sites, and contains every
verb and public name.
"""

import html
import os
import re
import sys
from types import SimpleNamespace

import pytest
import yaml

import moe_runtime
from tests.support.fences import ROOT
from tests.support.patience import PATIENCE

pytest.importorskip("material", reason="needs the extra docs")
sys.path.insert(0, str(ROOT / "docs"))
import hooks

from tests.support.captured import captured

sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it; an mkdocs warning fails the build."""
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(out),
    ]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = captured(command, cwd=ROOT, env=env, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING" not in done.stderr
    return out


@pytest.mark.slow
def test_every_page_is_listed(site):
    nav = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {path.stem for path in (ROOT / "docs").rglob("*.md")}
    pages |= {name.removesuffix(".md") for name in hooks.generated_pages()}
    assert set(re.findall(r"([\w-]+)\.md", nav)) == pages
    assert {path.stem for path in site.rglob("*.html")} == pages | {"404"}
    # what search reads in pages opened from the disk
    assert (site / "search/search_index.js").exists()
    assert "iframe-worker.js" in (site / "index.html").read_text()


def text_of(page) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


@pytest.mark.slow
def test_every_verb_and_every_public_name_is_on_its_page(site):
    page = "\n".join(text_of(path) for path in site.glob("cli*.html"))
    verbs = [" ".join(path) for path, _ in hooks.commands()]
    assert len(verbs) > 30
    assert "moe-runtime upit init-routers" in verbs
    for verb in (*verbs, "--shared-rate", "Example: moe-runtime xft merge mixed dense"):
        assert verb in page, verb
    page = "\n".join(text_of(site / f"{topic}.html") for topic in hooks.TOPICS)
    for name in moe_runtime.__all__:
        assert name.startswith("_") or re.search(rf"\b{name}\b", page), name
    for path in hooks.MODULES:
        if path != "moe_runtime":
            for name in hooks.public(path):
                assert f"{path}.{name}" in page
    assert "0x" not in page, "a memory address of this run"
    assert re.search(r"def|moe_mlp\(\s+x: torch.Tensor", page)


def test_markdown_hook():
    text = "```python file=a.py\n[csrc/](../csrc), [a](b.md), [n](notebooks/a-b.ipynb)"
    expected = '```python title="a.py"\ncsrc/, [a](b.md), [n](notebook-a-b.md)'
    assert hooks.on_page_markdown(text) == expected
    page = SimpleNamespace(file=SimpleNamespace(src_uri="papers/a.md"))
    below = "[csrc/](../../csrc), [a](../b.md)"
    assert hooks.on_page_markdown(below, page) == "csrc/, [a](../b.md)"
