"""Text for a pass that scores a model: rows to ids, ids to batches, batches to a model's inputs.

load_for_scoring    a folder's model, its experts run by moe_runtime, and its tokenizer
load_with_batches   the same model, and a file's rows in batches
sample_batches      ids -> batches of samples, packed or one per row
model_inputs        batches up to a number of tokens, in step with other processes, as the
                    model's keyword arguments
"""

import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_runtime.config import check_positive, shown
from moe_runtime.hf.dropin import experts
from moe_runtime.hf.training import ranks
from moe_runtime.io import rows as data

# 32 samples of 4096 tokens: ESFT (arXiv 2407.01906), Sec. 3.3, and its script's seed
TOKENS = 131072
LENGTH = 4096
SEED = 5934875


def load_for_scoring(source: str | Path) -> tuple[Any, Any]:
    """Load a model in its own dtype, its experts run by moe_runtime, and its tokenizer."""
    tokenizer = ranks.load_tokenizer(source)
    model = ranks.load_model(source, "auto", ranks.state().device)
    experts.patch(model)
    return model, tokenizer


def load_with_batches(
    source: str | Path,
    rows: str | Path,
    *,
    n_tokens: int,
    max_length: int,
    packed: bool,
    batch_size: int,
    prompt: str,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[Any, Iterable[dict[str, torch.Tensor]]]:
    """Load a model as `load_for_scoring`, and this process's batches of the file `rows`, with
    `n_tokens` tokens over all processes.

    `progress` is called with the tokens done and all tokens, those of the file if it has fewer.
    Raises ValueError for an unreadable file and for tokens that are not in the vocabulary.
    """
    from moe_runtime.hf.training.trainer import check_ids

    check_positive("n_tokens", n_tokens)
    check_positive("max_length", max_length)
    check_positive("batch_size", batch_size)
    model, tokenizer = load_for_scoring(source)
    process = ranks.state()
    texts = data.read_rows(rows, answers=False).shuffle(seed=seed)
    ids = _sampled_ids(tokenizer, texts, prompt, n_tokens, n_tokens if packed else max_length)
    check_ids(model, map(max, ids), tokenizer)
    batches = sample_batches(
        ids,
        n_tokens,
        length=max_length,
        packed=packed,
        batch_size=batch_size,
        seed=seed,
        part=(process.process_index, process.num_processes),
    )
    if progress is not None:
        total = min(n_tokens, sum(map(len, ids)))
        batches = _reported(batches, total, process.num_processes, progress)
    return model, batches


def _sampled_ids(
    tokenizer: Any, rows: Iterable[Mapping], prompt: str, n_tokens: int, longest: int
) -> list[list[int]]:
    """Tokenize rows until they have `n_tokens`, each row cut at `longest`; the prompts' tokens
    count too.
    """
    ids: list[list[int]] = []
    left = n_tokens
    for row in data.token_ids(tokenizer, rows, longest, prompt):
        ids.append(row)
        left -= len(row)
        if left <= 0:
            break
    return ids


def _reported(
    batches: Iterable[dict[str, torch.Tensor]],
    n_tokens: int,
    processes: int,
    progress: Callable[[int, int], None],
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches, and report a batch's tokens over all processes when the next one is
    requested.
    """
    done = 0
    for batch in batches:
        yield batch
        done += processes * batch["input_ids"].numel()
        progress(min(done, n_tokens), n_tokens)


def sample_batches(
    rows: Iterable[Sequence[int] | Mapping[str, Any]],
    n_tokens: int = TOKENS,
    *,
    length: int = LENGTH,
    packed: bool = True,
    batch_size: int = 1,
    seed: int = SEED,
    part: tuple[int, int] = (0, 1),
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches for `score_experts` from tokenized rows, ids or rows with input_ids, in an
    order drawn by `seed`.

    `packed` joins the rows and cuts them into samples of `length` tokens, 32 of 4096 by default
    (the paper, Sec. 3.3); otherwise each row is a sample, cut at `length` (the released script).
    Stops at `n_tokens`, or where the rows end. With `part` = (rank, ranks) each process gets its
    own samples: score_experts(..., per_process=True).
    """
    check_positive("n_tokens", n_tokens)
    check_positive("length", length)
    check_positive("batch_size", batch_size)
    rows = rows if hasattr(rows, "__getitem__") else list(rows)
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    samples = []
    left = n_tokens
    for i in order:
        if left <= 0:
            break
        row = rows[i]
        ids = row["input_ids"] if isinstance(row, Mapping) else row
        sample = list(map(int, ids[: left if packed else min(length, left)]))
        if sample:
            samples.append(sample)
            left -= len(sample)
    if packed:
        flat = list(itertools.chain(*samples))
        samples = [flat[i : i + length] for i in range(0, len(flat), length)]
    rank, ranks = part
    return _padded(samples[rank::ranks], batch_size)


def _padded(samples: list[list[int]], batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield samples, ids of each, in batches for `score_experts`, padded on the right."""
    for first in range(0, len(samples), batch_size):
        part = samples[first : first + batch_size]
        longest = max(map(len, part))
        # any id will do: the mask keeps padding out of attention and of the scores
        batch = {"input_ids": torch.tensor([row + row[-1:] * (longest - len(row)) for row in part])}
        if min(map(len, part)) < longest:
            batch["attention_mask"] = torch.tensor(
                [[1] * len(row) + [0] * (longest - len(row)) for row in part]
            )
        yield batch


# with the tokens that count, [B, S] bool; None for all
Batches = Iterator[tuple[dict[str, Any], torch.Tensor | None]]


def world() -> tuple[int, int]:
    """Return the number of processes and this one's rank."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return (torch.distributed.get_world_size(), torch.distributed.get_rank())
    return (1, 0)


def model_inputs(
    model: nn.Module, dataloader: Iterable[Mapping | torch.Tensor], n_tokens: int
) -> Batches:
    """Yield the model's inputs on its device, and a mask of the tokens that count, `n_tokens` in
    total.
    """
    device = getattr(model, "device", None) or next(model.parameters()).device
    known = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    for batch, only in _in_step(model, _limited(dataloader, n_tokens)):
        inputs = {}
        for name, value in batch.items():
            # no loss is needed, and columns that the model does not accept would be errors
            if name != "labels" and (takes_all or name in known):
                inputs[name] = value.to(device) if isinstance(value, torch.Tensor) else value
        if "use_cache" in known:
            inputs["use_cache"] = False
        if "logits_to_keep" in known:
            inputs["logits_to_keep"] = 1
        yield inputs, only


def _limited(dataloader: Iterable[Mapping | torch.Tensor], n_tokens: int) -> Batches:
    """Yield batches until `n_tokens`; of the batch that exceeds it, the first tokens count."""
    left = n_tokens
    for batch in dataloader:
        batch = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        if not any(isinstance(value, torch.Tensor) for value in batch.values()):
            raise ValueError(
                "A batch must be input_ids [rows, tokens] or the model's arguments as tensors, "
                f"but got {shown(batch, 60)}. Tokenize the texts first"
            )
        mask = batch.get("attention_mask")
        if mask is None or mask.dim() != 2:
            mask = torch.ones(_shape(batch), dtype=torch.bool)
        mask = mask != 0
        tokens = int(mask.sum())
        only = None
        if tokens > left:
            only = mask & (mask.flatten().cumsum(0) <= left).view(mask.shape)
        yield batch, only
        left -= tokens
        if left <= 0:
            return


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    name = "input_ids" if "input_ids" in batch else "inputs_embeds"
    return batch[name].shape[:2]


def _in_step(model: nn.Module, batches: Batches) -> Batches:
    """Yield `batches`; for sharded or synchronized models, all processes make the same number of
    calls.
    """
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    is_sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    if world()[0] == 1 or not (is_ddp or is_sharded):
        yield from batches
        return
    device = next(model.parameters()).device
    batch, only = next(batches, (None, None))
    if not _everywhere(batch is not None, device, torch.distributed.ReduceOp.MIN):
        raise ValueError(
            "A process has no batch, but every process needs data, as the model is distributed "
            "over all of them"
        )
    following = (batch, only)
    while _everywhere(following is not None, device, torch.distributed.ReduceOp.MAX):
        if following is None:
            # the others need this process's part of the weights, whose results do not count
            only = torch.zeros(_shape(batch), dtype=torch.bool)
        else:
            batch, only = following
        yield batch, only
        following = next(batches, None)


def _everywhere(value: bool, device: torch.device, by) -> bool:
    flag = torch.tensor(int(value), device=device)
    torch.distributed.all_reduce(flag, by)
    return bool(flag)
