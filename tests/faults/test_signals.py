"""Ctrl-C and SIGTERM in every verb, between any two changes of files: 130 or 143, one line, and it goes on or begins anew."""

import os
import random
import shutil
from pathlib import Path

import pytest

from moe_runtime.hf.training.saving import last_whole_checkpoint
from tests.faults.machine import INTERRUPTS, NONE, Done, sends, strays, tree
from tests.faults.verbs import QUICK, TABLES, VERBS, Verb
from tests.support.stress import STRESS, scaled, share

pytestmark = [pytest.mark.stress, pytest.mark.slow]

VERBS_HERE = [name for name in VERBS if STRESS or name in QUICK]
WRITERS = [name for name in VERBS_HERE if VERBS[name].out]
READERS = [name for name in VERBS_HERE if not VERBS[name].out]


def check_stopped(done: Done, number: int) -> str:
    """Assert that a command ended as the signal asks, with one line; return the line."""
    code, word = INTERRUPTS[number]
    assert done.code == code, f"{done.code}: {done.output[-3000:]}"
    line = done.last_line()
    assert line.startswith(word), done.output[-2000:]
    assert sum(one.startswith(word) for one in done.output.splitlines()) == 1 and "error:" not in done.output
    return line


def weights(folder: Path, verb: Verb) -> dict[str, str]:
    """Return the bytes of the weights that a verb made, without checkpoints, and without what no run makes again."""
    files = {name: value for name, value in (tree(folder) or {}).items() if verb.repeats(name)}
    return {name: value for name, value in files.items() if name.endswith(".safetensors") and "checkpoint" not in name}


@pytest.mark.parametrize("name", share(WRITERS, 2))
def test_a_signal_between_two_changes(faulty, inputs, tmp_path, name):
    verb, draw = VERBS[name], random.Random(f"signal {name}")
    argv = verb.arguments(inputs)

    def run(place: str, *more: str, **fault) -> Done:
        (tmp_path / place).mkdir(exist_ok=True)
        return faulty.run(*argv, *more, root=tmp_path / place, before=verb.before, **fault)

    counted = run("undisturbed", fault=NONE)
    assert counted.code == 0, counted.output
    whole, want = tree(tmp_path / "undisturbed" / verb.out, verb.volatile), weights(tmp_path / "undisturbed", verb)
    numbers = list(INTERRUPTS)
    draw.shuffle(numbers)
    places = scaled(1, 6 if name in TABLES else 20)
    points = sorted(draw.sample(range(1, counted.calls + 1), min(places, counted.calls)))
    for i, at in enumerate(points):
        number = numbers[i % 2]
        done = run("here", fault=sends(number), at=at)
        out = tmp_path / "here" / verb.out
        if done.code == 0:  # it came when all was done, and what was asked for is there
            assert name in ("train", "run", "fuser train", "esft train", "upit init-routers") or at > counted.calls - 4
        else:
            line = check_stopped(done, number)
            check_word(name, line, out, whole)
            stands = sorted(tree(tmp_path / "here") or {})
            assert not stands or "nothing was written" not in line, f"at {at}: {line}, but there are {stands}"
        assert not strays(tmp_path / "here"), f"at {at}: {strays(tmp_path / 'here')}"
        if done.code and not (verb.whole and out.exists()):
            more = ("--resume_from_checkpoint", "true") if name == "train" and last_whole_checkpoint(out) else ()
            if any((tmp_path / "here" / one).exists() for one in verb.beside) and name == "esft score":
                more = ("--overwrite",)
            again = run("here", *more)
            assert again.code == 0, f"at {at}: {again.output[-3000:]}"
        assert weights(tmp_path / "here", verb) == want, f"at {at}"
        if verb.whole:
            assert tree(out, verb.volatile) == whole, f"at {at}"
        shutil.rmtree(tmp_path / "here")


def check_word(name: str, line: str, out: Path, whole: dict | None) -> None:
    """Assert that the line says what stands."""
    if VERBS[name].whole and name not in ("esft train", "esft score"):
        stands = tree(out, VERBS[name].volatile)
        assert stands in (None, whole)
        assert ("nothing was written" in line) == (stands is None), line
        assert ("whole already: out" in line) == (stands is not None), line
    elif "goes on" in line or "kept in" in line:
        places = [out, Path(f"{out}-checkpoints"), *(out.with_name(one) for one in VERBS[name].beside)]
        assert any(place.exists() for place in places), line


@pytest.mark.parametrize("number", list(INTERRUPTS), ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("name", share(READERS, 1))
def test_a_signal_in_a_verb_that_writes_nothing(faulty, inputs, tmp_path, name, number):
    """A moment by the clock: it ends so, or it was done before."""
    argv, draw = VERBS[name].arguments(inputs), random.Random(f"{name} {number}")
    longest = faulty.run(*argv, root=tmp_path).seconds
    stopped = 0
    for _ in range(scaled(1, 20)):
        done = faulty.run(*argv, root=tmp_path, signals=((draw.uniform(0.2, 0.6) * longest, int(number)),))
        if done.code != 0:
            check_stopped(done, number)
            stopped += 1
    assert os.listdir(tmp_path) == []
