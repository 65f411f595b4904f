"""The experts of one MoE layer, dropless.

    out[t] = sum_k topk_weight[t, k] FFN_{topk_idx[t, k]}(x[t])
    FFN_e(x) = W_down_e h + b_down_e,  h = act(gate) * up,  [gate; up] = W_gate_up_e x + b_gate_up_e     (gated)
                                       h = act(W_up_e x + b_up_e)                                        (otherwise)

XFT, Eq. (2), UpIT, ESFT: the sum over the selected experts; the weights multiply the experts' outputs. A slot whose id is
outside 0..E-1 contributes nothing. For the backward pass only x, the pre-activation, weights and indices are kept.
"""

import torch

from moe_runtime import backends
from moe_runtime.config import ACTIVATIONS, check_choice
from moe_runtime.ops import moe_mlp_torch
from moe_runtime.ops.activation import activate
from moe_runtime.ops.dispatch import INTEGERS
from moe_runtime.ops.library import LIB, register


def moe_mlp(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_idx: torch.Tensor,
    *,
    act: str = "silu",
    gated: bool = True,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    trainable: torch.Tensor | None = None,
    recompute: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Run x [T, H] through its experts -> [T, H] in x's dtype, which is the weights' dtype too.

    `gate_up_proj` [E, 2I, H] (gate first; [E, I, H] with gated=False), `down_proj` [E, H, I], biases [E, 2I], [E, H],
    `topk_weight` [T, K] (used in float32), `topk_idx` [T, K] integers. Differentiable in all but topk_idx. Experts whose
    `trainable` [E] bool is False get a zero weight gradient at no cost. `recompute` keeps x only and computes the
    pre-activation again in the backward pass. Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    _check(x, gate_up_proj, down_proj, topk_weight, topk_idx, act, gated, gate_up_bias, down_bias, trainable)
    topk_weight = topk_weight if x.dtype == torch.float64 else topk_weight.float()
    inputs = (x, gate_up_proj, down_proj, topk_weight, gate_up_bias, down_bias)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    backend = backends.pick("moe_mlp", x, backend)
    out, *_ = torch.ops.moe_runtime.moe_mlp(
        x, gate_up_proj, down_proj, topk_weight, topk_idx, gate_up_bias, down_bias, trainable,
        act, gated, needs_grad and not recompute, backend,
    )  # fmt: skip
    return out


def _check(x, up, down, topk_weight, topk_idx, act, gated, up_bias, down_bias, trainable) -> None:
    check_choice("act", act, ACTIVATIONS)
    if x.dim() != 2:
        raise ValueError(f"x is {tuple(x.shape)}; want [T, H]")
    T, H = x.shape
    if up.dim() != 3 or down.dim() != 3 or up.shape[0] == 0:
        raise ValueError(
            f"gate_up_proj is {tuple(up.shape)}, down_proj {tuple(down.shape)}; want [E, 2I, H] and [E, H, I], E >= 1"
        )
    E, I = up.shape[0], down.shape[2]
    rows = I * (1 + gated)
    if up.shape != (E, rows, H) or down.shape != (E, H, I):
        raise ValueError(
            f"gate_up_proj is {tuple(up.shape)}, down_proj {tuple(down.shape)}, x {tuple(x.shape)}; want "
            f"[E, {'2I' if gated else 'I'}, H], [E, H, I], [T, H]"
        )
    if topk_idx.dim() != 2 or topk_weight.shape != topk_idx.shape or topk_idx.shape[0] != T:
        raise ValueError(
            f"topk_weight is {tuple(topk_weight.shape)}, topk_idx {tuple(topk_idx.shape)}; want [{T}, K] both"
        )
    if topk_idx.dtype not in INTEGERS or not topk_weight.is_floating_point():
        raise ValueError(f"topk_idx is {topk_idx.dtype}, topk_weight {topk_weight.dtype}; want integers and floats")
    for name, bias, size in (("gate_up_bias", up_bias, rows), ("down_bias", down_bias, H)):
        if bias is not None and bias.shape != (E, size):
            raise ValueError(f"{name} is {tuple(bias.shape)}; want {(E, size)}")
    if trainable is not None and (trainable.shape != (E,) or trainable.dtype != torch.bool):
        raise ValueError(f"trainable is {tuple(trainable.shape)} {trainable.dtype}; want [{E}] bool")
    for name, tensor in (
        ("gate_up_proj", up),
        ("down_proj", down),
        ("gate_up_bias", up_bias),
        ("down_bias", down_bias),
    ):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, x {x.dtype} on {x.device}; want the same dtype and device"
            )
    for name, tensor in (("topk_weight", topk_weight), ("topk_idx", topk_idx), ("trainable", trainable)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}; want the same device")
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}; want a floating dtype")


