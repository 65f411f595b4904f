"""kill -9 at calls that change files: the old state or the new one is whole, and the next run ends
well.

Each command is killed at calls drawn with a seed, a drawn part of a write done; where it makes
fewer than are asked for, at all of them, and at some with more than one part. What stands then must
be what stood before or what an undisturbed run makes, byte for byte; the same command then resumes,
or starts anew, and ends with those bytes too.
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
        """Remove what is no longer looked at: folders of thousands of cases."""
        shutil.rmtree(self.folder / place)


WHOLE = ("xft upcycle", "xft merge", "esft merge", "ultrafuser fuse", "esft select")


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("name", share(WHOLE, 0))
def test_what_appears_whole(faulty, inputs, tmp_path, name, replaces):
    """In an empty place, or in that of an older target, which is between two renames set aside."""
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


# of what resumes: these are what it is for, and the same in every run
GOES_ON = {
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
    """Return the bytes of what a run makes, without checkpoints and hidden folders."""
    files = {}
    for name, value in (tree(folder) or {}).items():
        is_hidden = any(part.startswith(".") for part in Path(name).parts)
        if name.endswith(ends) and "checkpoint" not in name and not is_hidden:
            files[name] = value
    return files


IN_MAKE_TEST = ["train", "esft train"]


@pytest.mark.parametrize("name", GOES_ON if STRESS else IN_MAKE_TEST)
def test_what_goes_on(faulty, inputs, tmp_path, name):
    """What a killed run leaves is the undisturbed run's; the next run makes the rest.

    Where a verb does not resume, it is started anew with --overwrite.
    """
    killed = Killed(faulty, inputs, tmp_path, name)
    new = tmp_path / "new"
    expected = made(tmp_path / "undisturbed", GOES_ON[name])

    assert expected
    for at in killed.points(killed.calls, 2 if name == "train" else 1, 100):
        killed.kill("new", at)
        left = made(new, GOES_ON[name])
        left.pop("out/expansion.json", None)  # says how far it came
        assert left.items() <= expected.items(), f"killed at {at}"

        again = killed.run("new", *options_of_the_next_run(killed, name, new))
        assert again.code == 0, f"killed at {at}: {again.output[-3000:]}"
        assert made(new, GOES_ON[name]) == expected, f"killed at {at}"
        assert strays(new) == [], f"killed at {at}"
        killed.forget("new")


def options_of_the_next_run(killed: Killed, name: str, folder: Path) -> tuple[str, ...]:
    if name == "train" and last_whole_checkpoint(folder / "out"):
        return RESUME
    # of `esft train`, what is beside are checkpoints, from which it goes on
    beside = () if name == "esft train" else killed.verb.beside
    has_output = any((folder / file).exists() for file in (killed.verb.out, *beside))
    if has_output and (killed.verb.whole or name in ("train", "stats")):
        return OVERWRITE
    return ()
