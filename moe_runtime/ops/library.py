"""The `torch.ops.moe_runtime` library: how an op of this package gets its kernel, its fake and its gradient.

And in which dtype autocast wants an op's arguments, which are cast before the op is called: `compute_dtype`.
`Library.define` / `impl` cost 3 us a call where the `custom_op` decorator costs 15 to 26 (CPU, torch 2.13, 2026-11-20).
"""

import functools
from collections import namedtuple

import torch

LIB = torch.library.Library("moe_runtime", "DEF")


def register(name: str, kernel, fake, backward=None, setup_context=None) -> None:
    """Give the op `name`, already defined in LIB, its kernel for every device, its fake and its gradient."""
    LIB.impl(name, _outside_autocast(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_runtime::{name}", fake, lib=LIB)
    if backward is not None:
        torch.library.register_autograd(f"moe_runtime::{name}", backward, setup_context=setup_context, lib=LIB)


def register_backward(name: str, kernel, fake) -> None:
    """As `register`, for the gradient `name` of an op: differentiating it again raises RuntimeError, where it would be 0."""
    op = name.partition("_backward")[0]

    def refuse(ctx, *grads):
        raise RuntimeError(f"moe_runtime::{op} has no second derivative; want create_graph=False")

    register(name, kernel, fake, refuse)


def kind(tensor: torch.Tensor | None) -> str:
    """Return a tensor's shape, dtype and device as errors show them."""
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def inputs_of(op: str) -> type:
    """Return a named tuple of the op's arguments: what it was given, autograd's flags, or the gradients, None by default."""
    names = [argument.name for argument in getattr(torch.ops.moe_runtime, op).default._schema.arguments]
    return namedtuple(f"{op}_inputs", names, defaults=[None] * len(names))


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast wants `tensor`; None where it is off, and for float64, which it leaves alone."""
    device = tensor.device.type
    on = device != "meta" and tensor.dtype != torch.float64 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which F.linear would use `tensor`: autocast's or its own."""
    return autocast_dtype(tensor) or tensor.dtype


def _outside_autocast(kernel):
    """Autocast would reach into the kernel and round its matmuls; an op's dtypes are those of its arguments."""

    @functools.wraps(kernel)
    def run(tensor, *args):
        device = tensor.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return kernel(tensor, *args)
        with torch.autocast(device, enabled=False):
            return kernel(tensor, *args)

    return run
