"""Common parts of the backends of `frozen_mlp`: frozen stacks, low-rank terms, experts' weights.

A stack is never converted as a whole: `weight_of` returns one expert's weight, as a view or in
reused memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.ops import packed
from moe_runtime.ops.activation import FORM, Activation
from moe_runtime.ops.workspace import scratch

_STACK = "Tensor {0}, Tensor[] {0}_scales, str {0}_format, SymInt[] {0}_shape"
# schema of a `FrozenExperts` in the ops
SCHEMA = (
    f"{_STACK.format('up')}, {_STACK.format('down')}, Tensor? up_bias, Tensor? down_bias, Tensor? "
    f"up_a, Tensor? up_b, Tensor? down_a, Tensor? down_b, {FORM}"
)


class Stack(NamedTuple):
    """A frozen stack of E weights [out, in]."""

    # dense: [E, out, in] with any strides; else the packed bytes in the layout of `format`
    data: Tensor
    scales: Sequence[Tensor] = ()
    format: str = ""  # "" for a dense stack
    shape: Sequence[int] = ()  # E, out, in

    @classmethod
    def dense(cls, weight: Tensor) -> "Stack":
        """Return `weight` [E, out, in] as a stack."""
        return cls(weight, (), "", tuple(weight.shape))

    def pack(self) -> tuple:
        """Return the op arguments of this stack."""
        return self.data, list(self.scales), self.format, list(self.shape)


class Pair(NamedTuple):
    """The low-rank terms of a projection: b[e]^T a[e] is added to expert e's weight."""

    a: Tensor  # [E, r, in]
    b: Tensor  # [E, r, out], the scaling included


class FrozenExperts(NamedTuple):
    """The experts of a layer whose stacks are frozen, in the order of SCHEMA."""

    up: Stack  # [E, 2I or I, H]
    down: Stack  # [E, H, I]
    up_bias: Tensor | None = None  # [E, 2I or I]
    down_bias: Tensor | None = None  # [E, H]
    up_lora: Pair | None = None
    down_lora: Pair | None = None
    activation: Activation = Activation()

    def pack(self) -> tuple:
        """Return the op arguments of SCHEMA."""
        return *self.up.pack(), *self.down.pack(), *self.learned()[2:], *self.activation

    @classmethod
    def unpack(cls, arguments: Sequence) -> "FrozenExperts":
        """Return the experts of the op arguments of SCHEMA."""
        n = len(Stack._fields)
        up = Stack(*arguments[:n])
        down = Stack(*arguments[n : 2 * n])
        up_bias, down_bias, up_a, up_b, down_a, down_b, *activation = arguments[2 * n :]
        up_lora = None if up_a is None else Pair(up_a, up_b)
        down_lora = None if down_a is None else Pair(down_a, down_b)
        return cls(
            up,
            down,
            up_bias,
            down_bias,
            up_lora,
            down_lora,
            Activation(*activation),
        )

    def learned(self) -> "FrozenGradients":
        """Return the tensors that may get a gradient."""
        up_a, up_b = self.up_lora or (None, None)
        down_a, down_b = self.down_lora or (None, None)
        return FrozenGradients(
            None,
            None,
            self.up_bias,
            self.down_bias,
            up_a,
            up_b,
            down_a,
            down_b,
        )


class FrozenGradients(NamedTuple):
    """Gradients of `frozen_mlp`, None if absent or not needed; as `needs`, the requested ones."""

    x: Tensor | None
    topk_weight: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    up_a: Tensor | None
    up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None

    def only(self, needs: Sequence) -> "FrozenGradients":
        """Return the gradients requested by `needs`, None for the others."""
        return FrozenGradients(*[grad if need else None for grad, need in zip(self, needs)])


def weight_of(
    stack: Stack,
    e: int,
    dtype: torch.dtype,
    name: str,
    backend: str | None = None,
) -> Tensor:
    """Return expert e's weight [out, in] in `dtype`: a view, or `scratch` memory of this `name`.

    `backend` is that of the op, by which `packed.unpack` decides whether to use the compiled
    library.
    """
    if stack.format:
        _, P, Q = stack.shape
        if stack.format.endswith(packed.TRANSPOSED):
            P, Q = Q, P
        out = scratch(name, (P, Q), stack.data, dtype)
        return packed.unpack(
            stack.data,
            stack.scales,
            stack.format,
            e,
            dtype,
            out,
            backend,
        )
    weight = stack.data[e]
    if weight.dtype == dtype:
        return weight
    if weight.stride(0) == 1:  # in the order in which it is stored
        return scratch(name, tuple(weight.t().shape), weight, dtype).copy_(weight.t()).t()
    return scratch(name, tuple(weight.shape), weight, dtype).copy_(weight)


def in_order_of(tensor: Tensor) -> Tensor:
    """Allocate the gradient of a pair's `tensor` [E, r, n] in its order, [r, E, n] for PEFT's B."""
    if tensor.dim() == 3 and tensor.stride(0) < tensor.stride(1):
        return tensor.new_empty(tensor.transpose(0, 1).shape).transpose(0, 1)
    return tensor.new_empty(tensor.shape)
