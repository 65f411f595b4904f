"""The experts of one MoE layer, dropless.

    out[t] = sum_k topk_weight[t, k] FFN_{topk_idx[t, k]}(x[t])
    FFN_e(x) = W_down_e h + b_down_e,  h = act(gate) * up,  [gate; up] = W_gate_up_e x + b_gate_up_e     (gated)
                                       h = act(W_up_e x + b_up_e)                                        (otherwise)
    gate-up forms of later models:     h = act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)

XFT, Eq. (2), UpIT, ESFT: the sum over the selected experts; the weights multiply the experts' outputs. A slot whose id is
outside 0..E-1 contributes nothing. For the backward pass only x, the pre-activation, weights and indices are kept.
"""

import torch

from moe_runtime import backends
from moe_runtime.config import SHARED_MODES, check_choice
from moe_runtime.ops import cuda_kernels, moe_mlp_cpp, moe_mlp_torch
from moe_runtime.ops.activation import SCHEMA, Activation, activate
from moe_runtime.ops.dispatch import INTEGERS
from moe_runtime.ops.expert_rows import Experts, check_apart, check_place
from moe_runtime.ops.library import LIB, register, register_backward


def moe_mlp(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_idx: torch.Tensor,
    *,
    act: str = "silu",
    gated: bool = True,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    trainable: torch.Tensor | None = None,
    trained: tuple[torch.Tensor, torch.Tensor] | None = None,
    shared: str = "group",
    recompute: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Run x [T, H] through its experts -> [T, H] in x's dtype, which is the weights' dtype too.

    `gate_up_proj` [E, 2I, H] (gate first; [E, I, H] with gated=False), `down_proj` [E, H, I], biases [E, 2I], [E, H],
    `topk_weight` [T, K] (used in float32), `topk_idx` [T, K] integers. Differentiable in all but topk_idx. `recompute` keeps
    x only and computes the pre-activation again in the backward pass.

    `limit` clamps gate and up, `up_offset` is added to up, `interleaved` says that gate_up_proj's rows (and gate_up_bias) are
    gate_0, up_0, gate_1, up_1, ...: GPT-OSS is act="quick_gelu", limit=7.0, up_offset=1.0, interleaved=True and its stacks
    transposed, which need not be contiguous. The three are for gated experts.

    Frozen experts (ESFT): those whose `trainable` [E] bool is False get a zero weight gradient at no cost. With `trained`, the
    weights (gate_up [n, 2I, H], down [n, H, I]) of the experts that train lie apart and get compact gradients: `trainable` is
    then [E] int32, an expert's row in them, each row one expert's, or -1 for an expert of the two frozen stacks.

    `shared="dense"` (Triton) runs expert 0 through torch's matmul. It must own the last slot of every token and no other.
    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    out, _ = moe_mlp_with_offsets(
        x, gate_up_proj, down_proj, topk_weight, topk_idx, act=act, gated=gated, limit=limit, up_offset=up_offset,
        interleaved=interleaved, gate_up_bias=gate_up_bias, down_bias=down_bias, trainable=trainable, trained=trained,
        shared=shared, recompute=recompute, backend=backend,
    )  # fmt: skip
    return out


def moe_mlp_with_offsets(
    x, gate_up_proj, down_proj, topk_weight, topk_idx, *, act="silu", gated=True, limit=None, up_offset=0.0,
    interleaved=False, gate_up_bias=None, down_bias=None, trainable=None, trained=None, shared="group", recompute=False,
    backend=None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`moe_mlp`, and what its dispatch has counted: out [T, H], expert_offsets [E + 1] int32."""
    activation = Activation(act, gated, limit, up_offset, interleaved)
    check_weights(x, gate_up_proj, down_proj, activation, gate_up_bias, down_bias)
    _check_slots(x, topk_weight, topk_idx)
    _check_trained(gate_up_proj, down_proj, trainable, trained)
    _check_shared(shared, trainable, topk_idx)
    topk_weight = topk_weight if x.dtype == torch.float64 else topk_weight.float()
    up_trained, down_trained = trained or (None, None)
    inputs = (x, gate_up_proj, down_proj, topk_weight, gate_up_bias, down_bias, up_trained, down_trained)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    backend = pick(x, gate_up_proj.shape[0], backend)
    out, _, expert_offsets, _ = torch.ops.moe_runtime.moe_mlp(
        x, gate_up_proj, down_proj, topk_weight, topk_idx, gate_up_bias, down_bias, trainable, up_trained, down_trained,
        *activation, shared, needs_grad and not recompute, backend,
    )  # fmt: skip
    return out, expert_offsets


def pick(x: torch.Tensor, num_experts: int, backend: str | None, ops: tuple[str, ...] = ("dispatch", "combine")) -> str:
    """Return the backend of the experts; "cuda" is Triton's products with csrc/'s `ops` around them.

    That one cannot be asked for: it is where nobody names a backend and "cuda" is the choice for each of `ops`.
    """
    chosen = backends.pick("moe_mlp", x, backend)
    if backend is not None or chosen != "triton" or not cuda_kernels.fits(num_experts):
        return chosen
    return "cuda" if all(backends.pick(op, x) == "cuda" for op in ops) else chosen


def check_weights(x, up, down, activation: Activation, up_bias, down_bias) -> None:
    """Raise ValueError unless x [T, H] and the experts' weights and biases fit each other."""
    activation.check()
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; want [T, H] of a floating dtype")
    if up.dim() != 3 or down.dim() != 3 or up.shape[0] == 0:
        raise ValueError(
            f"gate_up_proj is {tuple(up.shape)}, down_proj {tuple(down.shape)}; want [E, 2I, H] and [E, H, I], E >= 1"
        )
    E, H, I = up.shape[0], x.shape[1], down.shape[2]
    gated = activation.gated
    rows = I * (1 + gated)
    if up.shape != (E, rows, H) or down.shape != (E, H, I):
        raise ValueError(
            f"gate_up_proj is {tuple(up.shape)}, down_proj {tuple(down.shape)}, x {tuple(x.shape)}; want "
            f"[E, {'2I' if gated else 'I'}, H], [E, H, I], [T, H]"
        )
    for name, bias, size in (("gate_up_bias", up_bias, rows), ("down_bias", down_bias, H)):
        if bias is not None and bias.shape != (E, size):
            raise ValueError(f"{name} is {tuple(bias.shape)}; want {(E, size)}")
    tensors = {"gate_up_proj": up, "down_proj": down, "gate_up_bias": up_bias, "down_bias": down_bias}
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, x {x.dtype} on {x.device}; want the same dtype and device"
            )


def _check_slots(x, topk_weight, topk_idx) -> None:
    T = x.shape[0]
    if topk_idx.dim() != 2 or topk_weight.shape != topk_idx.shape or topk_idx.shape[0] != T:
        raise ValueError(
            f"topk_weight is {tuple(topk_weight.shape)}, topk_idx {tuple(topk_idx.shape)}; want [{T}, K] both"
        )
    if topk_idx.dtype not in INTEGERS or not topk_weight.is_floating_point():
        raise ValueError(f"topk_idx is {topk_idx.dtype}, topk_weight {topk_weight.dtype}; want integers and floats")
    for name, tensor in (("topk_weight", topk_weight), ("topk_idx", topk_idx)):
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}; want the same device")


