"""python check.py LIBRARY SEEDS [CHECK ...]: compare csrc/ on the emulator with plain numpy; exit
with 1 and print what differs.

It does not import torch, so that it starts fast, and may crash on what it finds. The seeds
determine the order of the warps and when asynchronous copies arrive.
"""

import ctypes
import os
import sys

import numpy as np

F32, F16, BF16 = range(3)
GATES = ("xft", "nonorm", "topk_softmax", "softmax_topk", "softmax_topk_renorm", "sigmoid_topk")
EPS = {F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}


class Tiles(ctypes.Structure):
    _fields_ = [
        ("map", ctypes.c_void_p),
        ("block_m", ctypes.c_int32),
        ("first_expert", ctypes.c_int32),
    ]


def argument(value):
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data if value.size else None)
    if isinstance(value, (int, np.integer)):
        return ctypes.c_int64(value)
    return value


def allow(arrays) -> None:
    """Let kernels access the bytes of these arrays only."""
    bounds = [number for array in arrays for number in (array.ctypes.data, array.nbytes)]
    LIBRARY.emulator_allow((ctypes.c_uint64 * len(bounds))(*bounds), len(arrays))


def call(name: str, *values, also=()) -> None:
    """Call a launcher. `also` has the arrays that are not among its arguments."""
    allow([value for value in values if isinstance(value, np.ndarray)] + [*also])
    code = getattr(LIBRARY, name)(
        *map(argument, values),
        None,
    )
    assert code == 0, f"{name}: {LIBRARY.moert_error_string(code).decode()}"


def size(name: str, *values) -> int:
    return getattr(LIBRARY, name)(*map(argument, values))


def empty(*shape, dtype=np.int32):
    """Return an array of values far from any correct result, to detect elements that are never
    written.
    """
    if np.issubdtype(dtype, np.integer):
        return np.full(shape, -(2**30), dtype)
    return np.full(shape, np.nan, dtype)


def narrow(x: np.ndarray, dtype: int) -> np.ndarray:
    """Return the bits of `x` in `dtype`."""
    if dtype == BF16:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return x.astype(np.float16 if dtype == F16 else np.float32)


def wide(x: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == BF16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def close(got, want, what: str, bound: float) -> None:
    error = np.linalg.norm(np.float64(got) - want) / max(np.linalg.norm(want), 1e-30)
    assert error <= bound, f"{what}: relative error {error:.3g}; expected at most {bound:.3g}"


def same(got, want, what: str) -> None:
    assert np.array_equal(got, want), f"{what} differs at {np.argwhere(got != want)[:3].tolist()}"


def sort(ids, E: int, K: int):
    key = np.where((ids < 0) | (ids >= E), E, ids)
    row_slot = np.argsort(key, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(key, minlength=E + 1)[:E])])
    return offsets, row_slot // max(K, 1), row_slot, np.argsort(row_slot)


