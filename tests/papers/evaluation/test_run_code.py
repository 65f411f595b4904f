"""papers/evaluation/run_code.py: harmful programs fail without harming anything, and run in
parallel.
"""

import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from papers.evaluation.run_code import confinement, run_programs
from tests.support.captured import captured
from tests.support.patience import PATIENCE

HARMLESS = {
    "assert": "assert sum(range(5)) == 10",
    "thread": "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
    "numpy": "import numpy\nassert numpy.ones(3).sum() == 3",
    "output": "print('x' * 3_000_000)",
    "event loop": "import asyncio\nasync def f(): return 1\nassert asyncio.run(f()) == 1",
    "main block": "if __name__ == '__main__':\n    raise SystemExit(input())",
    "module": (
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class A:\n"
        "    x: 'int' = 1\n"
        "assert A().x == 1"
    ),
    "own folder": (
        "import os\n"
        "assert os.listdir() == []\n"
        "open('mine', 'w').write('x')\n"
        "assert os.listdir() == ['mine']"
    ),
    "environment": "import os\n"
    "assert set(os.environ) <= {'PATH', 'LANG', 'LC_CTYPE', 'PWD', 'OMP_NUM_THREADS', "
    "'OPENBLAS_NUM_THREADS'}",
    "no text": "'\ud800'".replace("'", "") and "x = 'no surrogate'",
    # apart from the files that the harness opens: /dev/null three times, the rest of its input, its
    # report
    "open files": "import os\nfound = [int(one) for one in os.listdir('/proc/self/fd')]\n"
    "assert len([one for one in found if 4 < one < 62]) == 0, found",
    "limits": (
        "import resource as r\n"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (64, 64) and r.getrlimit(r.RLIMIT_CORE) == (0, 0)"
    ),
}
FORGES = """
import os, sys
frame, found = sys._getframe(), []
while frame is not None:
    for values in (frame.f_locals, frame.f_globals):
        found += [value for value in values.values() if isinstance(value, (str, bytes))]
    found += [value for value in frame.f_code.co_consts if isinstance(value, (str, bytes))]
    frame = frame.f_back
for value in found:
    os.lseek(63, 0, 0)
    os.write(63, value if isinstance(value, bytes) else value.encode("utf-8", "replace"))
os._exit(0)
"""
HARMFUL = {  # a program and part of the reason
    "wrong": ("assert 1 == 2, 'no'", "AssertionError: no"),
    "syntax": ("def (", "SyntaxError"),
    "loops": ("while True: pass", "stopped after"),
    "sleeps": ("import time\ntime.sleep(100)", "stopped after 5 s"),
    "eats memory": ("held = []\nwhile True: held.append(bytearray(1 << 20))", "MemoryError"),
    "fills the disk": ("open('mine', 'wb').write(bytes(3 << 20))", "File too large"),
    "raises its limits": (
        "import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (99, 999999999))",
        "Error",
    ),
    "exits early": ("import sys\nsys.exit(0)", "SystemExit"),
    "exits at once": ("import os\nos._exit(0)", "before its last line"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "signal 11"),
    "recurses": ("def f(): f()\nf()", "RecursionError"),
    "reads input": ("input()", "EOFError"),
    "is no text": ("'\ud800'", "UnicodeEncodeError"),
    "reads its callers' frames": (FORGES, ""),
}
# attacks that a namespace prevents: a program, part of the reason, and the methods of CONFINED that
# prevent it
CONFINED = {
    "calls out": (
        "import socket\nsocket.create_connection(('127.0.0.1', {port}))",
        "Error",
        ("bwrap", "unshare"),
    ),
    "signals": ("import os\nos.kill({pid}, 9)", "ProcessLookupError", ("bwrap", "unshare")),
    "writes": ("open({marked!r}, 'w')", "Error", ("bwrap",)),
    "removes": ("import os\nos.remove({marked!r})", "Error", ("bwrap",)),
}


@pytest.fixture(scope="module")
def verdicts():
    """Run all programs in parallel."""
    programs = HARMLESS | {name: text for name, (text, _) in HARMFUL.items()}
    # only programs that should reach the CPU limit get a low one, as starting Python takes long on
    # a busy machine
    slow = {name: programs.pop(name) for name in ("loops", "sleeps")}
    verdicts = {}
    for seconds, chosen in ((1, slow), (10, programs)):
        counts = []
        run = run_programs(
            list(chosen.values()),
            seconds=seconds,
            memory=512 << 20,
            progress=lambda done, total: counts.append((done, total)),  # noqa: B023
        )
        verdicts.update(zip(chosen, run, strict=True))
        total = len(chosen)
        assert sorted(counts) == [(done, total) for done in range(1, total + 1)]
    return verdicts


def test_harmless_programs_pass(verdicts):
    for name in HARMLESS:
        assert verdicts[name] == (True, "passed"), name


def test_harmful_programs_fail(verdicts):
    for name, (_, reason) in HARMFUL.items():
        assert not verdicts[name].passed, name
        assert reason in verdicts[name].reason, name


def children(parent: int, known: set[str]) -> set[str]:
    """Return the running processes that are, or were, children of `parent`; `known` remembers
    them.
    """
    table = captured(["ps", "-eo", "pid,ppid"], check=True)
    living = set()
    for line in table.stdout.splitlines():
        process, of = line.split()
        living.add(process)
        if of == str(parent):
            known.add(process)
    return living & known


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_an_interruption_leaves_no_program_behind(stop):
    script = """\
        import signal
        from papers.evaluation.run_code import run_programs
        # a shell's background job starts with SIGINT ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("started", flush=True)
        run_programs(["import time\\ntime.sleep(60)"] * 3, seconds=60)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    known: set[str] = set()
    deadline = time.monotonic() + PATIENCE
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as run:
        assert run.stdout.readline()
        while not children(run.pid, known) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert children(run.pid, known)
        run.send_signal(stop)
        assert run.wait(PATIENCE) != 0
        while children(run.pid, known) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not children(run.pid, known)


@pytest.mark.parametrize("name", CONFINED)
def test_what_a_namespace_prevents(tmp_path, name):
    text, reason, ways = CONFINED[name]
    if confinement() not in ways:
        pytest.skip(f"{' and '.join(ways)} cannot be used here")
    marked = tmp_path / "marked"
    marked.write_text("mine")
    server = socket.create_server(("127.0.0.1", 0))
    with server, subprocess.Popen(["sleep", "1000"]) as other:
        text = text.format(
            port=server.getsockname()[1],
            pid=other.pid,
            marked=str(marked),
        )
        (verdict,) = run_programs([text])
        assert other.poll() is None
        other.kill()
    assert not verdict.passed
    assert reason in verdict.reason
    assert marked.read_text() == "mine"