def moe_mlp_reference(
    x, gate_up_proj, down_proj, topk_weight, topk_idx, *, act="silu", gated=True, gate_up_bias=None, down_bias=None
):
    """The equation above as a sum over experts, in the inputs' dtype, through autograd."""
    out = torch.zeros_like(x)
    for e in range(gate_up_proj.shape[0]):
        z = x @ gate_up_proj[e].t()
        z = z if gate_up_bias is None else z + gate_up_bias[e]
        y = activate(z, act, gated) @ down_proj[e].t()
        y = y if down_bias is None else y + down_bias[e]
        # where, not a product with zero: a weight that is not used may be anything
        out = out + torch.where(topk_idx == e, topk_weight, 0).sum(1, keepdim=True).to(x.dtype) * y
    return out


LIB.define(
    "moe_mlp(Tensor x, Tensor up, Tensor down, Tensor topk_weight, Tensor topk_idx, Tensor? up_bias, Tensor? down_bias, "
    "Tensor? trainable, str act, bool gated, bool save, str backend) -> (Tensor, Tensor, Tensor, Tensor)"
)
LIB.define(
    "moe_mlp_backward(Tensor dout, Tensor x, Tensor up, Tensor down, Tensor topk_weight, Tensor? up_bias, Tensor? down_bias, "
    "Tensor? trainable, Tensor z, Tensor expert_offsets, Tensor row_slot, bool[6] needs, str act, bool gated, "
    "str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward(x, up, down, topk_weight, topk_idx, up_bias, down_bias, trainable, act, gated, save, backend):
    experts = moe_mlp_torch.Experts(up, down, up_bias, down_bias, act, gated)
    return moe_mlp_torch.forward(x.contiguous(), experts, topk_weight, topk_idx, save)


def _forward_fake(x, up, down, topk_weight, topk_idx, up_bias, down_bias, trainable, act, gated, save, backend):
    R = topk_idx.shape[0] * topk_idx.shape[1]
    return (
        x.new_empty(x.shape),
        x.new_empty(R if save else 0, up.shape[1]),
        topk_idx.new_empty(up.shape[0] + 1, dtype=torch.int32),
        topk_idx.new_empty(R, dtype=torch.int32),
    )


def _backward(
    dout,
    x,
    up,
    down,
    topk_weight,
    up_bias,
    down_bias,
    trainable,
    z,
    expert_offsets,
    row_slot,
    needs,
    act,
    gated,
    backend,
):
    experts = moe_mlp_torch.Experts(up, down, up_bias, down_bias, act, gated)
    grads = moe_mlp_torch.backward(
        dout.contiguous(), x.contiguous(), experts, topk_weight, z, expert_offsets, row_slot, trainable, needs
    )
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


def _backward_fake(dout, x, up, down, topk_weight, up_bias, down_bias, trainable, z, offsets, row_slot, needs, *_):
    inputs = (x, up, down, topk_weight, up_bias, down_bias)
    wanted = (True if t is topk_weight else need for t, need in zip(inputs, needs))
    return tuple(x.new_empty(0) if t is None or not need else t.new_empty(t.shape) for t, need in zip(inputs, wanted))


def _setup_context(ctx, inputs, output):
    x, up, down, topk_weight, _, up_bias, down_bias, trainable, ctx.act, ctx.gated, _, ctx.backend = inputs
    _, z, expert_offsets, row_slot = output
    ctx.mark_non_differentiable(z, expert_offsets, row_slot)
    ctx.set_materialize_grads(False)  # or autograd fills a gradient of z's size with zeros
    ctx.save_for_backward(x, up, down, topk_weight, up_bias, down_bias, trainable, z, expert_offsets, row_slot)


def _autograd(ctx, dout, *_):
    if dout is None:
        return (None,) * 12
    saved = ctx.saved_tensors  # read once: checkpointing unpacks anew at every look
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 3, 5, 6)]
    grads = torch.ops.moe_runtime.moe_mlp_backward(dout, *saved, needs, ctx.act, ctx.gated, ctx.backend)
    dx, dup, ddown, dweight, dup_bias, ddown_bias = (grad if need else None for grad, need in zip(grads, needs))
    return dx, dup, ddown, dweight, None, dup_bias, ddown_bias, None, None, None, None, None


register("moe_mlp", _forward, _forward_fake, _autograd, _setup_context)
register("moe_mlp_backward", _backward, _backward_fake)
