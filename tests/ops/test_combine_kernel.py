"""The kernels that sum a token's rows: rows that nobody wrote, partial gradients, order of the sum,
offsets, mutants.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from triton.runtime.errors import InterpreterError

from moe_runtime import backends
from moe_runtime.kernels import combine as kernels
from moe_runtime.ops.combine import combine
from moe_runtime.ops.dispatch import dispatch
from tests.support.interp_san import KernelMemoryError
from tests.support.mutants import edited, noting
from tests.support.oracle import choose_experts, mismatches

WHY = backends.why_not(
    "triton", "combine", torch.device("cuda" if torch.cuda.is_available() else "cpu")
)
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")

SHAPES = [  # T, K, H
    pytest.param(1, 2, 33, id="one token"),
    pytest.param(29, 3, 33, id="ragged T, H=33"),
    pytest.param(5, 1, 17, id="K = 1"),
    pytest.param(9, 6, 128, id="XFT: 6 slots"),
    pytest.param(3, 9, 1030, id="H and K beyond a block"),
    pytest.param(2, 40, 24, id="many slots"),
]


def make(T, K, H, dtype, routing, device, E=4):
    """y [R, H] and weights [T, K] with NaN where nobody may look, slot_row, num_rows [1], and which
    slots count [T, K].
    """
    idx = choose_experts(T, max(E, K), K, routing)
    d = dispatch(idx, max(E, K))
    num_rows = d.expert_offsets[-1:]
    live = d.slot_row.view(T, K) < num_rows
    y = torch.randn(T * K, H).to(dtype)
    weight = torch.rand(T, K).masked_fill(~live, NAN)
    y[int(num_rows) :] = NAN
    return (
        y.to(device),
        weight.to(device),
        d.slot_row.to(device),
        d.expert_offsets.to(device)[-1:],
        live.to(device),
    )


def sums(y, weight, slot_row, live) -> torch.Tensor:
    """out[t] = sum_k weight[t, k] y[slot_row[t, k]] over the slots that count, in float64."""
    rows = torch.where(live[..., None], y[slot_row.view(live.shape).long()].double(), 0)
    return (torch.where(live, weight, 0).double()[..., None] * rows).sum(1)


def parts(partial, slot_row, live) -> torch.Tensor:
    """dweight[t, k] = sum_n partial[slot_row[t, k], n], 0 for a slot that does not count, in
    float64.
    """
    return torch.where(live, partial[slot_row.view(live.shape).long()].double().sum(-1), 0)


def forward_mismatches(T, K, H, dtype, routing, bound, device, module=kernels) -> list[str]:
    y, weight, slot_row, num_rows, live = make(T, K, H, dtype, routing, device)
    got = module.combine_forward(y, weight, slot_row, num_rows)
    want = sums(y, weight, slot_row, live)
    return mismatches({"out": got}, {"out": want}, bound) + [f"out is {got.dtype}"] * (
        got.dtype != dtype
    )


def sum_rows_mismatches(T, K, H, n, dtype, routing, bound, device, module=kernels) -> list[str]:
    dy, _, slot_row, num_rows, live = make(T, K, H, dtype, routing, device)
    partial = torch.randn(T * K, n, device=device)
    partial[int(num_rows) :] = NAN
    dx, dweight = module.sum_rows(dy, slot_row, partial, T, K, num_rows)
    want = {
        "dx": sums(dy, torch.ones(T, K, device=device), slot_row, live),
        "dweight": parts(partial, slot_row, live),
    }
    types = [
        f"{t.dtype}" for t, wanted in ((dx, dtype), (dweight, torch.float32)) if t.dtype != wanted
    ]
    return mismatches({"dx": dx, "dweight": dweight}, want, bound) + types


def backward_mismatches(T, K, H, dtype, bound, device, module=kernels) -> list[str]:
    y = torch.randn(T * K, H, device=device).to(dtype)
    weight = torch.rand(T, K, device=device)
    dout = torch.randn(T, H, device=device).to(dtype)
    slot_row = torch.randperm(T * K, device=device).int()
    dy, dweight = module.combine_backward(dout, y, weight, slot_row)
    rows = slot_row.view(T, K).long()
    want_dy = torch.zeros(T * K, H, dtype=torch.float64, device=device)
    want_dy[rows] = weight.double()[..., None] * dout.double()[:, None]
    want = {"dy": want_dy, "dweight": (y[rows].double() * dout.double()[:, None]).sum(-1)}
    return mismatches({"dy": dy, "dweight": dweight}, want, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ["random", "dropped"])
@pytest.mark.parametrize("T, K, H", SHAPES)
def test_forward_never_looks_at_dropped_rows(T, K, H, routing, dtype, tolerance, device):
    assert not forward_mismatches(T, K, H, dtype, routing, tolerance[dtype], device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ["random", "dropped"])
@pytest.mark.parametrize("T, K, H", SHAPES)
def test_sum_rows_never_looks_at_dropped_rows(T, K, H, routing, dtype, tolerance, device):
    assert not sum_rows_mismatches(T, K, H, 5, dtype, routing, tolerance[dtype], device)


@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 70])
def test_any_number_of_partials(n, tolerance, device):
    assert not sum_rows_mismatches(
        19, 3, 8, n, torch.float32, "dropped", tolerance[torch.float32], device
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, K, H", SHAPES)
def test_backward(T, K, H, dtype, tolerance, device):
    assert not backward_mismatches(T, K, H, dtype, tolerance[dtype], device)


@pytest.mark.parametrize("num_rows", [0, None], ids=["all dropped", "no bound"])
def test_all_rows_or_none(num_rows, device):
    y = torch.randn(12, 5, device=device)
    slot_row = torch.randperm(12, device=device).int()
    bound = None if num_rows is None else torch.tensor([num_rows], dtype=torch.int32, device=device)
    out = kernels.combine_forward(y, torch.ones(4, 3, device=device), slot_row, bound)
    dx, dweight = kernels.sum_rows(y, slot_row, y, 4, 3, bound)
    if num_rows == 0:
        assert not out.any() and not dx.any() and not dweight.any()
    else:
        live = torch.ones(4, 3, dtype=torch.bool, device=device)
        want = {"out": sums(y, live, slot_row, live), "dx": sums(y, live, slot_row, live)}
        want["dweight"] = parts(y, slot_row, live)
        assert not mismatches({"out": out, "dx": dx, "dweight": dweight}, want, 1e-6)


def test_each_half_of_sum_rows_alone(device):
    dy, _, slot_row, num_rows, _ = make(29, 3, 33, torch.bfloat16, "dropped", device)
    partial = torch.randn(87, 7, device=device)
    dx, dweight = kernels.sum_rows(dy, slot_row, partial, 29, 3, num_rows)
    only_dx, none = kernels.sum_rows(dy, slot_row, None, 29, 3, num_rows)
    assert none is None and torch.equal(only_dx, dx)
    none, only_dweight = kernels.sum_rows(None, slot_row, partial, 29, 3, num_rows)
    assert none is None and torch.equal(only_dweight, dweight)
    assert kernels.sum_rows(None, slot_row, None, 29, 3, num_rows) == (None, None)


@pytest.mark.parametrize("T, K", [(0, 3), (4, 0), (0, 0)])
def test_nothing_to_sum(T, K, device):
    y = torch.randn(0, 5, device=device)
    slot_row = torch.zeros(0, dtype=torch.int32, device=device)
    dx, dweight = kernels.sum_rows(
        y, slot_row, torch.randn(0, 3, device=device), T, K, slot_row.new_zeros(1)
    )
    assert dx.shape == (T, 5) and not dx.any() and dweight.shape == (T, K)
    assert not kernels.combine_forward(y, torch.zeros(T, K, device=device), slot_row).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, K, H", SHAPES)
def test_slots_are_added_in_their_order(T, K, H, dtype, device):
    """Bit for bit: another order of a token's slots would round elsewhere."""
    dy, _, slot_row, num_rows, live = make(T, K, H, dtype, "dropped", device)
    rows = torch.where(live[..., None], dy[slot_row.view(T, K).long()].float(), 0)
    want = torch.zeros(T, H, device=device)
    for k in range(K):
        want += rows[:, k]
    assert torch.equal(kernels.sum_rows(dy, slot_row, None, T, K, num_rows)[0], want.to(dtype))


