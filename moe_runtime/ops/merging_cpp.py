"""The cpp backend of `merge_experts`: csrc/cpu/merging.h, which reads each expert once, in the order of memory."""

import torch

from moe_runtime import cpp
from moe_runtime.ops.workspace import scratch


def forward(weight, alpha):
    """Return sum_e alpha[e] weight[e], `weight` [E, ...], `alpha` [E] float32 -> [...]; the bits of the torch backend."""
    stack, order = _as_stored(weight)
    alpha, out = alpha.contiguous(), stack.new_empty(stack.shape[1:])
    cpp.library().handle.moert_cpu_merge(
        cpp.DTYPES[weight.dtype], stack.data_ptr(), stack.stride(0), alpha.data_ptr(), stack.shape[0], out.numel(),
        out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out.permute(sorted(range(out.dim()), key=order.__getitem__)).contiguous()


def backward_alpha(dout, weight):
    """Return <dout, weight[e]> [E] float32 for `dout` [...], `weight` [E, ...]."""
    stack, order = _as_stored(weight)
    dout = dout.permute(order).contiguous()
    dout = dout if dout.dtype in cpp.DTYPES else dout.float()
    E, P, calls = stack.shape[0], dout.numel(), cpp.library().handle
    dalpha = dout.new_empty(E, dtype=torch.float32)
    space = scratch("dalpha", (calls.moert_cpu_merge_gradient_bytes(E, P),), dout, torch.uint8)
    calls.moert_cpu_merge_gradient(
        cpp.DTYPES[weight.dtype], cpp.DTYPES[dout.dtype], dout.data_ptr(), stack.data_ptr(), stack.stride(0), E, P,
        space.data_ptr(), dalpha.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return dalpha


def _as_stored(weight) -> tuple[torch.Tensor, list[int]]:
    """Return the experts with their dims in the order of memory, each in one piece, and which dims those were."""
    order = sorted(range(1, weight.dim()), key=weight.stride, reverse=True)
    stack = weight.permute(0, *order)
    if not stack[0].is_contiguous():
        stack = stack.contiguous()
    return stack, [dim - 1 for dim in order]
