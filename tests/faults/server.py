"""Run commands in forked children of a process that has already imported what they need, each with
its own fault.

One server serves all workers of a test run: `python -m tests.faults.server SOCKET PID`, with the
shim preloaded. A request is a line of JSON (`machine.Case`); the answer is a line with the child's
exit status and the number of calls that it made. The server exits when the process PID ends.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from typing import NamedTuple

from tests.support.cli import program_of

IMPORTED = [
    "datasets",
    "peft",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.deepseek_v2.modeling_deepseek_v2",
    "trl.trainer.sft_trainer",
    "moe_runtime.cli",
    "papers.cli",
    "moe_runtime.hf.dropin.stats",
    "moe_runtime.hf.training.sft",
    "moe_runtime.methods.esft.runs",
    "moe_runtime.methods.upit.folders",
    "moe_runtime.methods.xft.folders",
]
IDLE = 120.0  # seconds without a request after which the server exits


def call(name: str) -> None:
    """Call `module:function`."""
    module, _, function = name.partition(":")
    getattr(importlib.import_module(module), function)()


def be(case: dict) -> None:
    """Run a command as this process, and exit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(case["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(case["cwd"])
    program, arguments = program_of(case["argv"])
    sys.argv = [program.argv0, *arguments]
    shim = ctypes.CDLL(None)
    code = 0
    try:
        shim.faults_arm(
            os.fsencode(case["root"]),
            *(ctypes.c_long(case["at"]), *case["fault"]),
        )
        if case["main"]:
            call(case["main"])
        else:
            importlib.import_module("moe_runtime.cli").main(program.commands)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        atexit._run_exitfuncs()
    finally:
        with open(case["log"] + ".calls", "w") as file:
            file.write(str(shim.faults_calls()))
        os._exit(code)


class Job(NamedTuple):
    """A child that runs a command."""

    pid: int
    connection: socket.socket  # of the client that waits for it
    deadline: float


class Jobs:
    """The running children."""

    def __init__(self, selector: selectors.BaseSelector):
        self.selector = selector
        self.running: dict[int, Job] = {}

    def start(self, connection: socket.socket, case: dict) -> None:
        """Fork a child for `case`."""
        pid = os.fork()
        if pid == 0:
            be(case)
        handle = os.pidfd_open(pid)
        self.running[handle] = Job(
            pid,
            connection,
            time.monotonic() + case["limit"],
        )
        self.selector.register(handle, selectors.EVENT_READ, self.end)

    def end(self, handle: int) -> None:
        """Answer the client of a child that has ended."""
        job = self.running.pop(handle)
        self.selector.unregister(handle)
        os.close(handle)
        code = os.waitstatus_to_exitcode(os.waitpid(job.pid, 0)[1])
        answer = {"code": code, "is_late": time.monotonic() > job.deadline}
        with job.connection:
            job.connection.sendall(json.dumps(answer).encode() + b"\n")

    def kill_late(self) -> None:
        """Kill the children that are past their deadline."""
        for job in self.running.values():
            if time.monotonic() > job.deadline:
                os.kill(job.pid, signal.SIGKILL)


def serve(path: str, owner: int) -> None:
    """Do the imports, then serve until no requests arrive any more or the process `owner` is
    gone.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)
    selector = selectors.DefaultSelector()
    jobs = Jobs(selector)
    last_request = time.monotonic()

    def accept(_) -> None:
        nonlocal last_request
        last_request = time.monotonic()
        connection, _ = listener.accept()
        with connection.makefile("r") as lines:
            request = lines.readline()
        if request.strip():
            jobs.start(connection, json.loads(request))
        else:  # a worker only checks whether the server is there
            connection.close()

    selector.register(listener, selectors.EVENT_READ, accept)
    while jobs.running or time.monotonic() - last_request < IDLE:
        if not jobs.running and not os.path.exists(f"/proc/{owner}"):
            break
        for key, _ in selector.select(1.0):
            key.data(key.fd)
        jobs.kill_late()
    os.unlink(path)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
