"""The fault server and the inputs that all fault tests share."""

import os
import sys
from pathlib import Path

import pytest

from tests.faults import machine


@pytest.fixture(scope="session")
def faulty(tmp_path_factory) -> machine.Machine:
    """The server that runs commands with faults, one for all workers."""
    if machine.COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler to build the shim")
    base = tmp_path_factory.getbasetemp()
    owner = os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
        owner = os.getppid()
    return machine.Machine(base / "faults", owner)


@pytest.fixture(scope="session")
def inputs(faulty) -> Path:
    """The folder that the verbs read from, created once for all workers."""
    folder = faulty.folder / "inputs"
    with faulty.lock("inputs"):
        if not folder.exists():
            done = faulty.run(
                folder,
                root=faulty.folder,
                main="tests.faults.inputs:make",
            )
            assert done.code == 0, done.output
    return folder
