"""LoRA experts over one frozen MLP, the base, which every token meets once.

    out[t] = sum_k topk_weight[t, k] FFN_{topk_idx[t, k]}(x[t]),   FFN_e = W_down_e (act(W_gate_e x) * (W_up_e x))
    W_gate_e = W_gate + s B_gate_e^T A_gate_e, and so W_up_e, W_down_e;   s = alpha / r       (LoRA, arXiv 2106.09685, Sec. 4.1)

UpIT's LoRA experts, and LoRAMoE's (arXiv 2312.09979) where every expert is chosen. The base is the same for all, so that

    z0 = [W_gate; W_up] x, once per token;   z_e = z0 + s [B_gate_e^T A_gate_e; B_up_e^T A_up_e] x
    h = sum_e w_e a_e,  a_e = act(gate_e) * up_e;   q_e = w_e A_down_e a_e;   out = W_down h + s sum_e B_down_e^T q_e

is the same number, and K base MLPs per token are one. w_e is the sum of the token's weights for e; A [E, r, in] and B
[E, r, out] lie so that all experts' x A^T and q B are one plain product each. For the backward pass x, z0, x A^T, q are kept.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from moe_runtime import backends
from moe_runtime.config import ACTIVATIONS, check_choice
from moe_runtime.ops.activation import ACT
from moe_runtime.ops.dispatch import INTEGERS
from moe_runtime.ops.library import LIB, register, register_backward


class LoRA(NamedTuple):
    """One projection's low-rank pairs, an expert each: what is added to its weight is scaling * b[e]^T a[e]."""

    a: torch.Tensor  # [E, r, in]
    b: torch.Tensor  # [E, r, out]


