"""The torch backend of `lora_mlp`'s mixed activation: a block of tokens at a time, in reused
memory.

A row is a pair of a token and an expert that it selected. A block's rows are gathered in expert
order, so that each expert's products are over neighbouring rows; `embedding_bag` sums their
contributions to each token, without a scatter. Experts that no token of a block selected cost
nothing and are not read.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.ops.activation import ACT, ACT_BACKWARD
from moe_runtime.ops.library import wide_dtype
from moe_runtime.ops.workspace import lease, scratch

# rows of one expert in a block, times I: smaller blocks lose more in calls than the cache saves;
# one core, 2 MB L2, 2026-11-21
EXPERT_ELEMENTS = 1 << 19
BLOCK_ELEMENTS = 1 << 22  # maximum of a block's rows times I


class Base(NamedTuple):
    """The frozen MLP, without the bias of its down projection."""

    gate: Tensor  # [I, H]
    up: Tensor  # [I, H]
    down: Tensor  # [H, I]
    gate_bias: Tensor | None
    up_bias: Tensor | None

    def first(self, x: Tensor, z: Tensor) -> Tensor:
        """Fill z [T, 2I] with z0 = [gate; up], and return it."""
        I = self.gate.shape[0]
        for half, weight, bias in (
            (z[:, :I], self.gate, self.gate_bias),
            (z[:, I:], self.up, self.up_bias),
        ):
            if bias is None:
                torch.mm(x, weight.t(), out=half)
            else:
                (torch.addmm(bias, x, weight.t(), out=half))
        return z

    def first_backward(self, dz: Tensor) -> Tensor:
        """Return dx [T, H] of `first`."""
        I = self.gate.shape[0]
        return torch.mm(dz[:, :I], self.gate).addmm_(dz[:, I:], self.up)


class Pairs(NamedTuple):
    """The experts' A and B of each projection, in the order of the op; both None for a projection
    without pairs.
    """

    gate_a: Tensor | None  # [E, r, H]
    gate_b: Tensor | None  # [E, r, I]
    up_a: Tensor | None  # [E, r, H]
    up_b: Tensor | None  # [E, r, I]
    down_a: Tensor | None  # [E, r, I]
    down_b: Tensor | None  # [E, r, H]

    def low(self, x: Tensor) -> Tensor:
        """Return [3, T, E r]: x A^T of gate and of up (zeros without pairs), and zeros for q, which
        is filled later.
        """
        some = next(t for t in self if t is not None)
        low = x.new_zeros(3, x.shape[0], some.shape[0] * some.shape[1])
        for plane, a in zip(low, (self.gate_a, self.up_a)):
            if a is not None:
                torch.mm(x, flat(a).t(), out=plane)
        return low

    def in_order(self) -> "Pairs":
        """Return contiguous copies where needed."""
        return Pairs(*(None if t is None else t.contiguous() for t in self))


def flat(half: Tensor) -> Tensor:
    """View [E, r, n] as [E r, n], for one product with all experts."""
    return half.view(-1, half.shape[2])


def mixed_weight(topk_weight: Tensor, topk_idx: Tensor | None, num_experts: int) -> Tensor:
    """Return w [T, E], each token's weight of each expert: the sum over its slots, 0 if not
    selected.
    """
    if topk_idx is None:
        return topk_weight
    experts = torch.arange(num_experts, device=topk_idx.device)
    # where instead of a product with zero, as unused weights may have any value
    return torch.where(topk_idx[:, :, None] == experts, topk_weight[:, :, None], 0).sum(1)


class Gradients(NamedTuple):
    """Result of `mixed_backward`, from the gradients of h and q; None for gradients that are not
    requested.
    """

    dz: Tensor  # [T, 2I] of z0
    dlow: Tensor  # [2, T, E r] of x A^T of gate and of up
    dweight: Tensor  # [T, E] of w
    gate_b: Tensor | None  # [E, r, I]
    up_b: Tensor | None
    down_a: Tensor | None


class Block(NamedTuple):
    """Neighbouring tokens, and their rows in expert order."""

    tokens: slice
    token: Tensor  # [n] of each row
    expert: Tensor  # [n]
    members: list[tuple[int, slice]]  # the experts that have rows, and these rows
    bag: Tensor  # [n] rows in token order
    bounds: Tensor  # each token's first position in `bag`

    def total(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the sum of each token's `rows` [n, ...], times their `weight` [n]."""
        if not rows.numel():
            return rows.new_zeros(self.bounds.numel(), rows.shape[1])
        weight = None if weight is None else weight[self.bag]
        return F.embedding_bag(self.bag, rows, self.bounds, mode="sum", per_sample_weights=weight)


