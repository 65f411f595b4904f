"""Bytes of Python's standard library as token ids: text for the examples, without a download."""

import inspect
from types import ModuleType

import torch


def batches(module: ModuleType, count: int, rows: int = 8, length: int = 128) -> list[torch.Tensor]:
    """Return `count` batches [rows, length] of a module's source, one id per byte."""
    ids = torch.frombuffer(bytearray(inspect.getsource(module).encode()), dtype=torch.uint8).long()
    ids = ids.repeat(1 + count * rows * length // len(ids))
    return list(ids[: count * rows * length].view(count, rows, length))
