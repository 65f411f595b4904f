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
from typing import Any, NamedTuple

import torch
from torch.nn import functional

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
    idx = call.topk_idx.detach().cpu().view(samples, -1, K)
    weight = call.topk_weight.detach().float().cpu().view(samples, -1, K)
    with open(Path(folder, log_name(call.layer)), "a", encoding="ascii") as file:
        for ids, weights, live in zip(idx, weight, call.live.cpu(), strict=True):
            routed = (ids >= call.num_shared) & live[:, None]
            if routed.any():
                numbers = map(str, ids[routed].tolist())
                values = (f"{value:.4f}" for value in weights[routed].tolist())
                file.write("\t".join(numbers) + "\t\t" + "\t".join(values) + "\n")


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
    logs = []
    for paths in files.values():
        lines = []
        for path in paths:
            lines += _read_log(path, num_experts)
        if top_k is None:
            top_k = _infer_top_k([ids for ids, _ in lines])
        log = _sum_lines(lines, top_k, num_experts, paths)
        first = logs[0].tokens if logs else log.tokens
        if log.tokens != first:
            raise ValueError(
                f"{paths[0]} has {sum(log.tokens)} tokens in {len(log.tokens)} lines, but the log "
                f"of the first layer has {sum(first)} in {len(first)}. The logs of all layers must "
                "be of the same tokens"
            )
        logs.append(log)
    E = max(log.sums.shape[1] for log in logs)
    count, gate, sample_count, sample_gate = torch.stack(
        [functional.pad(log.sums, [0, E - log.sums.shape[1]]) for log in logs], dim=1
    )
    both = None
    if pairs:
        tables = [functional.pad(log.pairs, [0, E - len(log.pairs)] * 2) for log in logs]
        both = torch.stack(tables).long()
    return GateSums(
        layers=tuple(files),
        count=count.long(),
        gate=gate,
        sample_count=sample_count,
        sample_gate=sample_gate,
        n_tokens=sum(logs[0].tokens),
        n_samples=len(logs[0].tokens),
        top_k=top_k,
        pairs=both,
    )


def _log_files(folder: Path, layers: Sequence[int] | None) -> dict[int, list[Path]]:
    """List the logs by layer, a path per rank; raise ValueError where a layer has none."""
    ranks = [path for path in folder.glob("rank_*") if path.is_dir()]
    ranks.sort(key=lambda path: (len(path.name), path.name))
    folders = []
    numbers = set()
    for place in (folder, *ranks):
        names = [_LOG.fullmatch(path.name) for path in place.glob("*.txt")]
        of_place = {int(match[1]) for match in names if match is not None}
        if of_place:
            folders.append(place)
            numbers |= of_place
    problem = None
    if not folders:
        problem = "no logs"
    elif folder in folders and len(folders) > 1:
        problem = "logs in itself and in rank_{r}"
    if layers is not None:
        numbers = sorted(set(layers))
    else:
        numbers = _evenly_spaced(sorted(numbers))
    # a loop that stops at the first missing log, since a corrupt name may be of layer 10^12
    files: dict[int, list[Path]] = {}
    for layer in numbers if problem is None else ():
        files[layer] = [place / log_name(layer) for place in folders]
        for path in files[layer]:
            if not path.is_file() or not path.stat().st_size:
                problem = problem or f"no log {path.name} in {path.parent}"
        if problem is not None:
            break
    if problem is not None:
        raise ValueError(
            f"{folder} has {problem}. Expected expert_weights_{{layer}}.txt of every layer that "
            "has experts, not empty, in the folder itself or in its folders rank_{r}"
        )
    return files


def _evenly_spaced(numbers: list[int]) -> Sequence[int]:
    """Return the numbers from the first to the last in the smallest step between neighbours."""
    if len(numbers) < 2:
        return numbers
    step = min(b - a for a, b in itertools.pairwise(numbers))
    return range(numbers[0], numbers[-1] + 1, step)


