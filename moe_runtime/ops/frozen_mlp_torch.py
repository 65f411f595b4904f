"""The torch and cpp backends of `frozen_mlp`: one product per expert, projection and pair.

Gathers, activations and sums are those of `moe_mlp_torch` and `moe_mlp_cpp`. Temporaries have R
rows or rank r: a weight is read in place, or converted one expert at a time
(`frozen_rows.weight_of`).
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from moe_runtime.ops import moe_mlp_cpp, moe_mlp_torch
from moe_runtime.ops.dispatch import live_weights, sort_slots
from moe_runtime.ops.expert_rows import Group, Member, add_product, groups
from moe_runtime.ops.frozen_rows import FrozenExperts, FrozenGradients, Pair, in_order_of, weight_of
from moe_runtime.ops.workspace import lease, scratch


class _Steps:
    """The steps between the products in torch; `moe_mlp_cpp.RowPlan` is the same with the library.

    The routing weights are multiplied into h before it is rounded to a narrow dtype (`folded`); the
    library applies them in the sum.
    """

    folded = True

    def __init__(
        self,
        experts: FrozenExperts,
        x: Tensor,
        topk_weight: Tensor,
        offsets: Tensor,
        row_slot: Tensor,
    ):
        self.T, self.K = topk_weight.shape
        self.E, self.Z, self.H = experts.up.shape
        self.R = self.T * self.K
        self.I = experts.down.shape[2]
        self.activation = experts.activation
        self.weight = topk_weight
        self.row_slot = row_slot.long()
        self.row_token = self.row_slot // max(self.K, 1)
        self.row_weight = topk_weight.reshape(-1)[self.row_slot]
        self.bounds: list[int] = offsets.tolist()
        self.rows = self.bounds[-1]
        everyone = moe_mlp_torch.sees_everyone(self.bounds, self.row_token, self.T)
        self.groups = list(groups(self.bounds, everyone, self.R, max(self.Z, self.H)))

    def gather(self, name: str, x: Tensor, group: Group) -> Tensor:
        tokens = self.row_token[group.start : group.end]
        return moe_mlp_torch.gather(name, x, tokens, group.everyone)

    def activate(self, group: Group, z: Tensor, h: Tensor) -> None:
        moe_mlp_torch.activate(self.activation, z, self.row_weight[group.start : group.end], h)

    def activate_backward(
        self, group: Group, z: Tensor, dh: Tensor, dz: Tensor, wh: Tensor, dweight: Tensor
    ) -> None:
        rows = slice(group.start, group.end)
        partial = self.row_weight.new_zeros(group.end - group.start)
        moe_mlp_torch.activate_backward(
            self.activation, z, dh, self.row_weight[rows], dz, wh, partial
        )
        # rows of a later group at the end are overwritten later
        dweight[self.row_slot[rows]] = partial

    def combine(self, y: Tensor, weighted: bool) -> Tensor:
        y[self.rows :].zero_()
        return moe_mlp_torch.combine_rows(y, self.row_slot, self.weight, folded=True)


def _steps(
    backend: str,
    experts: FrozenExperts,
    x: Tensor,
    topk_weight: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
) -> Any:
    if backend == "cpp":
        return moe_mlp_cpp.RowPlan(experts, x, topk_weight, offsets, row_slot.int())
    return _Steps(experts, x, topk_weight, offsets, row_slot)


def _product(
    member: Member,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pair: Pair | None,
    low: Tensor,
    out: Tensor,
) -> None:
    """Write rows W^T + bias + low B, with low = rows A^T, for a member's rows."""
    e = member.expert
    rows = member.wide(rows)
    out = member.wide(out)
    term = rows
    half = weight.t()
    if pair is not None:  # the small term first, as the large product accumulates onto it
        term = torch.mm(rows, pair.a[e].t(), out=member.wide(low))
        half = pair.b[e]
    if bias is None:
        torch.mm(term, half, out=out)
    else:
        torch.addmm(bias[e], term, half, out=out)
    if pair is not None:
        out.addmm_(rows, weight.t())


def _low(pair: Pair | None, R: int, x: Tensor) -> Tensor:
    return x.new_empty(R, 0 if pair is None else pair.a.shape[1])


