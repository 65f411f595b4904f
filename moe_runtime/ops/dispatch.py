"""Dispatch tokens to experts: a stable counting sort of the T * K slots by expert.

Slot t * K + k holds expert topk_idx[t, k]. Rows are the slots in expert order; slots of one expert
keep their order:

    row_slot[r] = slot of row r,  row_token[r] = row_slot[r] // K,  slot_row[s] = row of slot s
    rows of expert e: expert_offsets[e] <= r < expert_offsets[e + 1]

A slot with an id outside 0..E-1 (-1 by convention) is dropped: it is sorted after all experts, and
no expert owns its row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime import backends
from moe_runtime.ops import cuda_kernels
from moe_runtime.ops.library import define, kind, register

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class Dispatch(NamedTuple):
    """Index arrays between slots and rows, named <from>_<to>."""

    expert_offsets: Tensor  # [E + 1] int32
    row_token: Tensor  # [R] int32
    row_slot: Tensor  # [R] int32
    slot_row: Tensor  # [R] int32


def dispatch(topk_idx: Tensor, num_experts: int, backend: str | None = None) -> Dispatch:
    """Sort the slots of `topk_idx` [T, K] of integers by expert.

    Raises ValueError for a bad shape or dtype.
    """
    if topk_idx.dim() != 2 or topk_idx.dtype not in INTEGERS or num_experts < 1:
        raise ValueError(
            "Expected topk_idx [T, K] of integers and num_experts of at least 1, but topk_idx is "
            f"{kind(topk_idx)}, num_experts is {num_experts}"
        )
    chosen = backends.pick("dispatch", topk_idx, backend, cuda_fits=cuda_kernels.fits(num_experts))
    if chosen == "cuda":
        cuda_kernels.check_experts(num_experts)
    return Dispatch(*torch.ops.moe_runtime.dispatch(topk_idx, num_experts, chosen))


define(
    "dispatch(Tensor topk_idx, int num_experts, str backend) -> (Tensor, Tensor, Tensor, Tensor)"
)


def sort_slots(topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return expert_offsets [E + 1] int32 and row_slot [R] int64."""
    # a narrower dtype might not hold num_experts, the marker of a dropped slot
    expert = topk_idx.reshape(-1).long()
    narrow = torch.int16 if num_experts < 32767 else torch.int32  # 16 bits halve the radix sort
    is_dropped = (expert < 0) | (expert >= num_experts)
    expert = expert.masked_fill(is_dropped, num_experts).to(narrow)
    row_slot = _sorted_on_cpu(expert) if expert.is_cpu else expert.argsort(stable=True)
    experts = torch.arange(num_experts + 1, dtype=narrow, device=expert.device)
    return torch.searchsorted(expert[row_slot], experts, out_int32=True), row_slot


def _sorted_on_cpu(keys: Tensor) -> Tensor:
    """Return the stable order of `keys` [R]; up to 64k numpy takes 0.2 to 0.5 of torch's time."""
    return torch.from_numpy(keys.numpy().argsort(kind="stable"))


def invert(row_slot: Tensor) -> Tensor:
    """Return slot_row, the inverse permutation of `row_slot` [R], in its dtype."""
    rows = torch.arange(row_slot.numel(), device=row_slot.device)
    return torch.empty_like(row_slot).scatter_(0, row_slot, rows)


def live_weights(topk_weight: Tensor, topk_idx: Tensor, num_experts: int) -> Tensor:
    """Return `topk_weight` [T, K] with zeros for dropped slots, whose weights may be arbitrary."""
    return topk_weight.masked_fill((topk_idx < 0) | (topk_idx >= num_experts), 0)


def _dispatch(topk_idx: Tensor, num_experts: int, backend: str) -> tuple:
    if backend == "triton":
        from moe_runtime.kernels.dispatch import dispatch_forward

        return dispatch_forward(topk_idx, num_experts)
    if backend == "cuda":
        return cuda_kernels.dispatch_forward(topk_idx, num_experts)
    offsets, row_slot = sort_slots(topk_idx, num_experts)
    row_token = row_slot // max(topk_idx.shape[1], 1)
    return offsets, row_token.int(), row_slot.int(), invert(row_slot).int()


def _fake(topk_idx: Tensor, num_experts: int, backend: str) -> tuple:
    R = topk_idx.numel()
    return tuple(topk_idx.new_empty(n, dtype=torch.int32) for n in (num_experts + 1, R, R, R))


register("dispatch", _dispatch, _fake)
