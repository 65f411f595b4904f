"""What is there: packages, compilers, libraries, devices, folders; each row of `moe-runtime doctor` by itself.

Nothing that may be broken is imported with this module, torch neither.
"""

import importlib
import importlib.metadata
import os
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# who brings the module triton: torch's builds for AMD's and Intel's GPUs have one of their own
TRITONS = ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton-xpu", "triton-xpu", "pytorch-triton")
NVIDIA = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")  # of GPUs: a container without one sees the host's driver all the same


def find_torch() -> tuple:
    """Return torch and "", or None and why it cannot be imported."""
    try:
        import torch

        torch.zeros(1)
    except Exception as error:  # a broken install raises whatever it likes
        return None, first_line(error)
    return torch, ""


def guarded(ask: Callable[[], str]) -> str:
    """Return what `ask` says, or what it raised: one broken part hides no other."""
    try:
        return ask()
    except Exception as error:
        return f"unknown: {first_line(error)}"


def asking(function: Callable, *args) -> Callable[[], str]:
    """Return what calls a function with these arguments."""
    return lambda: function(*args)


def first_line(error: Exception) -> str:
    """Return the first line of what an exception says, or its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _metadata(name: str) -> str:
    """Return the version of a package, of triton under any of its names; raises PackageNotFoundError."""
    for one in TRITONS if name == "triton" else ():
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(one)
    return importlib.metadata.version(name)


def version_of(name: str) -> tuple[int, ...] | None:
    """Return a package's version as two numbers; None where there is none to read."""
    try:
        return tuple(int(part) for part in re.findall(r"\d+", _metadata(name))[:2])
    except Exception:
        return None


def package(name: str, spec: str, mend: str) -> str:
    """Return a package's version, and what is wanted where it is another or none; `mend` is for one that is missing."""
    try:
        version = _metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return f"missing; {mend}"
    except Exception as error:
        return f"unreadable ({first_line(error)}); pip install --force-reinstall '{name}{spec}'"
    if not isinstance(version, str):
        return f"unreadable (no version); pip install --force-reinstall '{name}{spec}'"
    if not spec:
        return version
    from packaging.specifiers import SpecifierSet

    return version if SpecifierSet(spec).contains(version, prereleases=True) else f"{version}; want {spec}"


def compiler() -> str:
    """Return the C++ compiler that a build of the CPU library takes, $CXX before others."""
    from moe_runtime import build_cpu

    try:
        command, version = build_cpu.find_compiler()
    except build_cpu.BuildError as error:
        return f"none: {first_line(error)}; only python -m moe_runtime.build_cpu needs one"
    return f"{shlex.join(command)}: {version}"


def library(module: str) -> str:
    """Say which of our libraries there is, of the backend in that module, or why there is none."""
    try:
        return importlib.import_module(f"moe_runtime.{module}").describe()
    except ImportError as error:
        return f"none: {first_line(error)}"


def driver_version() -> int | None:
    """Return the first number of the NVIDIA driver's version."""
    try:
        found = re.search(r"Module.*?\s(\d+)\.\d+", NVIDIA.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def driver() -> str:
    """Say which driver there is."""
    version = driver_version()
    return "none" if version is None and not has_gpu() else f"NVIDIA {version or 'of unknown version'}"


def has_gpu() -> bool:
    """Whether an NVIDIA GPU can be reached from here, whatever torch makes of it; a driver alone is the host's."""
    return any(DEVICES.glob("nvidia[0-9]*"))


def is_hidden() -> bool:
    """Whether CUDA_VISIBLE_DEVICES shows no GPU: somebody wants that, or a scheduler (NoDevFiles)."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    return not first.startswith(("GPU-", "MIG-")) and not first.isdecimal()


def devices(torch) -> dict[str, str]:
    """Return name -> what it is of the devices that torch sees."""
    found = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found[f"cuda:{i}"] = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory >> 30} GiB"
    if len(found) > 1:
        return found
    why = f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}" if is_hidden() else ""
    return found | {"cuda": f"none: {why or 'torch.cuda.is_available() is False'}"}


def in_home(name: str) -> Path | None:
    """Return ~/name; None where there is no home."""
    try:
        return Path.home() / name
    except RuntimeError:
        return None


def cache() -> Path | None:
    """Return the folder of measured configs and built libraries; None where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME") or in_home(".cache")
    return None if base is None else Path(base) / "moe_runtime"


def launch_configs() -> str:
    """Say where the experts' kernels get their tiles from."""
    try:
        import torch

        from moe_runtime.kernels import tiles  # imports triton
    except ImportError as error:
        return f"none: {first_line(error)}"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        path = tiles.tuned_path()
    except ValueError as error:
        return f"built in; {error}"
    try:
        count = len(tiles.read_tuned().get(tiles.device_name(device), {}))
    except ValueError as error:
        return f"error: {error}"
    return f"{path}: {count} measured here" if count else f"built in; {path} has none for this device"


def explain(op: str, device) -> str:
    """Return the backend of `op` on `device`, and why not another."""
    import torch

    from moe_runtime import backends

    try:
        chosen = backends.pick(op, torch.empty(0, device=device))
    except ValueError as error:
        return f"error: {error}"
    others = [other for other in backends.BACKENDS if other not in (chosen, "torch")]
    reasons = [f"not {other}: {why}" for other in others if (why := backends.why_not(other, op, device))]
    reasons = [reason for reason in reasons if "has no cpp kernel" not in reason]  # few ops have, and gain by one
    if chosen == "triton" and backends.why_not("cuda", op, device) is None:
        reasons.append("cuda when asked for: not measured faster here")
    return "; ".join([chosen, *reasons])