def _blocks(topk_idx, T: int, E: int, I: int, device) -> Iterator[Block]:
    """Yield the tokens in blocks, such that an expert's rows in a block, times I, are about
    EXPERT_ELEMENTS.
    """
    chosen = torch.ones(T, E, dtype=torch.bool, device=device)
    if topk_idx is not None:
        chosen = (topk_idx[:, :, None] == torch.arange(E, device=device)).any(1)
    slots = E if topk_idx is None else min(max(topk_idx.shape[1], 1), E)
    step = max(min(EXPERT_ELEMENTS * E, BLOCK_ELEMENTS) // (I * slots), 16)
    for start in range(0, T, step):
        part = chosen[start : start + step]
        expert, token = part.t().nonzero().unbind(1)
        ends = itertools.pairwise(itertools.accumulate(part.sum(0).tolist(), initial=0))
        row = torch.empty(part.shape, dtype=torch.int64, device=device)
        row[token, expert] = torch.arange(token.numel(), device=device)
        each = part.sum(1)
        yield Block(
            slice(start, start + part.shape[0]),
            token + start,
            expert,
            [(e, slice(a, b)) for e, (a, b) in enumerate(ends) if a < b],
            row[part],
            each.cumsum(0) - each,
        )


def _ranks(plane, E: int):
    """View [T, E r] as [T, E, r]."""
    return plane.view(plane.shape[0], E, -1)


def _expert_z(z, token, ranks, halves, e: int, scaling: float, out):
    """Fill `out` [n, 2I] with expert e's pre-activation, from `ranks` [n, r] and B of gate and up;
    return gate and up.
    """
    gate, up = torch.index_select(z, 0, token, out=out).chunk(2, 1)
    for rows, rank, half in zip((gate, up), ranks, halves):
        if half is not None:
            rows.addmm_(rank, half[e], alpha=scaling)
    return gate, up


def mixed(
    x,
    base: Base,
    pairs: Pairs,
    low,
    topk_weight,
    topk_idx,
    E: int,
    scaling: float,
    act: str,
    save: bool,
):
    """Return z0 [T, 2I] (empty unless `save`) and h [T, I]; fills low[2] with q."""
    T = x.shape[0]
    I = base.gate.shape[0]
    wide = wide_dtype(x.dtype)
    z = base.first(x, lease((T, 2 * I), x) if save else scratch("lora z", (T, 2 * I), x))
    weight = mixed_weight(topk_weight, topk_idx, E)
    h = scratch("lora h", (T, I), x)
    for block in _blocks(topk_idx, T, E, I, x.device):
        at = (block.token, block.expert)
        rows = scratch("lora rows", (block.token.numel(), I), x)
        p = [_ranks(plane, E)[at] for plane in low[:2]]
        row_weight = weight[at]
        q = torch.empty_like(p[0])
        for e, own in block.members:
            out = scratch("lora z rows", (own.stop - own.start, 2 * I), x)
            gate, up = _expert_z(
                z,
                block.token[own],
                (p[0][own], p[1][own]),
                (pairs.gate_b, pairs.up_b),
                e,
                scaling,
                out,
            )
            value = ACT[act](gate.to(wide))
            # apply the weight to narrow rows before they are rounded
            if x.dtype == wide:
                torch.mul(value, up, out=rows[own])
            else:
                rows[own] = value.mul_(up).mul_(row_weight[own, None])
            if pairs.down_a is not None:
                torch.mm(rows[own], pairs.down_a[e].t(), out=q[own])
        if pairs.down_a is not None:
            _ranks(low[2], E)[at] = q.mul_(row_weight[:, None]) if x.dtype == wide else q
        h[block.tokens] = block.total(rows, row_weight if x.dtype == wide else None)
    return (z if save else x.new_empty(0, 2 * I)), h


def mixed_backward(
    dh,
    dq,
    z,
    pairs: Pairs,
    low,
    topk_weight,
    topk_idx,
    needs: Pairs,
    E: int,
    scaling: float,
    act: str,
):
    """Compute gradients from those of h and q, `dh` [T, I] and `dq` [T, E r], which include the
    scaling.
    """
    T = dh.shape[0]
    I = dh.shape[1]
    wide = wide_dtype(dh.dtype)
    weight = mixed_weight(topk_weight, topk_idx, E)
    dz = scratch("lora dz", (T, 2 * I), z)
    dweight = torch.zeros(T, E, dtype=wide, device=z.device)
    dlow = z.new_zeros(2, T, low.shape[2])
    halves = (pairs.gate_b, pairs.up_b, pairs.down_a)
    grads = [
        torch.zeros(half.shape, dtype=wide, device=z.device) if half is not None and need else None
        for half, need in zip(halves, (needs.gate_b, needs.up_b, needs.down_a))
    ]
    for block in _blocks(topk_idx, T, E, I, z.device):
        at = (block.token, block.expert)
        n = block.token.numel()
        rows = scratch("lora z rows", (n, 2 * I), z)
        dots = dweight.new_empty(n)
        ranks = [None if plane is None else _ranks(plane, E)[at] for plane in (low[0], low[1], dq)]
        row_weight = weight[at]
        dranks = ranks[0].new_empty(2, *ranks[0].shape)
        for e, own in block.members:
            token = block.token[own]
            mine = [None if rank is None else rank[own] for rank in ranks]
            gate, up = _expert_z(z, token, mine, halves[:2], e, scaling, rows[own])
            da = torch.index_select(dh, 0, token, out=scratch("lora rows", gate.shape, z))
            if dq is not None:
                da.addmm_(mine[2], pairs.down_a[e])
            h = _activation_backward(gate, up, da, row_weight[own, None], act, dots[own])
            for drank, half, side in zip(dranks, halves, (gate, up)):
                if half is not None:
                    torch.mm(side, half[e].t(), out=drank[own])
            for grad, rank, side, scale in zip(grads, mine, (gate, up, h), (scaling, scaling, 1.0)):
                if grad is not None:
                    _sum_into(grad[e], rank, side, scale)
        for plane, half, drank in zip(dlow, halves, dranks):
            if half is not None:
                _ranks(plane, E)[at] = drank.mul_(scaling)
        dweight[at] = dots
        dz[block.tokens] = block.total(rows)
    return Gradients(
        dz, dlow, dweight, *(None if grad is None else grad.to(z.dtype) for grad in grads)
    )


def _activation_backward(gate, up, da, weight, act: str, dots):
    """Return weight * act(gate) * up in da's memory; `dots` gets <da, act(gate) * up>; gate and up
    become their gradients.
    """
    wide = wide_dtype(gate.dtype)
    g = gate.to(wide)
    u = up.to(wide)
    grad = da.to(wide)
    value = ACT[act](g)
    h = value * u
    product = h * grad
    torch.sum(product, 1, out=dots)
    grad.mul_(weight)
    dgate = ACT_BACKWARD[act](torch.mul(u, grad, out=product), g)
    torch.mul(value, grad, out=up) if up.dtype == wide else up.copy_(value.mul_(grad))
    gate.copy_(dgate)
    return torch.mul(h, weight, out=da) if da.dtype == wide else da.copy_(h.mul_(weight))


def _sum_into(grad, low, rows, scaling: float) -> None:
    """Add scaling low^T rows to `grad` [r, I], in its dtype."""
    if grad.dtype == rows.dtype:
        grad.addmm_(low.t(), rows, alpha=scaling)
    else:
        grad.add_(low.t() @ rows, alpha=scaling)
