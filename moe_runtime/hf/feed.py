"""Batches on their way into a model that is only watched: to a number of tokens, and in step with other processes."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

Batches = Iterator[tuple[dict[str, Any], torch.Tensor | None]]  # and which tokens count, [B, S] bool; None for all


def ranks() -> tuple[int, int]:
    """The number of processes and this one's rank."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_world_size(), torch.distributed.get_rank()) if there else (1, 0)


def counted(dataloader: Iterable[Mapping | torch.Tensor], n_tokens: int) -> Batches:
    """Yield batches until `n_tokens`; of the one that goes beyond, the first tokens count."""
    left = n_tokens
    for batch in dataloader:
        batch = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        mask = batch.get("attention_mask")
        if mask is None or mask.dim() != 2:
            mask = torch.ones(_shape(batch), dtype=torch.bool)
        mask = mask != 0
        tokens = int(mask.sum())
        yield batch, None if tokens <= left else mask & (mask.flatten().cumsum(0) <= left).view(mask.shape)
        left -= tokens
        if left <= 0:
            return


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    first = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(first, torch.Tensor) or first.dim() < 2:
        raise ValueError(f"a batch has {', '.join(batch)}; want input_ids or inputs_embeds, [B, S] and more")
    return first.shape[:2]


def in_step(model: nn.Module, batches: Batches) -> Batches:
    """Yield `batches`; in as many calls as the other processes' where the model calls for them."""
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    if ranks()[0] == 1 or not (is_ddp or any(hasattr(p, "full_tensor") for p in model.parameters())):
        yield from batches
        return
    device = next(model.parameters()).device
    batch, only = next(batches, (None, None))
    if not _everywhere(batch is not None, device, torch.distributed.ReduceOp.MIN):
        raise ValueError("a process has no batch, the model is split over all of them; want data in every process")
    own = True
    while _everywhere(own, device, torch.distributed.ReduceOp.MAX):
        # the others need this process's part of the weights; what it computes for them does not count
        yield batch, only if own else torch.zeros(_shape(batch), dtype=torch.bool)
        if own:
            following = next(batches, None)
            own = following is not None
            batch, only = following or (batch, None)


def _everywhere(value: bool, device: torch.device, by) -> bool:
    flag = torch.tensor(int(value), device=device)
    torch.distributed.all_reduce(flag, by)
    return bool(flag)


def arguments(model: nn.Module, batches: Batches) -> Batches:
    """Turn batches into what the model's forward takes, on its device."""
    device = getattr(model, "device", None) or next(model.parameters()).device
    known = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    extra = {name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if name in known}
    for batch, only in batches:
        moved = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
            # a loss is not wanted, nor are columns that the model does not know
            if name != "labels" and (takes_all or name in known)
        }
        yield moved | extra, only
