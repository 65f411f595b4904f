"""The torch and cpp backends of `frozen_mlp`: one product per expert, projection and pair.

Gathers, activations and sums are those of `moe_mlp_torch` and `moe_mlp_cpp`. Temporaries have R
rows or rank r: a weight is read in place, or converted one expert at a time
(`frozen_rows.weight_of`).
"""

import itertools
from typing import Any

from torch import Tensor

from moe_runtime.ops import moe_mlp_cpp, moe_mlp_torch
from moe_runtime.ops.dispatch import sort_slots
from moe_runtime.ops.expert_rows import Group, Member, run_backward, run_forward
from moe_runtime.ops.frozen_rows import (
    FrozenExperts,
    FrozenGradients,
    Pair,
    Stack,
    in_order_of,
    weight_of,
)
from moe_runtime.ops.products import addmm, mm
from moe_runtime.ops.workspace import scratch


def _steps(
    backend: str,
    experts: FrozenExperts,
    topk_weight: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
) -> Any:
    """Return the steps between the products. Torch's multiply the routing weights into h."""
    if backend == "cpp":
        return moe_mlp_cpp.RowPlan(experts, topk_weight, offsets, row_slot.int())
    return moe_mlp_torch.Steps(
        experts,
        topk_weight,
        offsets,
        row_slot,
        folded=True,
    )


class _Products:
    """The products of one call with the frozen stacks and the pairs, as `expert_rows.Products`."""

    up_dlow: Tensor | None
    down_dlow: Tensor | None

    def __init__(
        self,
        experts: FrozenExperts,
        steps: Any,
        backend: str,
        lows: tuple[Tensor, Tensor],
        grads: FrozenGradients | None = None,
    ):
        self.experts = experts
        self.steps = steps
        self.backend = backend
        self.up_low, self.down_low = lows  # [R, r], written by the forward pass
        self.dtype = self.up_low.dtype
        self.grads: Any = grads

    def _weight(self, stack: Stack, e: int) -> Tensor:
        return weight_of(
            stack,
            e,
            self.dtype,
            "weight",
            self.backend,
        )

    def first(self, group: Group, rows: Tensor, z: Tensor) -> None:
        experts = self.experts
        low = self.up_low[group.start : group.end]
        for member in group.members:
            weight = self._weight(experts.up, member.expert)
            _product(
                member,
                rows,
                weight,
                experts.up_bias,
                experts.up_lora,
                low,
                z,
            )

    def second(self, group: Group, h: Tensor, y: Tensor) -> None:
        experts = self.experts
        biases = experts.down_bias
        part = slice(group.start, group.end)
        for member in group.members:
            weight = self._weight(experts.down, member.expert)
            bias = None if self.steps.folded else biases
            _product(
                member,
                h,
                weight,
                bias,
                experts.down_lora,
                self.down_low[part],
                y,
            )
            if self.steps.folded and biases is not None:
                row_weight = member.own(self.steps.row_weight[part])
                moe_mlp_torch.add_bias(member.own(y), biases[member.expert], row_weight)

    def second_backward(self, group: Group, dy: Tensor, dh: Tensor) -> None:
        experts = self.experts
        self.up_dlow = _dlow("up", experts.up_lora, dy)
        self.down_dlow = _dlow("down", experts.down_lora, dy)
        for member in group.members:
            weight = self._weight(experts.down, member.expert)
            _transposed_product(
                member,
                dy,
                weight,
                experts.down_lora,
                self.down_dlow,
                dh,
            )

    def backward(
        self,
        member: Member,
        group: Group,
        rows: Tensor,
        dy: Tensor,
        dz: Tensor,
        wh: Tensor,
        dx: Tensor | None,
    ) -> Tensor | None:
        e = member.expert
        experts = self.experts
        grads = self.grads
        part = slice(group.start, group.end)
        row_weight = member.own(self.steps.row_weight[part])
        if dx is not None:
            weight = self._weight(experts.up, e)
            _transposed_product(
                member,
                dz,
                weight,
                experts.up_lora,
                self.up_dlow,
                dx,
            )
        elif experts.up_lora is not None and self.up_dlow is not None:
            mm(member.wide(dz), experts.up_lora.b[e].t(), out=member.wide(self.up_dlow))
        if self.up_dlow is not None:
            _pair_gradient(e, grads.up_a, member.own(self.up_dlow), member.own(rows))
            _pair_gradient(e, grads.up_b, member.own(self.up_low[part]), member.own(dz))
        if self.down_dlow is not None:
            low = member.own(self.down_low[part])
            if not self.steps.folded and grads.down_b is not None:
                low = low * row_weight.to(low.dtype)[:, None]
            _pair_gradient(e, grads.down_a, member.own(self.down_dlow), member.own(wh))
            _pair_gradient(e, grads.down_b, low, member.own(dy))
        if grads.up_bias is not None:
            grads.up_bias[e].copy_(member.own(dz).sum(0))
        if experts.down_bias is None:
            return None
        wide = member.own(dy).to(row_weight.dtype)
        if grads.down_bias is not None:
            grads.down_bias[e].copy_(row_weight @ wide)
        return wide @ experts.down_bias[e].to(wide.dtype)


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
        term = mm(rows, pair.a[e].t(), out=member.wide(low))
        half = pair.b[e]
    if bias is None:
        mm(term, half, out=out)
    else:
        addmm(bias[e], term, half, out=out)
    if pair is not None:
        addmm(out, rows, weight.t(), out=out)


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
    steps = _steps(
        backend,
        experts,
        topk_weight,
        offsets,
        row_slot,
    )
    lows = (_low(experts.up_lora, steps.R, x), _low(experts.down_lora, steps.R, x))
    out, z_all = run_forward(steps, _Products(experts, steps, backend, lows), x, save)
    if not save:
        lows = (lows[0][:0], lows[1][:0])
    return out, z_all, *lows, offsets, row_slot.int()


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
    steps = _steps(
        backend,
        experts,
        topk_weight,
        offsets,
        row_slot,
    )
    grads = _new_gradients(experts, steps.bounds, needs)
    products = _Products(experts, steps, backend, lows, grads)
    dx, dweight = run_backward(
        steps,
        products,
        dout,
        x,
        z_all,
        bool(needs.x),
    )
    return grads._replace(x=dx, topk_weight=dweight)


def _dlow(name: str, pair: Pair | None, dy: Tensor) -> Tensor | None:
    if pair is None:
        return None
    return scratch(f"{name} dlow", (dy.shape[0], pair.a.shape[1]), dy)


def _transposed_product(
    member: Member,
    dy: Tensor,
    weight: Tensor,
    pair: Pair | None,
    dlow: Tensor | None,
    out: Tensor,
) -> None:
    """Write dy W + dlow A, with dlow = dy B, for a member's rows."""
    e = member.expert
    dy = member.wide(dy)
    out = member.wide(out)
    if pair is None or dlow is None:
        mm(dy, weight, out=out)
        return
    dlow = mm(dy, pair.b[e].t(), out=member.wide(dlow))
    mm(dlow, pair.a[e], out=out)
    addmm(out, dy, weight, out=out)


def _pair_gradient(e: int, grad: Tensor | None, left: Tensor, right: Tensor) -> None:
    """Write left^T right of expert e's rows: dA = dlow^T x or dB^T = low^T dy."""
    if grad is not None:
        mm(left.t(), right, out=grad[e])


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
