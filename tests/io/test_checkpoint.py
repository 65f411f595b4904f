"""moe_runtime.io.checkpoint against safetensors' own reader and writer, and in bounded memory."""

import json
import os
import re
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
from moe_runtime.io.files import read_json
from tests.support.checkpoints import (
    NOTHING_STAYS_OPEN,
    assert_same,
    random_tensor,
    siblings,
    snapshot,
    ten_tensors,
    write,
)

pytestmark = NOTHING_STAYS_OPEN


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_round_trip(tmp_path, shards):
    tensors = ten_tensors()
    out = write(tmp_path / "out", tensors, 4000 // shards)
    files = {SINGLE}
    if shards > 1:
        files = {f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)}
        index = read_json(out / INDEX)
        assert index["metadata"] == {"total_size": 4000}

    assert {file.name for file in out.glob("*.safetensors")} == files
    assert siblings(out) == []
    loaded = {}
    for name in files:
        part = load_file(out / name)
        assert len(part) == 10 // shards
        with safe_open(out / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        if shards > 1:
            assert {index["weight_map"][key] for key in part} == {name}
        loaded |= part
    # a snapshot in the Hugging Face cache is a folder of links to blobs
    (tmp_path / "snapshot").mkdir()
    for file in out.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    with Checkpoint(tmp_path / "snapshot") as ours:
        assert ours.metadata == {"format": "pt"}
        assert ours.keys() == list(tensors)
        assert ours.specs() == dict.fromkeys(tensors, TensorSpec((4, 25), torch.float32))
        for key, tensor in tensors.items():
            assert_same(loaded[key], tensor)
            assert_same(ours.get(key), tensor)
            for handle in Path("/proc/self/fd").iterdir():
                assert not os.path.realpath(handle).startswith(str(out)), "a shard was left open"


def test_every_dtype_is_read_as_safetensors_writes_and_written_as_it_reads(tmp_path):
    (tmp_path / "theirs").mkdir()
    tensors = {}
    for name, dtype in DTYPES.items():
        tensors[f"{name} matrix"] = random_tensor(dtype, 3, 5)
        tensors[f"{name} scalar"] = random_tensor(dtype)
        tensors[f"{name} empty"] = random_tensor(dtype, 0, 4)
        tensors[f"{name} transposed"] = random_tensor(dtype, 5, 3).t()
    plain = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(plain, tmp_path / "theirs" / SINGLE)
    theirs = Checkpoint(tmp_path / "theirs")
    ours = Checkpoint(write(tmp_path / "ours", tensors))
    loaded = load_file(tmp_path / "ours" / SINGLE)

    assert theirs.specs() == ours.specs()
    for key, tensor in tensors.items():
        assert ours.specs()[key] == TensorSpec(tuple(tensor.shape), tensor.dtype)
        for copy in (theirs.get(key), ours.get(key), loaded[key]):
            assert_same(copy, tensor)


ROWS = (0, 5, -1, slice(None), slice(2, 4), slice(-2, None), slice(3, 3), slice(4, 99))


def test_get_rows_equals_indexing(tmp_path):
    tensor = random_tensor(torch.bfloat16, 6, 3, 5)
    tensors = {"before": torch.ones(7), "w": tensor, "after": torch.ones(3)}
    write(tmp_path / "out", tensors)
    with Checkpoint(tmp_path / "out") as source:
        for index in ROWS:
            assert_same(source.get_rows("w", index), tensor[index])


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


def test_a_shard_that_changes_under_the_reader_is_an_error(tmp_path):
    out = write(tmp_path / "out", ten_tensors(), 800)
    with Checkpoint(out) as source:
        source.get("layers.9.weight")
        # with the same sizes
        write(
            out,
            {key: tensor + 1 for key, tensor in ten_tensors().items()},
            800,
            overwrite=True,
        )
        with pytest.raises(ValueError, match=r"model-00001-of-00005.safetensors has changed since"):
            source.get("layers.0.weight")


def test_the_first_shards_metadata_wins(tmp_path):
    for name in ("a", "b"):
        tensors = {name: torch.zeros(1)}
        save_file(tensors, tmp_path / f"{name}.safetensors", metadata={"of": name, name: "1"})
    weight_map = {name: f"{name}.safetensors" for name in ("a", "b")}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert Checkpoint(tmp_path).metadata == {"of": "a", "a": "1", "b": "1"}


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
    expected = {key: view.detach().clone() for key, view in views.items()}
    expected |= {"first": torch.full((3,), 1.0), "second": torch.full((3,), 2.0)}
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
        assert loaded.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(loaded[key], tensor), key


def test_a_tensor_above_the_limit_has_a_shard_of_its_own(tmp_path):
    sizes = [10, 60, 250, 30, 30, 30, 100, 5]
    tensors = {f"t{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate(sizes)}
    out = write(tmp_path / "out", tensors, 100)
    index = read_json(out / INDEX)

    assert index["metadata"]["total_size"] == sum(sizes)
    shards = [sorted(load_file(file)) for file in sorted(out.glob("*.safetensors"))]
    assert shards == [
        ["t0", "t1"],
        ["t2"],
        ["t3", "t4", "t5"],
        ["t6"],
        ["t7"],
    ]


def test_keys_are_used_once_and_other_files_are_copied(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with CheckpointWriter(tmp_path / "out", 4) as writer:
        writer.add("w", torch.zeros(1))
        unfit = {
            "w": torch.zeros(2),
            "meta": torch.zeros(2, device="meta"),
            "complex": torch.zeros(2, dtype=torch.complex128),
            "sparse": torch.eye(2).to_sparse(),
        }
        for key, tensor in unfit.items():
            with pytest.raises(ValueError, match=f"Tensor {key!r} must be .*under a new name"):
                writer.add(key, tensor)
        writer.copy_file(tmp_path / "config.json")
        writer.write_text("notes.txt", "grüße")
    assert sorted(snapshot(tmp_path / "out")) == ["config.json", SINGLE, "notes.txt"]

    assert (tmp_path / "out" / "notes.txt").read_bytes() == "grüße".encode()


@pytest.mark.parametrize(
    "size, value",
    [
        (2 * 2**30, 2**31),
        ("123", 123),
        ("500 mb", 5 * 10**8),
        ("1.5GiB", 3 * 2**29),
    ],
)
def test_parse_size(size, value):
    assert parse_size(size) == value
    with pytest.raises(ValueError, match="size must be .*but got '2G'"):
        parse_size("2G")
