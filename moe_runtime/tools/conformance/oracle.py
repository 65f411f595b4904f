"""The equations of the ops, one expert at a time, in float64.

Nothing here imports an op: it is a second statement of each equation. Inputs are those of the
checked op after rounding to its dtype, so that an error is the op's own. Gradients come from
autograd.
"""

import math

import numpy as np
import torch
from torch import Tensor

GATES = ("xft", "nonorm", "topk_softmax", "softmax_topk", "softmax_topk_renorm", "sigmoid_topk")
IGNORED = -100  # the label of a token without loss

ACT = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: torch.where(x > 0, x, 0 * x),
    "relu2": lambda x: torch.where(
        x > 0,
        x * x,
        0 * x,
    ),
}


def shared(gate: str) -> int:
    """Return how many experts a gate shares among all tokens: one, or none."""
    return int(gate in ("xft", "nonorm"))


def cut(v: Tensor, low: float, high: float) -> Tensor:
    """Limit v to low..high; the gradient is 1 there, ends included, and 0 outside."""
    return torch.where(
        v > high,
        high,
        torch.where(v < low, low, v),
    )


def gated_product(z: Tensor, act, limit=None, up_offset=0.0, interleaved=False) -> Tensor:
    """Return act(min(gate, limit)) * (clamp(up) + up_offset) of the columns of z [..., 2I]."""
    gate, up = z.chunk(2, -1)
    if interleaved:
        gate = z[..., 0::2]
        up = z[..., 1::2]
    if limit is not None:
        gate = cut(gate, -math.inf, limit)
        up = cut(up, -limit, limit)
    return act(gate) * (up + up_offset)


def mlp(x: Tensor, up, down, up_bias, down_bias, act="silu", gated=True, **form) -> Tensor:
    """Return an expert's output on every token: x [T, H], up [2I or I, H], down [H, I]."""
    z = x @ up.t() + up_bias
    if gated:
        h = gated_product(z, ACT[act], **form)
    else:
        h = ACT[act](z)
    return h @ down.t() + down_bias


def moe(
    x: Tensor, topk_weight: Tensor, topk_idx: Tensor, up, down, up_bias=None, down_bias=None, **form
) -> Tensor:
    """Return out[t] = sum_e (sum of topk_weight[t, k] where topk_idx[t, k] = e) FFN_e(x[t])."""
    E = len(up)
    if up_bias is None:
        up_bias = [0] * E
    if down_bias is None:
        down_bias = [0] * E
    out = 0 * x
    for e in range(E):
        weight = torch.where(
            topk_idx == e,
            topk_weight,
            0 * topk_weight,
        ).sum(1, keepdim=True)
        out = out + weight * mlp(
            x,
            up[e],
            down[e],
            up_bias[e],
            down_bias[e],
            **form,
        )
    return out


def gate_weights(logits: Tensor, ids: Tensor, gate: str) -> Tensor:
    """Return the weights [T, K] of the experts `ids` from Eq. (1), (2) of XFT and other gates."""
    first = shared(gate)
    picked = ids.long()[:, : ids.shape[1] - first] - first
    if gate == "sigmoid_topk":
        return 1 / (1 + (-logits.gather(1, picked)).exp())
    p = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    p = p / p.sum(-1, keepdim=True)
    s = p.gather(1, picked)
    weight = s
    if gate == "xft":
        weight = s.exp() / s.exp().sum(-1, keepdim=True) * s[:, :1]
    elif gate in ("topk_softmax", "softmax_topk_renorm"):
        weight = s / s.sum(-1, keepdim=True)
    if not first:
        return weight
    return torch.cat([weight, 1 - s[:, :1]], 1)


def best_experts(scores: Tensor, top_k: int, gate: str) -> Tensor:
    """Return ids [T, K] by descending score, ties to the lower id, a shared expert last."""
    first = shared(gate)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, : top_k - first] + first
    return torch.cat([order, order.new_zeros(len(order), first)], 1).int()


