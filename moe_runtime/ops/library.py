"""The `torch.ops.moe_runtime` library: registration of kernels, fakes and gradients.

`compute_dtype` returns autocast's dtype of an op's arguments, which are cast before the op is
called. `Library.define` / `impl` cost 3 us a call where the `custom_op` decorator costs 15 to 26
(CPU, torch 2.13, 2026-11-20).
"""

import functools
import re
from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime import backends
from moe_runtime.ops import _torch_private

Tensors = tuple[Tensor, ...]  # what an op with several results returns

LIB = torch.library.Library("moe_runtime", "DEF")
ARGUMENTS: dict[str, list[str]] = {}  # of each op, in order
KERNELS: dict[str, Callable] = {}  # what an op runs on every device


def define(schema: str) -> None:
    """Define the op of `schema`, "name(Tensor x, ...) -> Tensor"."""
    LIB.define(schema)
    name, _, rest = schema.partition("(")
    arguments = rest.partition(") ->")[0]
    ARGUMENTS[name] = re.findall(r"(\w+)(?:=\w+)?(?:,|$)", arguments)


def register(
    name: str,
    kernel: Callable,
    fake: Callable,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
) -> None:
    """Register the kernel for every device, the fake and the gradient of the defined op `name`."""
    op = getattr(torch.ops.moe_runtime, name).default
    KERNELS[name] = _kernel(name, kernel)
    check = functools.partial(_refuse_tangents, name)
    if _torch_private.HAS_AUTOGRAD_KERNEL:
        LIB.impl(name, KERNELS[name], "CompositeExplicitAutograd")
        autograd = _torch_private.autograd_kernel(op, backward, setup_context, check)
        LIB.impl(name, autograd, "Autograd", with_keyset=True)
    else:
        LIB.impl(name, _checked(KERNELS[name], check), "CompositeExplicitAutograd")
        if backward is not None:
            torch.library.register_autograd(
                f"moe_runtime::{name}", backward, setup_context=setup_context, lib=LIB
            )
    torch.library.register_fake(f"moe_runtime::{name}", fake, lib=LIB)


def register_backward(name: str, kernel: Callable, fake: Callable) -> None:
    """Register the gradient `name` of an op; a second derivative raises RuntimeError, not 0."""
    op = name.partition("_backward")[0]

    def refuse(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"moe_runtime::{op} has no second derivative. Pass create_graph=False")

    register(name, kernel, fake, refuse)


def call_op(name: str, *args: Any) -> Any:
    """Call the op `name`, past torch's dispatcher if that would only run its kernel.

    With 1 to 16 tokens, the dispatcher takes 2 to 14 % of a call, 10 to 110 us, as the weights
    displace its code from the caches (CPU, 2026-11-28).
    """
    below = _torch_private.below_dispatch()
    if below is not None and args[0].device.type in ("cpu", "cuda") and _are_plain(args):
        with below:
            return KERNELS[name](*args)
    return getattr(torch.ops.moe_runtime, name)(*args)


def _are_plain(values: Iterable) -> bool:
    """Return whether all tensors in nested sequences have data that kernels can read."""
    for value in values:
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, torch.nn.Parameter) or value.is_neg():
                return False
        elif isinstance(value, list | tuple) and not _are_plain(value):
            return False
    return True


def _checked(kernel: Callable, check: Callable[[tuple], None]) -> Callable:
    """Return `kernel` with `check` of its arguments inside a level of forward mode."""

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        if _torch_private.has_dual_level():
            check(args)
        return kernel(*args)

    return run


def _refuse_tangents(name: str, args: tuple) -> None:
    """Raise if an argument has a forward-mode tangent: the op would drop it and return zeros."""
    for tensor in _torch_private.tensors_in(args):
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"moe_runtime::{name} has no forward-mode derivative (torch.func.jvp, jacfwd, dual "
                "tensors). Use torch.func.vjp or jacrev, or run the experts in transformers with "
                "set_experts_implementation('eager')"
            )


def kind(tensor: Tensor | None) -> str:
    """Format a tensor's shape, dtype and device for an error message."""
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def inputs_of(op: str) -> Any:
    """Return a named tuple type for the op's arguments, or what autograd has for each of them.

    Its fields are None by default: values, flags or gradients.
    """
    names = ARGUMENTS[op]
    return namedtuple(f"{op}_inputs", names, defaults=[None] * len(names))


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return autocast's dtype for `tensor`; None if autocast is off, and for float64."""
    device = tensor.device.type
    on = device != "meta" and tensor.dtype != torch.float64 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 of float64; unlike torch.promote_types it is no graph node."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which F.linear would use `tensor`: autocast's or its own."""
    return autocast_dtype(tensor) or tensor.dtype


# ops that use the backend of another op
BACKEND_OF = {
    "moe_layer": "moe_mlp",
    "route_to": "route",
    "merged_linear": "merge_experts",
    "fused_nll": "fused_cross_entropy",
    "fused_loss": "fused_cross_entropy",
}


def _kernel(op: str, kernel: Callable) -> Callable:
    """Return `kernel` outside of autocast, which would round its matmuls, with a backend.

    An op's dtypes are those of its arguments; an exported graph does not fix the backend.
    """
    at = ARGUMENTS[op].index("backend") - 1
    name = op.partition("_backward")[0]
    name = BACKEND_OF.get(name, name)

    @functools.wraps(kernel)
    def run(tensor: Tensor, *args: Any) -> Any:
        if args[at] == backends.AT_RUN_TIME:
            by = tensor
            if op == "merged_linear_backward" and tensor.dtype != torch.float64:
                by = tensor if args[1] is None else args[1]  # the experts, whose dtype may differ
            args = (*args[:at], backends.choose(name, by, None, False), *args[at + 1 :])
        device = tensor.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return kernel(tensor, *args)
        with torch.autocast(device, enabled=False):
            return kernel(tensor, *args)

    return run
