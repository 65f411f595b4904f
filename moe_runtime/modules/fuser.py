"""The gate that mixes specialists token by token, and the loss of the mixture.

UltraFuser, Sec. 3 and App. A:  z_s = g(h_s),  g = Linear(H, H), ReLU, Linear(H, 1), one g for all specialists
UltraFuser, Eq. (1):            w = softmax_s(z),  o = sum_s w_s o_s
The last bias moves all z_s alike, so its gradient is 0. `joint` is a gate that sees all states at once,
z = g(h_1 : ... : h_S), which serves specialists of several hidden sizes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from moe_runtime.config import check_choice, check_positive
from moe_runtime.ops.fusion import REDUCTIONS, fused_cross_entropy

GATES = ("mlp", "linear")


class FuserGate(nn.Module):
    """Last hidden states S of [..., H_s] -> weights [..., S] float32 that sum to 1; its parameters are float32.

    `kind` "mlp" is the paper's App. A, "linear" its Sec. 3. `joint` gives each specialist a row of the last layer instead
    of a copy of the gate. Raises ValueError for several hidden sizes without it.
    """

    def __init__(self, hidden_sizes: Sequence[int], *, kind: str = "mlp", joint: bool = False, device=None):
        super().__init__()
        check_choice("kind", kind, GATES)
        for size in hidden_sizes:
            check_positive("hidden_sizes", size)
        self.hidden_sizes, self.kind, self.joint = tuple(hidden_sizes), kind, joint
        if not self.hidden_sizes or (not joint and len(set(self.hidden_sizes)) > 1):
            raise ValueError(f"hidden_sizes is {self.hidden_sizes}; want one size for all specialists; or joint=True")
        width = max(self.hidden_sizes)
        inputs, outputs = (sum(self.hidden_sizes), len(self.hidden_sizes)) if joint else (width, 1)
        like = {"dtype": torch.float32, "device": device}
        self.up = nn.Linear(inputs, width, **like) if kind == "mlp" else None
        self.score = nn.Linear(width if kind == "mlp" else inputs, outputs, **like)

    def _apply(self, fn, recurse=True):
        """Keep the parameters float32 whatever the module is cast to: the gates are, end to end."""
        super()._apply(fn, recurse)
        for parameter in self.parameters():
            parameter.data = parameter.data.float()
        return self

    def forward(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """`hidden` S of [..., H_s], any float dtype -> [..., S] float32; autocast leaves it alone."""
        sizes = tuple(h.shape[-1] for h in hidden)
        if sizes != self.hidden_sizes:
            raise ValueError(f"hidden's sizes are {sizes}; want {self.hidden_sizes}, one state per specialist")
        with torch.autocast(self.score.weight.device.type, enabled=False):
            states = [h.to(self.score.weight.dtype) for h in hidden]
            if self.joint:
                return self._scores(torch.cat(states, -1)).softmax(-1)
            return torch.cat([self._scores(h) for h in states], -1).softmax(-1)

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x if self.up is None else F.relu(self.up(x)))

    def extra_repr(self) -> str:
        """Show the sizes in print(model)."""
        return f"hidden_sizes={self.hidden_sizes}, kind={self.kind!r}, joint={self.joint}"


class FuserLoss(NamedTuple):
    """What a training step looks at."""

    loss: torch.Tensor  # [], or [B, R] with reduction "none"; float32
    weight: torch.Tensor  # [B, R, S] float32: the gate's, without a gradient


def fuser_loss(
    gate: FuserGate,
    hidden: Sequence[torch.Tensor],
    heads: Sequence[torch.Tensor],
    labels: torch.Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    backend: str | None = None,
) -> FuserLoss:
    """Eq. (2) of responses `labels` [B, R] from `hidden` S of [B, R, H_s], the states before each token, and `heads`.

    `reduction`: "mean" over tokens, "sum", "none", or "sample", the paper's: the sum over tokens, the mean over samples.
    Specialists whose states and heads want no gradient are frozen (stage 1): the gate alone learns, without a backward
    product.
    """
    check_choice("reduction", reduction, (*REDUCTIONS, "sample"))
    weight = gate(hidden)
    inner = "sum" if reduction == "sample" else reduction
    loss = fused_cross_entropy(
        hidden, heads, weight, labels, ignore_index=ignore_index, reduction=inner, backend=backend
    )
    return FuserLoss(loss / labels.shape[0] if reduction == "sample" else loss, weight.detach())
