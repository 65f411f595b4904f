"""Balance losses of a router, computed per layer and returned.

    cv2      cv2(importance) + cv2(load),  cv2(v) = var(v) / (mean(v)^2 + 1e-10)
             Shazeer et al. 2017; XFT, code
    switch   R sum_r f_r P_r,  f_r = share of slots sent to r,
             P_r = mean_t softmax(router_logits)[t, r]                                Switch; UpIT
    top_k    E sum_e F_e P_e,  F_e = mean_t [e is among the top_k of token t] = top_k f_e
             stock models of transformers

importance_r = sum of the softmax probabilities of the tokens that selected r; with topk_softmax, of
their weights, whose softmax runs over the selected. load_r is the number of those tokens or, with
noise, the sum over all tokens of the probability that a new draw of the noise selects r:

    P = Phi((clean - (k+1)-th noisy logit) / scale)   if r is among the selected
    P = Phi((clean - k-th noisy logit) / scale)       otherwise

The official code decides "is among the selected" by comparing the noise (not the noisy logit) with
the (k+1)-th noisy logit: `load_quirk=True`. cv2 and switch do not mask padding, as in the official
code.

Losses are float32, those of float64 logits float64.

The top_k loss equals top_k when balanced. transformers averages over the tokens of all layers
together (pooled), so imbalances of different layers cancel: four layers that have each collapsed to
another pair of 8 experts give 2, like balanced ones. The mean of the losses of the layers
(per_layer) gives 8.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.config import MoEConfig
from moe_runtime.ops.library import Tensors, wide_dtype


def cv2(v: Tensor) -> Tensor:
    """Compute the squared coefficient of variation of `v` [R], unbiased; 0 for R = 1."""
    v = v.to(wide_dtype(v.dtype))
    if v.numel() < 2:
        return v.new_zeros(())
    return v.var() / (v.mean().square() + 1e-10)


def selection_mask(config: MoEConfig, topk_idx: Tensor) -> Tensor:
    """Return which routed experts each token selected, [T, R] bool, from `topk_idx` [T, K]."""
    mask = torch.zeros(
        topk_idx.shape[0], config.num_experts, dtype=torch.bool, device=topk_idx.device
    )
    mask.scatter_(1, topk_idx.long(), True)
    return mask[:, int(config.has_shared_expert) :]


def noisy_load(
    router_logits: Tensor,
    noise: Tensor,
    scale: Tensor,
    k: int,
    quirk: bool,
) -> Tensor:
    """Compute the smooth load [R] of k of R experts; differentiable.

    Clean logits, noise and its scale are [T, R].
    """
    noisy = router_logits + noise
    top = noisy.topk(k + 1, -1).values
    threshold_in = top[:, k : k + 1]
    threshold_out = top[:, k - 1 : k]
    is_in = (noise if quirk else noisy) > threshold_in
    z = (router_logits - torch.where(is_in, threshold_in, threshold_out)) / scale
    return torch.special.ndtr(z).sum(0)


def cv2_loss(
    config: MoEConfig,
    router_logits: Tensor,
    topk_idx: Tensor,
    noise: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Compute cv2(importance) + cv2(load) of one layer, [], without its coefficient."""
    noisy = router_logits if noise is None else router_logits + noise
    mask = selection_mask(config, topk_idx)
    scores = noisy.to(wide_dtype(noisy.dtype))
    if config.gate == "topk_softmax":
        scores = scores.masked_fill(~mask, float("-inf"))
    importance = (scores.softmax(-1) * mask).sum(0)
    k = config.num_routed_per_token
    if noise is not None and scale is not None and k < config.num_routed_experts:
        load = noisy_load(
            router_logits,
            noise,
            scale,
            k,
            config.load_quirk,
        )
    else:
        load = mask.sum(0, dtype=scores.dtype)
    return cv2(importance) + cv2(load)


def switch_loss(config: MoEConfig, router_logits: Tensor, topk_idx: Tensor) -> Tensor:
    """Compute R sum_r f_r P_r of one layer, [], 1 when balanced; f has no gradient."""
    mask = selection_mask(config, topk_idx)
    router_logits = router_logits.to(wide_dtype(router_logits.dtype))
    slots = max(mask.shape[0] * config.num_routed_per_token, 1)
    f = mask.sum(0, dtype=router_logits.dtype) / slots
    P = router_logits.softmax(-1).mean(0)
    return config.num_routed_experts * (f * P).sum()


def balance_loss(
    config: MoEConfig,
    router_logits: Tensor,
    topk_idx: Tensor,
    noise: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor | None:
    """Return the layer's loss times its coefficient, []; None without a loss or tokens."""
    if config.balance_loss == "none" or 0 in router_logits.shape:
        return None
    if config.balance_loss == "switch":
        loss = switch_loss(config, router_logits, topk_idx)
    else:
        loss = cv2_loss(
            config,
            router_logits,
            topk_idx,
            noise,
            scale,
        )
    return config.balance_loss_coef * loss


def top_k_loss(router_logits: Tensor, top_k: int, token_mask: Tensor | None = None) -> Tensor:
    """Compute E sum_e F_e P_e of `router_logits` [T, E], [].

    Tokens with `token_mask` [T] 0 are excluded from both means. Differentiable through P; 0 without
    tokens.
    """
    return _top_k_loss(*_top_k_sums(router_logits, top_k, token_mask))


def pooled_loss(
    router_logits: Sequence[Tensor], top_k: int, token_mask: Tensor | None = None
) -> Tensor:
    """Compute `top_k_loss` over all layers' tokens together: L of [T, E], mask [T] -> []."""
    layers = [_top_k_sums(logits, top_k, token_mask) for logits in router_logits]
    choices, probability, tokens = layers[0]
    for layer in layers[1:]:
        choices = choices + layer[0].to(choices.device)
        probability = probability + layer[1].to(choices.device)
        tokens = tokens + layer[2].to(choices.device)
    return _top_k_loss(choices, probability, tokens)


def per_layer_loss(
    router_logits: Sequence[Tensor], top_k: int, token_mask: Tensor | None = None
) -> Tensor:
    """Compute the mean of the layers' `top_k_loss`: L of [T, E], mask [T] -> []."""
    losses = [top_k_loss(logits, top_k, token_mask) for logits in router_logits]
    return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


def _top_k_sums(router_logits: Tensor, top_k: int, token_mask: Tensor | None) -> Tensors:
    """Return the sums over tokens of selections [E], probabilities [E] and ones []."""
    probability = router_logits.to(wide_dtype(router_logits.dtype)).softmax(-1)
    chosen = torch.zeros_like(probability).scatter_(1, probability.topk(top_k, -1).indices, 1.0)
    if token_mask is None:
        weight = probability.new_ones(len(probability))
    else:
        weight = token_mask.to(probability)
    # not weight @ chosen, which autocast would compute in low precision
    return (weight[:, None] * chosen).sum(0), (weight[:, None] * probability).sum(0), weight.sum()


def _top_k_loss(choices: Tensor, probability: Tensor, tokens: Tensor) -> Tensor:
    tokens = tokens.clamp(min=1)
    return len(choices) * ((choices / tokens) * (probability / tokens)).sum()