def test_layouts(device):
    y, weight, slot_row, num_rows, _ = make(11, 3, 24, torch.bfloat16, "dropped", device)
    partial = torch.randn(33, 4, device=device)

    def results(rows):
        out = kernels.combine_forward(y, weight, rows, num_rows)
        return out, *kernels.sum_rows(y, rows, partial, 11, 3, num_rows)

    want = results(slot_row)
    y, weight, partial = (t.t().contiguous().t() for t in (y, weight, partial))
    for rows in (slot_row.view(11, 3), slot_row.view(11, 3).t().contiguous().t(), slot_row.long()):
        got = results(rows)
        assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_runs_give_the_same_bits(device):
    y, weight, slot_row, num_rows, _ = make(32, 3, 33, torch.bfloat16, "dropped", device)
    partial = torch.randn(96, 37, device=device)
    dout = torch.randn(32, 33, device=device).bfloat16()

    def results():
        return (
            kernels.combine_forward(y, weight, slot_row, num_rows),
            *kernels.sum_rows(y, slot_row, partial, 32, 3, num_rows),
            *kernels.combine_backward(dout, y.nan_to_num(), weight.nan_to_num(), slot_row),
        )

    first = results()
    for _ in range(3 if backends.interpreted() else 20):
        assert all(torch.equal(a, b) for a, b in zip(results(), first))


