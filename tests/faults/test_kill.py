"""kill -9 at calls that change files: the old state or the new one is whole, and the next run ends well.

Each command is killed at calls drawn with a seed, half of a write done. What stands then must be what stood before or what an
undisturbed run makes, byte for byte; the same command then goes on, or starts anew, and ends with those bytes too.
"""

import random
import shutil
from pathlib import Path

import pytest

from tests.faults.machine import KILL, strays, tree
from tests.faults.verbs import VERBS
from tests.support.stress import scaled

pytestmark = [pytest.mark.stress, pytest.mark.slow]

OVERWRITE = ("--overwrite",)
RESUME = ("--resume_from_checkpoint", "true")


class Killed:
    """A verb, its undisturbed run, and folders in which it is killed."""

    def __init__(self, faulty, inputs: Path, tmp_path: Path, name: str):
        self.faulty, self.verb, self.folder = faulty, VERBS[name], tmp_path
        self.argv = self.verb.arguments(inputs)
        self.draw = random.Random(f"kill {name}")
        done = self.run("undisturbed")
        assert done.code == 0, done.output
        self.calls, self.want = done.calls, self.kept("undisturbed")
        assert self.calls and self.want and not strays(tmp_path / "undisturbed")

    def run(self, place: str, *more: str, **fault):
        (self.folder / place).mkdir(exist_ok=True)
        return self.faulty.run(*self.argv, *more, root=self.folder / place, before=self.verb.before, **fault)

    def kept(self, place: str) -> dict | None:
        """Return the bytes of what the verb is for."""
        return tree(self.folder / place / self.verb.out, self.verb.volatile)

    def points(self, few: int, many: int, calls: int | None = None) -> list[int]:
        """Draw different calls."""
        calls = calls or self.calls
        return sorted(self.draw.sample(range(1, calls + 1), min(scaled(few, many), calls)))

    def kill(self, place: str, at: int, *more: str) -> None:
        done = self.run(place, *more, fault=KILL, at=at)
        # volatile names differ in length, so that the last call may be one that this run does not make
        assert done.code == -9, f"call {at} of {self.calls}: {done}"

    def forget(self, place: str) -> None:
        """Remove what is no longer looked at: folders of thousands of cases."""
        shutil.rmtree(self.folder / place)


WHOLE = ("upcycle", "merge", "esft merge", "fuse", "esft select")


@pytest.mark.parametrize("name", WHOLE)
def test_what_appears_whole(faulty, inputs, tmp_path, name):
    killed = Killed(faulty, inputs, tmp_path, name)
    for at in killed.points(2, 100):
        killed.kill("new", at)
        assert killed.kept("new") in (None, killed.want), f"killed at {at}: half a target"
        again = killed.run("new", *OVERWRITE)
        assert again.code == 0 and killed.kept("new") == killed.want, again.output
        assert not strays(tmp_path / "new"), f"killed at {at}"
        killed.forget("new")


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_replaced(faulty, inputs, tmp_path, name):
    """In the place of an older target: the old one whole, then the new one whole."""
    killed = Killed(faulty, inputs, tmp_path, name)
    is_file = (tmp_path / "undisturbed" / killed.verb.out).is_file()
    calls = None
    for at in killed.points(2, 100, killed.calls):
        out = tmp_path / "old" / killed.verb.out
        out.parent.mkdir()
        if is_file:
            out.write_text("{}")
        else:
            shutil.copytree(inputs / "dense", out)
            (out / "folder").mkdir()
            (out / "folder" / "note").write_text("old")
        old = killed.kept("old")
        killed.kill("old", at, *OVERWRITE)
        assert killed.kept("old") in (old, killed.want), f"killed at {at}: neither the old target nor the new"
        again = killed.run("old", *OVERWRITE)
        calls = calls or again.calls
        assert again.code == 0 and killed.kept("old") == killed.want, again.output
        assert not strays(tmp_path / "old"), f"killed at {at}"
        killed.forget("old")
