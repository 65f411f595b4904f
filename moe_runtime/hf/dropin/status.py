"""What runs the experts of a model: `moe_runtime.status(model)`."""

from typing import NamedTuple

from torch import nn

from moe_runtime import backends
from moe_runtime.hf.dropin.gates import NAME, gate_of, is_experts
from moe_runtime.hf.dropin.layers import plain_name
from moe_runtime.modules import packed
from moe_runtime.modules.moe import MoE
from moe_runtime.ops.packed import TRANSPOSED


class LayerStatus(NamedTuple):
    """What runs a layer's experts.

    Attributes:
        name: The path of the layer, without wrappers.
        runs_on: "moe_runtime", or the implementation of transformers that is set.
        backend: Of moe_runtime, where the weights are now: triton, cuda, cpp or torch; else None.
        operator: Whether both products and the activation between them are one operator.
        format: Of packed weights, such as nf4; else their dtype.
    """

    name: str
    runs_on: str
    backend: str | None
    operator: bool
    format: str

    def __str__(self) -> str:
        """Return the layer in one line."""
        if self.backend is None:
            return f"{self.name}: {self.format}, {self.runs_on}"
        how = "one operator" if self.operator else "composed"
        return f"{self.name}: {self.format}, {self.runs_on}, backend {self.backend}, {how}"


def status(model: nn.Module) -> list[LayerStatus]:
    r"""Return what runs the experts of each MoE layer of a model, in the order of its modules.

    Args:
        model: Any model, wrapped or not. Without MoE layers the list is empty.

    Example:
        >>> print(*moe_runtime.status(model), sep="\n")
        model.layers.0.mlp.experts: bfloat16, moe_runtime, backend cpp, one operator
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            found.append(_layer(name, module.experts, NAME))
        elif is_experts(module):
            runs_on = module.config._experts_implementation or "eager"
            found.append(_layer(name, module, runs_on))
    return found


def _layer(name: str, module: nn.Module, runs_on: str) -> LayerStatus:
    stack = next(module.parameters())
    layout = next(iter(packed.layouts(module).values()), None)
    op = "moe_mlp"
    format = str(stack.dtype).removeprefix("torch.")
    if layout is not None:
        op = "frozen_mlp"
        format = layout.format.removesuffix(TRANSPOSED)
        stack = stack.new_empty(0, dtype=layout.dtype)
    if runs_on != NAME:
        return LayerStatus(plain_name(name), runs_on, None, False, format)
    operator = not is_experts(module) or gate_of(module) is not None
    return LayerStatus(plain_name(name), runs_on, backends.choose(op, stack), operator, format)
