"""A writer of a checkpoint that is killed at any moment: one process imports torch, its children
are killed.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import ROOT, environment, siblings, snapshot, ten_tensors, write

# a shard left open is an error
pytestmark = [
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]

KILL = """
import os, signal, sys, time
import torch
from moe_runtime.io import checkpoint, files
from moe_runtime.io.checkpoint import CheckpointWriter
torch.set_num_threads(1)

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def nth(n, function):
    calls = []
    def wrapped(*args, **options):
        calls.append(1)
        return die() if len(calls) == n else function(*args, **options)
    return wrapped

def arm(moment):
    if moment == "second shard":
        checkpoint.save_file = nth(2, checkpoint.save_file)
    elif moment == "shards renamed":
        os.rename = nth(3, os.rename)
    elif moment == "before the move":
        files._move_in = die
    elif moment == "after the renames":
        files.shutil.rmtree = die
    elif moment == "between the renames":
        os.rename = nth(7, os.rename)

def write(out, moment, overwrite):
    arm(moment)
    with CheckpointWriter(out, 800, overwrite=overwrite) as writer:
        for i in range(10):
            if moment == f"after {i}":
                die()
            writer.add(f"new.{i}", torch.full((4, 25), float(i)))
            if moment.startswith("after ms"):
                time.sleep(0.002)

for line in sys.stdin:
    out, moment, overwrite = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        try:
            write(out, moment, overwrite == "True")
        finally:
            os._exit(0)
    if moment.startswith("after ms"):
        time.sleep(float(moment.split()[2]) / 1000)
        os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], flush=True)
"""

STEPS = [
    "after 0",
    "after 1",
    "after 5",
    "after 9",
    "second shard",
    "shards renamed",
    "before the move",
]
KILLS = [
    (moment, False)
    for moment in [*STEPS, *(f"after ms {i}" for i in (1, 5, 9, 13, 17, 21, 25, 29))]
]
KILLS += [
    (moment, True)
    for moment in [*STEPS, "after the renames", "between the renames", "after ms 6", "after ms 26"]
]


@pytest.fixture(scope="module")
def killer():
    """Kill a writer of `out` at a moment; returns the signal that ended it."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
    )

    def kill(out: Path, moment: str, overwrite: bool) -> int:
        process.stdin.write(f"{out}\t{moment}\t{overwrite}\n")
        process.stdin.flush()
        return os.WTERMSIG(int(process.stdout.readline()))

    with process:
        yield kill
        process.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("moment, overwrite", KILLS)
def test_sigkill(tmp_path, killer, moment, overwrite):
    old = ten_tensors()
    out = tmp_path / "out"
    new = {f"new.{i}": torch.full((4, 25), float(i)) for i in range(10)}
    new_files = snapshot(write(tmp_path / "reference", new, 800))
    shutil.rmtree(tmp_path / "reference")
    before = snapshot(write(out, old)) if overwrite else None
    ended_by = killer(out, moment, overwrite)
    after = snapshot(out) if out.exists() else None
    if moment.startswith("after ms"):
        assert after in (before, new_files)
    else:
        assert ended_by == 9
        # between two renames neither is there; the old one lies beside, and the next writer puts it
        # back
        assert after == {"after the renames": new_files, "between the renames": None}.get(
            moment, before
        )
    if after != new_files:
        left = {"between the renames": 2}.get(moment, 1)
        assert len(siblings(out)) == left or moment.startswith("after ms")
        assert all(re.fullmatch(r"\.out\.(tmp|old)-\d+-\d+", name) for name in siblings(out))
    write(out, new, 800, overwrite=overwrite or after is not None)
    assert siblings(out) == []
    assert snapshot(out) == new_files


def test_killed_between_two_renames_the_old_folder_is_whole_again(tmp_path, killer):
    out = write(tmp_path / "out", ten_tensors())
    before = snapshot(out)
    killer(out, "between the renames", True)
    assert not out.exists()
    with pytest.raises(ValueError, match="already exists"):
        write(out, ten_tensors())
    assert snapshot(out) == before
