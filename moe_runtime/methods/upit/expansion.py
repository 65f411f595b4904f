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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_runtime.config import check_choice, check_numbers, check_seed
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.folders import Progress
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter, parse_size, write_tensors
from moe_runtime.io.files import atomic_folder, atomic_write_json, check_paths, read_json
from moe_runtime.methods.upit.checkpoints import FORMAT, RECORD, Changed
from moe_runtime.methods.upit.experts import ADAPTER, Expert
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
    _check_choices(metric, of, parents, drop, weights, seed)
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
    # l2 is the same for both
    comparison = {
        "weights_alone": of == "weight" and metric != "l2",
        "wide": of == "weight" or metric == "l2",
    }
    with Pool(base, **comparison, backend=backend, device=device) as pool:
        for path in paths:
            pool.add(path)
        pool.expect(count, progress)
        products = _first_products(pool, out, overwrite)
        for path in earlier if overwrite else ():
            shutil.rmtree(path)
        for number in range(len(paths), count):
            table = distances(products, metric)
            pair, mixed = _draw(seed, number, number)
            pair = pair if parents == "random" else farthest_pair(table)
            mix = Mix(
                pair,
                mixed if weights is None else tuple(map(float, weights)),
                drop,
                rescale,
                _seed(seed, number),
            )
            folder = out / f"{CHILD}{number}"
            products = _grow(products, _make(pool, folder, mix, max_shard_size))
            pool.add(folder)
            children.append(Child(folder, pair, mix.weights, table[pair].item()))
    found = Expansion(
        [*paths, *(child.folder for child in children)],
        tuple(children),
        distances(products, metric),
    )
    _summarize(out, found)
    return found


def _check_choices(metric, of, parents, drop, weights, seed) -> None:
    check_choice("metric", metric, METRICS)
    check_choice("of", of, OF)
    check_choice("parents", parents, PARENTS)
    check_drop(drop)
    if weights is not None and (
        len(weights) != 2 or not all(math.isfinite(weight) for weight in weights)
    ):
        raise ValueError(f"weights must be two finite numbers or None, but got {weights!r}")
    check_seed("seed", seed)


def _check_out(out: Path, experts: Sequence[Path], count: int, overwrite: bool) -> None:
    """Raise ValueError if `out` has files of another origin, or a given expert where a child would
    go.
    """
    ours = {f"{CHILD}{number}" for number in range(len(experts), count)}
    found = None if out.is_dir() or not out.exists() else "is a file"
    for path in experts:
        if path.resolve().parent == out.resolve() and path.name in ours:
            found = f"contains the expert {path.name}, which a child would replace"
    for path in _children_in(out, experts):
        if not ((path / RECORD).is_file() and "child" in read_json(path / RECORD)):
            found = found or f"contains {path.name}, which is not a child of an expansion"
        if path.name not in ours and not overwrite:
            found = found or (
                f"contains {path.name}, which this call would not create (overwrite=True removes "
                "it)"
            )
    for path in out.iterdir() if out.is_dir() else ():
        begins = CHILD if path.is_dir() else Path(SUMMARY).stem
        # ignore hidden temporary files that a killed writer leaves
        if not path.name.startswith((begins, f".{CHILD}", f".{Path(SUMMARY).stem}")):
            found = found or f"contains {path.name}"
    if found is not None:
        raise ValueError(
            f"Output folder {out} {found}. Use a new folder, or one of an earlier expansion"
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


def _grow(products: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Extend G [n, n] to [n + 1, n + 1] by the inner products of one more expert, its own norm
    last.
    """
    n = len(products)
    grown = torch.empty(n + 1, n + 1, dtype=torch.float64)
    grown[:n, :n] = products
    grown[n] = row
    grown[:, n] = row
    return grown


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
    parents = [pool.experts[place] for place in mix.parents]
    kind = parents[0].kind if parents[0].kind == parents[1].kind else "ffn"
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
    base = str(parents[0].base or pool.base_folder)
    record = {
        "format": FORMAT,
        "kind": kind,
        "base": base,
        "base_hash": parents[0].record.get("base_hash"),
        "child": child,
    }
    tensors = pool.child(mix, products)

    def record_text(**more: Any) -> str:
        values = pool.comparison | {"values": products.tolist()}
        return json.dumps(record | more | {"products": values}, indent=2) + "\n"

    if kind == "lora":
        with atomic_folder(folder) as tmp:
            _write_adapter(tmp, parents[0], tensors)
            (tmp / RECORD).write_text(record_text(), encoding="utf-8")
        return products
    expected = sum(spec.nbytes for spec in pool.specs.values()) if kind == "ffn" else None
    with CheckpointWriter(folder, max_shard_size, expected_bytes=expected) as writer:
        writer.copy_file(parents[0].path / "config.json")
        folders.copy_side_files(parents[0].path, writer)
        writer.write_text(
            RECORD,
            record_text(**_write_model(writer, tensors, parents[0] if kind == "delta" else None)),
        )
    return products


def _write_model(
    writer: CheckpointWriter, tensors: Iterator, like: Expert | None
) -> dict[str, Any]:
    """Write a child's tensors, as a delta of the base of `like` if given; return the fields for
    expert.json.
    """
    if like is None:
        for key, tensor in tensors:
            writer.add(key, tensor)
        return {}
    with Changed(writer, Checkpoint(like.base)) as changed:
        for key, tensor in tensors:
            changed.add(key, tensor)
    return {"absent": changed.absent}


def _write_adapter(folder: Path, like: Expert, tensors: Iterator) -> None:
    """Write a child's adapter from memory, with the settings and side files of `like`."""
    write_tensors(folder / ADAPTER, dict(tensors))
    for name in ("adapter_config.json", *folders.side_files(like.path)):
        shutil.copyfile(like.path / name, folder / name)


def _summarize(out: Path, found: Expansion) -> None:
    """Add the result to the summary."""
    summary = read_json(out / SUMMARY)
    summary["experts"] = [str(path) for path in found.experts]
    summary["children"] = []
    for child in found.children:
        summary["children"].append(child._asdict() | {"folder": child.folder.name})
    atomic_write_json(out / SUMMARY, summary | {"distance": found.distance.tolist()})
