"""Kernels run natively on a CUDA GPU, or else in Triton's interpreter, with the same tests.

Triton decides this per process: `@triton.jit` and triton.language's own helpers read
TRITON_INTERPRET when they are decorated, at the first import. It is therefore set here, before a
kernel or one of transformers' model files imports triton (torch does not).
"""

import collections
import fnmatch
import gc
import os
import re
import sys
import tomllib
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # one core per worker, also in subprocesses of tests

import pytest
import torch

TESTS = Path(__file__).parent

# MOE_RUNTIME_EMULATE=90 compiles the kernels for a GPU of capability 9.0 and executes their PTX
EMULATED = int(os.environ.get("MOE_RUNTIME_EMULATE", "0"))
if EMULATED:
    os.environ["TRITON_INTERPRET"] = "0"
if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
    assert "triton" not in sys.modules, (
        "triton was imported before tests/conftest.py could choose its interpreter"
    )
    os.environ["TRITON_INTERPRET"] = "1"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from tests.support import interp_fast, interp_fix, interp_san

    interp_fix.install()
    interp_fast.install()
    interp_san.install()

if EMULATED:
    from tests.emulator import driver

    driver.install(EMULATED)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# largest relative Frobenius error against float64 on the same quantized inputs: a few times the
# error of the eager path
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.5e-2,
}


def pytest_report_header() -> str:
    if INTERPRETED:
        where = "interpreted on the CPU"
    elif EMULATED:
        where = f"compiled for sm_{EMULATED} and executed by tests/emulator"
    else:
        where = f"on {torch.cuda.get_device_name()}"
    return f"triton kernels: {where}"


def _slow() -> dict[str, int]:
    """Read slow.toml: a pattern of names -> make test runs the first of so many cases, or none."""
    tables = tomllib.loads(TESTS.joinpath("slow.toml").read_text())
    found = {}
    for folder, entries in tables.items():
        for name, every in entries.items():
            path = f"tests/{folder}/{name}".replace("/./", "/")
            found[path.replace("[", "[[]")] = every  # fnmatch's way to write a bracket
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {re.compile(fnmatch.translate(pattern)): every for pattern, every in _slow().items()}
    seen = collections.Counter()
    for item in items:
        for pattern, every in slow.items():
            if not pattern.match(item.nodeid):
                continue
            if every == 0 or seen[pattern] % every:
                item.add_marker(pytest.mark.slow)
            seen[pattern] += 1


_modules_frozen = 0


def _freeze_imports() -> None:
    """Exclude imported modules from garbage collection, which the end of every training runs."""
    global _modules_frozen
    if len(sys.modules) > _modules_frozen + 20:
        gc.collect()
        gc.freeze()
        _modules_frozen = len(sys.modules)


def pytest_runtest_setup(item: pytest.Item) -> None:
    _freeze_imports()
    if item.get_closest_marker("gpu") and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(autouse=True)
def _seed_and_poison():
    torch.manual_seed(0)
    # fill torch.empty with NaN, so that a kernel that leaves an output unwritten, or reads
    # uninitialized memory, fails
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED or EMULATED else "cuda"


@pytest.fixture
def tolerance() -> dict[torch.dtype, float]:
    return TOLERANCE
