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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_runtime.hf.dropin.layers import RoutedLayer, experts_module, numbered_layers, plain_name
from moe_runtime.hf.training import trained_files
from moe_runtime.hf.training.trained_files import (
    ExpertLayout,
    experts_path,
    join_row,
    layout_of,
    parse_name,
    split_row,
    stack_parts,
)
from moe_runtime.io.files import atomic_folder, read_json
from moe_runtime.methods.esft.base import base_of, check_base, describe, write_base
from moe_runtime.methods.esft.selection import ExpertSelection, check_selection
from moe_runtime.modules.moe import FLOATS
from moe_runtime.modules.trainable import split_of

# attribute of a model with an applied adapter: the weights it replaced
APPLIED = "moe_runtime_applied"


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """The trained tensors of a task, on the CPU, with its selection and base."""

    selection: ExpertSelection
    tensors: Mapping[str, torch.Tensor]
    base: Mapping[str, Any] | None = None  # None in official folders
    source: str = "adapter"

    def __post_init__(self):
        selected = {(layer, e) for layer, ids in self.selection.experts.items() for e in ids}
        found = {(layer, e) for layer, experts in self.experts.items() for e in experts}
        # our own layers keep their shared expert in the stack
        odd = sorted(selected - found if self.selection.shared_experts else selected ^ found)
        if odd:
            layer, e = odd[0]
            ours, theirs = ("lacks", "has") if odd[0] in selected else ("has", "lacks")
            raise ValueError(
                f"{self.source} {ours} expert {e} of layer {layer}, which its selection {theirs}"
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
        found: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
        for name, tensor in self.tensors.items():
            expert = parse_name(name)
            if expert is not None:
                found.setdefault(expert.layer, {}).setdefault(expert.expert, {})[expert.part] = (
                    tensor
                )
        return {layer: dict(sorted(found[layer].items())) for layer in sorted(found)}

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


def from_config(
    values: Mapping[str, Any], source: str
) -> tuple[ExpertSelection, Mapping[str, Any] | None]:
    """Return the selection and the base of what `to_config` returned; raises ValueError naming
    `source`.
    """
    selection = ExpertSelection.from_dict(values, source)
    return selection, selection.base


def load_selection(path: str | Path) -> ExpertSelection:
    """Read the selection of a configuration file, or of an adapter's expert_cfg.json; raises
    ValueError naming the file.
    """
    return from_config(read_json(path), str(path))[0]


def load_adapter(folder: str | Path) -> Adapter:
    """Load an adapter folder, ours or an official one; the tensors are memory-mapped."""
    path = Path(folder) / trained_files.CONFIG
    selection, base = from_config(read_json(path), str(path))
    return Adapter(
        selection=selection,
        tensors=trained_files.read_tensors(folder),
        base=base,
        source=str(folder),
    )


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


def changes_of(model: nn.Module, adapter: Adapter) -> Iterator[Change]:
    """Yield the parameters of `model` that `adapter` replaces; raises ValueError if they are
    incompatible.
    """
    layers = numbered_layers(model)
    check_selection(layers, adapter.selection)
    for number, experts in adapter.experts.items():
        layer = layers.get(number)
        selected = adapter.selection.experts.get(number, ())
        extra = [
            e for e in experts if e not in selected and (layer is None or e >= layer.num_shared)
        ]
        if extra:
            raise ValueError(
                f"{adapter.source} has expert {extra[0]} of layer {number}, which its selection "
                "lacks"
            )
        yield from _stack_changes(adapter, number, layer, experts_module(model, layer), experts)
    parameters = {
        plain_name(name): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for name, tensor in adapter.others.items():
        shape = list(parameters[name].shape) if name in parameters else None
        if shape != list(tensor.shape):
            raise ValueError(
                f"{adapter.source} has {name} {list(tensor.shape)}, but the model has "
                f"{shape or 'no such tensor'}"
            )
        yield Change(name, parameters[name])


def _stack_changes(
    adapter: Adapter,
    number: int,
    layer: RoutedLayer,
    module: nn.Module,
    experts: Mapping[int, Mapping[str, torch.Tensor]],
) -> Iterator[Change]:
    layout = layout_of(module)
    path = experts_path(layer)
    stacks = stack_parts(layout)
    want = {}
    for stack in stacks:
        # views of one row give the shapes, whatever the layout
        row = torch.empty(getattr(module, stack).shape[1:], device="meta")
        want |= {part: list(view.shape) for part, view in split_row(layout, stack, row).items()}
    for e, own in experts.items():
        found = {part: list(tensor.shape) for part, tensor in own.items()}
        if found != want:
            part = min(part for part in {*found, *want} if found.get(part) != want.get(part))
            raise ValueError(
                f"{adapter.source} has {part} {found.get(part, 'missing')} of expert {e} of layer "
                f"{number}, but the model has {want.get(part, 'no such part')}"
            )
    for stack in stacks:
        yield Change(f"{path}.{stack}", getattr(module, stack), tuple(experts), number, layout)


def check_adapter(
    model: nn.Module, adapter: Adapter, *, check_weights: bool = True
) -> list[Change]:
    """Return the parameters of `model` that an adapter replaces; raises ValueError if `model` is
    not its base.
    """
    if adapter.base is not None:
        own = base_of(model, adapter.selection.experts) if check_weights else describe(model)
        check_base(adapter.base, own, adapter.source)
    changes = list(changes_of(model, adapter))
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
    kept = {}
    for name, parameter, ids, *_ in changes:
        rows = parameter.detach() if ids is None else parameter.detach()[list(ids)]
        kept[name] = (ids, rows.to("cpu", copy=True))
    # before the first weight changes, so that `remove` can undo a failure halfway
    setattr(model, APPLIED, Applied(adapter.source, kept))
    for change in changes:
        _put(change.parameter, change.ids, change.values(adapter))
    return adapter


def check_is_base(model: nn.Module) -> None:
    """Raise ValueError if `model` has an adapter in it or trains experts."""
    there = trained_files.holder(model, APPLIED)
    is_training = trained_files.training_of(model) is not None or any(
        split_of(m) is not None for m in model.modules()
    )
    if there is not None or is_training:
        if there is None:
            state = "trains experts"
        else:
            state = f"has the adapter {getattr(there, APPLIED).source} in it"
        raise ValueError(
            f"The model {state}. Call esft.{'fold or esft.drop' if there is None else 'remove'} "
            "first"
        )


class Applied(NamedTuple):
    """The values that an adapter replaced, by the parameters' plain names."""

    source: str
    kept: dict[str, tuple[tuple[int, ...] | None, torch.Tensor]]


def _put(parameter: torch.Tensor, ids: tuple[int, ...] | None, values: torch.Tensor) -> None:
    if ids is None:
        parameter.copy_(values)
    else:
        index = torch.tensor(ids, device=parameter.device)
        parameter.index_copy_(0, index, values.to(parameter.device, parameter.dtype))


@torch.no_grad()
def remove(model: nn.Module) -> None:
    """Remove the adapter of `apply` from `model`; every weight is bit-identical to before."""
    there = trained_files.holder(model, APPLIED)
    if there is None:
        raise ValueError(f"{type(model).__name__} has no adapter in it. Apply one with esft.apply")
    parameters = {
        plain_name(name): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for name, (ids, values) in getattr(there, APPLIED).kept.items():
        _put(parameters[name], ids, values)
    delattr(there, APPLIED)
