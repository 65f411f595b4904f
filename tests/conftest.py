"""Kernels run natively where there is a CUDA GPU, else in Triton's interpreter; either way the same
tests.

Triton decides per process: `@triton.jit`, and triton.language's own helpers at the first import,
read TRITON_INTERPRET when they decorate. So it is set here, before a kernel or a model file of
transformers imports triton (torch does not).
"""

import gc
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # one core a worker, in the subprocesses of tests too

import pytest
import torch

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

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# largest relative Frobenius error against float64 on the same quantised inputs: a few times what
# the eager path has
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.5e-2,
}


def pytest_report_header() -> str:
    return (
        "triton kernels: "
        f"{'interpreted on the CPU' if INTERPRETED else 'on ' + torch.cuda.get_device_name()}"
    )


_modules_frozen = 0


def _freeze_imports() -> None:
    """Take what modules hold out of the garbage collector's sight: every training ends with a
    search of all the rest.
    """
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
    # torch.empty is NaN from here on: a kernel writes all that it hands out, and reads nothing that
    # nobody wrote
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def tolerance() -> dict[torch.dtype, float]:
    return TOLERANCE
