"""The CUDA library: a build reports what is missing, contains what was requested, and loads without
a GPU.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from moe_runtime.native import build
from moe_runtime.native import library as native
from moe_runtime.native.build import BuildError
from moe_runtime.native.library import cuda
from tests.support.captured import captured
from tests.support.cuda_build import (
    CSRC,
    ROOT,
    cubins,
    cuobjdump,
    fake_sources,
    fake_toolkit,
    needs_cxx,
    needs_nvcc,
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Isolate tests from each other's libraries and from a user's environment variables."""
    for name in ("CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    yield
    cuda.use(None)


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A toolkit in CUDA_HOME whose nvcc is g++, and sources that it compiles."""
    home = fake_toolkit(tmp_path / "toolkit")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake_sources(tmp_path / "csrc")
    return tmp_path


def test_no_nvcc_anywhere(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(build, "DEFAULT_NVCC", tmp_path / "nvcc")
    monkeypatch.setattr("site.getsitepackages", lambda: [])
    monkeypatch.setattr("site.getusersitepackages", lambda: str(tmp_path))
    with pytest.raises(BuildError, match="nvcc was not found in PATH, /usr/local/cuda and pip's"):
        build.find_toolkit()
    fake_toolkit(tmp_path / "nvidia" / "cu13")
    assert build.find_toolkit().nvcc == tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "old", version="12.6")))
    with pytest.raises(BuildError, match=r"nvcc 12\.8 or newer is required, .* version 12\.6"):
        build.find_toolkit()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=f"CUDA_HOME is {tmp_path}, which has no bin/nvcc"):
        build.find_toolkit()


@needs_cxx
def test_architectures_become_flags(toolkit):
    *_, flags, names = build.check_cuda(toolkit / "csrc", "80, sm_90a;90+PTX")
    assert names == ["sm_80", "sm_90a", "sm_90", "compute_90"]
    *_, shared, _ = build.check_cuda(toolkit / "csrc", "80;90")
    # compiled once, assembled twice
    assert shared[1::2] == ["arch=compute_80,code=sm_80", "arch=compute_80,code=sm_90"]
    assert flags[1::2] == [
        "arch=compute_80,code=sm_80",
        "arch=compute_90a,code=sm_90a",
        "arch=compute_90,code=sm_90",
        "arch=compute_90,code=compute_90",
    ]
    for archs in ("90;75", "90+SASS", " ; "):
        with pytest.raises(BuildError, match=r"a list such as .* supports \(80, 90\)"):
            build.check_cuda(toolkit / "csrc", archs)


@needs_cxx
def test_build_and_launch(toolkit):
    csrc = toolkit / "csrc"
    out = toolkit / "lib" / "out.so"
    report = build.build_cuda(out, csrc=csrc, archs="80;90")
    assert report.count("Used 21 registers") == 2  # one of each source
    library = cuda.bind(out, csrc)
    assert library.info == {
        "sources": build.source_hash("cuda", csrc),
        "nvcc": "13.0",
        "archs": ["sm_80", "sm_90"],
    }
    assert not library.emulated
    assert not hasattr(library.handle, "moert_local")
    cuda.use(library)
    assert cuda.describe() == f"{out}: nvcc 13.0 for sm_80, sm_90"
    x = torch.randn(5)
    y = torch.zeros(5)
    cuda.launch("moert_twice", x, x, 5, y)
    assert torch.equal(y, 2 * x)
    with pytest.raises(RuntimeError, match=r"moert_twice failed: refused \(-1\)"):
        cuda.launch("moert_twice", x, x, -1, y)
    assert [path.name for path in out.parent.iterdir()] == ["out.so"]


def compiled(toolkit: Path) -> list[str]:
    """Return the sources that nvcc has compiled so far."""
    return re.findall(r"-c \S*/(\w+)\.cu", (toolkit / "toolkit" / "calls").read_text())


@needs_cxx
def test_only_what_changed_is_compiled_again(toolkit):
    csrc = toolkit / "csrc"
    out = toolkit / "out.so"

    def built():
        build.build_cuda(out, csrc=csrc, archs="90")
        return sorted(compiled(toolkit))

    assert built() == ["info", "twice"] == built()
    (csrc / "twice.cu").write_text((csrc / "twice.cu").read_text() + "\n")
    # info holds the hash of all sources
    assert built() == ["info", "info", "twice", "twice"]
    (csrc / "moert.h").write_text((csrc / "moert.h").read_text() + "\n")
    assert built() == ["info"] * 3 + ["twice"] * 3


@needs_cxx
def test_a_source_that_does_not_compile_leaves_what_was_there(toolkit):
    csrc = toolkit / "csrc"
    out = toolkit / "out.so"
    out.write_text("old")
    (csrc / "twice.cu").write_text("int f() { return nonsense; }\n")
    with pytest.raises(
        BuildError, match=r"(?s)nvcc .*twice\.cu.*failed with exit code 1:.*nonsense"
    ):
        build.build_cuda(out, csrc=csrc, archs="90")
    assert out.read_text() == "old"
    assert not list(toolkit.glob(".build-*"))
    assert not list((toolkit / "cache" / "moe_runtime" / "cuda" / "objects").glob("twice*"))


@needs_cxx
def test_the_command_builds_where_the_package_looks(toolkit, monkeypatch, capsys):
    monkeypatch.setattr(build, "csrc_dir", lambda kind: toolkit / "csrc")
    path = build.library_path("cuda")
    device = torch.device("cuda")
    monkeypatch.setattr(cuda, "places", lambda: [path])
    missing = "the CUDA library is not built. To build it, run python -m moe_runtime.native.build"
    assert cuda.describe() == f"none: {missing} cuda"
    with pytest.raises(ValueError, match="not built. To build it, run python -m"):
        cuda.library()
    cuda.use(None)
    assert build.main(["cuda", "--archs", "90"]) == 0
    assert str(path) in capsys.readouterr().out
    assert cuda.library().path == path
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert cuda.why_not(device) is None
    assert "the CPU" in cuda.why_not(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert f"{path} is for sm_90, not for sm_80. Run python -m" in cuda.why_not(device)
    assert build.main(["cuda", "--archs", "75"]) == 2
    assert "error: architectures must be" in capsys.readouterr().err


@needs_cxx
def test_a_library_of_other_sources_is_refused(toolkit, monkeypatch):
    csrc = toolkit / "csrc"
    out = toolkit / "out.so"
    build.build_cuda(out, csrc=csrc, archs="90")
    sources = build.source_hash("cuda", csrc)
    text = (csrc / "moert.h").read_text()
    (csrc / "moert.h").write_text(text + "// changed\n")
    with pytest.raises(
        OSError, match="was built from other sources.*python -m moe_runtime.native.build cuda"
    ):
        cuda.bind(out, csrc)
    (csrc / "moert.h").write_text(text + "MOERT_API int moert_new(int x);\n")
    with pytest.raises(OSError, match="and has no moert_new. To rebuild it"):
        cuda.bind(out, csrc)
    # with the hash of these sources
    monkeypatch.setattr(build, "source_hash", lambda *_: sources)
    (csrc / "moert.h").write_text(text.replace("ABI_VERSION 7", "ABI_VERSION 8"))
    with pytest.raises(OSError, match="was built from other sources"):
        cuda.bind(out, csrc)


@pytest.mark.parametrize(
    "archs, gpus, others",
    [
        pytest.param(
            ["sm_80"],
            [(8, 0), (8, 6), (8, 9)],
            [(9, 0), (7, 5)],
            id="machine code of one major version",
        ),
        pytest.param(["sm_86"], [(8, 6), (8, 9)], [(8, 0)], id="not an older minor version"),
        pytest.param(["sm_90a"], [(9, 0)], [(9, 1), (10, 0)], id="a single GPU"),
        pytest.param(
            ["sm_90", "compute_100"], [(9, 0), (10, 0), (11, 0), (12, 1)], [(8, 9)], id="PTX"
        ),
    ],
)
def test_code_runs_where_it_can(archs, gpus, others):
    for gpu in gpus:
        assert native.covers(archs, *gpu)
    for gpu in others:
        assert not native.covers(archs, *gpu)


def test_types_of_the_header():
    header = (
        "// MOERT_API int moert_no(int);\n"
        "MOERT_API int64_t moert_f(const void* p, int64_t n, int k,\n  float x, double y);"
    )
    ((name, (result, arguments)),) = native.read_header(header).items()
    assert name == "moert_f"
    assert result.__name__ in ("c_long", "c_longlong")
    assert arguments[0].__name__ == "c_void_p"
    assert [type.__name__ for type in arguments[2:]] == ["c_int", "c_float", "c_double"]
    with pytest.raises(KeyError):
        native.read_header("MOERT_API int moert_g(size_t n);")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return csrc/ built for every architecture; compiled once, by the first test worker that needs
    it.
    """
    out = tmp_path_factory.mktemp("library") / build.NAMES["cuda"]
    build.build_cuda(out, csrc=CSRC)
    return out


@pytest.mark.slow
@pytest.mark.slow
@needs_nvcc
def test_machine_code_for_every_architecture(library):
    assert cubins(library) == (["80", "86", "89", "90", "100", "120"], ["100"])


def readelf(*words) -> str:
    done = captured(["readelf", *words], check=True)
    return done.stdout


@pytest.mark.slow
@needs_nvcc
def test_no_kernel_spills(library):
    usage = cuobjdump(library, "-res-usage")
    rows = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert len(rows) >= 5 * 6
    for registers, stack, local in rows:
        assert int(registers) <= 128  # at least 512 threads per multiprocessor
        assert stack == local == "0"


@pytest.mark.slow
@needs_nvcc
def test_it_needs_libc_alone_and_shows_its_launchers_alone(library):
    needed = re.findall(r"NEEDED.*\[(?!ld-linux)(.*)\]", readelf("-Wd", library))
    # the last four are separate parts of libc before glibc 2.34
    parts = {"libc.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6"}
    assert set(needed) <= parts
    symbols = readelf("-W", "--dyn-syms", library)
    shown = re.findall(r"GLOBAL\s+DEFAULT\s+\d+ (\S+)", symbols)
    assert set(shown) == set(native.read_header((CSRC / "moert.h").read_text()))


LOAD = """
import json, sys
from pathlib import Path
import torch
from moe_runtime import backends
from moe_runtime.native.library import cuda
cuda.use(cuda.bind(Path(sys.argv[1])))
idx = torch.zeros(3, 2, dtype=torch.int32)
try:
    backends.pick("dispatch", idx, "cuda")
except ValueError as error:
    print(json.dumps([cuda.describe(), str(error), backends.pick("dispatch", idx)]))
"""


@pytest.mark.slow
@pytest.mark.slow
@needs_nvcc
def test_it_loads_without_a_driver(library):
    command = [sys.executable, "-c", LOAD, library]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = captured(command, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    described, refused, default = json.loads(done.stdout)
    assert described.startswith(f"{library}: nvcc ")
    assert "sm_80, sm_86, sm_89, sm_90, sm_100, compute_100, sm_120" in described
    # the error of the driver, or of its absence
    assert torch.cuda.is_available() or "; " in described
    assert refused == "backend 'cuda' cannot run dispatch: the tensor is on the CPU, not on cuda"
    assert default == "torch"
