"""Launches of kernels/combine.py."""

from tests.support.aot import Case

SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


def _tile(dtype: str, H: int) -> tuple[int, int]:
    width = 2048 // SIZE[dtype]
    columns = min(width, H)
    return width // columns, columns


def _forward(dtype: str, K: int, H: int, index: str = "i32", num_rows: bool = True) -> Case:
    signature = {
        "y_ptr": f"*{dtype}:16", "weight_ptr": "*fp32:16", "slot_row_ptr": f"*{index}:16", "num_rows_ptr": "*i32",
        "out_ptr": f"*{dtype}:16", "T": "i32", "H": "i32:16",
    }  # fmt: skip
    BLOCK_T, BLOCK_H = _tile(dtype, H)
    constants = {"K": K, "UNROLL": min(K, 8), "BLOCK_T": BLOCK_T, "BLOCK_H": BLOCK_H}
    if not num_rows:
        del signature["num_rows_ptr"]
        constants["num_rows_ptr"] = None
    return Case("combine._combine_fwd_kernel", signature, constants, expect=("wide",), max_registers=128)


def _backward(dtype: str, H: int) -> Case:
    signature = {f"{name}_ptr": f"*{dtype}:16" for name in ("dout", "y", "dy")}
    signature |= {f"{name}_ptr": "*fp32:16" for name in ("weight", "dweight")}
    signature |= {"slot_row_ptr": "*i32:16", "R": "i32", "H": "i32:16", "K": "i32"}
    BLOCK_S, BLOCK_H = _tile(dtype, H)
    constants = {"BLOCK_S": BLOCK_S, "BLOCK_H": BLOCK_H}
    return Case("combine._combine_bwd_kernel", signature, constants, expect=("wide",), max_registers=128)


def _sum_rows(dtype: str, K: int, H: int, dy: bool = True, partial: bool = True) -> Case:
    signature = {"slot_row_ptr": "*i32:16", "num_rows_ptr": "*i32", "T": "i32", "R": "i32"}
    signature |= {"dy_ptr": f"*{dtype}:16", "dx_ptr": f"*{dtype}:16", "H": "i32:16"} if dy else {"H": "i32"}
    signature |= {"partial_ptr": "*fp32:16", "dweight_ptr": "*fp32:16"} if partial else {}
    signature |= {"n": "i32", "programs": "i32"}
    none = {name: None for name in ("dy_ptr", "dx_ptr", "partial_ptr", "dweight_ptr") if name not in signature}
    BLOCK_T, BLOCK_H = _tile(dtype, H) if dy else (1, 1)
    constants = {"K": K, "UNROLL": min(K, 8), "BLOCK_T": BLOCK_T, "BLOCK_H": BLOCK_H, "BLOCK_S": 32, "BLOCK_N": 16}
    wide = ("wide",) if dy else ()
    return Case("combine._sum_rows_kernel", signature, constants | none, expect=wide, max_registers=128)


CASES = [
    *(_forward(dtype, 8, 4096) for dtype in SIZE),
    *(_forward("bf16", K, 2048) for K in (1, 2, 6, 10, 64)),
    _forward("bf16", 2, 64),  # short rows: several tokens a program
    _forward("bf16", 8, 4096, "i64", num_rows=False),  # the public op
    *(_backward(dtype, 4096) for dtype in SIZE),
    _backward("bf16", 64),
    *(_sum_rows(dtype, 8, 4096) for dtype in SIZE),
    _sum_rows("bf16", 2, 64),
    _sum_rows("bf16", 8, 4096, partial=False),
    _sum_rows("bf16", 8, 4096, dy=False),
]
