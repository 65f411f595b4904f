"""Report what works here, what does not, and how to fix it: `moe-runtime doctor`.

This module imports nothing that may be broken, not even torch: versions come from the packages'
metadata.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SUPPORTED = {  # package: versions that the test suite covers
    "torch": ">=2.11",
    "triton": ">=3.6,<4",
    "transformers": ">=5.16,<6",
    "safetensors": ">=0.8",
    "numpy": "",
}
# the packages of each extra, and the commands that need it
EXTRAS = {
    "train": ("accelerate", "datasets", "tokenizers", "trl", "peft", "scipy"),
    "plot": ("matplotlib",),
    "bench": ("pytest", "pytest-benchmark"),
}
NEEDED_BY = {
    "train": "train, stats, esft score and train, upit init-routers, ultrafuser train",
    "plot": "stats",
    "bench": "bench",
}
VARIABLES = ("MOE_RUNTIME_BACKEND", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
# the oldest driver that supports a CUDA version, from NVIDIA's release notes
DRIVERS = {12: 525, 13: 580}
# packages that provide the module triton
TRITONS = ("triton", "pytorch-triton", "triton-rocm", "triton-xpu")
NVIDIA = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")  # a container without a GPU still sees the host's driver, but no device


def report() -> dict[str, dict[str, str]]:
    """Return what a bug report needs, as `moe-runtime doctor` prints it.

    Returns:
        Names and texts in sections: "system", "packages", "devices", "settings", "backends" (the
        backend that runs each op, and why), "hints" (what would work better) and "problems", with
        a fix for each.
    """
    torch = None
    reason = ""
    try:
        import torch

        torch.zeros(1)
    except Exception as error:  # a broken installation may raise anything
        torch = None
        reason = first_line(error)
    none = {"all": f"none: torch cannot be imported ({reason})"}
    nvcc = shutil.which("nvcc")
    result = {
        "system": {
            "python": _ask(platform.python_version),
            "platform": _ask(platform.platform),
            "driver": _ask(_driver),
            "nvcc": nvcc or "none. Only python -m moe_runtime.native.build cuda needs it",
            "compiler": _ask(_compiler),
            "cuda library": _ask(_library, "cuda"),
            "cpu library": _ask(_library, "cpp"),
            "cache": _ask(lambda: str(_cache() or "none: this user has no home")),
        },
        "packages": _packages(),
        "devices": none,
        "settings": {name: os.environ.get(name, "not set") for name in VARIABLES},
        "backends": none,
    }
    result["settings"]["launch configs"] = _ask(_launch_configs)
    failed = {}
    if torch is not None:
        for part, ask in {"devices": _devices, "backends": _backends}.items():
            try:
                result[part] = ask(torch)
            except Exception as error:  # a GPU may be counted and still fail when it is queried
                why = first_line(error)
                result[part] = {part: f"unknown: {why}"}
                failed[part] = f"{part} cannot be queried: {why}. Check the output of nvidia-smi"
    try:
        problems = dict(_problems(result, torch, reason))
    except Exception as error:
        why = f"the search for problems failed: {first_line(error)}"
        problems = {"doctor": f"{why}. Please report it"}
    problems |= failed
    return result | {"hints": dict(_hints(result, problems)), "problems": problems}


def summary(facts: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the lines of a report that answer most questions, in sections like the report's."""
    versions = {"python": facts["system"]["python"]}
    for name in SUPPORTED:
        versions[name] = re.split("[.,] ", facts["packages"][name])[0]
    backends = {}
    for op, text in facts["backends"].items():
        chosen = re.split("[;:]", text)[0]
        backends[chosen] = ", ".join(filter(None, (backends.get(chosen), op)))
    return {
        "versions": versions,
        "devices": facts["devices"],
        "backends": backends,
        "hints": facts["hints"],
        "problems": facts["problems"],
    }


def _hints(facts: dict, problems: dict) -> Iterator[tuple[str, str]]:
    """Yield (part, what would work better, and how)."""
    for extra, names in EXTRAS.items():
        missing = [name for name in names if facts["packages"][name].startswith("missing")]
        if missing:
            text = f"{', '.join(missing)} missing, needed by {NEEDED_BY[extra]}"
            yield extra, f"{text}. Run pip install 'moe-runtime[{extra}]'"
    is_torch = facts["backends"].get("moe_mlp", "").startswith("torch")
    text = facts["system"]["cpu library"]
    why = text.removeprefix("none: ")
    is_fine = text == why or "cpu library" in problems or os.environ.get("MOE_RUNTIME_BACKEND")
    if is_torch and not is_fine:
        yield "cpu library", f"experts run in PyTorch, which is slower: {why}"


def _packages() -> dict[str, str]:
    """Return the versions of all packages, or why there is none and what to do."""
    packages = {}
    for name, spec in SUPPORTED.items():
        remedy = f"Run pip install '{name}{spec}'"
        packages[name] = _ask(_package, name, spec, remedy)
    for extra, names in EXTRAS.items():
        remedy = f"It is needed by {NEEDED_BY[extra]}. Run pip install 'moe-runtime[{extra}]'"
        for name in names:
            packages[name] = _ask(_package, name, "", remedy)
    return packages


