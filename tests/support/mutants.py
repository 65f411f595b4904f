"""Bugs planted in the source of the kernels: one line is changed, and the modules that depend on it
are reloaded.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from triton.runtime.errors import InterpreterError

from moe_runtime import backends
from moe_runtime.ops import moe_mlp_triton  # noqa: F401  also imports the others
from tests.support.interp_san import KernelMemoryError


def edited(module: ModuleType, folder: Path, old: str, new: str) -> ModuleType:
    """Return `module`, one of kernels/, with `old` replaced by `new`, loaded from its own file,
    since a jit function reads its source.
    """
    if not backends.interpreted():
        pytest.skip("some mutants write out of bounds")
    file = Path(module.__file__)
    source = file.read_text()
    assert old in source, (
        f"kernels/{file.name} has no {old!r} any more; plant this mutant elsewhere"
    )
    path = folder / f"mutant_of_{file.name}"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant


@contextlib.contextmanager
def noting(found: list[str], *names: str) -> Iterator[None]:
    """Add to `found` what the sanitizer raises, also when wrapped by the interpreter, or an error
    with one of these names.
    """
    try:
        yield
    except (KernelMemoryError, InterpreterError) as error:
        if not any(name in repr(error) for name in ("KernelMemoryError", *names)):
            raise
        found.append(repr(error))