def tile_map(offsets, R: int, block: int, first: int):
    E = len(offsets) - 1
    tiles = []
    for e in range(first, E):
        tiles += [
            (e, row, offsets[e + 1])
            for row in range(
                offsets[e],
                offsets[e + 1],
                block,
            )
        ]
    tiles += [(-1, len(tiles), 0)] * (R // block + min(E, R) - len(tiles))
    return np.array(tiles, np.int32).reshape(-1, 3).T


def plan(
    ids, E: int, K: int, count=None, count_slots: int = 0, blocks=(1, 16, 64), first: int = 0
) -> None:
    R = ids.size
    got = [empty(E + 1), empty(R), empty(R), empty(R)]
    maps = [
        empty(
            3,
            R // block + min(E, R),
        )
        for block in blocks
    ]
    tiles = (Tiles * len(blocks))(
        *(Tiles(m.ctypes.data, block, first) for m, block in zip(maps, blocks))
    )
    workspace = empty(size("moert_route_plan_workspace", R, E) // 4)
    call(
        "moert_route_plan",
        ids,
        ids.itemsize,
        R,
        E,
        K,
        count,
        count_slots,
        *got,
        tiles,
        len(blocks),
        workspace,
        workspace.nbytes,
        also=maps,
    )
    want = sort(ids, E, K)
    for name, a, b in zip(("expert_offsets", "row_token", "row_slot", "slot_row"), got, want):
        same(a, b, f"{name} of {R} slots, {E} experts")
    for again in (False, True):
        if again and R:
            [m.fill(-7) for m in maps]
            call(
                "moert_tile_map",
                got[0],
                R,
                E,
                tiles,
                len(blocks),
                also=maps,
            )
        for block, m in zip(blocks, maps):
            same(
                m,
                tile_map(want[0], R, block, first),
                f"the map of {block} rows, {R} slots, {E} experts",
            )


def check_plan(random) -> None:
    for R, E, K in (
        (0, 3, 2),
        (1, 1, 1),
        (6, 300, 3),
        (111, 8, 3),
        (129, 3, 3),
        (600, 1024, 4),
        (1024, 2, 2),
    ):
        plan(
            random.integers(-1, E + 2, R).astype(np.int32),
            E,
            K,
        )
    plan(np.full(96, 2, np.int32), 5, 3, first=1)
    plan(
        random.integers(-(2**40), 2**40, 64) * 2**32,
        2,
        2,
    )
    plan(random.integers(0, 400, 700), 400, 7, first=3)


def check_plan_together(random) -> None:
    """There are more slots than one block handles: the blocks wait for each other."""
    plan(
        random.integers(-1, 8, 8193).astype(np.int32),
        7,
        3,
        blocks=(128,),
    )
    plan(
        np.sort(random.integers(0, 1024, 8200))[::-1].astype(np.int32),
        1024,
        2,
        blocks=(),
    )


def check_plan_counted(random) -> None:
    """The router has counted the tokens: no block waits."""
    for R, E, slots in ((8400, 9, 24), (8193, 64, 200)):
        ids = random.integers(0, E, R).astype(np.int32)
        count = np.stack(
            [
                np.bincount(
                    ids[s : s + slots],
                    minlength=E,
                )
                for s in range(0, R, slots)
            ]
        ).astype(np.int32)
        plan(
            ids,
            E,
            3,
            count,
            slots,
            blocks=(64,),
            first=1,
        )


def check_plan_alone(random) -> None:
    """The blocks cannot run at the same time: one block does all the work."""
    os.environ["MOERT_EMU_SHARED"] = "1"
    plan(
        random.integers(-1, 8, 8193).astype(np.int32),
        7,
        3,
        blocks=(128,),
    )
    del os.environ["MOERT_EMU_SHARED"]


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def weights(x, idx, gate: str):
    """float64 equations: logits x [T, E] and the routed ids [T, k] give weights [T, k or k + 1]."""
    chosen = np.take_along_axis(x, idx, 1)
    s = np.take_along_axis(softmax(x), idx, 1)
    w = {
        "xft": lambda: softmax(s) * s[:, :1],
        "nonorm": lambda: s,
        "topk_softmax": lambda: softmax(chosen),
        "softmax_topk": lambda: s,
        "softmax_topk_renorm": lambda: softmax(chosen),
        "sigmoid_topk": lambda: 1 / (1 + np.exp(-chosen)),
    }[gate]()
    if gate in GATES[:2]:
        return np.concatenate([w, 1 - s[:, :1]], 1)
    return w


def gradient(x, idx, gate: str, dw):
    """Compute d sum(dw * weights) / dx by central differences."""
    dx = np.empty_like(x)
    h = 1e-5
    for e in range(x.shape[1]):
        step = np.zeros(x.shape[1])
        step[e] = h
        dx[:, e] = (dw * (weights(x + step, idx, gate) - weights(x - step, idx, gate))).sum(1) / (
            2 * h
        )
    return dx


def route(
    random, T: int, E: int, k: int, gate: str, dtype: int, forced: bool, biased: bool = False
) -> None:
    shared = int(gate in GATES[:2])
    stride = E + 3
    bits = narrow(
        random.normal(size=(T, stride)) * 2,
        dtype,
    )
    bits[-1] = bits[-1, 0]  # all logits tie: the lowest ids are chosen
    x = np.float64(wide(bits, dtype))[:, :E]
    bias = None
    choice = x
    if biased:
        bias = np.float32(random.normal(size=E))
        choice = 1 / (1 + np.exp(-x)) + bias
    ids = np.argsort(-choice, axis=1, kind="stable")[:, :k]
    if forced:
        ids = np.argsort(
            random.random((T, E)),
            axis=1,
        )[:, :k]
        ids[0, 1] = ids[0, 0]  # the same expert twice
    K = k + shared
    code = GATES.index(gate)
    want_idx = np.concatenate(
        [ids + shared, np.zeros((T, shared), np.int64)],
        1,
    ).astype(np.int32)
    weight = empty(T, K, dtype=np.float32)
    idx = want_idx.copy() if forced else empty(T, K)
    block = size("moert_route_block_tokens", T, E)
    count = empty(-(-T // block), E + shared)
    call(
        "moert_route_forward",
        bits,
        dtype,
        stride,
        bias,
        T,
        E,
        K,
        code,
        int(forced),
        weight,
        idx,
        count,
    )
    what = f"{gate}, T={T} E={E} k={k} dtype {dtype}"
    same(idx, want_idx, f"ids of {what}")
    close(
        weight,
        weights(x, ids, gate),
        f"weights of {what}",
        2e-6,
    )
    want = [
        np.bincount(
            want_idx[t : t + block].ravel(),
            minlength=E + shared,
        )
        for t in range(0, T, block)
    ]
    same(count, np.array(want), f"counts of {what}")
    dw = np.float32(random.normal(size=(T, K)))
    dx = narrow(empty(T, E, dtype=np.float32), dtype)
    call(
        "moert_route_backward",
        dw,
        F32,
        bits,
        dtype,
        stride,
        idx,
        T,
        E,
        K,
        code,
        int(forced),
        dx,
    )
    close(
        wide(dx, dtype),
        gradient(x, ids, gate, dw),
        f"gradient of {what}",
        max(EPS[dtype], 1e-5),
    )


def check_route(random) -> None:
    for gate in GATES:
        route(random, 37, 7, 5, gate, F32, forced=False)
        route(random, 5, 33, 3, gate, BF16, forced=False)
        route(random, 2, 257, 4, gate, F32, forced=True)
    route(random, 9, 130, 6, "xft", F16, forced=False)
    route(random, 3, 1, 1, "nonorm", F32, forced=False)
    route(random, 9, 8, 2, "sigmoid_topk", F32, forced=False, biased=True)
    route(random, 2, 1024, 8, "softmax_topk", F32, forced=False)


def check_merge(random) -> None:
    for E, P, dtype, skew in (
        (3, 1100, F32, 0),
        (1, 5, F32, 0),
        (8, 2056, BF16, 0),
        (6, 37, F16, 0),
        (5, 48, BF16, 3),
    ):
        stack = narrow(
            random.normal(size=(E, P + 8)),
            dtype,
        )
        weight = stack[:, skew : P + skew]
        alpha = np.float32(random.random(E))
        first = stack.reshape(-1)[skew:]
        total = alpha[0] * wide(weight[0], dtype)
        for e in range(1, E):  # float32, rounded after each addition
            total = total + alpha[e] * wide(weight[e], dtype)
        for out_dtype in (F32, F16, BF16):
            out = narrow(empty(P, dtype=np.float32), out_dtype)
            call(
                "moert_merge_forward",
                first,
                dtype,
                alpha,
                None,
                E,
                P,
                P + 8,
                out,
                out_dtype,
            )
            same(
                out,
                narrow(total, out_dtype),
                f"the merge of {E} x {P}, dtypes {dtype}, {out_dtype}",
            )
        kept = narrow(np.zeros(P, np.float32), dtype)
        call(
            "moert_merge_forward",
            first,
            dtype,
            alpha,
            alpha.copy(),
            E,
            P,
            P + 8,
            kept,
            dtype,
        )
        assert not kept.any(), "an unchanged alpha is merged again"


DALPHA = (
    (3, 8200, F32, F32, 0),
    (33, 3000, BF16, BF16, 1),
    (2, 9000, F16, F32, 0),
    (5, 64, F16, F16, 0),
    (1, 0, F32, F32, 0),
)


def check_dalpha(random) -> None:
    for E, P, dtype, other, skew in DALPHA:
        stack = narrow(
            random.normal(size=(E, P + 8)),
            dtype,
        )
        dout = narrow(random.normal(size=P), other)
        dalpha = empty(E, dtype=np.float32)
        workspace = empty(size("moert_merge_backward_alpha_workspace", E, P) // 4)
        args = (
            dout,
            other,
            stack.reshape(-1)[skew:],
            dtype,
            E,
            P,
            P + 8,
            dalpha,
            workspace,
            workspace.nbytes,
        )
        call("moert_merge_backward_alpha", *args)
        want = np.float64(
            wide(
                stack[:, skew : P + skew],
                dtype,
            )
        ) @ np.float64(wide(dout, other))
        close(dalpha, want, f"dalpha of {E} x {P}", 1e-5)


COMBINE = (
    (5, 3, 33, F32, np.int32),
    (3, 9, 1032, BF16, np.int64),
    (7, 1, 8, F16, np.int32),
    (4, 0, 5, F32, np.int32),
)


def check_combine(random) -> None:
    for T, K, H, dtype, index in COMBINE:
        y, dout = (
            narrow(
                random.normal(size=(n, H)),
                dtype,
            )
            for n in (T * K, T)
        )
        weight = np.float32(random.random((T, K)))
        slot_row = random.permutation(T * K).astype(index)
        rows = np.float64(wide(y, dtype))[slot_row].reshape(
            T,
            K,
            H,
        )
        out = narrow(empty(T, H, dtype=np.float32), dtype)
        what = f"T={T} K={K} H={H} dtype {dtype}"
        for limit in (None, T * K // 2):
            number = None
            live = weight
            if limit is not None:
                number = np.array([limit], np.int32)
                live = np.where(slot_row.reshape(T, K) < limit, weight, 0)
            call(
                "moert_combine_forward",
                y,
                dtype,
                weight,
                slot_row,
                slot_row.itemsize,
                number,
                T,
                K,
                H,
                out,
            )
            close(
                wide(out, dtype), (live[..., None] * rows).sum(1), f"combine of {what}", EPS[dtype]
            )
        dy = narrow(
            empty(T * K, H, dtype=np.float32),
            dtype,
        )
        dweight = empty(T, K, dtype=np.float32)
        call(
            "moert_combine_backward",
            dout,
            y,
            dtype,
            weight,
            slot_row,
            slot_row.itemsize,
            T,
            K,
            H,
            dy,
            dweight,
        )
        wide_dout = wide(dout, dtype)
        want = empty(T * K, H, dtype=np.float32)
        want[slot_row] = (weight[..., None] * wide_dout[:, None]).reshape(
            T * K,
            H,
        )
        same(dy, narrow(want, dtype), f"dy of {what}")
        close(
            dweight,
            (rows * wide_dout[:, None]).sum(2),
            f"dweight of {what}",
            1e-5,
        )


def check_offsets(random) -> None:
    """Access elements beyond 2^31; untouched zeros take no memory."""
    far = 2**31 + 24
    y = np.zeros(far + 8, np.float16)
    y[far:], y[:8] = np.arange(8), 1
    out = empty(2, 8, dtype=np.float16)
    rows = np.array([far // 8, 0], np.int64)
    weight = np.array([2, 3], np.float32)
    call(
        "moert_combine_forward",
        y,
        F16,
        weight,
        rows,
        8,
        None,
        2,
        1,
        8,
        out,
    )
    same(
        out,
        [2 * np.arange(8), [3] * 8],
        "rows far apart",
    )
    merged = empty(8, dtype=np.float32)
    dalpha = empty(2, dtype=np.float32)
    workspace = empty(2)
    call(
        "moert_merge_forward",
        y,
        F16,
        weight,
        None,
        2,
        8,
        far,
        merged,
        F32,
    )
    same(merged, 2 + 3 * np.arange(8), "experts far apart")
    call(
        "moert_merge_backward_alpha",
        merged,
        F32,
        y,
        F16,
        2,
        8,
        far,
        dalpha,
        workspace,
        workspace.nbytes,
    )
    same(
        dalpha,
        [merged.sum(), merged @ np.arange(8)],
        "the gradient of experts far apart",
    )
    weight = empty(2, 2, dtype=np.float32)
    idx = empty(2, 2)
    call(
        "moert_route_forward",
        y,
        F16,
        far,
        None,
        2,
        8,
        2,
        GATES.index("topk_softmax"),
        0,
        weight,
        idx,
        None,
    )
    same(idx, [[0, 1], [7, 6]], "ids of rows far apart")


CHECKS = {name[6:]: f for name, f in list(globals().items()) if name.startswith("check_")}

if __name__ == "__main__":
    path, seeds, *names = sys.argv[1:]
    LIBRARY = ctypes.CDLL(path)
    LIBRARY.moert_error_string.restype = ctypes.c_char_p
    for function in (
        "moert_route_plan_workspace",
        "moert_merge_backward_alpha_workspace",
        "moert_route_block_tokens",
    ):
        getattr(LIBRARY, function).restype = ctypes.c_int64
    for seed in map(int, seeds.split(",")):
        os.environ["MOERT_EMU_SEED"] = str(seed)
        for name in names or CHECKS:
            try:
                CHECKS[name](np.random.default_rng(seed))
            except AssertionError as error:
                sys.exit(f"{name}, with seed {seed}: {error}")
