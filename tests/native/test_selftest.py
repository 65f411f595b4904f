"""The CPU library on every kind of processor: no variant runs code at load, and a library that
fails its self-test is not used.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_runtime.native import build, selftest
from moe_runtime.native.library import CppLibrary, cpp
from moe_runtime.tools import doctor
from tests.support import cpu_build
from tests.support.captured import captured

DRIVER = Path(__file__).with_name("self_test_driver.c")
AARCH64 = "/usr/aarch64-linux-gnu"  # libc of Debian's cross compiler
is_x86 = os.uname().machine == "x86_64"
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
needs_readelf = pytest.mark.skipif(
    shutil.which("readelf") is None, reason="binutils are not installed"
)
needs_qemu = pytest.mark.skipif(
    shutil.which("qemu-x86_64") is None or not is_x86, reason="qemu-x86_64 is not installed"
)


def code_at_load(path: Path) -> list[str]:
    """Return the sections of an object whose code runs when a library that contains it is
    loaded.
    """
    sections = captured(["readelf", "-SW", path], check=True).stdout
    return re.findall(r"\.(?:pre)?init_array\S*|\.ctors\S*|\.init\b|\.text\.startup", sections)


def shared_symbols(path: Path) -> list[str]:
    """Return the symbols of an object that the linker may merge with those of another one."""
    symbols = captured(["nm", "--defined-only", "--extern-only", path], check=True).stdout
    return [line.split()[-1] for line in symbols.splitlines()]


def compile_sets(folder: Path, *, flags: tuple, sets=None, csrc=None) -> dict[str, Path]:
    """Compile each variant and return the objects by name."""
    before = build.CPU_FLAGS
    build.CPU_FLAGS = (*flags, *before[1:])
    sets = {"generic": ()} | (build.X86_SETS if is_x86 else {}) if sets is None else sets
    try:
        made, left_out = build.compile_cpu(
            folder, csrc or build.csrc_dir("cpu"), build.find_compiler()[0], sets, {}
        )
    finally:
        build.CPU_FLAGS = before
    assert not left_out
    return {path.stem: path for path in made}


@needs_gxx
@needs_readelf
def test_no_variant_runs_code_when_the_library_is_loaded(tmp_path):
    made = compile_sets(tmp_path, flags=("-O0",))
    del made["moert_cpu"]
    for name, path in made.items():
        assert code_at_load(path) == [], name


def found() -> bool | str:
    """Look up the library; return whether it is used, or the reason why not."""
    library = CppLibrary().find()
    return library if isinstance(library, str) else True


@needs_gxx
@needs_readelf
@pytest.mark.slow
def test_optimized_variants_share_no_code(tmp_path):
    for name, path in compile_sets(tmp_path, flags=("-O3",)).items():
        if name in ("moert_cpu", "self_test"):
            continue
        assert code_at_load(path) == []
        # if the linker used one variant's function for all, it would run on processors without its
        # instructions
        assert shared_symbols(path) == [f"_ZN5moert{len(name)}{name}E"]


@pytest.fixture
def library():
    return cpu_build.library()


@needs_qemu
@pytest.mark.parametrize(
    "processor, variants",
    [
        ("Haswell", ["avx2", "generic"]),
        ("EPYC-Milan", ["avx2", "generic"]),
        ("Nehalem", ["generic"]),
    ],
)
def test_other_x86_processors(processor, variants, library, tmp_path):
    qemu = ["qemu-x86_64", "-cpu", processor]
    assert selftest.run(library.path, command=tuple(qemu)) is None
    subprocess.run(["gcc", "-o", tmp_path / "driver", DRIVER, "-ldl"], check=True)
    driven = captured([*qemu, tmp_path / "driver", library.path])
    assert driven.returncode == 0, driven.stderr
    assert driven.stdout.splitlines() == [f"testing {name}" for name in variants], driven.stderr


@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("qemu-aarch64") is None,
    reason="aarch64-linux-gnu-g++ or qemu-aarch64 is not installed",
)
def test_aarch64_runs_the_generic_variant(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "aarch64-linux-gnu-g++")
    objects = compile_sets(tmp_path, flags=("-O2",), sets={"generic": ()})
    made = tmp_path / "library.so"
    subprocess.run(["aarch64-linux-gnu-g++", "-shared", "-o", made, *objects.values()], check=True)
    subprocess.run(["aarch64-linux-gnu-gcc", "-o", tmp_path / "driver", DRIVER, "-ldl"], check=True)
    driven = captured(["qemu-aarch64", "-L", AARCH64, tmp_path / "driver", made])
    assert driven.returncode == 0, driven.stdout + driven.stderr
    assert driven.stdout == "testing generic\n", driven.stdout + driven.stderr


def copy_of_sources(tmp_path: Path, file: str, old: str, new: str) -> Path:
    """Copy csrc/cpu with `old` replaced by `new` in one file."""
    csrc = tmp_path / "csrc"
    shutil.copytree(build.csrc_dir("cpu"), csrc)
    text = (csrc / file).read_text()
    assert old in text
    (csrc / file).write_text(text.replace(old, new))
    return csrc


TABLE = "extern constexpr Kernels MOERT_SET"
TRAP = "__builtin_trap();"
PLANTED = {
    "forward": (
        "experts.h",
        "total[n] += w * y[n]",
        "total[n] += y[n]",
        "the forward pass in float32 is wrong",
    ),
    "dx": (
        "gradients.h",
        "store_up_to(dx(r) + n, load",
        "store_up_to(dx(r) + n, 0.5f * load",
        "the gradient of x in float32",
    ),
    "dweight": (
        "gradients.h",
        "* b.rows + row] = sum(dots)",
        "* b.rows + row] = 0",
        "the gradient of the routing weights in",
    ),
    "merging": (
        "merging.h",
        "total[v] += rounded(m.alpha[e]",
        "total[v] += rounded(m.alpha[0]",
        "merging in float32 is wrong",
    ),
    "bfloat16": ("vector.h", "(u + 0x7fff +", "(u + 0x7ffff +", "in bfloat16 is wrong"),
    "illegal instruction": (
        "experts.h",
        "memset(sums, 0,",
        f"{TRAP} memset(sums, 0,",
        "died in the variant generic: SIGILL (",
    ),
    "at load": (
        "kernels.cpp",
        TABLE,
        f"__attribute__((constructor)) static void at_load() {{ {TRAP} }}\n{TABLE}",
        "died while it was loaded: SIGILL (",
    ),
}


@pytest.fixture
def quickly(monkeypatch, tmp_path):
    """Build for any processor without optimization, which takes a second, with an empty cache."""
    monkeypatch.setattr(build, "CPU_FLAGS", ("-O0", *build.CPU_FLAGS[1:]))
    monkeypatch.setattr(build, "X86_SETS", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@needs_gxx
@pytest.mark.parametrize("bug", PLANTED)
def test_a_library_that_fails_its_self_test_is_not_installed(bug, tmp_path, quickly):
    file, old, new, why = PLANTED[bug]
    out = tmp_path / "library.so"
    out.write_text("the one before")
    with pytest.raises(build.BuildError) as error:
        build.build_cpu(out, csrc=copy_of_sources(tmp_path, file, old, new))
    assert f"{out} is not installed, because on this processor (" in str(error.value)
    assert why in str(error.value)
    assert out.read_text() == "the one before"
    assert not list(tmp_path.glob("cache/moe_runtime/cpu/tested/*"))


@pytest.fixture
def cached(tmp_path, monkeypatch, library):
    """Return the path of a good library in its own cache, where no library has been tested."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = build.library_path("cpu")
    build.own_folder(path.parent)
    shutil.copyfile(library.path, path)
    path.chmod(0o755)
    return path


