"""moe_runtime.checkpoint against safetensors' own reader and writer, broken files, full disks and SIGKILL."""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_runtime import checkpoint, files
from moe_runtime.checkpoint import (
    DTYPES,
    INDEX,
    SINGLE,
    Checkpoint,
    CheckpointWriter,
    TensorSpec,
    atomic_folder,
    atomic_write_json,
    atomic_write_text,
    check_keys,
    check_out_dir,
    parse_size,
    read_json,
)
from tests.support import limited

ROOT = Path(__file__).parents[1]
HERE = files._host()  # what hidden folders are named by, before the process

# a shard left open is an error
pytestmark = [
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits, NaNs included; bools are 0 or 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    bits = torch.randint(0, high, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(tensor: torch.Tensor, want: torch.Tensor) -> None:
    assert (tensor.shape, tensor.dtype) == (want.shape, want.dtype)
    assert raw(tensor) == raw(want)


def ten_tensors() -> dict[str, torch.Tensor]:
    """Ten tensors of 400 bytes."""
    return {f"layers.{i}.weight": random_tensor(torch.float32, 4, 25, seed=i) for i in range(10)}


def write(folder: Path, tensors: dict[str, torch.Tensor], max_shard_size: int = 10**9, **options) -> Path:
    with CheckpointWriter(folder, max_shard_size, **options) as writer:
        for key, tensor in tensors.items():
            writer.add(key, tensor)
    return folder


def raw_file(path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file by hand, as broken as asked."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def snapshot(folder: Path) -> dict[str, str]:
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.rglob("*") if f.is_file()
    }


def siblings(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.parent.iterdir() if file != folder)


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


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
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "theirs" / SINGLE)
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


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 5), max_size=3)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
def test_bytes_survive_a_copy_through_reader_and_writer(tmp_path_factory, kinds, max_shard_size, random):
    tensors = {f"t{i}": random_tensor(dtype, *shape, seed=i) for i, (dtype, shape) in enumerate(kinds)}
    folder = tmp_path_factory.mktemp("copy")
    write(folder / "a", tensors, max_shard_size)
    with Checkpoint(folder / "a") as source, CheckpointWriter(folder / "b", random.randint(1, 200)) as writer:
        for key in random.sample(source.keys(), len(tensors)):
            writer.add(key, source.get(key))
    with Checkpoint(folder / "b") as copy:
        assert set(copy.keys()) == set(tensors)
        for key, tensor in tensors.items():
            assert_same(copy.get(key), tensor)


def test_get_rows_equals_indexing(tmp_path):
    tensor = random_tensor(torch.bfloat16, 6, 3, 5)
    write(tmp_path / "out", {"before": torch.ones(7), "w": tensor, "vector": torch.arange(4), "after": torch.ones(3)})
    with Checkpoint(tmp_path / "out") as source:
        for index in (0, 5, -1, slice(None), slice(2, 4), slice(-2, None), slice(3, 3), slice(4, 99)):
            assert_same(source.get_rows("w", index), tensor[index])
        assert_same(source.get_rows("vector", torch.tensor(2)), torch.tensor(2))