def forward(
    x: Tensor,
    experts: FrozenExperts,
    topk_weight: Tensor,
    topk_idx: Tensor,
    save: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    """Return out [T, H], z [R, 2I or I], the low [R, r] of up and of down, offsets, row_slot.

    z and the low are empty unless `save`.
    """
    offsets, row_slot = sort_slots(topk_idx, experts.up.shape[0])
    steps = _steps(backend, experts, x, topk_weight, offsets, row_slot)
    R = steps.R
    I = steps.I
    Z = steps.Z
    H = steps.H
    if steps.rows < R:
        steps.weight = topk_weight = live_weights(topk_weight, topk_idx, steps.E)
    if save:
        z_all = lease((R, Z), x)
    else:
        z_all = x.new_empty(0, Z)
    y = scratch("y", (R, H), x)
    up_low = _low(experts.up_lora, R, x)
    down_low = _low(experts.down_lora, R, x)
    for group in steps.groups:
        a = group.start
        b = group.end
        rows = steps.gather("x", x, group)
        z = z_all[a:b] if save else scratch("z", (b - a, Z), x)
        for member in group.members:
            weight = weight_of(experts.up, member.expert, x.dtype, "weight", backend)
            _product(member, rows, weight, experts.up_bias, experts.up_lora, up_low[a:b], z)
        h = scratch("h", (b - a, I), x)
        steps.activate(group, z, h)
        for member in group.members:
            weight = weight_of(experts.down, member.expert, x.dtype, "weight", backend)
            bias = None if steps.folded else experts.down_bias
            _product(member, h, weight, bias, experts.down_lora, down_low[a:b], y[a:b])
            if steps.folded and experts.down_bias is not None:
                row_weight = member.own(steps.row_weight[a:b])
                bias = experts.down_bias[member.expert]
                moe_mlp_torch.add_bias(member.own(y[a:b]), bias, row_weight)
    if not save:
        up_low = up_low[:0]
        down_low = down_low[:0]
    return steps.combine(y, weighted=True), z_all, up_low, down_low, offsets, row_slot.int()


def backward(
    dout: Tensor,
    x: Tensor,
    experts: FrozenExperts,
    topk_weight: Tensor,
    z_all: Tensor,
    lows: tuple[Tensor, Tensor],
    offsets: Tensor,
    row_slot: Tensor,
    needs: FrozenGradients,
    backend: str,
) -> FrozenGradients:
    """Compute the gradients requested by `needs` from `dout` [T, H]; stacks get none."""
    steps = _steps(backend, experts, x, topk_weight, offsets, row_slot)
    up_low, down_low = lows
    grads = _new_gradients(experts, steps.bounds, needs)
    dweight = topk_weight.new_zeros(steps.R)
    row_weight = topk_weight.reshape(-1)[row_slot.long()]
    dx = scratch("y", (steps.R, steps.H), x) if needs.x else None
    for group in steps.groups:
        a = group.start
        b = group.end
        dy = steps.gather("dy", dout, group)
        rows = steps.gather("x", x, group)
        dh = scratch("dh", (b - a, steps.I), x)
        dz = scratch("dz", (b - a, steps.Z), x)
        wh = scratch("h", (b - a, steps.I), x)
        up_dlow = _dlow("up", experts.up_lora, b - a, x)
        down_dlow = _dlow("down", experts.down_lora, b - a, x)
        for member in group.members:
            weight = weight_of(experts.down, member.expert, x.dtype, "weight", backend)
            _transposed_product(member, dy, weight, experts.down_lora, down_dlow, dh)
        steps.activate_backward(group, z_all[a:b], dh, dz, wh, dweight)
        low = down_low[a:b]
        if not steps.folded and grads.down_b is not None:
            low = low * row_weight[a:b].to(low.dtype)[:, None]
        for member in group.members:
            e = member.expert
            weights = member.own(row_weight[a:b])
            if dx is not None:
                weight = weight_of(experts.up, e, x.dtype, "weight", backend)
                _transposed_product(member, dz, weight, experts.up_lora, up_dlow, dx[a:b])
            elif experts.up_lora is not None and up_dlow is not None:
                torch.mm(member.wide(dz), experts.up_lora.b[e].t(), out=member.wide(up_dlow))
            if up_dlow is not None:
                _pair_gradient(e, grads.up_a, member, up_dlow, rows)
                _pair_gradient(e, grads.up_b, member, up_low[a:b], dz)
            if down_dlow is not None:
                _pair_gradient(e, grads.down_a, member, down_dlow, wh)
                _pair_gradient(e, grads.down_b, member, low, dy)
            if experts.down_bias is not None:
                wide = member.own(dy).to(weights.dtype)
                slots = member.own(steps.row_slot[a:b]).long()
                dweight.index_add_(0, slots, wide @ experts.down_bias[e].to(wide.dtype))
                if grads.down_bias is not None:
                    grads.down_bias[e].copy_(weights @ wide)
            if grads.up_bias is not None:
                grads.up_bias[e].copy_(member.own(dz).sum(0))
    dweight[steps.row_slot[steps.rows :].long()] = 0
    if dx is not None:
        dx = steps.combine(dx, weighted=False)
    return grads._replace(x=dx, topk_weight=dweight.view(steps.T, steps.K))


def _dlow(name: str, pair: Pair | None, n: int, x: Tensor) -> Tensor | None:
    if pair is None:
        return None
    return scratch(f"{name} dlow", (n, pair.a.shape[1]), x)


def _transposed_product(
    member: Member, dy: Tensor, weight: Tensor, pair: Pair | None, dlow: Tensor | None, out: Tensor
) -> None:
    """Write dy W + dlow A, with dlow = dy B, for a member's rows."""
    e = member.expert
    dy = member.wide(dy)
    out = member.wide(out)
    if pair is None or dlow is None:
        torch.mm(dy, weight, out=out)
        return
    dlow = torch.mm(dy, pair.b[e].t(), out=member.wide(dlow))
    torch.mm(dlow, pair.a[e], out=out).addmm_(dy, weight)


def _pair_gradient(
    e: int, grad: Tensor | None, member: Member, left: Tensor, right: Tensor
) -> None:
    """Write left^T right of expert e's rows: dA = dlow^T x or dB^T = low^T dy."""
    if grad is not None:
        add_product(member.own(left), member.own(right), grad[e], False)


def _new_gradients(
    experts: FrozenExperts, bounds: list[int], needs: FrozenGradients
) -> FrozenGradients:
    """Allocate the requested gradients of biases and pairs; zeros for experts without rows."""
    learned = experts.learned().only(needs)
    grads = FrozenGradients(*[None if t is None else in_order_of(t) for t in learned])
    for e, (first, last) in enumerate(itertools.pairwise(bounds)):
        if first == last:
            for grad in grads:
                if grad is not None:
                    grad[e].zero_()
    return grads
