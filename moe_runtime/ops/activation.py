"""What stands between the two products of an expert: activations and their derivatives, by name, and the gated product.

gated      h = act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset),   z = [gate; up] [R, 2I]
otherwise  h = act(z),                                                           z [R, I]

Without a limit nothing is clamped. With `interleaved` z is gate_0, up_0, gate_1, up_1, ... The gradient of a clamp is 1 up to
the limit and on it, and 0 beyond.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from moe_runtime.config import ACTIVATIONS, check_choice

QUICK = 1.702  # x sigmoid(1.702 x): Hendrycks and Gimpel, Gaussian error linear units, section 2

ACT = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(QUICK * x), "relu": F.relu, "relu2": lambda x: F.relu(x).square(),
}  # fmt: skip
aten = torch.ops.aten
ACT_BACKWARD = {  # d act(x) / dx times grad
    "silu": aten.silu_backward,
    "gelu": aten.gelu_backward,
    "gelu_tanh": lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
    "quick_gelu": lambda grad, x: aten.silu_backward(grad, QUICK * x),  # silu(c x) / c has the slope of silu at c x
    "relu": lambda grad, x: aten.threshold_backward(grad, x, 0),
    "relu2": lambda grad, x: grad * 2 * F.relu(x),
}


FORM = "str act, bool gated, float? limit, float up_offset, bool interleaved"  # an `Activation` as the ops take it


class Activation(NamedTuple):
    """The form of an expert's gate, in the order in which the ops take it."""

    act: str = "silu"
    gated: bool = True
    limit: float | None = None
    up_offset: float = 0.0
    interleaved: bool = False

    def check(self) -> None:
        """Raise ValueError unless the act is known and the rest fits."""
        check_choice("act", self.act, ACTIVATIONS)
        # math.isfinite of a number that dynamo makes a variable would break the graph
        if (self.limit is not None and not 0 < self.limit < math.inf) or not -math.inf < self.up_offset < math.inf:
            got = f"limit is {self.limit}, up_offset {self.up_offset}"
            raise ValueError(f"{got}; expected a finite limit above 0 or None, and a finite up_offset")
        if not self.gated and (self.limit or self.up_offset or self.interleaved):
            raise ValueError(f"gated is False in {self}; limit, up_offset and interleaved are for gated experts")

    def gate_form(self) -> dict[str, object]:
        """Return all but act and gated, which the launchers take by name."""
        return dict(zip(self._fields[2:], self[2:]))

    def split(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return views of the gate and of up in z [..., 2I]; z and None without a gate."""
        if not self.gated:
            return z, None
        return (z[..., ::2], z[..., 1::2]) if self.interleaved else z.chunk(2, -1)

    def below(self, gate: torch.Tensor) -> torch.Tensor:
        """Return min(gate, limit) of `gate` [..., I], the gate itself without a limit."""
        return gate if self.limit is None else gate.clamp(max=self.limit)

    def shifted(self, up: torch.Tensor) -> torch.Tensor:
        """Return clamp(up, -limit, limit) + up_offset of `up` [..., I]; up itself with neither."""
        if self.limit is not None:
            up = up.clamp(-self.limit, self.limit)
        return up + self.up_offset if self.up_offset else up

    def apply(self, z: torch.Tensor) -> torch.Tensor:
        """Apply the activation to the pre-activation `z` [..., 2I or I] -> [..., I]."""
        gate, up = self.split(z)
        h = ACT[self.act](self.below(gate))
        return h if up is None else h * self.shifted(up)
