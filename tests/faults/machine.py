"""Run a command with a fault: its n-th call that changes files kills it, fails or delivers a
signal; then inspect what is left.
"""

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.faults.verbs import VERBS
from tests.support.patience import PATIENCE
from tests.support.stress import scaled

ROOT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).with_name("shim.c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

_SPACE = 1
_FOLDER = 2
_ALL = 7
NONE = (0, 0, _ALL)
FULL = (3, errno.ENOSPC, _SPACE)  # from the n-th call on
READ_ONLY = (3, errno.EROFS, _FOLDER)
DENIED = (3, errno.EACCES, _FOLDER)


def kills(share: int) -> tuple[int, int, int]:
    """Return a fault that kills the process after writing `share` 256ths of that call's data."""
    return (1, share, _ALL)


def sends(number: int) -> tuple[int, int, int]:
    """Return a fault that sends the process a signal."""
    return (2, int(number), _ALL)


class Done(NamedTuple):
    """How a command ended."""

    code: int  # negative: killed by that signal
    calls: int | None  # number of calls that changed files; None if it was killed
    output: str

    def last_line(self) -> str:
        """Return the last line printed; fail if there is a traceback."""
        assert "Traceback" not in self.output, self.output[-4000:]
        return (self.output.strip().splitlines() or [""])[-1]


class Machine:
    """The server and its folder, both shared by the workers of a test run."""

    def __init__(self, folder: Path, owner: int):
        self.folder = folder
        self.owner = owner
        folder.mkdir(parents=True, exist_ok=True)
        with self.lock("shim"):
            self.shim = folder / "shim.so"
            if not self.shim.exists():
                new = self.shim.with_suffix(".new")
                subprocess.run(
                    [COMPILER, "-shared", "-fPIC", "-O1", "-o", new, SHIM, "-ldl"],
                    check=True,
                    capture_output=True,
                )
                new.rename(self.shim)
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        # the path of a socket must be short
        self.socket = Path(tempfile.gettempdir(), f"faults-{name}")

    def lock(self, name: str):
        """Acquire a lock; closing the returned file releases it."""
        file = open(self.folder / f"{name}.lock", "w")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def run(
        self,
        *argv,
        root: Path,
        fault: tuple[int, int, int] = NONE,
        at: int = 0,
        main: str = "",
    ) -> Done:
        """Run a command in `root`, the folder that the fault applies to, or call `main`, a
        module:function.
        """
        log = self.folder / f"log-{os.getpid()}-{time.monotonic_ns()}"
        case = {
            "argv": list(map(str, argv)),
            "cwd": str(root),
            "root": str(root),
            "log": str(log),
            "fault": fault,
            "at": at,
            "main": main,
            "limit": PATIENCE,
        }
        answer = json.loads(self._ask(json.dumps(case).encode() + b"\n"))
        output = log.read_text(errors="replace")
        calls_file = Path(f"{log}.calls")
        calls = int(calls_file.read_text()) if calls_file.exists() else None
        for file in (log, calls_file):
            file.unlink(missing_ok=True)
        assert not answer["is_late"], f"{argv} did not end within {PATIENCE} s:\n{output[-4000:]}"
        return Done(answer["code"], calls, output)

    def _ask(self, request: bytes) -> bytes:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(str(self.socket))
                except OSError:
                    self._start()
                    continue
                connection.sendall(request)
                with connection.makefile("rb") as answer:
                    return answer.readline()
        raise AssertionError("the server does not answer")

    def _start(self) -> None:
        with self.lock("server"), socket.socket(socket.AF_UNIX) as connection:
            if connection.connect_ex(str(self.socket)) == 0:
                connection.sendall(b"\n")
                return
            self.socket.unlink(missing_ok=True)
            # drop the variables of pytest and coverage
            kept = {}
            for k, v in os.environ.items():
                if not k.startswith(("PYTEST", "COV_")):
                    kept[k] = v
            env = kept | {
                "LD_PRELOAD": str(self.shim),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "CUDA_VISIBLE_DEVICES": "",
                "TRITON_INTERPRET": "1",
                "MOE_RUNTIME_BACKEND": "torch",
                "COLUMNS": "200",
                "HF_HOME": str(self.folder / "hf"),
                "XDG_CACHE_HOME": str(self.folder / "cache"),
            }
            with open(self.folder / "server.log", "wb") as log:
                server = subprocess.Popen(
                    [sys.executable, "-m", "tests.faults.server", self.socket, str(self.owner)],
                    cwd=ROOT,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            end = time.monotonic() + PATIENCE
            while not self.socket.exists():
                if server.poll() is not None or time.monotonic() > end:
                    raise AssertionError((self.folder / "server.log").read_text()[-4000:])
                time.sleep(0.05)


class Trial:
    """A verb that runs in subfolders of `folder`, with and without faults."""

    def __init__(self, machine: Machine, inputs: Path, folder: Path, name: str, purpose: str):
        self.machine = machine
        self.folder = folder
        self.verb = VERBS[name]
        self.argv = self.verb.arguments(inputs)
        self.draw = random.Random(f"{purpose} {name}")

    def run(self, place: str, *more: str, **fault) -> Done:
        """Run the verb in the folder `place`."""
        root = self.folder / place
        root.mkdir(exist_ok=True)
        return self.machine.run(
            *self.argv,
            *more,
            root=root,
            **fault,
        )

    def counted(self, fault: tuple[int, int, int] = NONE) -> int:
        """Run the verb undisturbed; return the number of its calls that `fault` applies to."""
        done = self.run("undisturbed", fault=(*NONE[:2], fault[2]))
        assert done.code == 0 and done.calls, done.output
        assert not strays(self.folder / "undisturbed")
        return done.calls

    def result(self, place: str) -> dict[str, str] | None:
        """Return the hashes of the verb's output."""
        return tree(self.folder / place / self.verb.out)

    def points(self, calls: int, few: int, many: int) -> list[int]:
        """Draw that many calls; no call repeats before every call has been drawn."""
        rounds, rest = divmod(scaled(few, many), calls)
        every = range(1, calls + 1)
        return sorted([*every] * rounds + self.draw.sample(every, rest))


def tree(folder: Path) -> dict[str, str] | None:
    """Return {path: hash} of all files in a folder, following links; None if it does not exist."""
    if not folder.exists():
        return None
    hashes = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        if path.is_file():
            name = str(path.relative_to(folder))
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def strays(folder: Path) -> list[str]:
    """Return what a killed writer left in a folder: hidden files and folders, at any depth."""
    hidden = [path for path in folder.rglob(".*") if path.name != ".locks"]
    return sorted(str(path.relative_to(folder)) for path in hidden)


INTERRUPTS = {
    signal.SIGINT: (130, "interrupted"),
    signal.SIGTERM: (143, "terminated"),
}
