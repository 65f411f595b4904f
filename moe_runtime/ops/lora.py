"""LoRA experts over one frozen MLP, the base, which runs once per token.

    out[t] = sum_k topk_weight[t, k] FFN_{topk_idx[t, k]}(x[t])
    FFN_e = W_down_e (act(W_gate_e x) * (W_up_e x))
    W_gate_e = W_gate + s B_gate_e^T A_gate_e, and so W_up_e, W_down_e
    s = alpha / r                                            (LoRA, arXiv 2106.09685, Sec. 4.1)

These are UpIT's LoRA experts, and LoRAMoE's (arXiv 2312.09979) if every expert is selected. As the
base is the same for all,

    z0 = [W_gate; W_up] x, once per token;   z_e = z0 + s [B_gate_e^T A_gate_e; B_up_e^T A_up_e] x
    h = sum_e w_e a_e,  a_e = act(gate_e) * up_e;   q_e = w_e A_down_e a_e
    out = W_down h + s sum_e B_down_e^T q_e

gives the same result with one base MLP per token instead of K. w_e is the sum of the token's
weights for e; A [E, r, in] and B [E, r, out] are laid out so that x A^T and q B of all experts are
one plain product each. x, z0, x A^T and q are saved.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime import backends
from moe_runtime.config import ACTIVATIONS, check_choice
from moe_runtime.ops import lora_cpp, lora_torch, lora_triton
from moe_runtime.ops.activation import ACT
from moe_runtime.ops.dispatch import INTEGERS
from moe_runtime.ops.expert_rows import check_like
from moe_runtime.ops.library import (
    Tensors,
    call_op,
    define,
    inputs_of,
    kind,
    register,
    register_backward,
    wide_dtype,
)
from moe_runtime.ops.lora_torch import Base, Pairs, flat, mixed_weight
from moe_runtime.ops.moe_mlp import absent_as_empty
from moe_runtime.ops.products import addmm, mm
from moe_runtime.ops.workspace import lease


class LoRA(NamedTuple):
    """Low-rank pairs of one projection: scaling * b[e]^T a[e] is added to expert e's weight."""

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
    """Run x [T, H] through its LoRA experts -> [T, H] in x's dtype, as are all weights.

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
    E = _check(x, base, pairs, topk_weight, topk_idx)
    topk_weight = topk_weight.to(wide_dtype(x.dtype))
    if backends.portable() is not None:
        return lora_mlp_reference(
            x,
            gate_proj,
            up_proj,
            down_proj,
            topk_weight,
            topk_idx,
            **dict(zip(_PROJECTIONS, pairs)),
            **dict(zip(_BASE[3:], base[3:])),
            scaling=scaling,
            act=act,
        )
    halves: list[Tensor | None] = []
    for pair in pairs:
        halves += pair or (None, None)
    save = torch.is_grad_enabled() and not recompute and not backends.exporting()
    save = save and any([t is not None and t.requires_grad for t in (x, topk_weight, *halves)])
    backend = backends.pick("lora_mlp", x, backend)
    out, _, _ = call_op(
        "lora_mlp",
        x,
        *base[:5],
        topk_weight,
        topk_idx,
        *halves,
        E,
        scaling,
        act,
        save,
        backend,
    )
    if down_bias is not None:
        weight = mixed_weight(topk_weight, topk_idx, E).sum(1, keepdim=True)
        out = out + weight.to(x.dtype) * down_bias
    return out


_PROJECTIONS = ("gate", "up", "down")
_BASE = ("gate_proj", "up_proj", "down_proj", "gate_bias", "up_bias", "down_bias")


def _check(
    x: Tensor,
    base: Sequence[Tensor | None],
    pairs: Sequence[LoRA | None],
    topk_weight: Tensor,
    topk_idx: Tensor | None,
) -> int:
    """Raise ValueError for mismatched shapes, dtypes or devices; return the number of experts."""
    given = [pair for pair in pairs if pair is not None]
    if x.dim() != 2 or not x.is_floating_point() or not given:
        raise ValueError(
            "Expected x [T, H] of a floating dtype and the pairs of at least one projection, but x "
            f"is {kind(x)} and there are {len(given)} pairs"
        )
    for name, tensor in zip(_BASE, base):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, but the base must be frozen. Call "
                "requires_grad_(False) on it"
            )
    T, H = x.shape
    I = base[0].shape[0]  # type: ignore[union-attr]
    check_like(x, zip(_BASE, base, ((I, H), (I, H), (H, I), (I,), (I,), (H,))))
    E, r = given[0].a.shape[:2]
    for name, pair, sizes in zip(_PROJECTIONS, pairs, ((H, I), (H, I), (I, H))):
        for part, tensor, size in zip("ab", pair or (), sizes):
            check_like(x, [(f"{name}.{part}", tensor, (E, r, size))])
    K = E if topk_idx is None else topk_idx.shape[-1]
    fits = topk_weight.shape == (T, K) and topk_weight.is_floating_point()
    fits = fits and topk_weight.device == x.device
    if topk_idx is not None:
        fits = fits and topk_idx.shape == (T, K) and topk_idx.dtype in INTEGERS
        fits = fits and topk_idx.device == x.device
    if not fits:
        raise ValueError(
            "Expected topk_weight [T, K] of floats and topk_idx [T, K] of integers, or topk_weight "
            f"[T, E] without topk_idx, on {x.device}, but topk_weight is {kind(topk_weight)}, "
            f"topk_idx {kind(topk_idx)}"
        )
    return E


def lora_mlp_reference(
    x: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    topk_weight: Tensor,
    topk_idx: Tensor | None = None,
    *,
    scaling: float = 1.0,
    act: str = "silu",
    **options: Any,
) -> Tensor:
    """Compute the first equation as a sum over experts with materialized weights, with autograd.

    `options` are the pairs and biases as in `lora_mlp`.
    """
    base = dict(zip(_PROJECTIONS, (gate_proj, up_proj, down_proj)))
    pairs = [options[name] for name in _PROJECTIONS if options.get(name) is not None]
    E = pairs[0].a.shape[0]

    def linear(rows: Tensor, name: str, e: int) -> Tensor:
        weight = base[name]
        pair = options.get(name)
        if pair is not None:
            weight = weight + scaling * pair.b[e].t() @ pair.a[e]
        return F.linear(rows, weight, options.get(f"{name}_bias"))

    out = torch.zeros_like(x)
    weight = mixed_weight(topk_weight, topk_idx, E)
    for e in range(E):
        h = ACT[act](linear(x, "gate", e)) * linear(x, "up", e)
        out = out + weight[:, e : e + 1].to(x.dtype) * linear(h, "down", e)
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
STEPS = {"torch": lora_torch, "cpp": lora_cpp, "triton": lora_triton}


def _part(group: type, i: Any) -> Any:
    """Return the inputs of a Base or Pairs, or autograd's value for each of them."""
    return group(*[getattr(i, name) for name in group._fields])  # type: ignore[attr-defined]


