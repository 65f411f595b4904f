"""Samples joined to rows of one length, as the ESFT paper and its released code do."""

import random
from collections.abc import Iterable, Mapping

from moe_runtime.io import rows as data


def join(
    rows: Iterable[Mapping], length: int, bos: int | None, drop_bos: float = 0.0, seed: int = 0
) -> data.Dataset:
    """Join samples, in an order drawn by `seed`, to a datasets.Dataset of rows of `length` ids, as
    ESFT's code does.

    The last sample of a row is cut at its start if it does not fit, so its answer stays. A sample
    within a row starts without BOS with probability `drop_bos`. Samples of one row attend to each
    other. The last row may be shorter.
    """
    order = list(rows)
    generator = random.Random(seed)
    generator.shuffle(order)
    joined: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    ids: list[int] = []
    labels: list[int] = []
    for number, row in enumerate(order, 1):
        skip = int(bool(ids) and row["input_ids"][:1] == [bos] and generator.random() < drop_bos)
        room = length - len(ids)
        ids = ids + row["input_ids"][skip:][-room:]
        labels = labels + row["labels"][skip:][-room:]
        if len(ids) == length or (number == len(order) and set(labels[1:]) - {-100}):
            joined["input_ids"].append(ids)
            joined["labels"].append(labels)
            ids = []
            labels = []
    return data.require("datasets").Dataset.from_dict(joined)