@pytest.fixture
def children(monkeypatch):
    """Count the self-tests that run."""
    ran = []
    run = selftest.run

    def counted(file):
        ran.append(file)
        return run(file)

    monkeypatch.setattr(selftest, "run", counted)
    return ran


def test_a_processor_is_remembered_and_another_one_tests_again(
    cached, children, tmp_path, monkeypatch
):
    for _ in range(2):
        assert found() is True
        assert len(children) == 1
    other = tmp_path / "cpuinfo"
    other.write_text("vendor_id : GenuineIntel\nmodel name : Another\nflags : sse2\n")
    monkeypatch.setattr(selftest, "CPUINFO", other)
    for _ in range(2):
        assert found() is True
        assert len(children) == 2
    monkeypatch.undo()


def test_other_instruction_sets_are_another_processor(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(selftest, "CPUINFO", path)

    def processor(text: str) -> tuple[str, str]:
        path.write_text(text)
        return selftest.processor()

    name, one = processor("model name : A\nflags : avx2")
    assert processor("model name : A\nflags : avx2\ncpu MHz : 3000.1\nbogomips : 1") == (name, one)
    others = {one}
    for text in ("model name : A\nflags : avx2 avx512f", "model name : B\nflags : avx2", ""):
        others.add(processor(text)[1])
    assert len(others) == 4


def test_marks_that_do_not_count(cached, children, monkeypatch, library):
    assert found() is True
    (mark,) = cached.parents[1].glob("tested/*")
    mark.chmod(0o666)  # another user could have written it
    assert found() is True
    assert len(children) == 2
    # without a writable cache it is tested each time
    wheel = cached.parents[3] / "wheel"
    shutil.copytree(library.path.parent, wheel)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.setattr("moe_runtime.native.library.WHEEL", wheel)
    for count in (3, 4):
        assert found() is True
        assert len(children) == count


BAD = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:200_000]),
    "another library": lambda path: shutil.copyfile(sys.modules["_ctypes"].__file__, path),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_library_is_one_line_and_experts_run_in_pytorch(how, cached, monkeypatch):
    BAD[how](cached)
    found = CppLibrary().find()
    assert found.startswith(f"{cached} is not used, because on this processor (")
    assert "\n" not in found
    assert found.endswith("To rebuild it, run python -m moe_runtime.native.build cpu")
    monkeypatch.setattr(cpp, "_found", None)
    monkeypatch.delenv("MOE_RUNTIME_BACKEND", raising=False)
    report = doctor.report()
    assert report["backends"]["moe_mlp"].startswith("torch")
    assert report["problems"]["cpu library"] == found


