"""The torch backend of `moe_mlp`: slots sorted by expert, one product per expert and projection.

No index_add, no gathered copy of all rows, no buffer of size [R, ...] except z (saved for the
backward pass), y and dx. Small experts are gathered and activated together, as operator calls would
dominate; large ones in blocks of rows that stay in the cache between the passes.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.ops.activation import ACT, ACT_BACKWARD, Activation
from moe_runtime.ops.combine import weighted_sum
from moe_runtime.ops.dispatch import invert, live_weights, sort_slots
from moe_runtime.ops.expert_rows import (
    NOWHERE,
    ExpertStacks,
    Gradients,
    Group,
    Member,
    Products,
    Router,
    Rows,
    run_backward,
    run_forward,
    with_router,
)
from moe_runtime.ops.library import Tensors, wide_dtype
from moe_runtime.ops.products import is_slow, mm
from moe_runtime.ops.workspace import scratch

ALONE_FROM = 24  # tokens; below, gathering costs less than handling the shared expert separately
# average rows per expert up to which torch's grouped_mm is faster than our loop; 2026-11-22
GROUPED = 48
NARROW = 12  # the same where our loop converts weights in bfloat16 to float32; 2026-11-28
# rows of one elementwise block times I; measured on 2 cores with 1 MB of L2 each, 2026-11-20
BLOCK_ELEMENTS = 1 << 18


def _blocks(rows: int, width: int) -> Iterator[slice]:
    step = max(BLOCK_ELEMENTS // width, 16)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def activate(activation: Activation, z: Tensor, weight: Tensor | None, h: Tensor) -> None:
    """Compute h = act(gate) * up [* weight] from z [n, 2I or I], in float32 between the passes."""
    is_wide = z.dtype in (torch.float32, torch.float64)
    act = ACT[activation.act]
    for rows in _blocks(z.shape[0], h.shape[1]):
        gate, up = activation.split(z[rows] if is_wide else z[rows].float())
        block = h[rows]
        if up is not None and activation.interleaved:  # a copy costs less than strided passes
            gate = gate.contiguous()
            up = up.contiguous()
        value = act(activation.below(gate))
        if up is not None:
            value = torch.mul(value, activation.shifted(up), out=block if is_wide else value)
        if weight is not None:
            value.mul_(weight[rows, None])
        if value is not block:
            block.copy_(value)


class Steps(Rows):
    """The steps between the products in torch, for the CPU or a GPU.

    With `folded`, the routing weights are multiplied into h before it is rounded to a narrow dtype.
    """

    def __init__(
        self,
        experts: Any,
        topk_weight: Tensor,
        offsets: Tensor,
        row_slot: Tensor,
        folded: bool,
    ):
        row_slot = row_slot.long()
        super().__init__(
            experts.up.shape,
            experts.down.shape[2],
            topk_weight,
            offsets.tolist(),
            row_slot,
        )
        self.activation = experts.activation
        self.folded = folded
        self.row_token = row_slot // max(self.K, 1)
        self.divide(sees_everyone(self.bounds, self.row_token, self.T))

    def gather(self, name: str, x: Tensor, group: Group) -> Tensor:
        """Return the rows of `group` of x in scratch memory, or x itself if these are all."""
        if group.everyone:
            return x
        tokens = self.row_token[group.start : group.end]
        return torch.index_select(x, 0, tokens, out=scratch(name, (tokens.numel(), self.H), x))

    def linear(
        self,
        member: Member,
        group: Group,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        weighted: bool,
    ) -> None:
        """Write rows weight + bias for a member; a bias is `weighted` if h is."""
        out = member.wide(out)
        mm(member.wide(rows), weight, out=out)
        if bias is not None:
            row_weight = None
            if weighted and self.folded:
                row_weight = member.wide(self.row_weight[group.start : group.end])
            add_bias(out, bias, row_weight)

    def activate(self, group: Group, z: Tensor, h: Tensor) -> None:
        """Write h for the rows of `group`."""
        weight = None
        if self.folded:
            weight = self.row_weight[group.start : group.end]
        activate(self.activation, z, weight, h)

    def activate_backward(
        self,
        group: Group,
        z: Tensor,
        dh: Tensor,
        dz: Tensor,
        wh: Tensor,
        dweight: Tensor,
    ) -> None:
        """Write dz, weight * h and the gradient of the weights for the rows of `group`."""
        weight = self.row_weight[group.start : group.end]
        dots = torch.empty_like(weight)
        activate_backward(
            self.activation,
            z,
            dh,
            weight,
            dz,
            wh,
            dots,
        )
        end = group.members[-1].end
        dweight[self.row_slot[group.start : group.start + end]] = dots[:end]

    def combine(self, y: Tensor, weighted: bool) -> Tensor:
        """Return the sum of each token's rows of y, times their weights if `weighted`."""
        y[self.rows :].zero_()
        slot_row = invert(self.row_slot).view(self.weight.shape)
        if self.folded or not weighted:
            return weighted_sum(y, None, slot_row)
        return weighted_sum(y, self.weight.to(y.dtype), slot_row)


