"""The private names of torch that the library uses, each with a feature test and a replacement.

No other file uses private names of torch (tests/test_lints.py). Without one of them:

    autograd_kernel       ops register their gradients with torch.library.register_autograd: 60 us
                          more for the 24 arguments of moe_mlp (CPU, torch 2.13, 2026-11-24), and
                          torch.func.grad of an op raises torch's RuntimeError
    below_dispatch        calls without gradients also pass through torch's dispatcher
    has_dual_level        every call looks for tangents in its arguments
    in_dispatch_mode,     caches that a dispatch mode or a transform of torch.func must not see are
    in_transform          never used
    has_global_hooks      an MoE layer runs its router and experts as modules, several ops
    graph_is_kept         the backward pass of a fused loss needs memory for one more gradient
    outside_of_modes      tensors made inside an outer fake or meta mode belong to it
    has_matrix_tiles      few rows are computed by our vector kernels instead of torch's with tiles
    wait_on_gpu           a timing on a GPU may include the host's time for the launch
    disable_dynamo        torch.compiler.disable, which imports the compiler (one second)
    fake_mode             tensors without data are on the meta device
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch, _pytree

# documented by torch as an extension point, though its module is private
TorchDispatchMode = _python_dispatch.TorchDispatchMode


def _always() -> bool:
    return True


def _never() -> bool:
    return False


try:
    from torch._functorch.autograd_function import enable_single_level_autograd_function
    from torch._functorch.utils import unwrap_dead_wrappers
    from torch._library.autograd import supports_tensorlist
    from torch.autograd.function import _SingleLevelFunction

    _below_autograd = torch._C._AutoDispatchBelowADInplaceOrView
    _keys_after_autograd = torch._C._after_ADInplaceOrView_keyset
    _any_requires_grad = torch._C._any_requires_grad
    _set_forward_mode = forward_ad._set_fwd_grad_enabled
    _transforms_active = torch._C._are_functorch_transforms_active
except (ImportError, AttributeError):
    HAS_AUTOGRAD_KERNEL = False
else:
    HAS_AUTOGRAD_KERNEL = True

in_transform: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", _always)
in_dispatch_mode: Callable[[], bool] = getattr(
    _python_dispatch, "is_in_torch_dispatch_mode", _always
)
_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", _always)
_is_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", _always)
outside_of_modes: Callable[[], contextlib.AbstractContextManager] = getattr(
    _python_dispatch, "_disable_current_modes", contextlib.nullcontext
)
# of modules
has_global_hooks: Callable[[], bool] = getattr(
    torch.nn.modules.module, "_has_any_global_hook", _always
)
# of an x86 processor
has_matrix_tiles: Callable[[], bool] = getattr(torch.cpu, "_is_amx_tile_supported", _never)
# whether backward() was called with retain_graph=True
graph_is_kept: Callable[[], bool] = getattr(
    getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", _always
)
disable_dynamo: Callable[[Callable], Callable]
if hasattr(torch, "_disable_dynamo"):
    disable_dynamo = torch._disable_dynamo
else:
    disable_dynamo = torch.compiler.disable


def below_dispatch() -> contextlib.AbstractContextManager | None:
    """Return what an op's kernel must run in if a call of the op would only run it, else None.

    That is without gradients, tangents, transforms, modes, a profiler, tracing or compiling.
    """
    if torch.compiler.is_compiling() or not HAS_AUTOGRAD_KERNEL or torch.is_grad_enabled():
        return None
    if has_dual_level() or in_transform() or in_dispatch_mode() or torch.jit.is_tracing():
        return None
    if _function_modes() or _is_profiled():
        return None
    return _below_autograd()


def has_dual_level() -> bool:
    """Return whether a tensor may have a forward-mode tangent."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def autograd_kernel(
    op: torch._ops.OpOverload,
    backward: Callable | None,
    setup_context: Callable | None,
    check: Callable[[tuple], None],
) -> Callable:
    """Return what autograd runs for `op`: a node, or only `op` if no gradient is needed.

    Requires HAS_AUTOGRAD_KERNEL. `check` is called with the arguments inside a level of forward
    mode. It differs from torch.library.register_autograd in speed and in torch.func: its node
    starts at the level at which the op is called.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, keyset = args
        # outer levels of torch.func also need gradients and tangents, which autograd.Function has
        # switched off
        outer = _transforms_active()
        with _below_autograd(), torch.set_grad_enabled(outer), _set_forward_mode(outer):
            output = op.redispatch(keyset & _keys_after_autograd, *inputs)
            if setup_context is not None:
                setup_context(ctx, inputs, output)
        return output

    def through(ctx: Any, *grads: Tensor | None) -> tuple:
        assert backward is not None
        needs = ctx.needs_input_grad
        ctx.needs_input_grad = needs[:-1]
        try:
            return *backward(ctx, *grads), None
        finally:
            ctx.needs_input_grad = needs

    def apply(cls: Any, *args: Any) -> Any:
        call = super(_SingleLevelFunction, cls).apply
        if not _transforms_active():
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
    schema = op._schema
    node: Any = type(f"{schema.name.replace('::', '_')}_node", (_SingleLevelFunction,), methods)
    if any("List[Tensor]" in str(a.type) for a in (*schema.arguments, *schema.returns)):
        node = supports_tensorlist(node)

    def run(keyset: Any, *args: Any) -> Any:
        if has_dual_level():
            check(args)
        if backward is not None and torch.is_grad_enabled() and _any_requires_grad(*args):
            return node.apply(*args, keyset)
        # no kernel returns a view, and tracking the views inside costs 60 % of a grouped_mm of few
        # rows (CPU, 2026-11-23)
        with _below_autograd():
            return op.redispatch(keyset & _keys_after_autograd, *args)

    return run


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples, dicts and other values that torch knows."""
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf


def fake_mode() -> contextlib.AbstractContextManager:
    """Return a mode in which tensors have shapes but no data."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        return torch.device("meta")
    return FakeTensorMode()


def wait_on_gpu(cycles: int) -> None:
    """Let the current stream wait, so that the host can queue work ahead of it."""
    if hasattr(torch.cuda, "_sleep"):
        torch.cuda._sleep(cycles)


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(frames, "FRAME_COUNTER", frames is not None))
