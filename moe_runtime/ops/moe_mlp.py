"""The experts of one MoE layer, dropless.

    out[t] = sum_k topk_weight[t, k] FFN_{topk_idx[t, k]}(x[t])
    FFN_e(x) = W_down_e h + b_down_e
    gated:          h = act(gate) * up,  [gate; up] = W_gate_up_e x + b_gate_up_e
    otherwise:      h = act(W_up_e x + b_up_e)
    later models:   h = act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)

XFT, Eq. (2), UpIT, ESFT: the sum over the selected experts, whose outputs are multiplied by the
weights. A slot with an id outside 0..E-1 contributes nothing. Only x, the pre-activation, weights
and indices are saved for the backward pass.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_runtime import backends
from moe_runtime.config import SHARED_MODES, check_choice
from moe_runtime.ops import cuda_kernels, moe_mlp_cpp, moe_mlp_torch
from moe_runtime.ops.activation import Activation
from moe_runtime.ops.dispatch import INTEGERS
from moe_runtime.ops.expert_rows import (
    NOWHERE,
    SCHEMA,
    ExpertStacks,
    Gradients,
    accumulating,
    check_like,
    check_sizes,
    check_trained,
    gradients_so_far,
    in_layout_of,
)
from moe_runtime.ops.library import (
    Tensors,
    call_op,
    define,
    kind,
    register,
    register_backward,
    wide_dtype,
)

_NAMES = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


def moe_mlp(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weight: Tensor,
    topk_idx: Tensor,
    *,
    act: str = "silu",
    gated: bool = True,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    trainable: Tensor | None = None,
    trained: tuple[Tensor, Tensor] | None = None,
    shared: str = "group",
    recompute: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Run tokens through their experts and add the weighted results.

    Differentiable in all tensors but `topk_idx`. All tensors are on one device, and x and the
    weights have one dtype: float16, bfloat16, float32 or float64.

    Args:
        x: [T, H], the tokens.
        gate_up_proj: [E, 2I, H], gate first; [E, I, H] with gated=False. Need not be contiguous.
        down_proj: [E, H, I]. Need not be contiguous.
        topk_weight: [T, K], the weight of each slot; used in float32, or in float64 with float64 x.
        topk_idx: [T, K] of integers, the expert of each slot.
        act: Activation: "silu", "gelu", "gelu_tanh", "quick_gelu", "relu" or "relu2".
        gated: Whether an expert computes act(gate(x)) * up(x), and act(up(x)) otherwise.
        limit: Clamps gate and up, for gated experts (GPT-OSS: 7.0).
        up_offset: Is added to up, for gated experts (GPT-OSS: 1.0).
        interleaved: Whether the rows of gate_up_proj and gate_up_bias are gate_0, up_0, gate_1,
            up_1 and so on, for gated experts, as in GPT-OSS.
        gate_up_bias: [E, 2I], or [E, I] with gated=False.
        down_bias: [E, H].
        trainable: Which experts train (ESFT); None trains all. [E] bool: an expert with False gets
            a weight gradient of zero at no cost. With `trained`, [E] int32: the position of each
            expert in `trained`, all different, or -1 for an expert of the frozen stacks.
        trained: gate_up [n, 2I, H] and down [n, H, I] of the n trained experts, stored separately,
            so that their gradients have these sizes.
        shared: "dense" (Triton) runs expert 0 with torch's matrix product. It must be in the last
            slot of every token and in no other. "group" has no such condition.
        recompute: Whether to save only x, and to compute the pre-activation again in the backward
            pass.
        backend: "torch", "cpp", "triton" or "cuda"; None selects the default for the device.

    Returns:
        [T, H], in the dtype of x.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit together, or the backend cannot run.

    Example:
        >>> weight, idx = route(router_logits, top_k=2, gate="softmax_topk_renorm")
        >>> y = moe_mlp(x, gate_up_proj, down_proj, weight, idx)
    """
    up_trained = None
    down_trained = None
    if trained is not None:
        up_trained, down_trained = trained
    activation = Activation(
        act,
        gated,
        limit,
        up_offset,
        interleaved,
    )
    experts = ExpertStacks(
        gate_up_proj,
        down_proj,
        gate_up_bias,
        down_bias,
        trainable,
        up_trained,
        down_trained,
        activation,
        shared,
    )
    return run_experts(
        x,
        experts,
        topk_weight,
        topk_idx,
        recompute=recompute,
        backend=backend,
    )[0]


