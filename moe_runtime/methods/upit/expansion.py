"""Expert expansion: grow experts from a few checkpoints, on disk (UpIT, arXiv 2410.01610, Algorithm
2).

    while |E| < n:  (j, k) = the pair of E that differs most;  a, b at random, a + b = 1
                    child = W_base + a D(W_j - W_base) + b D(W_k - W_base),  D being DARE
                    E = E + child

Only MLPs enter distance and DARE; the rest of a child is its parents' mean. LoRA experts: the same
on every A and B, with a base of zero. `moe_runtime.ops.expansion` has the formulas;
`moe_runtime.methods.upit.pool` reads in bounded memory.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from moe_runtime.config import check_choice, check_numbers, check_seed
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.folders import Progress
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter, parse_size, write_tensors
from moe_runtime.io.files import atomic_folder, atomic_write_json, check_paths, read_json
from moe_runtime.methods.upit.checkpoints import FORMAT, RECORD, Changed
from moe_runtime.methods.upit.experts import ADAPTER
from moe_runtime.methods.upit.pool import Mix, Pool
from moe_runtime.ops.expansion import METRICS, check_drop, distances, farthest_pair

SUMMARY = "expansion.json"
CHILD = "expert-"
OF = ("delta", "weight")
PARENTS = ("farthest", "random")


class Child(NamedTuple):
    """An expert grown from two parents."""

    folder: Path
    parents: tuple[int, int]  # places in Expansion.experts
    weights: tuple[float, float]
    distance: float  # between the parents


class Expansion(NamedTuple):
    """The given experts and their children."""

    experts: list[Path]  # the given ones first
    children: tuple[Child, ...]
    distance: torch.Tensor  # [n, n] float64, between all


def expand_experts(
    experts: Sequence[str | Path],
    count: int,
    out: str | Path,
    *,
    base: str | Path,
    metric: str = "cosine",
    of: str = "delta",
    parents: str = "farthest",
    drop: float = 0.5,
    rescale: bool = True,
    weights: tuple[float, float] | None = None,
    seed: int = 0,
    max_shard_size: int | str = "2GB",
    overwrite: bool = False,
    backend: str | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> Expansion:
    """Grow the folders `experts` to `count` experts; children are written to OUT/expert-<i> in
    their parents' form.

    `base` is the dense model that all were trained from. `of` selects what is compared: the changes
    made by training ("delta"), or the weights themselves, whose "l2" distances are the same but
    whose "cosine" distances are smaller. `weights` are a and b of every child (None: a uniform at
    random). Rows are computed on `device`. Children in `out` made by the same call, even if it was
    killed, are reused; others raise an error, and `overwrite` replaces or removes all of them.
    """
    check_choice("metric", metric, METRICS)
    check_choice("of", of, OF)
    check_choice("parents", parents, PARENTS)
    check_drop(drop)
    check_seed("seed", seed)
    if weights is not None and (len(weights) != 2 or not all(map(math.isfinite, weights))):
        raise ValueError(f"weights must be two finite numbers or None, but got {weights!r}")
    check_paths("experts", experts)
    paths = [Path(expert) for expert in experts]
    out = Path(out)
    if not 1 <= len(paths) <= count or count > len(paths) == 1:
        raise ValueError(
            "Expected at least 2 experts, as a child has two parents, and a count of at least "
            f"theirs, but got {len(paths)} experts and count {count}"
        )
    parse_size(max_shard_size)
    _check_out(out, paths, count, overwrite)
    earlier = _children_in(out, paths)
    children = []
    pool = Pool(
        base,
        weights_alone=of == "weight" and metric != "l2",  # l2 is the same for both
        wide=of == "weight" or metric == "l2",
        backend=backend,
        device=device,
    )
    with pool:
        for path in paths:
            pool.add(path)
        pool.expect(count, progress)
        products = _first_products(pool, out, overwrite)
        for path in earlier if overwrite else ():
            shutil.rmtree(path)
        for number in range(len(paths), count):
            table = distances(products, metric)
            pair, mixed = _draw(seed, number, number)
            if parents == "farthest":
                pair = farthest_pair(table)
            if weights is not None:
                mixed = tuple(map(float, weights))
            mix = Mix(pair, mixed, drop, rescale, _seed(seed, number))
            folder = out / f"{CHILD}{number}"
            row = _make(pool, folder, mix, max_shard_size)
            # G [n, n] of one more expert, its own norm last
            products = torch.cat([products, row[None, :-1]])
            products = torch.cat([products, row[:, None]], 1)
            pool.add(folder)
            paths.append(folder)
            children.append(Child(folder, pair, mixed, table[pair].item()))
    expansion = Expansion(paths, tuple(children), distances(products, metric))
    summary = read_json(out / SUMMARY)
    summary["experts"] = [str(path) for path in paths]
    summary["children"] = [child._asdict() | {"folder": child.folder.name} for child in children]
    atomic_write_json(out / SUMMARY, summary | {"distance": expansion.distance.tolist()})
    return expansion


def _check_out(out: Path, experts: Sequence[Path], count: int, overwrite: bool) -> None:
    """Raise ValueError if `out` has files of another origin, or a given expert where a child would
    go.
    """
    ours = {f"{CHILD}{number}" for number in range(len(experts), count)}
    problems = []
    if out.exists() and not out.is_dir():
        problems.append("is a file")
    for path in experts:
        if path.resolve().parent == out.resolve() and path.name in ours:
            problems.append(f"contains the expert {path.name}, which a child would replace")
    for path in _children_in(out, experts):
        if not (path / RECORD).is_file() or "child" not in read_json(path / RECORD):
            problems.append(f"contains {path.name}, which is not a child of an expansion")
        if path.name not in ours and not overwrite:
            problems.append(
                f"contains {path.name}, which this call would not create (overwrite=True removes "
                "it)"
            )
    summary = Path(SUMMARY).stem
    for path in out.glob("*"):
        begins = CHILD if path.is_dir() else summary
        # ignore hidden temporary files that a killed writer leaves
        if not path.name.startswith((begins, f".{CHILD}", f".{summary}")):
            problems.append(f"contains {path.name}")
    if problems:
        raise ValueError(
            f"Output folder {out} {problems[0]}. Use a new folder, or one of an earlier expansion"
        )


def _other(child: Path) -> ValueError:
    """Return the error for a child that this call would not make."""
    return ValueError(
        f"{child.name} in {child.parent} was created from other experts or with other options. "
        "Choose a new folder or pass overwrite=True"
    )


def _children_in(out: Path, experts: Sequence[Path]) -> list[Path]:
    """Return the folders of `out` with names of children, without the given experts."""
    given = {path.resolve() for path in experts}
    children = []
    for path in out.glob(f"{CHILD}*"):
        is_numbered = path.name.removeprefix(CHILD).isdecimal()
        if is_numbered and path.is_dir() and path.resolve() not in given:
            children.append(path)
    return children


def _draw(seed: int, number: int, pool: int) -> tuple[tuple[int, int], tuple[float, float]]:
    """Draw parents and weights for expert `number`, as a function of `seed` and `number` only."""
    draw = np.random.Generator(np.random.Philox(key=np.array([seed, number], np.uint64)))
    pair = sorted(draw.choice(pool, 2, replace=False).tolist())
    a = draw.random()
    return tuple(pair), (a, 1 - a)


def _seed(seed: int, number: int) -> int:
    """Return DARE's seed for expert `number`, so that each gets its own masks."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _recorded(path: Path) -> dict:
    """Return the inner products that an earlier run recorded in `path`, with their settings."""
    recorded = read_json(path).get("products")
    return recorded if isinstance(recorded, dict) else {}