TESTED = f"{selftest.TESTING}generic\n{selftest.TESTING}avx512\n"


def test_a_processor_on_which_a_variant_dies(cached, monkeypatch):
    # simulates a library with an instruction that the processor lacks
    died = subprocess.CompletedProcess([], -signal.SIGILL, TESTED, "")
    monkeypatch.setattr(selftest.subprocess, "run", lambda *_, **__: died)
    assert "its self-test died in the variant avx512: SIGILL (Illegal instruction)" in found()
    assert not list(cached.parents[1].glob("tested/*"))


@needs_gxx
def test_a_variant_that_does_not_compile_is_left_out(tmp_path, monkeypatch, quickly):
    monkeypatch.setattr(build, "X86_SETS", {"avx2": ("-mavx2", "-mfma")})
    csrc = copy_of_sources(
        tmp_path,
        "kernels.cpp",
        TABLE,
        f"#if defined(__AVX2__)\n#error no such instruction\n#endif\n{TABLE}",
    )
    made = build.build_cpu(tmp_path / "library.so", csrc=csrc)
    assert made.compiled
    assert list(made.left_out) == ["avx2"]
    assert "no such instruction" in made.left_out["avx2"]
    assert selftest.run(tmp_path / "library.so") is None
    # and it is not compiled again at each build
    assert not build.build_cpu(tmp_path / "library.so", csrc=csrc).compiled
