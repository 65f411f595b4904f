"""Mix the logits of several language models per token, and compute the mixture's cross-entropy.

UltraFuser, Eq. (1):  o = sum_s w_s o_s,  o_s = h_s W_s^T
                      w is the softmax of the gate's scores (`modules.fuser`)
UltraFuser, Eq. (2):  L = sum_t CE(o_t, y_t)

The mixed logits of all tokens are never in memory at once.

`hidden` h_s [..., H_s] are the specialists' last hidden states, whose logits predict the label;
`heads` are W_s [V_s, H_s]; `gate_weight` is w [..., S]. Vocabularies of different sizes are
truncated to the common ids. With p = softmax(o) and do the gradient of a token's loss times (p -
onehot(y)):

  dw_s = E_p[o_s] - o_s[y] = <do W_s, h_s>      dh_s = w_s do W_s      dW_s = do^T (w_s h_s)

The first form of dw is a by-product of the softmax and suffices if the specialists are frozen
(stage 1 of the paper): the backward pass then has no matrix product. If specialists train, chunks
of tokens run forward and backward while their logits are in memory: during the forward pass if the
loss is a scalar, by which the backward pass only scales the gradients; during the backward pass if
reduction is "none", as the forward pass does not know the gradient. Matrix products are always
torch's, whichever backend mixes the logits and computes their gradient.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime import backends
from moe_runtime.config import check_choice
from moe_runtime.ops import fusion_torch
from moe_runtime.ops._torch_private import graph_is_kept, in_dispatch_mode
from moe_runtime.ops.library import (
    compute_dtype,
    define,
    inputs_of,
    kind,
    register,
    register_backward,
    wide_dtype,
)
from moe_runtime.ops.workspace import scratch

REDUCTIONS = ("mean", "sum", "none")
# logits in memory at a time on the CPU; 8 times as many on a GPU, whose products need more rows
CHUNK = 1 << 24


def common_vocabulary(heads: Sequence[Tensor]) -> int:
    """Return the number of ids that all `heads` [V_s, H_s] have in common."""
    return min(head.shape[0] for head in heads)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a sum over tokens before it is scaled by the loss's gradient."""
    if dtype == torch.float16:  # the gradient is about 1 / tokens
        return torch.float32
    return dtype


def kernels_of(backend: str) -> Any:
    """Return the module with the functions that mix logits: the Triton kernels, else torch."""
    if backend != "triton":
        return fusion_torch
    from moe_runtime.kernels import fusion

    return fusion


def fuse_logits(hidden: Sequence[Tensor], heads: Sequence[Tensor], gate_weight: Tensor) -> Tensor:
    """Mix the specialists' logits, UltraFuser's Eq. (1), for few positions as in generation.

    Each specialist's logits are materialized, first on its device, then on gate_weight's.
    Differentiable.

    Args:
        hidden: S tensors [..., H_s].
        heads: S tensors [V_s, H_s].
        gate_weight: [..., S].

    Returns:
        [..., V] float32; V is the smallest V_s.
    """
    _check(hidden, heads, gate_weight)
    V = common_vocabulary(heads)
    pairs = zip(hidden, heads, strict=True)
    return mix(
        (F.linear(h, head if len(head) == V else head[:V]) for h, head in pairs), gate_weight
    )


def mix(parts: Iterable[Tensor], gate_weight: Tensor) -> Tensor:
    """Compute Eq. (1) from logits -> [..., V], float32 or wider.

    `parts` are S of [..., V_s], consumed one by one, `gate_weight` is [..., S]. The result has the
    common ids, on gate_weight's device. Differentiable.
    """
    fused: Tensor | None = None
    for s, logits in enumerate(parts):
        logits = logits.to(gate_weight.device, wide_dtype(logits.dtype))
        weight = gate_weight[..., s : s + 1]
        if fused is None:
            fused = weight * logits
        else:
            V = min(fused.shape[-1], logits.shape[-1])
            fused = _first(fused, V) + weight * _first(logits, V)
    assert fused is not None
    return fused


