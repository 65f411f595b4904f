"""The library of csrc/cpu for the tests: built once into the user's cache, as `python -m
moe_runtime.native.build cpu` does.
"""

import functools

import pytest

from moe_runtime.native import build
from moe_runtime.native.library import Loaded, cpp


@functools.cache
def _build() -> Loaded | str:
    try:
        build.build_cpu(build.library_path("cpu"))
    except build.BuildError as error:
        return str(error)
    return cpp.bind(build.library_path("cpu"))


def library() -> Loaded:
    """Return the library; skips the test where there is no compiler."""
    built = _build()
    if isinstance(built, str):
        pytest.skip(built)
    return built
