"""The site of docs/ builds without a warning, fetches nothing from elsewhere, and holds every verb and public name."""

import ast
import html
import importlib
import inspect
import os
import re
import subprocess
import sys
import typing
from dataclasses import is_dataclass

import pytest
import yaml

import moe_runtime
from tests.support.fences import ALL, ROOT

pytest.importorskip("material", reason="wants the extra docs")
sys.path.insert(0, str(ROOT / "docs"))
import hooks

sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, as `make docs` builds it; a warning of mkdocs ends the build."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING" not in done.stderr
    return out


def visible(page: str) -> str:
    """The text of a page as a reader sees it, without its code."""
    page = re.sub(r"<(script|style|pre|code)\b.*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", "", page))


@pytest.mark.slow
def test_every_page_is_listed(site):
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    named = set(re.findall(r"([\w-]+\.md)", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])))
    assert named == pages | {"cli.md", "api.md"}
    assert {path.stem for path in site.glob("*.html")} == {name.removesuffix(".md") for name in named} | {"404"}


def test_nothing_is_fetched_from_elsewhere(site):
    for path in site.glob("*.html"):
        text = path.read_text()
        fetched = re.findall(r"<(?:script|img|iframe)[^>]+src=\"([^\"]+)\"|<link[^>]+href=\"([^\"]+)\"", text)
        assert fetched and not [url for pair in fetched for url in pair if url.startswith(("http", "//"))], path.name


def test_markdown_of_github_is_markdown_of_the_site(site):
    """No fence, table or list is left as text."""
    for path in site.glob("*.html"):
        body = re.search(r"<article.*?</article>", path.read_text(), re.DOTALL)
        for line in visible(body[0]).splitlines() if body else []:
            assert not re.match(r"\s*(```|\|[ -]|\* )", line), f"{path.name}: {line}"


def test_blocks_with_a_name_show_it(site):
    named = {fence.options["file"] for fence in ALL if "file" in fence.options}
    titles = {
        title for path in site.glob("*.html") for title in re.findall(r'class="filename">([^<]+)<', path.read_text())
    }
    assert named == titles and len(named) >= 5


def test_every_verb_and_option_is_on_its_page(site):
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "cli.html").read_text()))
    verbs = [" ".join(path) for path, _ in hooks.commands()]
    assert len(verbs) > 40 and "moe-runtime upit init-routers" in verbs
    for verb in verbs:
        assert verb in page, verb
    assert "--shared-rate" in page and "Example: moe-runtime xft merge mixed dense" in page


def test_every_public_name_is_on_its_page(site):
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "api.html").read_text()))
    for name in moe_runtime.__all__:
        assert name.startswith("_") or re.search(rf"\b{name}\b", page), name
    for path in hooks.MODULES:
        assert hooks.public(__import__(path, fromlist=["_"])), f"{path} has no public name"
    assert "0x" not in page, "an address of this run"
    assert re.search(r"def|moe_mlp\(\s+x: torch.Tensor", page)


OF_USERS = r"moe_runtime\.(config|ops|modules|hf|methods|stats)"  # studies and bench have pages of their own


def classes(hint) -> set[type]:
    """The package's public classes in an annotation, however deep."""
    ours = inspect.isclass(hint) and hint.__module__.startswith("moe_runtime") and not hint.__name__.startswith("_")
    return {hint} if ours else set().union(*map(classes, typing.get_args(hint)))


def listed() -> dict[str, object]:
    """What the Python page has, by its path; modules that it names aside."""
    modules = {path: importlib.import_module(path) for path in hooks.MODULES}
    values = {
        f"{path}.{name}": getattr(module, name) for path, module in modules.items() for name in hooks.public(module)
    }
    return {name: value for name, value in values.items() if not inspect.ismodule(value)}


def test_what_a_signature_names_is_on_the_page_too():
    """Settings that a public function takes, receipts that it returns, and what is in these."""
    page, missing = listed(), {}
    known = {id(value) for value in page.values()}
    for name, value in page.items():
        if not callable(value):
            continue
        init = vars(value).get("__init__") if inspect.isclass(value) and not is_dataclass(value) else None
        hints = inspect.get_annotations(value, eval_str=True) | (typing.get_type_hints(init) if init else {})
        if found := {one.__qualname__ for hint in hints.values() for one in classes(hint) if id(one) not in known}:
            missing[name] = found
    assert not missing, "docs/hooks.py: MODULES, or the module's __all__"


def test_what_the_documentation_imports_of_methods_and_layers_is_on_the_page():
    page = {id(value) for value in listed().values()}
    for fence in (fence for fence in ALL if fence.language == "python"):
        for node in ast.walk(ast.parse(fence.text)):
            if isinstance(node, ast.ImportFrom) and re.match(OF_USERS, node.module or ""):
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    value = getattr(module, name, None)
                    if callable(value):
                        assert id(value) in page, f"{fence.place} imports {node.module}.{name}"


@pytest.mark.parametrize(
    "text, want",
    [
        pytest.param("```python file=a.py\n", '```python title="a.py"\n', id="title"),
        pytest.param("[csrc/](../csrc) and [a](b.md)", "csrc/ and [a](b.md)", id="outside"),
        pytest.param("![a](../x.png)", "![a](../x.png)", id="picture"),
        pytest.param("```console without=trl\n", "```console\n", id="option"),
    ],
)
def test_markdown_hook(text, want):
    assert hooks.on_page_markdown(text) == want


def test_signatures_keep_what_is_by_keyword_alone():
    def long(
        first_argument: int, second_argument: int, *, third_argument: int = 3, fourth_argument: str = "four"
    ) -> int:
        """A function."""

    lines = hooks.signature("long", long).splitlines()
    assert lines == [
        "long(", "    first_argument: int,", "    second_argument: int,", "    *,", "    third_argument: int = 3,",
        "    fourth_argument: str = 'four',", ") -> int",
    ]  # fmt: skip
