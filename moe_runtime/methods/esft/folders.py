"""ESFT on model folders: merge an adapter into its base's folder, tensor by tensor, in the base's
format.

The result equals that of `esft.apply` and save_pretrained, also for models that do not fit into
memory: it holds only one tensor of the base, one shard of the target, and the adapter. The target
is written atomically.
"""

import functools
from pathlib import Path

import torch
from torch import nn

from moe_runtime.hf.dropin.layers import plain_name
from moe_runtime.hf.models.folders import SHARD, Progress, to_saved
from moe_runtime.hf.models.saved_rows import saved_rows, saved_tensors
from moe_runtime.hf.training.trainable import layers_of
from moe_runtime.hf.training.trained_files import layout_of, split_row, stack_parts
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.files import check_out_dir
from moe_runtime.methods.esft.adapters import Adapter, Change, as_adapter, changes_of
from moe_runtime.methods.esft.base import (
    SAMPLED,
    Layers,
    check_base,
    describe,
    sample_weights,
    sampled_experts,
)
from moe_runtime.methods.esft.lora import LoraAdapter, check_mask, read_lora
from moe_runtime.methods.lora import stacks
from moe_runtime.methods.lora.stacks import MergeReceipt


def merge_folder(
    base: str | Path,
    adapter: Adapter | str | Path,
    out: str | Path,
    *,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    check_weights: bool = True,
    progress: Progress | None = None,
) -> MergeReceipt:
    """Write a model folder with the experts of an adapter, in the base's names, layouts and dtypes.

    Tensors are streamed, so the model may be larger than the memory; the adapter is held in memory.

    Args:
        base: Folder or Hub id of the base.
        adapter: An adapter, or its folder.
        out: The folder to write.
        max_shard_size: Bytes of a weights file at most, or a text such as "2GB".
        overwrite: Whether to replace an existing folder.
        check_weights: Whether the base must have the weights that were tuned.
        progress: Called with the bytes done and the bytes in all.

    Returns:
        The counts of what was written.

    Raises:
        ValueError: With nothing written, if the adapter is of another base.
    """
    check_out_dir(out, overwrite, [base, adapter])
    with stacks.open_base(base) as (model, checkpoint):
        _, changes = _planned(model, adapter, checkpoint, check_weights)
        return changes.write(
            out, max_shard_size=max_shard_size, overwrite=overwrite, progress=progress
        )


def check_fit(
    base: str | Path, adapter: Adapter | str | Path, *, check_weights: bool = True
) -> tuple[Adapter | LoraAdapter, int]:
    """Return the adapter and how many tensors of the folder `base` it changes; raises ValueError as
    `merge_folder` does.
    """
    with stacks.open_base(base) as (model, checkpoint):
        adapter, changes = _planned(model, adapter, checkpoint, check_weights)
        return adapter, len(changes)


def _planned(
    model: nn.Module, adapter: Adapter | str | Path, checkpoint: Checkpoint, check_weights: bool
) -> tuple[Adapter | LoraAdapter, stacks.Changes]:
    """Check an adapter against its base's folder; return it and the tensors it changes."""
    is_lora = stacks.is_peft(adapter)
    adapter = read_lora(adapter) if is_lora else as_adapter(adapter)
    layers = layers_of(model, fresh=False)
    described = describe(model, layers)
    if adapter.base is not None:
        check_base(adapter.base, described, adapter.source)
    if is_lora:
        peft = stacks.read_peft(adapter.source, model)
        check_mask(layers, peft, adapter.selection)
        changes = stacks.peft_changes(model, peft, checkpoint)
    else:
        changes = _changes(model, layers, adapter, checkpoint)
    if adapter.base is not None and check_weights:
        weights = _sample(model, adapter, checkpoint)
        weights |= _sample_experts(model, layers, adapter, checkpoint)
        check_base(adapter.base, described | {"weights": weights}, adapter.source)
    return adapter, changes


def _sample(model: nn.Module, adapter, checkpoint: Checkpoint) -> dict[str, list[float]]:
    """Read the weights that an adapter records, where the folder stores them as the model does."""
    parameters = dict(model.named_parameters())
    specs = checkpoint.specs()
    sampled = {}
    keys = {}
    for name in adapter.base.get("weights", {}):
        if name not in parameters:
            continue
        saved = list(to_saved(model, {name: parameters[name]}))
        if len(saved) == 1 and saved[0] in specs:
            spec = specs[saved[0]]
            if spec.shape == parameters[name].shape:
                sampled[name] = spec
                keys[name] = saved[0]

    def middle_row(name: str) -> torch.Tensor:
        return checkpoint.get_rows(keys[name], sampled[name].shape[0] // 2)

    return sample_weights(sampled, middle_row)


def _sample_experts(
    model: nn.Module, layers: Layers, adapter, checkpoint: Checkpoint
) -> dict[str, list[float]]:
    """Read the values of `base.expert_matrices` and `sample_weights` from the folder."""
    recorded = adapter.base.get("weights", {})
    sample = {}
    for number, e in sampled_experts(layers, adapter.selection.experts).items():
        module = layers[number].module
        path = plain_name(layers[number].name)
        layout = layout_of(module)
        for name in stack_parts(layout):
            stack = getattr(module, name)
            # a row of indices shows where the folder stores the row's weights
            row = torch.arange(stack[0].numel(), dtype=torch.int32).view(stack.shape[1:])
            saved = {}
            for key, rows in saved_rows(model, f"{path}.{name}", stack, (e,), checkpoint).items():
                saved[key] = (rows.stacked, rows.row(model, row))
            for part, matrix in split_row(layout, name, row).items():
                if f"{path}.{e}.{part}" in recorded:
                    numbers = matrix[matrix.shape[0] // 2].flatten()[:SAMPLED].tolist()
                    values = [_weight(checkpoint, saved, e, number) for number in numbers]
                    sample[f"{path}.{e}.{part}"] = values
    return sample


def _weight(
    checkpoint: Checkpoint, saved: dict[str, tuple[bool, torch.Tensor]], expert: int, number: int
) -> float:
    """Read a weight of an expert's row by its index; `saved` has the indices of each tensor."""
    for key, (stacked, numbers) in saved.items():
        for at in (numbers == number).nonzero().tolist():
            first, *rest = (expert, *at) if stacked else at
            return checkpoint.get_rows(key, first)[tuple(rest)].double().item()
    raise KeyError(number)


def _changes(
    model: nn.Module, layers: Layers, adapter: Adapter, checkpoint: Checkpoint
) -> stacks.Changes:
    """Return what an adapter of whole experts changes in the folder of `model`."""
    changes = stacks.Changes(adapter.source, model, checkpoint)
    for change in changes_of(model, layers, adapter):
        if change.ids is not None:
            row = functools.partial(_row, change, adapter)
            changes.add_rows(change.name, change.parameter, change.ids, _new, row)
    for key, tensor in saved_tensors(model, adapter.others, checkpoint).items():
        changes.add(key, functools.partial(_new, row=tensor))
    changes.experts = sum(map(len, adapter.experts.values()))
    return changes


def _row(change: Change, adapter: Adapter, expert: int) -> torch.Tensor:
    return change.values(adapter, expert)[0]


def _new(old: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return row
