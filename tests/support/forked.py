"""Run pytest in forks of this process, which has imported the large libraries once, so that a run
starts in one second instead of ten.

Nothing below the root of the tree may stay imported in a fork, since the tested tree is a copy of
the one with this module.
"""

import functools
import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

LIBRARIES = ("torch._dynamo", "triton", "transformers.modeling_utils", "transformers.trainer")
OURS = ("bench", "moe_runtime", "papers", "tests")


@functools.cache
def preload() -> None:
    """Import what every run of the tests imports, like tests/conftest.py."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    for name in LIBRARIES:
        importlib.import_module(name)


def environment(root: Path) -> dict[str, str]:
    """Return an environment in which Python imports the copy below `root`."""
    own = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | own


def run_pytest(
    root: Path, arguments: list[str], timeout: float | None, output: Path | str = os.devnull
) -> int | None:
    """Run pytest in the tree `root`; return its exit code, or None after `timeout` seconds.

    Its output goes to the file `output`. A fork killed by a signal returns the negative signal
    number.
    """
    preload()
    child = os.fork()
    if child == 0:
        _run(root, arguments, output)
    deadline = time.monotonic() + (timeout or float("inf"))
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)


def _run(root: Path, arguments: list[str], output: Path | str) -> None:
    """Run in the fork: leave this tree, enter the other one, and exit with pytest's exit code."""
    code = 70
    try:
        os.setsid()
        stdout = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(stdout, stream)
        os.chdir(root)
        os.environ.update(environment(root))
        sys.dont_write_bytecode = True
        for name in list(sys.modules):
            if name.partition(".")[0] in OURS:
                del sys.modules[name]
        sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", os.getcwd()))]
        importlib.invalidate_caches()
        code = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
