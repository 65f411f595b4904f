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
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.folders import SHARD, Progress, skeleton, to_saved
from moe_runtime.hf.models.saved_rows import SavedRows, saved_rows, saved_tensors
from moe_runtime.hf.training.trainable import layers_of
from moe_runtime.hf.training.trained_files import layout_of, split_row, stack_parts
from moe_runtime.io.checkpoint import Checkpoint, check_finite
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
from moe_runtime.methods.esft.lora import check_mask, read_lora
from moe_runtime.methods.lora import stacks
from moe_runtime.methods.lora.stacks import MergeReceipt
from moe_runtime.modules.moe import FLOATS


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
    """Write the model folder `base` with the experts of `adapter` to `out`, keeping the base's
    names, layouts and dtypes.
    """
    check_out_dir(out, overwrite, [base, adapter])
    if stacks.is_peft(adapter):
        check_fit(base, adapter, check_weights=check_weights)
        return stacks.merge_folder(
            base,
            adapter,
            out,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=progress,
        )
    adapter = as_adapter(adapter)
    config = folders.read_config(base)
    with Checkpoint(base) as checkpoint:
        folders.check_depth(config, checkpoint)
        model = skeleton(config)
        plan = _planned(model, adapter, checkpoint, check_weights)
        how = {"max_shard_size": max_shard_size, "overwrite": overwrite, "progress": progress}
        job, names = folders.rewrite(
            checkpoint, out, functools.partial(plan.tensor, checkpoint), **how
        )
    experts = sum(len(ids) for ids in adapter.experts.values())
    return MergeReceipt(Path(out), job.tensors, job.bytes, names, experts, len(plan))


def check_fit(
    base: str | Path, adapter: Adapter | str | Path, *, check_weights: bool = True
) -> int:
    """Return how many tensors of the folder `base` an adapter changes; raises ValueError as
    `merge_folder` does.
    """
    is_lora = stacks.is_peft(adapter)
    adapter = read_lora(adapter) if is_lora else as_adapter(adapter)
    config = folders.read_config(base)
    with Checkpoint(base) as checkpoint:
        folders.check_depth(config, checkpoint)
        model = skeleton(config)
        return len(_planned(model, adapter, checkpoint, check_weights, is_lora))


def _planned(
    model: nn.Module, adapter, checkpoint: Checkpoint, check_weights: bool, is_lora: bool = False
):
    """Check an adapter or LoraAdapter against its base's folder; return the tensors it changes."""
    layers = layers_of(model, fresh=False)
    described = describe(model, layers)
    if adapter.base is not None:
        check_base(adapter.base, described, adapter.source)
    if is_lora:
        plan = stacks.MergePlan(model, adapter.source, checkpoint)
        check_mask(layers, plan.adapter, adapter.selection)
    else:
        plan = _Plan(model, layers, adapter, checkpoint)
    if adapter.base is not None and check_weights:
        weights = _sample(model, adapter, checkpoint)
        weights |= _sample_experts(model, layers, adapter, checkpoint)
        check_base(adapter.base, described | {"weights": weights}, adapter.source)
    return plan


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


class _Plan:
    """The tensors of a folder that an adapter changes, and their new values."""

    def __init__(self, model: nn.Module, layers: Layers, adapter: Adapter, checkpoint: Checkpoint):
        self.model = model
        self.adapter = adapter
        self.specs = checkpoint.specs()
        self.rows: dict[str, tuple[Change, SavedRows]] = {}
        for change in changes_of(model, layers, adapter):
            if change.ids is not None:
                saved = saved_rows(model, change.name, change.parameter, change.ids, checkpoint)
                for key, rows in saved.items():
                    self.rows[key] = (change, rows)
        self.others = saved_tensors(model, adapter.others, checkpoint)
        for key in (*self.rows, *self.others):
            if self.specs[key].dtype not in FLOATS:
                raise ValueError(
                    f"{key} in {checkpoint.path} must have a floating dtype, but is "
                    f"{self.specs[key].dtype}"
                )

    def __len__(self) -> int:
        return len(self.rows) + len(self.others)

    def tensor(self, checkpoint: Checkpoint, key: str) -> torch.Tensor:
        """Return the new value of the folder's tensor `key`. Raises ValueError if the adapter makes
        it NaN or infinite.
        """
        if key not in self.rows and key not in self.others:
            return checkpoint.get(key)
        return check_finite(
            self._changed(checkpoint, key), key, f"the merge of {self.adapter.source}"
        )

    def _changed(self, checkpoint: Checkpoint, key: str) -> torch.Tensor:
        """Return the value that the adapter gives to the folder's tensor `key`."""
        if key in self.others:
            return self.others[key].to(self.specs[key].dtype)
        change, rows = self.rows[key]
        if not rows.stacked:
            return self._row(change, rows, rows.ids[0]).to(self.specs[key].dtype)
        tensor = checkpoint.get(key)
        for e in rows.ids:
            tensor[e] = self._row(change, rows, e)
        return tensor

    def _row(self, change: Change, rows: SavedRows, expert: int) -> torch.Tensor:
        """Return one expert's values in the folder's layout."""
        return rows.row(self.model, change.values(self.adapter, expert)[0])
