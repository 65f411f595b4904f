"""A full disk, a folder that may not be written, a file that vanishes: one clear line, and nothing
half-written.
"""

import os
import re
import shutil

import pytest

from tests.faults.machine import DENIED, FULL, READ_ONLY, Done, Trial, strays, tree
from tests.faults.verbs import QUICK, VERBS
from tests.support.stress import STRESS, share

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
    """Return the files in a folder, of a verb that resumes only the weights outside checkpoints."""
    values = {}
    for file, value in (tree(folder) or {}).items():
        if "checkpoint" not in file and (VERBS[name].whole or file.endswith(".safetensors")):
            values[file] = value
    return values


@pytest.mark.parametrize("name", share(NAMES, 0))
def test_a_disk_that_is_full_or_may_not_be_written(faulty, inputs, tmp_path, name):
    """From a drawn write on there is no space: of a verb that makes a folder nothing stays."""
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
    assert tree(inputs) == before, "a fault reached what was only to be read"


@pytest.mark.parametrize(
    "name",
    share([name for name in QUICK if VERBS[name].reads], 2),
)
def test_a_file_that_is_gone(faulty, inputs, tmp_path, name):
    """A shard that vanished, or was cut: named, and nothing is written."""
    verb = VERBS[name]
    here = tmp_path / "here"
    here.mkdir()
    copied = tmp_path / "inputs"
    shutil.copytree(inputs, copied, symlinks=True)

    for recipe in copied.glob("*/study.yaml"):
        recipe.write_text(
            recipe.read_text().replace(
                str(inputs),
                str(copied),
            )
        )
    file = copied / verb.reads
    data = file.read_bytes()
    faults = ["gone", "cut"]
    if not STRESS:
        faults = [faults[len(name) % 2]]
    for fault in faults:
        file.unlink()
        if fault == "cut":
            file.write_bytes(data[: len(data) // 2])
        line = check(
            faulty.run(
                *verb.arguments(copied),
                root=here,
                before=verb.before,
            ),
            ".",
        )
        assert file.parent.name in line, line
        assert not list(here.rglob("*.safetensors"))
        assert not strays(here)
        file.write_bytes(data)


CONVERSIONS = ["xft upcycle", "xft merge", "xft export", "esft merge"]


@pytest.mark.parametrize("name", share(CONVERSIONS, 1))
def test_a_target_that_is_the_source_or_a_file(faulty, inputs, tmp_path, name):
    """Without --overwrite it is refused; with it the source is read before it is replaced."""
    verb = VERBS[name]
    here = tmp_path / "here"
    here.mkdir()
    (here / "file").write_text("mine")
    refused = "Not a directory|File exists|too long|which is a file|Output|out_dir is|out is"

    for target in ("file", "file/out", "x" * 256):
        argv = [target if part == verb.out else part for part in verb.arguments(inputs)]
        check(faulty.run(*argv, root=here), refused)
        assert (here / "file").read_text() == "mine" and os.listdir(here) == ["file"], target
    (here / "file").unlink()

    source = next(part for part in verb.arguments(inputs) if part.startswith(str(inputs)))
    shutil.copytree(source, here / "source")
    argv = []
    for part in verb.arguments(inputs):
        argv.append("source" if part in (source, verb.out) else part)
    before = tree(here / "source")
    check(faulty.run(*argv, root=here), "out_dir is|Output|Writing|target is")
    assert tree(here / "source") == before
    assert os.listdir(here) == ["source"]

    assert faulty.run(*verb.arguments(inputs), root=here).code == 0
    done = faulty.run(*argv, "--overwrite", root=here)
    expected = tree(here / "out") if done.code == 0 else before
    assert tree(here / "source") == expected, done.output
    assert not strays(here)
