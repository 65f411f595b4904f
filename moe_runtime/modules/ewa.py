"""EWA (arXiv 2308.06093), a baseline: experts without a router, pulled to their mean after a step.

`EWAMLP`, the layer: in training, the batch's tokens are randomly divided into equal parts, one per
expert; in eval mode a single expert runs, whose weights are the experts' mean.

`average_experts_`, one step of averaging:  W_i <- (1 - b) W_i + b / (E - 1) sum_{j != i} W_j
with the mean m = mean_j W_j:               W_i <- W_i + c (m - W_i),  c = b E / (E - 1)
The mean is preserved, and each expert's difference from it shrinks by 1 - c; b = (E - 1) / E makes
all experts equal.

m is computed as W_0 + sum_j (W_j - W_0) / E, and torch.lerp switches its formula at c = 1/2: equal
experts stay unchanged and c = 1 makes them equal, bit by bit. For a DTensor m is the plain sum
divided by E, equal up to float32 rounding.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_runtime.config import MoEConfig, check_fraction
from moe_runtime.modules.moe import Experts
from moe_runtime.ops.library import compute_dtype, wide_dtype
from moe_runtime.ops.merging import block_size, merge_experts, uniform_mixture


@torch.no_grad()
def average_experts_(weight: Any, share: float) -> Tensor:
    """Apply one averaging step to `weight` [E, ...] in place, in float32, and return it.

    Not differentiable. `share` is b, from 0 to 1. A DTensor's experts are averaged over all ranks.
    Raises ValueError for another share and for stacks that DeepSpeed ZeRO-3 has partitioned.
    """
    check_share(share)
    is_deepspeeds = getattr(weight, "ds_id", None) is not None
    if is_deepspeeds and weight.numel() != getattr(weight, "ds_numel", weight.numel()):
        raise ValueError(
            f"Expected the whole stack, but weight is {tuple(weight.shape)} of DeepSpeed's "
            f"{tuple(weight.ds_shape)}. Train with FSDP2 or DDP instead of ZeRO-3"
        )
    E = weight.shape[0]
    pull = 0.0 if E == 1 else share * E / (E - 1)
    if pull == 0.0:
        return weight
    if hasattr(weight, "to_local"):
        _average_over_ranks(weight, pull)
        return weight
    row = weight[0]
    stack = weight if row.is_contiguous() else weight.contiguous()
    _average_by_blocks(stack.view(E, row.numel()), pull)
    if stack is not weight:
        weight.copy_(stack)
    return weight


def check_share(share: float) -> None:
    """Raise ValueError unless `share` is a number from 0 to 1."""
    check_fraction("share", share, "how much of an expert the others give")


def _average_by_blocks(rows: Tensor, pull: float) -> None:
    """Average `rows` [E, P] in blocks over all experts, without a float32 copy of the stack."""
    E, P = rows.shape
    step = P  # a compiler chooses the blocks itself
    if not torch.compiler.is_compiling():
        step = max(block_size(rows[0]) // E, 1)
    for start in range(0, P, step):
        part = rows[:, start : start + step]
        w = part.to(wide_dtype(part.dtype))
        mean = w[0] + (w - w[0]).sum(0) / E
        part.copy_(torch.lerp(w, mean, pull))


def _average_over_ranks(weight: Any, pull: float) -> None:
    """Average a DTensor sharded over experts or columns, or replicated; means are exchanged."""
    from torch.distributed.tensor import Partial

    if any(isinstance(placement, Partial) for placement in weight.placements):
        raise ValueError(
            f"The placements of weight must be shards or replicas, but are {weight.placements}"
        )
    local = weight.to_local()
    E = weight.shape[0]
    mean = local.sum(0, dtype=wide_dtype(local.dtype))
    for dim, placement in enumerate(weight.placements):
        # Shard, and _StridedShard, for which is_shard is False
        if getattr(placement, "dim", None) == 0:
            dist.all_reduce(mean, group=weight.device_mesh.get_group(dim))
    mean.div_(E)
    for expert in local:
        expert.copy_(torch.lerp(expert.to(mean.dtype), mean, pull))


class EWAMLP(nn.Module):
    """E stacked MLPs; the gate, router and top_k of `config` are not used.

    Padding counts as tokens. The partition is drawn from the device's default generator, so that it
    is repeated by a seed, and by gradient checkpointing that preserves the generator
    (preserve_rng_state) of the input's device.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ):
        super().__init__()
        self.config = config
        self.experts = Experts(config, dtype=dtype, device=device)

    def alpha(self) -> Tensor:
        """Return the mean's coefficients [E] float32: 1 / E each."""
        return uniform_mixture(self.config.num_experts, self.experts.down_proj.device)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`hidden_states` [..., H] -> [..., H]."""
        if not self.training:
            return self._mean(hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        idx = random_partition(x.shape[0], self.config.num_experts, x.device)[:, None]
        one = torch.ones(idx.shape, dtype=wide_dtype(x.dtype), device=x.device)
        return self.experts(x, idx, one).view_as(hidden_states)

    def _mean(self, x: Tensor) -> Tensor:
        """Run the mean expert, recomputed in each call, so that it is never stale."""
        alpha = self.alpha()
        up = self.experts.up_name
        mean = {}
        for name, stack in self.experts.named_parameters():
            weight = merge_experts(stack, alpha)
            mean[name] = weight.to(compute_dtype(weight))
        z = F.linear(x.to(compute_dtype(x)), mean[up], mean.get(f"{up}_bias"))
        h = self.experts.activation().apply(z)
        return F.linear(h, mean["down_proj"], mean.get("down_proj_bias"))


def random_partition(tokens: int, num_experts: int, device: torch.device | None = None) -> Tensor:
    """Return an expert for each token [T] int32, uniform over partitions into equal groups.

    The sizes of the groups differ by one token at most.
    """
    # also draw which experts get one more token; otherwise the last ones would never train with
    # fewer tokens than experts
    order = torch.randperm(num_experts, device=device)
    return order[torch.randperm(tokens, device=device) % num_experts].to(torch.int32)
