"""Shared by the build tests of csrc/: the library for every architecture, and a toolkit with g++ as
nvcc.
"""

import functools
import re
import shutil
from pathlib import Path

import pytest

from moe_runtime.native import build
from tests.support.captured import captured

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"


@functools.cache
def missing() -> str | None:
    """Return what is missing here to build csrc/; None if nothing is."""
    try:
        build.check_cuda(CSRC)
    except build.BuildError as error:
        return str(error)
    return None


needs_nvcc = pytest.mark.skipif(missing() is not None, reason=missing() or "")
needs_cxx = pytest.mark.skipif(
    shutil.which("g++") is None,
    reason="needs g++",
)


def cuobjdump(library: Path, *options: str) -> str:
    """Return the output of cuobjdump for `library`, with the toolkit's cuobjdump or Triton's."""
    beside = build.find_toolkit().library_dir
    tools = [parent / "bin" / "cuobjdump" for parent in beside.parents]
    tools += Path(__import__("triton").__file__).parent.glob("backends/nvidia/bin/cuobjdump")
    tool = next(tool for tool in tools if tool.is_file())
    return captured([tool, *options, library], check=True).stdout


def cubins(library: Path) -> tuple[list[str], list[str]]:
    """Return the architectures of the machine code and of the PTX in `library`; older cuobjdumps
    drop the letter of 90a.
    """
    found = []
    for option, kind in (("-lelf", "cubin"), ("-lptx", "ptx")):
        found.append(
            re.findall(
                rf"\.sm_(\d+)[af]?\.{kind}",
                cuobjdump(library, option),
            )
        )
    return sorted(set(found[0]), key=int), sorted(set(found[1]), key=int)


NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release {version}, V0"; exit ;;
--dryrun) echo "#$ TOP={home}"; exit ;;
--list-gpu-arch) echo compute_80; echo compute_90; exit ;;
esac
echo "$@" >>{home}/calls
while [ "$#" -gt 0 ]; do
    case "$1" in
    -include) stamp=$2; shift ;;
    -I) folder=$2; shift ;;
    -c) source=$2; shift ;;
    -o) out=$2; shift ;;
    esac
    shift
done
echo "ptxas info    : Compiling entry function 'kernel' for 'sm_90'"
echo "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
echo "ptxas info    : Used 21 registers, 400 bytes smem"
exec g++ -x c++ -fPIC -fvisibility=hidden -include "$stamp" -I "$folder" -c "$source" -o "$out"
"""

SOURCES = {
    "moert.h": """#pragma once
#define MOERT_ABI_VERSION 7
#define MOERT_API extern "C" __attribute__((visibility("default")))
MOERT_API int moert_abi_version(void);
MOERT_API const char* moert_build_info(void);  // JSON
MOERT_API const char* moert_error_string(int status);
MOERT_API int moert_probe(int* driver, int* runtime, int* devices);
MOERT_API int moert_twice(const float* x, int64_t n,
                          float* out, void* stream);
""",
    "info.cu": """#include <cstdint>
#include "moert.h"
int moert_abi_version() { return MOERT_ABI_VERSION; }
const char* moert_build_info() { return MOERT_BUILD_INFO; }
const char* moert_error_string(int status) { return status ? "refused" : "ok"; }
int moert_probe(int* a, int* b, int* c) { *a = *b = *c = 1; return 0; }
""",
    "twice.cu": """#include <cstdint>
#include "moert.h"
int moert_twice(const float* x, int64_t n, float* out, void*) {
  if (n < 0) return -1;
  for (int64_t i = 0; i < n; ++i) out[i] = 2 * x[i];
  return 0;
}
int moert_local() { return 0; }
""",
}


def fake_toolkit(home: Path, version: str = "13.0", runtime: bool = True) -> Path:
    """Write a CUDA_HOME whose nvcc compiles for the host and prints what nvcc and ptxas print."""
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(NVCC.format(version=version, home=home))
    nvcc.chmod(0o755)
    if runtime:
        (home / "lib64").mkdir()
        (home / "lib64" / "libcudart_static.a").write_bytes(b"!<arch>\n")
    return home


def fake_sources(folder: Path) -> Path:
    """Write sources of one launcher that do not need CUDA."""
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(
            text.replace(
                "#pragma once\n",
                "#pragma once\n#include <stdint.h>\n",
            )
        )
    return folder
