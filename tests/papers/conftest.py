"""Fixtures that the tables of several methods share."""

import pytest


@pytest.fixture(scope="module")
def quick():
    """Interpreted kernels would take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_RUNTIME_BACKEND", "torch")
        yield


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of all stages of this file."""
    return tmp_path_factory.mktemp("tables")
