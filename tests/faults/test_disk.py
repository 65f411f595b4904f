"""A full disk, a read-only folder, a file that vanishes: one clear error line, and no partial
output.
"""

import re
import shutil

import pytest

from tests.faults.machine import DENIED, FULL, READ_ONLY, Done, Trial, strays, tree
from tests.faults.verbs import QUICK, VERBS
from tests.support.stress import STRESS, share

pytestmark = [pytest.mark.stress, pytest.mark.slow]

NAMES = list(VERBS) if STRESS else QUICK


def check(done: Done, what: str) -> str:
    """Assert that a command ended with one clear error line that matches `what`; return the
    line.
    """
    assert done.code == 1, f"{done.code}: {done.output[-3000:]}"
    line = done.last_line()
    assert line.startswith("error: ") and re.search(what, line), done.output[-3000:]
    assert done.output.count("error: ") == 1
    return line


def made(folder, name: str) -> dict[str, str]:
    """Return the files in a folder; if the verb resumes, only the weights outside checkpoints."""
    values = {}
    for file, value in (tree(folder) or {}).items():
        if "checkpoint" not in file and (VERBS[name].whole or file.endswith(".safetensors")):
            values[file] = value
    return values


@pytest.mark.parametrize("name", share(NAMES, 0))
def test_a_full_or_read_only_disk(faulty, inputs, tmp_path, name):
    """From a drawn write on, no space is left; a verb that creates a folder leaves nothing
    behind.
    """
    before = tree(inputs)
    trial = Trial(faulty, inputs, tmp_path, name, "full")
    calls = trial.counted(FULL)
    expected = made(tmp_path / "undisturbed", name)

    for at in trial.points(calls, 1, 40):
        done = trial.run("full", fault=FULL, at=at)
        line = check(done, "No space left on device|is the disk full")
        assert re.search(r"out|logs", line), f"no path in {line}"
        left = made(tmp_path / "full", name)
        assert left.items() <= expected.items(), f"at {at}"
        assert strays(tmp_path / "full") == [], f"at {at}"
        shutil.rmtree(tmp_path / "full")

    refusals = [
        (READ_ONLY, "Read-only file system"),
        (DENIED, "Permission denied"),
    ]
    fault, what = trial.draw.choice(refusals)
    line = check(trial.run("here", fault=fault, at=1), what)
    assert "out" in line or "logs" in line
    assert not list((tmp_path / "here").iterdir())
    assert tree(inputs) == before, "a fault changed the inputs"
