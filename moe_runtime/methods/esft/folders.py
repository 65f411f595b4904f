"""ESFT from disk to disk: an adapter merged into its base's folder, tensor by tensor, in the base's own form.

The result is what `esft.apply` and save_pretrained would write, for models that do not fit into memory, which holds one
tensor of the base, one shard of the target, and the adapter. The target is written atomically.
"""

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from moe_runtime.hf.dropin.layers import experts_module, numbered_layers
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.configuration import SHIM
from moe_runtime.hf.models.folders import SHARD, Conversion, Progress, skeleton, to_saved
from moe_runtime.hf.training.trained_files import experts_path, layout_of, split_row, stack_parts
from moe_runtime.io.checkpoint import Checkpoint, CheckpointWriter, TensorSpec
from moe_runtime.io.files import check_out_dir
from moe_runtime.methods.esft.adapters import (
    SAMPLED,
    Adapter,
    Change,
    as_adapter,
    changes_of,
    check_base,
    describe,
    sample_weights,
    sampled_experts,
)
from moe_runtime.modules.moe import FLOATS

_FIRST = re.compile(r"(\bexperts\.)0(\.)")  # expert 0 in a saved name


class MergeReceipt(NamedTuple):
    """What `merge_folder` wrote."""

    path: Path
    tensors: int
    bytes: int
    side_files: list[str]  # config, tokenizer and the like, copied
    experts: int  # replaced, over all layers
    changed: int  # tensors of the folder that the adapter changed


class _Rows(NamedTuple):
    """From which rows of a stack of the model a tensor of the folder is made."""

    change: Change
    ids: tuple[int, ...]
    saved: str | None  # the tensor's name where there is one row; None where it is as the model has it
    stacked: bool  # within a stack of all experts, or one expert's tensor


def merge_folder(
    base: str | Path, adapter: Adapter | str | Path, out: str | Path, *, max_shard_size: int | str = SHARD,
    overwrite: bool = False, check_weights: bool = True, progress: Progress | None = None,
) -> MergeReceipt:  # fmt: skip
    """Write the model folder `base` with the experts of `adapter` to the folder `out`, in base's names, layouts and dtypes."""
    check_out_dir(out, overwrite, [base, adapter])
    adapter = as_adapter(adapter)
    config = folders.read_config(base)
    with Checkpoint(base) as checkpoint:
        folders.check_depth(config, checkpoint)
        model = skeleton(config)
        plan = _planned(model, adapter, checkpoint, check_weights)
        total = sum(spec.nbytes for spec in checkpoint.specs().values())
        with CheckpointWriter(out, max_shard_size, overwrite=overwrite, expected_bytes=total) as writer:
            names = [name for name in ("config.json", f"{SHIM}.py") if (Path(base) / name).is_file()]
            for name in names:
                writer.copy_file(Path(base) / name)
            names += folders.copy_side_files(Path(base), writer)
            job = Conversion(checkpoint, writer, progress)
            for key in checkpoint.keys():
                job.add(key, plan.tensor(checkpoint, key))
                job.read(key)
    experts = sum(len(ids) for ids in adapter.experts.values())
    return MergeReceipt(Path(out), job.tensors, job.bytes, names, experts, len(plan))


def check_fit(base: str | Path, adapter: Adapter | str | Path, *, check_weights: bool = True) -> int:
    """Return how many tensors of the folder `base` an adapter changes; raises ValueError as `merge_folder` does."""
    adapter = as_adapter(adapter)
    config = folders.read_config(base)
    with Checkpoint(base) as checkpoint:
        folders.check_depth(config, checkpoint)
        model = skeleton(config)
        return len(_planned(model, adapter, checkpoint, check_weights))


def _planned(model: nn.Module, adapter: Adapter, checkpoint: Checkpoint, check_weights: bool) -> "_Plan":
    """Check an adapter against its base's folder and return what it changes there."""
    if adapter.base is not None:
        check_base(adapter.base, described := describe(model), adapter.source)
    plan = _Plan(model, adapter, checkpoint.specs(), str(checkpoint.path))
    if adapter.base is not None and check_weights:
        weights = _sample(model, adapter, checkpoint) | _sample_experts(plan, checkpoint)
        check_base(adapter.base, described | {"weights": weights}, adapter.source)
    return plan