@pytest.mark.parametrize("index", [6, -7, 1.0, "a", None, slice(0, 4, 2), slice(None, None, -1)], ids=str)
def test_get_rows_refuses_what_is_not_a_run_of_rows(tmp_path, index):
    write(tmp_path / "out", {"w": torch.zeros(6, 2), "scalar": torch.zeros(())})
    with Checkpoint(tmp_path / "out") as source:
        with pytest.raises(ValueError, match=re.escape(f"index is {index!r}, w is [6, 2]; want an int in dim 0")):
            source.get_rows("w", index)
        with pytest.raises(ValueError, match=r"scalar is \[\]"):
            source.get_rows("scalar", 0)


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
    raw_file(tmp_path / SINGLE, {"w": {"dtype": "F32", "shape": [rows, row // 4], "data_offsets": [0, size]}})
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


def test_one_shard_is_open_at_a_time_and_none_after_close(tmp_path):
    out = write(tmp_path / "out", ten_tensors(), 800)

    def opened() -> int:
        links = [f"/proc/self/fd/{handle}" for handle in os.listdir("/proc/self/fd")]
        return sum(os.path.exists(link) and os.readlink(link).startswith(str(out)) for link in links)

    with Checkpoint(out) as source:
        assert opened() == 0
        for key in (*source.keys(), *reversed(source.keys())):
            source.get(key)
            assert opened() == 1
    assert opened() == 0
    assert source.get("layers.3.weight").shape == (4, 25)
    source.close()


def test_tensors_outlive_the_folder_and_do_not_reach_into_it(tmp_path):
    tensors = ten_tensors()
    out = write(tmp_path / "out", tensors)
    before = snapshot(out)
    with Checkpoint(out) as source:
        tensor = source.get("layers.1.weight")
        source.get("layers.2.weight").zero_()
        assert_same(source.get("layers.2.weight"), tensors["layers.2.weight"])
    assert snapshot(out) == before
    shutil.rmtree(out)
    assert_same(tensor, tensors["layers.1.weight"])


def test_a_shard_that_changes_under_the_reader_is_an_error(tmp_path):
    out = write(tmp_path / "out", ten_tensors(), 800)
    with Checkpoint(out) as source:
        source.get("layers.9.weight")
        write(out, {key: tensor[:2] for key, tensor in ten_tensors().items()}, 400, overwrite=True)
        with pytest.raises(ValueError, match=r"model-00001-of-00005.safetensors changed since its header was read"):
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


# what the reader refuses


def sharded(tmp_path: Path) -> tuple[Path, dict]:
    out = write(tmp_path / "out", ten_tensors(), 2000)
    return out, json.loads((out / INDEX).read_text())


@pytest.mark.parametrize(
    "name",
    [
        "/etc/a.safetensors",
        "../a.safetensors",
        "..",
        "sub/a.safetensors",
        "sub\\a.safetensors",
        "a\0.safetensors",
        "",
        "a.bin",
        7,
    ],
    ids=repr,
)
def test_shard_names_cannot_leave_the_folder(tmp_path, monkeypatch, name):
    out, index = sharded(tmp_path)
    (tmp_path / "a.safetensors").write_bytes((out / "model-00001-of-00002.safetensors").read_bytes())
    index["weight_map"]["layers.3.weight"] = name
    (out / INDEX).write_text(json.dumps(index))
    monkeypatch.setattr(checkpoint, "_read_header", lambda *_: pytest.fail("a shard was read"))
    with pytest.raises(
        ValueError, match=re.escape(f"shard of layers.3.weight in {out / INDEX} is {name!r}; want the plain")
    ):
        Checkpoint(out)


def test_missing_shards_are_named_before_any_is_read(tmp_path, monkeypatch):
    out, _ = sharded(tmp_path)
    (out / "model-00002-of-00002.safetensors").unlink()
    monkeypatch.setattr(checkpoint, "_read_header", lambda *_: pytest.fail("a shard was read"))
    with pytest.raises(ValueError, match=r"names model-00002-of-00002.safetensors, which are missing"):
        Checkpoint(out)


def test_index_and_shards_must_agree(tmp_path):
    out, index = sharded(tmp_path)
    shard1, shard2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    def check(change: dict, message: str) -> None:
        weight_map = {key: shard for key, shard in (index["weight_map"] | change).items() if shard}
        (out / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=re.escape(message)):
            Checkpoint(out)

    check({"ghost": shard2}, f"{out / shard2} lacks ghost, which {INDEX} has there")
    check({"layers.8.weight": None}, f"{out / shard2} holds layers.8.weight, which {INDEX} has in no shard")
    check({"layers.8.weight": shard1}, f"{out / shard2} holds layers.8.weight, which {INDEX} has in {shard1}")
    tensors = load_file(out / shard2) | {"layers.0.weight": torch.zeros(2)}
    save_file(tensors, out / shard2)
    check({}, f"{out / shard2} holds layers.0.weight, which {INDEX} has in {shard1}")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": "a"}'])
def test_index_without_weight_map(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"weight_map of .*; want an object"):
        Checkpoint(tmp_path)


def test_a_single_file_beside_an_index_that_ignores_it(tmp_path):
    out, index = sharded(tmp_path)
    save_file({"a": torch.zeros(1)}, out / SINGLE)
    with pytest.raises(ValueError, match=r"does not name the model.safetensors beside it"):
        Checkpoint(out)
    index["weight_map"]["a"] = SINGLE
    (out / INDEX).write_text(json.dumps(index))
    assert "a" in Checkpoint(out)


def test_truncated_files_name_file_and_key(tmp_path):
    whole = (write(tmp_path / "out", ten_tensors()) / SINGLE).read_bytes()
    file = tmp_path / "out" / SINGLE
    header = 8 + int.from_bytes(whole[:8], "little")
    for size, message in [
        (len(whole) - 1, f"{file} is {len(whole) - 1} bytes; want {len(whole)}, where layers.9.weight ends"),
        (header + 900, f"{file} is {header + 900} bytes; want {header + 1200}, where layers.2.weight ends"),
        (header - 5, f"{file} is {header - 5} bytes with a header of {header - 8}; want a whole safetensors file"),
        (3, f"{file} is 3 bytes with a header of"),
        (0, f"{file} is 0 bytes with a header of"),
    ]:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=re.escape(message)):
            Checkpoint(tmp_path / "out")
    file.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match=f"is {len(whole) + 1} bytes; want {len(whole)}, where its last tensor ends"):
        Checkpoint(tmp_path / "out")


def one(dtype="F32", shape=(2,), offsets=(0, 8), **more) -> dict:
    return {"w": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}, **more}


@pytest.mark.parametrize(
    "header, message",
    [
        pytest.param(one(offsets=(0, 12)), "w in the header of", id="more bytes than the shape holds"),
        pytest.param(one(offsets=(8, 0)), "w in the header of", id="offsets backwards"),
        pytest.param(one(offsets=(-8, 0)), "w in the header of", id="negative offset"),
        pytest.param(one(offsets=(0, 8, 9)), "w in the header of", id="three offsets"),
        pytest.param(one(offsets=(0.0, 8.0)), "w in the header of", id="float offsets"),
        pytest.param(one(shape=(-2,), offsets=(0, 8)), "w in the header of", id="negative shape"),
        pytest.param(one(shape=(-1, -2)), "w in the header of", id="negatives that multiply to the right size"),
        pytest.param(one(shape=(True, 2)), "w in the header of", id="bool in the shape"),
        pytest.param(one(dtype="F4"), "w in the header of", id="dtype that torch has not"),
        pytest.param({"w": {"dtype": "F32"}}, "w in the header of", id="fields missing"),
        pytest.param({"w": 3}, "w in the header of", id="no object"),
        pytest.param(one(offsets=(4, 12)), "want them to begin at 0", id="hole before the tensor"),
        pytest.param(one(v=one()["w"]), "data_offsets of w in", id="two tensors on the same bytes"),
        pytest.param(one(v=one(shape=(1,), offsets=(4, 8))["w"]), "data_offsets of v in", id="overlap"),
        pytest.param(
            one(offsets=(0, 2**62), shape=(2**60,)),
            r"is \d+ bytes; want 46116860184\d+, where w ends",
            id="beyond the file",
        ),
        pytest.param(one(__metadata__=[]), "__metadata__ of", id="metadata no object"),
        pytest.param(b"[1]", "is a JSON list; want one JSON object", id="header no object"),
        pytest.param(b"{'a'", r"is not valid JSON \(Expecting.*line 1 column 2", id="header no JSON"),
        pytest.param(b"\xff\xfe{}", "is not valid JSON", id="header not UTF-8"),
        pytest.param(b"[" * 200_000, "is not valid JSON", id="header too deep"),
    ],
)
def test_bad_headers(tmp_path, header, message):
    raw_file(tmp_path / SINGLE, header, bytes(16))
    # whatever the reader of safetensors refuses we refuse, with the file's name
    with pytest.raises(Exception, match=r"(?i)header|metadata|offset|invalid|json|utf|dtype|size|buffer"):
        load_file(tmp_path / SINGLE)
    with pytest.raises(ValueError, match=message) as error:
        Checkpoint(tmp_path)
    assert str(tmp_path / SINGLE) in str(error.value)


def test_header_length_beyond_the_file_is_not_allocated(tmp_path):
    raw_file(tmp_path / SINGLE, b"{}", length=2**63)
    with pytest.raises(ValueError, match=f"is 10 bytes with a header of {2**63}"):
        Checkpoint(tmp_path)
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 12345\n")
    with pytest.raises(ValueError, match=r"git-lfs pointer"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "names, found",
    [
        (["pytorch_model.bin", "training_args.bin", "config.json"], "pytorch_model.bin, training_args.bin"),
        (["model.pt"], "model.pt"),
        (["weights.safetensors"], "weights.safetensors"),
        (["config.json"], "no weights"),
    ],
)
def test_a_folder_without_our_files_says_what_it_holds_and_how_to_convert(tmp_path, names, found):
    for name in names:
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/pickled'\ntR.")
    with pytest.raises(
        ValueError, match=re.escape(f"path is {tmp_path}, which holds {found}; want {SINGLE} or {INDEX}")
    ) as e:
        Checkpoint(tmp_path)
    assert "only safetensors is read" in str(e.value)
    assert "from_pretrained(path).save_pretrained(new_path)" in str(e.value)


def test_paths_and_keys_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"path is .*hub/name, which is not a folder; want .*; hf download"):
        Checkpoint(tmp_path / "hub" / "name")
    source = Checkpoint(write(tmp_path / "out", ten_tensors()))
    for read in (source.get, lambda key: source.get_rows(key, 0)):
        with pytest.raises(ValueError, match=r"key is 'nope'; want one of the 10 keys of"):
            read("nope")