def _forward(*arguments: Any) -> Tensors:
    i = Inputs(*arguments)
    pairs = _part(Pairs, i).in_order()
    x = i.x.contiguous()
    low = pairs.low(x)
    z = _part(Base, i).first(x, lease((x.shape[0], 2 * i.gate.shape[0]), x))
    h = STEPS[i.backend].mixed(i, z, pairs, low)
    out = mm(h, i.down.t())
    if pairs.down_b is not None:
        addmm(out, low[2], flat(pairs.down_b), out=out, alpha=i.scaling)
    if not i.save:
        z = x.new_empty(0, z.shape[1])
    return out, z, low


def _forward_fake(*arguments: Any) -> Tensors:
    i = Inputs(*arguments)
    T = i.x.shape[0]
    rank = next(t for t in _part(Pairs, i) if t is not None).shape[1]
    z = i.x.new_empty(T if i.save else 0, 2 * i.gate.shape[0])
    return i.x.new_empty(i.x.shape), z, i.x.new_empty(3, T, i.E * rank)


def _backward(
    dout: Tensor,
    z: Tensor,
    low: Tensor,
    need_x: bool,
    flags: list,
    *arguments: Any,
) -> Tensors:
    i = Inputs(*arguments)
    needs = Pairs(*flags)
    dout = dout.contiguous()
    base = _part(Base, i)
    pairs = _part(Pairs, i).in_order()
    x = i.x.contiguous()
    if z.shape[0] != x.shape[0]:
        z = base.first(x, x.new_empty(x.shape[0], 2 * i.gate.shape[0]))
    dq = None
    if pairs.down_b is not None:
        dq = mm(dout, flat(pairs.down_b).t()).mul_(i.scaling)
    mixed = STEPS[i.backend].mixed_backward(
        i,
        mm(dout, i.down),
        dq,
        z,
        pairs,
        low,
        needs,
    )
    dx = base.first_backward(mixed.dz) if need_x else None
    grads = Pairs(
        None,
        mixed.gate_b,
        None,
        mixed.up_b,
        mixed.down_a,
        None,
    )
    for name, dlow in zip(("gate_a", "up_a"), mixed.dlow):
        a = getattr(pairs, name)
        if a is None:
            continue
        if dx is not None:
            addmm(dx, dlow, flat(a), out=dx)
        if getattr(needs, name):
            grads = grads._replace(**{name: mm(dlow.t(), x).view(a.shape)})
    if pairs.down_b is not None and needs.down_b:
        ddown_b = mm(low[2].t(), dout).mul_(i.scaling)
        grads = grads._replace(down_b=ddown_b.view(pairs.down_b.shape))
    dweight = _slots(mixed.dweight, i.topk_idx, i.E)
    return absent_as_empty((dx, dweight, *grads), x)


