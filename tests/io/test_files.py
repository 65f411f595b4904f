"""moe_runtime.io.files: folders and files that are written atomically; full disks, leftovers, two
writers; JSON.
"""

import errno
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moe_runtime.io import checkpoint, files
from moe_runtime.io.checkpoint import INDEX, SINGLE, Checkpoint, CheckpointWriter
from moe_runtime.io.files import (
    atomic_folder,
    atomic_write_json,
    atomic_write_text,
    check_out_dir,
    contents_of,
    read_json,
    sole_training,
)
from tests.support.checkpoints import (
    NOTHING_STAYS_OPEN,
    assert_same,
    siblings,
    snapshot,
    ten_tensors,
    write,
)

pytestmark = NOTHING_STAYS_OPEN


def test_an_exception_leaves_nothing(tmp_path):
    out = tmp_path / "a" / "out"
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(out, 800) as writer:
        for key, tensor in list(ten_tensors().items())[:3]:
            writer.add(key, tensor)
        assert list(out.parent.iterdir())
        raise KeyboardInterrupt
    assert not list(out.parent.iterdir())
    with pytest.raises(OSError), CheckpointWriter(out) as writer:
        out.mkdir()
        (out / "other").write_text("theirs")

    assert (out / "other").read_text() == "theirs"
    assert siblings(out) == []


def test_existing_folders_are_refused_before_anything_is_touched(tmp_path, monkeypatch):
    out = write(tmp_path / "out", ten_tensors())
    before = snapshot(tmp_path)
    message = f"Output folder {out} already exists. Choose another or pass overwrite=True"
    for start in (check_out_dir, CheckpointWriter, lambda path: atomic_folder(path).__enter__()):
        with pytest.raises(ValueError, match=re.escape(message)):
            start(out)
    monkeypatch.chdir(out)
    for path, match in ((out / SINGLE, "is a file"), (".", "current"), ("/proc", "mount point")):
        with pytest.raises(ValueError, match=match):
            CheckpointWriter(path, overwrite=True)

    assert snapshot(tmp_path) == before
    (tmp_path / "empty").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("empty")
    write(tmp_path / "link", ten_tensors())
    assert (tmp_path / "link").is_symlink()
    assert list(snapshot(tmp_path / "empty")) == [SINGLE]
    assert mode(tmp_path / "empty") == 0o700


def test_overwrite_replaces_the_whole_folder_and_may_read_from_it(tmp_path):
    tensors = ten_tensors()
    out = write(tmp_path / "out", tensors, 800)
    (out / "sub").mkdir()
    (out / "sub" / "old.txt").write_text("old")
    before = snapshot(out)
    with Checkpoint(out) as source, CheckpointWriter(out, 2000, overwrite=True) as writer:
        for key in source:
            writer.add(key, source.get(key))
            assert snapshot(out) == before

    assert siblings(out) == []
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(snapshot(out)) == [*shards, INDEX]
    with Checkpoint(out) as copy:
        for key, tensor in tensors.items():
            assert_same(copy.get(key), tensor)


@pytest.mark.parametrize("failing", [1, 2])
def test_the_old_folder_comes_back_when_a_rename_fails(tmp_path, monkeypatch, failing):
    out = write(tmp_path / "out", ten_tensors())
    before = snapshot(out)
    calls = []
    rename = os.rename

    def fail(source, target):
        if str(out) in (str(source), str(target)):
            calls.append(target)
            if len(calls) == failing:
                raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)

    with pytest.raises(PermissionError):
        write(out, {"new": torch.zeros(3)}, overwrite=True)

    assert len(calls) == (1 if failing == 1 else 3)
    assert snapshot(out) == before
    assert siblings(out) == []


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not permitted")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_full_disk(small_disk):
    out = write(small_disk / "out", {"old": torch.zeros(1000)})
    before = snapshot(small_disk)
    tensors = {f"t{i}": torch.zeros(50_000) for i in range(10)}
    with pytest.raises(OSError, match="No space left on device") as error:
        write(out, tensors, 300_000, overwrite=True)

    assert error.value.errno == errno.ENOSPC
    assert re.search(r"model-0000\d.safetensors", error.value.filename)
    assert snapshot(small_disk) == before
    assert os.listdir(small_disk) == ["out"]
    # free space is checked first
    with pytest.raises(ValueError, match=r"needs 2000000 bytes, but the disk has \d+ free"):
        CheckpointWriter(small_disk / "deep" / "out", expected_bytes=2_000_000)
    assert snapshot(small_disk) == before


