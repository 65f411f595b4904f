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
# packages that provide the module triton: torch's builds for AMD and Intel GPUs depend on other
# ones
TRITONS = (
    "triton",
    "pytorch-triton-rocm",
    "triton-rocm",
    "pytorch-triton-xpu",
    "triton-xpu",
    "pytorch-triton",
)
# first Triton version without the bug, GPU, what is compiled wrongly, and why our kernels are not
# affected
MISCOMPILED = (
    (
        (3, 7),
        "sm_90",
        (
            "no fence between cp.async and wgmma (triton#9610): nobody has seen a wrong result on "
            "an H100"
        ),
    ),
    ((3, 7), "sm_90", "warp_specialize=True with descriptors: no kernel asks for it"),
    (
        (3, 7),
        "sm_90",
        "registers rewritten that wgmma still reads (triton#11781): none in our kernels",
    ),
    (
        (3, 7),
        "sm_100",
        "no fence between cp.async and tcgen05 (triton#9610): results may differ from run to run",
    ),
    (
        (3, 9),
        "sm_100",
        "two tl.dot into one accumulator in a loop (triton#10821): no kernel has them",
    ),
    (
        (4, 0),
        "sm_100",
        (
            "descriptors along a sum that ends inside of a block (triton#10927): pointers are "
            "used there"
        ),
    ),
)
NVIDIA = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")  # a container without a GPU still sees the host's driver, but no device


def report() -> dict[str, dict[str, str]]:
    """Return what a bug report needs: versions, devices, each op's backend and why; and problems
    with their fixes.
    """
    torch = None
    reason = ""
    try:
        import torch

        torch.zeros(1)
    except Exception as error:  # a broken installation may raise anything
        torch = None
        reason = _first_line(error)
    hip = torch is not None and torch.version.hip is not None
    rocm = "Reinstall torch's ROCm build, which includes it, as described on pytorch.org"
    found = {
        "system": {
            "python": _ask(platform.python_version),
            "platform": _ask(platform.platform),
            "driver": _ask(_driver),
            "nvcc": shutil.which("nvcc")
            or "none. Only python -m moe_runtime.native.build cuda needs it",
            "compiler": _ask(_compiler),
            "cuda library": _ask(_library, "cuda"),
            "cpu library": _ask(_library, "cpp"),
            "cache": _ask(lambda: str(_cache() or "none: this user has no home")),
        },
        "packages": {
            name: _ask(
                _package,
                name,
                spec,
                rocm if name == "triton" and hip else f"Run pip install '{name}{spec}'",
            )
            for name, spec in SUPPORTED.items()
        }
        | {
            name: _ask(
                _package,
                name,
                "",
                f"It is needed by {NEEDED_BY[extra]}. Run pip install 'moe-runtime[{extra}]'",
            )
            for extra, names in EXTRAS.items()
            for name in names
        },
        "devices": {"all": f"none: torch cannot be imported ({reason})"},
        "miscompiled": miscompiled(),
        "settings": {name: os.environ.get(name, "not set") for name in VARIABLES}
        | {"launch configs": _ask(_launch_configs)},
        "backends": {"all": f"none: torch cannot be imported ({reason})"},
    }
    problems = {}
    for part, ask in (("devices", _devices), ("backends", _backends)) if torch is not None else ():
        try:
            found[part] = ask(torch)
        except Exception as error:  # a GPU may be counted and still fail when it is queried
            found[part] = {part: f"unknown: {_first_line(error)}"}
            problems[part] = (
                f"{part} cannot be queried: {_first_line(error)}. Check the output of nvidia-smi"
            )
    try:
        problems = dict(_problems(found, torch, reason)) | problems
    except Exception as error:
        problems["doctor"] = (
            f"the search for problems failed: {_first_line(error)}. Please report it"
        )
    return found | {"problems": problems}


def _ask(question: Callable[..., str], *args) -> str:
    """Return what `question` returns or raises, so that one broken part does not hide the
    others.
    """
    try:
        return question(*args)
    except Exception as error:
        return f"unknown: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _version(name: str) -> str:
    """Return the version of a package, for triton under any of its names; raises
    PackageNotFoundError.
    """
    for one in TRITONS if name == "triton" else ():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(one)
    return importlib.metadata.version(name)


def _package(name: str, spec: str, remedy: str) -> str:
    """Return a package's version, with the fix if it is unsupported; `remedy` is the fix if it is
    missing.
    """
    try:
        version = _version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"missing. {remedy}"
    except Exception as error:
        return (
            f"unreadable ({_first_line(error)}). Run pip install --force-reinstall '{name}{spec}'"
        )
    if not isinstance(version, str):
        return f"unreadable (no version). Run pip install --force-reinstall '{name}{spec}'"
    from packaging.specifiers import SpecifierSet

    fits = SpecifierSet(spec).contains(version, prereleases=True)
    if fits:
        return version
    return f"{version}, but {spec} is required. Run pip install -U '{name}{spec}'"


