"""A full disk, a folder that may not be written, a file that vanishes: one clear line, and nothing half-written.

The verbs come from the command line itself: a new one fails here until tests/faults/verbs.py knows how to run it.
"""

import os
import random
import re
import shutil
from pathlib import Path

import pytest

from tests.faults.machine import DENIED, FULL, READ_ONLY, Done, strays, tree
from tests.faults.verbs import QUICK, TABLES, VERBS, shipped
from tests.support.stress import STRESS, scaled, share

pytestmark = [pytest.mark.stress, pytest.mark.slow]

WRITERS = [name for name in VERBS if VERBS[name].out and (STRESS or name in QUICK)]
FORBIDS = {"read-only": READ_ONLY, "denied": DENIED}
FOLDERS = [name for name in WRITERS if VERBS[name].whole]


def test_every_verb_is_here():
    assert sorted(VERBS) == sorted(shipped())
    assert {name for name, verb in VERBS.items() if verb.out is None} == {
        "doctor", "esft apply", "upit choose", "fuser generate",
    }  # fmt: skip
    assert set(VERBS) > TABLES


def check(done: Done, what: str) -> str:
    """Assert that a command ended in one clear line of an error that says `what`; return the line."""
    assert done.code == 1, f"{done.code}: {done.output[-3000:]}"
    line = done.last_line()
    assert line.startswith("error: ") and re.search(what, line), done.output[-3000:]
    assert done.output.count("error: ") == 1
    return line


def made(folder: Path, name: str) -> dict[str, str]:
    """Return what stands in a folder, of a verb that goes on there without what it goes on with."""
    verb = VERBS[name]
    files = {one: value for one, value in (tree(folder) or {}).items() if "checkpoint" not in one and verb.repeats(one)}
    return {one: value for one, value in files.items() if verb.whole or one.endswith(".safetensors")}


@pytest.fixture
def run(faulty, inputs, tmp_path):
    """Run a verb in a folder of its own, with a fault."""

    def run(name: str, place: str, *more: str, **fault) -> Done:
        (tmp_path / place).mkdir(exist_ok=True)
        verb = VERBS[name]
        return faulty.run(*verb.arguments(inputs), *more, root=tmp_path / place, before=verb.before, **fault)

    return run


@pytest.mark.parametrize("name", share(WRITERS, 0))
def test_a_full_disk(run, inputs, tmp_path, name):
    """From a drawn write on there is no space: of a verb that makes a folder nothing stays, and later it runs through."""
    before = tree(inputs)
    draw, places = random.Random(f"full {name}"), scaled(1, 10 if name in TABLES else 40)
    counted = run(name, "undisturbed", fault=(*FULL[:0], 0, 0, FULL[2]))
    assert counted.code == 0, counted.output
    want = made(tmp_path / "undisturbed", name)
    for at in sorted(draw.sample(range(1, counted.calls + 1), min(places, counted.calls))):
        done = run(name, "full", fault=FULL, at=at)
        line = check(done, "No space left on device|is the disk full")
        assert re.search(r"out|logs", line), f"no path in {line}"
        left = made(tmp_path / "full", name)
        assert left.items() <= want.items(), f"at {at}: {sorted(left)}"
        assert not strays(tmp_path / "full"), f"at {at}: {strays(tmp_path / 'full')}"
        shutil.rmtree(tmp_path / "full")
    assert tree(inputs) == before, "a fault reached what was only to be read"


@pytest.mark.parametrize("name", share(WRITERS, 1))
def test_a_folder_that_may_not_be_written(run, tmp_path, name):
    for word in FORBIDS if STRESS else list(FORBIDS)[len(name) % 2 :][:1]:
        done = run(name, "here", fault=FORBIDS[word], at=1)
        line = check(done, "Read-only file system" if word == "read-only" else "Permission denied")
        assert "out" in line or "logs" in line
        assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("name", share([name for name in QUICK if VERBS[name].reads], 2))
