"""Expert parallelism by all-to-all: send tokens to experts on other ranks, and the results back.

Rank r of n holds the experts e with e // (E / n) = r, so slots in expert order are also in the
order of their owners:

    there[i] = x[row_token[i]],  i over this rank's slots, sent to the owner of their expert
    back     = outputs of the owners' experts for `there`
    out[t]   = sum_k topk_weight[t, k] back[slot_row[t * K + k]]

The routing weights stay on the sender, in float32. Every slot on another rank sends a row of H
there and back, and the same for the gradients: T K H (n - 1) / n elements per rank and direction if
slots are evenly distributed. The host synchronizes once per call, for the 2 n split sizes of the
all-to-all. All ranks must call together, forward and backward; a rank or an expert without tokens
takes part with empty buffers and gets zero gradients.

An expert processes the tokens of all n ranks, so its gradient is the sum of those under data
parallelism, where engines average. `local_parts` therefore divides it by n, or the steps of experts
would be n times as large as those of other parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.ops._torch_private import disable_dynamo
from moe_runtime.ops.combine import combine, gather_rows
from moe_runtime.ops.dispatch import dispatch, live_weights
from moe_runtime.ops.library import wide_dtype

GRADIENTS = ("mean", "sum")
GRADIENTS_OF = "moe_runtime_expert_gradients"  # attribute of an experts module: "mean" or "sum"
# x [N, H], ids [N, K], weights [N, K] float32 -> out [N, H], expert_offsets
Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Owners(NamedTuple):
    """The ranks that hold the experts, in equal shares and in the order of the group's ranks."""

    group: dist.ProcessGroup
    num_experts: int  # over all ranks


def is_distributed(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, whose class takes half a second to import."""
    return hasattr(tensor, "placements")


def local_parts(
    tensors: list[Tensor | None], gradients: str = "mean"
) -> tuple[list[Tensor | None], Owners | None]:
    """Return this rank's experts of the stacks `tensors` [E, ...], and the owners of all.

    The owners are None if nothing is sharded. Stacks are DTensors with Shard(0) on one dimension of
    their mesh and Replicate on the others. Their gradients are averaged over all ranks of the mesh,
    or summed with gradients="sum". Raises ValueError for other placements.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    spread: list[Any] = [tensor for tensor in given if is_distributed(tensor)]
    if not spread:
        return tensors, None
    mesh = spread[0].device_mesh
    placements = tuple(spread[0].placements)
    shards = [dim for dim, placement in enumerate(placements) if placement.is_shard(0)]
    others = [dim for dim in range(mesh.ndim) if dim not in shards]
    if len(shards) > 1 or not all(placements[dim].is_replicate() for dim in others):
        raise ValueError(
            "Experts must be Shard(0) on one dimension and Replicate on the others, but are "
            f"{placements}"
        )
    alike = all(
        tensor.device_mesh == mesh and tuple(tensor.placements) == placements for tensor in spread
    )
    if not alike or len(spread) < len(given):
        raise ValueError(
            "All stacks of a layer must have the same placements, but they are placed differently"
        )
    owners = None
    groups = []
    scale = 1.0
    if shards:
        E = spread[0].shape[0]
        n = mesh.size(shards[0])
        if E % n:
            raise ValueError(f"Expected num_experts to be divisible by the {n} ranks, but got {E}")
        owners = Owners(mesh.get_group(shards[0]), E)
        groups = [mesh.get_group(dim) for dim in others if mesh.size(dim) > 1]
        if gradients == "mean":
            scale = 1 / mesh.size()
    local: list[Tensor | None] = []
    for tensor in tensors:
        part: Any = None
        if tensor is not None:
            part = cast(Any, tensor).to_local()
            if shards:
                part = _Reduced.apply(part, groups, scale)
        local.append(part)
    return local, owners


class _Reduced(torch.autograd.Function):
    """Identity whose gradient is summed over replicas and scaled."""

    @staticmethod
    def forward(ctx: Any, part: Any, groups: list, scale: Tensor | None) -> Tensor:
        ctx.groups = groups
        ctx.scale = scale
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, dpart: Tensor) -> tuple:
        dpart = dpart * ctx.scale  # a copy even for 1, as the incoming gradient may be shared
        for group in ctx.groups:
            dist.all_reduce(dpart, group=group)
        return dpart, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send: list[int],
        receive: list[int],
        group: Any,
    ) -> Tensor:
        ctx.send = send
        ctx.receive = receive
        ctx.group = group
        return _exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple:
        return _exchange(drows, ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(
        received,
        rows.contiguous(),
        receive,
        send,
        group=group,
    )
    return received


def all_to_all(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send the first send[0] of `rows` to rank 0 and so on -> [sum(receive), ...].

    The result is in the senders' order. Differentiable: the gradient is sent back by the reverse
    all-to-all.
    """
    return _AllToAll.apply(rows, send, receive, group)


def _split_sizes(sent: Tensor, received: Tensor) -> tuple[list[int], list[int]]:
    """Sum the counts [n, E / n] per rank on the host, with a single synchronization."""
    send, receive = torch.stack((sent.sum(1), received.sum(1))).tolist()
    return send, receive


# the split sizes are data-dependent, which a graph cannot hold; torch.compiler.disable would import
# the compiler (one second)
@disable_dynamo
def run_at_owners(
    x: Tensor,
    topk_idx: Tensor,
    topk_weight: Tensor,
    owners: Owners,
    run: Run,
) -> tuple[Tensor, Tensor]:
    """Run x [T, H] through the experts topk_idx [T, K] of all ranks -> out [T, H], expert_offsets.

    The offsets [E + 1] are those of this rank's slots. `run` computes rows with this rank's experts
    by their local ids. Slots with ids outside 0..E-1 are not sent and contribute nothing.
    Differentiable in x, topk_weight and in whatever `run` is.
    """
    group, E = owners
    n = dist.get_world_size(group)
    expert_offsets, row_token, _, slot_row = dispatch(topk_idx, E)
    sent = expert_offsets.diff().view(n, E // n)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    send, receive = _split_sizes(sent, received)
    rows = gather_rows(x, row_token, slot_row)
    dropped = topk_idx.numel() - sum(send)
    if dropped:  # dropped slots are sorted after the last expert
        rows = rows[: sum(send)]
        topk_weight = live_weights(topk_weight, topk_idx, E)
    rows = all_to_all(rows, send, receive, group)
    experts = torch.arange(E // n, device=x.device).repeat(n)  # in the order of `received`
    experts = experts.repeat_interleave(received.flatten(), output_size=sum(receive))
    ones = torch.ones(sum(receive), 1, dtype=wide_dtype(x.dtype), device=x.device)
    y, _ = run(rows, experts[:, None], ones)
    y = all_to_all(y, receive, send, group)
    if dropped:
        y = F.pad(y, (0, 0, 0, dropped))
    return combine(y, topk_weight, slot_row), expert_offsets
