"""Mix the logits of several language models per token, and compute the mixture's cross-entropy
without materializing it.

UltraFuser, Eq. (1):  o = sum_s w_s o_s,  o_s = h_s W_s^T;  w is the softmax of the gate's scores (`modules.fuser`)
UltraFuser, Eq. (2):  L = sum_t CE(o_t, y_t)

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


def kept(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a sum over tokens before it is scaled by the loss's gradient, about 1 /
    tokens.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def kernels_of(backend: str) -> Tensor:
    """Return the module with the functions that mix logits: the Triton kernels, else torch."""
    if backend != "triton":
        return fusion_torch
    from moe_runtime.kernels import fusion

    return fusion


def fuse_logits(hidden: Sequence[Tensor], heads: Sequence[Tensor], gate_weight: Tensor) -> Tensor:
    """Compute Eq. (1): `hidden` S of [..., H_s], `heads` S of [V_s, H_s], `gate_weight` [..., S] ->
    [..., V] float32.

    For generation, with few positions: each specialist's logits are materialized, first on its
    device, then on gate_weight's. Differentiable.
    """
    _check(hidden, heads, gate_weight)
    V = common_vocabulary(heads)
    pairs = zip(hidden, heads, strict=True)
    return mix(
        (F.linear(h, head if len(head) == V else head[:V]) for h, head in pairs), gate_weight
    )


def mix(parts: Iterable[Tensor], gate_weight: Tensor) -> Tensor:
    """Compute Eq. (1) from logits: `parts` S of [..., V_s], consumed one by one, `gate_weight`
    [..., S] -> [..., V] >= float32.

    The result has the common ids, on gate_weight's device. Differentiable.
    """
    fused = None
    for s, logits in enumerate(parts):
        logits = logits.to(gate_weight.device, wide_dtype(logits.dtype))
        V = logits.shape[-1] if fused is None else min(fused.shape[-1], logits.shape[-1])
        part = gate_weight[..., s : s + 1] * _first(logits, V)
        fused = part if fused is None else _first(fused, V) + part
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
    """Compute F.cross_entropy of `fuse_logits` and `labels` [...]: a scalar, or [...] if reduction
    is "none"; float32.

    Differentiable in hidden, heads and gate_weight; supports autocast as F.linear does. Raises
    ValueError for mismatched shapes, dtypes and devices, and on the CPU for labels outside the
    common vocabulary, which make the loss NaN on a GPU.
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
    needs = [[grad and t.requires_grad for t in tensors] for tensors in (hidden, heads)]
    if reduction != "none" and any(needs[0] + needs[1]):
        total = torch.ops.moe_runtime.fused_loss(
            gate, labels, hidden, heads, ignore_index, *needs, chosen
        )[0]
    else:
        need_score = grad and gate.requires_grad and not any(needs[0] + needs[1])
        nll, _ = torch.ops.moe_runtime.fused_nll(
            gate, labels, hidden, heads, ignore_index, need_score, chosen
        )
        if reduction == "none":
            return nll.view(shape)
        total = nll.sum()
    return total if reduction == "sum" else mean_of(total, labels, ignore_index)


