"""Fixtures shared by the tables of several methods."""

import pytest


@pytest.fixture(scope="module")
def quick():
    """Use PyTorch, since interpreted kernels would take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_RUNTIME_BACKEND", "torch")
        yield


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder for all stages of this file."""
    return tmp_path_factory.mktemp("tables")
