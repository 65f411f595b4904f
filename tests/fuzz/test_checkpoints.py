"""Model folders with broken weights are read as the safetensors package reads them, or rejected,
and never take more memory than the file.
"""

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save

from moe_runtime.io.checkpoint import INDEX, SINGLE
from tests.fuzz.attempts import Verdict, attempt, run_seeds
from tests.fuzz.mutations import HOSTILE, mutate_bytes, mutate_value, to_json
from tests.support.checkpoints import tensors
from tests.support.stress import scaled

pytestmark = pytest.mark.stress
TENSORS = {
    "model.a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "model.b": torch.arange(6, dtype=torch.bfloat16),
    "model.c": torch.zeros(0, 4),
    "model.d": torch.tensor(7, dtype=torch.int64),
    "model.e": torch.tensor([True, False, True]),
}
FIELDS = ("dtype", "shape", "data_offsets")
SHARDS = {
    "model-00001-of-00002.safetensors": ("model.a", "model.b"),
    "model-00002-of-00002.safetensors": None,
}


def parts(data: bytes) -> tuple[dict, bytes]:
    """Return the header of a file and the bytes of its tensors."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: bytes, body: bytes, length: int | None = None) -> bytes:
    """Return a file made of a header and the tensors' bytes; `length` replaces the header's
    length.
    """
    if length is None:
        length = len(header)
    return length.to_bytes(8, "little") + header + body


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors are the same, with NaN equal to NaN."""

    def described(tensor):
        return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist()

    return {key: described(t) for key, t in a.items()} == {
        key: described(t) for key, t in b.items()
    }


def plain(data: bytes) -> bytes:
    """Return a file without the fields that do not describe a tensor; they may hold a NaN, which
    safetensors cannot parse.
    """
    header, body = parts(data)
    header = {k: v if k == "__metadata__" else {n: v[n] for n in FIELDS} for k, v in header.items()}
    return joined(json.dumps(header).encode(), body)


def compare(folder: Path, data: bytes) -> Verdict:
    """Write a single file, read it, and compare the result with that of the safetensors package."""
    (folder / SINGLE).write_bytes(data)
    verdict = attempt(lambda: tensors(folder), SINGLE)
    if verdict.is_read:
        try:
            theirs = load_bytes(plain(data))
        except SafetensorError as error:
            raise AssertionError(f"read, but safetensors rejects it: {error}") from error
        assert same(verdict.value, theirs), "read differently from safetensors"
    return verdict


def test_mutated_files(tmp_path):
    data = save(TENSORS, metadata={"format": "pt"})
    refused = []
    header, body = parts(data)

    def case(rng: random.Random) -> None:
        kind = rng.random()
        if kind < 0.45:
            changed = joined(to_json(rng, mutate_value(rng, header)), body)
        elif kind < 0.55:
            length = rng.choice(
                (0, 1, 7, len(data), 2**31, 2**63, 2**64 - 1, 99_999_999, 100_000_001)
            )
            changed = joined(json.dumps(header).encode(), body, length)
        else:
            changed = mutate_bytes(rng, data)
        refused.append(not compare(tmp_path, changed).is_read)

    run_seeds(scaled(400, 4000), case)

    assert sum(refused) > 200  # most damage is detected


def test_every_truncation(tmp_path):
    data = save(TENSORS, metadata={"format": "pt"})
    assert compare(tmp_path, data).is_read
    for end in range(0, len(data), scaled(7, 1)):
        assert not compare(tmp_path, data[:end]).is_read, end


SHAPES = [
    [2**40],
    [2**31, 2**31],
    [2**62, 4],
    [10**400],
    [2**32, 2**32, 0],
    [0] * 5000,
    [2**62] * 40_000,
    [2**62] * 40_000 + [0],
]


@pytest.mark.parametrize(
    "shape",
    SHAPES,
    ids=lambda shape: f"{len(shape)} of {str(shape[0])[:20]}",
)
def test_shapes_beyond_the_file_take_no_memory_and_no_time(tmp_path, shape):
    size = 0 if 0 in shape else 2**42
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}
    begin = time.process_time()
    compare(tmp_path, joined(json.dumps(header).encode(), b""))

    assert time.process_time() - begin < 2


def write_shards(folder: Path) -> dict:
    """Write TENSORS as two shards with an index; return the index."""
    folder.mkdir()
    index = {"metadata": {"total_size": 1}, "weight_map": {}}
    first, second = SHARDS
    for shard, keys in ((first, SHARDS[first]), (second, TENSORS.keys() - set(SHARDS[first]))):
        (folder / shard).write_bytes(save({key: TENSORS[key] for key in keys}))
        index["weight_map"] |= dict.fromkeys(keys, shard)
    (folder / INDEX).write_text(json.dumps(index))
    return index


def test_mutated_indexes(tmp_path):
    folder = tmp_path / "model"
    outside = tmp_path / "outside.safetensors"
    index = write_shards(folder)
    outside.write_bytes(save({"model.a": TENSORS["model.a"] + 1}))
    names = [
        *SHARDS,
        "../outside.safetensors",
        str(outside),
        "missing.safetensors",
        "a\0.safetensors",
        ".safetensors",
    ]

    def case(rng: random.Random) -> None:
        changed = mutate_value(rng, index)
        if rng.random() < 0.5:
            changed = json.loads(json.dumps(index))
            changed["weight_map"][rng.choice([*TENSORS, "model.x", ""])] = rng.choice(
                [*names, *HOSTILE]
            )
        (folder / INDEX).write_bytes(to_json(rng, changed))
        verdict = attempt(lambda: tensors(folder), INDEX, folder.name)
        if verdict.is_read:  # then the index matches the contents of the shards that it names
            named = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
            held = {}
            for key, tensor in TENSORS.items():
                if index["weight_map"][key] in named:
                    held[key] = tensor
            assert held and same(verdict.value, held), "read tensors that differ from the shards"

    run_seeds(scaled(300, 2000), case)


@pytest.mark.parametrize("target", ["shard", "index", "single"])
@pytest.mark.parametrize(
    "kind",
    ["folder", "empty", "missing", "loop", "fifo", "swapped"],
)
def test_what_stands_in_place_of_a_file(tmp_path, target, kind):
    folder = tmp_path / "model"
    write_shards(folder)
    if target == "single":
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / SINGLE).write_bytes(save(TENSORS))
    file = folder / {"shard": next(iter(SHARDS)), "index": INDEX, "single": SINGLE}[target]
    other = folder / list(SHARDS)[1]
    data = other.read_bytes() if target == "shard" else b"[]"
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind != "missing":
        file.write_bytes(b"" if kind == "empty" else data)
    verdict = attempt(lambda: tensors(folder), folder.name)

    assert not verdict.is_read
