"""Report the routing of a model folder on a file of text: numbers per layer, a CSV file, a heat
map.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch

from moe_runtime.config import check_positive
from moe_runtime.hf.dropin.experts import patch
from moe_runtime.hf.dropin.stats import RouterStats, collect_router_stats
from moe_runtime.hf.models.folders import read_config
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.trainer import check_ids
from moe_runtime.io.console import bar
from moe_runtime.io.files import check_out_file
from moe_runtime.io.rows import read_rows, token_ids

FILES = ("router_load.csv", "router_load.png")


def router_report(
    source: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    tokens: int = 131072,
    max_length: int = 1024,
    batch_size: int = 4,
    overwrite: bool = False,
) -> RouterStats:
    """Route at most `tokens` tokens of `data` through the model in folder `source`, and write FILES
    to `out`.

    `data` is anything that `read_rows` reads; examples are truncated to max_length tokens. Runs on
    the GPU if there is one. Raises ValueError, with nothing written, for a folder or data that
    cannot be read, data without tokens or with unknown ones, a model without routers, and existing
    FILES unless `overwrite`.
    """
    for name, value in (("tokens", tokens), ("max_length", max_length), ("batch_size", batch_size)):
        check_positive(name, value)
    out = Path(out)
    for name in FILES:
        check_out_file(
            out / name,
            overwrite,
            [source, data],
        )
    read_config(source)  # raises an error that names what is wrong with the folder
    rows = read_rows(data, answers=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = ranks.load_tokenizer(source, "model")
    model = ranks.load_model(source, "auto", device, "model")
    patch(model)
    with bar("routing", "token") as update:
        batches = _batches(rows, tokenizer, tokens, max_length, batch_size, device)
        batches = _known(model, tokenizer, batches, tokens, update)
        stats = collect_router_stats(model, batches)
    if not stats.counts.any():
        raise ValueError(f"The examples of {str(data)!r} have no tokens. Pass data with text")
    out.mkdir(parents=True, exist_ok=True)
    for name, write in zip(FILES, (stats.to_csv, stats.heatmap)):
        write(out / name)
    return stats


def _known(model, tokenizer, batches: Iterator[dict], tokens: int, update) -> Iterator[dict]:
    """Yield the batches, and report how many of `tokens` are processed; raise ValueError for a
    token that is not in the model's vocabulary.
    """
    done = 0
    for batch in batches:
        check_ids(model, [int(batch["input_ids"].max())], tokenizer)
        yield batch
        done += int(batch["attention_mask"].sum())
        update(done, tokens)


def _batches(
    rows, tokenizer, tokens: int, max_length: int, batch_size: int, device: str
) -> Iterator[dict]:
    """Yield padded batches of `tokens` tokens in all; the last example is truncated accordingly."""
    sequences = token_ids(tokenizer, rows, max_length)
    while ids := list(itertools.islice(sequences, batch_size)):
        for i, row in enumerate(ids):
            ids[i] = row[:tokens]
            tokens -= len(ids[i])
        ids = [row for row in ids if row]
        length = max(map(len, ids))
        # any id works, as the mask excludes padding from attention and from the counts
        padded = torch.tensor([row + row[-1:] * (length - len(row)) for row in ids], device=device)
        mask = torch.tensor(
            [[1] * len(row) + [0] * (length - len(row)) for row in ids], device=device
        )
        yield {"input_ids": padded, "attention_mask": mask, "use_cache": False}
        if tokens <= 0:
            return
