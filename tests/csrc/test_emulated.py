"""csrc/ on the emulator: the checks against numpy, and planted bugs."""

import operator
import re
from pathlib import Path

import pytest
import yaml

from tests.csrc import emulator
from tests.support.stress import scaled

pytestmark = [emulator.needs_cxx, pytest.mark.stress]


# of warps and of asynchronous copies
SEEDS = scaled((1,), (0, 1, 2))


def test_against_numpy():
    done = emulator.check(emulator.build(), seeds=SEEDS)
    assert done.returncode == 0, done.stderr


@emulator.needs_nvcc
def test_the_stored_ptx_is_of_these_sources():
    release = re.compile(r"^// Cuda compilation tools, (.*)$", re.M)
    fresh = emulator.to_store()
    old = emulator.stored()
    if release.findall(old) != release.findall(fresh):
        pytest.skip("nvcc is another one than the stored PTX was made by")
    assert old == fresh, "run python -m tests.csrc.emulator"


PLANTED = yaml.safe_load(Path(__file__).with_name("planted.yaml").read_text())


@emulator.needs_nvcc
@pytest.mark.parametrize("bug", PLANTED, ids=operator.itemgetter("what"))
def test_a_planted_bug_is_found(bug):
    library = emulator.build((bug["file"], bug["text"], bug["instead"]))
    done = emulator.check(library, bug["check"], seeds=(0, 1, 2))
    assert done.returncode != 0, "not detected"