def test_gradients_through_the_op(device):
    y = torch.randn(12, 5, device=device)
    weight = torch.rand(4, 3, device=device)
    slot_row = torch.randperm(12, device=device)
    leaves = [t.requires_grad_() for t in (y, weight)]
    grads = [
        torch.autograd.grad(combine(*leaves, slot_row, b).square().sum(), leaves)
        for b in ("triton", "torch")
    ]
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want)


def sparse(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in a file that has no pages but those that are written."""
    if not backends.interpreted():
        pytest.skip("on a GPU the elements would have to be there")
    numbers = {torch.float32: np.float32, torch.float16: np.float16}[dtype]
    return torch.from_numpy(
        np.memmap(folder / f"{len(list(folder.iterdir()))}.sparse", numbers, "w+", shape=shape)
    )


def far_mismatches(folder: Path, H: int, module=kernels) -> list[str]:
    """Rows around element 2^31 of y, dy and partial, the last one 100 rows behind."""
    edge = 2**31 // H
    rows = torch.tensor([[0, edge - 1], [edge, edge + 1], [edge + 100, 1]], dtype=torch.int32)
    slots = rows.long().view(-1)
    live = torch.ones(3, 2, dtype=torch.bool)
    bound = torch.tensor([edge + 101]).int()
    weight = torch.arange(1.0, 7).view(3, 2)
    dout = torch.randn(3, H).half()
    y, dy = (sparse(folder, (edge + 101, H), torch.float16) for _ in range(2))
    partial = sparse(folder, (edge + 101, H), torch.float32)
    dweight = torch.empty(6)
    y[slots], partial[slots] = torch.randn(6, H).half(), torch.randn(6, H)
    try:
        got = {"out": module.combine_forward(y, weight, rows, bound)}
        got["dx"], got["partials"] = module.sum_rows(y, rows, partial, 3, 2)
        # a launcher would make a program for every row of y; six slots are enough
        module._combine_bwd_kernel[(1,)](
            dout, y, weight, rows, dy, dweight, 6, H, 2, BLOCK_S=8, BLOCK_H=64
        )
    except (KernelMemoryError, InterpreterError) as error:
        return [repr(error)]
    dslots = dout.double().repeat_interleave(2, 0)
    want = {
        "out": sums(y, weight, rows, live),
        "dx": sums(y, live, rows, live),
        "partials": parts(partial, rows, live),
    }
    want |= {
        "dy": weight.view(-1, 1).double() * dslots,
        "dweight": (y[slots].double() * dslots).sum(1),
    }
    return mismatches(got | {"dy": dy[slots], "dweight": dweight}, want, 1e-3)


@pytest.mark.parametrize("H", [33, 64])
def test_rows_beyond_int32(H, tmp_path):
    assert not far_mismatches(tmp_path, H)


def router_mismatches(T, K, H, N, dtype, routing, bound, device, module=kernels) -> list[str]:
    """dx of the rows plus dlogits W_router; a router whose rows are not next to each other, too."""
    dy, _, slot_row, num_rows, live = make(T, K, H, dtype, routing, device)
    dlogits = torch.randn(T, N, device=device).to(dtype)
    router = torch.randn(N, 2 * H, device=device).to(dtype)[:, :H]
    got = module.sum_rows_and_router(dy, slot_row, T, K, num_rows, dlogits, router)
    want = sums(dy, live.float(), slot_row, live) + dlogits.double() @ router.double()
    return mismatches({"dx": got}, {"dx": want}, bound) + [f"dx is {got.dtype}"] * (
        got.dtype != dtype
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 7, 70], ids=lambda N: f"{N} routed")
@pytest.mark.parametrize("T, K, H", [(1, 2, 33), (19, 3, 33), (33, 6, 300), (5, 9, 16)])
def test_router_joins_the_sum(T, K, H, N, dtype, tolerance, device):
    assert not router_mismatches(T, K, H, N, dtype, "dropped", tolerance[dtype], device)


def test_no_routed_expert_or_no_token(device):
    dy, _, slot_row, num_rows, _ = make(5, 1, 33, torch.float32, "random", device)
    none = torch.empty(5, 0, device=device), torch.empty(0, 33, device=device)
    got = kernels.sum_rows_and_router(dy, slot_row, 5, 1, num_rows, *none)
    assert torch.equal(got, kernels.sum_rows(dy, slot_row, None, 5, 1, num_rows)[0])
    empty = (
        dy[:0],
        slot_row[:0],
        0,
        1,
        num_rows,
        torch.empty(0, 3, device=device),
        torch.empty(3, 33, device=device),
    )
    assert kernels.sum_rows_and_router(*empty).shape == (0, 33)


# mutants of the kernels' source; each has to be caught by the checks above
def caught(module, bound, device) -> list[str]:
    """What the checks say of the kernels of `module`."""
    checks = [
        lambda: forward_mismatches(9, 10, 33, torch.float32, "dropped", bound, device, module),
        lambda: forward_mismatches(2, 2, 600, torch.float32, "random", bound, device, module),
        lambda: sum_rows_mismatches(19, 3, 33, 37, torch.float32, "dropped", bound, device, module),
        lambda: sum_rows_mismatches(2, 3, 600, 1, torch.float32, "random", bound, device, module),
        lambda: router_mismatches(19, 3, 33, 70, torch.float32, "dropped", bound, device, module),
        lambda: backward_mismatches(9, 3, 33, torch.float32, bound, device, module),
        lambda: backward_mismatches(2, 2, 600, torch.float32, bound, device, module),
    ]
    found = []
    for check in checks:
        with noting(found):
            found += check()
    return found


# of sum_rows; the backward's is indented less
STORE = "        tl.store(dweight_ptr + s, tl.sum(acc, 1), mask="
MUTANTS = [
    pytest.param("slot = t * K + (k0 + j)", "slot = t * K + j", id="slots beyond UNROLL forgotten"),
    pytest.param("live = (t < T) & (k0 + j < K)", "live = t < T", id="slots of the next token"),
    pytest.param(
        "live = (t < T) & (k0 + j < K)", "live = (t <= T) & (k0 + j < K)", id="a token too many"
    ),
    pytest.param(
        "row < tl.load(rows.num_rows)",
        "row <= tl.load(rows.num_rows)",
        id="first dropped row counts",
    ),
    pytest.param(
        "mask = outer(live, h < H)", "mask = outer(live, h >= 0)", id="another row's columns"
    ),
    pytest.param("acc += y", "acc = y", id="last slot only"),
    pytest.param("y = y * tl.load(", "y = y + tl.load(", id="weight added"),
    pytest.param(
        "pid % columns * BLOCK_H", "pid % columns", id="column blocks on top of each other"
    ),
    pytest.param("(s // K)[:, None]", "(s % K)[:, None]", id="gradient of another token"),
    pytest.param("(weight[:, None] * dout)", "dout", id="dy without its weight"),
    pytest.param("acc += dout * y", "acc = dout * y", id="dweight of the last columns"),
    pytest.param("tl.sum(acc, 1)", "tl.max(acc, 1)", id="largest term for the sum"),
    pytest.param("(pid - programs)", "pid", id="partials from the wrong slot on"),
    pytest.param("live = s < R", "live = s < R - 1", id="last slot without a gradient"),
    pytest.param(
        "outer(live, column < n)", "outer(live, column < BLOCK_N)", id="last partials missing"
    ),
    pytest.param(STORE + "s < R)", STORE + "live)", id="nothing written for dropped slots"),
    pytest.param(
        "acc = tl.dot(dlogits, router, acc",
        "acc = tl.dot(dlogits, router, acc * 0",
        id="router instead of rows",
    ),
    pytest.param(
        "(n0 + tl.arange(0, BLOCK_N))",
        "tl.arange(0, BLOCK_N)",
        id="first experts of the router again",
    ),
    pytest.param(
        "n[:, None] * stride_n", "n[:, None] * H", id="router's rows as if next to each other"
    ),
    pytest.param("row[:, None] * n", "s[:, None] * n", id="partials by slot, not by row"),
]


@pytest.mark.parametrize("old, new", MUTANTS)
def test_mutant_is_caught(old, new, tmp_path, device, tolerance):
    assert caught(edited(kernels, tmp_path, old, new), tolerance[torch.float32], device)


def test_unharmed_kernels_pass(tmp_path, device, tolerance):
    assert not caught(edited(kernels, tmp_path, "", ""), tolerance[torch.float32], device)


@pytest.mark.parametrize("mask", ["live", "s < R"])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_offset_in_32_bits_is_caught(mask, tmp_path):
    narrow = edited(
        kernels,
        tmp_path,
        f"mask={mask}, other=0).to(tl.int64)",
        f"mask={mask}, other=0).to(tl.int32)",
    )
    assert far_mismatches(tmp_path, 64, narrow)
