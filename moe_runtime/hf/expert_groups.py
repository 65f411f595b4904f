"""Coarser experts, simulated: the router chooses groups of experts in the place of single ones.

ESFT (arXiv 2407.01906), App. B and Fig. 7, for groups G of g experts each, K experts per token, gates s = softmax(logits):

    s_G = mean_{e in G} s_e          the K / g groups with the highest s_G are chosen, each of their experts with the weight s_G

so a token passes through as many experts as before.
"""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from moe_runtime.hf.layers import block_of, numbered_layers

NAMES = ("gate", "router")
TOLERANCE = 1e-3


def group_routing(model: nn.Module, groups: Mapping[int, Sequence[Sequence[int]]]) -> list:
    """Route `model` by groups, layer -> groups of ids, from now on; return the hooks' handles.

    For routers as DeepSeek-V2's, which return logits [T, E], weights and ids [T, K], their weights the softmax's own times a
    constant. Raises ValueError for other routers, at the latest when they are called, for layers without groups, and for
    sizes that do not go into K.
    """
    handles = []
    for number, layer in numbered_layers(model).items():
        block = block_of(model, layer)
        router = next((module for name, module in block.named_children() if name in NAMES), None)
        top_k = getattr(router, "top_k", None)
        if router is None or not isinstance(top_k, int) or layer.num_shared:
            raise ValueError(f"layer {layer.name} has no router with logits and top_k; want one as DeepSeek-V2's")
        table = torch.tensor([list(group) for group in groups.get(number, ())])
        if sorted(table.flatten().tolist()) != list(range(layer.num_experts)) or top_k % table.shape[-1]:
            raise ValueError(
                f"groups of layer {number} have the shape {tuple(table.shape)}, num_experts is {layer.num_experts}, top_k is "
                f"{top_k}; want every expert in one group, and a size that goes into top_k"
            )
        handles.append(router.register_forward_hook(functools.partial(_regroup, table, [])))
    return handles


def _regroup(table: torch.Tensor, seen: list, router: nn.Module, args, out):
    """A hook of a router: give the weights and ids of whole groups, [T, K] as before."""
    if not isinstance(out, tuple) or len(out) != 3:
        raise ValueError(
            f"{type(router).__name__} does not return logits, weights and ids; want a router as DeepSeek-V2's"
        )
    logits, weights, ids = out
    table = table.to(logits.device)
    gates, scale = logits.float().softmax(-1), getattr(router, "routed_scaling_factor", 1.0)
    if not seen:  # by its first call: every other would wait for the device
        seen.append(True)
        if not torch.allclose(gates.gather(1, ids.long()) * scale, weights.float(), rtol=TOLERANCE, atol=1e-6):
            raise ValueError(
                f"{type(router).__name__} does not weigh by its logits' softmax; want a router as DeepSeek-V2's"
            )
    size = table.shape[1]
    best, chosen = gates[:, table].mean(-1).topk(ids.shape[1] // size, dim=-1)
    weights = (best * scale).repeat_interleave(size, 1).to(weights.dtype)
    return logits, weights, table[chosen].flatten(1).to(ids.dtype)
