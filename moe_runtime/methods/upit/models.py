"""UpIT's experts in memory: whole models, deltas and PEFT adapters of a base, and their losses per
row.

An expert here is an `Expert` of `methods.upit.experts.open_expert`: kind "ffn", "delta" or "lora",
a path, a base.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from moe_runtime.hf.training import fit, ranks
from moe_runtime.hf.training.fit import pair_collator
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.rows import require
from moe_runtime.methods.lora import forced_experts, to_lora_moe
from moe_runtime.methods.lora.adapters import check_patterns
from moe_runtime.methods.lora.baseline import quiet_peft
from moe_runtime.methods.upit.checkpoints import fingerprint
from moe_runtime.modules.lora import TARGETS

DEFAULT = "default"  # the one adapter that peft saves at the top of a folder


def load(expert, *, dtype: str | None = None) -> nn.Module:
    """Load an expert of kind "ffn" or "delta" as a dense model, by default in its MLPs' dtype."""
    device = ranks.state().device
    dtype = dtype or dtype_of(expert)
    if expert.kind == "ffn":
        return ranks.load_model(expert.path, dtype, device)
    tensors = {key: expert.get(key) for key in expert.keys()}
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(expert.config)]
    return cls.from_pretrained(
        None, config=expert.config, state_dict=tensors, dtype=getattr(torch, dtype)
    ).to(device)


def load_adapters(experts: Sequence, *, dtype: str | None = None, trainable: bool = False):
    """Return a PEFT model of the experts' base with all their adapters, named by `names`; the first
    is active.

    By default in the base's dtype; adapters in narrower dtypes become float32, as PEFT does.
    """
    peft = require("peft")
    for expert in experts:
        check_patterns(expert.path)
    model = load_base(experts, dtype)
    with quiet_peft():
        adapted = peft.PeftModel.from_pretrained(
            model, str(experts[0].path), adapter_name=DEFAULT, is_trainable=trainable
        )
        for expert, name in zip(experts[1:], names(len(experts))[1:], strict=True):
            adapted.load_adapter(str(expert.path), adapter_name=name, is_trainable=trainable)
    # the recorded base may have moved
    adapted.peft_config[DEFAULT].base_model_name_or_path = str(experts[0].base)
    return adapted


def names(count: int) -> list[str]:
    """Return the names of `count` adapters in one PEFT model."""
    return [DEFAULT, *(f"expert-{i}" for i in range(1, count))]


def load_base(experts: Sequence, dtype: str | None = None, device: str | None = None) -> nn.Module:
    """Load the adapters' dense model, by default in its own dtype; raises ValueError for several
    bases.
    """
    base = base_of(experts)
    if dtype is None:
        dtype = str(ranks.load_config(base).dtype or torch.float32).removeprefix("torch.")
    return ranks.load_model(base, dtype, device or ranks.state().device)


def base_of(experts: Sequence) -> str | Path:
    """Return the experts' common base, a folder or Hub id (copies count as one); raises ValueError
    for none or several.
    """
    first = experts[0]
    for expert in experts:
        if expert.base is None or not _is_same(first.base, expert.base):
            raise ValueError(
                f"All experts must have the same base, but it is {expert.base} for {expert.path} "
                f"and {first.base} for {first.path}. Pass base= if it has moved"
            )
    return first.base


def _is_same(base: str | Path, other: str | Path) -> bool:
    """Return whether two names are of one model: the same name, the same folder, or folders with
    the same weights.
    """
    if str(base) == str(other) or Path(base).resolve() == Path(other).resolve():
        return True
    if not (Path(base).is_dir() and Path(other).is_dir()):
        return False
    with Checkpoint(base) as one, Checkpoint(other) as two:
        return fingerprint(one) == fingerprint(two)


def check_labels(rows, every_token: bool = False) -> None:
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


