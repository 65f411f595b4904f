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
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from moe_runtime.config import check_choice, check_seed
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.folders import Progress
from moe_runtime.io.checkpoint import CheckpointWriter, parse_size, write_tensors
from moe_runtime.io.files import (
    atomic_folder,
    atomic_write_json,
    check_out_file,
    check_paths,
    read_json,
)
from moe_runtime.methods.upit.checkpoints import FORMAT, RECORD
from moe_runtime.methods.upit.experts import ADAPTER
from moe_runtime.methods.upit.pool import Mix, Pool
from moe_runtime.ops.expansion import METRICS, check_drop, distances, farthest_pair

SUMMARY = "expansion.json"
CHILD = "expert-"
PARENTS = ("farthest", "random")


class Child(NamedTuple):
    """An expert grown from two others.

    Attributes:
        folder: Its folder.
        parents: Positions of the two in Expansion.experts.
        weights: Their weights, which sum to 1.
        distance: Between the two.
    """

    folder: Path
    parents: tuple[int, int]  # places in Expansion.experts
    weights: tuple[float, float]
    distance: float  # between the parents


class Expansion(NamedTuple):
    """The given experts and those grown from them.

    Attributes:
        experts: Folders of all, the given ones first.
        children: The grown ones.
        distance: [n, n] float64, the distances of all.
    """

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
    parents: str = "farthest",
    drop: float = 0.5,
    seed: int = 0,
    max_shard_size: int | str = "2GB",
    overwrite: bool = False,
    backend: str | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> Expansion:
    """Grow more experts from pairs of the given ones (UpIT, Algorithm 2).

    A child is the weighted sum of what training added to its parents, of which DARE drops a part.
    Children in `out` that the same call wrote, even if it was killed, are reused.

    Args:
        experts: Folders of one kind, 2 or more.
        count: Number of experts in the end.
        out: Children are written to OUT/expert-<i>, in their parents' form.
        base: The dense model that all were trained from; the experts' differences from it are
            compared.
        metric: Distance of two experts: "cosine" or "l2".
        parents: Which pair has a child: "farthest", or "random".
        drop: Share of a parent's changes that DARE drops; the others are rescaled.
        seed: Of parents, weights and masks.
        max_shard_size: Bytes of a weights file at most, or a text such as "2GB".
        overwrite: Whether to replace children of other calls.
        backend: Of the merging op; None selects the default for the device.
        device: Where children are computed; None is the default.
        progress: Called with the bytes done and the bytes in all.

    Returns:
        All folders, the children's parents, and the distances.

    Raises:
        ValueError: If there are fewer than two experts, weights are not finite, or `out` has files
            of another origin.
    """
    check_choice("metric", metric, METRICS)
    check_choice("parents", parents, PARENTS)
    check_drop(drop)
    check_seed("seed", seed)
    check_paths("experts", experts)
    paths = [Path(expert) for expert in experts]
    if not 1 <= len(paths) <= count or count > len(paths) == 1:
        raise ValueError(
            "Expected at least 2 experts, as a child has two parents, and a count of at least "
            f"theirs, but got {len(paths)} experts and count {count}"
        )
    parse_size(max_shard_size)
    out = check_out_file(Path(out, SUMMARY), overwrite=True).parent
    earlier = _check_out(out, paths, count, overwrite)
    children = []
    with Pool(base, wide=metric == "l2", backend=backend, device=device) as pool:
        for path in paths:
            pool.add(path)
        pool.expect(count, progress)
        products = pool.products()
        if not torch.isfinite(products).all():
            bad = pool.experts[int((~torch.isfinite(products)).sum(0).argmax())]
            raise ValueError(
                f"The MLPs of expert {bad.path} have NaN or infinite values, but weights must be "
                "finite"
            )
        for path in earlier if overwrite else ():
            shutil.rmtree(path)
        for number in range(len(paths), count):
            table = distances(products, metric)
            pair, weights = _draw(seed, number)
            if parents == "farthest":
                pair = farthest_pair(table)
            folder = out / f"{CHILD}{number}"
            _make(pool, folder, Mix(pair, weights, drop, _seed(seed, number)), max_shard_size)
            pool.add(folder)
            row = pool.last_row()
            products = torch.cat([products, row[None, :-1]])
            products = torch.cat([products, row[:, None]], 1)
            paths.append(folder)
            children.append(Child(folder, pair, weights, table[pair].item()))
    expansion = Expansion(paths, tuple(children), distances(products, metric))
    out.mkdir(parents=True, exist_ok=True)
    atomic_write_json(
        out / SUMMARY,
        {
            "experts": [str(path) for path in paths],
            "children": [child._asdict() | {"folder": child.folder.name} for child in children],
            "distance": expansion.distance.tolist(),
        },
    )
    return expansion


