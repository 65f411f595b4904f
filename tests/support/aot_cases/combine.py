"""Launches of kernels/combine.py."""

import torch

from moe_runtime.kernels import combine
from tests.support.aot import Case, cases_of, meta, name_of

T = 4096
BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32


def _cases(step, note: str, H: int = 0, max_registers: int = 128) -> list[Case]:
    expect = ("wide",) if H and H % 16 == 0 else ()
    loose = ("T", "R", "n", "programs")
    return cases_of(
        step,
        loose,
        expect=expect,
        max_registers=max_registers,
        note=note,
    )


def _layer(
    dtype=BF16, K: int = 8, H: int = 4096, partials: int | None = 11, note: str = ""
) -> list[Case]:
    """As launched by `ops.moe_mlp_triton`, with a bound on the rows."""
    y = meta(T * K, H, dtype=dtype)
    weight = meta(T, K, dtype=FP32)
    slot_row = meta(T * K)
    num_rows = meta(1)
    partial = None if partials is None else meta(T * K, partials, dtype=FP32)

    def step():
        combine.combine_forward(y, weight, slot_row, num_rows)
        combine.sum_rows(y, slot_row, partial, T, K, num_rows)

    return _cases(step, f"{name_of(dtype)} H={H} K={K}{note}", H)


def _op(dtype=BF16, K: int = 8, H: int = 4096, index=torch.int32) -> list[Case]:
    """As launched by `ops.combine`."""
    y = meta(T * K, H, dtype=dtype)
    weight = meta(T, K, dtype=FP32)
    slot_row = meta(T * K, dtype=index)

    def step():
        combine.combine_forward(y, weight, slot_row)
        combine.combine_backward(meta(T, H, dtype=dtype), y, weight, slot_row)

    return _cases(
        step,
        f"{name_of(dtype)} H={H} K={K} {name_of(index)} rows",
        H,
    )


def _weights(partials: int) -> list[Case]:
    def step():
        combine.sum_rows(
            None,
            meta(T * 8),
            meta(T * 8, partials, dtype=FP32),
            T,
            8,
            meta(1),
        )

    return _cases(step, f"the weights' gradient alone, {partials} partials")


def _router(dtype=BF16, H: int = 4096, N: int = 7) -> list[Case]:
    """The gradient of the layer and of the router in one sum."""
    rows = meta(T * 6, H, dtype=dtype)
    dlogits = meta(T, N, dtype=dtype)
    weight = meta(N, H, dtype=dtype)

    def step():
        combine.sum_rows_and_router(
            rows,
            meta(T * 6),
            T,
            6,
            meta(1),
            dlogits,
            weight,
        )

    return _cases(step, f"{name_of(dtype)} H={H} N={N}", H, max_registers=255)


CASES = [
    *_layer(),
    *_layer(FP16),
    *_layer(FP32),
    *_layer(K=1, H=2048),
    *_layer(K=6, H=2048),
    *_layer(K=10, H=2048),
    *_layer(K=64, H=2048),
    *_layer(K=2, H=64, note=", several tokens a program"),
    *_layer(K=2, H=33),
    *_layer(partials=None, note=", dx alone"),
    *_weights(64),
    *_op(),
    *_op(FP32),
    *_op(index=torch.int64),
    *_op(K=3, H=33),
    *_router(),
    *_router(FP32),
    *_router(N=128),
    *_router(H=33),
]
