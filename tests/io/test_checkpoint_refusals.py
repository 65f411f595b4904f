"""What moe_runtime.io.checkpoint refuses to read: broken files, an index that points elsewhere,
tensors of another model.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moe_runtime.io import checkpoint
from moe_runtime.io.checkpoint import INDEX, SINGLE, Checkpoint, TensorSpec, check_keys
from moe_runtime.io.files import read_json
from tests.support.checkpoints import NOTHING_STAYS_OPEN, raw_file, ten_tensors, write

pytestmark = NOTHING_STAYS_OPEN


def sharded(tmp_path: Path) -> tuple[Path, dict]:
    out = write(tmp_path / "out", ten_tensors(), 2000)
    return out, read_json(out / INDEX)


@pytest.mark.parametrize(
    "name, says",
    [
        ("../a.safetensors", "must be plain names"),
        ("a.bin", "must be plain names"),
        (7, "must be plain names"),
        ("a.safetensors", "names a.safetensors, which do not exist"),
    ],
)
def test_shard_names_are_checked_before_any_is_read(tmp_path, monkeypatch, name, says):
    out, index = sharded(tmp_path)
    (out / "model-00001-of-00002.safetensors").rename(tmp_path / "a.safetensors")
    index["weight_map"] = {"layers.3.weight": name}
    (out / INDEX).write_text(json.dumps(index))
    monkeypatch.setattr(checkpoint, "_read_header", lambda *_: pytest.fail("a shard was read"))
    with pytest.raises(ValueError, match=says) as error:
        Checkpoint(out)
    assert repr(name).strip("'") in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ghost": "2"}, "ghost is in {2}, but it is in none"),
        ({"layers.8.weight": None}, "layers.8.weight is in no shard, but it is in {2}"),
        ({"layers.8.weight": "1"}, "layers.8.weight is in {1}, but it is in {2}"),
        ({}, "layers.0.weight is in {1}, but it is in {1} and {2}"),
    ],
)
def test_index_and_shards_must_agree(tmp_path, change, message):
    out, index = sharded(tmp_path)
    shards = {number: f"model-0000{number}-of-00002.safetensors" for number in "12"}
    if not change:
        tensors = load_file(out / shards["2"]) | {"layers.0.weight": torch.zeros(2)}
        save_file(tensors, out / shards["2"])
    for key, number in change.items():
        if number is None:
            del index["weight_map"][key]
        else:
            index["weight_map"][key] = shards[number]
    (out / INDEX).write_text(json.dumps(index))
    message = message.replace("{1}", shards["1"]).replace("{2}", shards["2"])
    with pytest.raises(ValueError, match=re.escape(f"{out / INDEX}, {message}")):
        Checkpoint(out)


def test_a_single_file_beside_an_index_that_ignores_it(tmp_path):
    out, index = sharded(tmp_path)
    save_file({"a": torch.zeros(1)}, out / SINGLE)
    with pytest.raises(ValueError, match=r"that the index does not name. Delete the stale one"):
        Checkpoint(out)
    index["weight_map"]["a"] = SINGLE
    (out / INDEX).write_text(json.dumps(index))

    assert "a" in Checkpoint(out)
    (out / INDEX).write_text('{"weight_map": []}')
    with pytest.raises(ValueError, match=r"weight_map in .* must be an object"):
        Checkpoint(out)


def test_truncated_files_name_file_and_key(tmp_path):
    file = write(tmp_path / "out", ten_tensors()) / SINGLE
    whole = file.read_bytes()
    for size in (len(whole) + 1, len(whole) - 1, 3):
        file.write_bytes((whole + b"x")[:size])
        with pytest.raises(ValueError, match=f"{file} is not a valid safetensors file"):
            Checkpoint(tmp_path / "out")


def one(dtype="F32", shape=(2,), offsets=(0, 8), **more) -> dict:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}, **more}


@pytest.mark.parametrize(
    "header, message",
    [
        (one(offsets=(0, 12)), "not a valid safetensors file"),
        (one(dtype="F4"), "not a valid safetensors file"),
        (one(offsets=(4, 12)), "not a valid safetensors file"),
        (b"[" * 200_000, "not a valid safetensors file"),
    ],
)
def test_bad_headers(tmp_path, header, message):
    raw_file(tmp_path / SINGLE, header, bytes(16))
    # we refuse whatever safetensors' reader refuses, with the file's name
    with pytest.raises(SafetensorError):
        load_file(tmp_path / SINGLE)
    with pytest.raises(ValueError, match=message) as error:
        Checkpoint(tmp_path)
    assert str(tmp_path / SINGLE) in str(error.value)


def test_paths_and_keys_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"hub/name is not a folder.*hf download"):
        Checkpoint(tmp_path / "hub" / "name")
    source = Checkpoint(write(tmp_path / "out", ten_tensors()))
    with pytest.raises(ValueError, match=r"Key 'nope' is not among the 10 keys of"):
        source.get("nope")
    (tmp_path / "model.pt").touch()
    message = f"Expected {SINGLE} or {INDEX} in {tmp_path}, but found model.pt. Pickle files"
    with pytest.raises(ValueError, match=re.escape(message)):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value):
    tensor = torch.ones(3, 4)
    assert checkpoint.check_finite(tensor, "w", "folder") is tensor
    tensor[1, 2] = value
    with pytest.raises(ValueError, match="w of folder contains NaN or infinity"):
        checkpoint.check_finite(tensor, "w", "folder")


def test_check_keys_collects_everything_in_one_error():
    spec = TensorSpec((2, 3), torch.float32)
    same = {"a": spec, "b": spec}
    check_keys(same, dict(reversed(same.items())), source="x")
    there = {
        "shape": TensorSpec((3, 2), torch.float32),
        "dtype": TensorSpec((2, 3), torch.int32),
        "extra": spec,
    }
    expected = {f"lost.{i}": spec for i in range(10)} | {"shape": spec, "dtype": spec}
    with pytest.raises(ValueError, match=r"^The 3 tensors of some/folder do not match") as error:
        check_keys(there, expected, source="some/folder")
    lost = ", ".join(f"lost.{i}" for i in range(8))

    assert str(error.value).partition(": ")[2].split("; ") == [
        f"10 missing: {lost}, ...",
        "1 unexpected: extra",
        "2 with a wrong shape or dtype: shape is [3, 2] torch.float32, not [2, 3] torch.float32, "
        "dtype is [2, 3] torch.int32, not [2, 3] torch.float32",
    ]
