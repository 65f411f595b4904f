"""Activations of the expert MLP and their derivatives, by name.

gated      h = act(gate) * up,   z = [gate; up] [R, 2I]
otherwise  h = act(z),           z [R, I]
"""

import torch
import torch.nn.functional as F

ACT = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
aten = torch.ops.aten
ACT_BACKWARD = {  # d act(x) / dx times grad
    "silu": aten.silu_backward,
    "gelu": aten.gelu_backward,
    "gelu_tanh": lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
    "relu": lambda grad, x: aten.threshold_backward(grad, x, 0),
    "relu2": lambda grad, x: grad * 2 * F.relu(x),
}


def activate(z: torch.Tensor, act: str, gated: bool) -> torch.Tensor:
    """Apply the activation to the pre-activation `z` [..., 2I] (gate first) or [..., I] -> [..., I]."""
    if not gated:
        return ACT[act](z)
    gate, up = z.chunk(2, -1)
    return ACT[act](gate) * up
