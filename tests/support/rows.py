"""Rows in expert order and loops over them: inputs and expected results of the launchers of the
grouped GEMMs.

The loops run in float64 on the CPU. A NaN in a result marks an element that must not be written.
"""

from typing import NamedTuple

import numpy as np
import torch

from tests.support.oracle import ACT

NAN = float("nan")


class Rows(NamedTuple):
    """Rows in the order of a dispatch: those of expert 0, of expert 1, ..., then the dropped
    ones.
    """

    offsets: torch.Tensor  # [E + 1] int32
    row_slot: torch.Tensor  # [R] int32
    expert: list[int]  # of each row; E for a dropped one
    slots: int  # slots per token

    @property
    def tokens(self) -> list[int]:
        return [slot // self.slots for slot in self.row_slot.tolist()]


def make_rows(counts: list[int], dropped: int, slots: int, device: str = "cpu") -> Rows:
    """Return counts[e] rows for each expert e and some dropped ones; the slots are in any order."""
    R = sum(counts) + dropped
    assert R % slots == 0
    offsets = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    expert = []
    for e, count in enumerate([*counts, dropped]):
        expert += [e] * count
    return Rows(offsets, torch.randperm(R).int().to(device), expert, slots)


def tile_map(offsets: torch.Tensor, R: int, BLOCK_M: int, first_expert: int = 0) -> torch.Tensor:
    """[3, tiles] int32: expert, first row and end row of each tile; the rest, up to the bound, is
    -1, the number of tiles, and arbitrary values.
    """
    bounds = offsets.tolist()
    E = len(bounds) - 1
    tiles = []
    for e in range(first_expert, E):
        for row in range(bounds[e], bounds[e + 1], BLOCK_M):
            tiles.append((e, row, bounds[e + 1]))
    tiles += [(-1, len(tiles), 2**30)] * (R // BLOCK_M + min(E, R) - len(tiles))
    numbers = torch.tensor(tiles, dtype=torch.int32, device=offsets.device)
    return numbers.view(-1, 3).t().contiguous()


def sparse(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on pages that take no memory until they are written."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(size * itemsize, np.uint8)).view(dtype)


def wide(*tensors):
    """float64 on the CPU."""
    return [None if t is None else t.detach().cpu().double() for t in tensors]


def biased(product: torch.Tensor, bias: torch.Tensor | None, e: int) -> torch.Tensor:
    return product if bias is None else product + bias[e]


def activated(z: torch.Tensor, act: str, gated: bool) -> torch.Tensor:
    if not gated:
        return ACT[act](z)
    gate, up = z.chunk(2, -1)
    return ACT[act](gate) * up


def up_rows(x, up, bias, rows: Rows, act: str, gated: bool, first_expert: int = 0):
    """z = up[e] x[token] + bias[e] and h = act(gate) * up, row by row."""
    z = product_rows(x[rows.tokens], up, bias, rows, first_expert)
    return z, activated(z, act, gated)


def product_rows(a, weight, bias, rows: Rows, first_expert: int = 0):
    """y = weight[e] a[r] + bias[e], row by row."""
    a, weight, bias = wide(a, weight, bias)
    E, N, _ = weight.shape
    y = torch.full((len(rows.expert), N), NAN, dtype=torch.float64)
    for r, e in enumerate(rows.expert):
        if first_expert <= e < E:
            y[r] = biased(weight[e] @ a[r], bias, e)
    return y


def dz_rows(dout, down, bias, topk_weight, z, rows: Rows, act: str, gated: bool):
    """dz, weight * h and the gradient of each row's weight in weight * (down[e] h(z) + bias[e]), by
    autograd row by row.
    """
    dout, down, bias, topk_weight, z = wide(dout, down, bias, topk_weight, z)
    E, _, I = down.shape
    dz = torch.full_like(z, NAN)
    wh = torch.full((z.shape[0], I), NAN, dtype=torch.float64)
    dweight = torch.full(z.shape[:1], NAN, dtype=torch.float64)
    slots = rows.row_slot.tolist()
    for r, (e, token) in enumerate(zip(rows.expert, rows.tokens)):
        if e == E:
            continue
        pre = z[r].clone().requires_grad_()
        weight = topk_weight.view(-1)[slots[r]].clone().requires_grad_()
        h = activated(pre, act, gated)
        y = weight * biased(down[e] @ h, bias, e)
        dz[r], dweight[r] = torch.autograd.grad(y, (pre, weight), dout[token])
        wh[r] = (weight * h).detach()
    return dz, wh, dweight


def weight_rows(dy, x, rows: Rows, gather: str | None, E: int):
    """dw[e] = sum of dy[r] x[r]^T over e's rows; the row of the gathered operand is the row's
    token.
    """
    dy, x = wide(dy, x)
    if gather == "dy":
        dy = dy[rows.tokens]
    elif gather == "x":
        x = x[rows.tokens]
    dw = torch.zeros(E, dy.shape[1], x.shape[1], dtype=torch.float64)
    for r, e in enumerate(rows.expert):
        if e < E:
            dw[e] += torch.outer(dy[r], x[r])
    return dw


def bias_rows(dy, topk_weight, rows: Rows, gather: bool, E: int):
    """db[e] = sum of weight * dy[r] over e's rows."""
    dy, topk_weight = wide(dy, topk_weight)
    if gather:
        dy = dy[rows.tokens]
    if topk_weight is not None:
        dy = dy * topk_weight.view(-1)[rows.row_slot.cpu(), None]
    db = torch.zeros(E, dy.shape[1], dtype=torch.float64)
    for r, e in enumerate(rows.expert):
        if e < E:
            db[e] += dy[r]
    return db


def assert_rounded_once(got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert that every element is `want`, summed in float32 and rounded once; where `want` is NaN,
    nothing may be written.
    """
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(
        got.cpu().double(), want, rtol=0.51 * eps + 1e-6, atol=5e-6, equal_nan=True
    )