# check_keys


def test_check_keys_collects_everything_in_one_error():
    spec = TensorSpec((2, 3), torch.float32)
    same = {"a": spec, "b": spec}
    check_keys(same, dict(reversed(same.items())), source="x")
    have = {
        "shape": TensorSpec((3, 2), torch.float32),
        "dtype": TensorSpec((2, 3), torch.bfloat16),
        "extra": spec,
        "both": spec,
    }
    want = {f"lost.{i}": spec for i in range(10)}
    want |= {"shape": spec, "dtype": spec, "both": TensorSpec((), torch.int8)}
    with pytest.raises(ValueError, match=r"^some/folder has 4 tensors; want the 13 asked for") as error:
        check_keys(have, want, source="some/folder")
    assert str(error.value).splitlines()[1:] == [
        "10 missing: " + ", ".join(f"lost.{i}" for i in range(8)) + ", ...",
        "1 unexpected: extra",
        "2 of another shape: shape is [3, 2], want [2, 3], both is [2, 3], want []",
        "2 of another dtype: dtype is torch.bfloat16, want torch.float32, both is torch.float32, want torch.int8",
    ]


@pytest.mark.parametrize("have, want", [({}, {"a": 1}), ({"a": 1}, {}), ({"a": 1}, {"a": 2}), ({"a": 1}, {"a": -1})])
def test_check_keys_finds_each_kind_alone(have, want):
    def specs(values):
        return {key: TensorSpec((abs(n),), torch.int8 if n > 0 else torch.uint8) for key, n in values.items()}

    with pytest.raises(ValueError, match=r"x has \d tensors.*\n1 (missing|unexpected|of another \w+): a"):
        check_keys(specs(have), specs(want), source="x")


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
    write(tmp_path / "out", {f"t{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate(sizes)}, 100)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    shards = [sorted(load_file(tmp_path / "out" / name)) for name in sorted(set(index["weight_map"].values()))]
    assert shards == [["t0", "t1"], ["t2"], ["t3", "t4", "t5"], ["t6"], ["t7"]]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_files_have_the_mode_that_the_umask_gives(tmp_path):
    """save_file leaves 0600, which nobody else can read."""
    for umask, mode in ((0o022, 0o644), (0o007, 0o660)):
        old = os.umask(umask)
        try:
            write(tmp_path / "out", ten_tensors(), 800, overwrite=True)
        finally:
            os.umask(old)
        assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()} == {mode}


@pytest.mark.parametrize(
    "tensor, message",
    [
        pytest.param(torch.zeros(2).to_sparse(), "torch.sparse_coo", id="sparse"),
        pytest.param(torch.zeros(2, device="meta"), "on meta", id="meta"),
        pytest.param(torch.zeros(2, dtype=torch.complex128), "torch.complex128", id="dtype"),
        pytest.param([1.0], "a list", id="list"),
        pytest.param(torch.zeros(2).as_subclass(type("Sub", (torch.Tensor,), {})), "a Sub", id="subclass"),
    ],
)
def test_add_refuses_what_cannot_be_stored(tmp_path, tensor, message):
    with pytest.raises(ValueError, match=rf"tensor of bad is .*{message}.*; want a plain dense tensor"):
        write(tmp_path / "out", {"good": torch.zeros(2), "bad": tensor})
    assert siblings(tmp_path / "out") == []


def test_keys_and_names_are_used_once(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / SINGLE).write_text("")
    with CheckpointWriter(tmp_path / "out", 4) as writer:
        writer.add("w", torch.zeros(1))
        for key in ("w", "", "__metadata__", 3):
            with pytest.raises(ValueError, match=f"key is {key!r}; want a name that was not added before"):
                writer.add(key, torch.zeros(2))
        writer.copy_file(tmp_path / "config.json")
        writer.write_text("notes.txt", "grüße")
        for name in ("config.json", "notes.txt", "../up", "/abs", "", INDEX, "model-00001.safetensors"):
            with pytest.raises(ValueError, match=f"name is {re.escape(repr(name))}; want a plain file name"):
                writer.write_text(name, "")
        for source in (SINGLE, "config.json"):
            with pytest.raises(ValueError, match=r"name is .*; want a plain file name"):
                writer.copy_file(tmp_path / source)
        with pytest.raises(ValueError, match=r"src is .*nope; want a file"):
            writer.copy_file(tmp_path / "nope")
    assert sorted(snapshot(tmp_path / "out")) == ["config.json", SINGLE, "notes.txt"]
    assert (tmp_path / "out" / "notes.txt").read_bytes() == "grüße".encode()


def test_writer_outside_its_block_and_without_tensors(tmp_path):
    writer = CheckpointWriter(tmp_path / "out")
    for use in (lambda: writer.add("w", torch.zeros(1)), lambda: writer.write_text("a", "b")):
        with pytest.raises(ValueError, match=r"writer of .*out is not open"):
            use()
    assert list(tmp_path.iterdir()) == []
    with writer:
        writer.add("w", torch.zeros(1))
    with pytest.raises(ValueError, match=r"writer of .*out is not open"):
        writer.add("v", torch.zeros(1))
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(ValueError, match=r"was given no tensor"):
        write(tmp_path / "out", {})
    assert list(tmp_path.iterdir()) == []


# whole or not at all


def test_an_exception_leaves_nothing(tmp_path):
    for done in range(5):
        with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "a" / "out", 800) as writer:
            for key, tensor in list(ten_tensors().items())[:done]:
                writer.add(key, tensor)
            assert [file.name for file in (tmp_path / "a").iterdir()] == [f".out.tmp-{HERE}-{os.getpid()}"]
            raise KeyboardInterrupt
        assert list((tmp_path / "a").iterdir()) == []


