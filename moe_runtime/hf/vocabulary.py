"""Token ids that a model has no row for: said by name before anything runs, where the embedding would only raise IndexError."""

import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral

import torch
from torch.utils.data import IterableDataset


def check_rows(model, rows, tokenizer=None) -> None:
    """Raise ValueError for an id in the column `input_ids` that the model's embedding has no row for; warn of such padding.

    `rows` are a datasets.Dataset, a list of mappings, or several of them by name; what is read only later is not looked at.
    """
    if isinstance(rows, Mapping):
        for part in rows.values():
            check_rows(model, part, tokenizer)
        return
    largest = _largest(rows)
    if largest is not None:
        check_ids(model, [largest], tokenizer)
        pad, size = getattr(tokenizer, "pad_token_id", None), _size(model)
        if pad is not None and size is not None and pad >= size:
            # packed rows are never padded
            text = f"pad_token_id is {pad}, vocab_size is {size}; want an id below it where rows are padded"
            warnings.warn(text, stacklevel=3)


def check_ids(model, ids: Iterable[int], tokenizer=None) -> None:
    """Raise ValueError for a token id that the model's embedding has no row for."""
    size, largest = _size(model), max(ids, default=0)
    if size is None or largest < size:
        return
    text = None
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        text = tokenizer.convert_ids_to_tokens(largest)
    rows = max(largest + 1, len(tokenizer) if text is not None else 0)
    raise ValueError(
        f"token id is {largest}{'' if text is None else f' ({text!r})'}, vocab_size is {size}; want ids below it; take the "
        f"model's own tokenizer, or enlarge the model: model.resize_token_embeddings({rows})"
    )


def _size(model) -> int | None:
    """Return the rows of a model's embedding; None where they cannot be told."""
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    except (AttributeError, NotImplementedError):
        return None


def _largest(rows) -> int | None:
    """Return the largest id of rows that are there; None where there is none to be seen."""
    if isinstance(rows, list | tuple):
        return max(
            (one for row in rows if _has_ids(row) and (one := _most(row["input_ids"])) is not None), default=None
        )
    names = getattr(rows, "column_names", None)
    if isinstance(rows, IterableDataset) or not hasattr(rows, "with_format") or "input_ids" not in (names or ()):
        return None
    # a batch at a time, from the disk: rows may be more than memory holds
    batches = rows.select_columns("input_ids").with_format("arrow").iter(4096)
    return max((one for table in batches if (one := _column_most(table["input_ids"])) is not None), default=None)


def _column_most(column) -> int | None:
    """Return the largest id of an Arrow column, one a row or lists however nested; None where it has no ids."""
    values = column.combine_chunks()
    while "list" in str(values.type).partition("<")[0]:
        values = values.flatten()
    if not str(values.type).startswith(("int", "uint")):
        return None
    values = values.drop_null().to_numpy(zero_copy_only=False)
    return int(values.max()) if values.size else None


def _most(ids) -> int | None:
    """Return the largest of a row's ids, a list or a tensor, however nested; None where there is none."""
    if hasattr(ids, "max"):  # one by one, a tensor's elements take milliseconds
        ids = torch.as_tensor(ids)
        return int(ids.max()) if ids.numel() else None
    if isinstance(ids[0], Integral):
        return int(max(ids))
    return max((one for part in ids if len(part) and (one := _most(part)) is not None), default=None)


def _has_ids(row) -> bool:
    return isinstance(row, Mapping) and row.get("input_ids") is not None and len(row["input_ids"]) > 0
