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

from moe_runtime.hf.dropin.layers import experts_module, numbered_layers
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.folders import SHARD, Progress, skeleton, to_saved
from moe_runtime.hf.models.saved_rows import SavedRows, saved_rows, saved_tensors
from moe_runtime.hf.training.trained_files import experts_path, layout_of, split_row, stack_parts
from moe_runtime.io.checkpoint import Checkpoint, check_finite
from moe_runtime.io.files import check_out_dir
from moe_runtime.methods.esft.adapters import Adapter, Change, as_adapter, changes_of
from moe_runtime.methods.esft.base import (
    SAMPLED,
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
    if adapter.base is not None:
        check_base(adapter.base, described := describe(model), adapter.source)
    if is_lora:
        plan = stacks.Plan(model, adapter.source, checkpoint)
    else:
        plan = _Plan(model, adapter, checkpoint)
    if is_lora:
        check_mask(model, plan.adapter, adapter.selection)
    if adapter.base is not None and check_weights:
        weights = _sample(model, adapter, checkpoint) | _sample_experts(model, adapter, checkpoint)
        check_base(adapter.base, described | {"weights": weights}, adapter.source)
    return plan


def _sample(model: nn.Module, adapter, checkpoint: Checkpoint) -> dict[str, list[float]]:
    """Read the base weights recorded by the adapter, if the folder stores them as the model
    does.
    """
    parameters = dict(model.named_parameters())
    specs = checkpoint.specs()
    keys = {}
    for name in adapter.base.get("weights", {}):
        saved = list(to_saved(model, {name: parameters[name]})) if name in parameters else []
        if (
            len(saved) == 1
            and saved[0] in specs
            and specs[saved[0]].shape == parameters[name].shape
        ):
            keys[name] = saved[0]
    read = {name: specs[key] for name, key in keys.items()}
    return sample_weights(
        read, lambda name: checkpoint.get_rows(keys[name], read[name].shape[0] // 2)
    )


def _sample_experts(model: nn.Module, adapter, checkpoint: Checkpoint) -> dict[str, list[float]]:
    """Read the values of `base.expert_matrices` and `sample_weights` from the folder."""
    layers = numbered_layers(model)
    sample = {}
    for number, e in sampled_experts(model, adapter.selection.experts).items():
        module = experts_module(model, layers[number])
        path = experts_path(layers[number])
        layout = layout_of(module)
        for name in stack_parts(layout):
            stack = getattr(module, name)
            # a row of indices shows where the folder stores the row's weights
            row = torch.arange(stack[0].numel(), dtype=torch.int32).view(stack.shape[1:])
            found = saved_rows(model, f"{path}.{name}", stack, (e,), checkpoint)
            saved = {key: (rows.stacked, rows.row(model, row)) for key, rows in found.items()}
            for part, matrix in split_row(layout, name, row).items():
                if f"{path}.{e}.{part}" in adapter.base.get("weights", {}):
                    places = matrix[matrix.shape[0] // 2].flatten()[:SAMPLED].tolist()
                    values = [_weight(checkpoint, saved, e, place) for place in places]
                    sample[f"{path}.{e}.{part}"] = values
    return sample


def _weight(
    checkpoint: Checkpoint, saved: dict[str, tuple[bool, torch.Tensor]], expert: int, place: int
) -> float:
    """Read weight number `place` of an expert's row; `saved` has the row's indices by the folder's
    names.
    """
    key, stacked, at = next(
        (key, stacked, at.tolist())
        for key, (stacked, numbers) in saved.items()
        for at in (numbers == place).nonzero()
    )
    first, *rest = (expert, *at) if stacked else at
    return checkpoint.get_rows(key, first)[tuple(rest)].double().item()


class _Plan:
    """The tensors of a folder that an adapter changes, and their new values."""

    def __init__(self, model: nn.Module, adapter: Adapter, checkpoint: Checkpoint):
        self.model, self.adapter, self.specs = model, adapter, checkpoint.specs()
        self.rows: dict[str, tuple[Change, SavedRows]] = {}
        changes = list(changes_of(model, adapter))
        for change in changes:
            if change.ids is not None:
                found = saved_rows(model, change.name, change.parameter, change.ids, checkpoint)
                self.rows |= {key: (change, rows) for key, rows in found.items()}
        self.others = saved_tensors(
            model, {c.name: adapter.others[c.name] for c in changes if c.ids is None}, checkpoint
        )
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