def test_existing_folders_are_refused_before_anything_is_touched(tmp_path, monkeypatch):
    out = write(tmp_path / "out", ten_tensors())
    before = snapshot(tmp_path)
    message = re.escape(f"out_dir is {out}, which exists; want a new or empty folder; or pass overwrite=True")
    for start in (check_out_dir, CheckpointWriter, lambda path: atomic_folder(path).__enter__()):
        with pytest.raises(ValueError, match=message):
            start(out)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"model.safetensors, which is a file"):
            CheckpointWriter(out / SINGLE, overwrite=overwrite)
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"current folder; want one inside it"):
            patch.chdir(out)
            CheckpointWriter(".", overwrite=overwrite)
        with pytest.raises(ValueError, match=r"a mount point"):
            CheckpointWriter("/proc", overwrite=overwrite)
    assert snapshot(tmp_path) == before
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    write(tmp_path / "link", ten_tensors())
    assert (tmp_path / "link").is_symlink()
    assert list(snapshot(tmp_path / "empty")) == [SINGLE]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_overwrite_replaces_the_whole_folder_and_may_read_from_it(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda a, b: False)
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
    assert sorted(snapshot(out)) == [*(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)), INDEX]
    with Checkpoint(out) as copy:
        for key, tensor in tensors.items():
            assert_same(copy.get(key), tensor)


