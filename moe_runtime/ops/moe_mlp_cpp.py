"""The cpp backend of `moe_mlp`: csrc/cpu alone in one call, or torch's matmuls with csrc/cpu around
them.

The forward pass is one call, and so is the backward pass, where that was measured to be faster, and
on every CPU for experts with few rows, where reading each weight only once decides. Otherwise
torch's matmuls run as in `moe_mlp_torch`, and sorting, gathering, the activation with its gradient,
and the weighted sum are one pass each, computed in float32.
"""

import itertools
import math

import torch
from torch import Tensor

from moe_runtime.native.library import cpp
from moe_runtime.ops._torch_private import has_matrix_tiles
from moe_runtime.ops.expert_rows import (
    NOWHERE,
    Experts,
    Gradients,
    groups,
    new_gradients,
    weight_at,
    weight_gradients,
)
from moe_runtime.ops.workspace import lease, scratch

ANY = 1 << 62
# rows of the largest expert up to which one call is faster than matmuls; 2 cores with AVX-512,
# torch 2.13, limited to the same instruction set, 2026-11-23
_ALL = {torch.float32: ANY, torch.bfloat16: ANY}
FEW = {
    "amx": _ALL,
    "avx512_bf16": _ALL,
    "avx512": _ALL,
    "avx2": {torch.float32: 128, torch.bfloat16: ANY},
}
# for bfloat16 if torch uses the CPU's matrix tiles and our library, not built for `amx`, does not
FEW_OF_TILES = 8
BACK_ELEMENTS = 1 << 22  # elements of dz and wh that the backward pass holds for a group of experts
# on other CPUs: where reading the weights only once decides
FEW_ELSEWHERE = dict.fromkeys((torch.float32, torch.bfloat16), 16)


class Plan:
    """Index arrays of one call, and the library's functions on them."""

    folded = False  # routing weights are applied in the sum

    def __init__(self, experts: Experts, x, topk_weight, offsets, row_slot):
        (self.T, self.K), (self.E, self.Z, self.H) = topk_weight.shape, experts.up.shape
        self.R, self.I = self.T * self.K, experts.down.shape[2]
        self.calls, self.threads, self.weight = (
            cpp.library().handle,
            torch.get_num_threads(),
            topk_weight,
        )
        self.dtype, self.form = cpp.DTYPES[x.dtype], form_of(experts)
        self.row_slot = row_slot
        self.row_token = scratch("row_token", (self.R,), row_slot)
        self.slot_row = scratch("slot_row", (self.R,), row_slot)
        everyone = scratch("everyone", (self.E,), row_slot, torch.uint8)
        self.calls.moert_cpu_plan(
            offsets.data_ptr(),
            row_slot.data_ptr(),
            self.T,
            self.K,
            self.E,
            self.row_token.data_ptr(),
            self.slot_row.data_ptr(),
            everyone.data_ptr(),
        )
        self.bounds = offsets.tolist()
        self.rows = self.bounds[-1]  # rows of experts; those of dropped slots follow
        self.groups = list(groups(self.bounds, everyone.tolist(), self.R, max(self.Z, self.H)))

    def gather(self, name: str, x, group):
        """Return the rows of `group` of x in scratch memory, or x itself if the expert processes
        every token once, in order.
        """
        if group.everyone:
            return x
        rows = scratch(name, (group.end - group.start, self.H), x)
        self.calls.moert_cpu_gather(
            x.data_ptr(),
            self.row_token[group.start :].data_ptr(),
            rows.shape[0],
            self.H * x.element_size(),
            rows.data_ptr(),
            self.threads,
        )
        return rows

    def activate(self, group, z, h):
        """Write h for the rows of `group`."""
        self.calls.moert_cpu_activate(
            self.dtype,
            *self.form,
            z.data_ptr(),
            group.members[-1].end,
            self.I,
            h.data_ptr(),
            self.threads,
        )

    def activate_backward(self, group, z, dh, dz, wh, dweight):
        """Write dz and weight * h for the rows of `group`, and the gradients of their slots'
        weights.
        """
        self.calls.moert_cpu_activate_backward(
            self.dtype,
            *self.form,
            z.data_ptr(),
            dh.data_ptr(),
            self.weight.data_ptr(),
            self.row_slot[group.start :].data_ptr(),
            group.members[-1].end,
            self.I,
            dz.data_ptr(),
            wh.data_ptr(),
            dweight.data_ptr(),
            self.threads,
        )

    def combine(self, y, weighted: bool):
        """Return the sum of each token's rows of y, times their weights if `weighted`."""
        out = y.new_empty(self.T, self.H)
        self.calls.moert_cpu_combine(
            self.dtype,
            y.data_ptr(),
            self.weight.data_ptr() if weighted else None,
            self.slot_row.data_ptr(),
            self.T,
            self.K,
            self.H,
            self.rows,
            out.data_ptr(),
            self.threads,
        )
        return out


