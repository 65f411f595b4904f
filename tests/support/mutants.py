"""Mistakes planted in the source of the kernels: one line is changed, and the modules that build on it are loaded anew."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from triton.runtime.errors import InterpreterError

import moe_runtime.kernels
import moe_runtime.ops
from moe_runtime import backends
from moe_runtime.kernels import tiles
from moe_runtime.ops import moe_mlp_triton  # noqa: F401  it imports the others, too
from tests.support.interp_san import KernelMemoryError

ROOT = Path(__file__).resolve().parents[2]
# each may import those in front of it
CHAIN = ("activation", "tiles", "grouped_gemm", "grouped_gemm_backward", "shared_expert", "moe_mlp_triton")


def edit(source: str, function: str, old: str, new: str) -> str:
    """The source with `old` replaced by `new` in `function`."""
    start = source.index(f"def {function}(")
    end = source.find("\n\n\n", start) % (len(source) + 1)
    body = source[start:end]
    assert old in body, f"{function} has no {old!r} any more; plant this mutant elsewhere"
    return source[:start] + body.replace(old, new) + source[end:]


def plant(
    monkeypatch, folder: Path, place: str, old: str = "", new: str = "", users: tuple[ModuleType, ...] = ()
) -> None:
    """Load anew the module of `place` ("module.function") with its change and the modules behind it, from files in `folder`.

    `users` are modules that hold some of them by name. monkeypatch undoes all of it.
    """
    name, function = place.split(".")
    for module in CHAIN[CHAIN.index(name) :]:
        package = moe_runtime.ops if module == "moe_mlp_triton" else moe_runtime.kernels
        source = (ROOT / package.__name__.replace(".", "/") / f"{module}.py").resolve()
        text = source.read_text()
        if module == name and old:
            text = edit(text, function, old, new)
        file = folder / f"{module}.py"  # the interpreter reads the source of a kernel from its file
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(f"{package.__name__}.{module}", file)
        loaded = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, loaded)
        monkeypatch.setattr(package, module, loaded)
        spec.loader.exec_module(loaded)
        if module == "tiles":
            loaded._forced = tiles._forced
        for user in users:
            if hasattr(user, module):
                monkeypatch.setattr(user, module, loaded)


def edited(module: ModuleType, folder: Path, old: str, new: str) -> ModuleType:
    """`module`, one of kernels/, with `old` replaced by `new`, from a file of its own: a jit function reads its source."""
    if not backends.interpreted():
        pytest.skip("some mutants write out of bounds")
    file = Path(module.__file__)
    source = file.read_text()
    assert old in source, f"kernels/{file.name} has no {old!r} any more; plant this mutant elsewhere"
    path = folder / f"mutant_of_{file.name}"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant


@contextlib.contextmanager
def noting(found: list[str], *names: str) -> Iterator[None]:
    """Add to `found` what the sanitizer raises, bare or wrapped by the interpreter, or an error of one of these names."""
    try:
        yield
    except (KernelMemoryError, InterpreterError) as error:
        if not any(name in repr(error) for name in ("KernelMemoryError", *names)):
            raise
        found.append(repr(error))