def _check_out(out: Path, experts: Sequence[Path], count: int, overwrite: bool) -> list[Path]:
    """Return the children in `out`; raises ValueError for files of another origin, and for a given
    expert where a child would go.
    """
    ours = {f"{CHILD}{number}" for number in range(len(experts), count)}
    given = {path.resolve() for path in experts}
    children = []
    for path in out.glob("*"):
        problem = None
        if path.resolve() in given:
            if path.name in ours:
                problem = "is one of the experts, which a child would replace"
        elif path.is_dir() and path.name.startswith(CHILD):
            children.append(path)
            if not (path / RECORD).is_file() or "child" not in read_json(path / RECORD):
                problem = "is not a child of an expansion"
            elif path.name not in ours and not overwrite:
                problem = "this call would not create (overwrite=True removes it)"
        elif not path.name.startswith((SUMMARY, ".")):  # hidden: a killed writer's
            problem = "is of another origin"
        if problem is not None:
            raise ValueError(
                f"Output folder {out} contains {path.name}, which {problem}. Use a new folder, or "
                "one of an earlier expansion"
            )
    return children


def _draw(seed: int, number: int) -> tuple[tuple[int, int], tuple[float, float]]:
    """Draw parents among the experts before `number`, and their weights."""
    draw = np.random.Generator(np.random.Philox(key=np.array([seed, number], np.uint64)))
    pair = sorted(draw.choice(number, 2, replace=False).tolist())
    a = draw.random()
    return tuple(pair), (a, 1 - a)


def _seed(seed: int, number: int) -> int:
    """Return DARE's seed for expert `number`, so that each gets its own masks."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _make(pool: Pool, folder: Path, mix: Mix, max_shard_size: int | str) -> None:
    """Write a child unless it exists."""
    first = pool.experts[mix.parents[0]]
    child = {
        "parents": [pool.prints[parent] for parent in mix.parents],
        "base": pool.base_print,
        "mix": json.loads(json.dumps(mix._asdict())),
    }
    if (folder / RECORD).is_file():
        if read_json(folder / RECORD).get("child") != child:
            raise ValueError(
                f"{folder.name} in {folder.parent} was created from other experts or with other "
                "options. Choose a new folder or pass overwrite=True"
            )
        pool.saw(pool.child_bytes)
        return
    record = {
        "format": FORMAT,
        "kind": first.kind,
        "base": str(first.base or pool.base_folder),
        "base_hash": first.record.get("base_hash"),
        "child": child,
    }
    if first.kind == "lora":
        with atomic_folder(folder) as tmp:
            write_tensors(tmp / ADAPTER, dict(pool.child(mix)))
            for name in ("adapter_config.json", *folders.side_files(first.path)):
                shutil.copyfile(first.path / name, tmp / name)
            atomic_write_json(tmp / RECORD, record)
        return
    expected = sum(spec.nbytes for spec in pool.specs.values())
    with CheckpointWriter(folder, max_shard_size, expected_bytes=expected) as writer:
        writer.copy_file(first.path / "config.json")
        folders.copy_side_files(first.path, writer)
        for key, tensor in pool.child(mix):
            writer.add(key, tensor)
        writer.write_text(RECORD, json.dumps(record, indent=2) + "\n")
