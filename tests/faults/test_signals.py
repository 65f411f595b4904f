"""Ctrl-C and SIGTERM in verbs that write, between any two changes of files: exit code 130 or 143,
one line, and a rerun finishes.
"""

import shutil
from pathlib import Path

import pytest

from moe_runtime.hf.training.saving import last_whole_checkpoint
from tests.faults.machine import INTERRUPTS, Trial, sends, strays, tree
from tests.faults.verbs import QUICK, VERBS
from tests.support.stress import STRESS, share

pytestmark = [pytest.mark.stress, pytest.mark.slow]


def weights(folder: Path) -> dict[str, str]:
    """Return the hashes of the weights that a verb wrote, without checkpoints."""
    files = tree(folder) or {}
    values = {}
    for name, value in files.items():
        if name.endswith(".safetensors") and "checkpoint" not in name:
            values[name] = value
    return values


@pytest.mark.parametrize("name", share(list(VERBS) if STRESS else QUICK, 2))
def test_a_signal_between_two_changes(faulty, inputs, tmp_path, name):
    trial = Trial(faulty, inputs, tmp_path, name, "signal")
    verb = trial.verb
    here = tmp_path / "here"
    out = here / verb.out
    calls = trial.counted()
    whole = trial.result("undisturbed")
    expected = weights(tmp_path / "undisturbed")
    numbers = list(INTERRUPTS)
    trial.draw.shuffle(numbers)

    for i, at in enumerate(trial.points(calls, 1, 20)):
        code, word = INTERRUPTS[numbers[i % 2]]
        done = trial.run("here", fault=sends(numbers[i % 2]), at=at)
        if done.code == 0:  # the signal came after the result was complete
            assert name.endswith(("train", "run", "init-routers")) or at > calls - 4
        else:
            assert done.code == code, f"{done.code}: {done.output[-3000:]}"
            line = done.last_line()
            assert line.startswith(word), line
            assert sum(one.startswith(word) for one in done.output.splitlines()) == 1
            assert "error:" not in done.output
            check_word(name, line, out, whole)
        assert strays(here) == [], f"at {at}"

        if done.code and not (verb.whole and out.exists()):
            more = ()
            has_output = any((here / file).exists() for file in (verb.out, *verb.beside))
            if name == "train" and last_whole_checkpoint(out):
                more = ("--resume",)
            elif has_output and name in ("esft score", "stats", "train"):
                more = ("--overwrite",)
            again = trial.run("here", *more)
            assert again.code == 0, f"at {at}: {again.output[-3000:]}"

        assert weights(here) == expected, f"at {at}"
        if verb.whole:
            assert trial.result("here") == whole, f"at {at}"
        shutil.rmtree(here)


def check_word(name: str, line: str, out: Path, whole: dict | None) -> None:
    """Assert that a verb leaves complete output or none, or says how to resume."""
    if VERBS[name].whole:
        assert tree(out) in (None, whole)
    assert "esume" in line or line.endswith("; no incomplete output was left"), line