@pytest.fixture
def shm():
    """A folder on a filesystem that can exchange, wherever tmp_path lies."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_overwrite_is_one_step_where_the_filesystem_can_exchange(shm, monkeypatch):
    out = write(shm / "out", ten_tensors())
    rename = os.rename

    def refuse(source, target):
        assert out not in (source, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    write(out, {"new": torch.zeros(3)}, overwrite=True)
    assert Checkpoint(out).keys() == ["new"]
    assert siblings(out) == []
    assert not files._exchange(out, shm / "nope")


@pytest.mark.parametrize("failing", [1, 2])
def test_the_old_folder_comes_back_when_a_rename_fails(tmp_path, monkeypatch, failing):
    out = write(tmp_path / "out", ten_tensors())
    before, calls, rename = snapshot(out), [], os.rename

    def fail(source, target):
        if str(out) in (str(source), str(target)):
            calls.append(target)
            if len(calls) == failing:
                raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(PermissionError):
        write(out, {"new": torch.zeros(3)}, overwrite=True)
    assert len(calls) == (1 if failing == 1 else 3)
    assert snapshot(out) == before
    assert siblings(out) == []


def test_a_folder_that_fills_up_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(OSError), CheckpointWriter(tmp_path / "out") as writer:
        writer.add("w", torch.zeros(1))
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "other").write_text("theirs")
    assert (tmp_path / "out" / "other").read_text() == "theirs"
    assert siblings(tmp_path / "out") == []


def test_read_only_parent(tmp_path, monkeypatch):
    if os.geteuid() == 0:

        def refuse(*_, **__):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        tmp_path.chmod(0o555)
    message = rf"out_dir is .*out, beside which .out.tmp-{HERE}-{os.getpid()} cannot be made \(Permission denied\)"
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "out", ten_tensors())
    tmp_path.chmod(0o755)
    assert list(tmp_path.iterdir()) == []


def test_rename_refused_at_the_end(tmp_path, monkeypatch):
    rename = os.rename

    def refuse(source, target):
        if target == tmp_path / "out":
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError):
        write(tmp_path / "out", ten_tensors())
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_full_disk(small_disk, overwrite):
    out = small_disk / "out"
    if overwrite:
        write(out, {"old": torch.zeros(1000)})
    before = snapshot(small_disk)
    with pytest.raises(OSError, match="No space left on device") as error:
        write(out, {f"t{i}": torch.zeros(50_000) for i in range(10)}, 300_000, overwrite=overwrite)
    assert error.value.errno == errno.ENOSPC
    assert re.search(r"model-0000\d.safetensors", error.value.filename)
    assert snapshot(small_disk) == before
    assert len(list(small_disk.iterdir())) == overwrite


def test_free_space_is_checked_first(small_disk):
    with pytest.raises(ValueError, match=r"out_dir is .*out, on a disk with \d+ bytes free; want 2000000"):
        CheckpointWriter(small_disk / "deep" / "out", expected_bytes=2_000_000)
    assert list(small_disk.iterdir()) == []
    write(small_disk / "out", {"w": torch.zeros(10)}, expected_bytes=40)


def test_errors_of_save_file_carry_their_number(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    for text, number in (("I/O error: No space left (os error 28)", errno.ENOSPC), ("odd", errno.EIO)):

        def fail(*_, text=text, **__):
            raise SafetensorError(text)

        monkeypatch.setattr(checkpoint, "save_file", fail)
        with pytest.raises(OSError) as error:
            write(tmp_path / "out", ten_tensors(), 800)
        assert error.value.errno == number
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_sync_happens_before_the_rename(tmp_path, monkeypatch, overwrite):
    if overwrite:
        write(tmp_path / "out", ten_tensors())
    order, sync, move = [], os.fsync, files._move_in
    monkeypatch.setattr(
        os, "fsync", lambda handle: (order.append(os.readlink(f"/proc/self/fd/{handle}")), sync(handle))
    )
    monkeypatch.setattr(files, "_move_in", lambda *args: (order.append("move"), move(*args)))
    write(tmp_path / "out", ten_tensors(), 2000, overwrite=overwrite)
    tmp = str(tmp_path / f".out.tmp-{HERE}-{os.getpid()}")
    written = {f"{tmp}/{name}" for name in snapshot(tmp_path / "out")}
    assert {*written, tmp} == set(order[: order.index("move")])
    assert order[order.index("move") + 1 :] == [str(tmp_path)]


def test_left_overs_of_the_dead_are_removed_and_of_the_living_kept(tmp_path, dead_pid):
    out = tmp_path / "out"
    dead = [f".out.tmp-{HERE}-{dead_pid}", f".out.tmp-{HERE}-{os.getpid()}"]
    kept = [
        f".out.tmp-{HERE}-{os.getppid()}",
        ".out.tmp-abc",
        ".out.tmp-0123abcd-1",
        f".outer.tmp-{HERE}-{dead_pid}",
        f"out.tmp-{HERE}-{dead_pid}",
        f"x.out.tmp-{HERE}-{dead_pid}",
    ]
    for name in dead + kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001.safetensors").write_text("half")
    (tmp_path / f".out.tmp-{HERE}-{dead_pid + 1}").write_text("a file, not ours")
    write(out, ten_tensors())
    assert siblings(out) == sorted([*kept, f".out.tmp-{HERE}-{dead_pid + 1}"])
    (tmp_path / dead[0]).mkdir()
    (tmp_path / f".out.old-{HERE}-{dead_pid}").mkdir()
    write(out, ten_tensors(), overwrite=True)
    assert siblings(out) == sorted([*kept, f".out.tmp-{HERE}-{dead_pid + 1}"])


def test_left_overs_of_other_hosts_stay_for_a_day(tmp_path, dead_pid, monkeypatch):
    """A disk may be shared: what a process of another host writes now cannot be told by its number here."""
    out, numbers = tmp_path / "out", (dead_pid, os.getpid(), 1)
    for number in numbers:
        (tmp_path / f".out.tmp-0123abcd-{number}").mkdir()
        (tmp_path / f".out.tmp-0123abcd-{number}" / "model-00001.safetensors").write_text("half")
    now = time.time()
    for days, left in ((0, len(numbers)), (0.9, len(numbers)), (1.1, 0)):
        monkeypatch.setattr(time, "time", lambda days=days: now + days * 86400)
        write(out, ten_tensors(), overwrite=True)
        assert len(siblings(out)) == left


def test_threads_write_one_path(tmp_path):
    errors = []

    def work(number):
        try:
            for _ in range(150):
                atomic_write_text(tmp_path / "a", f"{number}" * 100)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(set((tmp_path / "a").read_text())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_left_over_of_another_user_does_not_stop_the_writer(tmp_path, dead_pid, monkeypatch):
    left, open_ = tmp_path / f".out.tmp-{HERE}-{dead_pid}", os.open
    left.mkdir()

    def refuse(path, *args, **options):
        if Path(path) == left:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    write(tmp_path / "out", ten_tensors())
    assert siblings(tmp_path / "out") == [left.name]


def test_an_old_folder_set_aside_by_a_killed_writer_comes_back(tmp_path, dead_pid):
    out = write(tmp_path / "out", ten_tensors())
    before = snapshot(out)
    out.rename(tmp_path / f".out.old-{HERE}-{dead_pid}")
    with pytest.raises(ValueError, match="which exists"):
        write(out, {"new": torch.zeros(1)})
    assert snapshot(out) == before
    assert siblings(out) == []


def test_two_writers_of_one_folder(tmp_path):
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("w", torch.zeros(1))
        with pytest.raises(ValueError, match=r"cannot be made \(File exists\)"):
            write(tmp_path / "out", ten_tensors())
    assert Checkpoint(tmp_path / "out").keys() == ["w"]


def test_atomic_folder_for_other_writers(tmp_path):
    with atomic_folder(tmp_path / "deep" / "out") as tmp:
        (tmp / "sub").mkdir()
        (tmp / "sub" / "a").write_text("1")
        assert not (tmp_path / "deep" / "out").exists()
    assert list(snapshot(tmp_path / "deep" / "out")) == ["sub/a"]
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "deep" / "out", overwrite=True) as tmp:
        raise RuntimeError
    assert list(snapshot(tmp_path / "deep")) == ["out/sub/a"]


# killed at any moment; one process imports torch, its children are killed

KILL = """
import os, signal, sys, time
import torch
from moe_runtime import checkpoint, files
from moe_runtime.checkpoint import CheckpointWriter
assert "transformers" not in sys.modules
torch.set_num_threads(1)

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def nth(n, function):
    calls = []
    def wrapped(*args, **options):
        calls.append(1)
        return die() if len(calls) == n else function(*args, **options)
    return wrapped