def _slots(dweight: Tensor, topk_idx: Tensor | None, E: int) -> Tensor:
    """Return the gradient of each slot's weight from that of each token's weight per expert."""
    if topk_idx is None:
        return dweight
    idx = topk_idx.long()
    return torch.where((idx >= 0) & (idx < E), dweight.gather(1, idx.clamp(0, E - 1)), 0)


def _backward_fake(
    dout: Tensor,
    z: Tensor,
    low: Tensor,
    need_x: bool,
    flags: list,
    *arguments: Any,
) -> Tensors:
    i = Inputs(*arguments)
    inputs = (i.x, i.topk_weight, *_part(Pairs, i))
    made = []
    for tensor, need in zip(inputs, (need_x, True, *flags)):
        made.append(tensor.new_empty(tensor.shape) if need and tensor is not None else None)
    return absent_as_empty(made, i.x)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    i = Inputs(*inputs)
    _, z, low = output
    ctx.mark_non_differentiable(z, low)
    # otherwise autograd would fill a gradient of z's size with zeros
    ctx.set_materialize_grads(False)
    ctx.settings = (i.E, i.scaling, i.act, i.save, i.backend)
    ctx.save_for_backward(z, low, *inputs[: -len(ctx.settings)])


def _autograd(ctx: Any, dout: Tensor | None, *_: Any) -> tuple:
    if dout is None:
        return tuple(Inputs())
    needs = Inputs(*ctx.needs_input_grad)
    z, low, *tensors = ctx.saved_tensors
    dx, dweight, *dpairs = torch.ops.moe_runtime.lora_mlp_backward(
        dout,
        z,
        low,
        needs.x,
        _part(Pairs, needs),
        *tensors,
        *ctx.settings,
    )
    grads = {"x": dx, "topk_weight": dweight, **dict(zip(Pairs._fields, dpairs))}
    return tuple(Inputs(**{name: grad for name, grad in grads.items() if getattr(needs, name)}))


register(
    "lora_mlp",
    _forward,
    _forward_fake,
    _autograd,
    _setup_context,
)
register_backward("lora_mlp_backward", _backward, _backward_fake)
