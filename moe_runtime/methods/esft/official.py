"""The official code's files of routing: logs `expert_weights_{layer}.txt` and the tables of
`summary.json`.

A line of a log holds a forward pass, here a sample: the ids of all its tokens, K each, separated by
tabs, then two tabs and the gate values to 4 digits, in the same order. With several processes each
has a folder `rank_{r}`. Layers are the model's own numbers.
"""

import functools
import itertools
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_runtime.config import check_positive, shown
from moe_runtime.io.files import check_regular
from moe_runtime.methods.esft.recorder import GateCall, GateSums

TABLES = {"token": "token_scores", "gate": "gate_scores"}  # in the order of the official summary
MAX_EXPERTS = 4096  # of a layer, unless given: a corrupt id would exhaust the memory
_LOG = re.compile(r"expert_weights_(\d+)\.txt")


def append_logs(folder: str | os.PathLike, call: GateCall) -> None:
    """Append a line for every sample of one call, as a GateRecorder sees it, to the log of its
    layer in `folder`.
    """
    samples = call.live.shape[0]
    K = call.topk_idx.shape[1]
    idx, weight = (
        t.detach().cpu().view(samples, -1, K) for t in (call.topk_idx, call.topk_weight.float())
    )
    with open(Path(folder, log_name(call.layer)), "a", encoding="ascii") as file:
        for ids, weights, live in zip(idx, weight, call.live.cpu(), strict=True):
            routed = (ids >= call.num_shared) & live[:, None]
            if routed.any():
                numbers = ids[routed].tolist()
                values = (f"{w:.4f}" for w in weights[routed].tolist())
                file.write("\t".join(map(str, numbers)) + "\t\t" + "\t".join(values) + "\n")


def log_name(layer: int) -> str:
    """Return the name of a layer's log."""
    return f"expert_weights_{layer}.txt"


def read_logs(
    folder: str | os.PathLike,
    *,
    top_k: int | None = None,
    num_experts: int | None = None,
    layers: Sequence[int] | None = None,
    pairs: bool = False,
) -> GateSums:
    """Read the logs in `folder` and its folders rank_*; a line is a sample.

    `top_k` defaults to the largest number with which no token of the first layer has an expert
    twice, `num_experts` to the largest id plus one, at most MAX_EXPERTS, `layers` to those found,
    which must be evenly spaced.
    """
    for name, value in (("top_k", top_k), ("num_experts", num_experts)):
        if value is not None:
            check_positive(name, value)
    files = _log_files(Path(folder), layers)
    found = []
    seen = None
    for paths in files.values():
        lines = [line for path in paths for line in _read_log(path, num_experts)]
        top_k = _infer_top_k([ids for ids, _ in lines]) if top_k is None else top_k
        sums, tokens = _sum_lines(lines, top_k, num_experts, pairs, paths)
        if seen is not None and tokens != seen:
            raise ValueError(
                f"{paths[0]} has {sum(tokens)} tokens in {len(tokens)} lines, but the log of the "
                f"first layer has {sum(seen)} in {len(seen)}. The logs of all layers must be of "
                "the same tokens"
            )
        found = [*found, sums]
        seen = tokens
    E = max(len(sums[0]) for sums in found)
    count, gate, sample_count, sample_gate = (
        torch.stack([_padded(sums[i], E) for sums in found]) for i in range(4)
    )
    return GateSums(
        layers=tuple(files),
        count=count.long(),
        gate=gate,
        sample_count=sample_count,
        sample_gate=sample_gate,
        n_tokens=sum(seen),
        n_samples=len(seen),
        top_k=top_k,
        pairs=torch.stack([_padded(sums[4], E) for sums in found]).long() if pairs else None,
    )


def _log_files(folder: Path, layers: Sequence[int] | None) -> dict[int, list[Path]]:
    """List the logs by layer, a path per rank; raise ValueError where a layer has none."""
    ranks = sorted(
        (path for path in folder.glob("rank_*") if path.is_dir()),
        key=lambda path: (len(path.name), path.name),
    )
    folders = [
        place
        for place in (folder, *ranks)
        if any(_LOG.fullmatch(path.name) for path in place.glob("*.txt"))
    ]
    names = {
        int(match[1])
        for place in folders
        for path in place.iterdir()
        if (match := _LOG.fullmatch(path.name))
    }
    wanted = sorted(set(layers)) if layers is not None else _evenly_spaced(sorted(names))
    # lazily, since a corrupt name may be of layer 10^12
    logs = (place / log_name(layer) for layer in wanted for place in folders)
    missing = next((path for path in logs if not path.is_file() or not path.stat().st_size), None)
    if not folders or missing or (folder in folders and len(folders) > 1):
        if missing:
            found = f"no log {missing.name} in {missing.parent}"
        else:
            found = "logs in itself and in rank_{r}"
        raise ValueError(
            f"{folder} has {found if folders else 'no logs'}. Expected "
            "expert_weights_{layer}.txt of every layer that has experts, not empty, in the "
            "folder itself or in its folders rank_{r}"
        )
    return {layer: [place / log_name(layer) for place in folders] for layer in wanted}


def _evenly_spaced(numbers: list[int]) -> Sequence[int]:
    """Return the numbers from the first to the last in the smallest step between neighbours."""
    steps = [b - a for a, b in itertools.pairwise(numbers)]
    return range(numbers[0], numbers[-1] + 1, min(steps)) if steps else numbers


