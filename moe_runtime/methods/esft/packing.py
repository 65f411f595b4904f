"""Samples joined to rows of one length, as the ESFT paper and its released code do."""

import random
from collections.abc import Iterable, Mapping, Sequence

import torch

from moe_runtime.io import rows as data
from moe_runtime.methods.esft.scores import SEED

TRAINING = 0.98  # share of the lines, in the released code
Line = tuple[list[int], list[int]]  # ids and labels


def join(
    rows: Iterable[Mapping], length: int, bos: int | None, drop_bos: float = 0.0, seed: int = 0
):
    """Join samples, in an order drawn by `seed`, to a datasets.Dataset of rows of `length` ids, as
    ESFT's code does.

    The last sample of a row is cut at its start if it does not fit, so its answer stays. A sample
    within a row starts without BOS with probability `drop_bos`. Samples of one row attend to each
    other. The last row may be shorter.
    """
    order = list(rows)
    generator = random.Random(seed)
    generator.shuffle(order)
    joined: list[Line] = []
    ids: list[int] = []
    labels: list[int] = []
    for row in order:
        skip = int(bool(ids) and row["input_ids"][:1] == [bos] and generator.random() < drop_bos)
        room = length - len(ids)
        ids = ids + row["input_ids"][skip:][-room:]
        labels = labels + row["labels"][skip:][-room:]
        if len(ids) == length:
            joined.append((ids, labels))
            ids = []
            labels = []
    if _has_labels((ids, labels)):
        joined.append((ids, labels))
    return _dataset(joined)


def _has_labels(line: Line) -> bool:
    return any(label != -100 for label in line[1][1:])


def packed_in_order(rows: Iterable[Line], length: int, drop: float, pad: int) -> list[Line]:
    """Pack rows, in order, into lines of `length` ids, as ESFT's released code does.

    A row that does not fit loses its beginning; after another row its first id is dropped with
    probability `drop`. The last line is padded with `pad`, unlabelled, and exists even if no tokens
    are left for it.
    """
    lines = []
    generator = random.Random(SEED)
    ids = []
    labels = []
    for row_ids, row_labels in rows:
        room = length - len(ids)
        first = int(bool(ids) and generator.random() < drop)
        ids = ids + row_ids[-room:][first:]
        labels = labels + row_labels[-room:][first:]
        if len(ids) == length:
            lines.append((ids, labels))
            ids = []
            labels = []
    left = length - len(ids)
    return [*lines, (ids + [pad] * left, labels + [-100] * left)]


def split_lines(lines: Sequence[Line]) -> tuple:
    """Return Datasets of training and validation lines, split as torch.random_split does; lines
    without labels are dropped.
    """
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(SEED)).tolist()
    count = int(TRAINING * len(lines))
    train = dataset_of([lines[i] for i in order[:count]])
    validation = dataset_of([lines[i] for i in order[count:]])
    if not len(train) or not len(validation):
        raise ValueError(
            f"The data fill only {len(lines)} lines, of which {TRAINING:.0%} are for training and "
            "the others for validation. Pass more data"
        )
    return train, validation


def dataset_of(lines: Iterable[Line]):
    """Return a datasets.Dataset of the lines that have labels."""
    return _dataset(list(filter(_has_labels, lines)))


def _dataset(lines: Sequence[Line]):
    columns = {"input_ids": [ids for ids, _ in lines], "labels": [labels for _, labels in lines]}
    return data.require("datasets").Dataset.from_dict(columns)
