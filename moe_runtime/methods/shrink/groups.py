"""Which experts of a layer are merged, and with which weights.

    m-smoe      the most frequent experts lead; each other one joins the leader whose router logits
                are most similar over the tokens, by their cosine          arXiv 2310.01334
    hc-smoe     hierarchical clustering (average linkage) of the experts' mean outputs by their
                Euclidean distance                                         arXiv 2410.08589
    ream        the most salient experts (reap) lead; beginning with the most salient one, each
                takes its nearest experts until its group has `group_size`; nearness is the mean of
                (cos(u_i, u_j) + 1) / 2, u the experts' mean gated outputs, and
                1 - d_ij / max d, d the distance of the normalized router logits
                                                                           arXiv 2604.04356

A group's weights are the members' frequencies (ream: saliencies) over their sum. Its leader, whose
row the router keeps, is the member with the largest weight.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.config import check_choice, check_positive
from moe_runtime.io.rows import require
from moe_runtime.methods.shrink.choice import Sums, saliency

GROUP_SIZE = 16  # of ream
NEEDED = {"m-smoe": ("logits",), "hc-smoe": ("output",), "ream": ("gated", "logits")}
ALIGNED = ("m-smoe", "ream")  # align the neurons of a group's experts unless told otherwise


class Group(NamedTuple):
    """Experts that become one: the leader first, and weights that sum to 1."""

    members: list[int]
    weights: list[float]


def grouped(
    sums: Sums, by: str, keep: int, groups: int = 1, group_size: int = GROUP_SIZE
) -> list[Group]:
    """Return `keep` groups of a layer's experts, in the order of their leaders.

    Args:
        sums: The layer's statistics.
        by: One of NEEDED.
        keep: Number of groups.
        groups: Routing groups of the family, which are clustered separately.
        group_size: Largest group of ream.

    Raises:
        ValueError: `by` is unknown, or ream's groups would be too small to hold all experts.
    """
    check_choice("by", by, tuple(NEEDED))
    check_positive("group_size", group_size)
    E = len(sums["count"])
    if by == "ream" and keep * group_size < E:
        raise ValueError(
            f"{keep} groups of at most {group_size} cannot hold {E} experts. Keep at least "
            f"{-(-E // group_size)}, or raise the group size"
        )
    weights = saliency(sums, "reap" if by == "ream" else "frequency")
    if by == "ream" and weights.any():
        # experts without tokens count little, but count
        least = weights[weights > 0].min().clamp(max=0.5)
        weights = torch.where(weights > 0, weights, least)
    found = []
    for part in torch.arange(E).chunk(groups):
        first = int(part[0])
        labels = CLUSTERED[by](_part(sums, part), weights[part], keep // groups, group_size)
        for label in labels.unique().tolist():
            members = (labels == label).nonzero().flatten() + first
            found.append(_group(members, weights[members]))
    return sorted(found, key=lambda group: group.members[0])


def _part(sums: Sums, part: Tensor) -> dict[str, Tensor]:
    """Return the sums of some experts."""
    values = {}
    for name in ("output", "gated"):
        if name in sums:
            values[name] = sums[name][part]
    if "logits" in sums:
        values["logits"] = sums["logits"][part][:, part]
    return values


def _group(members: Tensor, weights: Tensor) -> Group:
    """Return a group, its members by descending weight; equal weights if no token reached any."""
    order = weights.sort(descending=True, stable=True).indices
    weights = weights[order]
    if not weights.any():
        weights = torch.ones_like(weights)
    return Group(members[order].tolist(), (weights / weights.sum()).tolist())


def _leaders(weights: Tensor, keep: int) -> list[int]:
    return weights.sort(descending=True, stable=True).indices[:keep].tolist()


def _cosines(products: Tensor) -> Tensor:
    """Return the cosines of vectors whose products [E, E] are given."""
    norms = products.diagonal().clamp(min=torch.finfo(products.dtype).tiny).sqrt()
    return (products / (norms[:, None] * norms[None, :])).clamp(-1, 1)


def _m_smoe(sums: Sums, weights: Tensor, keep: int, group_size: int) -> Tensor:
    leaders = sorted(_leaders(weights, keep))
    similarity = _cosines(sums["logits"])[:, leaders]
    labels = similarity.argmax(1)
    labels[leaders] = torch.arange(keep)
    return labels


def _hc_smoe(sums: Sums, weights: Tensor, keep: int, group_size: int) -> Tensor:
    if len(weights) == 1:
        return torch.zeros(1, dtype=torch.int64)
    hierarchy = require("scipy.cluster.hierarchy", "train")
    tree = hierarchy.linkage(sums["output"].numpy(), method="average")
    return torch.from_numpy(hierarchy.cut_tree(tree, n_clusters=keep)[:, 0]).long()


def _ream(sums: Sums, weights: Tensor, keep: int, group_size: int) -> Tensor:
    outputs = _cosines(sums["gated"] @ sums["gated"].t())
    apart = (2 - 2 * _cosines(sums["logits"])).clamp(min=0).sqrt()
    logits = 1 - apart / apart.max().clamp(min=torch.finfo(apart.dtype).tiny)
    distance = 1 - ((outputs + 1) / 2 + logits) / 2
    labels = torch.full((len(weights),), -1)
    leaders = _leaders(weights, keep)
    labels[leaders] = torch.arange(keep)
    for label, leader in enumerate(leaders):
        nearest = distance[leader].argsort(stable=True)
        free = nearest[labels[nearest] < 0]
        labels[free[: group_size - 1]] = label
    return labels


CLUSTERED: dict[str, Callable[[Sums, Tensor, int, int], Tensor]] = {
    "m-smoe": _m_smoe,
    "hc-smoe": _hc_smoe,
    "ream": _ream,
}
