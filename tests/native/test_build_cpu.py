"""Building csrc/cpu: what is missing is said, a library appears whole or not at all, and it needs libc alone."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moe_runtime.native import build
from moe_runtime.native import library as library_module
from moe_runtime.native.build import BuildError
from moe_runtime.native.library import cpp, read_header
from tests.support import cpu_build


@pytest.fixture
def library():
    return cpu_build.library()


@pytest.fixture
def small(tmp_path, library):
    """Sources that compile at once: kernels.cpp of no function but the tables."""
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "kernels.cpp").write_text("int table_of_MOERT_SET = 0;\n".replace("table_of_MOERT_SET", "MOERT_SET"))
    (csrc / "moert_cpu.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) const char* moert_cpu_build_info() { return MOERT_BUILD_INFO; }\n'
    )
    return csrc


def run(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "moe_runtime.native.build", "cpu", *map(str, arguments)], capture_output=True, text=True,
        env=os.environ | variables,
    )  # fmt: skip


def test_the_command_says_where_and_builds_once(tmp_path, small):
    out = tmp_path / "deep" / "lib.so"
    first = run("--csrc", small, "--out", out)
    assert first.returncode == 0 and re.fullmatch(re.escape(str(out)) + r": built by \S.*\n", first.stdout), (
        first.stderr
    )
    when = out.stat().st_mtime_ns
    again = run("--csrc", small, "--out", out)
    assert "up to date, built by" in again.stdout and out.stat().st_mtime_ns == when
    assert run("--csrc", small, "--out", out, "--force").returncode == 0 and out.stat().st_mtime_ns > when
    (small / "moert_cpu.cpp").write_text((small / "moert_cpu.cpp").read_text() + "// other sources\n")
    assert ": built by" in run("--csrc", small, "--out", out).stdout
    assert [path.name for path in out.parent.iterdir()] == ["lib.so"]


def test_it_goes_into_the_cache_by_sources_and_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = build.library_path("cpu")
    assert path.parts[-4:-2] == ("moe_runtime", "cpu") and path.is_relative_to(tmp_path)
    assert path.parent.name == f"{build.source_hash('cpu', build.csrc_dir('cpu'))}-{os.uname().machine}"
    assert path in cpp.places()


def test_old_libraries_of_other_sources_go(tmp_path, small):
    cache = tmp_path / "moe_runtime" / "cpu"
    ages = {"0123456789abcdef-x86_64": 31, "fedcba9876543210-x86_64": 29, "mine": 99}
    for name, days in ages.items():
        (cache / name).mkdir(parents=True)
        (cache / name / build.NAMES["cpu"]).write_text("")
        when = time.time() - days * 24 * 3600
        os.utime(cache / name, (when, when))
    assert run("--csrc", small, "--out", tmp_path / "lib.so", XDG_CACHE_HOME=str(tmp_path)).returncode == 0
    assert len(list(cache.iterdir())) == 3
    assert run("--csrc", small, XDG_CACHE_HOME=str(tmp_path)).returncode == 0
    here = f"{build.source_hash('cpu', small)}-{os.uname().machine}"
    assert {path.name for path in cache.iterdir()} == {here, "fedcba9876543210-x86_64", "mine"}
    os.utime(cache / here, (0, 0))
    assert "up to date" in run("--csrc", small, XDG_CACHE_HOME=str(tmp_path)).stdout
    assert time.time() - (cache / here).stat().st_mtime < 3600  # asked for


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["demo", "test", "bench"])
def test_make_builds_after_the_sources_change(target, tmp_path):
    makefile = build.csrc_dir("cpu").parents[1] / "Makefile"
    if not makefile.is_file():
        pytest.skip("not a checkout")
    sources = ["pyproject.toml", "setup.py", "constraints.txt", "csrc/cpu/vector.h", "moe_runtime/native/build.py"]
    for name in sources:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1000, 1000))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "deepspeed").write_text("")
    (tmp_path / ".venv" / ".installed").write_text("")
    for name in ("python", "moe-runtime"):
        path = tmp_path / ".venv" / "bin" / name
        path.write_text('#!/bin/sh\necho "$@" >> said; case "$*" in *native.build*) test ! -e no-compiler;; esac\n')
        path.chmod(0o755)

    def builds():
        (tmp_path / "said").write_text("")
        done = subprocess.run(
            ["make", "-f", makefile, target], cwd=tmp_path, capture_output=True, text=True,
            env={"PATH": os.environ["PATH"], "PYTHON": sys.executable},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / "said").read_text().splitlines()
        assert lines.pop() != "-m moe_runtime.native.build cpu"  # the target's own command, last
        return lines == ["-m moe_runtime.native.build cpu"], "the experts run in PyTorch" in done.stderr

    (tmp_path / "no-compiler").write_text("")
    assert [builds(), builds()] == [(True, True)] * 2
    (tmp_path / "no-compiler").unlink()
    assert [builds(), builds()] == [(True, False), (False, False)]
    for name in sources[-2:]:
        later = time.time() + 5
        os.utime(tmp_path / name, (later, later))
        assert builds() == (True, False)
        os.utime(tmp_path / name, (1000, 1000))
        assert builds() == (False, False)


def test_what_does_not_compile_is_shown_and_leaves_the_old_one(tmp_path, small):
    out = tmp_path / "lib.so"
    out.write_text("old")
    (small / "kernels.cpp").write_text("nonsense")
    done = run("--csrc", small, "--out", out)
    assert done.returncode == 2 and "nonsense" in done.stderr and done.stderr.startswith("error: ")
    assert out.read_text() == "old" and [p.name for p in tmp_path.iterdir() if p.name.startswith(".build")] == []


def test_no_compiler_is_an_error_that_says_what_to_do(tmp_path):
    done = run("--out", tmp_path / "lib.so", PATH=str(tmp_path), CXX="")
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr == "error: the compilers g++ and clang++ are missing; install g++ or clang++, or set CXX to one\n"
    )
    done = run("--out", tmp_path / "lib.so", CXX="no-such-compiler -O3")
    assert (
        done.stderr == "error: CXX is 'no-such-compiler', which is missing; install g++ or clang++, or set CXX to one\n"
    )


def no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.fixture
def searched():
    """The search for the library starts anew, before and after."""
    cpp.use(None)
    yield
    cpp.use(None)


def test_without_a_home_there_is_no_library(tmp_path, monkeypatch, searched):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(library_module, "__file__", str(tmp_path / "library.py"))  # nor one of a wheel
    assert (
        cpp.why_not(torch.device("cpu"))
        == "the CPU library is not built; python -m moe_runtime.native.build cpu builds it"
    )
    assert cpp.describe().startswith("none: the CPU library is not built")


def test_a_home_that_may_not_be_read_has_no_library(monkeypatch, searched):
    real = Path.is_file

    def is_file(path):
        if path.name == build.NAMES["cpu"]:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert "Permission denied" in cpp.why_not(torch.device("cpu"))
    assert cpp.describe().startswith("none: ") and str(build.library_path("cpu")) in cpp.describe()


def test_the_command_without_a_home(monkeypatch, capsys):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(SystemExit) as left:
        build.main(["cpu", "--help"])
    assert left.value.code == 0 and "XDG_CACHE_HOME" in capsys.readouterr().out
    monkeypatch.setenv("HOME", "")
    assert build.main(["cpu"]) == 2
    says = "error: HOME is '', and this user has no home folder; set XDG_CACHE_HOME to a writable folder\n"
    assert capsys.readouterr().err == says


def test_where_nothing_can_be_written_is_an_error(tmp_path, small):
    (tmp_path / "file").write_text("")
    done = run("--csrc", small, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {tmp_path / 'file'}/moe_runtime/cpu/") and done.stderr.count("\n") == 1
    assert "cannot be read or written (Not a directory); set XDG_CACHE_HOME or --out" in done.stderr
    done = run("--csrc", small, "--out", tmp_path)  # a folder is there
    assert done.returncode == 2 and done.stderr.startswith(f"error: {tmp_path} cannot be read or written (")


@pytest.fixture
def old(tmp_path):
    """Make a g++ that refuses what names one of these words, in its flags or in the source on its standard input."""

    def make(*words):
        path = tmp_path / "old-g++"
        path.write_text(
            f"#!{sys.executable}\nimport subprocess, sys\n"
            "text = sys.stdin.read() if sys.argv[-1] == '-' else ''\n"
            f"if any(word in text or word in sys.argv for word in {words!r}):\n    sys.exit('unrecognized')\n"
            f"sys.exit(subprocess.run([{shutil.which('g++')!r}, *sys.argv[1:]], input=text, text=True).returncode)\n"
        )
        path.chmod(0o755)
        return str(path)

    return make


needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@needs_gxx
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the sets are x86's")
@pytest.mark.parametrize(
    "flags, left", [(["-mavx512bf16"], ["generic", "avx2", "avx512"]), (["-mavx512f"], ["generic", "avx2"])], ids=str
)
def test_sets_that_the_compiler_does_not_know_are_left_out(flags, left, tmp_path, library, old, monkeypatch):
    monkeypatch.setattr(build, "CPU_FLAGS", ("-O0", *build.CPU_FLAGS[1:]))  # an eighth of the compiler's time
    monkeypatch.setenv("CXX", old(*flags))
    build.build_cpu(tmp_path / "lib.so")
    made = cpp.bind(tmp_path / "lib.so")
    assert made.info["sets"] == left and made.variant in left
    assert not made.handle.moert_cpu_limit(b"avx512_bf16") and made.handle.moert_cpu_limit(b"generic")


@needs_gxx
def test_a_compiler_that_is_too_old_is_an_error(tmp_path, old):
    done = run("--out", tmp_path / "lib.so", CXX=old("-std=c++17"))
    assert done.returncode == 2 and done.stderr.startswith("error: the compiler is ") and done.stderr.count("\n") == 1
    assert "; expected g++ 9 or newer, or a clang++ as new; install g++ or clang++, or set CXX to one" in done.stderr
    assert run("--out", tmp_path / "lib.so", CXX=old("__builtin_convertvector")).stderr == done.stderr


def test_the_sources_want_nothing_of_g_plus_plus_12():
    text = "".join(path.read_text() for path in build.csrc_dir("cpu").glob("*.[ch]*"))
    assert set(re.findall(r"__builtin_\w+", text.replace("has no __builtin_shufflevector", ""))) == {
        "__builtin_convertvector", "__builtin_cpu_supports", "__builtin_prefetch",
    }  # fmt: skip


def test_no_sources_is_an_error(tmp_path):
    assert "has no *.cpp file" in run("--csrc", tmp_path / "none").stderr
    with pytest.raises(BuildError, match=r"has no \*\.cpp file; expected the sources"):
        build.check_cpu(tmp_path)


def test_the_library_says_what_it_is_made_of(library):
    info = json.loads(library.handle.moert_cpu_build_info())
    assert info["sources"] == build.source_hash("cpu", build.csrc_dir("cpu")) and info["compiler"] == build.built_by(
        library.path
    )
    x86 = list(build.X86_SETS) if os.uname().machine == "x86_64" else []
    assert info["sets"] == ["generic", *x86] and library.variant in info["sets"]


@pytest.mark.skipif(shutil.which("nm") is None or shutil.which("readelf") is None, reason="binutils are not installed")
def test_it_exports_its_interface_and_needs_libc_alone(library):
    symbols = subprocess.run(["nm", "-D", "--defined-only", library.path], capture_output=True, text=True).stdout
    exported = {line.split()[-1] for line in symbols.splitlines()}
    assert exported == set(read_header((build.csrc_dir("cpu") / "moert_cpu.h").read_text()))
    needed = subprocess.run(["readelf", "-d", library.path], capture_output=True, text=True).stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", needed)) <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}


def test_a_library_of_other_sources_is_refused(tmp_path, library):
    csrc = tmp_path / "csrc"
    shutil.copytree(build.csrc_dir("cpu"), csrc)
    (csrc / "vector.h").write_text((csrc / "vector.h").read_text() + "// changed\n")
    with pytest.raises(
        OSError, match="was built from other sources than .*; rebuild it: python -m moe_runtime.native.build cpu"
    ):
        cpp.bind(library.path, csrc)


def test_a_library_without_a_function_is_refused(tmp_path, small):
    build.build_cpu(tmp_path / "lib.so", csrc=small)
    with pytest.raises(OSError, match=r"and has no moert_cpu_\w+; rebuild it"):
        cpp.bind(tmp_path / "lib.so")


def test_setup_refuses_what_it_does_not_know(tmp_path):
    root = build.csrc_dir("cpu").parents[1]
    if not (root / "setup.py").is_file():
        pytest.skip("not a checkout")
    for asked, variables, says in (
        ("yes", {}, "expected 0 or 1"),
        ("1", {"CXX": "no-such-compiler"}, "'no-such-compiler'"),
    ):
        done = subprocess.run(
            [sys.executable, root / "setup.py", "--version"], capture_output=True, text=True, cwd=root,
            env=os.environ | {"MOE_RUNTIME_BUILD_CPU": asked} | variables,
        )  # fmt: skip
        assert done.returncode and f"MOE_RUNTIME_BUILD_CPU is {asked!r}" in done.stderr and says in done.stderr
