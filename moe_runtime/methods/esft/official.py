"""The score tables of the official code's `summary.json`; layers are the model's own numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_runtime.config import check_number, shown

TABLES = {"token": "token_scores", "gate": "gate_scores"}  # in the order of the official summary
MAX_EXPERTS = 4096  # of a layer: a corrupt id would exhaust the memory


def summary_tables(
    layers: Sequence[int], num_shared: int, **tables: torch.Tensor
) -> dict[str, Any]:
    """Return score tables, "token" and "gate" [L, E], as the official summary has them; shared
    experts are left out.
    """
    summary = {}
    for name, key in TABLES.items():
        summary[key] = {}
        for layer, row in zip(layers, tables[name].tolist(), strict=True):
            scores = enumerate(row[num_shared:], num_shared)
            summary[key][str(layer)] = {str(e): value for e, value in scores}
    return summary


def read_tables(
    values: Mapping[str, Any], source: str
) -> tuple[tuple[int, ...], int, dict[str, torch.Tensor]]:
    """Read the tables of a summary: its layers, how many leading experts have no scores, and
    "token" and "gate" [L, E].
    """
    shapes = []
    tables = {}
    for name, key in TABLES.items():
        ids = None
        rows = {}
        table = values.get(key)
        for layer, row in table.items() if isinstance(table, Mapping) else ():
            try:
                number, scores = _read_row(layer, row)
                ids = ids or sorted(scores)
                # a corrupt id must not make a huge table
                if sorted(scores) != ids or len(ids) != ids[-1] - ids[0] + 1:
                    raise ValueError("other experts")
                if ids[0] >= MAX_EXPERTS:
                    raise ValueError("too many experts")
            except (IndexError, ValueError) as error:
                raise ValueError(
                    f"{source}: layer {shown(layer)} of {key} is {shown(row, 60)}, but expected a "
                    "number of at least 0 for each expert, 0 to E - 1 in every layer"
                ) from error
            rows[number] = [0.0] * ids[0] + [scores[e] for e in ids]
        layers = tuple(sorted(rows))
        shapes.append((layers, ids))
        tables[name] = torch.tensor([rows[layer] for layer in layers], dtype=torch.float64)
    if not shapes[0][0] or shapes[0] != shapes[1]:
        raise ValueError(
            f"{source} must have {' and '.join(TABLES.values())} for the same layers and experts, "
            "but one is missing or they differ"
        )
    layers, ids = shapes[0]
    return layers, ids[0], tables


def layer_number(text: Any) -> int:
    """Return the number that a key of a file is; raises ValueError for other keys."""
    if not isinstance(text, str) or not text.isascii() or str(int(text)) != text or text[0] == "-":
        raise ValueError(f"{shown(text)} is no number")
    return int(text)


def _read_row(layer: Any, row: Any) -> tuple[int, dict[int, float]]:
    """Return a layer's number and its scores by expert."""
    if not isinstance(row, Mapping):
        raise ValueError("no object")
    scores = {}
    for e, score in row.items():
        check_number("score", score)
        scores[layer_number(e)] = float(score)
    return layer_number(layer), scores
