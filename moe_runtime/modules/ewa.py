"""EWA (arXiv 2308.06093), a baseline of XFT: experts without a router that are drawn towards their mean after each step.

`EWAMLP`, the layer: while training, a random equal partition of the batch's tokens over the experts, weight 1; in eval mode
the expert whose weights are the mean of theirs.

`average_experts_`, one step of averaging:  W_i <- (1 - b) W_i + b / (E - 1) sum_{j != i} W_j
with the mean m = mean_j W_j:               W_i <- W_i + c (m - W_i),  c = b E / (E - 1)
So the mean stays, and what distinguishes an expert from it shrinks by 1 - c; b = (E - 1) / E makes all experts equal.

m is computed as W_0 + sum_j (W_j - W_0) / E, and torch.lerp switches its formula at c = 1/2: equal experts stay what they are
and c = 1 makes them equal, to the last bit. Of a DTensor m is the plain sum over E: equal to float32 rounding.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moe_runtime.config import MoEConfig, check_fraction
from moe_runtime.modules.moe import Experts
from moe_runtime.ops.library import compute_dtype, wide_dtype
from moe_runtime.ops.merging import block_size, merge_experts, uniform_mixture


@torch.no_grad()
def average_experts_(weight: torch.Tensor, share: float) -> torch.Tensor:
    """Take one averaging step on `weight` [E, ...], in place, in float32; returns it. No gradient passes.

    `share` is b, from 0 to 1. A DTensor's experts are averaged over all ranks. Raises ValueError for another share, experts
    that overlap in memory and stacks that DeepSpeed ZeRO-3 has partitioned.
    """
    check_share(share)
    if getattr(weight, "ds_id", None) is not None and weight.numel() != getattr(weight, "ds_numel", weight.numel()):
        got = f"weight is {tuple(weight.shape)} of DeepSpeed's {tuple(weight.ds_shape)}"
        raise ValueError(f"{got}; want the whole stack; train with FSDP2 or DDP in place of ZeRO-3")
    E = weight.shape[0]
    pull = 0.0 if E == 1 else share * E / (E - 1)
    if pull == 0.0:
        return weight
    if hasattr(weight, "to_local"):
        _average_over_ranks(weight, pull)
        return weight
    row = weight[0]
    if weight.stride(0) == 0 or (row.is_contiguous() and weight.stride(0) < row.numel()):
        raise ValueError(f"weight's strides are {weight.stride()}; want experts of their own memory; pass a clone")
    stack = weight if row.is_contiguous() else weight.contiguous()
    _average_by_blocks(stack.view(E, row.numel()), pull)
    if stack is not weight:
        weight.copy_(stack)
    return weight


def check_share(share: float) -> None:
    """Raise ValueError unless `share` is a number from 0 to 1."""
    check_fraction("share", share, "how much of an expert the others give")


def _average_by_blocks(rows: torch.Tensor, pull: float) -> None:
    """Average `rows` [E, P], a block of all experts at a time: no float32 copy of the stack."""
    E, P = rows.shape
    # a compiler makes blocks of its own
    step = P if torch.compiler.is_compiling() else max(block_size(rows[0]) // E, 1)
    for start in range(0, P, step):
        part = rows[:, start : start + step]
        w = part.to(wide_dtype(part.dtype))
        mean = w[0] + (w - w[0]).sum(0) / E
        part.copy_(torch.lerp(w, mean, pull))


def _average_over_ranks(weight, pull: float) -> None:
    """Average a DTensor: each rank has some of the experts, or some columns of all, or all; only means are exchanged."""
    from torch.distributed.tensor import Partial

    if any(isinstance(placement, Partial) for placement in weight.placements):
        raise ValueError(f"weight's placements are {weight.placements}; want shards or replicas")
    local, E = weight.to_local(), weight.shape[0]
    mean = local.sum(0, dtype=wide_dtype(local.dtype))
    for dim, placement in enumerate(weight.placements):
        if getattr(placement, "dim", None) == 0:  # Shard, and _StridedShard, which is none to is_shard
            dist.all_reduce(mean, group=weight.device_mesh.get_group(dim))
    mean.div_(E)
    for expert in local:
        expert.copy_(torch.lerp(expert.to(mean.dtype), mean, pull))


class EWAMLP(nn.Module):
    """E stacked MLPs; `config`'s gate, router and top_k play no part.

    Padding counts as tokens. The partition comes from the device's default generator, so that a seed repeats it, and so
    does gradient checkpointing that preserves the generator (preserve_rng_state) of the device that the input comes from.
    """

    def __init__(self, config: MoEConfig, *, dtype=None, device=None):
        super().__init__()
        self.config = config
        self.experts = Experts(config, dtype=dtype, device=device)

    def alpha(self) -> torch.Tensor:
        """Return the mean's coefficients [E] float32: 1 / E each."""
        return uniform_mixture(self.config.num_experts, self.experts.down_proj.device)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` [..., H] -> [..., H]."""
        if not self.training:
            return self._mean(hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        idx = random_partition(x.shape[0], self.config.num_experts, x.device)[:, None]
        one = torch.ones(idx.shape, dtype=wide_dtype(x.dtype), device=x.device)
        return self.experts(x, idx, one).view_as(hidden_states)

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Run the mean expert, made anew in each call: nothing is kept that an optimizer's step would make stale."""
        alpha, up = self.alpha(), self.experts.up_name
        mean = {name: merge_experts(weight, alpha) for name, weight in self.experts.named_parameters()}
        mean = {name: weight.to(compute_dtype(weight)) for name, weight in mean.items()}
        z = F.linear(x.to(compute_dtype(x)), mean[up], mean.get(f"{up}_bias"))
        h = self.experts.activation().apply(z)
        return F.linear(h, mean["down_proj"], mean.get("down_proj_bias"))

    def extra_repr(self) -> str:
        """Show the sizes in print(model)."""
        c = self.config
        return f"num_experts={c.num_experts}, hidden_size={c.hidden_size}, intermediate_size={c.intermediate_size}"


def random_partition(tokens: int, num_experts: int, device=None) -> torch.Tensor:
    """Return an expert for each token [T] int32, every partition into groups equal but for one token as likely as another."""
    # which experts get a token more is drawn too, or with fewer tokens than experts the last ones would never train
    order = torch.randperm(num_experts, device=device)
    return order[torch.randperm(tokens, device=device) % num_experts].to(torch.int32)