def test_sync_happens_before_the_rename(tmp_path, monkeypatch):
    write(tmp_path / "out", ten_tensors())
    order = []
    fsync = os.fsync
    move = files._move_in

    def remember_fsync(handle):
        order.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def remember_move(*args):
        order.append("move")
        move(*args)

    monkeypatch.setattr(os, "fsync", remember_fsync)
    monkeypatch.setattr(files, "_move_in", remember_move)
    write(tmp_path / "out", ten_tensors(), 2000, overwrite=True)
    at = order.index("move")
    (folder,) = {path for path in order[:at] if Path(path).name.startswith(".out.tmp-")}
    written = {f"{folder}/{name}" for name in snapshot(tmp_path / "out")}

    assert set(order[:at]) == {*written, folder}
    assert order[at + 1 :] == [str(tmp_path)]
    order.clear()
    atomic_write_text(tmp_path / "a.txt", "new")
    file, parent = order
    assert Path(file).parent.name.startswith(".a.txt.tmp-")
    assert parent == str(tmp_path)


def test_leftovers_are_removed_only_if_their_writer_has_died(tmp_path, monkeypatch):
    out = tmp_path / "out"
    others = [".out.tmp-abc", ".out.tmp-1", ".outer.tmp-1-2", "out.tmp-1-2", "x.out.tmp-1-2"]
    for name in [".out.tmp-1-2", f".out.tmp-{os.getpid()}-99999", *others]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001.safetensors").write_text("half")
    (tmp_path / ".out.tmp-3-4").write_text("a file, not ours")
    others = sorted([*others, ".out.tmp-3-4"])
    write(out, ten_tensors())

    assert siblings(out) == others
    (tmp_path / ".out.old-1-2").mkdir()
    write(out, ten_tensors(), overwrite=True)
    assert siblings(out) == others
    left = tmp_path / ".out.tmp-1-2"
    left.mkdir()
    with files.locked(left), pytest.raises(ValueError, match="another process is writing it"):
        write(out, ten_tensors(), overwrite=True)
    os_open = os.open

    def refuse(path, *args, **options):
        if Path(path) == left:
            raise PermissionError(errno.EACCES, "Permission denied")
        return os_open(path, *args, **options)

    with monkeypatch.context() as patch:  # another user's leftover does not stop the writer
        patch.setattr(os, "open", refuse)
        write(out, ten_tensors(), overwrite=True)
    assert siblings(out) == sorted([*others, left.name])
    write(out, ten_tensors(), overwrite=True)
    assert siblings(out) == others


def test_threads_write_one_path(tmp_path):
    def work(number):
        for _ in range(150):
            atomic_write_text(tmp_path / "a", f"{number}" * 100)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert len(set((tmp_path / "a").read_text())) == 1
    assert os.listdir(tmp_path) == ["a"]


def test_a_hidden_folder_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    locked = files.locked
    swept = []

    def sweep_first(path, wait=True):
        if not swept:
            swept.append(path)
            path.rmdir()
        return locked(path, wait)

    monkeypatch.setattr(files, "locked", sweep_first)
    atomic_write_text(tmp_path / "a", "text")

    assert len(swept) == 1
    assert (tmp_path / "a").read_text() == "text"
    assert os.listdir(tmp_path) == ["a"]


def test_no_writer_restores_a_folder_that_another_one_is_replacing(tmp_path, monkeypatch):
    out = write(tmp_path / "out", ten_tensors())
    rename = os.rename
    are_busy = []

    def rename_and_sweep(source, target):
        rename(source, target)
        if source == out:
            are_busy.append(files._sweep(out, out))

    monkeypatch.setattr(os, "rename", rename_and_sweep)
    write(out, {"new": torch.zeros(3)}, overwrite=True)

    assert are_busy == [True]
    assert Checkpoint(out).keys() == ["new"]
    assert siblings(out) == []


def test_an_old_folder_set_aside_by_a_killed_writer_comes_back(tmp_path):
    out = write(tmp_path / "out", ten_tensors())
    before = snapshot(out)
    out.rename(tmp_path / ".out.old-1-2")
    with pytest.raises(ValueError, match="already exists"):
        write(out, {"new": torch.zeros(1)})
    assert snapshot(out) == before


def test_read_json(tmp_path):
    file = tmp_path / "a.json"
    for text, message in {
        b'{"a": 1,}': r"a.json is not valid JSON \(.*line 1 column \d+",
        b"[1]": "a.json must be a JSON object, but got a list",
        b'{"a": "\xff"}': r"a.json is not valid JSON \(.*position 7",
    }.items():
        file.write_bytes(text)
        with pytest.raises(ValueError, match=message):
            read_json(file)
    with pytest.raises(ValueError, match=r"Cannot read the JSON file .*nope.json \(No such file"):
        read_json(tmp_path / "nope.json")
    file.write_text('{"ü": [1, 2.5, null]}', encoding="utf-8")

    assert read_json(str(file)) == {"ü": [1, 2.5, None]}


