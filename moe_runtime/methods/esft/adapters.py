"""ESFT adapters: folders with only the trained experts of a task, which can be applied to a base
and removed.

    adapter = load_adapter("law")      # official folders too
    apply(model, adapter)              # the tuned model; save_pretrained writes it whole
    remove(model)                      # the base again, bit for bit

A folder holds model.safetensors, with the names of `moe_runtime.hf.training.trained_files`, and
expert_cfg.json: the official configuration and, in folders written here, the base that it belongs
to, under `moe_runtime`. `moe_runtime.methods.esft.folders` merges an adapter into a model that does
not fit into memory.

An adapter replaces whole experts and would break another base of the same shapes, so it says which
one is its own (`moe_runtime.methods.esft.base`).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_runtime.hf.dropin.layers import plain_name
from moe_runtime.hf.training import trained_files
from moe_runtime.hf.training.trainable import ExpertsLayer, layers_of
from moe_runtime.hf.training.trained_files import (
    ExpertLayout,
    join_row,
    layout_of,
    parse_name,
    split_row,
    stack_parts,
)
from moe_runtime.io.files import atomic_folder
from moe_runtime.methods.esft.base import Layers, base_of, check_base, describe, write_base
from moe_runtime.methods.esft.selection import ExpertSelection, check_selection
from moe_runtime.modules.moe import FLOATS

# attribute of a model with an applied adapter: the weights it replaced
APPLIED = "moe_runtime_applied"


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """The trained tensors of a task, on the CPU.

    Attributes:
        selection: The experts that were trained.
        tensors: By their official names, such as `model.layers.1.mlp.experts.3.gate_proj.weight`.
        base: Identifies the model that was tuned; None in official folders.
        source: Where the adapter was read, for messages.
    """

    selection: ExpertSelection
    tensors: Mapping[str, torch.Tensor]
    base: Mapping[str, Any] | None = None  # None in official folders
    source: str = "adapter"

    def __post_init__(self):
        for layer, ids in self.selection.experts.items():
            missing = sorted(set(ids) - set(self.experts.get(layer, ())))
            if missing:
                raise ValueError(
                    f"{self.source} lacks expert {missing[0]} of layer {layer}, which its "
                    "selection has"
                )

    @property
    def num_parameters(self) -> int:
        """Number of elements in all tensors."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @functools.cached_property
    def others(self) -> dict[str, torch.Tensor]:
        """The tensors that belong to no expert."""
        return {name: tensor for name, tensor in self.tensors.items() if parse_name(name) is None}

    @functools.cached_property
    def experts(self) -> dict[int, dict[int, dict[str, torch.Tensor]]]:
        """The experts' tensors: layer -> id -> part (gate_proj.weight, ...), sorted."""
        layers: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
        for name, tensor in self.tensors.items():
            parsed = parse_name(name)
            if parsed is not None:
                experts = layers.setdefault(parsed.layer, {})
                experts.setdefault(parsed.expert, {})[parsed.part] = tensor
        return {layer: dict(sorted(layers[layer].items())) for layer in sorted(layers)}

    def to_config(self) -> dict[str, Any]:
        """Return the content of expert_cfg.json."""
        return to_config(self.selection, self.base)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the folder atomically; raises ValueError if it exists, and never replaces a whole
        model.
        """
        trained_files.check_place(folder)
        with atomic_folder(folder, overwrite) as tmp:
            trained_files.write_files(tmp, self.tensors, self.to_config())
        return Path(folder)


def to_config(selection: ExpertSelection, base: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the content of expert_cfg.json: the official configuration and, where it is known, the
    base.
    """
    return selection.to_dict() | write_base(base)


def load_adapter(folder: str | Path) -> Adapter:
    """Read an adapter folder, ours or an official one.

    Args:
        folder: A folder of `save_adapter`, `esft train` or the official release.

    Returns:
        The adapter, whose tensors are memory-mapped.

    Raises:
        ValueError: If files are missing or do not fit together.
    """
    selection = ExpertSelection.load(Path(folder) / trained_files.CONFIG)
    tensors = trained_files.read_tensors(folder)
    return Adapter(selection=selection, tensors=tensors, base=selection.base, source=str(folder))


def as_adapter(adapter: Adapter | str | Path) -> Adapter:
    """Return `adapter`, loaded if it is a folder."""
    return adapter if isinstance(adapter, Adapter) else load_adapter(adapter)


class Change(NamedTuple):
    """A parameter that an adapter replaces, or the rows `ids` of a layer's stack."""

    name: str  # plain, of the parameter
    parameter: torch.Tensor
    ids: tuple[int, ...] | None = None
    layer: int | None = None
    layout: ExpertLayout | None = None

    def values(self, adapter: "Adapter", *ids: int) -> torch.Tensor:
        """Return the values from `adapter`; of a stack the rows `ids` [n, ...], by default all that
        it changes.
        """
        if self.ids is None:
            return adapter.others[self.name]
        stack = self.name.rpartition(".")[2]
        experts = adapter.experts[self.layer]
        return torch.stack([join_row(self.layout, stack, experts[e]) for e in ids or self.ids])


