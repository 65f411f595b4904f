"""moe_runtime.io.checkpoint against safetensors' own reader and writer, and in bounded memory."""

import json
import os
import re
import shutil
import stat
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_runtime.io.checkpoint import (
    DTYPES,
    INDEX,
    SINGLE,
    Checkpoint,
    CheckpointWriter,
    TensorSpec,
    parse_size,
)
from tests.support import limited
from tests.support.checkpoints import (
    assert_same,
    random_tensor,
    raw,
    raw_file,
    siblings,
    snapshot,
    ten_tensors,
    write,
)

# a shard left open is an error
pytestmark = [
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


# reading and writing
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_round_trip(tmp_path, shards):
    tensors = ten_tensors()
    out = write(tmp_path / "out", tensors, 4000 // shards)
    names = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    expected = [SINGLE] if shards == 1 else [*names, INDEX]

    assert sorted(file.name for file in out.iterdir()) == sorted(expected)
    assert siblings(out) == []
    loaded = {}
    for name in expected[:shards]:
        part = load_file(out / name)
        assert len(part) == 10 // shards
        with safe_open(out / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        if shards > 1:
            index = json.loads((out / INDEX).read_text())
            assert index["metadata"] == {"total_size": 4000}
            assert {key for key, shard in index["weight_map"].items() if shard == name} == set(part)
        loaded |= part
    with Checkpoint(out) as ours:
        assert ours.metadata == {"format": "pt"}
        assert ours.keys() == list(tensors)
        assert ours.specs() == {key: TensorSpec((4, 25), torch.float32) for key in tensors}
        for key, tensor in tensors.items():
            assert_same(loaded[key], tensor)
            assert_same(ours.get(key), tensor)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_is_read_as_safetensors_writes_and_written_as_it_reads(tmp_path, dtype):
    tensors = {
        "matrix": random_tensor(dtype, 3, 5),
        "scalar": random_tensor(dtype),
        "empty": random_tensor(dtype, 0, 4),
        "void": random_tensor(dtype, 4, 0),
        "transposed": random_tensor(dtype, 5, 3).t(),
    }
    (tmp_path / "theirs").mkdir()
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "theirs" / SINGLE
    )
    write(tmp_path / "ours", tensors)
    with (
        Checkpoint(tmp_path / "theirs") as theirs,
        Checkpoint(tmp_path / "ours") as ours,
        safe_open(tmp_path / "ours" / SINGLE, "pt") as file,
    ):
        assert theirs.specs() == ours.specs()
        for key, tensor in tensors.items():
            assert ours.specs()[key] == TensorSpec(tuple(tensor.shape), dtype)
            assert ours.specs()[key].nbytes == len(raw(tensor))
            for copy in (theirs.get(key), ours.get(key), file.get_tensor(key)):
                assert_same(copy, tensor)
        for row in range(3):
            assert_same(ours.get_rows("matrix", row), tensors["matrix"][row])


def test_get_rows_equals_indexing(tmp_path):
    tensor = random_tensor(torch.bfloat16, 6, 3, 5)
    write(
        tmp_path / "out",
        {"before": torch.ones(7), "w": tensor, "vector": torch.arange(4), "after": torch.ones(3)},
    )
    with Checkpoint(tmp_path / "out") as source:
        for index in (
            0,
            5,
            -1,
            slice(None),
            slice(2, 4),
            slice(-2, None),
            slice(3, 3),
            slice(4, 99),
        ):
            assert_same(source.get_rows("w", index), tensor[index])
        assert_same(source.get_rows("vector", torch.tensor(2)), torch.tensor(2))


def bytes_read() -> int:
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_get_rows_reads_those_bytes_only(tmp_path):
    row = 256 * 1024 * 4
    write(tmp_path / "out", {"w": torch.arange(16.0)[:, None].expand(16, row // 4)})
    with Checkpoint(tmp_path / "out") as source:
        source.get_rows("w", 0)
        before = bytes_read()
        assert source.get_rows("w", 9)[-1] == 9
        one_row = bytes_read() - before
        source.get("w")
        all_rows = bytes_read() - before - one_row

    assert row <= one_row < 1.5 * row
    assert all_rows >= 16 * row


def test_a_file_larger_than_the_memory_is_read_row_by_row(tmp_path):
    row = 2**20
    rows = 3 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // row
    size = rows * row
    raw_file(
        tmp_path / SINGLE,
        {"w": {"dtype": "F32", "shape": [rows, row // 4], "data_offsets": [0, size]}},
    )
    with open(tmp_path / SINGLE, "r+b") as file:
        start = file.seek(0, os.SEEK_END)
        try:
            file.truncate(start + size)
        except OSError:
            pytest.skip("this filesystem has no sparse files of that size")
        file.seek(start + size - row)
        file.write(b"\x01" * row)
    with Checkpoint(tmp_path) as source:
        assert source.specs()["w"].nbytes == size
        assert raw(source.get_rows("w", -1)) == b"\x01" * row
        assert raw(source.get_rows("w", rows // 2)) == bytes(row)


def test_no_shard_is_left_open(tmp_path):
    out = write(tmp_path / "out", ten_tensors(), 800)
    with Checkpoint(out) as source:
        for key in source:
            source.get(key)
            for handle in Path("/proc/self/fd").iterdir():
                assert not os.path.realpath(handle).startswith(str(out))


def test_a_shard_that_changes_under_the_reader_is_an_error(tmp_path):
    out = write(tmp_path / "out", ten_tensors(), 800)
    with Checkpoint(out) as source:
        source.get("layers.9.weight")
        write(out, {key: tensor[:2] for key, tensor in ten_tensors().items()}, 400, overwrite=True)
        with pytest.raises(
            ValueError,
            match=r"model-00001-of-00005.safetensors has changed since its header was read",
        ):
            source.get("layers.0.weight")


def test_symlinked_files_are_followed(tmp_path):
    """A snapshot of the Hugging Face cache is a folder of links to blobs."""
    tensors = ten_tensors()
    out = write(tmp_path / "out", tensors, 800)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs").mkdir()

    for i, file in enumerate(sorted(out.iterdir())):
        file.rename(tmp_path / "blobs" / str(i))
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{i}")
    with Checkpoint(tmp_path / "snapshot") as source:
        for key, tensor in tensors.items():
            assert_same(source.get(key), tensor)


# the writer
def test_views_and_reused_memory_are_stored_as_they_looked(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    complex_ = torch.complex(base, base + 1)
    views = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.arange(3.0)[:, None].expand(3, 50),
        "shared": base,
        "shared part": base[1:3],
        "same again": base,
        "parameter": torch.nn.Parameter(base + 5),
        "conj": complex_.conj(),
        "imaginary of conj": complex_.conj().imag,
    }
    want = {key: view.detach().clone() for key, view in views.items()}

    for max_shard_size in (10**6, 100, 1):
        with CheckpointWriter(tmp_path / "out", max_shard_size, overwrite=True) as writer:
            for key, view in views.items():
                writer.add(key, view)
            work = torch.full((3,), 1.0)
            writer.add("first", work)
            work.fill_(2.0)
            writer.add("second", work)
            work.fill_(3.0)
        loaded = {}
        for file in (tmp_path / "out").glob("*.safetensors"):
            loaded |= load_file(file)
        assert set(loaded) == {*want, "first", "second"}
        for key, tensor in want.items():
            assert torch.equal(loaded[key], tensor), key
        assert loaded["first"].tolist() == [1.0] * 3
        assert loaded["second"].tolist() == [2.0] * 3


def test_a_tensor_above_the_limit_has_a_shard_of_its_own(tmp_path):
    sizes = [10, 60, 250, 30, 30, 30, 100, 5]
    write(
        tmp_path / "out",
        {f"t{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate(sizes)},
        100,
    )
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    shards = []

    for name in sorted(set(index["weight_map"].values())):
        shards.append(sorted(load_file(tmp_path / "out" / name)))

    assert shards == [["t0", "t1"], ["t2"], ["t3", "t4", "t5"], ["t6"], ["t7"]]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_files_have_the_mode_that_the_umask_gives(tmp_path):
    """save_file leaves 0600, which nobody else can read."""
    for umask, mode in ((0o022, 0o644), (0o007, 0o660)):
        old = os.umask(umask)
        try:
            out = write(tmp_path / oct(umask), ten_tensors(), 800)
        finally:
            os.umask(old)
        assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {mode}


@pytest.mark.parametrize(
    "tensor, message",
    [
        (torch.zeros(2).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "on meta"),
        (torch.zeros(2, dtype=torch.complex128), "torch.complex128"),
        ([1.0], "a list"),
        (torch.zeros(2).as_subclass(type("Sub", (torch.Tensor,), {})), "a Sub"),
    ],
)
def test_add_refuses_what_cannot_be_stored(tmp_path, tensor, message):
    with pytest.raises(
        ValueError, match=rf"Tensor 'bad' must be a plain dense tensor .*but got .*{message}"
    ):
        write(tmp_path / "out", {"good": torch.zeros(2), "bad": tensor})
    assert siblings(tmp_path / "out") == []


def test_keys_are_used_once_and_other_files_are_copied(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with CheckpointWriter(tmp_path / "out", 4) as writer:
        writer.add("w", torch.zeros(1))
        for key in ("w", "", "__metadata__", 3):
            with pytest.raises(ValueError, match=f"Tensor {key!r} must be .*under a new name"):
                writer.add(key, torch.zeros(2))
        writer.copy_file(tmp_path / "config.json")
        writer.write_text("notes.txt", "grüße")

    assert sorted(snapshot(tmp_path / "out")) == ["config.json", SINGLE, "notes.txt"]
    assert (tmp_path / "out" / "notes.txt").read_bytes() == "grüße".encode()


# bounded memory

COPY = """
import sys
import torch
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter
from tests.support.limited import limit_data, memory

MB = 10**6
source, out = sys.argv[1:]
torch.set_num_threads(1)
open("/proc/self/clear_refs", "w").write("5")  # forget the peak of the imports
before = memory("VmRSS")
limit_data(80 * MB)  # 50 of the shard, 10 of the tensor, 20 of slack
with Checkpoint(source) as reader, CheckpointWriter(out, 50 * MB) as writer:
    for key in reader:
        writer.add(key, reader.get(key))
    # ru_maxrss would count what the parent had before exec
    print("growth", memory("VmHWM") - before)
    # the limit bites: who holds more than one shard fails under it
    try:
        hold = [reader.get(key) for key in reader.keys()[:9]]
    except OSError:
        print("refused")
"""


@pytest.mark.slow
def test_a_folder_larger_than_the_memory_limit_is_copied(tmp_path):
    """600 MB in 12 shards, with 80 MB allowed: enforced by RLIMIT_DATA, and measured as the peak
    resident set.
    """
    source = tmp_path / "source"
    out = tmp_path / "out"
    size = 10**7
    weight_map = {}
    source.mkdir()

    for shard in range(12):
        keys = [f"w{shard * 5 + i:02d}" for i in range(5)]
        header = {
            key: {
                "dtype": "F32",
                "shape": [5, 500_000],
                "data_offsets": [i * size, i * size + size],
            }
            for i, key in enumerate(keys)
        }
        file = source / f"part-{shard:02d}.safetensors"
        raw_file(file, header)
        start = file.stat().st_size
        with open(file, "r+b") as stream:
            for i, key in enumerate(keys):
                stream.seek(start + i * size + size - 4)
                stream.write(struct.pack("<f", 1 + shard * 5 + i))
                weight_map[key] = file.name
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    done = limited.run(COPY, source, out)
    assert done.returncode == 0, done.stderr
    growth, *refused = done.stdout.splitlines()
    assert int(growth.split()[1]) < 80 * 10**6
    assert refused == ["refused"]
    with Checkpoint(out) as copy:
        assert len(list(out.glob("*.safetensors"))) == 12
        assert copy.keys() == list(weight_map)
        for i, key in enumerate(copy):
            assert copy.get_rows(key, 4)[-1] == 1 + i
    shutil.rmtree(tmp_path)


# sizes
@pytest.mark.parametrize(
    "size, value",
    [
        (1, 1),
        (2 * 2**30, 2**31),
        ("123", 123),
        ("5B", 5),
        ("2GB", 2 * 10**9),
        ("500MB", 5 * 10**8),
        ("500 mb", 5 * 10**8),
        ("1.5GiB", 3 * 2**29),
        ("4KIB", 4096),
        ("0.1KB", 100),
        ("2TB", 2 * 10**12),
        (2**63 + 1, 2**63 + 1),
    ],
)
def test_parse_size(size, value):
    assert parse_size(size) == value


@pytest.mark.parametrize(
    "size",
    [
        0,
        -1,
        "",
        "GB",
        "2XB",
        "2G",
        "5IB",
        "-2GB",
        "1e9",
        "0GB",
        "0.1B",
        "2GB ",
        None,
        True,
        "２GB x",
    ],
)
def test_parse_size_refuses(size):
    with pytest.raises(
        ValueError, match=rf"size must be a number of bytes .*but got {re.escape(repr(size))}"
    ):
        parse_size(size)