def arm(moment):
    if moment == "second shard":
        checkpoint.save_file = nth(2, checkpoint.save_file)
    elif moment == "shards renamed":
        os.rename = nth(3, os.rename)
    elif moment == "before the move":
        files._move_in = die
    elif moment == "after the exchange":
        files.shutil.rmtree = die
    elif moment == "between the renames":
        files._exchange = lambda a, b: False
        os.rename = nth(7, os.rename)

def write(out, moment, overwrite):
    arm(moment)
    with CheckpointWriter(out, 800, overwrite=overwrite) as writer:
        for i in range(10):
            if moment == f"after {i}":
                die()
            writer.add(f"new.{i}", torch.full((4, 25), float(i)))
            if moment.startswith("after ms"):
                time.sleep(0.002)

for line in sys.stdin:
    out, moment, overwrite = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        try:
            write(out, moment, overwrite == "True")
        finally:
            os._exit(0)
    if moment.startswith("after ms"):
        time.sleep(float(moment.split()[2]) / 1000)
        os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], flush=True)
"""

STEPS = ["after 0", "after 1", "after 5", "after 9", "second shard", "shards renamed", "before the move"]
KILLS = [(moment, False) for moment in [*STEPS, *(f"after ms {i}" for i in (1, 5, 9, 13, 17, 21, 25, 29))]]
KILLS += [
    (moment, True) for moment in [*STEPS, "after the exchange", "between the renames", "after ms 6", "after ms 26"]
]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def killer():
    """Kill a writer of `out` at a moment; returns the signal that ended it."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
    )

    def kill(out: Path, moment: str, overwrite: bool) -> int:
        process.stdin.write(f"{out}\t{moment}\t{overwrite}\n")
        process.stdin.flush()
        return os.WTERMSIG(int(process.stdout.readline()))

    with process:
        yield kill
        process.stdin.close()