def changes_of(model: nn.Module, layers: Layers, adapter: Adapter) -> list[Change]:
    """List the parameters of `model` that `adapter` replaces; raises ValueError if they differ."""
    check_selection(layers, adapter.selection)
    changes = []
    for number, experts in adapter.experts.items():
        layer = layers.get(number)
        # our own layers have their shared expert in the stack
        shared = 0
        if layer is not None and adapter.selection.shared_experts:
            shared = layer.num_shared
        for e in experts:
            if e not in adapter.selection.experts.get(number, ()) and e >= shared:
                raise ValueError(
                    f"{adapter.source} has expert {e} of layer {number}, which its selection lacks"
                )
        _check_parts(adapter, number, layer)
        path = plain_name(layer.name)
        layout = layout_of(layer.module)
        for stack in stack_parts(layout):
            parameter = getattr(layer.module, stack)
            changes.append(Change(f"{path}.{stack}", parameter, tuple(experts), number, layout))
    parameters = parameters_of(model)
    for name, tensor in adapter.others.items():
        shape = list(parameters[name].shape) if name in parameters else None
        if shape != list(tensor.shape):
            raise ValueError(
                f"{adapter.source} has {name} {list(tensor.shape)}, but the model has "
                f"{shape or 'no such tensor'}"
            )
        changes.append(Change(name, parameters[name]))
    return changes


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by plain name; a tied one under all its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {plain_name(name): parameter for name, parameter in named}


def _check_parts(adapter: Adapter, number: int, layer: ExpertsLayer) -> None:
    """Raise ValueError unless an adapter's experts of a layer have the parts of the model's."""
    layout = layout_of(layer.module)
    expected = {}
    for stack in stack_parts(layout):
        # views of one row give the shapes, whatever the layout
        row = torch.empty(getattr(layer.module, stack).shape[1:], device="meta")
        for part, view in split_row(layout, stack, row).items():
            expected[part] = list(view.shape)
    for e, tensors in adapter.experts[number].items():
        shapes = {part: list(tensor.shape) for part, tensor in tensors.items()}
        for part in sorted({*shapes, *expected}):
            if shapes.get(part) != expected.get(part):
                raise ValueError(
                    f"{adapter.source} has {part} {shapes.get(part, 'missing')} of expert {e} of "
                    f"layer {number}, but the model has {expected.get(part, 'no such part')}"
                )


def check_adapter(
    model: nn.Module, adapter: Adapter, *, check_weights: bool = True
) -> list[Change]:
    """List the parameters that an adapter replaces; raises ValueError for another base."""
    layers = layers_of(model)
    if adapter.base is not None:
        described = describe(model, layers)
        if check_weights:
            described = base_of(model, layers, adapter.selection.experts)
        check_base(adapter.base, described, adapter.source)
    changes = changes_of(model, layers, adapter)
    for change in changes:
        parameter = change.parameter
        if hasattr(parameter, "placements") or parameter.is_meta or parameter.dtype not in FLOATS:
            raise ValueError(
                f"{change.name} is distributed, offloaded or quantized. Apply an adapter to the "
                "whole model before doing that"
            )
    return changes


@torch.no_grad()
def apply(
    model: nn.Module, adapter: Adapter | str | Path, *, check_weights: bool = True
) -> Adapter:
    """Apply an adapter to `model` in place, rounded to its dtype; the replaced rows are kept on the
    CPU for `remove`.

    Any experts implementation runs the result, and save_pretrained writes it as a whole model.
    `check_weights=False` accepts a base with other weights than the adapter's.
    """
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    adapter = as_adapter(adapter)
    check_is_base(model)
    changes = check_adapter(model, adapter, check_weights=check_weights)
    replaced = {}
    for name, parameter, ids, *_ in changes:
        rows = parameter.detach() if ids is None else parameter.detach()[list(ids)]
        replaced[name] = (ids, rows.to("cpu", copy=True))
    # before the first weight changes, so that `remove` can undo a failure halfway
    setattr(model, APPLIED, Applied(adapter.source, replaced))
    for change in changes:
        _put(change.parameter, change.ids, change.values(adapter))
    return adapter


def check_is_base(model: nn.Module) -> None:
    """Raise ValueError if `model` has an adapter in it or trains experts."""
    for module in model.modules():
        applied = module.__dict__.get(APPLIED)
        if applied is not None:
            raise ValueError(
                f"The model has the adapter {applied.source} in it. Call esft.remove first"
            )
        if trained_files.TRAINING in module.__dict__:
            raise ValueError("The model trains experts. Call esft.fold or esft.drop first")


class Applied(NamedTuple):
    """The values that an adapter replaced, by the parameters' plain names."""

    source: str
    replaced: dict[str, tuple[tuple[int, ...] | None, torch.Tensor]]


def _put(parameter: torch.Tensor, ids: tuple[int, ...] | None, values: torch.Tensor) -> None:
    if ids is None:
        parameter.copy_(values)
    else:
        index = torch.tensor(ids, device=parameter.device)
        parameter.index_copy_(0, index, values.to(parameter.device, parameter.dtype))


@torch.no_grad()
def remove(model: nn.Module) -> None:
    """Remove the adapter that `apply` applied; every weight is then bit-identical to before.

    Args:
        model: A model after `apply`.

    Raises:
        ValueError: If the model has no adapter in it.
    """
    holder = trained_files.holder(model, APPLIED)
    if holder is None:
        raise ValueError(f"{type(model).__name__} has no adapter in it. Apply one with esft.apply")
    parameters = parameters_of(model)
    for name, (ids, values) in getattr(holder, APPLIED).replaced.items():
        _put(parameters[name], ids, values)
    delattr(holder, APPLIED)
