"""Child processes that may allocate a fixed number of bytes: RLIMIT_DATA, relative to what the
process has allocated.
"""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

from tests.support.captured import captured

ROOT = Path(__file__).resolve().parents[2]

# glibc raises its mmap threshold as large blocks are freed, up to 32 MiB; smaller blocks then leave
# holes in the heap, about 20 MiB in some runs and none in others
ALLOCATOR = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(256 << 10),
}


def memory(name: str) -> int:
    """Return the bytes in /proc/self/status under `name` (VmData, VmRSS, VmHWM)."""
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
    """Allow this process `extra` more bytes of memory than it has."""
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
    """Run `code` in a process with an allocator whose memory use is reproducible."""
    command = [
        sys.executable,
        "-c",
        code,
        *(str(argument) for argument in arguments),
    ]
    env = os.environ | ALLOCATOR | {"PYTHONPATH": str(ROOT)}
    return captured(command, env=env, cwd=ROOT)
