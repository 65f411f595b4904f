"""What works here, what does not, and the mend: `moe-runtime doctor`."""

import importlib.metadata
import os
import platform
import shutil

import torch

from moe_runtime import backends, cuda

SUPPORTED = {  # package: versions that the test suite runs on
    "torch": ">=2.11",
    "triton": ">=3.6,<4",
    "transformers": ">=5.16,<6",
    "safetensors": "",
    "numpy": "",
}
EXTRAS = {
    "train": ("accelerate", "datasets", "tokenizers", "trl", "peft"),
    "plot": ("matplotlib",),
}


def report() -> dict[str, dict[str, str]]:
    """Return what a bug report needs: versions, devices, and for each op the backend it would use here and why."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "system": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "nvcc": shutil.which("nvcc") or "none",
            "cuda library": cuda.describe(),
        },
        "packages": {name: _package(name, spec) for name, spec in SUPPORTED.items()}
        | {name: _package(name, "", extra) for extra, names in EXTRAS.items() for name in names},
        "devices": _devices(),
        "settings": {name: os.environ.get(name, "not set") for name in ("MOE_RUNTIME_BACKEND", "TRITON_INTERPRET")}
        | {"launch configs": _launch_configs(device)},
        "backends": {op: _explain(op, device) for op in backends.OPS},
    }


def _package(name: str, spec: str, extra: str | None = None) -> str:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"missing; pip install 'moe-runtime[{extra}]'" if extra else f"missing; pip install '{name}{spec}'"
    if not spec:
        return version
    from packaging.specifiers import SpecifierSet

    return version if SpecifierSet(spec).contains(version, prereleases=True) else f"{version}; want {spec}"


def _devices() -> dict[str, str]:
    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        devices[f"cuda:{i}"] = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory >> 30} GiB"
    return devices if len(devices) > 1 else devices | {"cuda": "none: torch.cuda.is_available() is False"}


def _launch_configs(device: torch.device) -> str:
    """Say where the experts' kernels get their tiles from."""
    if not backends._TRITON_INSTALLED:
        return "none: triton is not installed"
    from moe_runtime.kernels import tiles  # imports triton

    path = tiles.tuned_path()
    try:
        count = len(tiles.read_tuned().get(tiles.device_name(device), {}))
    except ValueError as error:
        return f"error: {error}"
    return f"{path}: {count} measured here" if count else f"built in; {path} has none for this device"


def _explain(op: str, device: torch.device) -> str:
    try:
        chosen = backends.pick(op, torch.empty(0, device=device))
    except ValueError as error:
        return f"error: {error}"
    reasons = [
        f"not {other}: {why}"
        for other in ("triton", "cuda")
        if other != chosen and (why := backends.why_not(other, op, device))
    ]
    if chosen == "triton" and backends.why_not("cuda", op, device) is None:
        reasons.append("cuda when asked for: not measured faster here")
    return "; ".join([chosen, *reasons])