def test_a_file_that_is_gone(faulty, inputs, tmp_path, name):
    """A shard that vanished, or was cut: named, and nothing is written."""
    verb = VERBS[name]
    own = tmp_path / "inputs"
    shutil.copytree(inputs, own, symlinks=True)
    for file in (own / "upit" / "routers").rglob("*.json"):
        file.write_text(file.read_text().replace(str(inputs), str(own)))
    for recipe in own.glob("*/study.yaml"):
        recipe.write_text(recipe.read_text().replace(str(inputs), str(own)))
    (tmp_path / "here").mkdir()
    for fault in ("gone", "cut") if STRESS else ("gone", "cut")[len(name) % 2 :][:1]:
        file = own / verb.reads
        data = file.read_bytes()
        if fault == "gone":
            file.unlink()
        else:
            file.write_bytes(data[: len(data) // 2])
        done = faulty.run(*verb.arguments(own), root=tmp_path / "here", before=verb.before)
        file.write_bytes(data)
        line = check(done, ".")
        assert re.search(re.escape(file.parent.name), line), line
        assert not list((tmp_path / "here").rglob("*.safetensors")) and not strays(tmp_path / "here")


@pytest.mark.parametrize("name", share(FOLDERS, 2))
def test_a_target_that_cannot_be(run, tmp_path, name):
    """A file where a folder should come, a folder where a file should, a file as the parent, a name too long."""
    verb = VERBS[name]
    place = tmp_path / "here"
    place.mkdir()
    is_file = name in ("esft score", "esft select")
    (place / "out").mkdir() if is_file else (place / "out").write_text("mine")
    check(run(name, "here"), "out is|out_dir is")
    assert (place / "out").is_dir() if is_file else (place / "out").read_text() == "mine"
    assert [path.name for path in place.iterdir()] == ["out"]
    (place / "out").rmdir() if is_file else (place / "out").unlink()
    (place / "file").write_text("mine")
    for target in ("file/out", "x" * 256) if STRESS else ("file/out", "x" * 256)[len(name) % 2 :][:1]:
        given = [target if part == verb.out else part for part in verb.argv]
        assert given != list(verb.argv)
        check(run_with(run, name, given), "Not a directory|File exists|too long|which is a file|out_dir is|out is")
        assert [path.name for path in place.iterdir()] == ["file"], target


def run_with(run, name: str, argv: list[str]) -> Done:
    """Run a verb with another command line, in the same place."""
    verb = VERBS[name]
    VERBS[name] = verb._replace(argv=tuple(argv))
    try:
        return run(name, "here")
    finally:
        VERBS[name] = verb


CONVERSIONS = ["upcycle", "to-mergeable", "merge", "xft export-official", "esft merge", "upit export-mixtral"]


@pytest.mark.parametrize("name", share(CONVERSIONS, 1))
def test_a_target_that_is_the_source(faulty, inputs, tmp_path, name):
    """Without --overwrite it is refused; with it the source is read to its end before it is replaced."""
    verb, place = VERBS[name], tmp_path / "here"
    place.mkdir()
    source = next(part for part in verb.argv if part.startswith("{in}"))
    shutil.copytree(source.replace("{in}", str(inputs)), place / "source")
    argv = ["source" if part in (source, verb.out) else part.replace("{in}", str(inputs)) for part in verb.argv]
    before = tree(place / "source")
    check(faulty.run(*argv, root=place), "out_dir is|out is|target is")
    assert tree(place / "source") == before and os.listdir(place) == ["source"]
    undisturbed = [part.replace("{in}", str(inputs)) for part in verb.argv]
    assert faulty.run(*undisturbed, root=place).code == 0
    done = faulty.run(*argv, "--overwrite", root=place)
    found = tree(place / "source")
    assert found == (tree(place / "out") if done.code == 0 else before), done.output
    assert not strays(place)
