"""Builds the CUDA library from csrc/ when MOE_RUNTIME_BUILD_CUDA is set; all else about the package is in pyproject.toml.

MOE_RUNTIME_BUILD_CUDA   unset or 0: a wheel of pure Python, no compiler is looked for
                         1: with the library, for every architecture; a list such as 80;90 or 100+PTX: for those
No GPU is asked. The wheel is py3-none-<platform>: neither Python nor torch is linked.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARY = "moe_runtime._lib.libmoert_cuda"
ASKED = os.environ.get("MOE_RUNTIME_BUILD_CUDA", "0")


def load(path: Path):
    """Import one file, not its package: that one wants torch, which no build environment has."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildLibrary(build_ext):
    """One extension that nvcc compiles."""

    def get_ext_filename(self, fullname):
        # setuptools asks with the full name and with its last part, and would add Python's own suffix
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext):
        return []

    def copy_extensions_to_source(self):
        (ROOT / "moe_runtime" / "_lib").mkdir(exist_ok=True)  # an editable install's library lies in the checkout
        super().copy_extensions_to_source()

    def build_extension(self, ext):
        build.build(Path(self.get_ext_fullpath(ext.name)), csrc=ROOT / "csrc", archs=ARCHS)


class Wheel(bdist_wheel):
    """A wheel for one platform and every Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


if ASKED in ("", "0"):
    setup()
else:
    build = load(ROOT / "moe_runtime" / "build_cuda.py")
    ARCHS = build.ARCHS if ASKED == "1" else ASKED
    # a wheel that was asked for kernels and holds none would be a lie, so no warning and no fallback
    try:
        build.check(ROOT / "csrc", ARCHS)
    except build.BuildError as error:
        raise SystemExit(f"MOE_RUNTIME_BUILD_CUDA is {ASKED!r}, but {error}") from None
    sources = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").glob("*.cu"))
    setup(
        ext_modules=[Extension(LIBRARY, sources=sources)],
        cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
    )