def _compiler() -> str:
    """Return the C++ compiler that a build of the CPU library would use."""
    from moe_runtime.native import build

    try:
        command, version = build.find_compiler()
    except build.BuildError as error:
        return f"none: {_first_line(error)}. Only python -m moe_runtime.native.build cpu needs one"
    return f"{shlex.join(command)}: {version}"


def _library(name: str) -> str:
    """Describe the compiled library of a backend, or say why there is none."""
    try:
        from moe_runtime.native import library
    except ImportError as error:
        return f"none: {_first_line(error)}"
    return getattr(library, name).describe()


def _driver_version() -> int | None:
    """Return the major version of the NVIDIA driver."""
    found = re.search(r"Module.*?\s(\d+)\.\d+", NVIDIA.read_text()) if NVIDIA.is_file() else None
    return int(found[1]) if found else None


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
    counts = {"core": os.cpu_count(), "thread": torch.get_num_threads()}
    found = {
        "cpu": ", ".join(f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items())
    }
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found[f"cuda:{i}"] = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory >> 30} GiB"
    if len(found) > 1:
        return found
    why = f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}" if _is_hidden() else ""
    return found | {"cuda": f"none: {why or 'torch.cuda.is_available() is False'}"}


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
        return f"none: {_first_line(error)}"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        path = tiles.tuned_path()
    except ValueError as error:
        return f"built in; {error}"
    try:
        count = len(tiles.read_tuned().get(tiles.device_name(device), {}))
        if path.is_file() and (why := tiles.refused(path)):
            return f"error: {why}"
    except ValueError as error:
        return f"error: {error}"
    if count:
        return f"{path}: {count} measured here"
    return f"built in; {path} has none for this device"