def _ask(question: Callable[..., str], *args) -> str:
    """Return what `question` returns or raises, so that one broken part does not hide the
    others.
    """
    try:
        return question(*args)
    except Exception as error:
        return f"unknown: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _version(name: str) -> str:
    """Return the version of a package, for triton under any of its names; raises
    PackageNotFoundError.
    """
    if name == "triton":
        for one in TRITONS:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(one)
    return importlib.metadata.version(name)


def _package(name: str, spec: str, remedy: str) -> str:
    """Return a package's version, with the fix if it is unsupported; `remedy` is the fix if it is
    missing.
    """
    reason = "no version"
    version = None
    try:
        version = _version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"missing. {remedy}"
    except Exception as error:
        reason = first_line(error)
    if not isinstance(version, str):
        return f"unreadable ({reason}). Run pip install --force-reinstall '{name}{spec}'"
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(spec).contains(version, prereleases=True):
        return version
    return f"{version}, but {spec} is required. Run pip install -U '{name}{spec}'"


def _compiler() -> str:
    """Return the C++ compiler that a build of the CPU library would use."""
    from moe_runtime.native import build

    try:
        command, version = build.find_compiler()
    except build.BuildError as error:
        return f"none: {first_line(error)}. Only python -m moe_runtime.native.build cpu needs one"
    return f"{shlex.join(command)}: {version}"


def _library(name: str) -> str:
    """Describe the compiled library of a backend, or say why there is none."""
    try:
        from moe_runtime.native import library
    except ImportError as error:
        return f"none: {first_line(error)}"
    return getattr(library, name).describe()


def _driver_version() -> int | None:
    """Return the major version of the NVIDIA driver."""
    if not NVIDIA.is_file():
        return None
    match = re.search(r"Module.*?\s(\d+)\.\d+", NVIDIA.read_text())
    return int(match[1]) if match else None


def _driver() -> str:
    version = _driver_version()
    if version is None and not _has_gpu():
        return "none"
    return f"NVIDIA {version or 'of unknown version'}"


def _has_gpu() -> bool:
    """Return whether an NVIDIA GPU is accessible, whether or not torch finds it; a driver alone may
    be the host's.
    """
    return any(DEVICES.glob("nvidia[0-9]*"))


def _is_hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs, set by the user or by a scheduler
    (NoDevFiles).
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    return not first.startswith(("GPU-", "MIG-")) and not first.isdecimal()


def _devices(torch) -> dict[str, str]:
    """Return name -> description of the devices that torch sees."""
    counts = []
    for count, what in ((os.cpu_count(), "core"), (torch.get_num_threads(), "thread")):
        counts.append(f"{count} {what}{'s' * (count != 1)}")
    devices = {"cpu": ", ".join(counts)}
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        devices[f"cuda:{i}"] = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory >> 30} GiB"
    if len(devices) == 1:
        why = "torch.cuda.is_available() is False"
        if _is_hidden():
            why = f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}"
        devices["cuda"] = f"none: {why}"
    return devices


def _cache() -> Path | None:
    """Return the folder of measured configs and built libraries; None if there is no home."""
    from moe_runtime.io.files import cache_home

    home = cache_home()
    return home and home / "moe_runtime"


def _launch_configs() -> str:
    """Describe where the experts' kernels get their tiles from."""
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
        why = path.is_file() and tiles.refused(path)
    except ValueError as error:
        why = error
    if why:
        return f"error: {why}"
    if count:
        return f"{path}: {count} measured here"
    return f"built in; {path} has none for this device"


def _backends(torch) -> dict[str, str]:
    from moe_runtime import backends

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {op: _ask(explain, op, device) for op in backends.OPS}


def explain(op: str, device: Any) -> str:
    """Return the backend of `op` on `device`, and why not another."""
    import torch

    from moe_runtime import backends

    try:
        chosen = backends.pick(op, torch.empty(0, device=device))
    except ValueError as error:
        return f"error: {error}"
    parts = [chosen]
    for other in backends.BACKENDS:
        if other in (chosen, "torch"):
            continue
        why = backends.why_not(other, op, device)
        if why is None:
            if (chosen, other) == ("triton", "cuda"):
                parts.append("cuda on request: not measured to be faster here")
        elif "has no cpp kernel" not in why:  # few ops have one or benefit from it
            parts.append(f"not {other}: {why}")
    return "; ".join(parts)


