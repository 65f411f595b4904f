"""The `torch.ops.moe_runtime` library: registration of kernels, fakes, gradients and FLOP counts of
the ops.

`compute_dtype` returns autocast's dtype of an op's arguments, which are cast before the op is
called. `Library.define` / `impl` cost 3 us a call where the `custom_op` decorator costs 15 to 26
(CPU, torch 2.13, 2026-11-20). `torch.library.register_autograd` costs 100 us more than `_autograd`
for the 24 arguments of moe_mlp (same, 2026-11-22).
"""

import functools
from collections import namedtuple

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch._functorch.utils import unwrap_dead_wrappers
from torch._library.autograd import supports_tensorlist
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._pytree import tree_leaves

from moe_runtime import backends
from moe_runtime.ops import flops

LIB = torch.library.Library("moe_runtime", "DEF")


def register(name: str, kernel, fake, backward=None, setup_context=None) -> None:
    """Register the kernel for every device, the fake and the gradient of the op `name`, which is
    already defined in LIB.
    """
    op = getattr(torch.ops.moe_runtime, name).default
    LIB.impl(name, _kernel(op, kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_runtime::{name}", fake, lib=LIB)
    LIB.impl(name, _autograd(op, backward, setup_context), "Autograd", with_keyset=True)
    op.decompose = flops.announce


def register_backward(name: str, kernel, fake) -> None:
    """Register the gradient `name` of an op; differentiating it again raises RuntimeError instead
    of returning 0.
    """
    op = name.partition("_backward")[0]

    def refuse(ctx, *grads):
        raise RuntimeError(f"moe_runtime::{op} has no second derivative. Pass create_graph=False")

    register(name, kernel, fake, refuse)


def _autograd(op: torch._ops.OpOverload, backward, setup_context):
    """Return what autograd runs for `op`: a node that calls it, or `op` itself if nothing requires
    a gradient.
    """
    # no kernel returns a view, and tracking the views inside costs 60 % of a grouped_mm of few rows
    # (CPU, 2026-11-23)
    below = torch._C._AutoDispatchBelowADInplaceOrView
    after = torch._C._after_ADInplaceOrView_keyset

    def forward(ctx, *args):
        *args, keyset = args
        # outer levels of torch.func also need gradients and tangents, which autograd.Function has
        # switched off
        outer = torch._C._are_functorch_transforms_active()
        with below(), torch.set_grad_enabled(outer), forward_ad._set_fwd_grad_enabled(outer):
            output = op.redispatch(keyset & after, *args)
            if setup_context is not None:
                setup_context(ctx, args, output)
        return output

    def through(ctx, *grads):
        needs = ctx.needs_input_grad
        ctx.needs_input_grad = needs[:-1]
        try:
            return *backward(ctx, *grads), None
        finally:
            ctx.needs_input_grad = needs

    def apply(cls, *args):
        call = super(_SingleLevelFunction, cls).apply
        if not torch._C._are_functorch_transforms_active():
            return call(*unwrap_dead_wrappers(args))
        # Function.apply would start at the outermost transform again; here torch.func.grad has
        # already reached its level
        with enable_single_level_autograd_function():
            return call(*args)

    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(through),
        "apply": classmethod(apply),
    }
    node = type(f"{op._opname}_node", (_SingleLevelFunction,), methods)
    if any("List[Tensor]" in str(a.type) for a in (*op._schema.arguments, *op._schema.returns)):
        node = supports_tensorlist(node)

    def run(keyset, *args):
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, args)
        if (
            backward is not None
            and torch._C.is_grad_enabled()
            and torch._C._any_requires_grad(*args)
        ):
            return node.apply(*args, keyset)
        with below():
            return op.redispatch(keyset & after, *args)

    return run


def _refuse_tangents(op: torch._ops.OpOverload, args) -> None:
    """Raise if an argument has a forward-mode tangent, which the op would drop, so that derivatives
    would be zero.
    """
    tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            f"{op.name()} has no forward-mode derivative (torch.func.jvp, jacfwd, dual tensors). "
            "Use torch.func.vjp or jacrev, or run the experts in transformers with "
            "set_experts_implementation('eager')"
        )


def kind(tensor: Tensor | None) -> str:
    """Format a tensor's shape, dtype and device for an error message."""
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def inputs_of(op: str) -> type:
    """Return a named tuple type for the op's arguments: values, autograd's flags, or gradients,
    None by default.
    """
    names = [
        argument.name for argument in getattr(torch.ops.moe_runtime, op).default._schema.arguments
    ]
    return namedtuple(f"{op}_inputs", names, defaults=[None] * len(names))


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return autocast's dtype for `tensor`; None if autocast is off, and for float64, which it does
    not change.
    """
    device = tensor.device.type
    on = device != "meta" and tensor.dtype != torch.float64 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 of float64: torch.promote_types(dtype, float32), which would be a
    node of exported graphs.
    """
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


def _kernel(op: torch._ops.OpOverload, kernel):
    """Wrap `kernel` to run outside of autocast, which would round its matmuls, and with a backend
    of this machine.

    An op's dtypes are those of its arguments; an exported graph does not fix the backend.
    """
    at = [argument.name for argument in op._schema.arguments].index("backend") - 1
    name = op._opname.partition("_backward")[0]
    name = BACKEND_OF.get(name, name)

    @functools.wraps(kernel)
    def run(tensor, *args):
        if args[at] == backends.AT_RUN_TIME:
            # merged_linear_backward uses the experts' dtype if it differs
            own = (
                op._opname == "merged_linear_backward"
                and args[1] is not None
                and tensor.dtype != torch.float64
            )
            by = args[1] if own else tensor
            args = (*args[:at], backends.choose(name, by, None, False), *args[at + 1 :])
        device = tensor.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return kernel(tensor, *args)
        with torch.autocast(device, enabled=False):
            return kernel(tensor, *args)

    return run
