"""Ctrl-C and SIGTERM in verbs that write, between any two changes of files: 130 or 143, one line,
and a rerun finishes.
"""

import random
import shutil
from pathlib import Path

import pytest

from moe_runtime.hf.training.saving import last_whole_checkpoint
from tests.faults.machine import INTERRUPTS, NONE, Done, sends, strays, tree
from tests.faults.verbs import QUICK, VERBS
from tests.support.stress import STRESS, scaled, share

pytestmark = [pytest.mark.stress, pytest.mark.slow]


def weights(folder: Path) -> dict[str, str]:
    """Return the bytes of the weights that a verb made, without checkpoints."""
    files = tree(folder) or {}
    return {
        name: value
        for name, value in files.items()
        if name.endswith(".safetensors") and "checkpoint" not in name
    }


@pytest.mark.parametrize("name", share(list(VERBS) if STRESS else QUICK, 2))
def test_a_signal_between_two_changes(faulty, inputs, tmp_path, name):
    verb = VERBS[name]
    draw = random.Random(f"signal {name}")
    argv = verb.arguments(inputs)

    def run(place: str, *more: str, **fault) -> Done:
        (tmp_path / place).mkdir(exist_ok=True)
        return faulty.run(*argv, *more, root=tmp_path / place, before=verb.before, **fault)

    counted = run("undisturbed", fault=NONE)
    assert counted.code == 0, counted.output
    whole = tree(tmp_path / "undisturbed" / verb.out, verb.volatile)
    want = weights(tmp_path / "undisturbed")
    numbers = list(INTERRUPTS)
    draw.shuffle(numbers)
    for i, at in enumerate(
        sorted(draw.sample(range(1, counted.calls + 1), min(scaled(1, 20), counted.calls)))
    ):
        code, word = INTERRUPTS[numbers[i % 2]]
        done = run("here", fault=sends(numbers[i % 2]), at=at)
        out = tmp_path / "here" / verb.out
        if done.code == 0:  # it came when everything was done, and what was asked for is there
            assert name.endswith(("train", "run", "init-routers")) or at > counted.calls - 4
        else:
            line = done.last_line()
            assert done.code == code and line.startswith(word), (
                f"{done.code}: {done.output[-3000:]}"
            )
            assert (
                sum(one.startswith(word) for one in done.output.splitlines()) == 1
                and "error:" not in done.output
            )
            check_word(name, line, out, whole)
        assert not strays(tmp_path / "here"), f"at {at}: {strays(tmp_path / 'here')}"
        if done.code and not (verb.whole and out.exists()):
            more = ("--resume",) if name == "train" and last_whole_checkpoint(out) else ()
            stands = any((tmp_path / "here" / one).exists() for one in (verb.out, *verb.beside))
            if stands and name in ("esft score", "stats", "train") and not more:
                more = ("--overwrite",)
            again = run("here", *more)
            assert again.code == 0, f"at {at}: {again.output[-3000:]}"
        assert weights(tmp_path / "here") == want, f"at {at}"
        if verb.whole:
            assert tree(out, verb.volatile) == whole, f"at {at}"
        shutil.rmtree(tmp_path / "here")


def check_word(name: str, line: str, out: Path, whole: dict | None) -> None:
    """Assert that a verb leaves its whole output or none, or says how to resume."""
    if VERBS[name].whole:
        assert tree(out, VERBS[name].volatile) in (None, whole)
    assert "esume" in line or line.endswith("; no incomplete output was left"), line