def _check_trained(up, down, trainable, trained) -> None:
    if trainable is None and trained is None:
        return
    check_place(trainable, trained, up, torch.bool if trained is None else torch.int32)
    for name, part, stack in zip(("gate_up", "down"), trained or (), (up, down)):
        check_apart(f"trained {name}", part, f"the stack of {name}", stack)
    if trained is not None and trained[0].shape[0] != trained[1].shape[0]:
        raise ValueError(
            f"trained gate_up is {tuple(trained[0].shape)}, trained down {tuple(trained[1].shape)}; want [n, ...] both"
        )


def _check_shared(shared, trainable, topk_idx) -> None:
    check_choice("shared", shared, SHARED_MODES)
    if shared == "group":
        return
    if trainable is not None:
        raise ValueError("shared is 'dense', trainable is given; want 'group' where experts are frozen")
    if topk_idx.shape[1] == 0:
        raise ValueError(
            f"shared is 'dense', topk_idx is {tuple(topk_idx.shape)}; want expert 0 in the last of K >= 1 slots"
        )
    # a GPU would have to wait for the answer
    if topk_idx.device.type == "cpu" and not torch.compiler.is_compiling():
        shared_slots = topk_idx == 0
        if not (shared_slots[:, -1].all() and shared_slots.sum() == topk_idx.shape[0]):
            raise ValueError(
                "shared is 'dense', topk_idx has expert 0 elsewhere than in every token's last slot; want 'group'"
            )


def moe_mlp_reference(
    x, gate_up_proj, down_proj, topk_weight, topk_idx, *, act="silu", gated=True, limit=None, up_offset=0.0,
    interleaved=False, gate_up_bias=None, down_bias=None,
):  # fmt: skip
    """The equation above as a sum over experts, in the inputs' dtype, through autograd."""
    out = torch.zeros_like(x)
    for e in range(gate_up_proj.shape[0]):
        z = x @ gate_up_proj[e].t()
        z = z if gate_up_bias is None else z + gate_up_bias[e]
        y = activate(z, act, gated, limit, up_offset, interleaved) @ down_proj[e].t()
        y = y if down_bias is None else y + down_bias[e]
        # where, not a product with zero: a weight that is not used may be anything
        out = out + torch.where(topk_idx == e, topk_weight, 0).sum(1, keepdim=True).to(x.dtype) * y
    return out


