"""What moe_runtime.io.checkpoint refuses to read: broken files, an index that leads elsewhere,
tensors of another model.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_runtime.io import checkpoint
from moe_runtime.io.checkpoint import INDEX, SINGLE, Checkpoint, TensorSpec, check_keys
from tests.support.checkpoints import raw_file, ten_tensors, write

# a shard left open is an error
pytestmark = [
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


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
    (tmp_path / "a.safetensors").write_bytes(
        (out / "model-00001-of-00002.safetensors").read_bytes()
    )
    index["weight_map"]["layers.3.weight"] = name
    (out / INDEX).write_text(json.dumps(index))
    monkeypatch.setattr(checkpoint, "_read_header", lambda *_: pytest.fail("a shard was read"))

    with pytest.raises(
        ValueError,
        match=f"shard of layers.3.weight in .* must be the plain name .*{re.escape(repr(name))}",
    ):
        Checkpoint(out)


def test_missing_shards_are_named_before_any_is_read(tmp_path, monkeypatch):
    out, _ = sharded(tmp_path)
    (out / "model-00002-of-00002.safetensors").unlink()
    monkeypatch.setattr(checkpoint, "_read_header", lambda *_: pytest.fail("a shard was read"))

    with pytest.raises(
        ValueError, match=r"names model-00002-of-00002.safetensors, which do not exist"
    ):
        Checkpoint(out)


def test_index_and_shards_must_agree(tmp_path):
    out, index = sharded(tmp_path)
    shard1 = "model-00001-of-00002.safetensors"
    shard2 = "model-00002-of-00002.safetensors"

    def check(change: dict, message: str) -> None:
        weight_map = {key: shard for key, shard in (index["weight_map"] | change).items() if shard}
        (out / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=re.escape(message)):
            Checkpoint(out)

    check({"ghost": shard2}, f"{out / INDEX}, ghost is in {shard2}, but it is in none")
    check(
        {"layers.8.weight": None},
        f"{out / INDEX}, layers.8.weight is in no shard, but it is in {shard2}",
    )
    check(
        {"layers.8.weight": shard1},
        f"{out / INDEX}, layers.8.weight is in {shard1}, but it is in {shard2}",
    )
    tensors = load_file(out / shard2) | {"layers.0.weight": torch.zeros(2)}
    save_file(tensors, out / shard2)
    check({}, f"{out / INDEX}, layers.0.weight is in {shard1}, but it is in {shard1} and {shard2}")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": "a"}'])
def test_index_without_weight_map(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"weight_map in .* must be an object"):
        Checkpoint(tmp_path)


def test_a_single_file_beside_an_index_that_ignores_it(tmp_path):
    out, index = sharded(tmp_path)
    save_file({"a": torch.zeros(1)}, out / SINGLE)

    with pytest.raises(ValueError, match=r"that the index does not name. Delete the stale one"):
        Checkpoint(out)
    index["weight_map"]["a"] = SINGLE
    (out / INDEX).write_text(json.dumps(index))
    assert "a" in Checkpoint(out)


def test_truncated_files_name_file_and_key(tmp_path):
    whole = (write(tmp_path / "out", ten_tensors()) / SINGLE).read_bytes()
    file = tmp_path / "out" / SINGLE
    header = 8 + int.from_bytes(whole[:8], "little")

    for size, message in [
        (
            len(whole) - 1,
            f"{file} has {len(whole) - 1} bytes, but its header describes {len(whole)}",
        ),
        (header + 900, f"{file} has {header + 900} bytes, but its header describes {len(whole)}"),
        (
            header - 5,
            (
                f"{file} is truncated or a git-lfs pointer: its size is {header - 5} bytes and its "
                f"header would take {header - 8}"
            ),
        ),
        (3, f"{file} is truncated or a git-lfs pointer: its size is 3 bytes"),
        (0, f"{file} is truncated or a git-lfs pointer: its size is 0 bytes"),
    ]:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=re.escape(message)):
            Checkpoint(tmp_path / "out")
    file.write_bytes(whole + b"x")
    with pytest.raises(
        ValueError, match=f"has {len(whole) + 1} bytes, but its header describes {len(whole)}"
    ):
        Checkpoint(tmp_path / "out")


def one(dtype="F32", shape=(2,), offsets=(0, 8), **more) -> dict:
    return {"w": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}, **more}


@pytest.mark.parametrize(
    "header, message",
    [
        (one(offsets=(0, 12)), "w in the header of"),
        (one(offsets=(8, 0)), "w in the header of"),
        (one(offsets=(-8, 0)), "w in the header of"),
        (one(offsets=(0, 8, 9)), "w in the header of"),
        (one(offsets=(0.0, 8.0)), "w in the header of"),
        (one(shape=(-2,), offsets=(0, 8)), "w in the header of"),
        (one(shape=(-1, -2)), "w in the header of"),
        (one(shape=(True, 2)), "w in the header of"),
        (one(dtype="F4"), "w in the header of"),
        ({"w": {"dtype": "F32"}}, "w in the header of"),
        ({"w": 3}, "w in the header of"),
        (one(offsets=(4, 12)), "w in the header of"),
        (one(v=one()["w"]), "(v|w) in the header of"),
        (one(v=one(shape=(1,), offsets=(4, 8))["w"]), "v in the header of"),
        (
            one(offsets=(0, 2**62), shape=(2**60,)),
            r"has \d+ bytes, but its header describes 46116860184\d+",
        ),
        (one(__metadata__=[]), "__metadata__ in the header of"),
        (b"[1]", "must be a JSON object, but got a list"),
        (b"{'a'", r"is not valid JSON \(Expecting.*line 1 column 2"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 200_000, "is not valid JSON"),
    ],
)
def test_bad_headers(tmp_path, header, message):
    raw_file(tmp_path / SINGLE, header, bytes(16))
    # whatever the reader of safetensors refuses we refuse, with the file's name
    with pytest.raises(
        Exception, match=r"(?i)header|metadata|offset|invalid|json|utf|dtype|size|buffer"
    ):
        load_file(tmp_path / SINGLE)
    with pytest.raises(ValueError, match=message) as error:
        Checkpoint(tmp_path)
    assert str(tmp_path / SINGLE) in str(error.value)


def test_header_length_beyond_the_file_is_not_allocated(tmp_path):
    raw_file(tmp_path / SINGLE, b"{}", length=2**63)
    with pytest.raises(ValueError, match=f"its size is 10 bytes and its header would take {2**63}"):
        Checkpoint(tmp_path)
    (tmp_path / SINGLE).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 12345\n"
    )
    with pytest.raises(ValueError, match=r"git-lfs pointer"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "names, found",
    [
        (
            ["pytorch_model.bin", "training_args.bin", "config.json"],
            "pytorch_model.bin, training_args.bin",
        ),
        (["model.pt"], "model.pt"),
        (["weights.safetensors"], "weights.safetensors"),
        (["config.json"], "no weights"),
    ],
)
def test_a_folder_without_our_files_says_what_it_holds_and_how_to_convert(tmp_path, names, found):
    for name in names:
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/pickled'\ntR.")
    with pytest.raises(
        ValueError,
        match=re.escape(f"Expected {SINGLE} or {INDEX} in {tmp_path}, but found {found}"),
    ) as e:
        Checkpoint(tmp_path)
    assert "can run code and are never loaded" in str(e.value)
    assert "from_pretrained(path).save_pretrained(new_path)" in str(e.value)


def test_paths_and_keys_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"hub/name is not a folder.*hf download"):
        Checkpoint(tmp_path / "hub" / "name")
    source = Checkpoint(write(tmp_path / "out", ten_tensors()))
    for read in (source.get, lambda key: source.get_rows(key, 0)):
        with pytest.raises(ValueError, match=r"Key 'nope' is not among the 10 keys of"):
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

    with pytest.raises(
        ValueError, match=r"^The 4 tensors of some/folder do not match the 13 expected: "
    ) as error:
        check_keys(have, want, source="some/folder")
    assert str(error.value).partition(": ")[2].split("; ") == [
        "10 missing: " + ", ".join(f"lost.{i}" for i in range(8)) + ", ...",
        "1 unexpected: extra",
        "2 with a wrong shape: shape is [3, 2], not [2, 3], both is [2, 3], not []",
        (
            "2 with a wrong dtype: dtype is torch.bfloat16, not torch.float32, both is "
            "torch.float32, not torch.int8"
        ),
    ]
