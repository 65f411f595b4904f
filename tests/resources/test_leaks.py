"""Nothing grows over 1,000 steps: tensors, files, threads, memory; fewer of what is slow, and all of them in `make stress`."""

import json

import pytest
import torch

from moe_runtime.native.library import cpp
from tests.resources import steps
from tests.support import limited


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What grew on each way and with each planted leak, all of them in one process."""
    ways = [way for way in steps.WAYS if way != "cpp" or cpp.why_not(torch.device("cpu")) is None]
    code = (
        "import os, sys; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from tests.resources import steps; steps.main(*sys.argv[1:])"
    )
    done = limited.run(code, *ways, *steps.PLANTED)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"way"')]
    return {line["way"]: line["grown"] for line in lines}, done.stderr


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("way", steps.WAYS)
def test_nothing_grows(way, told):
    if way == "cpp" and (reason := cpp.why_not(torch.device("cpu"))):
        pytest.skip(reason)
    ways, errors = told
    assert way in ways, errors[-3000:]
    assert ways[way] == {}


@pytest.mark.parametrize(
    "leak, name", [("a tensor", "tensors"), ("a file", "files"), ("a thread", "threads"), ("bytes", "bytes")]
)
def test_a_planted_leak_is_seen(leak, name, told):
    assert name in told[0][leak]