@pytest.mark.parametrize("moment, overwrite", KILLS)
def test_sigkill(tmp_path, killer, moment, overwrite):
    old, out = ten_tensors(), tmp_path / "out"
    new = {f"new.{i}": torch.full((4, 25), float(i)) for i in range(10)}
    new_files = snapshot(write(tmp_path / "reference", new, 800))
    shutil.rmtree(tmp_path / "reference")
    before = snapshot(write(out, old)) if overwrite else None
    ended_by = killer(out, moment, overwrite)
    after = snapshot(out) if out.exists() else None
    if moment.startswith("after ms"):
        assert after in (before, new_files)
    else:
        assert ended_by == 9
        # between two renames neither is there; the old one lies beside, and the next writer puts it back
        assert after == {"after the exchange": new_files, "between the renames": None}.get(moment, before)
    if after != new_files:
        left = {"between the renames": 2}.get(moment, 1)
        assert len(siblings(out)) == left or moment.startswith("after ms")
        assert all(re.fullmatch(rf"\.out\.(tmp|old)-{HERE}-\d+", name) for name in siblings(out))
    write(out, new, 800, overwrite=overwrite or after is not None)
    assert siblings(out) == []
    assert snapshot(out) == new_files


def test_killed_between_two_renames_the_old_folder_is_whole_again(tmp_path, killer):
    out = write(tmp_path / "out", ten_tensors())
    before = snapshot(out)
    killer(out, "between the renames", True)
    assert not out.exists()
    with pytest.raises(ValueError, match="which exists"):
        write(out, ten_tensors())
    assert snapshot(out) == before