def run_experts(
    x: Tensor,
    experts: ExpertStacks,
    topk_weight: Tensor,
    topk_idx: Tensor,
    *,
    recompute: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `moe_mlp` with `experts`; return out [T, H] and expert_offsets [E + 1] int32."""
    check_experts(x, experts)
    check_slots(x, topk_weight, topk_idx)
    _check_shared(experts, topk_idx)
    topk_weight = topk_weight.to(wide_dtype(x.dtype))
    if backends.portable() is not None:
        out = moe_mlp_reference(
            x,
            _whole(experts.up, experts.up_trained, experts.trainable),
            _whole(experts.down, experts.down_trained, experts.trainable),
            topk_weight,
            topk_idx,
            gate_up_bias=experts.up_bias,
            down_bias=experts.down_bias,
            **experts.activation._asdict(),
        )
        return out, x.new_zeros(experts.up.shape[0] + 1, dtype=torch.int32)
    save = torch.is_grad_enabled() and not recompute and not backends.exporting()
    save = save and (x.requires_grad or topk_weight.requires_grad or experts.requires_grad())
    backend = pick(x, experts.up.shape[0], backend)
    out, _, offsets, _ = call_op(
        "moe_mlp",
        x,
        topk_weight,
        topk_idx,
        *experts.pack(),
        save,
        backend,
    )
    return out, offsets


def pick(
    x: Tensor, num_experts: int, backend: str | None, ops: tuple[str, ...] = ("dispatch", "combine")
) -> str:
    """Return the backend of the experts.

    "cuda" means Triton's products with csrc/'s `ops` around them. It cannot be requested: it is
    used if no backend is named and "cuda" is the default of each of `ops`.
    """
    chosen = backends.pick("moe_mlp", x, backend)
    if backend is not None or chosen != "triton" or not cuda_kernels.fits(num_experts):
        return chosen
    if all(backends.pick(op, x) == "cuda" for op in ops):
        return "cuda"
    return chosen


def check_experts(x: Tensor, experts: ExpertStacks) -> None:
    """Raise ValueError unless x [T, H] and the experts' tensors match."""
    experts.activation.check()
    check_choice("shared", experts.shared, SHARED_MODES)
    up = experts.up
    down = experts.down
    E, Z, I = check_sizes(
        x,
        up.shape,
        down.shape,
        experts.activation.gated,
        ("gate_up_proj", "down_proj"),
    )
    H = x.shape[1]
    shapes = ((E, Z, H), (E, H, I), (E, Z), (E, H))
    check_like(x, zip(_NAMES, experts[:4], shapes))
    check_trained(up, experts.trainable, experts.up_trained, "trained gate_up")
    check_trained(down, experts.trainable, experts.down_trained, "trained down")
    up_rows = experts.up_trained
    down_rows = experts.down_trained
    if up_rows is not None and down_rows is not None and up_rows.shape[0] != down_rows.shape[0]:
        raise ValueError(
            "Expected the same number of trained experts in both stacks, but trained gate_up is "
            f"{tuple(up_rows.shape)}, trained down {tuple(down_rows.shape)}"
        )


def _whole(stack: Tensor, trained: Tensor | None, trainable: Tensor | None) -> Tensor:
    """Return `stack` with the rows of the trained experts inserted."""
    if trained is None or trainable is None:
        return stack
    row = trainable.long()
    return torch.where(row.view(-1, 1, 1) < 0, stack, trained[row.clamp_min(0)])


def check_slots(x: Tensor, topk_weight: Tensor, topk_idx: Tensor) -> None:
    """Raise ValueError unless weights and ids [T, K] match x [T, H]."""
    fits = topk_idx.dim() == 2 and topk_idx.shape[0] == x.shape[0]
    fits = fits and topk_weight.shape == topk_idx.shape
    fits = fits and topk_idx.dtype in INTEGERS and topk_weight.is_floating_point()
    if not fits or not x.device == topk_weight.device == topk_idx.device:
        raise ValueError(
            f"Expected [{x.shape[0]}, K] floats and integers on {x.device}, but topk_weight is "
            f"{kind(topk_weight)}, topk_idx {kind(topk_idx)}"
        )


def _check_shared(experts: ExpertStacks, topk_idx: Tensor) -> None:
    if experts.shared == "group":
        return
    if experts.trainable is not None:
        raise ValueError("With shared='dense', trainable must be None. Use shared='group'")
    # on a GPU the check would synchronize
    if topk_idx.device.type == "cpu" and not torch.compiler.is_compiling():
        is_shared = topk_idx == 0
        if not is_shared[:, -1:].all() or int(is_shared.sum()) != topk_idx.shape[0]:
            raise ValueError(
                f"With shared='dense', topk_idx {tuple(topk_idx.shape)} must have expert 0 in the "
                "last slot of every token and in no other. Use shared='group'"
            )


def moe_mlp_reference(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weight: Tensor,
    topk_idx: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    **activation: Any,
) -> Tensor:
    """Compute the equation above as a sum over experts, in the inputs' dtype, with autograd.

    `activation` as in `moe_mlp`.
    """
    form = Activation(**activation)
    out = torch.zeros_like(x)
    for e in range(gate_up_proj.shape[0]):
        z = x @ gate_up_proj[e].t()
        if gate_up_bias is not None:
            z = z + gate_up_bias[e]
        y = form.apply(z) @ down_proj[e].t()
        if down_bias is not None:
            y = y + down_bias[e]
        # where instead of a product with zero, as unused weights may have any value
        weight = torch.where(topk_idx == e, topk_weight, 0).sum(1, keepdim=True)
        out = out + weight.to(x.dtype) * y
    return out


define(
    f"moe_mlp(Tensor x, Tensor topk_weight, Tensor topk_idx, {SCHEMA}, bool save, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
define(
    f"moe_mlp_backward(Tensor dout, Tensor x, Tensor topk_weight, {SCHEMA}, Tensor z, Tensor "
    "expert_offsets, Tensor row_slot, bool[6] needs, str backend) -> (Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor)"
)


def kernels_of(backend: str) -> Any:
    """Return the module with `forward` and `backward` of a backend; Triton is imported lazily."""
    if backend == "torch":
        return moe_mlp_torch
    if backend == "cpp":
        return moe_mlp_cpp
    from moe_runtime.ops import moe_mlp_triton

    if backend == "cuda":
        return moe_mlp_triton.BESIDE_CUDA
    return moe_mlp_triton


def _forward(x: Tensor, topk_weight: Tensor, topk_idx: Tensor, *arguments: Any) -> Tensors:
    *experts, save, backend = arguments
    return kernels_of(backend).forward(
        x.contiguous(),
        ExpertStacks.unpack(experts),
        topk_weight.contiguous(),
        topk_idx.contiguous(),
        save,
    )


def _forward_fake(x: Tensor, topk_weight: Tensor, topk_idx: Tensor, *arguments: Any) -> Tensors:
    *experts, save, _ = arguments
    E, Z, _ = experts[0].shape
    R = topk_idx.shape[0] * topk_idx.shape[1]
    return (
        x.new_empty(x.shape),
        x.new_empty(R if save else 0, Z),
        topk_idx.new_empty(E + 1, dtype=torch.int32),
        topk_idx.new_empty(R, dtype=torch.int32),
    )


def adding_to(into: Gradients, backward: Callable) -> Callable:
    """Return an op's kernel `backward` that adds to `into` in place, as ops cannot do."""

    def run(dout: Tensor, *args: Any) -> Tensors:
        with torch.autocast(dout.device.type, enabled=False):
            return backward(dout, *args, into=into)

    return run


def _backward(
    dout: Tensor,
    x: Tensor,
    topk_weight: Tensor,
    *arguments: Any,
    into: Gradients = NOWHERE,
) -> Tensors:
    *experts, z, expert_offsets, row_slot, needs, backend = arguments
    grads = kernels_of(backend).backward(
        dout.contiguous(),
        x.contiguous(),
        ExpertStacks.unpack(experts),
        topk_weight.contiguous(),
        z,
        expert_offsets,
        row_slot,
        Gradients(*needs),
        into=into,
    )
    return absent_as_empty(grads, x)


def _backward_fake(dout: Tensor, x: Tensor, topk_weight: Tensor, *arguments: Any) -> Tensors:
    *experts, _, _, _, needs, _ = arguments
    inputs = ExpertStacks.unpack(experts).learned(x, topk_weight)
    # the kernels always return the gradient of the weights
    needs = Gradients._make((*needs[:3], True, *needs[4:]))
    return fake_gradients(inputs.only(needs), x)


def fake_gradients(inputs: Iterable[Tensor | None], x: Tensor) -> Tensors:
    """Return tensors like the gradients of `inputs`, empty ones for None."""
    return absent_as_empty([None if t is None else in_layout_of(t, t.new_empty) for t in inputs], x)


def absent_as_empty(grads: Iterable[Tensor | None], x: Tensor) -> Tensors:
    """Return `grads` with an empty tensor for each None, which an op cannot return."""
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, topk_weight, _, *arguments, _, ctx.backend = inputs
    _, z, expert_offsets, row_slot = output
    ctx.mark_non_differentiable(z, expert_offsets, row_slot)
    # otherwise autograd would fill a gradient of z's size with zeros
    ctx.set_materialize_grads(False)
    *tensors, ctx.activation, ctx.shared = remember_leaves(ctx, arguments)
    ctx.save_for_backward(
        x,
        topk_weight,
        *tensors,
        z,
        expert_offsets,
        row_slot,
    )


def remember_leaves(ctx: Any, arguments: Sequence) -> ExpertStacks:
    """Return the experts of an op; keep the parameters of `accumulate_into_grad` in `ctx`."""
    experts = ExpertStacks.unpack(arguments)
    learned = experts.learned()
    ctx.accumulating = (accumulating(learned.up), accumulating(learned.down))
    return experts


def _autograd(ctx: Any, dout: Tensor | None, *_: Any) -> tuple:
    if dout is None:
        return (None,) * len(ctx.needs_input_grad)
    # read once, as checkpointing unpacks at every access
    x, topk_weight, *tensors, z, expert_offsets, row_slot = ctx.saved_tensors
    experts = ExpertStacks._make((*tensors, ctx.activation, ctx.shared))
    need_x, need_weight, _, *flags, _, _ = ctx.needs_input_grad
    needs = experts.needs(need_x, need_weight, flags)
    into = gradients_so_far(experts.learned(), ctx.accumulating)
    op: Any = torch.ops.moe_runtime.moe_mlp_backward
    if into is not NOWHERE:
        op = adding_to(into, _backward)
    grads = op(
        dout,
        x,
        topk_weight,
        *experts.pack(),
        z,
        expert_offsets,
        row_slot,
        needs,
        ctx.backend,
    )
    grads = Gradients(*grads).only(needs).besides(into)
    return grads.x, grads.topk_weight, None, *experts.in_place(grads), None, None


register(
    "moe_mlp",
    _forward,
    _forward_fake,
    _autograd,
    _setup_context,
)
register_backward("moe_mlp_backward", _backward, _backward_fake)
