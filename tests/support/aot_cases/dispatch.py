"""Launches of kernels/dispatch.py."""

import torch

from moe_runtime.kernels import dispatch
from tests.support.aot import Case, cases_of, meta, name_of

T = 4096
K = 8


def _cases(step, note: str) -> list[Case]:
    return cases_of(
        step,
        ("R", "blocks", "num_tiles"),
        max_registers=128,
        note=note,
    )


def _sort(E: int, dtype=torch.int32, tokens=T, note: str = "", slots: int = K) -> list[Case]:
    ids = meta(tokens, slots, dtype=dtype)
    note = f"{name_of(dtype)} ids of {E} experts{note}"
    return _cases(lambda: dispatch.dispatch_forward(ids, E), note)


def _maps(E: int, BLOCK_M: int, first_expert: int = 0) -> list[Case]:
    offsets = meta(E + 1)
    args = (offsets, T * K, BLOCK_M, first_expert)
    return _cases(lambda: dispatch.tile_map(*args), f"{E} experts")


CASES = [
    *_sort(128),
    *_sort(128, torch.int64),
    *_sort(64, torch.uint8),
    *_sort(1, slots=1),
    *_sort(128, tokens=16, note=", one block"),
    *_sort(7, torch.int64, tokens=1, note=", one block"),
    *_cases(lambda: dispatch.invert(meta(T * K)), ""),
    *_maps(128, 128),
    *_maps(8, 16, 1),
    *_maps(1, 64),
]
