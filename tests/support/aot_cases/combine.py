"""Launches of kernels/combine.py."""

import torch

from moe_runtime.kernels import combine
from tests.support.aot import Case, record

T = 4096
BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
LOOSE = ("T", "R", "n", "programs")  # not specialised


def meta(*shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _finish(cases: list[Case], wide: bool, note: str) -> list[Case]:
    loose = [{name: "i32" for name in LOOSE if name in case.signature} for case in cases]
    expect = ("wide",) if wide else ()
    return [
        case._replace(signature=case.signature | types, expect=expect, max_registers=128, note=note)
        for case, types in zip(cases, loose)
    ]


def _layer(
    dtype=BF16, K: int = 8, H: int = 4096, partials: int | None = 11, note: str = ""
) -> list[Case]:
    """As `ops.moe_mlp_triton` launches them: with a bound on the rows."""
    y = meta(T * K, H, dtype=dtype)
    weight = meta(T, K, dtype=FP32)
    slot_row = meta(T * K)
    num_rows = meta(1)
    partial = None if partials is None else meta(T * K, partials, dtype=FP32)

    def step():
        combine.combine_forward(y, weight, slot_row, num_rows)
        combine.sum_rows(y, slot_row, partial, T, K, num_rows)

    return _finish(
        record(step), H % 16 == 0, f"{str(dtype).removeprefix('torch.')} H={H} K={K}{note}"
    )


def _op(dtype=BF16, K: int = 8, H: int = 4096, index=torch.int32) -> list[Case]:
    """As `ops.combine` launches them."""
    y = meta(T * K, H, dtype=dtype)
    weight = meta(T, K, dtype=FP32)
    slot_row = meta(T * K, dtype=index)
    dout = meta(T, H, dtype=dtype)

    def step():
        combine.combine_forward(y, weight, slot_row)
        combine.combine_backward(dout, y, weight, slot_row)

    names = [str(d).removeprefix("torch.") for d in (dtype, index)]
    return _finish(record(step), H % 16 == 0, f"{names[0]} H={H} K={K} {names[1]} rows")


def _weights(partials: int) -> list[Case]:
    def step():
        combine.sum_rows(None, meta(T * 8), meta(T * 8, partials, dtype=FP32), T, 8, meta(1))

    return _finish(record(step), False, f"the weights' gradient alone, {partials} partials")


def _router(dtype=BF16, H: int = 4096, N: int = 7) -> list[Case]:
    """The layer's gradient with the router's in one sum."""
    rows = meta(T * 6, H, dtype=dtype)
    slot_row = meta(T * 6)
    dlogits = meta(T, N, dtype=dtype)
    weight = meta(N, H, dtype=dtype)

    def step():
        combine.sum_rows_and_router(rows, slot_row, T, 6, meta(1), dlogits, weight)

    cases = _finish(record(step), H % 16 == 0, f"{str(dtype).removeprefix('torch.')} H={H} N={N}")
    return [case._replace(max_registers=255) for case in cases]


CASES = [
    *(case for dtype in (BF16, FP16, FP32) for case in _layer(dtype)),
    *(case for K in (1, 6, 10, 64) for case in _layer(K=K, H=2048)),
    *_layer(K=2, H=64, note=", several tokens a program"),
    *_layer(K=2, H=33),
    *_layer(partials=None, note=", dx alone"),
    *_weights(64),
    *(case for dtype in (BF16, FP32) for case in _op(dtype)),
    *_op(index=torch.int64),
    *_op(K=3, H=33),
    *_router(),
    *_router(FP32),
    *_router(N=128),
    *_router(H=33),
]
