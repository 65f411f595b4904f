"""kill -9 at calls that change files leaves the old state or the new one, and the next run
succeeds.

Each command is killed at calls drawn with a seed, after a drawn part of a write; if it makes fewer
calls than are drawn, then at all of them, and at some more than once. What is left must equal the
state before or the output of an undisturbed run, byte for byte; a rerun then resumes or starts
over, and produces the same bytes.
"""

import shutil
from pathlib import Path

import pytest

from moe_runtime.hf.training.saving import last_whole_checkpoint
from tests.faults.machine import Trial, kills, strays, tree
from tests.support.stress import STRESS, share

pytestmark = [pytest.mark.stress, pytest.mark.slow]

OVERWRITE = ("--overwrite",)
RESUME = ("--resume",)


class Killed(Trial):
    """A verb that is killed at drawn calls."""

    def __init__(self, faulty, inputs: Path, tmp_path: Path, name: str):
        super().__init__(faulty, inputs, tmp_path, name, "kill")
        self.calls = self.counted()
        self.expected = self.result("undisturbed")
        assert self.expected

    def kill(self, place: str, at: int, *more: str) -> None:
        done = self.run(
            place,
            *more,
            fault=kills(self.draw.randrange(256)),
            at=at,
        )
        assert done.code == -9, f"call {at} of {self.calls}: {done}"

    def forget(self, place: str) -> None:
        """Remove a finished case: there are thousands of folders."""
        shutil.rmtree(self.folder / place)


WHOLE = ("xft upcycle", "xft merge", "esft merge", "ultrafuser fuse", "esft select")


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("name", share(WHOLE, 0))
def test_atomic_output(faulty, inputs, tmp_path, name, replaces):
    """The output is new, or replaces an older target, which is set aside between two renames."""
    killed = Killed(faulty, inputs, tmp_path, name)
    out = tmp_path / "new" / killed.verb.out
    for at in killed.points(killed.calls, 1, 100):
        if replaces:
            out.parent.mkdir()
            if name == "esft select":
                out.write_text("{}")
            else:
                shutil.copytree(inputs / "dense", out)
        old = killed.result("new")
        killed.kill("new", at, *OVERWRITE)
        left = killed.result("new")
        for folder in out.parent.glob(f".{out.name}.old-*"):
            left = left or tree(folder)
        assert left in (old, killed.expected), f"killed at {at}: neither the old target nor the new"

        again = killed.run("new", *OVERWRITE)
        assert again.code == 0 and killed.result("new") == killed.expected, again.output
        assert strays(tmp_path / "new") == [], f"killed at {at}"
        killed.forget("new")


# verbs that resume, and their output that is the same in every run
RESUMES = {
    "train": (".safetensors", "out/config.json"),
    "esft train": (".safetensors", "out/expert_cfg.json"),
    "run": (".safetensors", "model/config.json"),
    "upit init-routers": (".safetensors",),
    "upit grow": (".safetensors", ".json"),
    "ultrafuser train": (".safetensors",),
    "esft score": ("out",),
    "stats": (".csv", ".png"),
}


def made(folder: Path, ends: tuple[str, ...]) -> dict[str, str]:
    """Return the hashes of a run's output, without checkpoints and hidden folders."""
    files = {}
    for name, value in (tree(folder) or {}).items():
        is_hidden = any(part.startswith(".") for part in Path(name).parts)
        if name.endswith(ends) and "checkpoint" not in name and not is_hidden:
            files[name] = value
    return files


IN_MAKE_TEST = ["train", "esft train"]


@pytest.mark.parametrize("name", RESUMES if STRESS else IN_MAKE_TEST)
def test_resumed_output(faulty, inputs, tmp_path, name):
    """A killed run leaves files of an undisturbed run, and the next run creates the rest.

    A verb that does not resume is run again with --overwrite.
    """
    killed = Killed(faulty, inputs, tmp_path, name)
    new = tmp_path / "new"
    expected = made(tmp_path / "undisturbed", RESUMES[name])

    assert expected
    for at in killed.points(killed.calls, 2 if name == "train" else 1, 100):
        killed.kill("new", at)
        left = made(new, RESUMES[name])
        left.pop("out/expansion.json", None)  # records the progress
        assert left.items() <= expected.items(), f"killed at {at}"

        again = killed.run("new", *options_of_the_next_run(killed, name, new))
        assert again.code == 0, f"killed at {at}: {again.output[-3000:]}"
        assert made(new, RESUMES[name]) == expected, f"killed at {at}"
        assert strays(new) == [], f"killed at {at}"
        killed.forget("new")


def options_of_the_next_run(killed: Killed, name: str, folder: Path) -> tuple[str, ...]:
    if name == "train" and last_whole_checkpoint(folder / "out"):
        return RESUME
    # `esft train` resumes from the checkpoints next to its output
    beside = () if name == "esft train" else killed.verb.beside
    has_output = any((folder / file).exists() for file in (killed.verb.out, *beside))
    if has_output and (killed.verb.whole or name in ("train", "stats")):
        return OVERWRITE
    return ()