# bounded memory

COPY = """
import sys
import torch
from moe_runtime.checkpoint import Checkpoint, CheckpointWriter
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
    print("growth", memory("VmHWM") - before)  # ru_maxrss would count what the parent had before exec
    # the limit bites: who holds more than one shard fails under it
    try:
        hold = [reader.get(key) for key in reader.keys()[:9]]
    except OSError:
        print("refused")
"""


def test_a_folder_larger_than_the_memory_limit_is_copied(tmp_path):
    """600 MB in 12 shards, with 80 MB allowed: enforced by RLIMIT_DATA, and measured as the peak resident set."""
    source, out, size, weight_map = tmp_path / "source", tmp_path / "out", 10**7, {}
    source.mkdir()
    for shard in range(12):
        keys = [f"w{shard * 5 + i:02d}" for i in range(5)]
        header = {
            key: {"dtype": "F32", "shape": [5, 500_000], "data_offsets": [i * size, i * size + size]}
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


# small files and sizes


def test_read_json(tmp_path):
    file = tmp_path / "a.json"
    for text, message in [
        ('{"a": 1,}', r"a.json is not valid JSON \(.*line 1 column \d+"),
        ('{"a":\n  tru}', r"a.json is not valid JSON \(.*line 2 column 3"),
        ("", r"a.json is not valid JSON \(.*line 1 column 1"),
        ("[1]", "a.json is a JSON list; want one JSON object"),
        ("null", "a.json is a JSON NoneType; want one JSON object"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_json(file)
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"a.json is not valid JSON \(.*position 7"):
        read_json(file)
    with pytest.raises(ValueError, match=r"path is .*nope.json, which cannot be read \(No such file"):
        read_json(tmp_path / "nope.json")
    file.write_text('{"ü": [1, 2.5, null]}', encoding="utf-8")
    assert read_json(str(file)) == {"ü": [1, 2.5, None]}


def test_atomic_text_and_json(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    atomic_write_json(file, {"ü": [1, None]})
    assert read_json(file) == {"ü": [1, None]}
    with pytest.raises(ValueError):
        atomic_write_json(file, {"a": float("nan")})
    with pytest.raises(TypeError):
        atomic_write_json(file, {"a": object()})
    (tmp_path / "link").symlink_to("a.json")
    os.link(file, tmp_path / "old")
    atomic_write_text(tmp_path / "link", "grüße\n")
    assert (tmp_path / "link").is_symlink()
    assert file.read_bytes() == "grüße\n".encode()
    # replaced by another file, not written over
    assert read_json(tmp_path / "old") == {"ü": [1, None]}

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write_text(file, "new")
    assert file.read_bytes() == "grüße\n".encode()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.json", "link", "old"]


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
    "size", [0, -1, "", "GB", "2XB", "2G", "5IB", "-2GB", "1e9", "0GB", "0.1B", "2GB ", None, True, "２GB x"]
)
def test_parse_size_refuses(size):
    with pytest.raises(ValueError, match=re.escape(f"size is {size!r}; want at least one byte")):
        parse_size(size)
