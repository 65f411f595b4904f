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
    here = tmp_path / "here"
    out = here / verb.out

    def run(folder: str, *more: str, **fault) -> Done:
        (tmp_path / folder).mkdir(exist_ok=True)
        return faulty.run(*argv, *more, root=tmp_path / folder, before=verb.before, **fault)

    counted = run("undisturbed", fault=NONE)
    assert counted.code == 0, counted.output
    whole = tree(tmp_path / "undisturbed" / verb.out, verb.volatile)
    expected = weights(tmp_path / "undisturbed")
    numbers = list(INTERRUPTS)
    draw.shuffle(numbers)
    calls = range(1, counted.calls + 1)
    for i, at in enumerate(sorted(draw.sample(calls, min(scaled(1, 20), counted.calls)))):
        code, word = INTERRUPTS[numbers[i % 2]]
        done = run("here", fault=sends(numbers[i % 2]), at=at)
        if done.code == 0:  # it came when everything was done, and the result is there
            assert name.endswith(("train", "run", "init-routers")) or at > counted.calls - 4
        else:
            assert done.code == code, f"{done.code}: {done.output[-3000:]}"
            line = done.last_line()
            assert line.startswith(word), line
            assert [one for one in done.output.splitlines() if one.startswith(word)] == [line]
            assert "error:" not in done.output
            check_word(name, line, out, whole)
            files = sorted(tree(here) or {})
            assert not files or "nothing was written" not in line, f"at {at}: {line}, but {files}"
        assert not strays(here), f"at {at}: {strays(here)}"
        if done.code and not (verb.whole and out.exists()):
            more = ()
            has_output = any((here / file).exists() for file in (verb.out, *verb.beside))
            if name == "train" and last_whole_checkpoint(out):
                more = ("--resume",)
            elif has_output and name in ("esft score", "stats", "train"):
                more = ("--overwrite",)
            again = run("here", *more)
            assert again.code == 0, f"at {at}: {again.output[-3000:]}"
        assert weights(here) == expected, f"at {at}"
        if verb.whole:
            assert tree(out, verb.volatile) == whole, f"at {at}"
        shutil.rmtree(here)


def check_word(name: str, line: str, out: Path, whole: dict | None) -> None:
    """Assert that the line says what is there."""
    if VERBS[name].whole and name not in ("esft train", "esft score"):
        result = tree(out, VERBS[name].volatile)
        assert result in (None, whole)
        assert ("nothing was written" in line) == (result is None), line
        assert ("already complete: out" in line) == (result is not None), line
    elif "rerun to resume" in line:
        beside = [out.with_name(name) for name in VERBS[name].beside]
        paths = [out, Path(f"{out}-checkpoints"), *beside]
        assert any(path.exists() for path in paths), line
