"""The cpp backend of `moe_mlp`: csrc/cpu alone in one call, or torch's matmuls with csrc/cpu around
them.

The forward pass is one call, and so is the backward pass, with AVX2 or more; on other CPUs for
experts with few rows, where reading each weight only once decides. Otherwise torch's matmuls run as
in `moe_mlp_torch`, and sorting, gathering, the activation with its gradient, and the weighted sum
are one pass each, computed in float32.
"""

import itertools
import math
import os
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
    Member,
    Products,
    Router,
    Rows,
    new_gradients,
    run_backward,
    run_forward,
    with_router,
)
from moe_runtime.ops.products import addmm, mm
from moe_runtime.ops.workspace import lease, scratch

ANY = 1 << 62
# for bfloat16 if torch uses the CPU's matrix tiles and our library, not built for `amx`, does not
FEW_OF_TILES = 8
# without AVX2, where reading the weights only once decides
FEW_ELSEWHERE = 16
BACK_ELEMENTS = 1 << 22  # elements of dz and wh that the backward pass holds for a group of experts


class RowPlan(Rows):
    """Index arrays of one call, and the library's functions on them."""

    def __init__(
        self,
        experts: Any,
        topk_weight: Tensor,
        offsets: Tensor,
        row_slot: Tensor,
    ):
        super().__init__(
            experts.up.shape,
            experts.down.shape[2],
            topk_weight,
            offsets.tolist(),
            row_slot,
        )
        self.calls = cpp.library().handle
        self.threads = torch.get_num_threads()
        self.form = form_of(experts)
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
        self.divide(everyone.tolist())

    def gather(self, name: str, x: Tensor, group: Group) -> Tensor:
        """Return the rows of x [T, H] of a group, x itself where every token has one."""
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
        """Write h [rows, I] from z."""
        self.calls.moert_cpu_activate(
            cpp.DTYPES[z.dtype],
            *self.form,
            z.data_ptr(),
            group.members[-1].end,
            self.I,
            h.data_ptr(),
            self.threads,
        )

    def activate_backward(
        self,
        group: Group,
        z: Tensor,
        dh: Tensor,
        dz: Tensor,
        wh: Tensor,
        dweight: Tensor,
    ) -> None:
        """Write dz and the weighted h from z and dh, and the gradients of the weights by slot."""
        self.calls.moert_cpu_activate_backward(
            cpp.DTYPES[z.dtype],
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
        """Write rows times the weight of one expert to its rows of `out`."""
        if bias is None:
            mm(member.wide(rows), weight, out=member.wide(out))
        else:
            addmm(bias, member.wide(rows), weight, out=member.wide(out))

    def combine(self, y: Tensor, weighted: bool) -> Tensor:
        """Sum the rows of each token to [T, H]."""
        out = y.new_empty(self.T, self.H)
        self.calls.moert_cpu_combine(
            cpp.DTYPES[y.dtype],
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


def form_of(experts: Any) -> tuple[int, int, float, float]:
    """Return act, form, limit and up_offset as moert_cpu.h expects them."""
    form = experts.activation
    limit = form.limit
    if limit is None:
        limit = math.inf
    return cpp.ACTS[form.act], form.gated + form.interleaved, limit, form.up_offset


def forward(
    x: Tensor,
    experts: ExpertStacks,
    topk_weight: Tensor,
    topk_idx: Tensor,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out [T, H], z [R, 2I or I] (empty without `save`), expert_offsets, row_slot int32."""
    E, Z, _ = experts.up.shape
    R = topk_idx.numel()
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
    if _in_one_call(experts, most):
        out = x.new_empty(x.shape)
        z_out = lease((R, Z), x) if save else None
        _one_call(
            x,
            experts,
            topk_weight,
            offsets,
            row_slot,
            (0, E),
            z_out,
            out,
        )
        z_all = x.new_empty(0, Z) if z_out is None else z_out
        return out, z_all, offsets, row_slot
    steps = RowPlan(experts, topk_weight, offsets, row_slot)
    out, z_all = run_forward(steps, Products(experts, steps), x, save)
    return out, z_all, offsets, row_slot


def _in_one_call(experts: ExpertStacks, most: int) -> bool:
    """Return whether one call is used for at most `most` rows of an expert.

    It requires stacks with contiguous rows, and the same strides of experts that are stored apart.
    """
    if not experts.up.stride(2) == 1 == experts.down.stride(2):
        return False
    apart = ((experts.up, experts.up_trained), (experts.down, experts.down_trained))
    if any([rows is not None and rows.stride() != stack.stride() for stack, rows in apart]):
        return False
    if experts.trainable is not None and not experts.trainable.is_contiguous():
        return False
    return most <= few_rows(experts.up.dtype)


def few_rows(dtype: torch.dtype) -> int:
    """Return the rows of the largest expert up to which one call is used."""
    # for bfloat16 a CPU's matrix tiles are faster than its vector units
    variant = cpp.library().variant
    if dtype == torch.bfloat16 and variant != "amx" and has_matrix_tiles():
        limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
        if limit in ("ALL", "DEFAULT") or "AMX" in limit:
            return FEW_OF_TILES
    return FEW_ELSEWHERE if variant == "generic" else ANY


def one_call_bytes(
    dtype: torch.dtype,
    T: int,
    H: int,
    I: int,
    E: int,
    K: int,
    z_alone: bool = False,
) -> int:
    """Return the bytes of scratch memory of one call, or of its pre-activation if `z_alone`."""
    threads = torch.get_num_threads()
    return cpp.library().handle.moert_cpu_experts_bytes(
        cpp.DTYPES[dtype],
        T,
        H,
        I,
        E,
        K,
        z_alone,
        threads,
    )


def address(tensor: Tensor | None) -> int | None:
    """Return where a contiguous tensor starts; None without one."""
    return None if tensor is None else tensor.data_ptr()


def _apart(experts: ExpertStacks) -> tuple:
    """Return for the library which weights of experts are stored apart, and where."""
    if experts.up_trained is None:
        return None, None, None
    return tuple(map(address, (experts.trainable, experts.up_trained, experts.down_trained)))


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
    size = one_call_bytes(
        x.dtype,
        T,
        H,
        I,
        E,
        K,
        out is None,
    )
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
        *_apart(experts),
        address(up_bias),
        address(down_bias),
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
        address(z),
        address(out),
        torch.get_num_threads(),
    )


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
            dout,
            x,
            experts,
            topk_weight,
            z_all,
            offsets,
            row_slot,
            needs,
            into,
        )
        return with_router(grads, dx, dweight.view(topk_weight.shape), router)
    steps = RowPlan(experts, topk_weight, offsets, row_slot)
    products = Products(experts, steps, needs, into)
    most = max((b - a for a, b in itertools.pairwise(steps.bounds)), default=0)
    recompute = None
    if _in_one_call(experts, most):  # bit-identical to the forward pass

        def recompute(group: Group, rows: Tensor, z: Tensor) -> None:
            part = (group.members[0].expert, group.members[-1].expert + 1)
            _one_call(
                x,
                experts,
                topk_weight,
                offsets,
                row_slot,
                part,
                z,
                None,
            )

    dx, dweight = run_backward(
        steps,
        products,
        dout,
        x,
        z_all,
        bool(needs.x),
        recompute,
    )
    return with_router(products.grads, dx, dweight, router)


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
        cpp.DTYPES[dtype],
        form,
        offsets,
        T,
        H,
        I,
        E,
        K,
        group,
        recompute,
        torch.get_num_threads(),
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
    grads = new_gradients(
        experts,
        bounds,
        trained,
        needs,
        into,
    )
    dx = None
    if needs.x:
        dx = x.new_empty(T, H)
    dweight = topk_weight.new_empty(T * K)
    if bounds[-1] < T * K:
        dweight.zero_()
    grad_row = torch.tensor(trained, dtype=torch.int32)
    saved = z_all.shape[0] > 0
    size = one_call_back_bytes(
        x.dtype,
        form[1],
        offsets.data_ptr(),
        T,
        H,
        I,
        E,
        K,
        not saved,
    )
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
        *_apart(experts),
        topk_weight.data_ptr(),
        offsets.data_ptr(),
        row_slot.data_ptr(),
        T,
        H,
        I,
        E,
        K,
        max(BACK_ELEMENTS // (Z + I), 1),
        grad_row.data_ptr(),
        z_all.data_ptr() if saved else None,
        space.data_ptr(),
        address(dx),
        dweight.data_ptr(),
        *_gradient_arguments(grads.up, into.up),
        *_gradient_arguments(grads.down, into.down),
        torch.get_num_threads(),
    )
    return dx, dweight, grads
