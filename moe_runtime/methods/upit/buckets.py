"""Perplexities of experts on seed data, and buckets of examples, one per expert.

UpIT (arXiv 2410.01610), Algorithm 3:
    D_s     = 1 % of the data, at random
    p_i^j   = perplexity of expert j on row i = exp(mean over the row's tokens of -log p)
    row i, in order, goes to the expert with the lowest p_i^j among those whose bucket holds fewer
    than C rows

E_j are the expert folders, C is `capacity`. The paper leaves open which tokens count (`tokens`:
those of the response, or all), C (ceil(|D_s| / n)) and ties (the expert that comes first).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from moe_runtime.config import check_choice, check_number, check_positive
from moe_runtime.hf.training import ranks
from moe_runtime.io.files import check_paths
from moe_runtime.io.rows import Dataset
from moe_runtime.methods.upit import models
from moe_runtime.methods.upit.experts import open_expert

TOKENS = ("response", "all")


class Buckets(NamedTuple):
    """The seed data, distributed over the experts."""

    name: str
    folder: Path
    rows: int  # of the seed data
    buckets: list[list[int]]  # per expert: its rows of the seed data
    perplexity: list[list[float]]  # [expert][row]
    total_seconds: float


def seed_set(rows: Dataset, share: float = 0.01, *, at_least: int = 1, seed: int = 0) -> Dataset:
    """Draw the seed data, a random share of the examples (UpIT, Algorithm 3, line 2).

    Args:
        rows: A datasets.Dataset.
        share: Share of the examples, above 0 and at most 1.
        at_least: Smallest number of examples.
        seed: Of the draw.

    Returns:
        The drawn examples, in random order.

    Raises:
        ValueError: If there are fewer examples than asked for.
    """
    check_number("share", share, positive=True)
    if not (hasattr(rows, "shuffle") and hasattr(rows, "select")):
        raise ValueError(
            f"rows must be a datasets.Dataset, but is a {type(rows).__name__}. Pass "
            "Dataset.from_list(rows)"
        )
    count = max(round(share * len(rows)), at_least)
    if share > 1 or count > len(rows):
        raise ValueError(
            f"share ({share}) and at_least ({at_least}) must select at most the {len(rows)} "
            "examples of the data"
        )
    return rows.shuffle(seed=seed).select(range(count))


def perplexities(
    experts: Sequence[str | Path],
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    base: str | Path | None = None,
    tokens: str = "response",
    batch_size: int = 8,
) -> torch.Tensor:
    """Compute the perplexity of each expert on each example (UpIT, Algorithm 3).

    Every process of a run must call this. One model is in memory at a time.

    Args:
        experts: The experts' folders, n of them.
        rows: N tokenized examples, with input_ids and labels.
        tokenizer: Of the base.
        base: The dense model of adapters; None is the recorded one.
        tokens: "response" counts the tokens with a label, "all" every token but an example's first.
        batch_size: Examples per forward pass.

    Returns:
        [n, N] float64.

    Raises:
        ValueError: If an example has no token that counts.
    """
    check_choice("tokens", tokens, TOKENS)
    check_positive("batch_size", batch_size)
    check_paths("experts", experts)
    models.check_labels(rows, tokens == "all")
    every_token = tokens == "all"
    losses = []
    for path in experts:
        expert = open_expert(path, base)
        model = models.load(expert) if expert.kind == "ffn" else models.load_adapter(expert)
        losses.append(models.losses(model, rows, tokenizer, batch_size, every_token))
        del model
        ranks.free_memory()
    return torch.tensor(losses, dtype=torch.float64).exp()


def fill_buckets(perplexity: torch.Tensor, capacity: int | None = None) -> list[list[int]]:
    """Assign each example to the best expert whose bucket has room (UpIT, Algorithm 3).

    Args:
        perplexity: [n, N], of `perplexities`; the lowest is the best.
        capacity: Examples in a bucket at most; None is ceil(N / n). An example is dropped once all
            buckets are full.

    Returns:
        For each of the n experts the positions of its examples.

    Raises:
        ValueError: If a perplexity is NaN.
    """
    perplexity = torch.as_tensor(perplexity, dtype=torch.float64)
    bad = perplexity.isnan().nonzero().tolist()
    if bad:
        raise ValueError(
            f"The perplexity of expert {bad[0][0]} is NaN on row {bad[0][1]}. Remove the expert, "
            "or the row if it is NaN for all"
        )
    n, N = perplexity.shape
    capacity = math.ceil(N / n) if capacity is None else capacity
    check_positive("capacity", capacity)
    buckets: list[list[int]] = [[] for _ in range(n)]
    for row, order in enumerate(perplexity.argsort(dim=0, stable=True).t().tolist()):
        for expert in order:
            if len(buckets[expert]) < capacity:
                buckets[expert].append(row)
                break
    return buckets