def _backends(torch) -> dict[str, str]:
    from moe_runtime import backends

    return {
        op: _ask(explain, op, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        for op in backends.OPS
    }


def explain(op: str, device) -> str:
    """Return the backend of `op` on `device`, and why not another."""
    import torch

    from moe_runtime import backends

    try:
        chosen = backends.pick(op, torch.empty(0, device=device))
    except ValueError as error:
        return f"error: {error}"
    others = [other for other in backends.BACKENDS if other not in (chosen, "torch")]
    reasons = [
        f"not {other}: {why}" for other in others if (why := backends.why_not(other, op, device))
    ]
    # few ops have one or benefit from it
    reasons = [reason for reason in reasons if "has no cpp kernel" not in reason]
    if chosen == "triton" and backends.why_not("cuda", op, device) is None:
        reasons.append("cuda on request: not measured to be faster here")
    return "; ".join([chosen, *reasons])


def _problems(found: dict, torch, reason: str) -> Iterator[tuple[str, str]]:
    """Yield (part, problem with its fix)."""
    for name, text in ((name, found["packages"][name]) for name in SUPPORTED):
        if ". " in text:
            yield name, f"{name} is {text}"
    if torch is None:
        yield (
            "torch",
            (
                f"torch cannot be imported: {reason}. Run pip install --force-reinstall "
                f"'torch{SUPPORTED['torch']}'"
            ),
        )
    else:
        yield from _device_problems(torch)
        yield from _numpy_problems(torch)
    if (text := found["settings"]["launch configs"]).startswith("error: "):
        text = text.removeprefix("error: ")
        yield (
            "launch configs",
            text if " is refused: " in text else f"{text}. Remove it and rerun moe-runtime tune",
        )
    for row in ("cuda library", "cpu library"):
        if any(words in found["system"][row] for words in ("rebuild it", " is refused: ")):
            yield row, found["system"][row].removeprefix("none: ")
    why = found["system"]["cpu library"]
    is_torch = found["backends"].get("moe_mlp", "").startswith("torch")
    is_left = why.startswith("none: ") and "rebuild it" not in why and " is refused: " not in why
    if is_torch and is_left and not os.environ.get("MOE_RUNTIME_BACKEND"):
        yield (
            "cpu library",
            f"experts run in PyTorch, which is slower: {why.removeprefix('none: ')}",
        )
    failed = [
        text.removeprefix("error: ")
        for text in found["backends"].values()
        if text.startswith("error: ")
    ]
    if failed:
        more = f" (and {len(failed) - 1} more ops)" if len(failed) > 1 else ""
        yield (
            "MOE_RUNTIME_BACKEND",
            f"{failed[0]}{more}. Unset MOE_RUNTIME_BACKEND or set another one",
        )
    if (asked := os.environ.get("XDG_CACHE_HOME")) and not Path(asked).is_absolute():
        text = f"XDG_CACHE_HOME is {asked!r}, which is ignored because it is a relative path"
        yield "XDG_CACHE_HOME", f"{text}. Run export XDG_CACHE_HOME=FOLDER with a full path"
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton")
    yield from _cache_problems("cache", _cache(), "XDG_CACHE_HOME")
    yield from _cache_problems(
        "triton's cache", None if triton[0] == "~" else Path(triton), "TRITON_CACHE_DIR"
    )


def _device_problems(torch) -> Iterator[tuple[str, str]]:
    """Yield what prevents an existing GPU from being used."""
    available = torch.cuda.is_available()
    cuda = torch.version.cuda
    if os.environ.get("TRITON_INTERPRET") == "1" and (available or _has_gpu()):
        text = (
            "TRITON_INTERPRET is 1, so kernels are interpreted although there is a GPU. Unset "
            "TRITON_INTERPRET"
        )
        yield "TRITON_INTERPRET", text
    if (
        available
        and torch.cuda.get_device_capability()[0] == 10
        and "tcgen05" in miscompiled().get("sm_100", "")
    ):
        text = (
            f"triton is {_version('triton')}, which omits a fence on this GPU: results may differ "
            "from run to run"
        )
        yield "triton", f"{text}. Run pip install -U 'torch>=2.12', which depends on a newer one"
    if available or not _has_gpu() or _is_hidden():
        return
    driver = _driver_version()
    needed = DRIVERS.get(int((cuda or "0").split(".")[0]), 0)
    if cuda is None and torch.version.hip is None:
        text = f"torch {torch.__version__} is a build without CUDA, but there is an NVIDIA GPU"
        yield "devices", f"{text}. Install the CUDA build as described on pytorch.org"
    elif driver is not None and driver < needed:
        text = (
            f"driver is {driver}, but torch is built with CUDA {cuda}, which requires {needed} or "
            "newer"
        )
        yield "driver", f"{text}. Update the driver, or install torch for an older CUDA"
    else:
        text = "torch.cuda.is_available() is False, but there is an NVIDIA GPU"
        yield (
            "devices",
            f"{text}. Check the driver with nvidia-smi, and start containers with --gpus all",
        )


def _numpy_problems(torch) -> Iterator[tuple[str, str]]:
    """Yield incompatibilities of numpy, torch and Triton's interpreter."""
    try:
        torch.zeros(1).numpy()
    except Exception as error:
        yield "numpy", f"torch cannot use numpy ({_first_line(error)}). Run pip install -U numpy"
        return
    if os.environ.get("TRITON_INTERPRET") == "1" and (text := interpreter_problem()):
        yield "numpy", text


def interpreter_problem() -> str | None:
    """Return why Triton's interpreter cannot compute with this numpy; None if it can, or if the
    versions are unknown.
    """
    with contextlib.suppress(Exception):  # an unreadable version is reported elsewhere
        if _numbers("triton") < (3, 7) and _numbers("numpy") >= (2, 4):
            text = "numpy is 2.4 or newer, but the interpreter of triton<3.7 requires numpy<2.4"
            return f"{text}. Run pip install 'numpy<2.4'"
    return None


def _numbers(name: str) -> tuple[int, ...]:
    """Return the first two numbers of a package's version."""
    return tuple(map(int, re.findall(r"\d+", _version(name))[:2]))


def miscompiled() -> dict[str, str]:
    """Return what the installed Triton is known to compile wrongly, by GPU, and what it means for
    our kernels.
    """
    found = {}
    with contextlib.suppress(Exception):
        for end, gpu, what in MISCOMPILED:
            if _numbers("triton") < end:
                found[gpu] = f"{found[gpu]}; {what}" if gpu in found else what
    return found or {"all": "nothing known for this version"}


def _cache_problems(name: str, folder: Path | None, variable: str) -> Iterator[tuple[str, str]]:
    """Yield the problem of a cache folder that cannot be written, or that other users can write."""
    from moe_runtime.io.files import untrusted

    try:
        there = folder and next(
            path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
        )
        writable = there and there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except OSError:  # a parent folder may not be readable
        writable = False
    if writable and folder.exists() and (why := untrusted(folder)):
        yield name, why.replace("XDG_CACHE_HOME", variable)
    elif not writable:
        if folder:
            what = f"is {folder}, which cannot be written"
        else:
            what = "has no folder, as this user has no home"
        yield name, f"{name} {what}. Run export {variable}=FOLDER with a writable folder"
