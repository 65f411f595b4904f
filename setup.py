"""Build the requested libraries of csrc/; pyproject.toml has all other metadata.

MOE_RUNTIME_BUILD_CUDA   unset or 0: no CUDA library; 1: for every architecture; a list such as
                         80;90 or 100+PTX: for these
MOE_RUNTIME_BUILD_CPU    unset or 0: no CPU library; 1: the library of csrc/cpu, for every
                         instruction set of this machine's architecture

By default the result is a pure Python wheel that needs no compiler. With either library the wheel
is py3-none-<platform>, as neither Python nor torch is linked. No build needs a GPU.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CPU_CSRC = ROOT / "csrc" / "cpu"
CUDA = "moe_runtime._lib.libmoert_cuda"
CPU = "moe_runtime._lib.libmoert_cpu"
REQUESTED = {name: os.environ.get(f"MOE_RUNTIME_BUILD_{name}") or "0" for name in ("CUDA", "CPU")}


class BuildLibrary(build_ext):
    """Build extensions with moe_runtime/native/build.py."""

    def get_ext_filename(self, fullname):
        # setuptools passes the full name or its last part, and would add Python's suffix
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext):
        return []

    def copy_extensions_to_source(self):
        # an editable install keeps its library in the checkout
        (ROOT / "moe_runtime" / "_lib").mkdir(exist_ok=True)
        super().copy_extensions_to_source()

    def build_extension(self, ext):
        out = Path(self.get_ext_fullpath(ext.name))
        if ext.name == CPU:
            build.build_cpu(out, csrc=CPU_CSRC)
        else:
            build.build_cuda(out, csrc=ROOT / "csrc", archs=ARCHS)


class Wheel(bdist_wheel):
    """A wheel for one platform and every Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


def check_cuda() -> None:
    build.check_cuda(ROOT / "csrc", ARCHS)


def check_cpu() -> None:
    build.check_cpu(CPU_CSRC)


extensions = []
# fail if a request cannot be met, as a wheel without the requested kernels would be misleading
if REQUESTED["CPU"] not in ("0", "1"):
    raise SystemExit(f"MOE_RUNTIME_BUILD_CPU must be 0 or 1, but is {REQUESTED['CPU']!r}")
if set(REQUESTED.values()) != {"0"}:
    sys.path.insert(0, str(ROOT))
    from moe_runtime.native import build  # needs only Python

    ARCHS = build.ARCHS if REQUESTED["CUDA"] == "1" else REQUESTED["CUDA"]
    for name, library, pattern, check in (
        ("CUDA", CUDA, "csrc/*.cu", check_cuda),
        ("CPU", CPU, "csrc/cpu/*.cpp", check_cpu),
    ):
        value = REQUESTED[name]
        if value == "0":
            continue
        try:
            check()
        except build.BuildError as error:
            raise SystemExit(f"MOE_RUNTIME_BUILD_{name} is {value!r}, but {error}") from None
        sources = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
        extensions.append(Extension(library, sources=sources))
if extensions:
    setup(ext_modules=extensions, cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel})
else:
    setup()
