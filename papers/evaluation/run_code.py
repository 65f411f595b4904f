"""Run programs written by a model, each in a child process, and report which of them run to their
end.

A child has an empty temporary folder, an almost empty environment, no open files of the parent, a
session of its own, and limits on CPU time, memory, open files and written bytes. Where bubblewrap
(`bwrap`) is installed, or else where `unshare` may create user namespaces, it also has no network
and can signal no process outside; under bubblewrap it can write to its folder alone. It is killed
when it times out, and dies with its parent.

This limits what models write by accident. It does not hold a program that was written to break out:
such a program can read what the user can read, without bubblewrap write it too, and can forge its
verdict. Use a container or a virtual machine.
"""

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from moe_runtime.config import one_line

WALL = 5  # wall-clock limit as a multiple of the CPU time, generous for busy machines
MEMORY = 1 << 30  # bytes of address space
WRITTEN = 1 << 20  # bytes of a file
PROCESSES = 64  # in a user namespace, where they can be counted per program
PROBE = 30  # seconds in which a way to confine a program must work

# ways to confine a program, the strongest first; {} is its folder
CONFINED = {
    "bwrap": (
        "bwrap",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--bind",
        "{}",
        "{}",
        "--chdir",
        "{}",
        "--unshare-all",
        "--cap-drop",
        "ALL",
        "--new-session",
        "--die-with-parent",
    ),
    "unshare": ("unshare", "--user", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child"),
    "limits": (),
}


class Verdict(NamedTuple):
    """Whether a program ran to its end, and if not, why not."""

    passed: bool
    reason: str


# limits the process, which then becomes the program's; the limits and the signal at the parent's
# death outlive exec
_START = """
import ctypes, json, os, resource, sys
given = json.loads(sys.argv[1])
seconds = given["seconds"]
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # a signal, then the end
limits = {"AS": given["memory"], "FSIZE": given["written"], "NOFILE": 64, "CORE": 0}
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
if sys.platform == "linux":
    libc = ctypes.CDLL(None)
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
if os.getppid() == given["parent"]:
    os.execvp(given["command"][0], given["command"])
"""
# the rest of stdin is the token of a pass, which is read after the program's last line: no frame
# has it while the program runs
_RUN = """
import os, resource, signal, sys, types
size, processes = map(int, sys.argv[1:])
if processes:
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
def report(text):
    os.lseek(63, 0, 0)
    os.write(63, text.encode("utf-8", "replace")[:2000])
def stop(number, frame):
    report(f"stopped after {resource.getrlimit(resource.RLIMIT_CPU)[0]} s of CPU time")
    os._exit(1)
signal.signal(signal.SIGXCPU, stop)
def run():
    text = b""
    while len(text) < size:
        text += os.read(0, size - len(text))
    os.dup2(0, 62)
    os.dup2(1, 63)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    module = sys.modules["answer"] = types.ModuleType("answer")
    exec(compile(text.decode("utf-8", "surrogatepass"), "<answer>", "exec"), module.__dict__)
try:
    run()
except BaseException as error:
    try:
        report(type(error).__name__ + ": " + str(error))
    finally:
        os._exit(1)
report(os.read(62, 100).decode())
os._exit(0)
"""


@functools.cache
def confinement() -> str:
    """Return the strongest key of CONFINED that works on this machine."""
    for name, command in CONFINED.items():
        with (
            tempfile.TemporaryDirectory(prefix="moe-runtime-") as folder,
            contextlib.suppress(OSError, subprocess.SubprocessError),
        ):
            words = [word.format(folder) for word in command]
            done = subprocess.run(
                [*words, sys.executable, "-I", "-c", "pass"],
                capture_output=True,
                timeout=PROBE,
                cwd=folder,
            )
            if done.returncode == 0:
                return name
    return "limits"


def run_programs(
    programs: Sequence[str],
    *,
    seconds: int = 10,
    memory: int = MEMORY,
    progress: Callable[[int, int], None] | None = None,
) -> list[Verdict]:
    """Run Python programs in parallel, at most one per CPU and at most 8; return a verdict for
    each, in order.

    A program passes if its last line was executed; an exception, an early exit and an exceeded
    limit count as failures. Each has `seconds` of CPU time, WALL times as much wall-clock time, and
    `memory` bytes. `__name__` is "answer", so that a block for "__main__" does not run.
    `confinement` says what else limits them. Raises OSError on Windows.
    """
    if os.name != "posix":
        raise OSError(
            f"Generated code can only run with limits on Linux and macOS, not on {sys.platform}"
        )
    limits = {
        "seconds": seconds,
        "memory": memory,
        "written": WRITTEN,
        "parent": os.getpid(),
    }
    children = _Children()
    lock = threading.Lock()
    done = 0

    def run(program: str) -> Verdict:
        nonlocal done
        verdict = _run(program, limits, children)
        with lock:
            done += 1
            if progress is not None:
                progress(done, len(programs))
        return verdict

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        try:
            return list(pool.map(run, programs))
        except BaseException:  # Ctrl-C too
            pool.shutdown(wait=False, cancel_futures=True)
            children.kill()
            raise


class _Children:
    """The running children, which are killed together; none is started after that."""

    def __init__(self):
        self.lock, self.running, self.closed = threading.Lock(), set(), False

    @contextlib.contextmanager
    def started(self, *args, **options):
        """Start a process in a new session; kill the whole session when the block ends."""
        with self.lock:
            if self.closed:
                raise KeyboardInterrupt
            child = subprocess.Popen(*args, start_new_session=True, **options)
            self.running.add(child)
        try:
            yield child
        finally:
            _kill(child)
            child.wait()
            with self.lock:
                self.running.discard(child)

    def kill(self) -> None:
        with self.lock:
            self.closed = True
            for child in self.running:
                _kill(child)


def _kill(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _run(program: str, limits: dict, children: _Children) -> Verdict:
    """Run one program and read what its child reports."""
    token = secrets.token_hex(16)
    how = confinement()
    text = program.encode("utf-8", "surrogatepass")
    with (
        tempfile.TemporaryDirectory(prefix="moe-runtime-") as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as result,
    ):
        given.write(text + token.encode())
        given.seek(0)
        python = [sys.executable, "-I", "-B", "-c"]
        processes = 0 if how == "limits" else PROCESSES
        command = [
            *(word.format(folder) for word in CONFINED[how]),
            *python,
            _RUN,
            str(len(text)),
            str(processes),
        ]
        start = [*python, _START, json.dumps(limits | {"command": command})]
        environment = {
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        files = {"stdin": given, "stdout": result, "stderr": subprocess.DEVNULL}
        with children.started(
            start,
            cwd=Path(folder),
            env=environment,
            **files,
        ) as child:
            try:
                code = child.wait(WALL * limits["seconds"])
            except subprocess.TimeoutExpired:
                return Verdict(False, f"stopped after {WALL * limits['seconds']} s")
        result.seek(0)
        report = result.read(2000).decode("utf-8", "replace")
    if report == token and code == 0:
        return Verdict(True, "passed")
    number = code - 128 if code > 128 else -code  # a wrapper exits with 128 and the signal's number
    if number in (signal.SIGXCPU, signal.SIGKILL):
        return Verdict(False, f"stopped after {limits['seconds']} s of CPU time")
    if not report and number > 0:
        return Verdict(False, f"ended by signal {number}")
    return Verdict(False, one_line(report, 300) or "ended before its last line, or was killed")
