"""The kernels that sum a token's rows: unwritten rows, partial gradients, order of the sum, offsets
beyond int32.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from moe_runtime import backends
from moe_runtime.ops.dispatch import dispatch
from tests.support.oracle import assert_parity, choose_experts

pytest.importorskip("triton")
from moe_runtime.kernels import combine as kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")
SHAPES = [  # T, K, H
    pytest.param(1, 2, 33, id="one token"),
    pytest.param(29, 3, 33, id="ragged T, H=33"),
    pytest.param(9, 6, 128, id="XFT: 6 slots"),
    pytest.param(3, 9, 1030, id="H and K beyond a block"),
    pytest.param(2, 40, 24, id="many slots"),
]


class Slots(NamedTuple):
    """Rows in expert order; NaN where no kernel may read."""

    y: torch.Tensor  # [R, H]
    weight: torch.Tensor  # [T, K]
    slot_row: torch.Tensor  # [R]
    num_rows: torch.Tensor  # [1], the number of rows that are not dropped
    live: torch.Tensor  # [T, K], the slots that are not dropped

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values [R, n] of each slot as [T, K, n] in float64, 0 for a dropped slot."""
        rows = values[self.slot_row.view(self.live.shape).long()].double()
        return torch.where(self.live[..., None], rows, 0)

    def weighted_sum(self) -> torch.Tensor:
        """out[t] = sum_k weight[t, k] y[slot_row[t, k]]."""
        weight = torch.where(self.live, self.weight, 0).double()
        return (weight[..., None] * self.of_rows(self.y)).sum(1)


def make(T, K, H, dtype, device, routing="dropped") -> Slots:
    E = max(4, K)
    order = dispatch(choose_experts(T, E, K, routing), E)
    num_rows = order.expert_offsets[-1:]
    live = order.slot_row.view(T, K) < num_rows
    y = torch.randn(T * K, H).to(dtype)
    y[int(num_rows) :] = NAN
    weight = torch.rand(T, K).masked_fill(~live, NAN)
    return Slots(*(t.to(device) for t in (y, weight, order.slot_row, num_rows, live)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, K, H", SHAPES)
def test_dropped_rows_are_not_read(T, K, H, dtype, tolerance, device):
    slots = make(T, K, H, dtype, device)
    partial = torch.randn(T * K, 70, device=device)  # more than a block
    partial[int(slots.num_rows) :] = NAN
    out = kernels.combine_forward(
        slots.y,
        slots.weight,
        slots.slot_row,
        slots.num_rows,
    )
    dx, dweight = kernels.sum_rows(
        slots.y,
        slots.slot_row,
        partial,
        T,
        K,
        slots.num_rows,
    )
    assert out.dtype == dx.dtype == dtype
    assert dweight.dtype == torch.float32
    expected = {
        "out": slots.weighted_sum(),
        "dx": slots.of_rows(slots.y).sum(1),
        "dweight": slots.of_rows(partial).sum(2),
    }
    assert_parity(
        {"out": out, "dx": dx, "dweight": dweight},
        expected,
        tolerance[dtype],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, K, H", SHAPES)
def test_backward(T, K, H, dtype, tolerance, device):
    slots = make(T, K, H, dtype, device, "random")
    dout = torch.randn(T, H, device=device).to(dtype)
    dy, dweight = kernels.combine_backward(
        dout,
        slots.y,
        slots.weight,
        slots.slot_row,
    )
    of_slots = dout.double()[:, None]
    want_dy = torch.zeros(T * K, H, dtype=torch.float64, device=device)
    want_dy[slots.slot_row.long()] = (slots.weight.double()[..., None] * of_slots).flatten(0, 1)
    expected = {"dy": want_dy, "dweight": (slots.of_rows(slots.y) * of_slots).sum(-1)}
    assert_parity({"dy": dy, "dweight": dweight}, expected, tolerance[dtype])


@pytest.mark.parametrize("H", [33, 64])
def test_rows_beyond_int32(H, tmp_path):
    """Rows near element 2^31 of y, dy and partial, the last one 100 rows later, in sparse files."""
    if not backends.interpreted():
        pytest.skip("a GPU would need real memory")

    def sparse(name, dtype):
        file = np.memmap(
            Path(tmp_path, name),
            dtype,
            "w+",
            shape=(edge + 101, H),
        )
        return torch.from_numpy(file)

    edge = 2**31 // H
    slot_row = torch.tensor(
        [
            [0, edge - 1],
            [edge, edge + 1],
            [edge + 100, 1],
        ],
        dtype=torch.int32,
    )
    rows = slot_row.long().view(-1)
    num_rows = torch.tensor([edge + 101]).int()
    weight = torch.arange(1.0, 7).view(3, 2)
    dout = torch.randn(3, H).half()
    y = sparse("y", np.float16)
    dy = sparse("dy", np.float16)
    partial = sparse("partial", np.float32)
    y[rows] = torch.randn(6, H).half()
    partial[rows] = torch.randn(6, H)
    dweight = torch.empty(6)
    out = kernels.combine_forward(y, weight, slot_row, num_rows)
    dx, sums = kernels.sum_rows(y, slot_row, partial, 3, 2)
    # a launcher would start a program for every row of y; six slots are enough
    kernels._combine_bwd_kernel[(1,)](
        dout, y, weight, slot_row, dy, dweight, 6, H, 2, BLOCK_S=8, BLOCK_H=64
    )
    got = {
        "out": out,
        "dx": dx,
        "sums": sums,
        "dy": dy[rows],
        "dweight": dweight,
    }
    slots = Slots(
        y,
        weight,
        slot_row,
        num_rows,
        torch.ones(3, 2, dtype=torch.bool),
    )
    of_slots = dout.double().repeat_interleave(2, 0)
    expected = {
        "out": slots.weighted_sum(),
        "dx": slots.of_rows(y).sum(1),
        "sums": slots.of_rows(partial).sum(2),
        "dy": weight.view(-1, 1).double() * of_slots,
        "dweight": (y[rows].double() * of_slots).sum(1),
    }
    assert_parity(got, expected, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 7, 70], ids=lambda N: f"{N} routed")
@pytest.mark.parametrize(
    "T, K, H",
    [
        (1, 2, 33),
        (19, 3, 33),
        (33, 6, 300),
        (5, 9, 16),
    ],
)
def test_router_joins_the_sum(T, K, H, N, dtype, tolerance, device):
    """dx of the rows plus dlogits W_router, where W_router's rows are longer than its columns."""
    slots = make(T, K, H, dtype, device)
    dlogits = torch.randn(T, N, device=device).to(dtype)
    router = torch.randn(N, 2 * H, device=device).to(dtype)[:, :H]
    got = kernels.sum_rows_and_router(
        slots.y, slots.slot_row, T, K, slots.num_rows, dlogits, router
    )
    assert got.dtype == dtype
    expected = slots.of_rows(slots.y).sum(1) + dlogits.double() @ router.double()
    assert_parity({"dx": got}, {"dx": expected}, tolerance[dtype])
