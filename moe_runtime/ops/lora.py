"""LoRA experts over one frozen MLP, the base, which runs once per token.

    out[t] = sum_k topk_weight[t, k] FFN_{topk_idx[t, k]}(x[t]),   FFN_e = W_down_e (act(W_gate_e x) * (W_up_e x))
    W_gate_e = W_gate + s B_gate_e^T A_gate_e, and so W_up_e, W_down_e;   s = alpha / r       (LoRA, arXiv 2106.09685, Sec. 4.1)

These are UpIT's LoRA experts, and LoRAMoE's (arXiv 2312.09979) if every expert is selected. As the
base is the same for all,

    z0 = [W_gate; W_up] x, once per token;   z_e = z0 + s [B_gate_e^T A_gate_e; B_up_e^T A_up_e] x
    h = sum_e w_e a_e,  a_e = act(gate_e) * up_e;   q_e = w_e A_down_e a_e;   out = W_down h + s sum_e B_down_e^T q_e

gives the same result with one base MLP per token instead of K. w_e is the sum of the token's
weights for e; A [E, r, in] and B [E, r, out] are laid out so that x A^T and q B of all experts are
one plain product each. x, z0, x A^T and q are saved.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime import backends
from moe_runtime.config import ACTIVATIONS, check_choice
from moe_runtime.ops import lora_torch
from moe_runtime.ops.activation import ACT
from moe_runtime.ops.dispatch import INTEGERS
from moe_runtime.ops.library import define, inputs_of, kind, register, register_backward, wide_dtype
from moe_runtime.ops.lora_torch import Base, Gradients, Pairs, flat, mixed_weight


class LoRA(NamedTuple):
    """Low-rank pairs of one projection, one per expert: scaling * b[e]^T a[e] is added to the
    weight.
    """

    a: Tensor  # [E, r, in]
    b: Tensor  # [E, r, out]


def lora_mlp(
    x: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    topk_weight: Tensor,
    topk_idx: Tensor | None = None,
    *,
    gate: LoRA | None = None,
    up: LoRA | None = None,
    down: LoRA | None = None,
    scaling: float = 1.0,
    act: str = "silu",
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    recompute: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Run x [T, H] through its LoRA experts -> [T, H] in x's dtype, which is that of all weights
    too.

    `gate_proj`, `up_proj` [I, H], `down_proj` [H, I] and the biases belong to the frozen base. Each
    of `gate`, `up`, `down` may be None, so that all experts share the base's projection.
    `topk_weight` [T, K] (used in float32) and `topk_idx` [T, K] of integers; without `topk_idx`
    every token uses every expert, with weights [T, E]. Ids outside 0..E-1 contribute nothing.
    Differentiable in x, topk_weight and the pairs. `recompute` saves x and tensors of rank r, and
    recomputes z0 in the backward pass. Raises ValueError for mismatched shapes, dtypes or devices,
    and for a base that requires a gradient.
    """
    check_choice("act", act, ACTIVATIONS)
    base = (gate_proj, up_proj, down_proj, gate_bias, up_bias, down_bias)
    pairs = (gate, up, down)
    _check_base(x, base)
    E = _check_pairs(x, down_proj, pairs)
    _check_slots(x, topk_weight, topk_idx, E)
    topk_weight = topk_weight.to(wide_dtype(x.dtype))
    if backends.portable() is not None:
        halves = {"gate": gate, "up": up, "down": down}
        biases = dict(zip(("gate_bias", "up_bias", "down_bias"), base[3:]))
        return lora_mlp_reference(
            x, *base[:3], topk_weight, topk_idx, **halves, scaling=scaling, act=act, **biases
        )
    halves = [t for pair in pairs for t in (pair or (None, None))]
    save = torch.is_grad_enabled() and not recompute and not backends.exporting()
    save = save and any(t is not None and t.requires_grad for t in (x, topk_weight, *halves))
    backend = backends.pick("lora_mlp", x, backend)
    out, _, _ = torch.ops.moe_runtime.lora_mlp(
        x, *base[:5], topk_weight, topk_idx, *halves, E, scaling, act, save, backend
    )
    if down_bias is not None:
        out = (
            out
            + mixed_weight(topk_weight, topk_idx, E).sum(1, keepdim=True).to(x.dtype) * down_bias
        )
    return out


