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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_runtime.config import check_number, check_positive, shown
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
    if top_k is not None:
        check_positive("top_k", top_k)
    if num_experts is not None:
        check_positive("num_experts", num_experts)
    files = _log_files(Path(folder), layers)
    logs = {}
    for layer, paths in files.items():
        logs[layer] = []
        for path in paths:
            logs[layer] += _read_log(path, num_experts)
    first, *_ = logs.values()
    if top_k is None:
        top_k = _infer_top_k([ids for ids, _ in first])
    tokens = [len(ids) // top_k for ids, _ in first]
    E = num_experts or 1 + max(int(ids.max()) for lines in logs.values() for ids, _ in lines)
    sums = torch.zeros(4, len(logs), E, dtype=torch.float64)  # count, gate, their means by line
    both = torch.zeros(len(logs), E, E, dtype=torch.float64)
    for row, (layer, lines) in enumerate(logs.items()):
        _check_lines(lines, top_k, files[layer])
        of_layer = [len(ids) // top_k for ids, _ in lines]
        if of_layer != tokens:
            raise ValueError(
                f"{files[layer][0]} has {sum(of_layer)} tokens in {len(of_layer)} lines, but the "
                f"log of the first layer has {sum(tokens)} in {len(tokens)}. The logs of all "
                "layers must be of the same tokens"
            )
        for ids, values in lines:
            count = torch.bincount(ids, minlength=E).double()
            by_line = torch.stack([count, torch.bincount(ids, values, minlength=E)])
            sums[:2, row] += by_line
            sums[2:, row] += by_line * top_k / len(ids)
            if pairs:
                hot = torch.zeros(len(ids) // top_k, E).scatter_(1, ids.view(-1, top_k), 1.0)
                both[row] += hot.T @ hot
    count, gate, sample_count, sample_gate = sums
    return GateSums(
        layers=tuple(files),
        count=count.long(),
        gate=gate,
        sample_count=sample_count,
        sample_gate=sample_gate,
        n_tokens=sum(tokens),
        n_samples=len(tokens),
        top_k=top_k,
        pairs=both.long() if pairs else None,
    )


def _log_files(folder: Path, layers: Sequence[int] | None) -> dict[int, list[Path]]:
    """List the logs by layer, a path per rank; raise ValueError where a layer has none."""
    ranks = [path for path in folder.glob("rank_*") if path.is_dir()]
    ranks.sort(key=lambda path: (len(path.name), path.name))
    folders = {}
    for parent in (folder, *ranks):
        for path in parent.glob("*.txt"):
            match = _LOG.fullmatch(path.name)
            if match is not None:
                folders.setdefault(parent, set()).add(int(match[1]))
    numbers = sorted(set().union(*folders.values()))
    problem = None
    if not folders:
        problem = "no logs"
    elif folder in folders and len(folders) > 1:
        problem = "logs in itself and in rank_{r}"
    elif layers is not None:
        numbers = sorted(set(layers))
    elif len(numbers) > 1:
        # a layer without a log shows as a gap
        step = min(b - a for a, b in itertools.pairwise(numbers))
        numbers = range(numbers[0], numbers[-1] + 1, step)
    files: dict[int, list[Path]] = {}
    for layer in numbers:
        files[layer] = [parent / log_name(layer) for parent in folders]
        for path in files[layer]:
            if not path.is_file() or not path.stat().st_size:
                problem = problem or f"no log {path.name} in {path.parent}"
        if problem is not None:  # at the first: a corrupt name may be of layer 10^12
            break
    if problem is not None:
        raise ValueError(
            f"{folder} has {problem}. Expected expert_weights_{{layer}}.txt of every layer that "
            "has experts, not empty, in the folder itself or in its folders rank_{r}"
        )
    return files


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
                numbers = list(map(int, ids.split("\t")))
                values = torch.tensor(list(map(float, weights.split("\t"))), dtype=torch.float64)
                if len(numbers) != len(values) or not values.isfinite().all():
                    raise ValueError("other numbers of ids and values, or values not finite")
                if min(numbers) < 0 or max(numbers) >= most:
                    raise ValueError("ids out of range")
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}, is {shown(line, 60)}, but expected ids below "
                    f"num_experts ({most}), two tabs and as many gate values, separated by tabs"
                ) from error
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


def _check_lines(lines: list[tuple], K: int, paths: list[Path]) -> None:
    for number, (ids, _) in enumerate(lines, 1):
        if len(ids) % K or not _distinct(ids, K):
            name = str(paths[0])
            if len(paths) > 1:
                name = f"{paths[0].name} in {paths[0].parent.parent}"
            raise ValueError(
                f"Line {number} of {name} does not fit top_k {K}. Pass the number of experts per "
                "token"
            )


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
