"""The torch and cpp backends of `frozen_mlp`: slots sorted by expert, one product per expert,
projection and low-rank matrix.

Gathers, activations and sums are those of `moe_mlp_torch` and `moe_mlp_cpp`. Temporaries have R
rows or rank r: a weight is read in place, or converted one expert at a time
(`frozen_rows.weight_of`).
"""

import torch
from torch import Tensor

from moe_runtime.ops import moe_mlp_cpp, moe_mlp_torch
from moe_runtime.ops.dispatch import live_weights, sort_slots
from moe_runtime.ops.expert_rows import Group, Member, add_product, groups
from moe_runtime.ops.frozen_rows import FrozenExperts, FrozenGradients, Pair, in_order_of, weight_of
from moe_runtime.ops.workspace import lease, scratch


class _Steps:
    """The steps between the products in torch; `moe_mlp_cpp.Plan` is the same with the library.

    The routing weights are multiplied into h before it is rounded to a narrow dtype (`folded`); the
    library applies them in the sum.
    """

    folded = True

    def __init__(self, experts: FrozenExperts, x, topk_weight, offsets, row_slot):
        (self.T, self.K), (self.E, self.Z, self.H) = topk_weight.shape, experts.up.shape
        self.R, self.I = self.T * self.K, experts.down.shape[2]
        self.experts, self.weight, self.row_slot = experts, topk_weight, row_slot.long()
        self.row_token = self.row_slot // max(self.K, 1)
        self.row_weight = topk_weight.reshape(-1)[self.row_slot]
        self.bounds = offsets.tolist()
        self.rows = self.bounds[-1]
        everyone = moe_mlp_torch.sees_everyone(self.bounds, self.row_token, self.T)
        self.groups = list(groups(self.bounds, everyone, self.R, max(self.Z, self.H)))

    def gather(self, name: str, x, group: Group):
        return moe_mlp_torch.gather(
            name, x, self.row_token[group.start : group.end], group.everyone
        )

    def activate(self, group: Group, z, h):
        moe_mlp_torch.activate(self.experts, z, self.row_weight[group.start : group.end], h)

    def activate_backward(self, group: Group, z, dh, dz, wh, dweight):
        rows = slice(group.start, group.end)
        partial = self.row_weight.new_zeros(group.end - group.start)
        moe_mlp_torch.activate_backward(self.experts, z, dh, self.row_weight[rows], dz, wh, partial)
        # rows of a later group at the end are overwritten later
        dweight[self.row_slot[rows]] = partial

    def combine(self, y, weighted: bool):
        y[self.rows :].zero_()
        return moe_mlp_torch.combine_rows(y, self.row_slot, self.weight, folded=True)


def _steps(backend: str, experts: FrozenExperts, x, topk_weight, offsets, row_slot):
    kind = moe_mlp_cpp.Plan if backend == "cpp" else _Steps
    return kind(experts, x, topk_weight, offsets, row_slot.int() if backend == "cpp" else row_slot)


def _product(member: Member, rows, weight, bias, pair: Pair | None, low, out) -> None:
    """Write rows W^T + bias + low B, with low = rows A^T, for a member's rows."""
    e = member.expert
    rows = member.wide(rows)
    out = member.wide(out)
    term = rows
    half = weight.t()
    if pair is not None:  # the small term first, as the large product accumulates onto it
        term = torch.mm(rows, pair.a[e].t(), out=member.wide(low))
        half = pair.b[e]
    torch.mm(term, half, out=out) if bias is None else torch.addmm(bias[e], term, half, out=out)
    if pair is not None:
        out.addmm_(rows, weight.t())


def _low(pair: Pair | None, R: int, x) -> Tensor:
    return x.new_empty(R, 0 if pair is None else pair.a.shape[1])


def forward(x, experts: FrozenExperts, topk_weight, topk_idx, save: bool, backend: str):
    """Return out [T, H], z [R, 2I or I], the low [R, r] of up and of down (empty unless `save`),
    offsets [E + 1], row_slot.
    """
    offsets, row_slot = sort_slots(topk_idx, experts.up.shape[0])
    steps = _steps(backend, experts, x, topk_weight, offsets, row_slot)
    R = steps.R
    I = steps.I
    Z = steps.Z
    H = steps.H
    if steps.rows < R:
        steps.weight = topk_weight = live_weights(topk_weight, topk_idx, steps.E)
    z_all = lease((R, Z), x) if save else x.new_empty(0, Z)
    y = scratch("y", (R, H), x)
    lows = [_low(pair, R, x) for pair in (experts.up_lora, experts.down_lora)]
    for group in steps.groups:
        a = group.start
        b = group.end
        rows = steps.gather("x", x, group)
        z = z_all[a:b] if save else scratch("z", (b - a, Z), x)
        for member in group.members:
            weight = weight_of(experts.up, member.expert, x.dtype, "weight", backend)
            _product(member, rows, weight, experts.up_bias, experts.up_lora, lows[0][a:b], z)
        h = scratch("h", (b - a, I), x)
        steps.activate(group, z, h)
        for member in group.members:
            weight = weight_of(experts.down, member.expert, x.dtype, "weight", backend)
            bias = None if steps.folded else experts.down_bias
            _product(member, h, weight, bias, experts.down_lora, lows[1][a:b], y[a:b])
            if steps.folded and experts.down_bias is not None:
                out = member.own(y[a:b])
                moe_mlp_torch.add_bias(
                    out, experts.down_bias[member.expert], member.own(steps.row_weight[a:b])
                )
    lows = lows if save else [low[:0] for low in lows]
    return steps.combine(y, weighted=True), z_all, *lows, offsets, row_slot.int()