def form_of(experts: Experts) -> tuple[int, int, float, float]:
    """Return act, form, limit and up_offset as moert_cpu.h expects them."""
    form = experts.activation
    limit = math.inf if form.limit is None else form.limit
    return cpp.ACTS[form.act], form.gated + form.interleaved, limit, form.up_offset


def forward(x, experts: Experts, topk_weight, topk_idx, save: bool):
    """Return out [T, H], z [R, 2I or I] (empty unless `save`), expert_offsets [E + 1], row_slot [R]
    int32.
    """
    E, Z, H = experts.up.shape
    R = topk_idx.numel()
    I = experts.down.shape[2]
    offsets, row_slot = (topk_idx.new_empty(n, dtype=torch.int32) for n in (E + 1, R))
    most = cpp.library().handle.moert_cpu_sort(
        topk_idx.data_ptr(),
        cpp.IDX_KINDS[topk_idx.dtype],
        R,
        E,
        offsets.data_ptr(),
        row_slot.data_ptr(),
        None,
    )
    z_all = lease((R, Z), x) if save else x.new_empty(0, Z)
    if _in_one_call(experts, most):
        out = x.new_empty(x.shape)
        _one_call(x, experts, topk_weight, offsets, row_slot, (0, E), z_all if save else None, out)
        return out, z_all, offsets, row_slot
    plan = Plan(experts, x, topk_weight, offsets, row_slot)
    y = scratch("y", (R, H), x)
    up = _transposed(experts, "up")
    down = _transposed(experts, "down")
    for group in plan.groups:
        a = group.start
        b = group.end
        rows = plan.gather("x", x, group)
        z = z_all[a:b] if save else scratch("z", (b - a, Z), x)
        _up(group, experts, up, rows, z)
        h = scratch("h", (b - a, I), x)
        plan.activate(group, z, h)
        for member in group.members:
            _mm(
                member.wide(h),
                down[member.expert],
                experts.down_bias,
                member.expert,
                member.wide(y[a:b]),
            )
    return plan.combine(y, weighted=True), z_all, offsets, row_slot


def _in_one_call(experts: Experts, most: int) -> bool:
    """Return whether to use one call, by the `most` rows of an expert; requires stacks with
    contiguous rows.
    """
    if experts.up_trained is not None or not experts.up.stride(2) == 1 == experts.down.stride(2):
        return False
    return most <= few_rows(experts.up.dtype)


def few_rows(dtype: torch.dtype) -> int:
    """Return the rows of the largest expert up to which one call is used."""
    # for bfloat16 a CPU's matrix tiles are faster than its vector units
    variant = cpp.library().variant
    if dtype == torch.bfloat16 and variant != "amx" and has_matrix_tiles():
        return FEW_OF_TILES
    return FEW.get(variant, FEW_ELSEWHERE)[dtype]


def one_call_bytes(
    dtype: torch.dtype, T: int, H: int, I: int, E: int, K: int, z_alone: bool = False
) -> int:
    """Return the bytes of scratch memory of one call, only up to the pre-activation if
    `z_alone`.
    """
    threads = torch.get_num_threads()
    return cpp.library().handle.moert_cpu_experts_bytes(
        cpp.DTYPES[dtype], T, H, I, E, K, z_alone, threads
    )


