"""The kernels of the backend "cuda", compiled by g++."""

import pytest

from moe_runtime.native.library import cuda
from tests.csrc import emulator


@pytest.fixture(scope="module")
def emulated():
    """Use the emulated kernels as the backend "cuda"."""
    cuda.use(cuda.bind(emulator.build()))
    yield
    cuda.use(None)