def dispatch(ids: Tensor, E: int) -> dict[str, Tensor]:
    """Return the four index arrays of `dispatch`."""
    K = ids.shape[1]
    expert = [e if 0 <= e < E else E for e in ids.reshape(-1).tolist()]
    row_slot = sorted(range(len(expert)), key=lambda slot: (expert[slot], slot))
    arrays = {
        "expert_offsets": [sum(e < bound for e in expert) for bound in range(E + 1)],
        "row_token": [slot // K for slot in row_slot],
        "row_slot": row_slot,
        "slot_row": sorted(range(len(expert)), key=lambda slot: row_slot[slot]),
    }
    return {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in arrays.items()}


def mixing(logits: Tensor, shared_rate: float | None) -> Tensor:
    """Return alpha of XFT's Eq. (5): [lambda, (1 - lambda) softmax(logits)]; None: a soup."""
    if not len(logits):
        return logits.new_ones(1)
    exp = (logits - logits.detach().max()).exp()
    soft = exp / exp.sum()
    if shared_rate is None:
        return soft
    return torch.cat([logits.new_full((1,), shared_rate), (1 - shared_rate) * soft])


def averaged(weight: Tensor, share: float) -> Tensor:
    """Return EWA's step: each of `weight` [E, ...] moved by `share` to the mean of the others."""
    E = len(weight)
    if E == 1:
        return weight
    others = (weight.sum(0) - weight) / (E - 1)
    return (1 - share) * weight + share * others


def dare_masks(seed: int, tensor: int, P: int, drop: float) -> tuple[Tensor, Tensor]:
    """Return which of P numbers DARE does not drop of the first and of the second parent, [P]."""
    key = np.array([seed, tensor], np.uint64)
    bits = np.random.Philox(key=key).random_raw(-(-P // 4) * 4)[:P]
    bound = round(drop * 2**32)
    first = (bits & 0xFFFFFFFF) >= bound
    second = (bits >> np.uint64(32)) >= bound
    return torch.from_numpy(first), torch.from_numpy(second)


def fused_logits(hidden: list, heads: list, gate: Tensor) -> Tensor:
    """Return UltraFuser's sum_s w_s h_s W_s^T over the ids that all specialists have, [T, V]."""
    V = min(len(head) for head in heads)
    logits = 0
    for s, (states, head) in enumerate(zip(hidden, heads, strict=True)):
        logits = logits + gate[:, s : s + 1] * (states @ head[:V].t())
    return logits


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return -log softmax of the labels, [T] or reduced; IGNORED labels have none."""
    shifted = logits - logits.detach().amax(1, keepdim=True)
    nll = shifted.exp().sum(1).log() - shifted.gather(1, labels.clamp_min(0)[:, None])[:, 0]
    nll = torch.where(labels == IGNORED, 0.0, nll)
    if reduction == "none":
        return nll
    if reduction == "sum":
        return nll.sum()
    return nll.sum() / (labels != IGNORED).sum()


def choices(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the experts, and 1 for each that a token chooses, [T, E]."""
    p = logits.softmax(-1)
    return p, torch.zeros_like(p).scatter(
        1,
        logits.topk(top_k).indices,
        1.0,
    )


def switch_loss(logits: Tensor, top_k: int) -> Tensor:
    """Return E sum_e F_e P_e: the share of tokens that chose expert e, and its mean probability."""
    p, chosen = choices(logits, top_k)
    return logits.shape[1] * (chosen.mean(0) * p.mean(0)).sum()


def cv2_loss(logits: Tensor, top_k: int, is_renormalized: bool) -> Tensor:
    """Return the squared coefficients of variation of importance and load (Shazeer et al. 2017)."""
    p, chosen = choices(logits, top_k)
    used = p * chosen
    if is_renormalized:
        used = used / used.sum(1, keepdim=True)
    total = 0
    for numbers in (used.sum(0), chosen.sum(0)):
        total = total + numbers.var() / numbers.mean() ** 2
    return total
