"""Building csrc/cpu: missing tools are reported, a library is written atomically, and it needs only
libc.
"""

import os
import re
import shutil
import sys

import pytest

from moe_runtime.native import build
from moe_runtime.native.library import cpp, read_header
from tests.support import cpu_build
from tests.support.captured import captured


@pytest.fixture
def library():
    return cpu_build.library()


@pytest.fixture
def small(tmp_path, library):
    """Sources that compile quickly: kernels.cpp with nothing but the tables."""
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "kernels.cpp").write_text(
        "int table_of_MOERT_SET = 0;\n".replace("table_of_MOERT_SET", "MOERT_SET")
    )
    (csrc / "moert_cpu.cpp").write_text(
        '#define API extern "C" __attribute__((visibility("default")))\n'
        "API const char* moert_cpu_build_info() { return MOERT_BUILD_INFO; }\n"
        'API const char* moert_cpu_variants() { return ""; }\n'
        "API int moert_cpu_self_test() { return 1; }\n"
    )
    return csrc


def run(*arguments, **variables):
    return captured(
        [sys.executable, "-m", "moe_runtime.native.build", "cpu", *map(str, arguments)],
        env=os.environ | variables,
    )


def test_the_command_says_where_and_builds_once(tmp_path, small):
    out = tmp_path / "deep" / "lib.so"
    first = run("--csrc", small, "--out", out)
    assert first.returncode == 0, first.stderr
    assert f"{out}: built by " in first.stdout
    when = out.stat().st_mtime_ns
    again = run("--csrc", small, "--out", out)
    assert "up to date, built by" in again.stdout
    assert out.stat().st_mtime_ns == when
    assert run("--csrc", small, "--out", out, "--force").returncode == 0
    assert out.stat().st_mtime_ns > when
    (small / "moert_cpu.cpp").write_text(
        (small / "moert_cpu.cpp").read_text() + "// other sources\n"
    )
    assert ": built by" in run("--csrc", small, "--out", out).stdout
    assert [path.name for path in out.parent.iterdir()] == ["lib.so"]


def test_what_does_not_compile_is_shown_and_leaves_the_old_one(tmp_path, small):
    out = tmp_path / "lib.so"
    out.write_text("old")
    (small / "kernels.cpp").write_text("nonsense")
    done = run("--csrc", small, "--out", out)
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert done.stderr.startswith("error: ")
    assert out.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".build")] == []


def test_no_compiler_is_an_error_that_says_what_to_do(tmp_path):
    done = run("--out", tmp_path / "lib.so", PATH=str(tmp_path), CXX="")
    assert done.returncode == 2
    assert done.stderr.startswith("error: Neither g++ nor clang++ was found. Install g++")
    done = run("--out", tmp_path / "lib.so", CXX="no-such-compiler -O3")
    assert "The compiler of CXX, 'no-such-compiler', was not found" in done.stderr


def test_where_nothing_can_be_written_is_an_error(tmp_path, small):
    (tmp_path / "file").write_text("")
    done = run("--csrc", small, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'file'}")
    assert "cannot be read or written" in done.stderr
    assert "Set XDG_CACHE_HOME or --out" in done.stderr


@pytest.fixture
def old(tmp_path):
    """Create a g++ that fails if one of these words is in its flags or in the source on its
    standard input.
    """

    def make(*words):
        path = tmp_path / "old-g++"
        path.write_text(
            f"#!{sys.executable}\nimport subprocess, sys\ntext = sys.stdin.read() if sys.argv[-1] "
            f"== '-' else ''\nif any(word in text or word in sys.argv for word in {words!r}):\n    "
            f"sys.exit('unrecognized')\nsys.exit(subprocess.run([{shutil.which('g++')!r}, "
            "*sys.argv[1:]], input=text, text=True).returncode)\n"
        )
        path.chmod(0o755)
        return str(path)

    return make


needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@needs_gxx
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the instruction sets are those of x86")
@pytest.mark.parametrize(
    "flags, left",
    [
        (["-mamx-bf16"], ["generic", "avx2", "avx512", "avx512_bf16"]),
        (["-mavx512f"], ["generic", "avx2"]),
    ],
    ids=str,
)
def test_sets_that_the_compiler_does_not_know_are_left_out(
    flags, left, tmp_path, library, old, monkeypatch
):
    # saves seven eighths of the compile time
    monkeypatch.setattr(build, "CPU_FLAGS", ("-O0", *build.CPU_FLAGS[1:]))
    monkeypatch.setenv("CXX", old(*flags))
    build.build_cpu(tmp_path / "lib.so")
    made = cpp.bind(tmp_path / "lib.so")
    assert made.info["sets"] == left
    assert made.variant in left
    assert not made.handle.moert_cpu_limit(b"amx")
    assert made.handle.moert_cpu_limit(b"generic")


@pytest.mark.skipif(
    shutil.which("nm") is None or shutil.which("readelf") is None,
    reason="binutils are not installed",
)
def test_it_exports_its_interface_and_needs_libc_alone(library):
    symbols = captured(["nm", "-D", "--defined-only", library.path]).stdout
    exported = {line.split()[-1] for line in symbols.splitlines()}
    assert exported == set(read_header((build.csrc_dir("cpu") / "moert_cpu.h").read_text()))
    needed = captured(["readelf", "-d", library.path]).stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", needed)) <= {
        "libc.so.6",
        "libm.so.6",
        "ld-linux-x86-64.so.2",
    }


def test_a_library_without_a_function_is_refused(tmp_path, small):
    build.build_cpu(tmp_path / "lib.so", csrc=small)
    with pytest.raises(OSError, match=r"and has no moert_cpu_\w+. To rebuild it"):
        cpp.bind(tmp_path / "lib.so")


def test_another_compiler_or_header_builds_again(tmp_path, small, monkeypatch):
    out = tmp_path / "lib.so"
    assert build.build_cpu(out, csrc=small).compiled
    assert not build.build_cpu(out, csrc=small).compiled
    compiler, version = build.find_compiler()
    with monkeypatch.context() as patch:
        patch.setattr(build, "find_compiler", lambda: (compiler, f"another {version}"))
        assert build.build_cpu(out, csrc=small).compiled
    sources = build.source_hash("cpu", small)
    (small / "added.h").write_text("")
    assert build.source_hash("cpu", small) != sources