def _first(logits: Tensor, V: int) -> Tensor:
    # no view if nothing is truncated, as its gradient would be a copy
    return logits if logits.shape[-1] == V else logits[..., :V]


def fused_cross_entropy(
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    gate_weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """Compute F.cross_entropy of `fuse_logits` without holding the logits.

    Differentiable in hidden, heads and gate_weight; supports autocast as F.linear does.

    Args:
        hidden: S tensors [..., H_s].
        heads: S tensors [V_s, H_s].
        gate_weight: [..., S].
        labels: [...], ids of the common vocabulary.
        ignore_index: Label that does not count.
        reduction: "mean", "sum" or "none".
        backend: "torch" or "triton"; None selects the default for the device.

    Returns:
        A scalar, or [...] with reduction "none", in float32.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit, and on a CPU for labels outside the
            common vocabulary; on a GPU those make the loss NaN.
    """
    _check(hidden, heads, gate_weight, labels)
    check_choice("reduction", reduction, REDUCTIONS)
    S = len(hidden)
    shape = labels.shape
    hidden = [h.to(compute_dtype(h)).reshape(shape.numel(), h.shape[-1]) for h in hidden]
    heads = [head.to(compute_dtype(head)) for head in heads]
    gate = gate_weight.to(wide_dtype(hidden[0].dtype)).reshape(shape.numel(), S)
    labels = labels.reshape(-1).long()
    chosen = backends.pick("fused_cross_entropy", hidden[0], backend)
    grad = torch.is_grad_enabled() and not backends.exporting()
    need_hidden = [grad and h.requires_grad for h in hidden]
    need_heads = [grad and head.requires_grad for head in heads]
    trains = any(need_hidden) or any(need_heads)
    if reduction != "none" and trains:
        total = torch.ops.moe_runtime.fused_loss(
            gate,
            labels,
            hidden,
            heads,
            ignore_index,
            need_hidden,
            need_heads,
            chosen,
        )[0]
    else:
        need_score = grad and gate.requires_grad and not trains
        nll, _ = torch.ops.moe_runtime.fused_nll(
            gate,
            labels,
            hidden,
            heads,
            ignore_index,
            need_score,
            chosen,
        )
        if reduction == "none":
            return nll.view(shape)
        total = nll.sum()
    if reduction == "sum":
        return total
    return mean_of(total, labels, ignore_index)


def mean_of(total: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Return `total` [] divided by the number of `labels` [...] that are not ignored.

    NaN with zero gradients if all are ignored, as in torch.
    """
    count = (labels != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp_min(1), torch.nan)


def _check(
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    gate_weight: Tensor,
    labels: Tensor | None = None,
) -> None:
    """Raise ValueError for mismatched shapes, dtypes or devices."""
    shape = gate_weight.shape[:-1]
    fits = 0 < len(hidden) == len(heads) == gate_weight.shape[-1]
    for h, head in zip(hidden, heads):
        fits = fits and h.dim() > 0 and h.shape[:-1] == shape
        fits = fits and head.dim() == 2 and len(head) > 0 and h.shape[-1] == head.shape[1]
    if not fits:
        raise ValueError(
            "Expected S hidden states [..., H_s], S heads [V_s, H_s] and gate_weight [..., S] of "
            f"the same positions, but hidden is {[tuple(h.shape) for h in hidden]}, heads "
            f"{[tuple(head.shape) for head in heads]} and gate_weight {tuple(gate_weight.shape)}"
        )
    if labels is None:
        return
    if labels.shape != shape or labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"Expected labels {tuple(shape)} of int64 or int32, but labels is {kind(labels)}"
        )
    dtypes = {compute_dtype(t) for t in (*hidden, *heads)}
    devices = {t.device for t in (*hidden, *heads, gate_weight, labels)}
    if len(dtypes) > 1 or len(devices) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(
            "Expected one floating dtype and one device, but hidden and heads are "
            f"{', '.join(sorted(map(str, dtypes)))}, with gate_weight and labels on "
            f"{', '.join(sorted(map(str, devices)))}. Cast the specialists or move the heads"
        )


def gradients(scale: Tensor, *arguments: Any) -> tuple:
    """Return each token's loss [T] and sum(scale * loss)'s gradients: gate's, hidden's, heads'.

    The arguments after `scale` [T] are those of `fused_loss`. Gradients are empty if not needed.
    Those of heads are float32 if a sum in a narrow dtype would be rounded more than once.
    """
    gate, labels, hidden, heads, ignore_index, need_hidden, need_heads, backend = arguments
    kernels = kernels_of(backend)
    V = common_vocabulary(heads)
    T = len(labels)
    gate = gate.contiguous()
    hidden = [h.contiguous() for h in hidden]
    heads = [head.contiguous() for head in heads]
    nll = gate.new_empty(T)
    dgate = torch.empty_like(gate)
    dhidden = []
    for h, need in zip(hidden, need_hidden, strict=True):
        dhidden.append(torch.empty_like(h) if need else h.new_empty(0))
    # slices of equally many tokens whose mixed logits are in memory together
    logits = CHUNK if gate.device.type == "cpu" else 8 * CHUNK
    most = max(logits // V, 1)
    step = max(-(-T // max(-(-T // most), 1)), 1)
    chunks = [slice(start, min(start + step, T)) for start in range(0, T, step)]
    sums = []
    for head, need in zip(heads, need_heads, strict=True):
        if not need:
            sums.append(head.new_empty(0))
        elif len(chunks) > 1:
            sums.append(torch.zeros_like(head, dtype=wide_dtype(head.dtype)))
        else:
            sums.append(torch.zeros_like(head, dtype=sum_dtype(head.dtype)))
    for rows in chunks:
        states = [h[rows] for h in hidden]
        nll[rows], dlogits = kernels.fused_logits_backward(
            gate[rows],
            labels[rows],
            scale[rows],
            states,
            heads,
            V,
            ignore_index,
        )
        for s, (h, head) in enumerate(zip(states, heads, strict=True)):
            dx = torch.mm(dlogits, head[:V], out=_memory("fusion dx", h))
            out = dhidden[s][rows] if need_hidden[s] else None
            scaled = _memory("fusion scaled", h) if need_heads[s] else None
            kernels.fused_hidden_backward(
                dx,
                h,
                gate[rows, s],
                dgate[rows, s],
                out,
                scaled,
            )
            if scaled is not None:
                _add_product(sums[s][:V], dlogits.t(), scaled)
    return nll, dgate, dhidden, sums


def _memory(name: str, like: Tensor) -> Tensor:
    """Return uninitialized memory like `like`, reused on the CPU."""
    if like.device.type == "cpu":
        return scratch(name, like.shape, like)
    return torch.empty_like(like)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to `total`, in its dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(
            total,
            a,
            b,
            out_dtype=total.dtype,
            out=total,
        )
    # the product may overflow before the loss's gradient scales it down
    elif a.dtype == torch.float16:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    else:
        total.add_(torch.mm(a, b, out=scratch("fusion dhead", total.shape, b)))


LISTS = "Tensor[] hidden, Tensor[] heads, int ignore_index"
NEEDS = "bool[] need_hidden, bool[] need_heads, str backend"
define(
    f"fused_nll(Tensor gate, Tensor labels, {LISTS}, bool need_score, str backend) -> (Tensor, "
    "Tensor)"
)
define("fused_nll_backward_gate(Tensor dnll, Tensor score, Tensor gate, str backend) -> Tensor")
define(
    f"fused_nll_backward(Tensor dnll, Tensor gate, Tensor labels, {LISTS}, {NEEDS}) -> (Tensor, "
    "Tensor[], Tensor[])"
)
define(
    f"fused_loss(Tensor gate, Tensor labels, {LISTS}, {NEEDS}) -> (Tensor, Tensor, Tensor[], "
    "Tensor[])"
)
define(
    "fused_loss_backward(Tensor dloss, Tensor gate, Tensor[] hidden, Tensor[] heads, Tensor "
    "dgate, Tensor[] dhidden, Tensor[] dheads, str backend) -> (Tensor, Tensor[], Tensor[])"
)
NLLInputs = inputs_of("fused_nll")
LossInputs = inputs_of("fused_loss")


def check_labels(labels: Tensor, ignore_index: int, V: int) -> None:
    """Raise ValueError for a label outside the common vocabulary; a GPU would synchronize."""
    if labels.device.type == "cpu":
        bad = (labels != ignore_index) & ((labels < 0) | (labels >= V))
        if bad.any():
            raise ValueError(
                f"labels must be below {V}, the size of the smallest vocabulary, but got "
                f"{int(labels[bad][0])} (ignore_index is {ignore_index})"
            )


def _nll(*arguments: Any) -> tuple[Tensor, Tensor]:
    i = NLLInputs(*arguments)
    V = common_vocabulary(i.heads)
    check_labels(i.labels, i.ignore_index, V)
    return kernels_of(i.backend).fused_loss_forward(
        i.gate,
        i.labels,
        i.hidden,
        i.heads,
        V,
        i.ignore_index,
        i.need_score,
    )


def _nll_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    i = NLLInputs(*arguments)
    return i.gate.new_empty(i.gate.shape[0]), i.gate.new_empty(i.gate.shape if i.need_score else 0)


def _only(grads: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


def _nll_setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    i = NLLInputs(*inputs)
    score = output[1]
    ctx.mark_non_differentiable(score)
    ctx.set_materialize_grads(False)
    ctx.S = len(i.hidden)
    ctx.ignore_index = i.ignore_index
    ctx.need_score = i.need_score
    ctx.backend = i.backend
    if i.need_score:
        ctx.save_for_backward(i.gate, score)
    else:
        ctx.save_for_backward(i.gate, i.labels, *i.hidden, *i.heads)


def _nll_autograd(ctx: Any, dnll: Tensor | None, _: Any) -> tuple:
    S = ctx.S
    grads = NLLInputs(hidden=[None] * S, heads=[None] * S)
    if dnll is None:
        return tuple(grads)
    gate, *saved = ctx.saved_tensors
    if ctx.need_score:
        dgate = torch.ops.moe_runtime.fused_nll_backward_gate(dnll, *saved, gate, ctx.backend)
        return tuple(grads._replace(gate=dgate))
    needs = NLLInputs(*ctx.needs_input_grad)
    labels, *tensors = saved
    dgate, dhidden, dheads = torch.ops.moe_runtime.fused_nll_backward(
        dnll,
        gate,
        labels,
        tensors[:S],
        tensors[S:],
        ctx.ignore_index,
        needs.hidden,
        needs.heads,
        ctx.backend,
    )
    dhidden = _only(dhidden, needs.hidden)
    dheads = _only(dheads, needs.heads)
    return tuple(grads._replace(gate=dgate, hidden=dhidden, heads=dheads))


def _nll_backward(dnll: Tensor, *arguments: Any) -> tuple:
    i = LossInputs(*arguments)
    scale = torch.where(i.labels != i.ignore_index, dnll, 0.0)
    _, dgate, dhidden, sums = gradients(scale, *arguments)
    return dgate, dhidden, [total.to(head.dtype) for total, head in zip(sums, i.heads)]


def _nll_backward_fake(dnll: Tensor, *arguments: Any) -> tuple:
    i = LossInputs(*arguments)
    dhidden = _fakes(i.hidden, i.need_hidden)
    return torch.empty_like(i.gate), dhidden, _fakes(i.heads, i.need_heads)


def _fakes(tensors: list[Tensor], needs: list[bool]) -> list[Tensor]:
    return [t.new_empty(t.shape if need else 0) for t, need in zip(tensors, needs, strict=True)]


def _loss(*arguments: Any) -> tuple:
    i = LossInputs(*arguments)
    check_labels(i.labels, i.ignore_index, common_vocabulary(i.heads))
    valid = (i.labels != i.ignore_index).to(i.gate.dtype)
    nll, dgate, dhidden, sums = gradients(valid, *arguments)
    dheads = [total.to(sum_dtype(head.dtype)) for total, head in zip(sums, i.heads)]
    return nll.sum(), dgate, dhidden, dheads


def _loss_fake(gate: Tensor, *arguments: Any) -> tuple:
    dgate, dhidden, dheads = _nll_backward_fake(gate, gate, *arguments)
    return gate.new_empty(()), dgate, dhidden, [grad.to(sum_dtype(grad.dtype)) for grad in dheads]


def _loss_setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    i = LossInputs(*inputs)
    _, dgate, dhidden, dheads = output
    ctx.S = len(i.hidden)
    ctx.need_hidden = i.need_hidden
    ctx.need_heads = i.need_heads
    ctx.backend = i.backend
    ctx.mark_non_differentiable(dgate, *dhidden, *dheads)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        dgate,
        i.gate,
        *dhidden,
        *dheads,
        *i.hidden,
        *i.heads,
    )


def _loss_autograd(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple:
    S = ctx.S
    if dloss is None:
        return tuple(LossInputs(hidden=[None] * S, heads=[None] * S))
    dgate, gate, *lists = ctx.saved_tensors
    dhidden, dheads, hidden, heads = (lists[at : at + S] for at in range(0, 4 * S, S))
    traced = torch.compiler.is_compiling() or in_dispatch_mode()
    if torch.is_grad_enabled() or traced or graph_is_kept():
        dgate, dhidden, dheads = torch.ops.moe_runtime.fused_loss_backward(
            dloss,
            gate,
            hidden,
            heads,
            dgate,
            dhidden,
            dheads,
            ctx.backend,
        )
    else:  # not needed again, so the heads' gradients need not be in memory twice
        for grad in (dgate, *dhidden, *dheads):
            torch.mul(grad, _factor(dloss, grad), out=grad)
        dheads = [grad.to(head.dtype) for grad, head in zip(dheads, heads, strict=True)]
    dhidden = _only(dhidden, ctx.need_hidden)
    dheads = _only(dheads, ctx.need_heads)
    return tuple(LossInputs(gate=dgate, hidden=dhidden, heads=dheads))


def _loss_backward(dloss: Tensor, *arguments: Any) -> tuple:
    gate, hidden, heads, dgate, dhidden, dheads, _ = arguments
    (dgate,) = _scaled(dloss, [dgate], [gate])
    return dgate, _scaled(dloss, dhidden, hidden), _scaled(dloss, dheads, heads)


def _scaled(dloss: Tensor, grads: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Return `dloss` times each gradient, in the dtype of its tensor in `like`."""
    pairs = zip(grads, like, strict=True)
    return [(grad * _factor(dloss, grad)).to(t.dtype) for grad, t in pairs]


def _factor(dloss: Tensor, grad: Tensor) -> Tensor:
    """Return `dloss` [] so that a product is rounded once; a scalar would become narrow first."""
    return dloss.view([1] * grad.dim())


def _loss_backward_fake(dloss: Tensor, *arguments: Any) -> tuple:
    _, hidden, heads, dgate, dhidden, dheads, _ = arguments
    return torch.empty_like(dgate), _like(dhidden, hidden), _like(dheads, heads)


def _like(grads: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    pairs = zip(grads, tensors, strict=True)
    return [grad.new_empty(grad.shape, dtype=t.dtype) for grad, t in pairs]


register(
    "fused_nll",
    _nll,
    _nll_fake,
    _nll_autograd,
    _nll_setup_context,
)
register_backward("fused_nll_backward", _nll_backward, _nll_backward_fake)
register_backward(
    "fused_nll_backward_gate",
    lambda dnll, score, gate, backend: dnll[:, None] * score,
    lambda dnll, score, *_: torch.empty_like(score),
)
register(
    "fused_loss",
    _loss,
    _loss_fake,
    _loss_autograd,
    _loss_setup_context,
)
register_backward("fused_loss_backward", _loss_backward, _loss_backward_fake)