def mean_of(total: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Return `total` [] divided by the number of `labels` [...] not ignored; NaN with zero
    gradients if none, as in torch.
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
    shape = hidden[0].shape[:-1] if len(hidden) else ()
    want = (
        f"Expected hidden [..., H_s], heads [V_s, H_s] and gate_weight [..., {len(hidden)}] of the "
        "same positions"
    )
    if not 0 < len(hidden) == len(heads) or gate_weight.shape != (*shape, len(hidden)):
        got = f"there are {len(hidden)} hidden states [{tuple(shape)}, H_s] and {len(heads)} heads"
        raise ValueError(f"{want}, but gate_weight is {tuple(gate_weight.shape)} and {got}")
    for s, (h, head) in enumerate(zip(hidden, heads, strict=True)):
        fits = h.dim() > 0 and head.dim() == 2 and len(head) and h.shape[-1] == head.shape[1]
        if not fits or h.shape[:-1] != shape:
            raise ValueError(
                f"{want}, but hidden[{s}] is {tuple(h.shape)} and heads[{s}] is {tuple(head.shape)}"
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
        dtypes, devices = (", ".join(sorted(map(str, found))) for found in (dtypes, devices))
        got = f"hidden and heads are {dtypes}, with gate_weight and labels on {devices}"
        raise ValueError(
            f"Expected one floating dtype and one device, but {got}. Cast the specialists or move "
            "the heads"
        )


def gradients(
    gate: Tensor,
    labels: Tensor,
    scale: Tensor | None,
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    ignore_index: int,
    need_hidden: list[bool],
    need_heads: list[bool],
    backend: str,
) -> tuple:
    """Return the loss of each token [T] and the gradients of sum(scale * loss): gate's, hidden's,
    heads'.

    They are empty if not needed. Those of heads are float32 if a sum in a narrow dtype would be
    rounded more than once.
    """
    kernels = kernels_of(backend)
    V = common_vocabulary(heads)
    T = len(labels)
    gate = gate.contiguous()
    hidden = [h.contiguous() for h in hidden]
    heads = [head.contiguous() for head in heads]
    nll = gate.new_empty(T)
    dgate = torch.empty_like(gate)
    dhidden = [
        torch.empty_like(h) if need else h.new_empty(0)
        for h, need in zip(hidden, need_hidden, strict=True)
    ]
    # slices of equally many tokens whose mixed logits are in memory together
    most = max((CHUNK if gate.device.type == "cpu" else 8 * CHUNK) // V, 1)
    step = max(-(-T // max(-(-T // most), 1)), 1)
    chunks = [slice(start, min(start + step, T)) for start in range(0, T, step)]
    sums = [
        head.new_zeros(
            head.shape, dtype=wide_dtype(head.dtype) if len(chunks) > 1 else kept(head.dtype)
        )
        if need
        else head.new_empty(0)
        for head, need in zip(heads, need_heads, strict=True)
    ]
    for rows in chunks:
        states = [h[rows] for h in hidden]
        nll[rows], dlogits = kernels.fused_logits_backward(
            gate[rows], labels[rows], scale[rows], states, heads, V, ignore_index
        )
        for s, (h, head) in enumerate(zip(states, heads, strict=True)):
            dx = torch.mm(dlogits, head[:V], out=_memory("fusion dx", h))
            scaled = _memory("fusion scaled", h) if need_heads[s] else None
            out = dhidden[s][rows] if need_hidden[s] else None
            kernels.fused_hidden_backward(dx, h, gate[rows, s], dgate[rows, s], out, scaled)
            if need_heads[s]:
                _add_product(sums[s][:V], dlogits.t(), scaled)
    return nll, dgate, dhidden, sums


def _memory(name: str, like: Tensor) -> Tensor:
    """Return uninitialized memory like `like`, reused on the CPU."""
    return scratch(name, like.shape, like) if like.device.type == "cpu" else torch.empty_like(like)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to `total`, in its dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
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
    """Raise ValueError for a label outside the common vocabulary; on the CPU only, as it would
    synchronize a GPU.
    """
    if labels.device.type == "cpu":
        bad = (labels != ignore_index) & ((labels < 0) | (labels >= V))
        if bad.any():
            got = f"got {int(labels[bad][0])} (ignore_index is {ignore_index})"
            raise ValueError(
                f"labels must be below {V}, the size of the smallest vocabulary, but {got}"
            )


def _nll(
    gate: Tensor,
    labels: Tensor,
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    ignore_index: int,
    need_score: bool,
    backend: str,
) -> Tensor:
    V = common_vocabulary(heads)
    check_labels(labels, ignore_index, V)
    return kernels_of(backend).fused_loss_forward(
        gate, labels, hidden, heads, V, ignore_index, need_score
    )


def _nll_fake(
    gate: Tensor,
    labels: Tensor,
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    ignore_index: int,
    need_score: bool,
    backend: str,
) -> tuple:
    return gate.new_empty(gate.shape[0]), gate.new_empty(gate.shape if need_score else 0)


def _only(grads: Tensor, needs: list[bool]) -> list:
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
    ctx.save_for_backward(i.gate, *(score,) if i.need_score else (i.labels, *i.hidden, *i.heads))


def _nll_autograd(ctx: Any, dnll: Tensor, _: Any) -> Tensor:
    S, (gate, *saved) = ctx.S, ctx.saved_tensors
    grads = NLLInputs(hidden=[None] * S, heads=[None] * S)
    if dnll is not None and ctx.need_score:
        dgate = torch.ops.moe_runtime.fused_nll_backward_gate(dnll, *saved, gate, ctx.backend)
        grads = grads._replace(gate=dgate)
    elif dnll is not None:
        needs, (labels, *tensors) = NLLInputs(*ctx.needs_input_grad), saved
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
        grads = NLLInputs(
            gate=dgate, hidden=_only(dhidden, needs.hidden), heads=_only(dheads, needs.heads)
        )
    return tuple(grads)


def _nll_backward(
    dnll: Tensor,
    gate: Tensor,
    labels: Tensor,
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    ignore_index: int,
    need_hidden: list[bool],
    need_heads: list[bool],
    backend: str,
) -> tuple:
    scale = torch.where(labels != ignore_index, dnll, 0.0)
    _, *grads, sums = gradients(
        gate, labels, scale, hidden, heads, ignore_index, need_hidden, need_heads, backend
    )
    return *grads, [total.to(head.dtype) for total, head in zip(sums, heads, strict=True)]


def _gradients_fake(
    dnll: Tensor,
    gate: Tensor,
    labels: Tensor,
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    ignore_index: int,
    need_hidden: list[bool],
    need_heads: list[bool],
    backend: str,
) -> tuple:
    pairs = zip((hidden, heads), (need_hidden, need_heads), strict=True)
    return torch.empty_like(gate), *(
        [
            torch.empty_like(t, memory_format=torch.contiguous_format) if need else t.new_empty(0)
            for t, need in zip(*p)
        ]
        for p in pairs
    )


def _loss(
    gate: Tensor,
    labels: Tensor,
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    ignore_index: int,
    need_hidden: list[bool],
    need_heads: list[bool],
    backend: str,
) -> tuple:
    check_labels(labels, ignore_index, common_vocabulary(heads))
    valid = (labels != ignore_index).to(gate.dtype)
    nll, *grads, sums = gradients(
        gate, labels, valid, hidden, heads, ignore_index, need_hidden, need_heads, backend
    )
    return (
        nll.sum(),
        *grads,
        [total.to(kept(head.dtype)) for total, head in zip(sums, heads, strict=True)],
    )


def _loss_fake(
    gate: Tensor,
    labels: Tensor,
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    ignore_index: int,
    need_hidden: list[bool],
    need_heads: list[bool],
    backend: str,
) -> tuple:
    *grads, dheads = _gradients_fake(
        None, gate, labels, hidden, heads, ignore_index, need_hidden, need_heads, backend
    )
    return gate.new_empty(()), *grads, [grad.to(kept(grad.dtype)) for grad in dheads]


def _loss_setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    i, (_, dgate, dhidden, dheads) = LossInputs(*inputs), output
    ctx.S = len(i.hidden)
    ctx.need_hidden = i.need_hidden
    ctx.need_heads = i.need_heads
    ctx.backend = i.backend
    ctx.mark_non_differentiable(dgate, *dhidden, *dheads)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dgate, i.gate, *dhidden, *dheads, *i.hidden, *i.heads)


def _loss_autograd(ctx: Any, dloss: Tensor, *_: Any) -> Tensor:
    S = ctx.S
    if dloss is None:
        return tuple(LossInputs(hidden=[None] * S, heads=[None] * S))
    dgate, gate, *lists = ctx.saved_tensors
    dhidden, dheads, hidden, heads = (lists[at : at + S] for at in range(0, 4 * S, S))
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or in_dispatch_mode()
        or graph_is_kept()
    ):
        dgate, dhidden, dheads = torch.ops.moe_runtime.fused_loss_backward(
            dloss, gate, hidden, heads, dgate, dhidden, dheads, ctx.backend
        )
    else:  # not needed again, so the heads' gradients need not be in memory twice
        dgate, *dhidden = (_scale_in_place(grad, dloss) for grad in (dgate, *dhidden))
        dheads = [
            _scale_in_place(grad, dloss).to(head.dtype)
            for grad, head in zip(dheads, heads, strict=True)
        ]
    dhidden = _only(dhidden, ctx.need_hidden)
    dheads = _only(dheads, ctx.need_heads)
    return tuple(LossInputs(gate=dgate, hidden=dhidden, heads=dheads))


def _scale_in_place(grad: Tensor, dloss: Tensor) -> Tensor:
    return torch.mul(grad, _factor(dloss, grad), out=grad)


def _loss_backward(
    dloss: Tensor,
    gate: Tensor,
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    dgate: Tensor,
    dhidden: Sequence[Tensor],
    dheads: Sequence[Tensor],
    backend: str,
) -> tuple:
    pairs = [([dgate], [gate]), (dhidden, hidden), (dheads, heads)]
    (dgate,), *rest = (
        [(grad * _factor(dloss, grad)).to(t.dtype) for grad, t in zip(*pair, strict=True)]
        for pair in pairs
    )
    return dgate, *rest


def _factor(dloss: Tensor, grad: Tensor) -> Tensor:
    """Return `dloss` [] so that a product is rounded once; torch would convert a scalar to `grad`'s
    narrow dtype.
    """
    return dloss.view([1] * grad.dim())


def _loss_backward_fake(
    dloss: Tensor,
    gate: Tensor,
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    dgate: Tensor,
    dhidden: Sequence[Tensor],
    dheads: Sequence[Tensor],
    backend: str,
) -> tuple:
    return torch.empty_like(dgate), *(
        [grad.new_empty(grad.shape, dtype=t.dtype) for grad, t in zip(*pair, strict=True)]
        for pair in ((dhidden, hidden), (dheads, heads))
    )


register("fused_nll", _nll, _nll_fake, _nll_autograd, _nll_setup_context)
register_backward("fused_nll_backward", _nll_backward, _gradients_fake)
register_backward(
    "fused_nll_backward_gate",
    lambda dnll, score, gate, backend: dnll[:, None] * score,
    lambda dnll, score, *_: torch.empty_like(score),
)
register("fused_loss", _loss, _loss_fake, _loss_autograd, _loss_setup_context)
register_backward("fused_loss_backward", _loss_backward, _loss_backward_fake)
