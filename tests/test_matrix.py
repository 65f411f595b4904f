"""tests/support/matrix.py: which cells run, in which environment, and what the exit status says. Nothing is installed here."""

import json
import sys

import pytest

from tests.support import matrix

FIRST, SECOND, THIRD = (cell.name for cell in matrix.CELLS[:3])
GOOD = {"python": "3.10", "versions": dict.fromkeys(matrix.SHOWN, "1"), "passed": 1, "skipped": 0, "failed": 0}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return run(*arguments, outcome) -> the exit status, the cells that ran and those that were built for it."""
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    monkeypatch.setattr(matrix, "write_page", lambda known: None)
    ran, built = [], []

    def build(cell, place):
        built.append(cell.name)
        place.mkdir(exist_ok=True)

    def call(*arguments, **outcome):
        ran.clear(), built.clear()

        def run_tests(place, report, selection):
            ran.append(place.name)
            return {name: GOOD[name] for name in ("passed", "skipped", "failed")} | outcome

        monkeypatch.setattr(matrix, "build", build)
        monkeypatch.setattr(matrix, "run_tests", run_tests)
        monkeypatch.setattr(matrix, "_versions", lambda place: GOOD["versions"])
        monkeypatch.setattr(sys, "argv", ["matrix", *arguments])
        return matrix.main(), [*ran], [*built]

    return call


def know(tmp_path, name, **result):
    (tmp_path / f"{name}.json").write_text(json.dumps(GOOD | result))


def test_cells_with_a_result_rest_and_those_with_a_problem_do_not(run, tmp_path):
    know(tmp_path, FIRST)
    know(tmp_path, SECOND, problem="no network")
    assert run(FIRST, SECOND, THIRD) == (0, [SECOND, THIRD], [SECOND, THIRD])
    assert run(FIRST, SECOND, THIRD) == (0, [], [])
    assert run(FIRST, "--tests", "tests/test_config.py") == (0, [FIRST], [FIRST])


def test_again_builds_anew(run, tmp_path):
    assert run(FIRST, failed=1) == (1, [FIRST], [FIRST])
    assert (tmp_path / FIRST / "ready").is_file()
    assert run(FIRST, "--tests", "x", failed=1) == (1, [FIRST], [])  # what failed is looked at where it failed
    assert run(FIRST, "--again", failed=1) == (1, [FIRST], [FIRST])


def test_the_exit_status_is_this_runs(run, tmp_path):
    know(tmp_path, FIRST, failed=3)
    know(tmp_path, SECOND, problem="no network")
    assert run(THIRD)[0] == 0 and run("--list")[0] == 0 and run(FIRST, "--again", failed=1)[0] == 1


def test_what_runs_is_there():
    for name in matrix.SELECTION:
        file, _, test = name.partition("::")
        text = (matrix.ROOT / file).read_text()
        assert not test or f"\ndef {test}(" in text, name
