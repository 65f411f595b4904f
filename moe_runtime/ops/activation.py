"""Activations, their derivatives and gated products between the two matrix products of an expert.

gated      z = [gate; up] [R, 2I]
           h = act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)
otherwise  z [R, I],  h = act(z)

Without a limit nothing is clamped. With `interleaved`, z is gate_0, up_0, gate_1, up_1, ... The
gradient of a clamp is 1 up to and at the limit, and 0 beyond it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.config import ACTIVATIONS, check_choice

QUICK = 1.702  # x sigmoid(1.702 x): Hendrycks and Gimpel, Gaussian error linear units, section 2

ACT: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(QUICK * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
aten = torch.ops.aten
ACT_BACKWARD: dict[str, Callable[..., Tensor]] = {  # d act(x) / dx times grad
    "silu": aten.silu_backward,
    "gelu": aten.gelu_backward,
    "gelu_tanh": lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
    # silu(c x) / c has the slope of silu at c x
    "quick_gelu": lambda grad, x: aten.silu_backward(grad, QUICK * x),
    "relu": lambda grad, x: aten.threshold_backward(grad, x, 0),
    "relu2": lambda grad, x: grad * 2 * F.relu(x),
}


# schema of an `Activation` in the ops
FORM = "str act, bool gated, float? limit, float up_offset, bool interleaved"


class Activation(NamedTuple):
    """The form of an expert's gate, with the fields in the order of the ops' schema."""

    act: str = "silu"
    gated: bool = True
    limit: float | None = None
    up_offset: float = 0.0
    interleaved: bool = False

    def check(self) -> None:
        """Raise ValueError for an unknown act or invalid parameters."""
        check_choice("act", self.act, ACTIVATIONS)
        # math.isfinite would break the graph for a number that dynamo treats as a variable
        fits = self.limit is None or 0 < self.limit < math.inf
        if not fits or not -math.inf < self.up_offset < math.inf:
            raise ValueError(
                "Expected a finite limit above 0 or None, and a finite up_offset, but limit is "
                f"{self.limit} and up_offset is {self.up_offset}"
            )
        if not self.gated and (self.limit or self.up_offset or self.interleaved):
            raise ValueError(
                "limit, up_offset and interleaved require gated experts, but gated is False in "
                f"{self}"
            )

    def gate_form(self) -> dict[str, object]:
        """Return the parameters other than act and gated, keywords of the launchers."""
        return dict(zip(self._fields[2:], self[2:]))

    def split(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return views of gate and up in z [..., 2I], or z and None if not gated."""
        if not self.gated:
            return z, None
        if self.interleaved:
            return z[..., ::2], z[..., 1::2]
        gate, up = z.chunk(2, -1)
        return gate, up

    def below(self, gate: Tensor) -> Tensor:
        """Return min(gate, limit) of `gate` [..., I], or the gate itself without a limit."""
        if self.limit is None:
            return gate
        return gate.clamp(max=self.limit)

    def shifted(self, up: Tensor) -> Tensor:
        """Return clamp(up, -limit, limit) + up_offset of `up` [..., I]."""
        if self.limit is not None:
            up = up.clamp(-self.limit, self.limit)
        if self.up_offset:
            up = up + self.up_offset
        return up

    def apply(self, z: Tensor) -> Tensor:
        """Apply the activation to the pre-activation `z` [..., 2I or I] -> [..., I]."""
        gate, up = self.split(z)
        h = ACT[self.act](self.below(gate))
        if up is not None:
            h = h * self.shifted(up)
        return h
