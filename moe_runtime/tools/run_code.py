"""Run programs written by a model, each in a confined child process, and report which of them run to their end.

A child has an empty temporary folder, no environment, a separate session, and limits on CPU time, memory, open files and
written bytes. A seccomp filter denies processes, programs, signals, sockets and every change of the file system, so that only
reading and computing are possible. Its session is killed when it ends or times out, and it dies with its parent.
This protects a machine from what models write by accident. Use a virtual machine against malicious code.
"""

import contextlib
import json
import os
import platform
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
WRITTEN = 1 << 20  # bytes of a file; only the result can be written


class Verdict(NamedTuple):
    """Whether a program ran to its end, and if not, why not."""

    passed: bool
    reason: str


# denied system calls by machine: those that start or signal processes, open sockets, or change files, clocks and the system
_COMMON = {"clone3": 435, "openat2": 437, "io_uring_setup": 425, "pidfd_send_signal": 424, "fchmodat2": 452, "open_tree": 428}
_X86 = """socket 41 fork 57 vfork 58 execve 59 kill 62 rename 82 mkdir 83 rmdir 84 creat 85 link 86 unlink 87 symlink 88
chmod 90 fchmod 91 chown 92 fchown 93 lchown 94 truncate 76 ptrace 101 rt_sigqueueinfo 129 utime 132 mknod 133 pivot_root 155
chroot 161 settimeofday 164 mount 165 umount2 166 swapon 167 swapoff 168 reboot 169 sethostname 170 setdomainname 171
init_module 175 delete_module 176 setxattr 188 lsetxattr 189 fsetxattr 190 removexattr 197 lremovexattr 198
fremovexattr 199 tkill 200 clock_settime 227 tgkill 234 utimes 235 kexec_load 246 add_key 248 keyctl 250 mkdirat 258 mknodat 259
fchownat 260 futimesat 261 unlinkat 263 renameat 264 linkat 265 symlinkat 266 fchmodat 268
unshare 272 utimensat 280 rt_tgsigqueueinfo 297 setns 308
process_vm_writev 311 finit_module 313 renameat2 316 bpf 321 execveat 322 shmget 29 semget 64 msgget 68 prlimit64 302"""
_ARM = """socket 198 execve 221 kill 129 renameat 38 renameat2 276 mkdirat 34 linkat 37 unlinkat 35 symlinkat 36 fchmod 52
fchmodat 53 fchownat 54 fchown 55 truncate 45 ptrace 117 rt_sigqueueinfo 138 mknodat 33 pivot_root 41 chroot 51 settimeofday 170
mount 40 umount2 39 swapon 224 swapoff 225 reboot 142 sethostname 161 setdomainname 162 init_module 105 delete_module 106
setxattr 5 lsetxattr 6 fsetxattr 7 removexattr 14 lremovexattr 15 fremovexattr 16 tkill 130 clock_settime 112 tgkill 131
kexec_load 104 add_key 217 keyctl 219 unshare 97 utimensat 88 rt_tgsigqueueinfo 240 setns 268 process_vm_writev 271
finit_module 273 bpf 280 execveat 281 shmget 194 semget 190 msgget 186 prlimit64 261"""
# audit architecture, clone, the calls that open files with the position of their flags, and the rest
_MACHINES = {"x86_64": (0xC000003E, 56, {2: 1, 257: 2}, _X86), "aarch64": (0xC00000B7, 220, {56: 2}, _ARM)}
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF's instructions
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # what a filter returns; REFUSE is with an errno
_WRITES, _THREAD = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0x10000


def _filter(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the seccomp filter of a machine as BPF instructions: code, jump if true, jump if false, constant."""
    architecture, clone, opens, table = _MACHINES[machine]
    words = table.split()
    refused = {int(number): 1 for number in words[1::2]} | {number: 1 for number in _COMMON.values()}
    refused[_COMMON["clone3"]] = 38  # ENOSYS: the C library then uses clone, whose flags a filter can read
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    lines += [(_ABOVE, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSE | 1)]  # the x32 names of the same calls
    for number, error in refused.items():
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | error)]
    for number, place in opens.items():
        lines += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * place), (_ANY_BIT, 0, 1, _WRITES)]
        lines += [(_RETURN, 0, 0, _REFUSE | 1), (_RETURN, 0, 0, _ALLOW)]
    lines += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, 16), (_ANY_BIT, 1, 0, _THREAD), (_RETURN, 0, 0, _REFUSE | 1)]
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


# the child's code; a program that exits early never writes its token
_CHILD = """
import ctypes, json, os, resource, struct, sys
given = json.loads(sys.stdin.buffer.read())
out, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(null, descriptor)
def report(text):
    os.lseek(out, 0, 0)
    os.write(out, text.encode("utf-8", "replace")[:2000])
limits = {"CPU": given["seconds"], "AS": given["memory"], "FSIZE": given["written"], "NOFILE": 64, "CORE": 0}
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
code = b"".join(struct.pack("HBBI", *line) for line in given["filter"])
buffer = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(given["filter"]), ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
if os.getppid() != given["parent"] or libc.prctl(22, 2, ctypes.byref(program), 0, 0):  # PR_SET_SECCOMP
    report("unconfined " + os.strerror(ctypes.get_errno()))
    os._exit(1)
text, token = given.pop("program"), given.pop("token")
try:
    exec(compile(text, "<answer>", "exec"), {"__name__": "__main__"})
except BaseException as error:
    try:
        report(type(error).__name__ + ": " + str(error))
    finally:
        os._exit(1)
report(token)
os._exit(0)
"""


def run_programs(
    programs: Sequence[str], *, seconds: int = 10, memory: int = MEMORY, progress: Callable[[int, int], None] | None = None
) -> list[Verdict]:
    """Run Python programs in parallel, at most one per CPU and at most 8; return a verdict for each, in order.

    A program passes if its last line was executed; an exception, an early exit and an exceeded limit count as failures. Each
    has `seconds` of CPU time, WALL times as much wall-clock time, and `memory` bytes. Raises OSError if it cannot be confined.
    """
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        raise OSError(
            f"Generated code can only run on Linux on {' or '.join(_MACHINES)}, not on {sys.platform} {platform.machine()}"
        )
    limits = {"seconds": seconds, "memory": memory, "written": WRITTEN, "filter": _filter(platform.machine())}
    children, lock, done = _Children(), threading.Lock(), 0

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
    with tempfile.TemporaryDirectory(prefix="moe-runtime-") as folder, tempfile.TemporaryFile() as given, \
            tempfile.TemporaryFile() as result:  # fmt: skip
        given.write(json.dumps(limits | {"program": program, "token": token, "parent": os.getpid()}).encode())
        given.seek(0)
        command = [sys.executable, "-I", "-B", "-c", _CHILD]
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        files = {"stdin": given, "stdout": result, "stderr": subprocess.DEVNULL}
        with children.started(command, cwd=Path(folder), env=environment, **files) as child:
            try:
                code = child.wait(WALL * limits["seconds"])
            except subprocess.TimeoutExpired:
                return Verdict(False, f"stopped after {WALL * limits['seconds']} s")
        result.seek(0)
        report = result.read(2000).decode("utf-8", "replace")
    if report == token and code == 0:
        return Verdict(True, "passed")
    if report.startswith("unconfined "):
        raise OSError(f"Generated code cannot be confined here: seccomp says {report[11:]}. Run on a kernel that allows it")
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return Verdict(False, f"stopped after {limits['seconds']} s of CPU time")
    return Verdict(False, one_line(report, 300) or (f"ended by signal {-code}" if code < 0 else "ended before its last line"))
