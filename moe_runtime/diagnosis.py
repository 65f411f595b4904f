"""What works here, what does not, and the mend: `moe-runtime doctor`.

Nothing that may be broken is imported with this module, torch neither: a broken setup is what it is asked about.
"""

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from moe_runtime.surroundings import (
    asking,
    cache,
    compiler,
    devices,
    driver,
    driver_version,
    explain,
    find_torch,
    first_line,
    guarded,
    has_gpu,
    in_home,
    is_hidden,
    launch_configs,
    library,
    package,
    version_of,
)

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
            "nvcc": lambda: shutil.which("nvcc") or "none; only python -m moe_runtime.build_cuda needs it",
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
