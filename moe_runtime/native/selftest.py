"""Test the CPU library on this machine's processor, in a child process, before anything else loads
it.

A library that contains an instruction which the processor lacks would end the process that uses it.
The child loads it and runs each variant that the processor has, forward, backward and merging,
against sums in double (csrc/cpu/self_test.cpp). The processors on which a library has passed are
remembered in the user's cache. Only the standard library is used, and the child runs this file by
its path.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import resource
import signal
import subprocess
import sys
from pathlib import Path

PATIENCE = 600  # seconds for what takes 0.05; an emulated or overloaded machine is much slower
# how the lines begin that the child prints
TESTING = "testing "
WRONG = "wrong: "
CPUINFO = Path("/proc/cpuinfo")
# of the first processor in CPUINFO: x86's, then Arm's
IDENTITY = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "flags",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
    "CPU revision",
    "Features",
)


def processor() -> tuple[str, str]:
    """Return the processor's name, and a hash (16 hex digits) of its model and instruction sets."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text(errors="replace").split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    identity = [platform.machine(), *(fields.get(key, "") for key in IDENTITY)]
    name = fields.get("model name") or f"{platform.machine()} processor"
    return name, _hash("\n".join(identity).encode())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def run(file: str | os.PathLike, *, command: tuple[str, ...] = ()) -> str | None:
    """Test a library in a child process; return what is wrong, or None if every variant passes.

    `command` runs programs for another processor.
    """
    if not sys.executable:
        return "it cannot be tested, because sys.executable names no Python to run"
    try:
        child = subprocess.run(
            [*command, sys.executable, "-I", "-S", __file__, os.fspath(file)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return f"its self-test did not end within {PATIENCE} seconds"
    except OSError as error:
        return f"its self-test cannot be started ({error.strerror})"
    if child.returncode == 0:
        return None
    where = "while it was loaded"
    for line in child.stdout.splitlines():
        if line.startswith(WRONG):
            return f"it failed its self-test: {line.removeprefix(WRONG)}"
        if line.startswith(TESTING):
            where = f"in the variant {line.removeprefix(TESTING)}"
    return f"its self-test died {where}: {_end_of(child.returncode)}"


def _end_of(code: int) -> str:
    # an emulator returns 128 + the signal
    number = -code if code < 0 else code - 128
    try:
        return f"{signal.Signals(number).name} ({signal.strsignal(number)})"
    except ValueError:
        return f"exit code {code}"


def ensure(path: Path) -> str | None:
    """Test a library unless it has passed on this processor; return what is wrong, or None."""
    from moe_runtime.io.files import cache_home, own_folder, untrusted_in_cache

    name, identity = processor()
    mark = None
    if home := cache_home():
        mark = home / "moe_runtime" / "cpu" / "tested" / f"{_hash(path.read_bytes())}-{identity}"
        with contextlib.suppress(OSError):
            if not untrusted_in_cache(mark):
                return None
    problem = run(path)
    if problem is not None:
        return f"on this processor ({name}) {problem}"
    # without a writable cache, each process tests the library again
    if mark is not None:
        with contextlib.suppress(OSError, ValueError):
            own_folder(mark.parent)
            mark.write_text(f"{path.name} passed its self-test on {name}\n")
    return None


def _test(path: str) -> int:
    """Run the self-test of each variant that this processor has; the child's part.

    Prints what is tested, and what is wrong.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        print(f"{WRONG}it cannot be loaded ({str(error).removeprefix(f'{path}: ')})")
        return 1
    if not hasattr(library, "moert_cpu_self_test"):
        print(f"{WRONG}it has no self-test, so it was built from other sources")
        return 1
    library.moert_cpu_variants.restype = ctypes.c_char_p
    library.moert_cpu_self_test.argtypes = ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64
    for variant in library.moert_cpu_variants().decode().split():
        print(f"{TESTING}{variant}", flush=True)
        wrong = ctypes.create_string_buffer(256)
        if not library.moert_cpu_self_test(variant.encode(), wrong, len(wrong)):
            print(f"{WRONG}in the variant {variant} {wrong.value.decode()}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(_test(sys.argv[1]))
