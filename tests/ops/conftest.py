"""The backends and instruction sets that the tests of an op run on."""

import pytest
import torch

from moe_runtime import backends
from moe_runtime.native.library import cpp
from tests.support import cpu_build

VARIANTS = ("generic", "avx2", "avx512", "avx512_bf16", "amx")


def pytest_generate_tests(metafunc):
    """Run a test that uses `backend` on each backend with kernels for the file's `OP`."""
    op = getattr(metafunc.module, "OP", None)
    if op is not None and "backend" in metafunc.fixturenames:
        names = [name for name in ("torch", "cpp", "triton") if op in backends.KERNELS[name]]
        metafunc.parametrize("backend", names, indirect=True)


@pytest.fixture
def device(request, device) -> str:
    """The device of the test's backend."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("backend") == "cpp":
        return "cpu"
    return device


@pytest.fixture
def backend(request, device) -> str:
    """A backend of the file's op; the test is skipped if it is unavailable."""
    if request.param == "cpp":
        request.getfixturevalue("cpu_library")
    why = backends.why_not(
        request.param,
        request.module.OP,
        torch.device(device),
    )
    if why is not None:
        pytest.skip(why)
    return request.param


@pytest.fixture
def cpu_library(monkeypatch):
    """The CPU library built from this tree."""
    library = cpu_build.library()
    monkeypatch.setattr(cpp, "_found", library)
    return library


@pytest.fixture(params=VARIANTS)
def variant(request, cpu_library):
    """Each instruction set of this machine."""
    best = cpu_library.variant
    if not cpu_library.handle.moert_cpu_limit(request.param.encode()):
        pytest.skip(f"this machine has no {request.param}")
    assert cpu_library.variant == request.param
    yield request.param
    cpu_library.handle.moert_cpu_limit(best.encode())