def _sample(model: nn.Module, adapter: Adapter, checkpoint: Checkpoint) -> dict[str, list[float]]:
    """Read from the folder the weights that the adapter records of its base, where it has them as the model does."""
    parameters, specs, keys = dict(model.named_parameters()), checkpoint.specs(), {}
    for name in adapter.base.get("weights", {}):
        saved = list(to_saved(model, {name: parameters[name]})) if name in parameters else []
        if len(saved) == 1 and saved[0] in specs and specs[saved[0]].shape == parameters[name].shape:
            keys[name] = saved[0]
    read = {name: specs[key] for name, key in keys.items()}
    return sample_weights(read, lambda name: checkpoint.get_rows(keys[name], read[name].shape[0] // 2))


def _sample_experts(plan: "_Plan", checkpoint: Checkpoint) -> dict[str, list[float]]:
    """Read from the folder what `base.expert_matrices` and `sample_weights` read from a model."""
    layers, sample = numbered_layers(plan.model), {}
    for number, e in sampled_experts(plan.model, plan.adapter.selection.experts).items():
        module, path = experts_module(plan.model, layers[number]), experts_path(layers[number])
        layout = layout_of(module)
        for name in stack_parts(layout):
            stack = getattr(module, name)
            change = Change(f"{path}.{name}", stack, (e,), number, layout)
            # a row of numbers shows where the folder has its weights
            row = torch.arange(stack[0].numel(), dtype=torch.int32).view(stack.shape[1:])
            saved = {key: plan.saved_row(rows, row) for key, rows in plan.rows_of(change).items()}
            for part, matrix in split_row(layout, name, row).items():
                if f"{path}.{e}.{part}" in plan.adapter.base.get("weights", {}):
                    places = matrix[matrix.shape[0] // 2].flatten()[:SAMPLED].tolist()
                    values = [_weight(checkpoint, saved, e, place) for place in places]
                    sample[f"{path}.{e}.{part}"] = values
    return sample


def _weight(checkpoint: Checkpoint, saved: dict[str, tuple[bool, torch.Tensor]], expert: int, place: int) -> float:
    """Read weight number `place` of an expert's row, of which `saved` has the numbers by the folder's names."""
    key, stacked, at = next(
        (key, stacked, at.tolist()) for key, (stacked, numbers) in saved.items() for at in (numbers == place).nonzero()
    )
    first, *rest = (expert, *at) if stacked else at
    return checkpoint.get_rows(key, first)[tuple(rest)].double().item()


class _Plan:
    """Which tensors of a folder an adapter changes, and to what."""

    def __init__(self, model: nn.Module, adapter: Adapter, specs: dict[str, TensorSpec], source: str):
        self.model, self.adapter, self.specs, self.source = model, adapter, specs, source
        self.rows: dict[str, _Rows] = {}
        changes = list(changes_of(model, adapter))
        for change in changes:
            if change.ids is not None:
                self.rows |= self.rows_of(change)
        self.others = self._others([change.name for change in changes if change.ids is None])
        for key in (*self.rows, *self.others):
            if specs[key].dtype not in FLOATS:
                raise ValueError(f"{key} in {source} is {specs[key].dtype}; expected weights of a floating dtype")

    def __len__(self) -> int:
        return len(self.rows) + len(self.others)

    def tensor(self, checkpoint: Checkpoint, key: str) -> torch.Tensor:
        """Return what the tensor `key` of the folder becomes."""
        if key in self.others:
            return self.others[key].to(self.specs[key].dtype)
        if key not in self.rows:
            return checkpoint.get(key)
        rows = self.rows[key]
        if not rows.stacked:
            return self._row(rows, rows.ids[0]).to(self.specs[key].dtype)
        tensor = checkpoint.get(key)
        for e in rows.ids:
            tensor[e] = self._row(rows, e)
        return tensor

    def _row(self, rows: _Rows, expert: int) -> torch.Tensor:
        """Return one expert's values as the folder has them."""
        return self.saved_row(rows, rows.change.values(self.adapter, expert)[0])[1]

    def saved_row(self, rows: _Rows, row: torch.Tensor) -> tuple[bool, torch.Tensor]:
        """Return whether the folder has a row of the model's stack within a stack, and the row as the folder has it."""
        row = row[None]
        saved = row if rows.saved is None else to_saved(self.model, {rows.change.name: row})[rows.saved]
        return rows.stacked, saved[0] if rows.stacked else saved

    def rows_of(self, change: Change) -> dict[str, _Rows]:
        """Find the tensors of the folder that hold the rows of a stack."""
        name, stack, ids, *_ = change
        found, shapes = {}, {}
        one = torch.empty(1, *stack.shape[1:], device="meta")
        for saved, tensor in to_saved(self.model, {name: one}).items():
            stacked = _FIRST.search(saved) is None
            keys = {saved: ids} if stacked else {_FIRST.sub(rf"\g<1>{e}\g<2>", saved): (e,) for e in ids}
            found |= {key: _Rows(change, own, saved, stacked) for key, own in keys.items()}
            shapes |= dict.fromkeys(keys, (stack.shape[0], *tensor.shape[1:]) if stacked else tuple(tensor.shape))
        whole = {name: tuple(stack.shape)}
        return {name: _Rows(change, ids, None, True)} if self._choose(shapes, whole) is whole else found

    def _others(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Return the folder's tensors for parameters that belong to no expert."""
        if not names:
            return {}
        own = {name: self.adapter.others[name] for name in names}
        saved = to_saved(self.model, own)
        shapes, whole = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (saved, own))
        found = own if self._choose(shapes, whole) is whole else saved
        # a folder may hold both names of one weight
        for pair in getattr(self.model, "all_tied_weights_keys", {}).items():
            for name, twin in (pair, pair[::-1]):
                if name in found and twin in self.specs:
                    found.setdefault(twin, found[name])
        return found

    def _choose(self, saved: dict[str, tuple], whole: dict[str, tuple]) -> dict[str, tuple]:
        """Return which of two sets of names and shapes the folder has: as transformers saves, or as the model is."""
        for shapes in (saved, whole):
            if all(key in self.specs and self.specs[key].shape == shape for key, shape in shapes.items()):
                return shapes
        key = next(key for key, shape in saved.items() if key not in self.specs or self.specs[key].shape != shape)
        there = f"has it as {list(self.specs[key].shape)}" if key in self.specs else "lacks it"
        raise ValueError(
            f"{self.source} should have {key} {list(saved[key])}, and {there}; expected a folder written by "
            "transformers' save_pretrained, or that model from the Hub"
        )
