"""Launches of kernels/decode.py."""

import torch

from moe_runtime.kernels import decode
from moe_runtime.kernels.tiles import Tile
from tests.support.aot import Case, cases_of, meta, name_of

BF16 = torch.bfloat16
FP32 = torch.float32
LOOSE = ("T", "R", "num_tiles", "num_m")
# (tokens, experts) -> bytes that ptxas is known to keep on the stack, by Triton version
SPILLS = {
    (16, 64): {"3.6": 8, "3.7": 0, "3.9": 0},
    (64, 128): {"3.6": 0, "3.7": 0, "3.9": 24},
}


def _plan(T: int, E: int, K: int, gate: str = "softmax_topk_renorm", dtype=BF16) -> list[Case]:
    shared = int(gate == "xft")
    logits = meta(T, E - shared, dtype=dtype)
    routing = {"logits": logits, "top_k": K, "gate": gate, "shared": shared}
    return cases_of(
        lambda: decode.plan_forward(None, E, 16, **routing),
        LOOSE,
        note=f"{T} tokens, {E} experts, K={K}, {gate}",
        stack=SPILLS.get((T, E), {}),
    )


def _down(T: int, K: int, dtype=BF16, bias: bool = False) -> list[Case]:
    H = 2048
    I = 768
    E = 128
    plan = decode.Plan(meta(E + 1), meta(T * K), meta(T * K), meta(3, T * K))
    h = meta(T * K, I, dtype=dtype)
    down = meta(E, H, I, dtype=dtype)
    b = meta(E, H, dtype=dtype) if bias else None
    weight = meta(T, K, dtype=FP32)
    tile = Tile(16, 128, 64, 4, 4)
    return cases_of(
        lambda: decode.down_combine_forward(h, down, b, weight, plan, tile),
        LOOSE,
        note=f"{name_of(dtype)} K={K}" + ", bias" * bias,
        expect=("mma.sync",) if dtype == BF16 else (),
    )


CASES = [
    *_plan(64, 128, 8),
    *_plan(1, 8, 2),
    *_plan(64, 8, 6, "xft"),
    *_plan(16, 64, 8, dtype=FP32),
    *cases_of(
        lambda: decode.plan_forward(meta(64, 8, dtype=torch.int64), 128, 16),
        LOOSE,
        note="int64 ids that are given",
    ),
    *_down(16, 8),
    *_down(8, 6, bias=True),
    *_down(16, 8, torch.float16),
    *_down(16, 8, FP32),
]
