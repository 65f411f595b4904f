"""The gate that mixes specialists per token, and the loss of the mixture.

UltraFuser, Sec. 3 and App. A:  z_s = g(h_s),  g = Linear(H, H), ReLU, Linear(H, 1)
UltraFuser, Eq. (1):            w = softmax_s(z),  o = sum_s w_s o_s

All specialists share one g. The last bias shifts all z_s equally, so its gradient is 0. `joint` is
a gate on all states at once, z = g(h_1 : ... : h_S), which supports different hidden sizes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_runtime.config import check_choice, check_positive
from moe_runtime.ops.fusion import REDUCTIONS, check_labels, fused_cross_entropy, mean_of, mix
from moe_runtime.ops.library import wide_dtype

GATES = ("mlp", "linear")


class FuserGate(nn.Module):
    """The gate: weights of the specialists from their last hidden states.

    The parameters are float32.

    Args:
        hidden_sizes: H_s of each specialist.
        kind: "mlp", Linear-ReLU-Linear (App. A), or "linear" (Sec. 3).
        joint: Whether each specialist has a row of the last layer, instead of sharing one gate.
        device: Of the parameters.

    Raises:
        ValueError: For different hidden sizes without `joint`.
    """

    def __init__(
        self,
        hidden_sizes: Sequence[int],
        *,
        kind: str = "mlp",
        joint: bool = False,
        device: torch.device | None = None,
    ):
        super().__init__()
        check_choice("kind", kind, GATES)
        for size in hidden_sizes:
            check_positive("hidden_sizes", size)
        self.hidden_sizes = tuple(hidden_sizes)
        self.kind = kind
        self.joint = joint
        if not self.hidden_sizes or (not joint and len(set(self.hidden_sizes)) > 1):
            raise ValueError(
                f"hidden_sizes must be the same for all specialists, but got {self.hidden_sizes}. "
                "Pass joint=True"
            )
        width = max(self.hidden_sizes)
        inputs = width
        outputs = 1
        if joint:
            inputs = sum(self.hidden_sizes)
            outputs = len(self.hidden_sizes)
        like: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.up = nn.Linear(inputs, width, **like) if kind == "mlp" else None
        self.score = nn.Linear(width if kind == "mlp" else inputs, outputs, **like)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep the parameters float32 in casts, as gates are float32 end to end."""
        super()._apply(fn, recurse)
        for parameter in self.parameters():
            parameter.data = parameter.data.float()
        return self

    def forward(self, hidden: Sequence[Tensor]) -> Tensor:
        """Compute the weights, not affected by autocast.

        Args:
            hidden: S tensors [..., H_s] of any float dtype.

        Returns:
            [..., S], which sums to 1, in float32, or float64 with float64 parameters.
        """
        sizes = tuple(h.shape[-1] for h in hidden)
        if sizes != self.hidden_sizes:
            raise ValueError(
                f"Expected hidden states of sizes {self.hidden_sizes}, one per specialist, but got "
                f"{sizes}"
            )
        dtype = self.score.weight.dtype
        with torch.autocast(self.score.weight.device.type, enabled=False):
            states = [h.to(dtype) for h in hidden]
            if self.joint:
                scores = self._scores(torch.cat(states, -1))
            else:
                scores = torch.cat([self._scores(h) for h in states], -1)
            # float32 at least: FSDP2 may gather the parameters in bfloat16
            return scores.softmax(-1, dtype=wide_dtype(dtype))

    def _scores(self, x: Tensor) -> Tensor:
        if self.up is not None:
            x = F.relu(self.up(x))
        return self.score(x)


class FuserLoss(NamedTuple):
    """Loss and statistics of a training step.

    Attributes:
        loss: [], or [B, R] with reduction "none"; float32.
        weight: [B, R, S] float32, the gate's weights, without a gradient.
    """

    loss: Tensor  # [], or [B, R] with reduction "none"; float32
    weight: Tensor  # [B, R, S] float32: the gate's, without a gradient


def fuser_loss(
    gate: FuserGate,
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    labels: Tensor,
    *,
    reduction: str = "mean",
    scales: Sequence[float] | None = None,
    backend: str | None = None,
) -> FuserLoss:
    """Compute the loss of a fused model, UltraFuser's Eq. (2).

    Specialists whose states and heads need no gradient are frozen (stage 1): only the gate trains,
    without a matrix product in the backward pass.

    Args:
        gate: The gate.
        hidden: S tensors [B, R, H_s], the states before each token of the answers.
        heads: S tensors [V_s, H_s].
        labels: [B, R]; -100 does not count.
        reduction: "mean" over tokens, "sum", "none", or "sample", the paper's: the sum over tokens
            and the mean over samples.
        scales: Factors of the specialists' logits, as some families have.
        backend: "torch" or "triton"; None selects the default for the device.

    Returns:
        The loss and the gate's weights.
    """
    check_choice("reduction", reduction, (*REDUCTIONS, "sample"))
    weight = gate(hidden)
    if scales is not None:
        hidden = [h if scale == 1.0 else h * scale for h, scale in zip(hidden, scales, strict=True)]
    inner = "sum" if reduction == "sample" else reduction
    loss = fused_cross_entropy(
        hidden,
        heads,
        weight,
        labels,
        reduction=inner,
        backend=backend,
    )
    if reduction == "sample":
        loss = loss / labels.shape[0]
    return FuserLoss(loss, weight.detach())


Logits = Callable[[Tensor], Tensor]  # [..., H_s] -> [..., V_s], on a device of its own


def chunked_loss(
    gate: FuserGate,
    hidden: Sequence[Tensor],
    heads: Sequence[Logits],
    labels: Tensor,
    *,
    reduction: str = "mean",
    chunk: int = 256,
) -> FuserLoss:
    """Return `fuser_loss` for heads that are any functions from states to logits, on any devices.

    `hidden` are S of [..., H_s], `labels` [...] of the same tokens. `chunk` tokens are processed at
    a time; the backward pass recomputes their logits and then holds three or four copies of them
    per specialist.
    """
    check_choice("reduction", reduction, (*REDUCTIONS, "sample"))
    device = gate.score.weight.device
    weight = gate([h.to(device) for h in hidden])
    flat = weight.flatten(0, -2)
    states = [h.flatten(0, -2) for h in hidden]
    targets = labels.to(device).flatten()

    def nll_of(target: Tensor, part: Tensor, *states: Tensor) -> Tensor:
        pairs = zip(states, heads, strict=True)
        logits = mix((head(h) for h, head in pairs), part)
        check_labels(target, -100, logits.shape[-1])
        return F.cross_entropy(logits, target, reduction="none")

    parts = []
    for start in range(0, len(targets), chunk):
        rows = slice(start, start + chunk)
        inputs = (targets[rows], flat[rows], *[h[rows] for h in states])
        if torch.is_grad_enabled():
            parts.append(checkpoint(nll_of, *inputs, use_reentrant=False))
        else:
            parts.append(nll_of(*inputs))
    nll = torch.cat(parts) if parts else flat.sum(-1)
    total = nll.sum()
    if reduction == "none":
        loss = nll.view(labels.shape)
    elif reduction == "mean":
        loss = mean_of(total, targets, -100)
    elif reduction == "sample":
        loss = total / labels.shape[0]
    else:
        loss = total
    return FuserLoss(loss, weight.detach())
