"""Which experts of a layer stay, by what they did in a calibration pass.

Pruning keeps the experts with the largest saliency:

    frequency   count_e
    reap        sum_t g'_{e,t} |f_e(x_t)| / count_e, the mean over the tokens that reach e; g' sums
                to 1 over a token's experts                  REAP (arXiv 2510.13999), Eq. (9)

To a dense model (arXiv 2605.28207) goes what is likely to be needed by any token:

    cp          sum_t p_{e,t} / count_e over the tokens that reach e, the mean probability of an
                expert that is chosen, of the softmax over all experts             Eq. (3)
    acp         cp_e sqrt(mean_t |f_e(x_t)|^2)
    do-acp      greedily the expert that raises log det(M_S + r I) most, where
                M_ij = sqrt(acp_i acp_j) mean_t <f_i(x_t), f_j(x_t)>, r = mean_i M_ii / K

Where routing is limited to groups of experts (DeepSeek-V3), each group keeps as many.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_runtime.config import check_choice

PRUNE = ("frequency", "reap")
DENSE = ("cp", "acp", "do-acp")
NEEDED = {
    "cp": ("probability",),
    "acp": ("probability", "norm", "seen"),
    "do-acp": ("probability", "norm", "seen", "products"),
}  # sums that a pass may lack

Sums = Mapping[str, Tensor]  # of a layer


def saliency(sums: Sums, by: str) -> Tensor:
    """Return a layer's saliencies [E] float64: `by` is one of PRUNE, or cp or acp."""
    count = sums["count"]
    reached = count.clamp(min=1)
    if by == "frequency":
        return count
    if by == "reap":
        return sums["gate_norm"] / reached
    probability = sums["probability"] / reached
    if by == "cp":
        return probability
    return probability * (sums["norm"] / sums["seen"]).sqrt()


def kept(sums: Sums, by: str, keep: int, groups: int = 1) -> list[int]:
    """Return the ids of the `keep` experts that stay, ascending; of equal ones the first."""
    check_choice("by", by, (*PRUNE, *DENSE))
    if by == "do-acp":
        return sorted(_most_diverse(sums, keep))
    order = saliency(sums, by).view(groups, -1).sort(dim=1, descending=True, stable=True).indices
    first = torch.arange(groups)[:, None] * order.shape[1]
    return sorted((order[:, : keep // groups] + first).flatten().tolist())


def _most_diverse(sums: Sums, keep: int) -> list[int]:
    """Return experts by do-acp, in the order in which they were chosen.

    The determinant grows by the factor d_e = M_ee + r - |c_e|^2, the pivot of a Cholesky
    factorization that goes on with e.
    """
    root = saliency(sums, "acp").sqrt()
    M = root[:, None] * root[None, :] * sums["products"] / sums["seen"]
    ridge = M.diagonal().mean() / keep
    gain = M.diagonal() + ridge
    columns = []
    chosen: list[int] = []
    for _ in range(keep):
        gain[chosen] = -torch.inf
        e = int(gain.argmax())
        column = M[:, e].clone()
        column[e] += ridge
        for earlier in columns:
            column -= earlier[e] * earlier
        column /= gain[e].clamp(min=torch.finfo(gain.dtype).tiny).sqrt()
        columns.append(column)
        gain = gain - column.square()
        chosen.append(e)
    return chosen
