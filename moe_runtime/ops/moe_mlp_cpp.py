"""The cpp backend of `moe_mlp`: csrc/cpu alone in one call, or torch's matmuls with csrc/cpu around
them.

The forward pass is one call, and so is the backward pass, where that was measured to be faster, and
on every CPU for experts with few rows, where reading each weight only once decides. Otherwise
torch's matmuls run as in `moe_mlp_torch`, and sorting, gathering, the activation with its gradient,
and the weighted sum are one pass each, computed in float32.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from moe_runtime.native.library import cpp
from moe_runtime.ops._torch_private import has_matrix_tiles
from moe_runtime.ops.expert_rows import (
    NOWHERE,
    ExpertStacks,
    Gradients,
    Group,
    Router,
    groups,
    new_gradients,
    weight_at,
    weight_gradients,
)
from moe_runtime.ops.frozen_rows import FrozenExperts
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


class RowPlan:
    """Index arrays of one call, and the library's functions on them."""

    folded = False  # routing weights are applied in the sum

    def __init__(
        self,
        experts: ExpertStacks | FrozenExperts,
        x: Tensor,
        topk_weight: Tensor,
        offsets: Tensor,
        row_slot: Tensor,
    ):
        self.T, self.K = topk_weight.shape
        self.E, self.Z, self.H = experts.up.shape
        self.R = self.T * self.K
        self.I = experts.down.shape[2]
        self.calls = cpp.library().handle
        self.threads = torch.get_num_threads()
        self.weight = topk_weight
        self.dtype = cpp.DTYPES[x.dtype]
        self.form = form_of(experts)
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
        self.bounds: list[int] = offsets.tolist()
        self.rows = self.bounds[-1]  # rows of experts; those of dropped slots follow
        self.groups = list(groups(self.bounds, everyone.tolist(), self.R, max(self.Z, self.H)))

    def gather(self, name: str, x: Tensor, group: Group) -> Tensor:
        """Return the rows of `group` of x in scratch memory, or x itself if these are all."""
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

    def activate(self, group: Group, z: Tensor, h: Tensor) -> None:
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

    def activate_backward(
        self, group: Group, z: Tensor, dh: Tensor, dz: Tensor, wh: Tensor, dweight: Tensor
    ) -> None:
        """Write dz, weight * h and the gradient of the slots' weights for the rows of `group`."""
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

    def combine(self, y: Tensor, weighted: bool) -> Tensor:
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


def form_of(experts: ExpertStacks | FrozenExperts) -> tuple[int, int, float, float]:
    """Return act, form, limit and up_offset as moert_cpu.h expects them."""
    form = experts.activation
    limit = form.limit
    if limit is None:
        limit = math.inf
    return cpp.ACTS[form.act], form.gated + form.interleaved, limit, form.up_offset


