"""What a model says of each row of a data set, its loss above all; the processes of a run share the rows."""

import math
from collections.abc import Callable, Sequence

import torch
from torch.utils.data import DataLoader

from moe_runtime.hf.adapters import needs_autocast
from moe_runtime.hf.ranks import gather, state
from moe_runtime.hf.tokenizer import pair_collator
from moe_runtime.hf.vocabulary import check_rows
from moe_runtime.progress import bar


@torch.no_grad()
def each_row(
    model,
    rows,
    take: Callable,
    *,
    collator: Callable,
    batch_size: int = 32,
    bf16: bool = False,
    by_length: bool = False,
    device: torch.device | None = None,
) -> list:
    """Return what `take(model, batch)`, a list of a batch's rows, says of each row, in the rows' order and in eval mode.

    Every process must call: each takes its part of the rows, all return the whole. `bf16` computes under autocast,
    `by_length` puts rows of about one length into a batch, `device` is that of the batches, the process's unless given.
    Raises ValueError for a token that the model does not have.
    """
    from accelerate.utils import send_to_device

    check_rows(model, rows, getattr(collator, "tokenizer", None))
    rank, ranks, device = state().process_index, state().num_processes, device or state().device
    order = range(len(rows))
    if by_length:
        lengths = [len(ids) for ids in rows["input_ids"]]
        order = sorted(order, key=lambda place: -lengths[place])
    # as many for every rank: the forward pass of a split model waits for the others
    places = [order[min(rank + i * ranks, len(rows) - 1)] for i in range(math.ceil(len(rows) / ranks))]
    training, bf16 = model.training, bf16 or needs_autocast(model)
    model.eval()
    found = []
    try:
        with bar("judging", "row") as update:
            for batch in DataLoader(rows.select(places), batch_size=batch_size, collate_fn=collator):
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                    found += take(model, send_to_device(batch, device))
                update(min(len(found) * ranks, len(rows)), len(rows))
    finally:
        model.train(training)
    by_place = dict(gather(list(zip(places, found, strict=True))))
    return [by_place[place] for place in range(len(rows))]


def row_losses(model, rows, tokenizer, batch_size: int = 32, bf16: bool = False) -> tuple[list[float], list[int]]:
    """Return the mean loss per label token of each row, without auxiliary losses, and its number of label tokens.

    Every process must call, as of `each_row`.
    """

    def take(model, batch: dict) -> list[tuple[float, int]]:
        labels = batch.pop("labels")
        return token_sums(model(**batch, use_cache=False).logits, labels)

    return means_of(each_row(model, rows, take, collator=pair_collator(tokenizer), batch_size=batch_size, bf16=bf16))


def token_sums(logits: torch.Tensor, labels: torch.Tensor) -> list[tuple[float, int]]:
    """Return the sum of the label tokens' losses of each row, and their number; `logits` [B, S, V], `labels` [B, S]."""
    logits, labels = logits[:, :-1].float().transpose(1, 2), labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return sums_of(losses, labels)


def sums_of(losses: torch.Tensor, labels: torch.Tensor) -> list[tuple[float, int]]:
    """Return, for each row of `losses` [B, n], their sum and the number of its labels [B, n] that are not -100."""
    return list(zip(losses.double().sum(1).tolist(), (labels != -100).sum(1).tolist(), strict=True))


def means_of(found: Sequence[tuple[float, int]]) -> tuple[list[float], list[int]]:
    """Return each row's mean, and its number of label tokens."""
    sums, tokens = zip(*found, strict=True)
    return [total / count for total, count in zip(sums, tokens, strict=True)], list(tokens)


def mean_loss(losses: Sequence[float], tokens: Sequence[int]) -> float:
    """Return the mean over all label tokens of `row_losses`' numbers."""
    return sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