def _is_narrow(x: Tensor) -> bool:
    """Return whether the weights are applied to h: float32 applies them in the weighted sum."""
    return x.dtype not in (torch.float32, torch.float64)


def forward(
    x: Tensor,
    experts: ExpertStacks,
    topk_weight: Tensor,
    topk_idx: Tensor,
    save: bool,
) -> Tensors:
    """Return out [T, H], z [R, 2I or I] (empty without `save`), expert_offsets, row_slot int32."""
    E = experts.up.shape[0]
    offsets, row_slot = sort_slots(topk_idx, E)
    if _grouped(experts, x, topk_idx.numel()):
        return _forward_grouped(
            x,
            experts,
            topk_weight,
            topk_idx,
            offsets,
            row_slot,
            save,
        )
    steps = Steps(
        experts,
        topk_weight,
        offsets,
        row_slot,
        _is_narrow(x),
    )
    if steps.rows < steps.R:
        steps.weight = live_weights(topk_weight, topk_idx, E)
    out, z_all = run_forward(steps, Products(experts, steps), x, save)
    return out, z_all, offsets, row_slot.int()


def _grouped(experts: ExpertStacks, x: Tensor, R: int) -> bool:
    """Return whether torch's grouped_mm supports these experts and is faster than our loop.

    It is faster for few rows; for fewer in slow bfloat16, which our loop does not use.
    """
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    up = experts.up
    down = experts.down
    if experts.up_trained is not None or not (up.is_contiguous() and down.is_contiguous()):
        return False
    # rows of its operands must be multiples of 16 bytes
    whole = 16 // x.element_size()
    fits = x.shape[1] % whole == 0 and down.shape[2] % whole == 0
    most = NARROW if is_slow(x) else GROUPED
    return fits and 0 < R <= most * up.shape[0]


def _up_grouped(
    x: Tensor,
    experts: ExpertStacks,
    offsets: Tensor,
    row_slot: Tensor,
    row_token: Tensor,
) -> Tensor:
    """Return z [R, 2I or I] of all rows."""
    z = F.grouped_mm(x.index_select(0, row_token), experts.up.transpose(1, 2), offs=offsets[1:])
    if experts.up_bias is not None:
        z.add_(experts.up_bias[_row_expert(offsets, row_slot)])
    return z


def _row_expert(offsets: Tensor, row_slot: Tensor) -> Tensor:
    """Return the expert of each row; the last one for rows of dropped slots."""
    rows = torch.arange(row_slot.numel(), device=row_slot.device)
    return torch.searchsorted(offsets[1:].long(), rows, right=True).clamp_max(offsets.numel() - 2)


def _forward_grouped(
    x: Tensor,
    experts: ExpertStacks,
    topk_weight: Tensor,
    topk_idx: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    save: bool,
) -> Tensors:
    """Run `forward` with torch's grouped_mm."""
    T, K = topk_idx.shape
    E = experts.up.shape[0]
    fold = x.dtype != torch.float32
    row_weight = topk_weight.reshape(-1)[row_slot] if fold else None
    z = _up_grouped(
        x,
        experts,
        offsets,
        row_slot,
        row_slot // K,
    )
    h = scratch("h", (T * K, experts.down.shape[2]), x)
    activate(experts.activation, z, row_weight, h)
    y = F.grouped_mm(h, experts.down.transpose(1, 2), offs=offsets[1:])
    if experts.down_bias is not None:
        add_bias(y, experts.down_bias[_row_expert(offsets, row_slot)], row_weight)
    rows = int(offsets[E])
    if rows < T * K:
        y[rows:].zero_()
        topk_weight = live_weights(topk_weight, topk_idx, E)
    weight = None if fold else topk_weight.to(y.dtype)
    out = weighted_sum(y, weight, invert(row_slot).view(T, K))
    if not save:
        z = x.new_empty(0, z.shape[1])
    return out, z, offsets, row_slot.int()