def _read_log(path: Path, E: int | None):
    """Yield ids int64, below E, and gate values float64 of each line, [slots]; raise ValueError
    naming file and line.
    """
    check_regular(path)
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            ids, _, weights = line.rstrip("\r\n").partition("\t\t")
            try:
                found = [int(one) for one in ids.split("\t")]
                values = torch.tensor(
                    [float(one) for one in weights.split("\t")], dtype=torch.float64
                )
                good = (
                    len(found) == len(values) and min(found) >= 0 and bool(values.isfinite().all())
                )
                good = good and max(found) < (E or MAX_EXPERTS)
            except ValueError:
                good = False
            if not good:
                raise ValueError(
                    f"{path}, line {number}, is {shown(line, 60)}, but expected ids below "
                    f"num_experts ({E or MAX_EXPERTS}), two tabs and as many gate values, "
                    "separated by tabs"
                )
            yield torch.tensor(found), values


def _infer_top_k(lines: list[torch.Tensor]) -> int:
    divisor = functools.reduce(math.gcd, map(len, lines))
    most = int(max(ids.max() for ids in lines)) + 1
    ids = torch.cat(lines)
    candidates = [K for K in range(min(divisor, most), 1, -1) if divisor % K == 0]
    return next((K for K in candidates if _distinct(ids[: K * 64], K) and _distinct(ids, K)), 1)


def _distinct(ids: torch.Tensor, K: int) -> bool:
    rows = ids.view(-1, K).sort(1).values
    return not bool((rows[:, 1:] == rows[:, :-1]).any())


def _sum_lines(
    lines, K: int, E: int | None, pairs: bool, paths: list[Path]
) -> tuple[list[torch.Tensor], list[int]]:
    """Sum up one layer: count, gate and their means by line, [E] each, then pairs [E, E]; and the
    tokens of each line.
    """
    bad = next(
        (i for i, (ids, _) in enumerate(lines) if len(ids) % K or not _distinct(ids, K)), None
    )
    if bad is not None:
        raise ValueError(
            f"Line {bad + 1} of {_listed(paths)} does not fit top_k {K}. Pass the number of "
            "experts per token"
        )
    E = max(int(ids.max()) for ids, _ in lines) + 1 if E is None else E
    sums = torch.zeros(4, E, dtype=torch.float64)
    both = torch.zeros(E, E, dtype=torch.float64)
    for ids, values in lines:
        by_line = torch.stack(
            [torch.bincount(ids, minlength=E).double(), torch.bincount(ids, values, minlength=E)]
        )
        sums[:2] += by_line
        sums[2:] += by_line * K / len(ids)
        if pairs:
            hot = torch.zeros(len(ids) // K, E).scatter_(1, ids.view(-1, K), 1.0)
            both += hot.T @ hot
    return [*sums, *([both] if pairs else [])], [len(ids) // K for ids, _ in lines]


def _padded(tensor: torch.Tensor, E: int) -> torch.Tensor:
    missing = E - len(tensor)
    return torch.nn.functional.pad(tensor, [0, missing] * tensor.dim())


def _listed(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0].name} in {paths[0].parent.parent}"


def summary_tables(
    layers: Sequence[int], num_shared: int, **tables: torch.Tensor
) -> dict[str, Any]:
    """Return score tables, "token" and "gate" [L, E], as the official summary has them; shared
    experts are left out.
    """
    return {
        key: {
            str(layer): {str(e): value for e, value in enumerate(row) if e >= num_shared}
            for layer, row in zip(layers, tables[name].tolist(), strict=True)
        }
        for name, key in TABLES.items()
    }


def read_tables(
    values: Mapping[str, Any], source: str
) -> tuple[tuple[int, ...], int, dict[str, torch.Tensor]]:
    """Read the tables of a summary: its layers, how many leading experts have no scores, and
    "token" and "gate" [L, E].
    """
    shapes = {}
    tables = {}
    for name, key in TABLES.items():
        ids = None
        rows = {}
        table = values.get(key)
        for layer, row in table.items() if isinstance(table, Mapping) else ():
            good = isinstance(row, Mapping) and row and all(map(_is_number, (layer, *row)))
            good = good and all(map(_is_score, row.values()))
            scores = {int(e): float(score) for e, score in row.items()} if good else {}
            ids = ids or sorted(scores)
            # a corrupt id must not make a huge table
            if (
                not good
                or sorted(scores) != ids
                or ids[-1] - ids[0] != len(ids) - 1
                or ids[0] >= MAX_EXPERTS
            ):
                raise ValueError(
                    f"{source}: layer {shown(layer)} of {key} is {shown(row, 60)}, but expected a "
                    "number of at least 0 for each expert, 0 to E - 1 in every layer"
                )
            rows[int(layer)] = [0.0] * ids[0] + [scores[e] for e in ids]
        shapes[name] = tuple(sorted(rows)), ids
        tables[name] = torch.tensor([rows[layer] for layer in sorted(rows)], dtype=torch.float64)
    layers, ids = shapes["gate"]
    if not layers or shapes["token"] != shapes["gate"]:
        raise ValueError(
            f"{source} must have {' and '.join(TABLES.values())} for the same layers and experts, "
            "but one is missing or they differ"
        )
    return layers, ids[0], tables


def _is_number(text: Any) -> bool:
    return isinstance(text, str) and text.isascii() and text.isdigit() and str(int(text)) == text


def _is_score(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value <= sys.float_info.max
    )