def backward(
    dout,
    x,
    experts: FrozenExperts,
    topk_weight,
    z_all,
    lows,
    offsets,
    row_slot,
    needs: FrozenGradients,
    backend: str,
) -> FrozenGradients:
    """Compute the gradients requested by `needs` from `dout` [T, H]; stacks get none."""
    steps = _steps(backend, experts, x, topk_weight, offsets, row_slot)
    R = steps.R
    I = steps.I
    Z = steps.Z
    H = steps.H
    grads = _new_gradients(experts, steps.bounds, needs)
    dweight = topk_weight.new_zeros(R)
    row_weight = topk_weight.reshape(-1)[row_slot.long()]
    dx = scratch("y", (R, H), x) if needs.x else None
    for group in steps.groups:
        a = group.start
        b = group.end
        dy = steps.gather("dy", dout, group)
        rows = steps.gather("x", x, group)
        z = z_all[a:b]
        dh, dz, wh = (scratch(name, (b - a, n), x) for name, n in (("dh", I), ("dz", Z), ("h", I)))
        up_dlow, down_dlow = (
            _dlow(name, pair, b - a, x)
            for name, pair in (("up", experts.up_lora), ("down", experts.down_lora))
        )
        for member in group.members:
            weight = weight_of(experts.down, member.expert, x.dtype, "weight", backend)
            _transposed_product(member, dy, weight, experts.down_lora, down_dlow, dh)
        steps.activate_backward(group, z, dh, dz, wh, dweight)
        for member in group.members:
            e = member.expert
            own = row_weight[a + member.start : a + member.end]
            if dx is not None:
                weight = weight_of(experts.up, e, x.dtype, "weight", backend)
                _transposed_product(member, dz, weight, experts.up_lora, up_dlow, dx[a:b])
            elif up_dlow is not None:
                torch.mm(member.wide(dz), experts.up_lora.b[e].t(), out=member.wide(up_dlow))
            low = member.own(lows[1][a:b])
            low = low if steps.folded or grads.down_b is None else low * own.to(low.dtype)[:, None]
            _pair_gradients(
                e,
                grads.up_a,
                grads.up_b,
                member.own(rows),
                member.own(lows[0][a:b]),
                up_dlow,
                member,
                dz,
            )
            _pair_gradients(
                e, grads.down_a, grads.down_b, member.own(wh), low, down_dlow, member, dy
            )
            if experts.down_bias is not None:
                _bias_gradients(
                    grads, e, experts.down_bias[e], member, dy, own, steps.row_slot[a:b], dweight
                )
            if grads.up_bias is not None:
                grads.up_bias[e].copy_(member.own(dz).sum(0))
    dweight[steps.row_slot[steps.rows :].long()] = 0
    return grads._replace(
        x=None if dx is None else steps.combine(dx, weighted=False),
        topk_weight=dweight.view(steps.T, steps.K),
    )


def _dlow(name: str, pair: Pair | None, n: int, x) -> Tensor | None:
    return None if pair is None else scratch(f"{name} dlow", (n, pair.a.shape[1]), x)


def _transposed_product(member: Member, dy, weight, pair: Pair | None, dlow, out) -> None:
    """Write dy W + dlow A, with dlow = dy B, for a member's rows."""
    e = member.expert
    dy = member.wide(dy)
    out = member.wide(out)
    if pair is None:
        torch.mm(dy, weight, out=out)
        return
    dlow = torch.mm(dy, pair.b[e].t(), out=member.wide(dlow))
    torch.mm(dlow, pair.a[e], out=out).addmm_(dy, weight)


def _pair_gradients(e: int, grad_a, grad_b, rows, low, dlow, member: Member, dy) -> None:
    """Write dA = dlow^T rows and dB^T = low^T dy of expert e."""
    if grad_a is not None:
        add_product(member.own(dlow), rows, grad_a[e], False)
    if grad_b is not None:
        add_product(low, member.own(dy), grad_b[e], False)


def _bias_gradients(
    grads: FrozenGradients, e: int, bias, member: Member, dy, row_weight, slots, dweight
) -> None:
    """Add <dy, bias> to the weights' gradients, and write that of the bias."""
    dy = member.own(dy).to(row_weight.dtype)
    dweight.index_add_(0, member.own(slots).long(), dy @ bias.to(dy.dtype))
    if grads.down_bias is not None:
        grads.down_bias[e].copy_(row_weight @ dy)


def _new_gradients(
    experts: FrozenExperts, bounds: list[int], needs: FrozenGradients
) -> FrozenGradients:
    """Allocate the gradients of biases and pairs requested by `needs`; zeros for experts without
    rows.
    """
    grads = FrozenGradients(
        *(None if t is None else in_order_of(t) for t in experts.learned().only(needs))
    )
    for e in (e for e in range(len(bounds) - 1) if bounds[e] == bounds[e + 1]):
        for grad in grads:
            if grad is not None:
                grad[e].zero_()
    return grads
