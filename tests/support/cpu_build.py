"""The library of csrc/cpu for the tests: built once into the user's cache, as `python -m moe_runtime.native.build_cpu` does."""

import functools

import pytest

from moe_runtime.native import build_cpu, cpp


@functools.cache
def _build() -> cpp.Library | str:
    try:
        build_cpu.build(build_cpu.library_path())
    except build_cpu.BuildError as error:
        return str(error)
    return cpp.bind(build_cpu.library_path())


def library() -> cpp.Library:
    """Return the library; skips the test where there is no compiler."""
    built = _build()
    if isinstance(built, str):
        pytest.skip(built)
    return built