def _check_base(x, base) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"Expected x [T, H] of a floating dtype, but x is {kind(x)}")
    H = x.shape[1]
    down = base[2]
    I = down.shape[-1]
    names = ("gate_proj", "up_proj", "down_proj", "gate_bias", "up_bias", "down_bias")
    for name, tensor, shape in zip(names, base, ((I, H), (I, H), (H, I), (I,), (I,), (H,))):
        if tensor is None and name.endswith("bias"):
            continue
        if (
            tensor.requires_grad
            or tensor.shape != shape
            or tensor.dtype != x.dtype
            or tensor.device != x.device
        ):
            want = (
                f"{shape} {x.dtype} on {x.device} for x {tuple(x.shape)} and down_proj "
                f"{tuple(down.shape)}"
            )
            frozen = (
                f"{name} requires a gradient, but the base must be frozen. Call "
                "requires_grad_(False) on it"
            )
            raise ValueError(
                frozen if tensor.requires_grad else f"Expected {want}, but {name} is {kind(tensor)}"
            )


def _check_pairs(x, down, pairs) -> int:
    """Return the number of experts."""
    given = [pair for pair in pairs if pair is not None]
    if not given or given[0].a.dim() != 3 or 0 in given[0].a.shape[:2]:
        got = f"a is {tuple(given[0].a.shape)}" if given else "gate, up and down are None"
        raise ValueError(
            "Expected the pairs of at least one projection, a [E, r, in] with E >= 1 and r >= 1, "
            f"but {got}"
        )
    (E, r, _), (H, I) = given[0].a.shape, down.shape
    for name, pair, sizes in zip(("gate", "up", "down"), pairs, ((H, I), (H, I), (I, H))):
        for part, tensor, size in zip("ab", pair or (), sizes):
            if tensor.shape != (E, r, size) or tensor.dtype != x.dtype or tensor.device != x.device:
                raise ValueError(
                    f"Expected {(E, r, size)} {x.dtype} on {x.device}, but {name}.{part} is "
                    f"{kind(tensor)}"
                )
    return E


def _check_slots(x, topk_weight, topk_idx, E: int) -> None:
    T = x.shape[0]
    K = E if topk_idx is None else topk_idx.shape[-1]
    fits = (
        topk_weight.shape == (T, K)
        and topk_weight.is_floating_point()
        and topk_weight.device == x.device
    )
    if topk_idx is not None:
        fits = (
            fits
            and topk_idx.shape == (T, K)
            and topk_idx.dtype in INTEGERS
            and topk_idx.device == x.device
        )
    if not fits:  # formatted only here, as torch.compile specializes on a number in a string
        if topk_idx is None:
            want = f"{(T, E)} without topk_idx"
        else:
            want = f"[{T}, K] both, topk_idx integers"
        got = f"topk_weight is {kind(topk_weight)}, topk_idx {kind(topk_idx)}"
        raise ValueError(f"Expected {want}, floats on {x.device}, but {got}")