def _one_call(
    x, experts: Experts, topk_weight, offsets, row_slot, part: tuple[int, int], z, out
) -> None:
    """Write out [T, H], the sum over the experts in `part`, and their rows of z; either may be
    None.
    """
    (T, K), (E, _, H), I = topk_weight.shape, experts.up.shape, experts.down.shape[2]
    calls = cpp.library().handle
    dtype = cpp.DTYPES[x.dtype]
    up = experts.up
    down = experts.down
    threads = torch.get_num_threads()
    size = one_call_bytes(x.dtype, T, H, I, E, K, out is None)
    space = scratch("one call", (size,), x, torch.uint8)
    biases = [
        None if bias is None else bias.contiguous() for bias in (experts.up_bias, experts.down_bias)
    ]
    calls.moert_cpu_experts(
        dtype,
        *form_of(experts),
        x.data_ptr(),
        up.data_ptr(),
        up.stride(0),
        up.stride(1),
        down.data_ptr(),
        down.stride(0),
        down.stride(1),
        *(None if bias is None else bias.data_ptr() for bias in biases),
        topk_weight.data_ptr(),
        offsets.data_ptr(),
        row_slot.data_ptr(),
        T,
        H,
        I,
        E,
        K,
        *part,
        space.data_ptr(),
        *(None if tensor is None else tensor.data_ptr() for tensor in (z, out)),
        threads,
    )


def _weights(experts: Experts, name: str) -> list[Tensor]:
    """Return the stack `name`, "up" or "down", expert by expert."""
    stack = getattr(experts, name)
    trained = getattr(experts, f"{name}_trained")
    if trained is None:
        return stack.unbind(0)
    return [weight_at(e, row, stack, trained) for e, row in enumerate(experts.rows())]


def _transposed(experts: Experts, name: str) -> list[Tensor]:
    if experts.up_trained is None:
        return getattr(experts, name).transpose(1, 2).unbind(0)
    return [weight.t() for weight in _weights(experts, name)]


def _mm(rows, weight, bias, e: int, out) -> None:
    torch.mm(rows, weight, out=out) if bias is None else torch.addmm(bias[e], rows, weight, out=out)


def _up(group, experts: Experts, up: list, rows, z) -> None:
    """Write the pre-activation of a group's `rows` into z."""
    for member in group.members:
        _mm(member.wide(rows), up[member.expert], experts.up_bias, member.expert, member.wide(z))


def backward(
    dout,
    x,
    experts: Experts,
    topk_weight,
    z_all,
    offsets,
    row_slot,
    needs: Gradients,
    router=None,
    into: Gradients = NOWHERE,
) -> Gradients:
    """Like `moe_mlp_torch.backward`."""
    if _back_in_one_call(experts, offsets, into):
        dx, dweight, grads = _one_call_back(
            dout, x, experts, topk_weight, z_all, offsets, row_slot, needs, into
        )
        return _with_router(grads, dx, dweight.view(topk_weight.shape), router)
    plan = Plan(experts, x, topk_weight, offsets, row_slot)
    T = plan.T
    K = plan.K
    R = plan.R
    I = plan.I
    Z = plan.Z
    H = plan.H
    trained = experts.rows()
    dweight = topk_weight.new_empty(R)
    if plan.rows < R:
        dweight.zero_()
    grads = new_gradients(experts, plan.bounds, trained, needs, into)
    each = grads._replace(
        **{
            name: grad.unbind(0)
            for name in ("up", "down")
            if (grad := getattr(grads, name)) is not None
        }
    )
    row_weight = None if grads.down_bias is None else topk_weight.reshape(-1)[row_slot]
    up = _weights(experts, "up")
    down = _weights(experts, "down")
    saved = z_all.shape[0] > 0
    most = max((b - a for a, b in itertools.pairwise(plan.bounds)), default=0)
    one_call = not saved and _in_one_call(experts, most)
    transposed = None if saved or one_call else _transposed(experts, "up")
    dx = scratch("y", (R, H), x) if needs.x else None
    for group in plan.groups:
        a = group.start
        b = group.end
        dy = plan.gather("dy", dout, group)
        rows = plan.gather("x", x, group)
        z = z_all[a:b] if saved else scratch("z", (b - a, Z), x)
        if one_call:  # bit-identical to the forward pass
            part = (group.members[0].expert, group.members[-1].expert + 1)
            _one_call(x, experts, topk_weight, offsets, row_slot, part, z, None)
        elif not saved:
            _up(group, experts, transposed, rows, z)
        dh, dz, wh = (scratch(name, (b - a, n), x) for name, n in (("dh", I), ("dz", Z), ("h", I)))
        for member in group.members:
            torch.mm(member.wide(dy), down[member.expert], out=member.wide(dh))
        plan.activate_backward(group, z, dh, dz, wh, dweight)
        for member in group.members:
            e = member.expert
            if dx is not None:
                torch.mm(member.wide(dz), up[e], out=member.wide(dx[a:b]))
            if trained[e] >= 0:
                own = None if row_weight is None else row_weight[a:b]
                weight_gradients(each, member, trained[e], dy, wh, dz, rows, own, into)
            if experts.down_bias is not None:
                slots = plan.row_slot[a + member.start : a + member.end]
                dweight.index_add_(
                    0, slots, (member.own(dy).float() * experts.down_bias[e].float()).sum(1)
                )
    dx = None if dx is None else plan.combine(dx, weighted=False)
    return _with_router(grads, dx, dweight.view(T, K), router)