_WEIGHTS = "Tensor? up_bias, Tensor? down_bias, Tensor? trainable, Tensor? up_trained, Tensor? down_trained"
LIB.define(
    f"moe_mlp(Tensor x, Tensor up, Tensor down, Tensor topk_weight, Tensor topk_idx, {_WEIGHTS}, {SCHEMA}, "
    "str shared, bool save, str backend) -> (Tensor, Tensor, Tensor, Tensor)"
)
LIB.define(
    f"moe_mlp_backward(Tensor dout, Tensor x, Tensor up, Tensor down, Tensor topk_weight, {_WEIGHTS}, Tensor z, "
    f"Tensor expert_offsets, Tensor row_slot, bool[6] needs, {SCHEMA}, str shared, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def kernels_of(backend: str):
    """The module whose `forward` and `backward` run; Triton is imported where it is used."""
    if backend == "torch":
        return moe_mlp_torch
    if backend == "cpp":
        return moe_mlp_cpp
    from moe_runtime.ops import moe_mlp_triton

    return moe_mlp_triton.BESIDE_CUDA if backend == "cuda" else moe_mlp_triton


def _forward(
    x, up, down, topk_weight, topk_idx, up_bias, down_bias, trainable, up_trained, down_trained,
    act, gated, limit, up_offset, interleaved, shared, save, backend,
):  # fmt: skip
    activation = Activation(act, gated, limit, up_offset, interleaved)
    experts = Experts(up, down, up_bias, down_bias, activation, shared, trainable, up_trained, down_trained)
    return kernels_of(backend).forward(x.contiguous(), experts, topk_weight.contiguous(), topk_idx.contiguous(), save)


def _forward_fake(
    x, up, down, topk_weight, topk_idx, up_bias, down_bias, trainable, up_trained, down_trained,
    act, gated, limit, up_offset, interleaved, shared, save, backend,
):  # fmt: skip
    R = topk_idx.shape[0] * topk_idx.shape[1]
    return (
        x.new_empty(x.shape),
        x.new_empty(R if save else 0, up.shape[1]),
        topk_idx.new_empty(up.shape[0] + 1, dtype=torch.int32),
        topk_idx.new_empty(R, dtype=torch.int32),
    )


def _backward(
    dout, x, up, down, topk_weight, up_bias, down_bias, trainable, up_trained, down_trained,
    z, expert_offsets, row_slot, needs, act, gated, limit, up_offset, interleaved, shared, backend,
):  # fmt: skip
    activation = Activation(act, gated, limit, up_offset, interleaved)
    experts = Experts(up, down, up_bias, down_bias, activation, shared, trainable, up_trained, down_trained)
    grads = kernels_of(backend).backward(
        dout.contiguous(), x.contiguous(), experts, topk_weight.contiguous(), z, expert_offsets, row_slot, needs
    )
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


def _backward_fake(
    dout, x, up, down, topk_weight, up_bias, down_bias, trainable, up_trained, down_trained,
    z, offsets, row_slot, needs, *_,
):  # fmt: skip
    if up_trained is not None:
        up, down = up_trained, down_trained
    inputs = (x, up, down, topk_weight, up_bias, down_bias)
    wanted = (True if t is topk_weight else need for t, need in zip(inputs, needs))
    return tuple(x.new_empty(0) if t is None or not need else t.new_empty(t.shape) for t, need in zip(inputs, wanted))


def _setup_context(ctx, inputs, output):
    x, up, down, topk_weight, _, *rest = inputs
    weights, ctx.activation, (ctx.shared, _, ctx.backend) = rest[:5], rest[5:10], rest[10:]
    _, z, expert_offsets, row_slot = output
    ctx.mark_non_differentiable(z, expert_offsets, row_slot)
    ctx.set_materialize_grads(False)  # or autograd fills a gradient of z's size with zeros
    ctx.apart = weights[-1] is not None
    ctx.save_for_backward(x, up, down, topk_weight, *weights, z, expert_offsets, row_slot)


def _autograd(ctx, dout, *_):
    grads = [None] * 18
    if dout is None:
        return tuple(grads)
    saved = ctx.saved_tensors  # read once: checkpointing unpacks anew at every look
    # where in the op's arguments x, up, down, topk_weight and the biases are that may get a gradient
    places = (0, 8, 9, 3, 5, 6) if ctx.apart else (0, 1, 2, 3, 5, 6)
    needs = [ctx.needs_input_grad[i] for i in places]
    op = torch.ops.moe_runtime.moe_mlp_backward
    for i, need, grad in zip(places, needs, op(dout, *saved, needs, *ctx.activation, ctx.shared, ctx.backend)):
        grads[i] = grad if need else None
    return tuple(grads)


register("moe_mlp", _forward, _forward_fake, _autograd, _setup_context)
register_backward("moe_mlp_backward", _backward, _backward_fake)