def lora_mlp_reference(
    x,
    gate_proj,
    up_proj,
    down_proj,
    topk_weight,
    topk_idx=None,
    *,
    gate=None,
    up=None,
    down=None,
    scaling=1.0,
    act="silu",
    gate_bias=None,
    up_bias=None,
    down_bias=None,
):
    """Compute the first equation as a sum over experts with materialized weights, in the inputs'
    dtype, with autograd.
    """
    E = next(pair for pair in (gate, up, down) if pair is not None).a.shape[0]

    def linear(rows, weight, pair, bias, e):
        return F.linear(
            rows, weight if pair is None else weight + scaling * pair.b[e].t() @ pair.a[e], bias
        )

    out = torch.zeros_like(x)
    weight = mixed_weight(topk_weight, topk_idx, E)
    for e in range(E):
        h = ACT[act](linear(x, gate_proj, gate, gate_bias, e)) * linear(x, up_proj, up, up_bias, e)
        out = out + weight[:, e : e + 1].to(x.dtype) * linear(h, down_proj, down, down_bias, e)
    return out


_SCHEMA = (
    "Tensor x, Tensor gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, Tensor "
    "topk_weight, Tensor? topk_idx, Tensor? gate_a, Tensor? gate_b, Tensor? up_a, Tensor? up_b, "
    "Tensor? down_a, Tensor? down_b, int E, float scaling, str act, bool save, str backend"
)
define(f"lora_mlp({_SCHEMA}) -> (Tensor, Tensor, Tensor)")
define(
    f"lora_mlp_backward(Tensor dout, Tensor z, Tensor low, bool need_x, bool[6] needs, {_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

Inputs = inputs_of("lora_mlp")


def _part(group: type, i: Inputs):
    """Return the inputs of a Base or Pairs, or autograd's value for each of them."""
    return group(*(getattr(i, name) for name in group._fields))


def _forward(*arguments):
    i = Inputs(*arguments)
    pairs = _part(Pairs, i).in_order()
    x = i.x.contiguous()
    low = pairs.low(x)
    mixed = _mixed_triton if i.backend == "triton" else lora_torch.mixed
    z, h = mixed(
        x, _part(Base, i), pairs, low, i.topk_weight, i.topk_idx, i.E, i.scaling, i.act, i.save
    )
    out = h @ i.down.t()
    if pairs.down_b is not None:
        out.addmm_(low[2], flat(pairs.down_b), alpha=i.scaling)
    return out, z, low


def _mixed_triton(
    x,
    base: Base,
    pairs: Pairs,
    low,
    topk_weight,
    topk_idx,
    E: int,
    scaling: float,
    act: str,
    save: bool,
):
    """Compute `lora_torch.mixed` with one library product and one kernel, without materializing
    rows of single experts.
    """
    from moe_runtime.kernels.lora import lora_forward

    z = base.first(x, x.new_empty(x.shape[0], 2 * base.gate.shape[0]))
    weight = mixed_weight(topk_weight, topk_idx, E).contiguous()
    h = lora_forward(z, low, weight, pairs.gate_b, pairs.up_b, pairs.down_a, act, scaling)
    return (z if save else z.new_empty(0, z.shape[1])), h


def _forward_fake(*arguments):
    i = Inputs(*arguments)
    T = i.x.shape[0]
    rank = next(t for t in _part(Pairs, i) if t is not None).shape[1]
    z = i.x.new_empty(T if i.save else 0, 2 * i.gate.shape[0])
    return i.x.new_empty(i.x.shape), z, i.x.new_empty(3, T, i.E * rank)


def _backward(dout, z, low, need_x, needs, *arguments):
    i = Inputs(*arguments)
    needs = Pairs(*needs)
    dout = dout.contiguous()
    base = _part(Base, i)
    pairs = _part(Pairs, i).in_order()
    x = i.x.contiguous()
    if z.shape[0] != x.shape[0]:
        z = base.first(x, x.new_empty(x.shape[0], 2 * i.gate.shape[0]))
    dq = None if pairs.down_b is None else torch.mm(dout, flat(pairs.down_b).t()).mul_(i.scaling)
    mixed_backward = _mixed_backward_triton if i.backend == "triton" else lora_torch.mixed_backward
    mixed = mixed_backward(
        dout @ i.down, dq, z, pairs, low, i.topk_weight, i.topk_idx, needs, i.E, i.scaling, i.act
    )
    dgate, dup = mixed.dlow
    dx = base.first_backward(mixed.dz) if need_x else None
    if dx is not None:
        for dplane, a in ((dgate, pairs.gate_a), (dup, pairs.up_a)):
            if a is not None:
                dx.addmm_(dplane, flat(a))
    wanted = Pairs(*(half if need else None for half, need in zip(pairs, needs)))
    grads = Pairs(
        gate_a=None if wanted.gate_a is None else torch.mm(dgate.t(), x).view(wanted.gate_a.shape),
        gate_b=mixed.gate_b,
        up_a=None if wanted.up_a is None else torch.mm(dup.t(), x).view(wanted.up_a.shape),
        up_b=mixed.up_b,
        down_a=mixed.down_a,
        down_b=None
        if wanted.down_b is None
        else torch.mm(low[2].t(), dout).mul_(i.scaling).view(wanted.down_b.shape),
    )
    dweight = _slots(mixed.dweight, i.topk_idx, i.E)
    return tuple(x.new_empty(0) if grad is None else grad for grad in (dx, dweight, *grads))


def _mixed_backward_triton(
    dh, dq, z, pairs: Pairs, low, topk_weight, topk_idx, needs: Pairs, E: int, scaling, act: str
):
    """Compute `lora_torch.mixed_backward` in three kernels."""
    from moe_runtime.kernels import lora_backward

    weight = mixed_weight(topk_weight, topk_idx, E).contiguous()
    shared = (dh, dq, z, low, weight, pairs.gate_b, pairs.up_b, pairs.down_a)
    dz, dlow, dweight = lora_backward.lora_backward(*shared, act, scaling)
    wanted = [
        half is not None and need
        for half, need in (
            (pairs.gate_b, needs.gate_b),
            (pairs.up_b, needs.up_b),
            (pairs.down_a, needs.down_a),
        )
    ]
    return Gradients(
        dz, dlow, dweight, *lora_backward.lora_backward_w(*shared, wanted, act, scaling)
    )


def _slots(dweight, topk_idx, E: int):
    """Return the gradient of each slot's weight from that of each token's weight for each
    expert.
    """
    if topk_idx is None:
        return dweight
    idx = topk_idx.long()
    return torch.where((idx >= 0) & (idx < E), dweight.gather(1, idx.clamp(0, E - 1)), 0)


def _backward_fake(dout, z, low, need_x, needs, *arguments):
    i = Inputs(*arguments)
    wanted = zip((i.x, i.topk_weight, *_part(Pairs, i)), (need_x, True, *needs))
    return tuple(
        i.x.new_empty(0) if t is None or not need else t.new_empty(t.shape) for t, need in wanted
    )


def _setup_context(ctx, inputs, output):
    i, (_, z, low) = Inputs(*inputs), output
    ctx.mark_non_differentiable(z, low)
    # otherwise autograd would fill a gradient of z's size with zeros
    ctx.set_materialize_grads(False)
    ctx.settings = (i.E, i.scaling, i.act, i.save, i.backend)
    ctx.save_for_backward(z, low, *inputs[: -len(ctx.settings)])


def _autograd(ctx, dout, *_):
    needs = Inputs(*ctx.needs_input_grad)
    if dout is None:
        return tuple(Inputs())
    z, low, *tensors = ctx.saved_tensors
    dx, dweight, *dpairs = torch.ops.moe_runtime.lora_mlp_backward(
        dout, z, low, needs.x, _part(Pairs, needs), *tensors, *ctx.settings
    )
    wanted = {name: grad for name, grad in zip(Pairs._fields, dpairs) if getattr(needs, name)}
    return tuple(
        Inputs(
            x=dx if needs.x else None, topk_weight=dweight if needs.topk_weight else None, **wanted
        )
    )


register("lora_mlp", _forward, _forward_fake, _autograd, _setup_context)
register_backward("lora_mlp_backward", _backward, _backward_fake)
