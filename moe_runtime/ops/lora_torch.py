"""The torch backend of `lora_mlp`'s mixed activation, a block of tokens at a time.

A row is a pair of a token and an expert that it selected. A block's rows are gathered in expert
order, so that each expert's products are over neighbouring rows; `embedding_bag` sums their
contributions to each token, without a scatter. Experts that no token of a block selected cost
nothing and are not read.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

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
        _linear(x, self.gate, self.gate_bias, z[:, :I])
        _linear(x, self.up, self.up_bias, z[:, I:])
        return z

    def first_backward(self, dz: Tensor) -> Tensor:
        """Return dx [T, H] of `first`."""
        I = self.gate.shape[0]
        return torch.mm(dz[:, :I], self.gate).addmm_(dz[:, I:], self.up)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class Pairs(NamedTuple):
    """The experts' A and B of each projection, in the order of the op; None without pairs."""

    gate_a: Tensor | None  # [E, r, H]
    gate_b: Tensor | None  # [E, r, I]
    up_a: Tensor | None  # [E, r, H]
    up_b: Tensor | None  # [E, r, I]
    down_a: Tensor | None  # [E, r, I]
    down_b: Tensor | None  # [E, r, H]

    def low(self, x: Tensor) -> Tensor:
        """Return [3, T, E r]: x A^T of gate and of up, or zeros, and zeros for q."""
        some = next(t for t in self if t is not None)
        low = x.new_zeros(3, x.shape[0], some.shape[0] * some.shape[1])
        for plane, a in zip(low, (self.gate_a, self.up_a)):
            if a is not None:
                torch.mm(x, flat(a).t(), out=plane)
        return low

    def halves(self) -> tuple[Tensor | None, Tensor | None]:
        """Return B of gate and of up."""
        return self.gate_b, self.up_b

    def in_order(self) -> "Pairs":
        """Return contiguous copies where needed."""
        return Pairs(*(None if t is None else t.contiguous() for t in self))


def flat(half: Tensor) -> Tensor:
    """View [E, r, n] as [E r, n], for one product with all experts."""
    return half.view(-1, half.shape[2])


def mixed_weight(topk_weight: Tensor, topk_idx: Tensor | None, num_experts: int) -> Tensor:
    """Return w [T, E], each token's weight of each expert: the sum over its slots."""
    if topk_idx is None:
        return topk_weight
    experts = torch.arange(num_experts, device=topk_idx.device)
    # where instead of a product with zero, as unused weights may have any value
    return torch.where(topk_idx[:, :, None] == experts, topk_weight[:, :, None], 0).sum(1)


class MixedGradients(NamedTuple):
    """Result of `mixed_backward`; None for gradients that are not requested."""

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
        if weight is not None:
            weight = weight[self.bag]
        return F.embedding_bag(
            self.bag,
            rows,
            self.bounds,
            mode="sum",
            per_sample_weights=weight,
        )

    def rows_of(self, plane: Tensor, E: int) -> Tensor:
        """Return the ranks of each row [n, r] from those of all experts, `plane` [T, E r]."""
        return _ranks(plane, E)[self.token, self.expert]


