"""Low-rank adapters on the stacks of an experts module: convert PEFT's layout to the pairs of
`ops.frozen_mlp`.

    A [E r, in], row e r + j;   B [out, r E], column j E + e: the expert is the slowest index of A,
                                and the fastest of B

Both layouts are PEFT's, for plain and for transposed stacks (PEFT 0.20 and 0.21). A is read in
place; B is transposed once per call to [r, E, out], and autograd transposes its gradient back. The
caller of an experts module with adapters (hf.dropin.adapters) stores their factors on the module
for the duration of the call, and `take` returns them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_runtime.ops.all_to_all import Owners, is_distributed
from moe_runtime.ops.frozen_rows import FrozenExperts, Pair, Stack

# attribute of an experts module during a call: stack name -> factors
ADAPTERS = "moe_runtime_adapters"


class Factors(NamedTuple):
    """One adapter of one stack."""

    a: Tensor  # [E r, in]
    b: Tensor  # [out, r E]
    scaling: float
    num_experts: int  # E, over all ranks if experts are sharded


def take(module: nn.Module) -> dict[str, list[Factors]]:
    """Return the factors stored for this call of `module`, by the name of their stack, and remove
    them from it.
    """
    return module.__dict__.pop(ADAPTERS, {})


def pair_of(adapters: list[Factors], count: int, dtype: torch.dtype, first: int = 0) -> Pair | None:
    """Return the adapters of one stack as a pair in `dtype`, for `count` experts starting at
    `first`.
    """
    a = []
    b = []
    for one in adapters:
        E = one.num_experts
        r = one.a.shape[0] // E
        own = (
            one.b if one.scaling == 1 else one.b * one.scaling
        )  # in the parameter's dtype: rounded once
        own = own.to(dtype)
        if count < E:
            own = own.view(-1, r, E)[:, :, first : first + count].reshape(-1, r * count)
        b.append(own.t().contiguous().view(r, count, -1))
        a.append(one.a[first * r : (first + count) * r].to(dtype).view(count, r, -1))
    if not a:
        return None
    return Pair(
        a[0] if len(a) == 1 else torch.cat(a, 1),
        (b[0] if len(b) == 1 else torch.cat(b)).transpose(0, 1),
    )


def experts_of(
    names: Sequence[str],
    tensors: Any,
    adapters: dict[str, list[Factors]],
    activation: Any,
    dtype: torch.dtype,
    owners: Owners | None = None,
) -> FrozenExperts:
    """Return the experts from the stacks [E, out, in] (packed ones as `Stack`) and biases [E, out],
    called `names`.

    `owners` are the ranks of all experts if they are distributed: A and B are whole on each rank,
    which uses the part of its experts. Raises ValueError for experts that are distributed in
    another way.
    """
    up, down, *biases = tensors
    count = up.shape[0]
    whole = up.shape[0] if owners is None else owners.num_experts
    first = 0 if owners is None else dist.get_rank(owners.group) * count
    factors = [one for found in adapters.values() for one in found]
    if any(is_distributed(half) for one in factors for half in one[:2]):
        raise ValueError(
            "The adapters are sharded separately. Apply fully_shard to the decoder layer that "
            "contains them"
        )
    strange = [one.num_experts for one in factors if one.num_experts != whole]
    if strange:
        raise ValueError(
            f"The adapters have {strange[0]} experts, but the stacks have {whole}: another engine "
            "has distributed the experts. Distribute them with "
            "moe_runtime.hf.dropin.parallel.shard_experts"
        )
    pairs = [pair_of(adapters.get(name, []), count, dtype, first) for name in names[:2]]
    biases = [bias.to(dtype) for bias in biases] or [None, None]
    stacks = [stack if isinstance(stack, Stack) else Stack.dense(stack) for stack in (up, down)]
    return FrozenExperts(*stacks, *biases, *pairs, activation)
