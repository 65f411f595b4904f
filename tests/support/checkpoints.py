"""Folders of safetensors to test readers and writers with: random tensors, handwritten files, the
contents of a folder.
"""

import hashlib
import json
import os
import struct
from pathlib import Path

import pytest
import torch

from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter

ROOT = Path(__file__).parents[2]
# for a file's pytestmark: a shard that is left open fails the test
NOTHING_STAYS_OPEN = [
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits, including NaN; bools are 0 or 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    bits = torch.randint(
        0, high, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return bits.view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(tensor: torch.Tensor, want: torch.Tensor) -> None:
    assert (tensor.shape, tensor.dtype) == (want.shape, want.dtype)
    assert raw(tensor) == raw(want)


def ten_tensors() -> dict[str, torch.Tensor]:
    """Ten tensors of 400 bytes."""
    values = {}
    for i in range(10):
        values[f"layers.{i}.weight"] = random_tensor(torch.float32, 4, 25, seed=i)
    return values


def write(
    folder: Path, tensors: dict[str, torch.Tensor], max_shard_size: int = 10**9, **options
) -> Path:
    with CheckpointWriter(folder, max_shard_size, **options) as writer:
        for key, tensor in tensors.items():
            writer.add(key, tensor)
    return folder


def raw_file(
    path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None
) -> None:
    """Write a safetensors file by hand, with any kind of damage."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(
        struct.pack(
            "<Q",
            len(text) if length is None else length,
        )
        + text
        + data
    )


def snapshot(folder: Path) -> dict[str, str]:
    values = {}
    for f in folder.rglob("*"):
        if f.is_file():
            values[str(f.relative_to(folder))] = hashlib.sha256(f.read_bytes()).hexdigest()
    return values


def siblings(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.parent.iterdir() if file != folder)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    with Checkpoint(folder) as checkpoint:
        return {key: checkpoint.get(key) for key in checkpoint.keys()}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Fail unless both have the same names, dtypes and bits."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name
