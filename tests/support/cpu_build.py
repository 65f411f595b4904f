"""The library of csrc/cpu for the tests, built once into the user's cache, like `python -m
moe_runtime.native.build cpu`.
"""

import functools

import pytest

from moe_runtime.native import build
from moe_runtime.native.library import Loaded, cpp


@functools.cache
def _build() -> Loaded | build.BuildError:
    try:
        build.build_cpu(build.library_path("cpu"))
    except build.BuildError as error:
        return error
    return cpp.bind(build.library_path("cpu"))


def library() -> Loaded:
    """Return the library; skip the test if there is no compiler, and fail if the library does not
    compile or fails its self-test.
    """
    built = _build()
    if isinstance(built, Loaded):
        return built
    if build.GET_COMPILER in str(built):
        pytest.skip(str(built))
    raise built
