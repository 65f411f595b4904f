"""A library from the cache is loaded only if nobody but this user or root can have written it; a
refused library does not run.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_runtime.io import files
from moe_runtime.native import build, library
from moe_runtime.tools import doctor

COMPILER = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
# runs when the library is loaded
SOURCE = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void run(void) {
    FILE *file = fopen(getenv("PLANTED"), "a");
    fputs(NAME, file);
    fclose(file);
}
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Two libraries, each of which appends its name to the file $PLANTED when it is loaded."""
    if COMPILER is None:
        pytest.skip("needs a C compiler to build the libraries")
    folder = tmp_path_factory.mktemp("planted")
    (folder / "run.c").write_text(SOURCE)
    for name in "ab":
        made = [
            "-shared",
            "-fPIC",
            f'-DNAME="{name}"',
            "-o",
            folder / f"{name}.so",
            folder / "run.c",
        ]
        subprocess.run([COMPILER, *made], check=True)
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch, planted):
    """Plant a library of a kind in a cache below the current folder, and return its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PLANTED", str(tmp_path / "ran"))
    monkeypatch.setattr(library, "WHEEL", tmp_path / "wheel")

    def put(kind: str) -> Path:
        path = build.library_path(kind)
        path.parent.mkdir(parents=True)
        for made in (path.parent, *path.parents[1:4]):
            made.chmod(0o755)
        shutil.copyfile(planted / "a.so", path)
        path.chmod(0o755)
        return path

    return put


def give_away(path: Path, monkeypatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        (monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1))


def move_away(path: Path, monkeypatch) -> None:
    (path.parents[3] / "open").mkdir()
    (path.parents[3] / "open").chmod(0o777)
    path.parent.rename(path.parents[3] / "open" / "lib")
    path.parent.symlink_to(path.parents[3] / "open" / "lib")
    path.parent.chmod(0o775)


REFUSED = {
    "file": (
        lambda path, _: path.chmod(0o777),
        "other users can write to it (mode 777). Run chmod go-w ",
    ),
    "group": (
        lambda path, _: path.chmod(0o775),
        "other users can write to it (mode 775). Run chmod go-w ",
    ),
    "caches": (
        lambda path, _: path.parents[3].chmod(0o777),
        "other users can write to it (mode 777)",
    ),
    "link": (move_away, "other users can write to it (mode 775)"),
    "owner": (give_away, "it belongs to user"),
    "folder's owner": (lambda path, patch: give_away(path.parent, patch), "it belongs to user"),
    "relative cache": (lambda _, patch: patch.setenv("XDG_CACHE_HOME", "cache"), "is not built"),
    "relative home": (
        lambda _, patch: [patch.setenv("XDG_CACHE_HOME", ""), patch.setenv("HOME", ".")],
        "is not built",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_planted_library_does_not_run(tmp_path, monkeypatch, place, kind, how):
    path = place(kind)
    (change, why) = REFUSED[how]
    if how == "relative home":
        (tmp_path / "cache").rename(tmp_path / ".cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    change(path, monkeypatch)
    found = (library.CppLibrary if kind == "cpu" else library.CudaLibrary)()
    assert why in found.find(), found.find()
    assert " is refused: " in found.find() or "is not built" in why, found.find()
    assert not (tmp_path / "ran").exists()


def test_doctor_says_what_was_refused_and_why(tmp_path, monkeypatch, place):
    path = place("cpu")
    path.chmod(0o777)
    tiles = files.cache_home() / "moe_runtime/tiles.json"
    tiles.write_text('{"devices": {}}')
    tiles.chmod(0o666)
    monkeypatch.setattr(library.cpp, "_found", None)
    problems = doctor.report()["problems"]
    assert problems["cpu library"].startswith(
        f"{path} is refused: other users can write to it (mode 777). Run chmod go-w"
    )
    assert problems["launch configs"].startswith(f"{tiles} is refused: ")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert doctor.report()["problems"]["XDG_CACHE_HOME"].startswith(
        "XDG_CACHE_HOME is 'cache', which is ignored because"
    )


def test_a_build_closes_its_folders_and_takes_over_no_other_users(tmp_path, monkeypatch, place):
    before = os.umask(0o002)
    try:
        made = build.own_folder(build.library_path("cpu").parent)
    finally:
        os.umask(before)
    assert [made.parents[n].stat().st_mode & 0o022 for n in range(2)] == [0, 0]
    assert not made.stat().st_mode & 0o022
    give_away(made, monkeypatch)
    with pytest.raises(ValueError, match="is refused: it belongs to user"):
        build.own_folder(made)
