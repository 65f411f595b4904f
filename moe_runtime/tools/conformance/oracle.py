"""The equations of the ops, one expert at a time, in float64.

Nothing here imports an op: it is a second statement of each equation. Inputs are those of the
checked op after rounding to its dtype, so that an error is the op's own. Gradients come from
autograd.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHARED = ("xft", "nonorm")  # gates with a shared expert
GATES = (*SHARED, "topk_softmax", "softmax_topk", "softmax_topk_renorm", "sigmoid_topk")
IGNORED = -100  # the label of a token without loss

ACT = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: torch.where(x > 0, x, 0 * x),
    "relu2": lambda x: torch.where(x > 0, x * x, 0 * x),
}


def gate_and_up(z: torch.Tensor, interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns of gate and of up of z [..., 2I]."""
    I = z.shape[-1] // 2
    if interleaved:
        return z[..., 0::2], z[..., 1::2]
    return z[..., :I], z[..., I:]


def cut(v: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Limit v to low..high; the gradient is 1 there, ends included, and 0 outside."""
    return torch.where(v > high, high, torch.where(v < low, low, v))


def gated_product(
    z: torch.Tensor,
    act: Callable[[Tensor], Tensor],
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Return act(min(gate, limit)) * (clamp(up) + up_offset)."""
    gate, up = gate_and_up(z, interleaved)
    if limit is not None:
        gate = cut(gate, -math.inf, limit)
        up = cut(up, -limit, limit)
    return act(gate) * (up + up_offset)


def mlp(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    act: str = "silu",
    gated: bool = True,
    **form: Any,
) -> Tensor:
    """Return an expert's output on every token: x [T, H], up [2I or I, H], down [H, I]."""
    z = x @ up.t()
    if up_bias is not None:
        z = z + up_bias
    h = gated_product(z, ACT[act], **form) if gated else ACT[act](z)
    y = h @ down.t()
    return y if down_bias is None else y + down_bias


def moe(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    topk_weight: Tensor,
    topk_idx: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    **form: Any,
) -> torch.Tensor:
    """Return out[t] = sum_e (sum of topk_weight[t, k] where topk_idx[t, k] = e) FFN_e(x[t])."""
    out = 0 * x
    for e in range(up.shape[0]):
        weight = torch.where(topk_idx == e, topk_weight, 0 * topk_weight).sum(1, keepdim=True)
        both = [None if bias is None else bias[e] for bias in (up_bias, down_bias)]
        out = out + weight * mlp(x, up[e], down[e], *both, **form)
    return out


def gate_weights(logits: torch.Tensor, ids: torch.Tensor, gate: str) -> torch.Tensor:
    """Return the weights [T, K] of the experts `ids` from Eq. (1), (2) of XFT and other gates."""
    shared = int(gate in SHARED)
    picked = ids.long()[:, : ids.shape[1] - shared] - shared
    p = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    p = p / p.sum(-1, keepdim=True)
    s = p.gather(1, picked)
    weight = s
    if gate == "xft":
        weight = s.exp() / s.exp().sum(-1, keepdim=True) * s[:, :1]
    elif gate in ("topk_softmax", "softmax_topk_renorm"):
        weight = s / s.sum(-1, keepdim=True)
    elif gate == "sigmoid_topk":
        weight = 1 / (1 + (-logits.gather(1, picked)).exp())
    if not shared:
        return weight
    return torch.cat([weight, 1 - s[:, :1]], 1)


def best_experts(scores: torch.Tensor, top_k: int, gate: str) -> torch.Tensor:
    """Return ids [T, K] by descending score, ties to the lower id, a shared expert last."""
    shared = int(gate in SHARED)
    ids = []
    for row in scores.tolist():
        order = sorted(range(len(row)), key=lambda r: (-row[r], r))[: top_k - shared]
        ids.append([r + shared for r in order] + [0] * shared)
    return torch.tensor(ids, dtype=torch.int32).view(len(ids), top_k)


def dispatch(ids: torch.Tensor, E: int) -> dict[str, torch.Tensor]:
    """Return the four index arrays of `dispatch`."""
    K = ids.shape[1]
    expert = [e if 0 <= e < E else E for e in ids.reshape(-1).tolist()]
    row_slot = sorted(range(len(expert)), key=lambda slot: (expert[slot], slot))
    slot_row = sorted(range(len(expert)), key=lambda slot: row_slot[slot])
    indices = {
        "expert_offsets": [sum(e < bound for e in expert) for bound in range(E + 1)],
        "row_token": [slot // max(K, 1) for slot in row_slot],
        "row_slot": row_slot,
        "slot_row": slot_row,
    }
    return {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in indices.items()}


def mixing(logits: torch.Tensor, shared_rate: float | None) -> torch.Tensor:
    """Return alpha of XFT's Eq. (5): [lambda, (1 - lambda) softmax(logits)]; None: a soup."""
    exp = (logits - logits.detach().max()).exp() if len(logits) else logits
    soft = exp / exp.sum()
    if shared_rate is None:
        return soft
    if not len(logits):
        return logits.new_ones(1)
    return torch.cat([logits.new_full((1,), shared_rate), (1 - shared_rate) * soft])


def averaged(weight: torch.Tensor, share: float) -> torch.Tensor:
    """Return EWA's step: each of `weight` [E, ...] moved by `share` to the mean of the others."""
    E = len(weight)
    if E == 1:
        return weight
    rows = []
    for e in range(E):
        others = sum(weight[other] for other in range(E) if other != e) / (E - 1)
        rows.append((1 - share) * weight[e] + share * others)
    return torch.stack(rows)


def kept_by_dare(seed: int, tensor: int, P: int, drop: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of P numbers DARE keeps of the first and of the second parent, [P] bool."""
    key = np.array([seed, tensor], np.uint64)
    bits = np.random.Philox(key=key).random_raw(-(-P // 4) * 4)[:P]
    bound = round(drop * 2**32)
    first = (bits & 0xFFFFFFFF).astype(np.int64) >= bound
    second = (bits >> np.uint64(32)).astype(np.int64) >= bound
    return torch.from_numpy(first), torch.from_numpy(second)


def fused_logits(hidden: list, heads: list, gate: torch.Tensor) -> torch.Tensor:
    """Return UltraFuser's sum_s w_s h_s W_s^T over the ids that all specialists have, [T, V]."""
    V = min(len(head) for head in heads)
    logits = 0
    for s, (states, head) in enumerate(zip(hidden, heads, strict=True)):
        logits = logits + gate[:, s : s + 1] * (states @ head[:V].t())
    return logits


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return -log softmax of the labels, [T] or reduced; IGNORED labels have none."""
    shifted = logits - logits.detach().amax(1, keepdim=True)
    nll = shifted.exp().sum(1).log() - shifted.gather(1, labels.clamp_min(0)[:, None])[:, 0]
    nll = torch.where(labels == IGNORED, 0.0, nll)
    if reduction == "none":
        return nll
    if reduction == "sum":
        return nll.sum()
    return nll.sum() / (labels != IGNORED).sum()