def dtype_of(expert) -> str:
    """Return the name of the dtype of an expert's MLP tensors."""
    key = next(filter(expert.is_ffn, expert.keys()))
    return str(expert.spec(key).dtype).removeprefix("torch.")


def losses(
    model: nn.Module, rows, tokenizer, batch_size: int, every_token: bool = False
) -> list[float]:
    """Return each tokenized row's mean loss per label token (or per token); every process must call
    this, each runs a part.
    """

    def take(model, batch: dict) -> list[float]:
        labels = _labels(batch, every_token)
        return row_means(model(**batch, use_cache=False).logits, labels)

    return each_row(model, rows, tokenizer, batch_size, take)


def adapter_losses(
    experts: Sequence,
    rows,
    tokenizer,
    batch_size: int,
    every_token: bool = False,
) -> list[list[float]]:
    """Return `losses` [n][N] of n adapters of one base, which runs once per batch for all adapters.

    A batch repeats batch_size / n rows of the data, at least one, n times. Adapters of equal form
    that change only MLPs run as LoRA experts, each row sent to its own; others as a mixed batch of
    PEFT.
    """
    n = len(experts)
    is_alike = _are_alike(experts)
    if is_alike:
        model = load_base(experts)
        to_lora_moe(model, experts=[expert.path for expert in experts], top_k=1)
    else:
        model = load_adapters(experts)

    def take(model, batch: dict) -> list[tuple]:
        labels = _labels(batch, every_token)
        ids = torch.arange(n).repeat_interleave(len(labels))
        batch = {name: value.repeat(n, 1) for name, value in batch.items()}
        if is_alike:
            with forced_experts(model, ids):
                logits = model(**batch, use_cache=False).logits
        else:
            adapters = [names(n)[i] for i in ids]
            logits = model(**batch, use_cache=False, adapter_names=adapters).logits
        return list(zip(*(row_means(part, labels) for part in logits.chunk(n)), strict=True))

    by_row = each_row(model, rows, tokenizer, max(batch_size // n, 1), take)
    return [list(column) for column in zip(*by_row, strict=True)]


def _are_alike(experts: Sequence) -> bool:
    """Return whether one LoRAExperts can hold the adapters: the same tensors, only in MLPs, with
    equal scaling.
    """
    first = experts[0]
    places = list(map(first.locate, first.keys()))
    if None in places or (*first.family.up, first.family.down) != TARGETS:
        return False
    layers = {place.layer for place in places}
    weights = {place[1:] for place in places}
    if len(set(places)) != len(layers) * len(weights):
        return False
    plain = {"rank_pattern": {}, "alpha_pattern": {}, "use_dora": False, "bias": "none"}
    for expert in experts:
        settings = expert.adapter
        if expert.specs() != first.specs():
            return False
        for name in ("r", "lora_alpha", "use_rslora"):
            if settings.get(name) != first.adapter.get(name):
                return False
        for name, value in plain.items():
            if settings.get(name) not in (None, value):
                return False
    return True


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
    model: nn.Module, rows, tokenizer, batch_size: int, take: Callable, bf16: bool = False
) -> list:
    """Run `fit.each_row` on the model's device: return the results of `take(model, batch)`, one for
    each tokenized row.

    Rows of similar length share a batch.
    """
    rows = rows.select_columns(["input_ids", "labels"])
    device = next(model.parameters()).device
    return fit.each_row(
        model,
        rows,
        take,
        collator=pair_collator(tokenizer),
        batch_size=batch_size,
        bf16=bf16,
        by_length=True,
        device=device,
    )


def loader(rows, tokenizer, batch_size: int) -> DataLoader:
    """Return batches of tokenized rows in order, without other columns."""
    rows = rows.select_columns(["input_ids", "labels"])
    return DataLoader(rows, batch_size=batch_size, collate_fn=pair_collator(tokenizer))


def save_tuned(
    model: nn.Module, adapted, tokenizer, weights: dict | None, dtype: str | None, folder: Path
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
