"""XFT on model folders, tensor by tensor: `moe_runtime.methods.xft` for models that do not fit in
memory.

The results are the same, bit for bit. Memory holds one shard of the source, one expert stack and
one shard of the target. Target folders are written atomically.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_runtime.config import MoEConfig
from moe_runtime.hf.models import families, folders, stock, swap
from moe_runtime.hf.models.folders import (
    SHARD,
    Conversion,
    FolderReceipt,
    Progress,
    expert_rows,
    mixture_of,
    open_upcycled,
)
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter, check_finite
from moe_runtime.io.files import check_out_dir
from moe_runtime.methods.xft import UNMOVED, check_rate, distance_moved, initialization
from moe_runtime.ops.merging import alpha_rows, merge_rows, soup_logits


def upcycle_folder(
    source: str | Path,
    target: str | Path,
    *,
    layers: Sequence[int] | None = None,
    seed: int = 42,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
    export_to: str | None = None,
    init: str = "copy",
    ratio: float = 0.5,
    granularity: int = 1,
    **settings: Any,
) -> FolderReceipt:
    """Upcycle a dense model from folder to folder, tensor by tensor.

    Args:
        source: Folder of the dense model.
        target: The folder to write.
        layers: Numbers of the layers to upcycle; None is all.
        seed: Initializes the routers.
        max_shard_size: Bytes of a weights file at most, or a text such as "2GB".
        overwrite: Whether to replace an existing folder.
        progress: Called with the bytes done and the bytes in all.
        export_to: Stock family that must be able to hold the model.
        init: How the experts differ at first: copy, noise or drop (`initialization`).
        ratio: Share of neurons that noise and drop change.
        granularity: Experts that each one is cut into; `num_experts` and `top_k` are those before.
        settings: Fields of MoEConfig, such as num_experts=8.

    Returns:
        The counts of what was written.

    Raises:
        ValueError: With nothing written, for an unknown architecture, MLP tensors that are missing,
            misshapen or not finite, an existing target, too little disk space, or settings that
            `export_to` cannot compute.
    """
    check_out_dir(target, overwrite, [source])
    initialization.check_init(init, ratio)
    config = folders.read_config(source)
    family = families.family_of(config)
    whole = folders.config_for_folder(config, **settings)
    moe = initialization.granular(whole, granularity)
    new_config = folders.upcycled_config(config, moe, layers)
    layers = new_config.moe_runtime["layers"]
    if export_to is not None:
        stock.stock_config(new_config, export_to)
    with Checkpoint(source) as checkpoint:
        folders.check_tensors(config, checkpoint)
        expected = _upcycled_bytes(checkpoint, family, whole, layers)
        error = _mlp_error(checkpoint, config, family, moe, layers)
        with CheckpointWriter(
            target, max_shard_size, overwrite=overwrite, expected_bytes=expected
        ) as writer:
            folders.write_config(writer, new_config)
            side_files = folders.copy_side_files(Path(source), writer)
            job = Conversion(checkpoint, writer, progress)
            for key in checkpoint.keys():
                mlp_key = families.locate_key(family, key)
                is_other = mlp_key is None or mlp_key.layer not in layers
                if is_other or (init == "copy" and granularity == 1):
                    _upcycle_key(job, key, family, moe, layers, seed)
                elif mlp_key[1:] == ("down_proj", 0):
                    _upcycle_layer(
                        job, mlp_key.layer, family, whole, seed, init, ratio, granularity
                    )
    return FolderReceipt(
        Path(target), moe, job.tensors, job.bytes, side_files, layers, mlp_error=error
    )


def _mlp_error(
    checkpoint: Checkpoint, config, family, moe: MoEConfig, layers: Sequence[int]
) -> float:
    """Return the largest relative difference of the sampled layers' MLPs from our formula;
    ValueError above TOLERANCE.
    """
    worst = 0.0
    for layer in sorted(swap.sampled(layers)):
        keys = families.mlp_keys(family, layer, moe.bias)
        weights = {}
        for name, parts in keys.items():
            weights[name] = torch.cat([checkpoint.get(key) for key in parts])
        error = folders.stock_mlp_error(config, weights, layer)
        if not error < swap.TOLERANCE:
            raise ValueError(
                f"The MLP of layer {layer} differs from our formula by {error:.1e} relative, more "
                f"than {swap.TOLERANCE:.0e}"
            )
        worst = max(worst, error)
    return worst


def _upcycle_key(
    job: Conversion, key: str, family, moe: MoEConfig, layers: Sequence[int], seed: int
) -> None:
    mlp_key = families.locate_key(family, key)
    if mlp_key is None or mlp_key.layer not in layers:
        job.add(key, job.source.get(key))
        return job.read(key)
    if mlp_key.part > 0:  # written with the first part
        return None
    parts = families.mlp_keys(family, mlp_key.layer, moe.bias)[mlp_key.name]
    weight = torch.cat([job.source.get(part) for part in parts])
    check_finite(weight, key, job.source.path)
    # expanded, not repeated: the writer copies it once
    job.add(
        families.expert_keys(family, mlp_key.layer, moe.bias)[mlp_key.name],
        weight.expand(moe.num_experts, *weight.shape),
    )
    if mlp_key.name == "down_proj":
        path = family.path.format(mlp_key.layer)
        for name, router in swap.draw_router(moe, seed, mlp_key.layer).items():
            job.add(f"{path}.gate.{name}", router.to(weight.dtype))
    return job.read(*parts)


def _upcycle_layer(
    job: Conversion,
    layer: int,
    family,
    moe: MoEConfig,
    seed: int,
    init: str,
    ratio: float,
    granularity: int,
) -> None:
    """Write a layer whose experts differ, or are cut."""
    mlp = {}
    keys = families.mlp_keys(family, layer, moe.bias)
    for name, parts in keys.items():
        mlp[name] = torch.cat([job.source.get(part) for part in parts])
        check_finite(mlp[name], parts[0], job.source.path)
    generator = torch.Generator().manual_seed(seed * 65537 + layer)
    stacks: dict[str, list] = {name: [] for name in keys}
    for expert in initialization.experts(mlp, moe, init, ratio, generator):
        parts = [expert]
        if granularity > 1:
            parts = initialization.shards(expert, granularity)
        for part in parts:
            for name, matrix in part.items():
                stacks[name].append(matrix)
    for name, key in families.expert_keys(family, layer, moe.bias).items():
        job.add(key, torch.stack(stacks[name]))
    path = family.path.format(layer)
    for name, router in swap.draw_router(moe, seed, layer).items():
        router = router.repeat_interleave(granularity, 0)
        job.add(f"{path}.gate.{name}", router.to(mlp["down_proj"].dtype))
    job.read(*(part for parts in keys.values() for part in parts))


def _upcycled_bytes(checkpoint: Checkpoint, family, moe: MoEConfig, layers: Sequence[int]) -> int:
    """Return the size of the target; raises ValueError unless all MLP tensors have one dtype."""
    total = 0
    dtypes = {}
    for key, spec in checkpoint.specs().items():
        mlp_key = families.locate_key(family, key)
        if mlp_key is None or mlp_key.layer not in layers:
            total += spec.nbytes
        else:
            total += spec.nbytes * moe.num_experts
            dtypes[spec.dtype] = key
    if len(dtypes) > 1:
        raise ValueError(f"MLP tensors in {checkpoint.path} have different dtypes: {dtypes}")
    return total


def mergeable_folder(
    source: str | Path,
    target: str | Path,
    *,
    shared_rate: float = 0.75,
    soup: bool = False,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FolderReceipt:
    """Convert an upcycled folder to a mergeable one, with mixing logits in place of routers.

    Args:
        source: Folder of an upcycled model.
        target: The folder to write.
        shared_rate: lambda, the shared expert's coefficient, 0 to 1.
        soup: Whether to learn the coefficients of all experts; required for a gate without a shared
            expert.
        max_shard_size: Bytes of a weights file at most, or a text such as "2GB".
        overwrite: Whether to replace an existing folder.
        progress: Called with the bytes done and the bytes in all.

    Returns:
        The counts of what was written.

    Raises:
        ValueError: With nothing written, for a folder at another stage, tensors that do not match
            the config, an invalid rate or gate, an existing target, or too little disk space.
    """
    check_out_dir(target, overwrite, [source])
    config, moe, paths = open_upcycled(source, stage="moe")
    _check_whole(source, config, moe)
    new_config = folders.mergeable_config(config, shared_rate, soup)
    logits = soup_logits(moe.num_experts, shared_rate) if soup else torch.ones(moe.num_experts - 1)
    with Checkpoint(source) as checkpoint:
        folders.check_tensors(config, checkpoint)
        expected = sum(spec.nbytes for spec in checkpoint.specs().values())
        with CheckpointWriter(
            target, max_shard_size, overwrite=overwrite, expected_bytes=expected
        ) as writer:
            folders.write_config(writer, new_config)
            side_files = folders.copy_side_files(Path(source), writer)
            job = Conversion(checkpoint, writer, progress)
            for key in checkpoint.keys():
                if not _is_router(key, paths):
                    job.add(key, checkpoint.get(key))
                job.read(key)
            for path in paths:
                job.add(f"{path}.mixing_logits", logits)
    return FolderReceipt(
        Path(target), moe, job.tensors, job.bytes, side_files, list(paths.values())
    )


def merge_folder(
    source: str | Path,
    target: str | Path,
    *,
    shared_rate: float | None = None,
    alpha: torch.Tensor | Sequence[float] | Sequence[Sequence[float]] | str | None = None,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FolderReceipt:
    """Merge an upcycled, mergeable or EWA folder to a dense one, XFT's Eq. (3).

    Args:
        source: Folder of a model with experts.
        target: The folder to write.
        shared_rate: The shared expert's coefficient for an upcycled model; None is 0.75.
        alpha: Coefficients that override all others, [E] or [L, E] with sums of 1, or "uniform".
        max_shard_size: Bytes of a weights file at most, or a text such as "2GB".
        overwrite: Whether to replace an existing folder.
        progress: Called with the bytes done and the bytes in all.

    Returns:
        The counts of what was written, and the coefficients.

    Raises:
        ValueError: With nothing written, for a folder without experts, learned coefficients that
            are not finite, tensors that do not match the config, or an existing target.
    """
    check_out_dir(target, overwrite, [source])
    config, moe, paths = open_upcycled(source)
    family = families.FAMILIES[config.moe_runtime["base_model_type"]]
    shared_rate = check_rate(shared_rate, alpha, config.moe_runtime["stage"])
    _check_whole(source, config, moe)
    given = None if alpha is None else alpha_rows(alpha, len(paths), moe.num_experts)
    with Checkpoint(source) as checkpoint:
        folders.check_tensors(config, checkpoint)
        rows = given or [mixture_of(checkpoint, config, moe, path, shared_rate) for path in paths]
        mixtures = dict(zip(paths, rows, strict=True))
        expected = 0
        for key, spec in checkpoint.specs().items():
            is_expert = key.rpartition(".experts.")[0] in paths
            expected += spec.nbytes // (moe.num_experts if is_expert else 1)
        with CheckpointWriter(
            target, max_shard_size, overwrite=overwrite, expected_bytes=expected
        ) as writer:
            folders.write_config(writer, folders.dense_config(config))
            side_files = folders.copy_side_files(Path(source), writer)
            job = Conversion(checkpoint, writer, progress)
            for key in checkpoint.keys():
                path, _, rest = key.rpartition(".experts.")
                if path in paths:
                    weight = merge_rows(expert_rows(checkpoint, key), mixtures[path])
                    parts = families.split_weights(family, {rest: weight})[rest]
                    names = families.mlp_keys(family, paths[path], moe.bias)[rest]
                    for part, name in zip(parts, names, strict=True):
                        job.add(name, part)
                elif not _is_router(key, paths):
                    job.add(key, checkpoint.get(key))
                job.read(key)
    return FolderReceipt(
        Path(target),
        moe,
        job.tensors,
        job.bytes,
        side_files,
        list(paths.values()),
        alpha=[row.tolist() for row in rows],
        mixing=_mixing(config.moe_runtime, rows, shared_rate, is_given=given is not None),
    )


def _mixing(block: dict, rows: Sequence[torch.Tensor], shared_rate: float, is_given: bool) -> str:
    """Return which coefficients a merge has used, in words."""
    if is_given:
        return "given coefficients"
    if block["stage"] == "ewa":
        return "equal coefficients"
    if block["stage"] == "moe":
        return f"initial coefficients, lambda {shared_rate:g}; xft to-mergeable learns them"
    moved = distance_moved(rows, block["shared_rate"])
    words = f"learned coefficients, up to {moved:.1e} from the initial ones"
    if moved <= UNMOVED:
        words += ". Learn to mix with a larger learning rate, such as 1e-2"
    return words


def _check_whole(source: str | Path, config, moe: MoEConfig) -> None:
    """Raise ValueError for experts that are shards of the base's MLP."""
    if moe.intermediate_size != config.intermediate_size:
        raise ValueError(
            f"The experts in {source} are shards of {moe.intermediate_size} of "
            f"{config.intermediate_size} neurons, which cannot be merged to one MLP. Export the "
            "model, and use moe-runtime shrink"
        )


def _is_router(key: str, paths: dict[str, int]) -> bool:
    """Return whether a key is a layer's router or mixing logits."""
    return key.partition(".gate.")[0] in paths or key.removesuffix(".mixing_logits") in paths
