"""Tokens to experts that live on other ranks, and back: expert parallelism by all-to-all.

Rank r of n holds the experts e with e // (E / n) = r, so slots in expert order are in the order of their owners:

    there[i] = x[row_token[i]]                                  i over this rank's slots, sent to the owner of their expert
    out[t] = sum_k topk_weight[t, k] back[slot_row[t * K + k]]  back = what the owners' experts made of `there`

The weights stay at home, in float32. Every slot on another rank costs its row of H there and one back, and as much again for
the gradients: T K H (n - 1) / n elements a rank and way where slots spread evenly. The host waits once a call, for the
2 n split sizes that an all-to-all wants there. All ranks must call together, forward and backward; a rank or an expert
without tokens takes part with nothing and gets a gradient of zeros.

An expert sees the tokens of all n ranks, so its gradient is the sum of what theirs would be under data parallelism, where
engines average: `local_parts` divides by n, or a step would be n times as long for experts as for all else.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_runtime.ops.combine import combine, gather_rows
from moe_runtime.ops.dispatch import dispatch, live_weights
from moe_runtime.ops.library import wide_dtype

GRADIENTS = ("mean", "sum")
GRADIENTS_OF = "moe_runtime_expert_gradients"  # attribute of an experts module: one of them
# x [N, H], ids [N, K], weights [N, K] float32 -> out [N, H], expert_offsets
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Owners(NamedTuple):
    """Which ranks hold the experts: equal shares, in the order of the group's ranks."""

    group: dist.ProcessGroup
    num_experts: int  # of all ranks


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor; without the half second that importing the class takes."""
    return hasattr(tensor, "placements")


def local_parts(tensors: list[torch.Tensor | None], gradients: str = "mean") -> tuple[list[torch.Tensor | None], Owners | None]:
    """Return this rank's experts of the stacks `tensors` [E, ...], and who has the others; None where nothing is sharded.

    Stacks are DTensors with Shard(0) on one dimension of their mesh and Replicate on the others. Their gradients are
    averaged over all ranks of the mesh, or summed with gradients="sum". Raises ValueError for other placements.
    """
    spread = [tensor for tensor in tensors if tensor is not None and is_distributed(tensor)]
    if not spread:
        return tensors, None
    mesh, placements = spread[0].device_mesh, tuple(spread[0].placements)
    shards = [dim for dim, placement in enumerate(placements) if placement.is_shard(0)]
    others = [dim for dim in range(mesh.ndim) if dim not in shards]
    if len(shards) > 1 or not all(placements[dim].is_replicate() for dim in others):
        raise ValueError(f"experts are placed as {placements}; want Shard(0) on one dimension, Replicate on the others")
    alike = all(tensor.device_mesh == mesh and tuple(tensor.placements) == placements for tensor in spread)
    if not alike or len(spread) < sum(tensor is not None for tensor in tensors):
        raise ValueError("the stacks of one layer are placed differently; want all of them sharded alike")
    local = [None if tensor is None else tensor.to_local() for tensor in tensors]
    if not shards:
        return local, None
    E, n = spread[0].shape[0], mesh.size(shards[0])
    if E % n:
        raise ValueError(f"num_experts is {E}, on {n} ranks; want a multiple of the ranks")
    groups = [mesh.get_group(dim) for dim in others if mesh.size(dim) > 1]
    scale = 1 / mesh.size() if gradients == "mean" else 1.0
    local = [None if part is None else _Reduced.apply(part, groups, scale) for part in local]
    return local, Owners(mesh.get_group(shards[0]), E)


class _Reduced(torch.autograd.Function):
    """The identity; its gradient is summed over replicas and scaled."""

    @staticmethod
    def forward(ctx, part, groups, scale):
        ctx.groups, ctx.scale = groups, scale
        return part.view_as(part)

    @staticmethod
    def backward(ctx, dpart):
        dpart = dpart * ctx.scale  # a copy even for 1: others may hold what came in
        for group in ctx.groups:
            dist.all_reduce(dpart, group=group)
        return dpart, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx, drows):
        return _exchange(drows, ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(rows, send, receive, group):
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received


def all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send the first send[0] of `rows` [sum(send), ...] to rank 0 and so on -> [sum(receive), ...] in the senders' order.

    Differentiable: the gradient takes the same way back.
    """
    return _AllToAll.apply(rows, send, receive, group)


def _split_sizes(sent: torch.Tensor, received: torch.Tensor) -> tuple[list[int], list[int]]:
    """Sum the counts [n, E / n] per rank, on the host, in one wait."""
    return tuple(torch.stack((sent.sum(1), received.sum(1))).tolist())


# the split sizes are numbers that a graph cannot hold; torch.compiler.disable would import the compiler here, for a second
@torch._disable_dynamo
def run_at_owners(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weight: torch.Tensor, owners: Owners, run: Run
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run x [T, H] through the experts topk_idx [T, K] of all ranks -> out [T, H], this rank's expert_offsets [E + 1].

    `run` computes rows through this rank's experts by their local ids. Slots with ids outside 0..E-1 go nowhere and
    contribute nothing. Differentiable in x, topk_weight and in what `run` is.
    """
    group, E = owners
    n = dist.get_world_size(group)
    expert_offsets, row_token, _, slot_row = dispatch(topk_idx, E)
    sent = expert_offsets.diff().view(n, E // n)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    send, receive = _split_sizes(sent, received)
    rows, dropped = gather_rows(x, row_token, slot_row), topk_idx.numel() - sum(send)
    if dropped:  # they lie behind the last expert
        rows = rows[: sum(send)]
        topk_weight = live_weights(topk_weight, topk_idx, E)
    rows = all_to_all(rows, send, receive, group)
    experts = torch.arange(E // n, device=x.device).repeat(n)  # in the order of `received`
    experts = experts.repeat_interleave(received.flatten(), output_size=sum(receive))
    ones = torch.ones(sum(receive), 1, dtype=wide_dtype(x.dtype), device=x.device)
    y, _ = run(rows, experts[:, None], ones)
    y = all_to_all(y, receive, send, group)
    return combine(F.pad(y, (0, 0, 0, dropped)) if dropped else y, topk_weight, slot_row), expert_offsets
