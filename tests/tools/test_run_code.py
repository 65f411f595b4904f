"""tools/run_code.py: programs that do harm fail, one after the other or side by side, and harm nothing."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from moe_runtime.tools import run_code
from moe_runtime.tools.run_code import run_programs
from tests.support.patience import PATIENCE

HARMLESS = {
    "assert": "assert sum(range(5)) == 10",
    "thread": "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
    "numpy": "import numpy\nassert numpy.ones(3).sum() == 3",
    "output": "print('x' * 3_000_000)",
    "event loop": "import asyncio\nasync def f(): return 1\nassert asyncio.run(f()) == 1",
}
HARMFUL = {  # a program and a part of the reason
    "wrong": ("assert 1 == 2, 'no'", "AssertionError: no"),
    "syntax": ("def (", "SyntaxError"),
    "loops": ("while True: pass", "stopped after"),
    "sleeps": ("import time\ntime.sleep(100)", "stopped after 5 s"),
    "eats memory": ("held = []\nwhile True: held.append(bytearray(1 << 20))", "MemoryError"),
    "forks": ("import os\nwhile True: os.fork()", "PermissionError"),
    "starts processes": ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "PermissionError"),
    "starts a program": ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
    "writes": ("open({marked!r}, 'w')", "PermissionError"),
    "appends": ("import os\nos.open({marked!r}, os.O_WRONLY | os.O_APPEND)", "PermissionError"),
    "removes": ("import os\nos.remove({marked!r})", "PermissionError"),
    "renames": ("import os\nos.rename({marked!r}, 'x')", "PermissionError"),
    "makes folders": ("import os\nos.mkdir('x')", "PermissionError"),
    "changes modes": ("import os\nos.chmod({marked!r}, 0)", "PermissionError"),
    "signals": ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
    "calls out": ("import socket\nsocket.create_connection(('127.0.0.1', 1))", "PermissionError"),
    "raises its limits": ("import resource as r\nr.setrlimit(r.RLIMIT_CPU, (99, 99))", "Error"),
    "exits early": ("import sys\nsys.exit(0)", "SystemExit"),
    "exits at once": ("import os\nos._exit(0)", "before its last line"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "signal 11"),
    "recurses": ("def f(): f()\nf()", "RecursionError"),
    "reads input": ("input()", "EOFError"),
    "is no text": ("'\ud800'", "UnicodeEncodeError"),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """All programs, side by side; and a file that they try to change."""
    marked = tmp_path_factory.mktemp("run_code") / "marked"
    marked.write_text("mine")
    texts = [*HARMLESS.values(), *(text.replace("{marked!r}", repr(str(marked))) for text, _ in HARMFUL.values())]
    programs = dict(zip([*HARMLESS, *HARMFUL], texts, strict=True))
    # a low limit on CPU time only for those that are to reach it, as starting Python takes long on a busy machine
    slow = {name: programs.pop(name) for name in ("loops", "sleeps")}
    found, seen = {}, []
    for seconds, chosen in ((1, slow), (10, programs)):
        verdicts = run_programs(
            list(chosen.values()), seconds=seconds, memory=512 << 20, progress=lambda done, total: seen.append((done, total))
        )
        found.update(zip(chosen, verdicts, strict=True))
    assert sorted(seen) == sorted((i + 1, len(chosen)) for chosen in (slow, programs) for i in range(len(chosen)))
    assert marked.read_text() == "mine" and marked.stat().st_mode & 0o777 and os.listdir(marked.parent) == ["marked"]
    return found


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_programs_pass(verdicts, name):
    assert verdicts[name] == (True, "passed")


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_programs_fail(verdicts, name):
    assert not verdicts[name].passed and HARMFUL[name][1] in verdicts[name].reason


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_an_interruption_leaves_no_program_behind(stop):
    script = """\
        import signal
        from moe_runtime.tools.run_code import run_programs
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with SIGINT ignored
        print("started", flush=True)
        run_programs(["import time\\ntime.sleep(60)"] * 3, seconds=60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as run:
        assert run.stdout.readline()
        own = [str(run.pid)]

        def mine() -> int:
            found = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
            pairs = [line.split() for line in found.splitlines()]
            own.extend(pid for pid, parent in pairs if parent == str(run.pid) and pid not in own)
            return sum(pid in own[1:] for pid, _ in pairs)

        deadline = time.monotonic() + PATIENCE
        while not mine() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert mine()
        run.send_signal(stop)
        assert run.wait(PATIENCE) != 0
        while mine() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not mine()


def test_what_cannot_be_confined_does_not_run(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(run_code, "_filter", lambda machine: [])  # the kernel refuses an empty filter
        with pytest.raises(OSError, match="cannot be confined here"):
            run_programs(["pass"])
    monkeypatch.setattr(run_code.platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="x86_64 or aarch64, not on linux riscv64"):
        run_programs(["pass"])
