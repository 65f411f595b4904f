"""Every command in the bash blocks of the README and docs/ either runs, in order, or is listed as
one that cannot.
"""

import pytest

from tests.support import flows
from tests.support.fences import PAGES, ROOT

EVERY = []


for PATH in PAGES:
    PAGE = str(PATH.relative_to(ROOT))
    if PAGE not in flows.PAGES_NOT_RUN:
        EVERY += [(PAGE, words) for _, words in flows.commands(PAGE)]


def test_the_lists_of_pages_and_of_what_is_not_run_are_minimal():
    runs = [page for page, words in EVERY if flows.reason_of(words) is None]
    assert set(runs) == set(flows.FLOWS)
    assert len(runs) >= 35
    assert {flows.reason_of(words) for _, words in EVERY} - {None} == set(flows.NOT_RUN)


@pytest.mark.slow
@pytest.mark.parametrize("page", flows.FLOWS)
def test_the_commands_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "torch")  # interpreted kernels would take minutes
    for prepare in flows.FLOWS[page].prepare:
        prepare(tmp_path)
    ran = 0
    for _, words in flows.commands(page):
        if flows.reason_of(words) is None:
            ran += 1
            if flows.wants_a_compiler(words):
                continue
            flows.run(words, monkeypatch)
    assert ran, f"{page} has no command that runs here: remove it from FLOWS"
