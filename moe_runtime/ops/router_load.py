"""How evenly a router spreads the tokens' slots over its experts, from the slots that each got.

load           count_e / sum_e count_e                      share of the slots
max violation  max_e count_e / mean_e count_e               1 when balanced
entropy        -sum_e load_e log(load_e) / log(E)           1 when balanced, 0 when one expert takes all
"""

import math

import torch


def expert_load(counts: torch.Tensor) -> torch.Tensor:
    """Share of the slots per expert, `counts` [..., E] -> [..., E] float64; zeros where nothing was routed."""
    return counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)


def dead_experts(counts: torch.Tensor) -> torch.Tensor:
    """Which experts got no slot, `counts` [..., E] -> [..., E] bool."""
    return counts == 0


def max_violation(counts: torch.Tensor) -> torch.Tensor:
    """Largest load over mean load, `counts` [..., E] -> [...] float64: 1 when balanced, E when one expert takes all."""
    E = counts.shape[-1]
    return expert_load(counts).amax(-1) * E if E else counts.new_ones(counts.shape[:-1], dtype=torch.float64)


def load_entropy(counts: torch.Tensor) -> torch.Tensor:
    """Entropy of the load over that of a balanced one, `counts` [..., E] -> [...] float64 from 0 to 1; 1 for E < 2."""
    E = counts.shape[-1]
    if E < 2:
        return counts.new_ones(counts.shape[:-1], dtype=torch.float64)
    return torch.special.entr(expert_load(counts)).sum(-1) / math.log(E)
