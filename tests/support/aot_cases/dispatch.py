"""Launches of kernels/dispatch.py."""

import torch

from moe_runtime.kernels import dispatch
from tests.support.aot import Case, record

T = 4096
K = 8
LOOSE = ("R", "blocks", "num_tiles")  # not specialised


def meta(*shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _finish(cases: list[Case], note: str) -> list[Case]:
    loose = [{name: "i32" for name in LOOSE if name in case.signature} for case in cases]
    return [
        case._replace(signature=case.signature | types, max_registers=128, note=note)
        for case, types in zip(cases, loose)
    ]


def _sort(E: int, dtype=torch.int32, tokens=T, note: str = "", slots: int = K) -> list[Case]:
    cases = record(lambda: dispatch.dispatch_forward(meta(tokens, slots, dtype=dtype), E))
    return _finish(cases, f"{str(dtype).removeprefix('torch.')} ids of {E} experts{note}")


def _maps(E: int, BLOCK_M: int, first_expert: int = 0) -> list[Case]:
    return _finish(
        record(lambda: dispatch.tile_map(meta(E + 1), T * K, BLOCK_M, first_expert)), f"{E} experts"
    )


CASES = [
    *_sort(128),
    *_sort(128, torch.int64),
    *_sort(64, torch.uint8),
    *_sort(1, slots=1),
    *_sort(128, tokens=16, note=", one block"),
    *_sort(7, torch.int64, tokens=1, note=", one block"),
    *_finish(record(lambda: dispatch.invert(meta(T * K))), ""),
    *_maps(128, 128),
    *_maps(8, 16, 1),
    *_maps(1, 64),
]
