"""Launches of kernels/decode.py."""

import torch

from moe_runtime.kernels import decode
from moe_runtime.kernels.tiles import Tile
from tests.support.aot import Case, record

BF16 = torch.bfloat16
FP32 = torch.float32
LOOSE = ("T", "R", "num_tiles", "num_m")  # not specialised


def meta(*shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _finish(cases: list[Case], note: str, **fields) -> list[Case]:
    loose = [{name: "i32" for name in LOOSE if name in case.signature} for case in cases]
    return [
        case._replace(signature=case.signature | types, note=note, **fields)
        for case, types in zip(cases, loose)
    ]


# (tokens, experts) -> bytes that ptxas is known to keep on the stack, by Triton's version
SPILLS = {(16, 64): {"3.6": 8, "3.7": 0, "3.9": 0}, (64, 128): {"3.6": 0, "3.7": 0, "3.9": 24}}


def _plan(T: int, E: int, K: int, gate: str = "softmax_topk_renorm", dtype=BF16) -> list[Case]:
    shared = int(gate == "xft")
    logits = meta(T, E - shared, dtype=dtype)
    cases = record(
        lambda: decode.plan_forward(None, E, 16, logits=logits, top_k=K, gate=gate, shared=shared)
    )
    return _finish(cases, f"{T} tokens, {E} experts, K={K}, {gate}", stack=SPILLS.get((T, E), {}))


def _down(
    T: int, K: int, dtype=BF16, bias: bool = False, H: int = 2048, I: int = 768, E: int = 128
) -> list[Case]:
    plan = decode.Plan(meta(E + 1), meta(T * K), meta(T * K), meta(3, T * K))
    h = meta(T * K, I, dtype=dtype)
    down = meta(E, H, I, dtype=dtype)
    b = meta(E, H, dtype=dtype) if bias else None
    tile = Tile(16, 128, 64, 4, 4)
    cases = record(
        lambda: decode.down_combine_forward(h, down, b, meta(T, K, dtype=FP32), plan, tile)
    )
    note = f"{str(dtype).removeprefix('torch.')} K={K}" + ", bias" * bias
    return _finish(cases, note, expect=("mma.sync",) if dtype == BF16 else ())


CASES = [
    *_plan(64, 128, 8),
    *_plan(1, 8, 2),
    *_plan(64, 8, 6, "xft"),
    *_plan(16, 64, 8, dtype=FP32),
    *_finish(
        record(lambda: decode.plan_forward(meta(64, 8, dtype=torch.int64), 128, 16)),
        "int64 ids that are given",
    ),
    *_down(16, 8),
    *_down(8, 6, bias=True),
    *_down(16, 8, torch.float16),
    *_down(16, 8, FP32),
]