def _with_router(grads: Gradients, dx, dweight, router) -> Gradients:
    if router is not None:
        dlogits, weight = router(dweight)
        dx = None if dx is None else dx.addmm_(dlogits, weight)
    return grads._replace(x=dx, topk_weight=dweight)


def _back_in_one_call(experts: Experts, offsets, into: Gradients) -> bool:
    """Return whether to use one call for the backward pass: as for the forward pass, but without
    biases.
    """
    rows = offsets.diff()
    has_bias = experts.up_bias is not None or experts.down_bias is not None
    if has_bias or not rows.numel() or not _in_one_call(experts, int(rows.max())):
        return False
    return all(
        old is None or (old.dtype == experts.up.dtype and old.stride(2) == 1)
        for old in (into.up, into.down)
    )


def one_call_back_bytes(
    dtype: torch.dtype, form: int, offsets: int, T: int, H: int, I: int, E: int, K: int, recompute
) -> int:
    """Return the bytes of scratch memory of a backward pass in one call; `form` 0 is not gated,
    `offsets` is an address.
    """
    group = max(BACK_ELEMENTS // (I * (3 if form else 2)), 1)
    return cpp.library().handle.moert_cpu_experts_backward_bytes(
        cpp.DTYPES[dtype], form, offsets, T, H, I, E, K, group, recompute, torch.get_num_threads()
    )


def _one_call_back(
    dout,
    x,
    experts: Experts,
    topk_weight,
    z_all,
    offsets,
    row_slot,
    needs: Gradients,
    into: Gradients,
):
    """Return dx [T, H] or None, dweight [T * K] and the gradients of the weights."""
    (T, K), (E, Z, H), I = topk_weight.shape, experts.up.shape, experts.down.shape[2]
    calls = cpp.library().handle
    dtype = cpp.DTYPES[x.dtype]
    form = form_of(experts)
    threads = torch.get_num_threads()
    bounds = offsets.tolist()
    trained = experts.rows()
    grads = new_gradients(experts, bounds, trained, needs, into)
    dx = x.new_empty(T, H) if needs.x else None
    dweight = topk_weight.new_zeros(T * K) if bounds[-1] < T * K else topk_weight.new_empty(T * K)
    trains = torch.tensor([row >= 0 for row in trained], dtype=torch.uint8)
    saved = z_all.shape[0] > 0
    group = max(BACK_ELEMENTS // (Z + I), 1)
    size = one_call_back_bytes(x.dtype, form[1], offsets.data_ptr(), T, H, I, E, K, not saved)
    space = scratch("one call", (size,), x, torch.uint8)
    weights = []
    made = []
    for stack, grad, old in (
        (experts.up, grads.up, into.up),
        (experts.down, grads.down, into.down),
    ):
        weights += [stack.data_ptr(), stack.stride(0), stack.stride(1)]
        if grad is None:
            made += [None, 0, 0, 0]
        else:
            made += [grad.data_ptr(), grad.stride(0), grad.stride(1), old is not None]
    calls.moert_cpu_experts_backward(
        dtype,
        *form,
        x.data_ptr(),
        dout.data_ptr(),
        *weights,
        topk_weight.data_ptr(),
        offsets.data_ptr(),
        row_slot.data_ptr(),
        T,
        H,
        I,
        E,
        K,
        group,
        trains.data_ptr(),
        z_all.data_ptr() if saved else None,
        space.data_ptr(),
        None if dx is None else dx.data_ptr(),
        dweight.data_ptr(),
        *made,
        threads,
    )
    return dx, dweight, grads