def lora_mlp(
    x: torch.Tensor,
    gate_proj: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_idx: torch.Tensor | None = None,
    *,
    gate: LoRA | None = None,
    up: LoRA | None = None,
    down: LoRA | None = None,
    scaling: float = 1.0,
    act: str = "silu",
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    recompute: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Run x [T, H] through its LoRA experts -> [T, H] in x's dtype, which is that of all weights too.

    `gate_proj`, `up_proj` [I, H], `down_proj` [H, I] and the biases are the base's, frozen. Each of `gate`, `up`, `down` may be
    None: that projection is then the base's for every expert. `topk_weight` [T, K] (used in float32) and `topk_idx` [T, K]
    integers; without `topk_idx` every token goes to every expert, with weights [T, E]. An id outside 0..E-1 adds nothing.
    Differentiable in x, topk_weight and the pairs. `recompute` keeps x and what has rank r, and computes z0 again in the
    backward pass. Raises ValueError for shapes, dtypes, devices that do not fit, and for a base that requires a gradient.
    """
    check_choice("act", act, ACTIVATIONS)
    base, pairs = (gate_proj, up_proj, down_proj, gate_bias, up_bias, down_bias), (gate, up, down)
    _check_base(x, base)
    E = _check_pairs(x, down_proj, pairs)
    _check_slots(x, topk_weight, topk_idx, E)
    topk_weight = topk_weight.double() if x.dtype == torch.float64 else topk_weight.float()
    halves = [t for pair in pairs for t in (pair or (None, None))]
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, topk_weight, *halves))
    backend = backends.pick("lora_mlp", x, backend)
    out, _, _ = torch.ops.moe_runtime.lora_mlp(
        x, *base[:5], topk_weight, topk_idx, *halves, E, scaling, act, needs_grad and not recompute, backend
    )
    if down_bias is not None:
        out = out + mixed_weight(topk_weight, topk_idx, E).sum(1, keepdim=True).to(x.dtype) * down_bias
    return out


def mixed_weight(topk_weight: torch.Tensor, topk_idx: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """Return w [T, E], what each token weighs each expert with: a sum over its slots, 0 without one."""
    if topk_idx is None:
        return topk_weight
    experts = torch.arange(num_experts, device=topk_idx.device)
    # where, not a product with zero: a weight that is not used may be anything
    return torch.where(topk_idx[:, :, None] == experts, topk_weight[:, :, None], 0).sum(1)


def _check_base(x, base) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; want [T, H] of a floating dtype")
    H, down = x.shape[1], base[2]
    I = down.shape[-1]
    names = ("gate_proj", "up_proj", "down_proj", "gate_bias", "up_bias", "down_bias")
    for name, tensor, shape in zip(names, base, ((I, H), (I, H), (H, I), (I,), (I,), (H,))):
        if tensor is None and name.endswith("bias"):
            continue
        if tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; want {shape} {x.dtype} on {x.device}, as "
                f"x {tuple(x.shape)} and down_proj {tuple(down.shape)} have it"
            )
        if tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient; want a frozen base; call requires_grad_(False) on it")


def _check_pairs(x, down, pairs) -> int:
    """Return the number of experts."""
    given = [pair for pair in pairs if pair is not None]
    if not given:
        raise ValueError("gate, up and down are None; want the pairs of one projection at least")
    first, (H, I) = given[0].a, down.shape
    if first.dim() != 3 or 0 in first.shape[:2]:
        raise ValueError(f"a is {tuple(first.shape)}; want [E, r, in], E >= 1, r >= 1")
    E, r = first.shape[:2]
    for name, pair, sizes in zip(("gate", "up", "down"), pairs, ((H, I), (H, I), (I, H))):
        for part, tensor, size in zip("ab", pair or (), sizes):
            if tensor.shape != (E, r, size) or tensor.dtype != x.dtype or tensor.device != x.device:
                raise ValueError(
                    f"{name}.{part} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; want {(E, r, size)} "
                    f"{x.dtype} on {x.device}"
                )
    return E


def _check_slots(x, topk_weight, topk_idx, E: int) -> None:
    T = x.shape[0]
    if topk_idx is None:
        fits, want = topk_weight.shape == (T, E), f"{(T, E)} without topk_idx"
    else:
        fits, want = (
            topk_weight.dim() == 2 and topk_weight.shape == topk_idx.shape == (T, topk_weight.shape[1]),
            f"[{T}, K] both",
        )
    if not fits or not topk_weight.is_floating_point() or topk_weight.device != x.device:
        got = "" if topk_idx is None else f", topk_idx {tuple(topk_idx.shape)}"
        raise ValueError(
            f"topk_weight is {tuple(topk_weight.shape)} {topk_weight.dtype} on {topk_weight.device}{got}; want {want}, "
            f"floats on {x.device}"
        )
    if topk_idx is not None and (topk_idx.dtype not in INTEGERS or topk_idx.device != x.device):
        raise ValueError(f"topk_idx is {topk_idx.dtype} on {topk_idx.device}; want integers on {x.device}")


def lora_mlp_reference(
    x, gate_proj, up_proj, down_proj, topk_weight, topk_idx=None, *, gate=None, up=None, down=None, scaling=1.0, act="silu",
    gate_bias=None, up_bias=None, down_bias=None,
):  # fmt: skip
    """The first equation above as a sum over experts whose weights are made whole, in the inputs' dtype, through autograd."""
    E = next(pair for pair in (gate, up, down) if pair is not None).a.shape[0]

    def linear(rows, weight, pair, bias, e):
        return F.linear(rows, weight if pair is None else weight + scaling * pair.b[e].t() @ pair.a[e], bias)

    out, weight = torch.zeros_like(x), mixed_weight(topk_weight, topk_idx, E)
    for e in range(E):
        h = ACT[act](linear(x, gate_proj, gate, gate_bias, e)) * linear(x, up_proj, up, up_bias, e)
        out = out + weight[:, e : e + 1].to(x.dtype) * linear(h, down_proj, down, down_bias, e)
    return out


class Base(NamedTuple):
    """The frozen MLP, but for the bias of its down projection."""

    gate: torch.Tensor  # [I, H]
    up: torch.Tensor  # [I, H]
    down: torch.Tensor  # [H, I]
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None

    def first(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Fill z [T, 2I] with z0 = [gate; up], and return it."""
        I = self.gate.shape[0]
        for half, weight, bias in ((z[:, :I], self.gate, self.gate_bias), (z[:, I:], self.up, self.up_bias)):
            torch.mm(x, weight.t(), out=half) if bias is None else torch.addmm(bias, x, weight.t(), out=half)
        return z

    def first_backward(self, dz: torch.Tensor) -> torch.Tensor:
        """Return dx [T, H] of `first`."""
        I = self.gate.shape[0]
        return torch.mm(dz[:, :I], self.gate).addmm_(dz[:, I:], self.up)


class Pairs(NamedTuple):
    """The experts' own halves in the order of the op; a projection without any has None twice."""

    gate_a: torch.Tensor | None  # [E, r, H]
    gate_b: torch.Tensor | None  # [E, r, I]
    up_a: torch.Tensor | None  # [E, r, H]
    up_b: torch.Tensor | None  # [E, r, I]
    down_a: torch.Tensor | None  # [E, r, I]
    down_b: torch.Tensor | None  # [E, r, H]

    def low(self, x: torch.Tensor) -> torch.Tensor:
        """Return [3, T, E r]: x A^T of gate and of up, and zeros where q will be or a projection has no pairs."""
        some = next(t for t in self if t is not None)
        low = x.new_zeros(3, x.shape[0], some.shape[0] * some.shape[1])
        for plane, a in zip(low, (self.gate_a, self.up_a)):
            if a is not None:
                torch.mm(x, flat(a).t(), out=plane)
        return low

    def in_order(self) -> "Pairs":
        """Return them contiguous."""
        return Pairs(*(None if t is None else t.contiguous() for t in self))


def flat(half: torch.Tensor) -> torch.Tensor:
    """[E, r, n] -> [E r, n]: all experts in one product."""
    return half.view(-1, half.shape[2])


def kernels_of(backend: str):
    """The module whose `mixed` and `mixed_backward` run; Triton is imported where it is used."""
    if backend == "triton":
        from moe_runtime.ops import lora_triton

        return lora_triton
    from moe_runtime.ops import lora_torch

    return lora_torch


_BASE = "Tensor gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias"
_PAIRS = "Tensor? gate_a, Tensor? gate_b, Tensor? up_a, Tensor? up_b, Tensor? down_a, Tensor? down_b"
LIB.define(
    f"lora_mlp(Tensor x, {_BASE}, Tensor topk_weight, Tensor? topk_idx, {_PAIRS}, int E, float scaling, str act, bool save, "
    "str backend) -> (Tensor, Tensor, Tensor)"
)
LIB.define(
    f"lora_mlp_backward(Tensor dout, Tensor x, {_BASE}, Tensor topk_weight, Tensor? topk_idx, {_PAIRS}, Tensor z, Tensor low, "
    "bool[8] needs, int E, float scaling, str act, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward(
    x, gate, up, down, gate_bias, up_bias, topk_weight, topk_idx, gate_a, gate_b, up_a, up_b, down_a, down_b,
    E, scaling, act, save, backend,
):  # fmt: skip
    base, x = Base(gate, up, down, gate_bias, up_bias), x.contiguous()
    pairs = Pairs(gate_a, gate_b, up_a, up_b, down_a, down_b).in_order()
    low = pairs.low(x)
    z, h = kernels_of(backend).mixed(x, base, pairs, low, topk_weight, topk_idx, E, scaling, act, save)
    out = h @ down.t()
    if down_b is not None:
        out.addmm_(low[2], flat(pairs.down_b), alpha=scaling)
    return out, z, low


def _forward_fake(
    x, gate, up, down, gate_bias, up_bias, topk_weight, topk_idx, gate_a, gate_b, up_a, up_b, down_a, down_b,
    E, scaling, act, save, backend,
):  # fmt: skip
    T, rank = x.shape[0], next(t for t in (gate_a, up_a, down_a) if t is not None).shape[1]
    return x.new_empty(x.shape), x.new_empty(T if save else 0, 2 * gate.shape[0]), x.new_empty(3, T, E * rank)


def _backward(
    dout, x, gate, up, down, gate_bias, up_bias, topk_weight, topk_idx, gate_a, gate_b, up_a, up_b, down_a, down_b,
    z, low, needs, E, scaling, act, backend,
):  # fmt: skip
    base, x, dout = Base(gate, up, down, gate_bias, up_bias), x.contiguous(), dout.contiguous()
    pairs = Pairs(gate_a, gate_b, up_a, up_b, down_a, down_b).in_order()
    if z.shape[0] != x.shape[0]:
        z = base.first(x, x.new_empty(x.shape[0], 2 * gate.shape[0]))
    dq = None if down_b is None else torch.mm(dout, flat(pairs.down_b).t()).mul_(scaling)
    mixed = kernels_of(backend).mixed_backward(
        dout @ down, dq, z, pairs, low, topk_weight, topk_idx, needs, E, scaling, act
    )
    dx = base.first_backward(mixed.dz) if needs[0] else None
    das = []
    for dplane, a, need in ((mixed.dlow[0], pairs.gate_a, needs[2]), (mixed.dlow[1], pairs.up_a, needs[4])):
        if a is None:
            das.append(None)
            continue
        das.append(torch.mm(dplane.t(), x).view(a.shape) if need else None)
        if dx is not None:
            dx.addmm_(dplane, flat(a))
    ddown_b = torch.mm(low[2].t(), dout).mul_(scaling).view(down_b.shape) if needs[7] and down_b is not None else None
    dweight = _slots(mixed.dweight, topk_idx, E)
    grads = (dx, dweight, das[0], mixed.gate_b, das[1], mixed.up_b, mixed.down_a, ddown_b)
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


def _slots(dweight, topk_idx, E: int):
    """The gradient of each slot's weight, from that of each token's weight for each expert."""
    if topk_idx is None:
        return dweight
    idx = topk_idx.long()
    return torch.where((idx >= 0) & (idx < E), dweight.gather(1, idx.clamp(0, E - 1)), 0)


class Gradients(NamedTuple):
    """What `mixed_backward` returns, from the gradients of h and q; None where nothing is asked for."""

    dz: torch.Tensor  # [T, 2I] of z0
    dlow: torch.Tensor  # [2, T, E r] of x A^T of gate, of up
    dweight: torch.Tensor  # [T, E] of w
    gate_b: torch.Tensor | None  # [E, r, I]
    up_b: torch.Tensor | None
    down_a: torch.Tensor | None


def _backward_fake(
    dout, x, gate, up, down, gate_bias, up_bias, topk_weight, topk_idx, gate_a, gate_b, up_a, up_b, down_a, down_b,
    z, low, needs, *_,
):  # fmt: skip
    inputs = (x, topk_weight, gate_a, gate_b, up_a, up_b, down_a, down_b)
    wanted = (needs[0], True, *needs[2:])
    return tuple(x.new_empty(0) if t is None or not need else t.new_empty(t.shape) for t, need in zip(inputs, wanted))


PLACES = (0, 6, 8, 9, 10, 11, 12, 13)  # of what may get a gradient among the op's arguments


def _setup_context(ctx, inputs, output):
    tensors, (ctx.E, ctx.scaling, ctx.act, _, ctx.backend) = inputs[:14], inputs[14:]
    _, z, low = output
    ctx.mark_non_differentiable(z, low)
    ctx.set_materialize_grads(False)  # or autograd fills a gradient of z's size with zeros
    ctx.save_for_backward(*tensors, z, low)


def _autograd(ctx, dout, *_):
    grads = [None] * 19
    if dout is None:
        return tuple(grads)
    needs = [ctx.needs_input_grad[i] for i in PLACES]
    op = torch.ops.moe_runtime.lora_mlp_backward
    found = op(dout, *ctx.saved_tensors, needs, ctx.E, ctx.scaling, ctx.act, ctx.backend)
    for i, need, grad in zip(PLACES, needs, found):
        grads[i] = grad if need else None
    return tuple(grads)


register("lora_mlp", _forward, _forward_fake, _autograd, _setup_context)
register_backward("lora_mlp_backward", _backward, _backward_fake)
