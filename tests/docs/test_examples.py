"""Each script of examples/ runs, and fits one screen."""

import sys

import pytest

from tests.support.captured import captured
from tests.support.fences import ROOT

SCRIPTS = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "small"]


@pytest.mark.parametrize("path", SCRIPTS)
def test_it_runs(path, tmp_path):
    assert len(path.read_text().splitlines()) <= 60
    run = captured([sys.executable, path], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