def _read_log(path: Path, E: int | None):
    """Yield ids int64, below E, and gate values float64 of each line, [slots]; raise ValueError
    naming file and line.
    """
    check_regular(path)
    most = E or MAX_EXPERTS
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            ids, _, weights = line.rstrip("\r\n").partition("\t\t")
            try:
                numbers = [int(text) for text in ids.split("\t")]
                values = torch.tensor(list(map(float, weights.split("\t"))), dtype=torch.float64)
                is_good = len(numbers) == len(values) and bool(values.isfinite().all())
                is_good = is_good and min(numbers) >= 0 and max(numbers) < most
            except ValueError:
                is_good = False
            if not is_good:
                raise ValueError(
                    f"{path}, line {number}, is {shown(line, 60)}, but expected ids below "
                    f"num_experts ({most}), two tabs and as many gate values, separated by tabs"
                )
            yield torch.tensor(numbers), values


def _infer_top_k(lines: list[torch.Tensor]) -> int:
    divisor = functools.reduce(math.gcd, map(len, lines))
    ids = torch.cat(lines)
    for K in range(min(divisor, int(ids.max()) + 1), 1, -1):
        # the first tokens tell most K apart
        if divisor % K == 0 and _distinct(ids[: K * 64], K) and _distinct(ids, K):
            return K
    return 1


def _distinct(ids: torch.Tensor, K: int) -> bool:
    rows = ids.view(-1, K).sort(1).values
    return not bool((rows[:, 1:] == rows[:, :-1]).any())


class _LogSums(NamedTuple):
    """The sums of one layer's log."""

    sums: torch.Tensor  # [4, E] float64: count, gate and their means by line
    pairs: torch.Tensor  # [E, E] float64
    tokens: list[int]  # of each line


def _sum_lines(lines: list[tuple], K: int, E: int | None, paths: list[Path]) -> _LogSums:
    for number, (ids, _) in enumerate(lines, 1):
        if len(ids) % K or not _distinct(ids, K):
            name = str(paths[0])
            if len(paths) > 1:
                name = f"{paths[0].name} in {paths[0].parent.parent}"
            raise ValueError(
                f"Line {number} of {name} does not fit top_k {K}. Pass the number of experts per "
                "token"
            )
    if E is None:
        E = max(int(ids.max()) for ids, _ in lines) + 1
    sums = torch.zeros(4, E, dtype=torch.float64)
    pairs = torch.zeros(E, E, dtype=torch.float64)
    for ids, values in lines:
        count = torch.bincount(ids, minlength=E).double()
        by_line = torch.stack([count, torch.bincount(ids, values, minlength=E)])
        sums[:2] += by_line
        sums[2:] += by_line * K / len(ids)
        hot = torch.zeros(len(ids) // K, E).scatter_(1, ids.view(-1, K), 1.0)
        pairs += hot.T @ hot
    return _LogSums(sums, pairs, [len(ids) // K for ids, _ in lines])


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
        ids = []
        rows = {}
        table = values.get(key)
        for layer, row in table.items() if isinstance(table, Mapping) else ():
            scores = _read_row(layer, row)
            ids = ids or sorted(scores)
            # a corrupt id must not make a huge table
            is_range = bool(ids) and ids[-1] - ids[0] == len(ids) - 1 and ids[0] < MAX_EXPERTS
            if not is_range or sorted(scores) != ids:
                raise ValueError(
                    f"{source}: layer {shown(layer)} of {key} is {shown(row, 60)}, but expected a "
                    "number of at least 0 for each expert, 0 to E - 1 in every layer"
                )
            rows[int(layer)] = [0.0] * ids[0] + [scores[e] for e in ids]
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


def _read_row(layer: Any, row: Any) -> dict[int, float]:
    """Return the scores of a layer by expert; none if anything in them is not valid."""
    if not isinstance(row, Mapping) or not all(map(_is_number, (layer, *row))):
        return {}
    if not all(map(_is_score, row.values())):
        return {}
    return {int(e): float(score) for e, score in row.items()}


def _is_number(text: Any) -> bool:
    return isinstance(text, str) and text.isascii() and text.isdigit() and str(int(text)) == text


def _is_score(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value <= sys.float_info.max
    )
