"""Low-rank adapters on the stacks of an experts module: PEFT's layout as `ops.frozen_mlp`'s pairs.

    A [E r, in], row e r + j;   B [out, r E], column j E + e: the expert is the slowest index of A,
                                and the fastest of B

Both layouts are PEFT's, for plain and for transposed stacks (PEFT 0.20 and 0.21). A is read in
place; B is transposed once per call to [r, E, out], and autograd transposes its gradient back. The
caller of an experts module with adapters (hf.dropin.adapters) stores their factors on the module
for the duration of the call, and `take` returns them.
"""

import itertools
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
    """Return the factors stored for this call of `module` by stack, and remove them from it."""
    return module.__dict__.pop(ADAPTERS, {})


def pair_of(
    adapters: list[Factors],
    count: int,
    dtype: torch.dtype,
    first: int = 0,
) -> Pair | None:
    """Return the adapters of one stack as a pair in `dtype`, for experts from `first` on."""
    if not adapters:
        return None
    a = []
    b = []
    for one in adapters:
        E = one.num_experts
        r = one.a.shape[0] // E
        half = one.b
        if one.scaling != 1:  # in the parameter's dtype: rounded once
            half = half * one.scaling
        half = half.to(dtype)
        if count < E:
            half = half.view(-1, r, E)[:, :, first : first + count].reshape(-1, r * count)
        b.append(half.t().contiguous().view(r, count, -1))
        a.append(one.a[first * r : (first + count) * r].to(dtype).view(count, r, -1))
    if len(a) == 1:
        return Pair(a[0], b[0].transpose(0, 1))
    return Pair(torch.cat(a, 1), torch.cat(b).transpose(0, 1))


def experts_of(
    names: Sequence[str],
    tensors: Any,
    adapters: dict[str, list[Factors]],
    activation: Any,
    dtype: torch.dtype,
    owners: Owners | None = None,
) -> FrozenExperts:
    """Return the experts from the stacks [E, out, in] and biases [E, out], called `names`.

    Packed stacks are given as `Stack`. `owners` are the ranks of all experts if they are
    distributed: A and B are whole on each rank, which uses the part of its experts. Raises
    ValueError for experts that are distributed in another way.
    """
    up, down, *biases = tensors
    count = up.shape[0]
    whole = count
    first = 0
    if owners is not None:
        whole = owners.num_experts
        first = dist.get_rank(owners.group) * count
    for one in itertools.chain.from_iterable(adapters.values()):
        if is_distributed(one.a) or is_distributed(one.b):
            raise ValueError(
                "The adapters are sharded separately. Apply fully_shard to the decoder layer that "
                "contains them"
            )
        if one.num_experts != whole:
            raise ValueError(
                f"The adapters have {one.num_experts} experts, but the stacks have {whole}: "
                "another engine has distributed the experts. Distribute them with "
                "moe_runtime.hf.dropin.parallel.shard_experts"
            )
    up_bias = None
    down_bias = None
    if biases:
        up_bias, down_bias = (bias.to(dtype) for bias in biases)
    return FrozenExperts(
        up if isinstance(up, Stack) else Stack.dense(up),
        down if isinstance(down, Stack) else Stack.dense(down),
        up_bias,
        down_bias,
        pair_of(adapters.get(names[0], []), count, dtype, first),
        pair_of(adapters.get(names[1], []), count, dtype, first),
        activation,
    )