def forward(
    x: Tensor, experts: ExpertStacks, topk_weight: Tensor, topk_idx: Tensor, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out [T, H], z [R, 2I or I] (empty without `save`), expert_offsets, row_slot int32."""
    E, Z, H = experts.up.shape
    R = topk_idx.numel()
    I = experts.down.shape[2]
    offsets = topk_idx.new_empty(E + 1, dtype=torch.int32)
    row_slot = topk_idx.new_empty(R, dtype=torch.int32)
    most = cpp.library().handle.moert_cpu_sort(
        topk_idx.data_ptr(),
        cpp.IDX_KINDS[topk_idx.dtype],
        R,
        E,
        offsets.data_ptr(),
        row_slot.data_ptr(),
        None,
    )
    if save:
        z_all = lease((R, Z), x)
    else:
        z_all = x.new_empty(0, Z)
    if _in_one_call(experts, most):
        out = x.new_empty(x.shape)
        z_out = z_all if save else None
        _one_call(x, experts, topk_weight, offsets, row_slot, (0, E), z_out, out)
        return out, z_all, offsets, row_slot
    plan = RowPlan(experts, x, topk_weight, offsets, row_slot)
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
            e = member.expert
            _mm(member.wide(h), down[e], experts.down_bias, e, member.wide(y[a:b]))
    return plan.combine(y, weighted=True), z_all, offsets, row_slot


def _in_one_call(experts: ExpertStacks, most: int) -> bool:
    """Return whether one call is used for at most `most` rows of an expert.

    It requires stacks with contiguous rows.
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
    """Return the bytes of scratch memory of one call, or of its pre-activation if `z_alone`."""
    threads = torch.get_num_threads()
    return cpp.library().handle.moert_cpu_experts_bytes(
        cpp.DTYPES[dtype], T, H, I, E, K, z_alone, threads
    )


def _address(tensor: Tensor | None) -> int | None:
    """Return where a contiguous tensor starts; None without one."""
    return None if tensor is None else tensor.data_ptr()


def _one_call(
    x: Tensor,
    experts: ExpertStacks,
    topk_weight: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    part: tuple[int, int],
    z: Tensor | None,
    out: Tensor | None,
) -> None:
    """Write out [T, H], the sum over the experts in `part`, and z, their rows; both optional."""
    T, K = topk_weight.shape
    E, _, H = experts.up.shape
    I = experts.down.shape[2]
    up = experts.up
    down = experts.down
    up_bias = experts.up_bias
    down_bias = experts.down_bias
    if up_bias is not None:
        up_bias = up_bias.contiguous()
    if down_bias is not None:
        down_bias = down_bias.contiguous()
    size = one_call_bytes(x.dtype, T, H, I, E, K, out is None)
    space = scratch("one call", (size,), x, torch.uint8)
    cpp.library().handle.moert_cpu_experts(
        cpp.DTYPES[x.dtype],
        *form_of(experts),
        x.data_ptr(),
        up.data_ptr(),
        up.stride(0),
        up.stride(1),
        down.data_ptr(),
        down.stride(0),
        down.stride(1),
        _address(up_bias),
        _address(down_bias),
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
        _address(z),
        _address(out),
        torch.get_num_threads(),
    )


def _weights(experts: ExpertStacks, name: str) -> list[Tensor]:
    """Return the stack `name`, "up" or "down", expert by expert."""
    stack = getattr(experts, name)
    trained = getattr(experts, f"{name}_trained")
    if trained is None:
        return stack.unbind(0)
    return [weight_at(e, row, stack, trained) for e, row in enumerate(experts.rows())]


def _transposed(experts: ExpertStacks, name: str) -> list[Tensor]:
    if experts.up_trained is None:
        return getattr(experts, name).transpose(1, 2).unbind(0)
    return [weight.t() for weight in _weights(experts, name)]


def _mm(rows: Tensor, weight: Tensor, bias: Tensor | None, e: int, out: Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight, out=out)
    else:
        torch.addmm(bias[e], rows, weight, out=out)


def _up(group: Group, experts: ExpertStacks, up: list[Tensor], rows: Tensor, z: Tensor) -> None:
    """Write the pre-activation of a group's `rows` into z."""
    for member in group.members:
        _mm(member.wide(rows), up[member.expert], experts.up_bias, member.expert, member.wide(z))


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
    """Like `moe_mlp_torch.backward`."""
    if _back_in_one_call(experts, offsets, into):
        dx, dweight, grads = _one_call_back(
            dout, x, experts, topk_weight, z_all, offsets, row_slot, needs, into
        )
        return _with_router(grads, dx, dweight.view(topk_weight.shape), router)
    plan = RowPlan(experts, x, topk_weight, offsets, row_slot)
    Z = plan.Z
    trained = experts.rows()
    dweight = topk_weight.new_empty(plan.R)
    if plan.rows < plan.R:
        dweight.zero_()
    grads = new_gradients(experts, plan.bounds, trained, needs, into)
    each: Any = grads  # one tensor per expert
    if grads.up is not None:
        each = each._replace(up=grads.up.unbind(0))
    if grads.down is not None:
        each = each._replace(down=grads.down.unbind(0))
    row_weight = topk_weight.reshape(-1)[row_slot]
    up = _weights(experts, "up")
    down = _weights(experts, "down")
    saved = z_all.shape[0] > 0
    most = max((b - a for a, b in itertools.pairwise(plan.bounds)), default=0)
    one_call = not saved and _in_one_call(experts, most)
    transposed = []
    if not saved and not one_call:
        transposed = _transposed(experts, "up")
    dx = scratch("y", (plan.R, plan.H), x) if needs.x else None
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
        dh = scratch("dh", (b - a, plan.I), x)
        dz = scratch("dz", (b - a, Z), x)
        wh = scratch("h", (b - a, plan.I), x)
        for member in group.members:
            torch.mm(member.wide(dy), down[member.expert], out=member.wide(dh))
        plan.activate_backward(group, z, dh, dz, wh, dweight)
        for member in group.members:
            e = member.expert
            if dx is not None:
                torch.mm(member.wide(dz), up[e], out=member.wide(dx[a:b]))
            if trained[e] >= 0:
                weight_gradients(each, member, trained[e], dy, wh, dz, rows, row_weight[a:b], into)
            if experts.down_bias is not None:
                slots = row_slot[a + member.start : a + member.end]
                dots = (member.own(dy).float() * experts.down_bias[e].float()).sum(1)
                dweight.index_add_(0, slots, dots)
    if dx is not None:
        dx = plan.combine(dx, weighted=False)
    return _with_router(grads, dx, dweight.view(topk_weight.shape), router)


def _with_router(
    grads: Gradients, dx: Tensor | None, dweight: Tensor, router: Router | None
) -> Gradients:
    if router is not None:
        dlogits, weight = router(dweight)
        if dx is not None:
            dx.addmm_(dlogits, weight)
    return grads._replace(x=dx, topk_weight=dweight)


def _back_in_one_call(experts: ExpertStacks, offsets: Tensor, into: Gradients) -> bool:
    """Return whether the backward pass is one call: as the forward pass, but without biases."""
    rows = offsets.diff()
    has_bias = experts.up_bias is not None or experts.down_bias is not None
    if has_bias or not rows.numel() or not _in_one_call(experts, int(rows.max())):
        return False
    for old in (into.up, into.down):
        if old is not None and (old.dtype != experts.up.dtype or old.stride(2) != 1):
            return False
    return True


def one_call_back_bytes(
    dtype: torch.dtype,
    form: int,
    offsets: int,
    T: int,
    H: int,
    I: int,
    E: int,
    K: int,
    recompute: bool,
) -> int:
    """Return the bytes of scratch memory of a backward pass in one call.

    `form` 0 is not gated, `offsets` is an address.
    """
    columns = 3 * I if form else 2 * I
    group = max(BACK_ELEMENTS // columns, 1)
    return cpp.library().handle.moert_cpu_experts_backward_bytes(
        cpp.DTYPES[dtype], form, offsets, T, H, I, E, K, group, recompute, torch.get_num_threads()
    )


def _gradient_arguments(grad: Tensor | None, old: Tensor | None) -> tuple:
    """Return a stack's gradient for the library: address, two strides, and whether it is added."""
    if grad is None:
        return None, 0, 0, 0
    return grad.data_ptr(), grad.stride(0), grad.stride(1), old is not None


def _one_call_back(
    dout: Tensor,
    x: Tensor,
    experts: ExpertStacks,
    topk_weight: Tensor,
    z_all: Tensor,
    offsets: Tensor,
    row_slot: Tensor,
    needs: Gradients,
    into: Gradients,
) -> tuple[Tensor | None, Tensor, Gradients]:
    """Return dx [T, H] or None, dweight [T * K] and the gradients of the weights."""
    T, K = topk_weight.shape
    E, Z, H = experts.up.shape
    I = experts.down.shape[2]
    up = experts.up
    down = experts.down
    form = form_of(experts)
    bounds = offsets.tolist()
    trained = experts.rows()
    grads = new_gradients(experts, bounds, trained, needs, into)
    dx = None
    if needs.x:
        dx = x.new_empty(T, H)
    dweight = topk_weight.new_empty(T * K)
    if bounds[-1] < T * K:
        dweight.zero_()
    trains = torch.tensor([row >= 0 for row in trained], dtype=torch.uint8)
    saved = z_all.shape[0] > 0
    size = one_call_back_bytes(x.dtype, form[1], offsets.data_ptr(), T, H, I, E, K, not saved)
    space = scratch("one call", (size,), x, torch.uint8)
    cpp.library().handle.moert_cpu_experts_backward(
        cpp.DTYPES[x.dtype],
        *form,
        x.data_ptr(),
        dout.data_ptr(),
        up.data_ptr(),
        up.stride(0),
        up.stride(1),
        down.data_ptr(),
        down.stride(0),
        down.stride(1),
        topk_weight.data_ptr(),
        offsets.data_ptr(),
        row_slot.data_ptr(),
        T,
        H,
        I,
        E,
        K,
        max(BACK_ELEMENTS // (Z + I), 1),
        trains.data_ptr(),
        z_all.data_ptr() if saved else None,
        space.data_ptr(),
        _address(dx),
        dweight.data_ptr(),
        *_gradient_arguments(grads.up, into.up),
        *_gradient_arguments(grads.down, into.down),
        torch.get_num_threads(),
    )
    return dx, dweight, grads
