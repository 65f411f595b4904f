"""The torch backend of `lora_mlp`'s mixed activation, expert by expert, on the tokens that selected
it. Experts that no token selected cost nothing and are not read.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.ops.activation import ACT, ACT_BACKWARD
from moe_runtime.ops.library import wide_dtype
from moe_runtime.ops.products import addmm, mm


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
        dx = mm(dz[:, :I], self.gate)
        return addmm(dx, dz[:, I:], self.up, out=dx)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        mm(x, weight.t(), out=out)
    else:
        addmm(bias, x, weight.t(), out=out)


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
                mm(x, flat(a).t(), out=plane)
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


def chosen_experts(
    topk_idx: Tensor | None, T: int, E: int, device: torch.device | None = None
) -> Tensor:
    """Return which experts each token selected [T, E], all of them without `topk_idx`."""
    if topk_idx is None:
        return torch.ones(T, E, dtype=torch.bool, device=device)
    return (topk_idx[:, :, None] == torch.arange(E, device=topk_idx.device)).any(1)


class MixedGradients(NamedTuple):
    """Result of `mixed_backward`; None for gradients that are not requested."""

    dz: Tensor  # [T, 2I] of z0
    dlow: Tensor  # [2, T, E r] of x A^T of gate and of up
    dweight: Tensor  # [T, E] of w
    gate_b: Tensor | None  # [E, r, I]
    up_b: Tensor | None
    down_a: Tensor | None


def experts_rows(i: Any, T: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each expert that tokens selected, and these tokens in ascending order."""
    chosen = chosen_experts(i.topk_idx, T, i.E, i.topk_weight.device)
    for e in range(i.E):
        token = chosen[:, e].nonzero().flatten()
        if token.numel():
            yield e, token


def _ranks(plane: Tensor, E: int) -> Tensor:
    """View [T, E r] as [T, E, r]."""
    return plane.view(plane.shape[0], E, -1)


def _expert_z(
    z: Tensor, token: Tensor, low: Tensor, pairs: Pairs, e: int, i: Any
) -> tuple[Tensor, Tensor]:
    """Return expert e's pre-activations of some tokens, of gate and of up [n, I]."""
    tiles = []
    for tile, half, plane in zip(z[token].chunk(2, 1), pairs.halves(), low[:2]):
        if half is not None:
            ranks = _ranks(plane, i.E)[token, e]
            tile = addmm(tile, ranks, half[e], alpha=i.scaling)
        tiles.append(tile.to(wide_dtype(z.dtype)))
    return tiles[0], tiles[1]


def mixed(i: Any, z: Tensor, pairs: Pairs, low: Tensor) -> Tensor:
    """Return h [T, I] from z0 [T, 2I]; fills low[2] with q. `i` are the inputs of the op."""
    T, Z = z.shape
    weight = mixed_weight(i.topk_weight, i.topk_idx, i.E)
    h = torch.zeros(T, Z // 2, dtype=wide_dtype(z.dtype), device=z.device)
    for e, token in experts_rows(i, T):
        gate, up = _expert_z(z, token, low, pairs, e, i)
        rows = ACT[i.act](gate) * up * weight[token, e, None]
        h.index_add_(0, token, rows)
        if pairs.down_a is not None:
            _ranks(low[2], i.E)[token, e] = mm(rows.to(z.dtype), pairs.down_a[e].t())
    return h.to(z.dtype)


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
    wide = wide_dtype(dh.dtype)
    weight = mixed_weight(i.topk_weight, i.topk_idx, i.E)
    dz = torch.zeros(T, 2 * I, dtype=wide, device=z.device)
    dweight = torch.zeros(T, i.E, dtype=wide, device=z.device)
    dlow = z.new_zeros(2, T, low.shape[2])
    dhalves = (wide_zeros(pairs.gate_b, needs.gate_b), wide_zeros(pairs.up_b, needs.up_b))
    ddown_a = wide_zeros(pairs.down_a, needs.down_a)
    for e, token in experts_rows(i, T):
        gate, up = _expert_z(z, token, low, pairs, e, i)
        da = dh[token]
        if dq is not None and pairs.down_a is not None:
            dranks = _ranks(dq, i.E)[token, e]
            da = addmm(da, dranks, pairs.down_a[e])
        value = ACT[i.act](gate)
        h = value * up
        dweight[token, e] = (h * da).sum(1)
        grad = da * weight[token, e, None]
        tiles = (ACT_BACKWARD[i.act](up * grad, gate), value * grad)
        dz.index_add_(0, token, torch.cat(tiles, 1))
        narrow = [tile.to(z.dtype) for tile in tiles]
        for plane, dplane, half, dhalf, tile in zip(low, dlow, pairs.halves(), dhalves, narrow):
            if half is not None:
                _ranks(dplane, i.E)[token, e] = mm(tile, half[e].t()).mul_(i.scaling)
            if dhalf is not None:
                dhalf[e] = mm(_ranks(plane, i.E)[token, e].t(), tile) * i.scaling
        if ddown_a is not None and dq is not None:
            weighted = (h * weight[token, e, None]).to(z.dtype)
            ddown_a[e] = mm(dranks.t(), weighted)
    grads = [None if grad is None else grad.to(z.dtype) for grad in (*dhalves, ddown_a)]
    return MixedGradients(dz.to(z.dtype), dlow, dweight, *grads)


def wide_zeros(half: Tensor | None, need: object) -> Tensor | None:
    """Return zeros for the gradient of `half` if it is there and needed, summed in a wide dtype."""
    if half is None or not need:
        return None
    return torch.zeros(half.shape, dtype=wide_dtype(half.dtype), device=half.device)
