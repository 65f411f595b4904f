"""UpIT's experts in memory: whole models and PEFT adapters of a base, and their losses per row.

An expert here is an `Expert` of `methods.upit.experts.open_expert`: kind "ffn" or "lora", a path, a
base.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from moe_runtime.hf.training import fit, ranks
from moe_runtime.hf.training.fit import pair_collator
from moe_runtime.io.rows import require
from moe_runtime.methods.lora.adapters import check_patterns
from moe_runtime.methods.lora.baseline import quiet_peft
from moe_runtime.methods.upit.experts import Expert

DEFAULT = "default"  # the one adapter that peft saves at the top of a folder


def load(expert: Expert, *, dtype: str | None = None) -> nn.Module:
    """Load an expert of kind "ffn" as a dense model, by default in its MLPs' dtype."""
    return ranks.load_model(expert.path, dtype or dtype_of(expert), ranks.state().device)


def load_adapter(expert: Expert, *, dtype: str | None = None, trainable: bool = False) -> nn.Module:
    """Return a PEFT model of the expert's base with its adapter.

    By default in the base's dtype; an adapter in a narrower dtype becomes float32, as PEFT does.
    """
    check_patterns(expert.path)
    model = load_base([expert], dtype)
    with quiet_peft():
        adapted = require("peft").PeftModel.from_pretrained(
            model, str(expert.path), is_trainable=trainable
        )
    # the recorded base may have moved
    adapted.peft_config[DEFAULT].base_model_name_or_path = str(expert.base)
    return adapted


def load_base(experts: Sequence, dtype: str | None = None, device: str | None = None) -> nn.Module:
    """Load the adapters' dense model, by default in its own dtype; raises ValueError for several
    bases.
    """
    base = base_of(experts)
    if dtype is None:
        dtype = str(ranks.load_config(base).dtype or torch.float32).removeprefix("torch.")
    return ranks.load_model(base, dtype, device or ranks.state().device)


def base_of(experts: Sequence) -> str | Path:
    """Return the experts' base, a folder or Hub id; raises ValueError for none or several."""
    first = experts[0]
    for expert in experts:
        if expert.base is None or Path(expert.base).resolve() != Path(first.base).resolve():
            raise ValueError(
                f"All experts must have the same base, but it is {expert.base} for {expert.path} "
                f"and {first.base} for {first.path}. Pass base= if it has moved"
            )
    return first.base


def check_labels(rows: Sequence[Mapping[str, Any]], every_token: bool = False) -> None:
    """Raise ValueError without rows, or for rows without a loss: of one token, or, unless
    `every_token`, without labels.
    """
    names = getattr(rows, "column_names", None) or ()
    if not {"input_ids", "labels"} <= set(names):
        raise ValueError(
            "rows must be a datasets.Dataset with input_ids and labels, but is a "
            f"{type(rows).__name__} with {', '.join(names) or 'no columns'}. Tokenize it with "
            "moe_runtime.io.rows.tokenize_pairs"
        )
    column = rows["input_ids" if every_token else "labels"]
    bad = [row for row, tokens in enumerate(column) if not set(tokens[1:]) - {-100}]
    if bad or not len(column):
        counted = "tokens after the first" if every_token else "labels after the first token"
        raise ValueError(
            f"Each of one or more rows must have {counted}, but rows {bad[:8]} of {len(column)} "
            "have none"
        )


def dtype_of(expert: Any) -> str:
    """Return the name of the dtype of an expert's MLP tensors."""
    key = next(filter(expert.is_ffn, expert.keys()))
    return str(expert.spec(key).dtype).removeprefix("torch.")


def losses(
    model: nn.Module,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    every_token: bool = False,
) -> list[float]:
    """Return each tokenized row's mean loss per label token (or per token); every process must call
    this, each runs a part.
    """

    def take(model, batch: dict) -> list[float]:
        labels = _labels(batch, every_token)
        return row_means(model(**batch, use_cache=False).logits, labels)

    return each_row(model, rows, tokenizer, batch_size, take)


def _labels(batch: dict, every_token: bool) -> torch.Tensor:
    """Remove the labels from a batch and return them; all tokens but padding if `every_token`."""
    labels = batch.pop("labels")
    if every_token:
        return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return labels


def row_means(logits: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Return the mean loss per label token of each row; `logits` [B, S, V], `labels` [B, S], -100
    where none.
    """
    return fit.means_of(fit.token_sums(logits, labels))[0]


def each_row(
    model: nn.Module,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    take: Callable,
    bf16: bool = False,
) -> list:
    """Run `fit.each_row` on the model's device: return the results of `take(model, batch)`, one for
    each tokenized row.

    Rows of similar length share a batch.
    """
    rows = rows.select_columns(["input_ids", "labels"])
    return fit.each_row(
        model,
        rows,
        take,
        collator=pair_collator(tokenizer),
        batch_size=batch_size,
        bf16=bf16,
        device=next(model.parameters()).device,
    )


def save_tuned(
    model: nn.Module,
    adapted: Any,
    tokenizer: PreTrainedTokenizerBase,
    weights: dict | None,
    dtype: str | None,
    folder: Path,
) -> None:
    """Write a tuned expert to an existing folder: the adapter of `adapted`, or if that is None the
    whole `model` in `dtype`.

    `weights` is the state dict of `model`, which may be sharded. Keys that `model` lacks are
    ignored.
    """
    if weights is not None:
        prefix = "" if adapted is None else "base_model.model."
        weights = {prefix + name: weights[name] for name in model.state_dict() if name in weights}
    if adapted is None:
        ranks.save_whole(model, tokenizer, folder, dtype, weights)
        return
    adapted.save_pretrained(str(folder), state_dict=weights, selected_adapters=[DEFAULT])
