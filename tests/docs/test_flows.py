"""Every command of the bash blocks of the README and docs/ runs, in order, or is on the list of what cannot."""

import ast

import pytest

from tests.support import flows
from tests.support.fences import PAGES, ROOT, Fence, statements

EVERY = [
    (str(path.relative_to(ROOT)), words) for path in PAGES for _, words in flows.commands(str(path.relative_to(ROOT)))
]


@pytest.mark.slow
@pytest.mark.parametrize("page", flows.FLOWS)
def test_the_commands_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")  # interpreted kernels would take minutes
    for prepare in flows.FLOWS[page].prepare:
        prepare(tmp_path)
    ran = 0
    for fence, words in flows.commands(page):
        if flows.reason_of(words) is None:
            ran += 1
            if flows.wants_a_compiler(words):
                continue
            printed = flows.run(words, monkeypatch)
            if table := flows.shown(fence):
                flows.check_table(table, printed)
    assert ran, f"{page} has no command that runs here; want it out of FLOWS"


def test_no_page_is_left_out():
    runs = {page for page, words in EVERY if flows.reason_of(words) is None}
    assert runs == set(flows.FLOWS)
    assert sum(flows.reason_of(words) is None for _, words in EVERY) >= 35


def test_the_list_of_what_is_not_run_is_minimal():
    assert {flows.reason_of(words) for _, words in EVERY} - {None} == set(flows.NOT_RUN)


@pytest.mark.parametrize("key", [key for key, one in flows.NOT_RUN.items() if one.test])
def test_what_is_not_run_is_shown_by_a_test_that_exists(key):
    path, name = flows.NOT_RUN[key].test.split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", [page for page, flow in flows.FLOWS.items() if flow.smaller])
def test_what_is_made_smaller_is_on_the_page(page, monkeypatch):
    monkeypatch.setitem(flows.FLOWS, page, flows.FLOWS[page]._replace(smaller={"moe-runtime nothing": ""}))
    with pytest.raises(ValueError, match="'moe-runtime nothing' is not in the page"):
        flows.commands(page)


@pytest.mark.parametrize(
    "line, want",
    [
        pytest.param("make demo", "make demo", id="whole"),
        pytest.param("make wheel-cuda ARCHS=90", "make wheel-cuda", id="arguments"),
        pytest.param("MOE_RUNTIME_BUILD_CPU=1 pip wheel . --no-deps", "pip wheel", id="variable"),
        pytest.param("make demonstration", None, id="another word"),
        pytest.param("moe-runtime doctor", None, id="run"),
    ],
)
def test_what_falls_under_the_list(line, want):
    assert flows.reason_of(statements(line)[0]) == want


def test_a_command_that_fails_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in ("moe-runtime xft upcycle nowhere moe", "python -m moe_runtime.native.hub ."):
        (words,) = statements(line)
        (tmp_path / "there").touch()
        with pytest.raises(AssertionError, match=r"ended with [12]: .*error: "):
            flows.run(words, monkeypatch)


def test_a_table_that_is_not_what_was_printed_is_found():
    printed = "a title\n method   loss   all\n──────\n SFT   4.3   1\n XFT   4.2   2\n"
    flows.check_table([["method", "loss"], ["XFT", "9"]], printed)
    with pytest.raises(AssertionError, match="the columns method, losses"):
        flows.check_table([["method", "losses"], ["XFT", "9"]], printed)
    with pytest.raises(AssertionError, match="no row EWA"):
        flows.check_table([["method", "loss"], ["EWA", "9"]], printed)


def test_the_readmes_tables_are_compared():
    tables = [flows.shown(fence) for fence in {fence.line: fence for fence, _ in flows.commands("README.md")}.values()]
    assert sum(len(table) >= 5 for table in tables) == 4
    assert not flows.shown(Fence("README.md", 1, "bash", {}, "", ""))
