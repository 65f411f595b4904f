"""Token ids that a model has no row for: said by name before anything runs, where the embedding would only raise IndexError."""

from collections.abc import Iterable, Mapping

from torch.utils.data import IterableDataset


def check_rows(model, rows, tokenizer=None) -> None:
    """Raise ValueError for an id in the column `input_ids`, or the padding, that the model's embedding has no row for.

    `rows` are a datasets.Dataset, a list of mappings, or several of them by name; what is read only later is not looked at.
    """
    if isinstance(rows, Mapping):
        for part in rows.values():
            check_rows(model, part, tokenizer)
        return
    largest = _largest(rows)
    if largest is not None:
        pad = getattr(tokenizer, "pad_token_id", None)
        check_ids(model, [largest] if pad is None else [pad, largest], tokenizer)


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
        return max((int(max(row["input_ids"])) for row in rows if _has_ids(row)), default=None)
    names = getattr(rows, "column_names", None)
    if isinstance(rows, IterableDataset) or not hasattr(rows, "with_format") or "input_ids" not in (names or ()):
        return None
    import pyarrow.compute

    # a batch at a time, from the disk: rows may be more than memory holds
    batches = rows.select_columns("input_ids").with_format("arrow").iter(4096)
    found = (pyarrow.compute.max(table["input_ids"].combine_chunks().flatten()).as_py() for table in batches)
    return max((one for one in found if one is not None), default=None)


def _has_ids(row) -> bool:
    return isinstance(row, Mapping) and row.get("input_ids") is not None and len(row["input_ids"]) > 0
