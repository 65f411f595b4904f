"""Describe a GPU machine: python -m moe_runtime.bench.device_check [FILE.jsonl].

The exit code is 77 if there is no GPU that runs the kernels.
"""

import shutil
import sys
from pathlib import Path

import torch

from moe_runtime import backends
from moe_runtime.bench import machine
from moe_runtime.bench.records import Records

PACKAGES = (
    "numpy",
    "huggingface_hub",
    "httpx",
    "pytest",
    "pytest-benchmark",
    "pytest-xdist",
    "pytest-timeout",
)
NO_GPU = 77  # not 1, the exit code of any failure of this module
PROGRAMS = ("ncu", "compute-sanitizer", "nvcc", "g++", "gcc")


def device() -> dict:
    """Return the GPU's name and sizes, versions of packages, and which programs exist."""
    values = machine.describe() | {name: machine.version(name) for name in PACKAGES}
    for name in PROGRAMS:
        values[name] = bool(shutil.which(name))
    if machine.CUDA:
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        values |= {
            "capability": f"{about.major}.{about.minor}",
            "multiprocessors": about.multi_processor_count,
            "memory GiB": round(about.total_memory / 2**30, 1),
            "L2 MiB": round(about.L2_cache_size / 2**20, 1),
            "torch's CUDA": torch.version.cuda,
        }
    return values


def main(arguments: list[str]) -> int:
    """Print and write the description."""
    records = Records(Path(arguments[0]) if arguments else None)
    values = device()
    print("\n".join(f"{name}: {value}" for name, value in values.items()))
    records.write("", device=values)
    reason = "torch.cuda.is_available() is False. Run this on a machine with a CUDA GPU."
    if machine.CUDA:
        reason = backends.why_not(
            "triton",
            "moe_mlp",
            torch.device("cuda", torch.cuda.current_device()),
        )
    if reason:
        print(reason)
        return NO_GPU
    transformers = machine.missing("transformers") or "can be imported"
    print(f"transformers {transformers}")
    records.write("", commit=machine.commit(), transformers=transformers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
