"""Gradients of the cross-entropy of mixed logits, chunk by chunk of tokens. The equations: `moe_runtime.ops.fusion`.

Plain products are the library's, whichever backend mixes the logits and turns them into their gradient.
"""

from collections.abc import Iterator, Sequence

import torch

from moe_runtime.ops import fusion_torch
from moe_runtime.ops.workspace import scratch

CHUNK = 1 << 24  # logits that are in memory together on the CPU; on a GPU, whose products want more rows, 8 times that


def common_vocabulary(heads: Sequence[torch.Tensor]) -> int:
    """Return how many ids all `heads` [V_s, H_s] have."""
    return min(head.shape[0] for head in heads)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gates, logits and losses: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def kept(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a sum over tokens that the loss's own gradient, 1 / tokens or so, has not scaled yet."""
    return torch.float32 if dtype == torch.float16 else dtype


def kernels_of(backend: str):
    """Return the module whose functions mix logits: the Triton kernels', else torch's."""
    if backend != "triton":
        return fusion_torch
    from moe_runtime.kernels import fusion

    return fusion


def gradients(gate, labels, scale, hidden, heads, ignore_index, need_hidden, need_heads, backend):
    """Return the loss of each token [T] and the gradients of sum(scale * loss): gate's, hidden's, heads'.

    Empty where not needed. Those of heads are float32 where a narrow sum would be rounded more than once.
    """
    kernels, V, T = kernels_of(backend), common_vocabulary(heads), len(labels)
    gate, hidden, heads = gate.contiguous(), [h.contiguous() for h in hidden], [head.contiguous() for head in heads]
    nll, dgate = gate.new_empty(T), torch.empty_like(gate)
    dhidden = [torch.empty_like(h) if need else h.new_empty(0) for h, need in zip(hidden, need_hidden, strict=True)]
    chunks = list(_chunks(T, V, gate.device))
    sums = [
        head.new_zeros(head.shape, dtype=wide(head.dtype) if len(chunks) > 1 else kept(head.dtype))
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


def _chunks(T: int, V: int, device: torch.device) -> Iterator[slice]:
    """Return slices of tokens, as many each, whose mixed logits are in memory together."""
    most = max((CHUNK if device.type == "cpu" else 8 * CHUNK) // V, 1)
    step = -(-T // max(-(-T // most), 1))
    return (slice(start, min(start + step, T)) for start in range(0, T, max(step, 1)))


def _memory(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return uninitialized memory like `like`: on the CPU the same as before."""
    return scratch(name, like.shape, like) if like.device.type == "cpu" else torch.empty_like(like)


def _add_product(total, a, b) -> None:
    """Add a b to `total`, in its dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.dtype == torch.float16:  # whose product may overflow before the loss's gradient makes it small
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    else:
        total.add_(torch.mm(a, b, out=scratch("fusion dhead", total.shape, b)))
