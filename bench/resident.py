"""Memory that a call takes on the CPU: the process's resident set, whose peak /proc lets one set back.

What lies about from before would hide what a call takes: the allocator's free blocks and our own pools go back to the system
first. A call before has touched the buffers that outlive it, so what is left is the call's own.
"""

import ctypes
import gc
import re
from pathlib import Path

from moe_runtime.ops import workspace

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(function) -> tuple[dict[str, float], object]:
    """Return the MiB that a call takes beyond what was there, at most and in what it returns; and its result.

    No MiB where /proc does not tell.
    """
    _give_back()
    try:
        CLEAR.write_text("5")  # the peak begins anew
        before = _status("VmRSS")
    except (OSError, TypeError):  # not Linux, or a sandbox
        return {}, function()
    result = function()
    peak = _status("VmHWM")
    _give_back()
    sizes = {"peak MiB": peak - before, "kept MiB": _status("VmRSS") - before}
    return {name: max(size, 0) / 2**20 for name, size in sizes.items()}, result


def _status(name: str) -> int:
    """Bytes that /proc/self/status gives under `name`."""
    return int(re.search(name + r":\s+(\d+) kB", STATUS.read_text())[1]) << 10


def _give_back() -> None:
    gc.collect()
    workspace.release()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