def test_atomic_text_and_json(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    atomic_write_json(file, {"ü": [1, None]})
    assert read_json(file) == {"ü": [1, None]}
    (tmp_path / "plain").touch()

    assert mode(file) == mode(tmp_path / "plain")
    with pytest.raises(ValueError):
        atomic_write_json(file, {"a": float("nan")})
    (tmp_path / "link").symlink_to("a.json")
    os.link(file, tmp_path / "old")
    atomic_write_text(tmp_path / "link", "grüße\n")
    assert (tmp_path / "link").is_symlink()
    assert file.read_bytes() == "grüße\n".encode()
    # replaced by another file, not overwritten
    assert read_json(tmp_path / "old") == {"ü": [1, None]}

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as error:
        atomic_write_text(file, "new")
    assert error.value.filename == str(file)
    assert file.read_bytes() == "grüße\n".encode()
    assert sorted(os.listdir(tmp_path)) == ["a.json", "link", "old", "plain"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_model(path: Path) -> None:
    with files.atomic_model(path.parent) as beside:
        checkpoint.write_tensors(beside / path.name, ten_tensors())


# ways to replace a file, one of them together with its folder
WRITERS = {
    "text": lambda path: atomic_write_text(path, "new"),
    "model": write_model,
    "folder": lambda path: write(path.parent, ten_tensors(), overwrite=True),
}


@pytest.mark.parametrize("before, umask", [(0o600, 0o022), (0o666, 0o077)])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_replaced_leaves_its_mode(tmp_path, monkeypatch, writer, before, umask):
    path = tmp_path / "out" / SINGLE
    path.parent.mkdir()
    path.write_text("old")
    path.chmod(before)
    path.parent.chmod(before | (before & 0o444) >> 2 | 0o100)
    of_folder = mode(path.parent)
    hidden = []
    sync = files._sync

    def remember(place):
        hidden.append(mode(place.parent))
        sync(place)

    monkeypatch.setattr(files, "_sync", remember)
    old = os.umask(umask)
    try:
        WRITERS[writer](path)
    finally:
        os.umask(old)

    assert path.read_bytes() != b"old"
    assert mode(path) == before
    assert mode(path.parent) == of_folder
    # other users could not read it in the hidden folder either
    if before == 0o600 and writer != "model":
        assert not hidden[0] & 0o011


TRAINS = """
import sys, time
from moe_runtime.io.files import sole_training
with sole_training(sys.argv[1]):
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_one_training_at_a_time(tmp_path, ends):
    folder = tmp_path / "a" / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINS, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "holds\n"
    message = f"Another training is writing to {re.escape(str(folder))}. Wait"
    with pytest.raises(ValueError, match=message), sole_training(folder):
        pass
    atomic_write_text(folder / "log", "other writers need not wait")
    (folder / "log").unlink()

    assert contents_of(folder) == []
    if ends == "killed":
        process.kill()
    process.communicate()
    with sole_training(folder):
        assert contents_of(folder) == []
        assert len(os.listdir(folder)) == 1
        (folder / "model").touch()
    assert os.listdir(folder) == ["model"]


def test_only_a_regular_file_that_is_not_read_is_replaced(tmp_path):
    folder = tmp_path / "model"
    data = tmp_path / "rows.jsonl"
    pipe = tmp_path / "pipe"
    folder.mkdir()
    (folder / "config.json").touch()
    data.touch()
    (tmp_path / "link").symlink_to(data)
    os.mkfifo(pipe)
    for out, reads, match in (
        ("/dev/null", (), "a device, a pipe or a socket"),
        (pipe, (), "a device, a pipe or a socket"),
        (tmp_path / "link", [None, data], "is read"),
        (folder / "config.json", ["olmoe", folder], "is a file in .*model, which is read"),
    ):
        with pytest.raises(ValueError, match=match):
            files.check_out_file(out, overwrite=True, reads=reads)
    files.check_out_file(folder / "new.json", reads=[folder])
    (tmp_path / "other").symlink_to(folder)
    with pytest.raises(ValueError, match="is or contains .*config.json, which is read"):
        check_out_dir(tmp_path / "other", overwrite=True, reads=[folder / "config.json"])
    with pytest.raises(ValueError, match="is or contains .*config.json, which is read"):
        check_out_dir(folder, overwrite=True, reads=[tmp_path / "other" / "config.json"])
    with pytest.raises(ValueError, match="device"):
        atomic_write_text(pipe, "text")

    assert stat.S_ISFIFO(os.stat(pipe).st_mode)