def _values(recorded: dict, path: Path, *shape: int) -> torch.Tensor:
    """Return recorded inner products as a tensor; raises ValueError for malformed ones."""
    check_numbers(f"products of {path}", recorded.get("values"), *shape)
    return torch.tensor(recorded["values"], dtype=torch.float64)


def _first_products(pool: Pool, out: Path, overwrite: bool) -> torch.Tensor:
    """Return G of the given experts, from the summary of an earlier run with the same ones or by
    reading each once.
    """
    key = {"format": FORMAT, "experts": pool.prints, "base": pool.base_print, **pool.comparison}
    path = out / SUMMARY
    if path.is_file() and not overwrite:
        recorded = _recorded(path)
        if key.items() <= recorded.items():
            products = _values(recorded, path, len(pool.experts), len(pool.experts))
            pool.skip(len(pool.experts), child=False)
            return products
        children = _children_in(out, [expert.path for expert in pool.experts])
        if children:
            raise _other(children[0])
    products = pool.products()
    if not torch.isfinite(products).all():
        bad = pool.experts[int((~torch.isfinite(products)).sum(0).argmax())]
        raise ValueError(
            f"The MLPs of expert {bad.path} have NaN or infinite values, but weights must be finite"
        )
    out.mkdir(parents=True, exist_ok=True)
    atomic_write_json(path, {"products": key | {"values": products.tolist()}})
    return products


def _make(pool: Pool, folder: Path, mix: Mix, max_shard_size: int | str) -> torch.Tensor:
    """Write a child unless it exists; return its inner products [n + 1] with the pool and
    itself.
    """
    first, second = (pool.experts[place] for place in mix.parents)
    kind = first.kind if first.kind == second.kind else "ffn"
    child = {"pool": pool.prints, "base": pool.base_print, **json.loads(json.dumps(mix._asdict()))}
    if (folder / RECORD).is_file():
        recorded = _recorded(folder / RECORD)
        is_same = read_json(folder / RECORD).get("child") == child
        if not is_same or not pool.comparison.items() <= recorded.items():
            raise _other(folder)
        products = _values(recorded, folder / RECORD, len(pool.experts) + 1)
        pool.skip(len(pool.experts), child=True)
        return products
    products = torch.zeros(len(pool.experts) + 1, dtype=torch.float64)
    record = {
        "format": FORMAT,
        "kind": kind,
        "base": str(first.base or pool.base_folder),
        "base_hash": first.record.get("base_hash"),
        "child": child,
    }
    tensors = pool.child(mix, products)
    if kind == "lora":
        with atomic_folder(folder) as tmp:
            write_tensors(tmp / ADAPTER, dict(tensors))
            for name in ("adapter_config.json", *folders.side_files(first.path)):
                shutil.copyfile(first.path / name, tmp / name)
            atomic_write_json(tmp / RECORD, record | {"products": _recordable(pool, products)})
        return products
    expected = sum(spec.nbytes for spec in pool.specs.values()) if kind == "ffn" else None
    with CheckpointWriter(folder, max_shard_size, expected_bytes=expected) as writer:
        writer.copy_file(first.path / "config.json")
        folders.copy_side_files(first.path, writer)
        if kind == "delta":
            with Changed(writer, Checkpoint(first.base)) as changed:
                for key, tensor in tensors:
                    changed.add(key, tensor)
            record["absent"] = changed.absent
        else:
            for key, tensor in tensors:
                writer.add(key, tensor)
        record["products"] = _recordable(pool, products)
        writer.write_text(RECORD, json.dumps(record, indent=2) + "\n")
    return products


def _recordable(pool: Pool, products: torch.Tensor) -> dict:
    """Return inner products, with their settings, for expert.json."""
    return pool.comparison | {"values": products.tolist()}
