"""What works here, what does not, and the mend: `moe-runtime doctor`.

Nothing that may be broken is imported with this module, torch neither: a broken setup is what it is asked about.

What is there: packages, compilers, libraries, devices, folders; each row of `moe-runtime doctor` by itself.

Nothing that may be broken is imported with this module, torch neither.
"""

import importlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
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
    from moe_runtime.native import build

    try:
        command, version = build.find_compiler()
    except build.BuildError as error:
        return f"none: {first_line(error)}; only python -m moe_runtime.native.build cpu needs one"
    return f"{shlex.join(command)}: {version}"


def library(module: str) -> str:
    """Say which of our libraries there is, of the backend in that module, or why there is none."""
    try:
        return importlib.import_module(f"moe_runtime.native.{module}").describe()
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


SUPPORTED = {  # package: versions that the test suite runs on
    "torch": ">=2.11",
    "triton": ">=3.6,<4",
    "transformers": ">=5.16,<6",
    "safetensors": ">=0.8",
    "numpy": "",
}
# what an extra brings, and what of the command line needs it
EXTRAS = {
    "train": ("accelerate", "datasets", "tokenizers", "trl", "peft", "scipy"),
    "plot": ("matplotlib",),
    "bench": ("pytest", "pytest-benchmark"),
}
NEEDED_BY = {
    "train": "demo, run, train, stats, esft score and train, upit init-routers, fuser train and all tables",
    "plot": "demo, stats and all tables",
    "bench": "bench",
}
VARIABLES = ("MOE_RUNTIME_BACKEND", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
# the oldest driver for a CUDA version's programs, of NVIDIA's release notes
DRIVERS = {12: 525, 13: 580}


def report() -> dict[str, dict[str, str]]:
    """Return what a bug report needs: versions, devices, each op's backend and why; and under "problems" each mend."""
    torch, reason = find_torch()
    lines = {
        "system": {
            "python": platform.python_version,
            "platform": platform.platform,
            "driver": driver,
            "nvcc": lambda: shutil.which("nvcc") or "none; only python -m moe_runtime.native.build cuda needs it",
            "compiler": compiler,
            "cuda library": lambda: library("cuda"),
            "cpu library": lambda: library("cpp"),
            "cache": lambda: str(cache() or "none: this user has no home"),
        },
        "packages": {name: asking(package, name, spec, _mend(name, torch)) for name, spec in SUPPORTED.items()}
        | {
            name: asking(package, name, "", f"{NEEDED_BY[extra]} need it; pip install 'moe-runtime[{extra}]'")
            for extra, names in EXTRAS.items()
            for name in names
        },
        "devices": {},
        "settings": {name: asking(os.environ.get, name, "not set") for name in VARIABLES}
        | {"launch configs": launch_configs},
        "backends": {},
    }
    found = {title: {name: guarded(ask) for name, ask in rows.items()} for title, rows in lines.items()}
    if torch is None:
        found["devices"] = found["backends"] = {"all": f"none: torch cannot be imported ({reason})"}
    else:
        found["devices"], found["backends"] = _rows("devices", devices, torch), _rows("backends", _backends, torch)
    try:
        problems = dict(_problems(found, torch, reason))
    except Exception as error:
        problems = {"doctor": f"what is broken could not be found: {first_line(error)}; please report it"}
    for part in ("devices", "backends"):
        if (text := found[part].get(part, "")).startswith("unknown: "):
            problems[part] = f"{part} cannot be asked: {text.removeprefix('unknown: ')}; see what nvidia-smi says"
    return found | {"problems": problems}


def _mend(name: str, torch) -> str:
    """Return how a package that is missing is installed."""
    if name == "triton" and torch is not None and torch.version.hip is not None:
        return "install torch's ROCm build again, which brings its own, as pytorch.org says"
    return f"pip install '{name}{SUPPORTED[name]}'"


def _rows(name: str, ask: Callable[..., dict[str, str]], *args) -> dict[str, str]:
    """Return a table's rows, or one that says what it raised: a GPU may fail when it is asked, not when it is counted."""
    try:
        return ask(*args)
    except Exception as error:
        return {name: f"unknown: {first_line(error)}"}


def _backends(torch) -> dict[str, str]:
    from moe_runtime import backends

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {op: guarded(asking(explain, op, device)) for op in backends.OPS}


def _problems(found: dict, torch, reason: str) -> Iterator[tuple[str, str]]:
    """Yield what is broken and the mend, by the name of its part."""
    for name, spec in SUPPORTED.items():
        text = found["packages"][name]
        if text.startswith(("missing", "unreadable")) or "; want " in text:
            mend = "" if "install" in text else f"; pip install -U {name if not spec else repr(name + spec)}"
            yield name, f"{name} is {text}{mend}"
    if torch is None:
        yield "torch", f"torch cannot be imported: {reason}; pip install --force-reinstall 'torch{SUPPORTED['torch']}'"
    else:
        yield from _device_problems(found, torch)
        yield from _numpy_problems(torch)
    for row, text in found["settings"].items():
        if text.startswith("error: "):
            yield row, f"{text.removeprefix('error: ')}; remove it, and moe-runtime tune measures again"
    for row in ("cuda library", "cpu library"):
        if "rebuild it" in found["system"][row]:
            yield row, found["system"][row].removeprefix("none: ")
    failed = {op: text.removeprefix("error: ") for op, text in found["backends"].items() if text.startswith("error: ")}
    if failed:
        text = next(iter(failed.values()))
        more = f" (and {len(failed) - 1} ops more)" if len(failed) > 1 else ""
        yield "MOE_RUNTIME_BACKEND", f"{text}{more}; unset it, or set another one"
    yield from _cache_problems()


def _device_problems(found: dict, torch) -> Iterator[tuple[str, str]]:
    """Yield what keeps a GPU that is there from being used."""
    if os.environ.get("TRITON_INTERPRET") == "1" and (torch.cuda.is_available() or has_gpu()):
        text = "TRITON_INTERPRET is 1, and there is a GPU; want the kernels to run on it; unset TRITON_INTERPRET"
        yield "TRITON_INTERPRET", text
    if torch.cuda.is_available() or not has_gpu() or is_hidden():
        return
    if torch.version.cuda is None and torch.version.hip is None:
        text = f"torch {torch.__version__} has no CUDA, and there is an NVIDIA GPU; want torch's CUDA build"
        yield "devices", f"{text}; install it as pytorch.org says"
        return
    driver, needed = driver_version(), DRIVERS.get(int((torch.version.cuda or "0").split(".")[0]), 0)
    if driver is not None and driver < needed:
        yield (
            "driver",
            f"driver is {driver}, torch is built with CUDA {torch.version.cuda}; want driver {needed} or newer, or a torch of "
            f"an older CUDA",
        )
        return
    yield (
        "devices",
        "torch.cuda.is_available() is False, and there is an NVIDIA GPU; want a driver that works; see what nvidia-smi says, "
        "and start a container with --gpus all",
    )


def _numpy_problems(torch) -> Iterator[tuple[str, str]]:
    """Yield what does not fit between numpy, torch and Triton's interpreter."""
    try:
        torch.zeros(1).numpy()
    except Exception as error:
        yield "numpy", f"torch cannot use numpy ({first_line(error)}); pip install -U numpy"
        return
    triton, numpy = version_of("triton"), version_of("numpy")
    if os.environ.get("TRITON_INTERPRET") == "1" and triton and numpy and triton < (3, 7) and numpy >= (2, 4):
        text = "numpy is 2.4 or newer, triton is older than 3.7; want numpy<2.4 for its interpreter; pip install 'numpy<2.4'"
        yield "numpy", text


def _cache_problems() -> Iterator[tuple[str, str]]:
    """Yield folders that cannot be written, where kernels are built and configs kept."""
    folders = {"cache": (cache(), "XDG_CACHE_HOME")}
    triton = os.environ.get("TRITON_CACHE_DIR")
    folders["triton's cache"] = Path(triton) if triton else in_home(".triton"), "TRITON_CACHE_DIR"
    for name, (folder, variable) in folders.items():
        if folder is None:
            text = f"{name} is without a place: this user has no home; want a writable folder; export {variable}=FOLDER"
            yield name, text
            continue
        try:
            there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
            writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        except OSError:  # a folder above it may not even be looked into
            writable = False
        if not writable:
            yield name, f"{name} is {folder}, which cannot be written; want a writable folder; export {variable}=FOLDER"