def _blocks(
    topk_idx: Tensor | None,
    T: int,
    E: int,
    I: int,
    device: torch.device,
) -> Iterator[Block]:
    """Yield the tokens in blocks of about EXPERT_ELEMENTS per expert, in its rows times I."""
    if topk_idx is None:
        chosen = torch.ones(T, E, dtype=torch.bool, device=device)
        slots = E
    else:
        chosen = (topk_idx[:, :, None] == torch.arange(E, device=device)).any(1)
        slots = min(max(topk_idx.shape[1], 1), E)
    step = max(min(EXPERT_ELEMENTS * E, BLOCK_ELEMENTS) // (I * slots), 16)
    for start in range(0, T, step):
        part = chosen[start : start + step]
        expert, token = part.t().nonzero().unbind(1)
        ends = itertools.pairwise(itertools.accumulate(part.sum(0).tolist(), initial=0))
        row = torch.empty(part.shape, dtype=torch.int64, device=device)
        row[token, expert] = torch.arange(token.numel(), device=device)
        counts = part.sum(1)
        yield Block(
            tokens=slice(start, start + part.shape[0]),
            token=token + start,
            expert=expert,
            members=[(e, slice(a, b)) for e, (a, b) in enumerate(ends) if a < b],
            bag=row[part],
            bounds=counts.cumsum(0) - counts,
        )


def _ranks(plane: Tensor, E: int) -> Tensor:
    """View [T, E r] as [T, E, r]."""
    return plane.view(plane.shape[0], E, -1)


def _expert_z(
    z: Tensor,
    token: Tensor,
    ranks: list[Tensor],
    pairs: Pairs,
    e: int,
    scaling: float,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fill `out` [n, 2I] with expert e's pre-activation; return its gate and up.

    `ranks` are x A^T of gate and up [n, r].
    """
    gate, up = torch.index_select(z, 0, token, out=out).chunk(2, 1)
    for tile, half, rank in zip((gate, up), pairs.halves(), ranks):
        if half is not None:
            tile.addmm_(rank, half[e], alpha=scaling)
    return gate, up


def mixed(
    i: Any,
    x: Tensor,
    base: Base,
    pairs: Pairs,
    low: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return z0 [T, 2I] (empty unless `i.save`) and h [T, I]; fills low[2] with q.

    `i` are the inputs of the op.
    """
    T = x.shape[0]
    I = base.gate.shape[0]
    E = i.E
    wide = wide_dtype(x.dtype)
    # narrow rows get their weight before they are rounded, wide ones in the sum
    weight_last = x.dtype == wide
    if i.save:
        z = base.first(x, lease((T, 2 * I), x))
    else:
        z = base.first(x, scratch("lora z", (T, 2 * I), x))
    weight = mixed_weight(i.topk_weight, i.topk_idx, E)
    h = scratch("lora h", (T, I), x)
    for block in _blocks(i.topk_idx, T, E, I, x.device):
        rows = scratch("lora rows", (block.token.numel(), I), x)
        ranks = [block.rows_of(plane, E) for plane in low[:2]]
        row_weight = weight[block.token, block.expert]
        q = torch.empty_like(ranks[0])
        for e, part in block.members:
            token = block.token[part]
            out = scratch("lora z rows", (token.numel(), 2 * I), x)
            rows_ranks = [rank[part] for rank in ranks]
            gate, up = _expert_z(
                z,
                token,
                rows_ranks,
                pairs,
                e,
                i.scaling,
                out,
            )
            value = ACT[i.act](gate.to(wide))
            if weight_last:
                torch.mul(value, up, out=rows[part])
            else:
                rows[part] = value.mul_(up).mul_(row_weight[part, None])
            if pairs.down_a is not None:
                torch.mm(rows[part], pairs.down_a[e].t(), out=q[part])
        if pairs.down_a is not None:
            if weight_last:
                q.mul_(row_weight[:, None])
            _ranks(low[2], E)[block.token, block.expert] = q
        h[block.tokens] = block.total(rows, row_weight if weight_last else None)
    if not i.save:
        z = x.new_empty(0, 2 * I)
    return z, h


def mixed_backward(
    i: Any,
    dh: Tensor,
    dq: Tensor | None,
    z: Tensor,
    pairs: Pairs,
    low: Tensor,
    needs: Pairs,
) -> MixedGradients:
    """Compute gradients from those of h and q.

    `dh` [T, I] and `dq` [T, E r] include the scaling. `i` are the inputs of the op.
    """
    T, I = dh.shape
    E = i.E
    weight = mixed_weight(i.topk_weight, i.topk_idx, E)
    dz = scratch("lora dz", (T, 2 * I), z)
    dweight = torch.zeros(T, E, dtype=wide_dtype(dh.dtype), device=z.device)
    dlow = z.new_zeros(2, T, low.shape[2])
    dgate_b = _wide_zeros(pairs.gate_b, needs.gate_b)
    dup_b = _wide_zeros(pairs.up_b, needs.up_b)
    ddown_a = _wide_zeros(pairs.down_a, needs.down_a)
    for block in _blocks(i.topk_idx, T, E, I, z.device):
        n = block.token.numel()
        rows = scratch("lora z rows", (n, 2 * I), z)
        dots = dweight.new_empty(n)
        ranks = [block.rows_of(plane, E) for plane in low[:2]]
        dranks = [torch.empty_like(rank) for rank in ranks]
        down_rank = None if dq is None else block.rows_of(dq, E)
        row_weight = weight[block.token, block.expert]
        for e, part in block.members:
            token = block.token[part]
            rows_ranks = [rank[part] for rank in ranks]
            tiles = _expert_z(
                z,
                token,
                rows_ranks,
                pairs,
                e,
                i.scaling,
                rows[part],
            )
            da = torch.index_select(dh, 0, token, out=scratch("lora rows", tiles[0].shape, z))
            if down_rank is not None and pairs.down_a is not None:
                da.addmm_(down_rank[part], pairs.down_a[e])
            h = _activation_backward(
                *tiles,
                da,
                row_weight[part, None],
                i.act,
                dots[part],
            )
            # the tiles of gate and up are their gradients from here on
            for tile, half, drank in zip(tiles, pairs.halves(), dranks):
                if half is not None:
                    torch.mm(tile, half[e].t(), out=drank[part])
            for tile, dhalf, rank in zip(tiles, (dgate_b, dup_b), rows_ranks):
                if dhalf is not None:
                    _sum_into(dhalf[e], rank, tile, i.scaling)
            if ddown_a is not None and down_rank is not None:
                _sum_into(ddown_a[e], down_rank[part], h, 1.0)
        for plane, half, drank in zip(dlow, pairs.halves(), dranks):
            if half is not None:
                _ranks(plane, E)[block.token, block.expert] = drank.mul_(i.scaling)
        dweight[block.token, block.expert] = dots
        dz[block.tokens] = block.total(rows)
    grads = [None if grad is None else grad.to(z.dtype) for grad in (dgate_b, dup_b, ddown_a)]
    return MixedGradients(dz, dlow, dweight, *grads)


def _wide_zeros(half: Tensor | None, need: object) -> Tensor | None:
    """Return zeros for the gradient of `half` if it is there and needed, summed in a wide dtype."""
    if half is None or not need:
        return None
    return torch.zeros(half.shape, dtype=wide_dtype(half.dtype), device=half.device)


def _activation_backward(
    gate: Tensor,
    up: Tensor,
    da: Tensor,
    weight: Tensor,
    act: str,
    dots: Tensor,
) -> Tensor:
    """Return weight * act(gate) * up in da's memory; gate and up become their gradients.

    `dots` gets <da, act(gate) * up>.
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
    if up.dtype == wide:
        torch.mul(value, grad, out=up)
    else:
        up.copy_(value.mul_(grad))
    gate.copy_(dgate)
    if da.dtype == wide:
        return torch.mul(h, weight, out=da)
    return da.copy_(h.mul_(weight))


def _sum_into(grad: Tensor, low: Tensor, rows: Tensor, scaling: float) -> None:
    """Add scaling low^T rows to `grad` [r, I], in its dtype."""
    if grad.dtype == rows.dtype:
        grad.addmm_(low.t(), rows, alpha=scaling)
    else:
        grad.add_(low.t() @ rows, alpha=scaling)