def _problems(facts: dict, torch, reason: str) -> Iterator[tuple[str, str]]:
    """Yield (part, problem with its fix)."""
    for name in SUPPORTED:
        text = facts["packages"][name]
        if ". " in text:
            yield name, f"{name} is {text}"
    if torch is None:
        yield (
            "torch",
            f"torch cannot be imported: {reason}. Run pip install --force-reinstall "
            f"'torch{SUPPORTED['torch']}'",
        )
    else:
        yield from _device_problems(torch, facts["packages"]["triton"])
        yield from _numpy_problems(torch)
    text = facts["settings"]["launch configs"]
    if text.startswith("error: "):
        text = text.removeprefix("error: ")
        if " is refused: " not in text:
            text = f"{text}. Remove it and rerun moe-runtime tune"
        yield "launch configs", text
    for row in ("cuda library", "cpu library"):
        text = facts["system"][row]
        why = text.removeprefix("none: ")
        if "rebuild it" in text or " is refused: " in text:
            yield row, why
    failed = []
    for text in facts["backends"].values():
        if text.startswith("error: "):
            failed.append(text.removeprefix("error: "))
    if failed:
        more = ""
        if len(failed) > 1:
            more = f" (and {len(failed) - 1} more ops)"
        name = "MOE_RUNTIME_BACKEND"
        yield name, f"{failed[0]}{more}. Unset {name} or set another one"
    home = os.environ.get("XDG_CACHE_HOME")
    if home and not os.path.isabs(home):
        text = f"XDG_CACHE_HOME is {home!r}, which is ignored because it is a relative path"
        yield "XDG_CACHE_HOME", f"{text}. Run export XDG_CACHE_HOME=FOLDER with a full path"
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton")
    yield from _cache_problems("cache", _cache(), "XDG_CACHE_HOME")
    folder = None
    if triton[0] != "~":
        folder = Path(triton)
    yield from _cache_problems("triton's cache", folder, "TRITON_CACHE_DIR")


def _device_problems(torch, triton: str) -> Iterator[tuple[str, str]]:
    """Yield what prevents an existing GPU from being used."""
    available = torch.cuda.is_available()
    has_gpu = available or _has_gpu()
    if has_gpu and os.environ.get("TRITON_INTERPRET") == "1":
        text = "TRITON_INTERPRET is 1, so kernels are interpreted although there is a GPU"
        yield "TRITON_INTERPRET", f"{text}. Unset TRITON_INTERPRET"
    # between cp.async and tcgen05 (triton#9610); behind tcgen05.ld
    omitted = {"3.6": "fence", "3.9": "wait"}.get(triton[:3])
    if omitted and available and torch.cuda.get_device_capability()[0] == 10:
        text = f"triton is {triton}, which omits a {omitted} on this GPU"
        remedy = "Run pip install 'triton==3.7.*', which has it"
        yield "triton", f"{text}: results may differ from run to run. {remedy}"
    if available or not has_gpu or _is_hidden():
        return
    cuda = torch.version.cuda
    driver = _driver_version()
    needed = DRIVERS.get(int((cuda or "0").split(".")[0]), 0)
    if cuda is None and torch.version.hip is None:
        text = f"torch {torch.__version__} is a build without CUDA, but there is an NVIDIA GPU"
        yield "devices", f"{text}. Install the CUDA build as described on pytorch.org"
    elif driver is not None and driver < needed:
        text = f"driver is {driver}, but torch is built with CUDA {cuda}, which requires {needed}"
        remedy = "Update the driver, or install torch for an older CUDA"
        yield "driver", f"{text} or newer. {remedy}"
    else:
        text = "torch.cuda.is_available() is False, but there is an NVIDIA GPU"
        remedy = "Check the driver with nvidia-smi, and start containers with --gpus all"
        yield "devices", f"{text}. {remedy}"


def _numpy_problems(torch) -> Iterator[tuple[str, str]]:
    """Yield incompatibilities of numpy, torch and Triton's interpreter."""
    text = None
    try:
        torch.zeros(1).numpy()
        if os.environ.get("TRITON_INTERPRET") == "1":
            text = interpreter_problem()
    except Exception as error:
        text = f"torch cannot use numpy ({first_line(error)}). Run pip install -U numpy"
    if text:
        yield "numpy", text


def interpreter_problem() -> str | None:
    """Return why Triton's interpreter cannot compute with this numpy; None if it can, or if the
    versions are unknown.
    """
    with contextlib.suppress(Exception):  # an unreadable version is reported elsewhere
        if _numbers("triton") < (3, 7) and _numbers("numpy") >= (2, 4):
            return (
                "numpy is 2.4 or newer, but the interpreter of triton<3.7 requires numpy<2.4. Run "
                "pip install 'numpy<2.4'"
            )
    return None


def _numbers(name: str) -> tuple[int, ...]:
    """Return the first two numbers of a package's version."""
    return tuple(map(int, re.findall(r"\d+", _version(name))[:2]))


def _cache_problems(name: str, folder: Path | None, variable: str) -> Iterator[tuple[str, str]]:
    """Yield the problem of a cache folder that cannot be written, or that other users can write."""
    from moe_runtime.io.files import untrusted

    remedy = f"Run export {variable}=FOLDER with a writable folder"
    if folder is None:
        yield name, f"{name} has no folder, as this user has no home. {remedy}"
        return
    is_writable = False
    with contextlib.suppress(OSError):  # a parent folder may not be readable
        whole = folder.absolute()
        nearest = next(path for path in (whole, *whole.parents) if path.exists())
        is_writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    if not is_writable:
        yield name, f"{name} is {folder}, which cannot be written. {remedy}"
    elif folder.exists() and (why := untrusted(folder)):
        yield name, why.replace("XDG_CACHE_HOME", variable)
