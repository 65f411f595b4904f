"""A full disk, a folder that may not be written, a file that vanishes: one clear line, and nothing
half-written.
"""

import os
import random
import re
import shutil

import pytest

from tests.faults.machine import DENIED, FULL, READ_ONLY, Done, strays, tree
from tests.faults.verbs import QUICK, VERBS
from tests.support.stress import STRESS, scaled, share

pytestmark = [pytest.mark.stress, pytest.mark.slow]

NAMES = list(VERBS) if STRESS else QUICK


def check(done: Done, what: str) -> str:
    """Assert that a command ended in one clear line of an error that says `what`; return
    the line.
    """
    assert done.code == 1, f"{done.code}: {done.output[-3000:]}"
    line = done.last_line()
    assert line.startswith("error: ") and re.search(what, line), done.output[-3000:]
    assert done.output.count("error: ") == 1
    return line


def made(folder, name: str) -> dict[str, str]:
    """Return what stands in a folder, of a verb that resumes there without what it resumes from."""
    files = {one: value for one, value in (tree(folder) or {}).items() if "checkpoint" not in one}
    return {
        one: value
        for one, value in files.items()
        if VERBS[name].whole or one.endswith(".safetensors")
    }


@pytest.fixture
def run(faulty, inputs, tmp_path):
    """Run a verb in a folder of its own, with a fault."""

    def run(name: str, place: str, *more: str, **fault) -> Done:
        (tmp_path / place).mkdir(exist_ok=True)
        verb = VERBS[name]
        return faulty.run(
            *verb.arguments(inputs), *more, root=tmp_path / place, before=verb.before, **fault
        )

    return run


@pytest.mark.parametrize("name", share(NAMES, 0))
def test_a_disk_that_is_full_or_may_not_be_written(run, inputs, tmp_path, name):
    """From a drawn write on there is no space: of a verb that makes a folder nothing stays."""
    before = tree(inputs)
    draw = random.Random(f"full {name}")
    counted = run(name, "undisturbed", fault=(*FULL[:0], 0, 0, FULL[2]))
    assert counted.code == 0, counted.output
    want = made(tmp_path / "undisturbed", name)
    for at in sorted(draw.sample(range(1, counted.calls + 1), min(scaled(1, 40), counted.calls))):
        line = check(
            run(name, "full", fault=FULL, at=at), "No space left on device|is the disk full"
        )
        assert re.search(r"out|logs", line), f"no path in {line}"
        left = made(tmp_path / "full", name)
        assert left.items() <= want.items(), f"at {at}: {sorted(left)}"
        assert not strays(tmp_path / "full"), f"at {at}: {strays(tmp_path / 'full')}"
        shutil.rmtree(tmp_path / "full")
    fault, what = draw.choice([(READ_ONLY, "Read-only file system"), (DENIED, "Permission denied")])
    line = check(run(name, "here", fault=fault, at=1), what)
    assert ("out" in line or "logs" in line) and not list((tmp_path / "here").iterdir())
    assert tree(inputs) == before, "a fault reached what was only to be read"


@pytest.mark.parametrize("name", share([name for name in QUICK if VERBS[name].reads], 2))
def test_a_file_that_is_gone(faulty, inputs, tmp_path, name):
    """A shard that vanished, or was cut: named, and nothing is written."""
    verb = VERBS[name]
    own = tmp_path / "inputs"
    shutil.copytree(inputs, own, symlinks=True)
    for recipe in own.glob("*/study.yaml"):
        recipe.write_text(recipe.read_text().replace(str(inputs), str(own)))
    (tmp_path / "here").mkdir()
    file = own / verb.reads
    data = file.read_bytes()
    for fault in ("gone", "cut") if STRESS else ("gone", "cut")[len(name) % 2 :][:1]:
        file.unlink()
        if fault == "cut":
            file.write_bytes(data[: len(data) // 2])
        line = check(
            faulty.run(*verb.arguments(own), root=tmp_path / "here", before=verb.before), "."
        )
        assert re.search(re.escape(file.parent.name), line), line
        assert not list((tmp_path / "here").rglob("*.safetensors")) and not strays(
            tmp_path / "here"
        )
        file.write_bytes(data)


@pytest.mark.parametrize("name", share(["xft upcycle", "xft merge", "xft export", "esft merge"], 1))
def test_a_target_that_is_the_source_or_a_file(faulty, inputs, tmp_path, name):
    """Without --overwrite it is refused; with it the source is read to its end before it is
    replaced.
    """
    verb = VERBS[name]
    place = tmp_path / "here"
    place.mkdir()
    (place / "file").write_text("mine")
    for target in ("file", "file/out", "x" * 256):
        argv = [target if part == verb.out else part for part in verb.arguments(inputs)]
        check(
            faulty.run(*argv, root=place),
            "Not a directory|File exists|too long|which is a file|Output|out_dir is|out is",
        )
        assert (place / "file").read_text() == "mine" and os.listdir(place) == ["file"], target
    (place / "file").unlink()
    source = next(part for part in verb.argv if part.startswith("{in}"))
    shutil.copytree(source.replace("{in}", str(inputs)), place / "source")
    argv = [
        "source" if part in (source, verb.out) else part.replace("{in}", str(inputs))
        for part in verb.argv
    ]
    before = tree(place / "source")
    check(faulty.run(*argv, root=place), "out_dir is|Output|Writing|target is")
    assert tree(place / "source") == before and os.listdir(place) == ["source"]
    assert faulty.run(*verb.arguments(inputs), root=place).code == 0
    done = faulty.run(*argv, "--overwrite", root=place)
    found = tree(place / "source")
    assert found == (tree(place / "out") if done.code == 0 else before), done.output
    assert not strays(place)