def sees_everyone(bounds: list[int], row_token: Tensor, T: int) -> list[bool]:
    """Return for each expert whether it processes every token once, in order."""
    if T < ALONE_FROM:
        return [False] * (len(bounds) - 1)
    everyone = torch.arange(T, device=row_token.device)
    return [
        0 < b - a == T and bool((row_token[a:b] == everyone).all())
        for a, b in itertools.pairwise(bounds)
    ]


def add_bias(y: Tensor, bias: Tensor, weight: Tensor | None) -> None:
    """Add `bias` [H], times each row's weight if given, to the rows of `y`."""
    if weight is None:
        y.add_(bias)
    else:
        y.add_((weight[:, None] * bias.to(weight.dtype)).to(y.dtype))


def backward(
    dout: Tensor,
    x: Tensor,
    experts: ExpertStacks,
    topk_weight: Tensor,
    z_all: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    needs: Gradients,
    router: Router | None = None,
    into: Gradients = NOWHERE,
) -> Gradients:
    """Compute the gradients requested by `needs` from `dout` [T, H].

    `z_all` [0, ...] is recomputed. Frozen experts cost nothing and get zeros; if trained weights
    are stored separately, the gradients of up and down are theirs. `router(dweight)` returns
    dlogits [T, R] and the router's weight [R, H], whose product is added to dx. Gradients in `into`
    are accumulated in place.
    """
    steps = Steps(
        experts,
        topk_weight,
        offsets,
        row_slot,
        _is_narrow(x),
    )
    products = Products(experts, steps, needs, into)
    if not z_all.shape[0] and _grouped(experts, x, steps.R):  # bit-identical to the forward pass
        z_all = _up_grouped(
            x,
            experts,
            offsets,
            steps.row_slot,
            steps.row_token,
        )
    dx, dweight = run_backward(
        steps,
        products,
        dout,
        x,
        z_all,
        bool(needs.x),
    )
    return with_router(products.grads, dx, dweight, router)


def activate_backward(
    activation: Activation,
    z: Tensor,
    dh: Tensor,
    weight: Tensor,
    dz: Tensor,
    wh: Tensor,
    dweight: Tensor,
) -> None:
    """Compute the gradients of `activate` from z [n, 2I or I] and dh [n, I] = dy W_down.

    dweight = <dh, h>, wh = weight * h and dz = weight * dh * h'(z), in blocks of rows.
    """
    act = ACT[activation.act]
    act_backward = ACT_BACKWARD[activation.act]
    limit = activation.limit
    wide = wide_dtype(z.dtype)
    for rows in _blocks(z.shape[0], dh.shape[1]):
        gate, up = activation.split(z[rows])
        dgate, dup = activation.split(dz[rows])
        gate = gate.to(wide)
        if up is not None:
            up = up.to(wide)
            if activation.interleaved:
                gate = gate.contiguous()
                up = up.contiguous()
        grad = dh[rows].to(wide)
        w = weight[rows, None]
        below = activation.below(gate)
        h = act(below)
        value = h
        if up is not None:
            factor = activation.shifted(up)
            value = torch.mul(h, factor)
        torch.sum(value * grad, 1, out=dweight[rows])
        if wh.dtype == wide:
            torch.mul(value, w, out=wh[rows])
        else:
            wh[rows].copy_(value * w)
        grad = grad * w
        if up is not None and dup is not None:
            through = h.mul_(grad)
            if limit is not None:
                through = torch.where(up.abs() <= limit, through, 0)
            dup.copy_(through)
            grad = grad.mul_(factor)
        grad = act_backward(grad, below)
        if limit is not None:
            grad = torch.where(gate <= limit, grad, 0)
        dgate.copy_(grad)
