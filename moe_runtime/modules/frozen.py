"""Low-rank adapters on the stacks of an experts module: from PEFT's layout to the pairs that `ops.frozen_mlp` takes.

    A [E r, in], row e r + j;   B [out, r E], column j E + e: the expert is the slowest index of A, and the fastest of B

Both are PEFT's, of plain and of transposed stacks alike (PEFT 0.20 and 0.21). A is read where it lies; B is transposed once a
call, [r, E, out], and autograd transposes its gradient back. Whoever calls an experts module with adapters (hf.dropin.adapters)
leaves their factors on the module for the time of the call, and `take` hands them over.
"""

from typing import NamedTuple

import torch
from torch import nn

from moe_runtime.ops.frozen_rows import FrozenExperts, Pair, Stack

ADAPTERS = "moe_runtime_adapters"  # attribute of an experts module during a call: stack name -> factors


class Factors(NamedTuple):
    """One adapter of one stack."""

    a: torch.Tensor  # [E r, in]
    b: torch.Tensor  # [out, r E]
    scaling: float


def take(module: nn.Module) -> dict[str, list[Factors]]:
    """Return the factors that were left for this call of `module`, by the name of their stack, and remove them from it."""
    return module.__dict__.pop(ADAPTERS, {})


def pair_of(adapters: list[Factors], E: int, dtype: torch.dtype, first: int = 0, count: int | None = None) -> Pair | None:
    """Return the adapters of one stack as a pair in `dtype`: of `count` experts from `first` on, or of all E."""
    a, b = [], []
    count = E if count is None else count
    for one in adapters:
        r = one.a.shape[0] // E
        own = one.b if one.scaling == 1 else one.b * one.scaling  # in the parameter's dtype: rounded once
        own = own.to(dtype)
        if count < E:
            own = own.view(-1, r, E)[:, :, first : first + count].reshape(-1, r * count)
        b.append(own.t().contiguous().view(r, count, -1))
        a.append(one.a[first * r : (first + count) * r].to(dtype).view(count, r, -1))
    if not a:
        return None
    return Pair(a[0] if len(a) == 1 else torch.cat(a, 1), (b[0] if len(b) == 1 else torch.cat(b)).transpose(0, 1))


def experts_of(
    names, tensors, adapters: dict[str, list[Factors]], activation, dtype: torch.dtype, shares=None
) -> FrozenExperts:
    """Return the experts of the stacks [E, out, in], packed ones as `Stack`, and biases [E, out], called `names`.

    `shares` are how many experts there are in all, and the first of these.
    """
    up, down, *biases = tensors
    E, first = (up.shape[0], 0) if shares is None else shares
    pairs = [pair_of(adapters.get(name, []), E, dtype, first, up.shape[0]) for name in names[:2]]
    biases = [bias.to(dtype) for bias in biases] or [None, None]
    stacks = [stack if isinstance(stack, Stack) else Stack.dense(stack) for stack in (up, down)]
    return FrozenExperts(*stacks, *biases, *pairs, activation)
