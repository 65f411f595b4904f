"""Children that may take a fixed number of bytes: RLIMIT_DATA, on top of what the process holds
when it asks.
"""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# glibc raises the size from which it maps memory of its own as large blocks are freed, up to 32
# MiB; smaller ones then leave holes in the heap, some 20 MiB of them in some runs and none in
# others
ALLOCATOR = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(256 << 10),
}


def memory(name: str) -> int:
    """Bytes that /proc/self/status gives under `name` (VmData, VmRSS, VmHWM)."""
    return (
        int(
            re.search(
                name + r":\s+(\d+) kB",
                Path("/proc/self/status").read_text(),
            )[1]
        )
        << 10
    )


def limit_data(extra: int) -> None:
    """Allow this process `extra` bytes of memory more than it has."""
    limit = memory("VmData") + extra
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def is_held(size: int) -> bool:
    """Whether the limit refuses `size` bytes."""
    try:
        bytearray(size)
    except MemoryError:
        return True
    return False


def run(code: str, *arguments) -> subprocess.CompletedProcess:
    """Run `code` in a process with an allocator whose use of memory repeats."""
    command = [
        sys.executable,
        "-c",
        code,
        *(str(argument) for argument in arguments),
    ]
    env = os.environ | ALLOCATOR | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
    )
