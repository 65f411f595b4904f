"""Load saved tensors into an existing model: `load_state_dict` accepts the names and layouts of a
model's folder.

transformers saves most families with a matrix per expert (`experts.0.gate_proj.weight`) and holds
stacks [E, 2I, H] (`experts.gate_up_proj`). Only from_pretrained converts between them. Trainer
resumes with load_state_dict(strict=False), which recognizes none of these names and leaves the
experts unchanged (transformers#48805).

After `install`, load_state_dict of every transformers model converts with from_pretrained's rules.
A stack is written into the model as soon as all of its tensors have arrived: it may be spread over
the files of a sharded checkpoint, and memory never holds a second copy of all experts. A stack of
which only some tensors have arrived raises ValueError when it is used or saved.
"""

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moe_runtime.hf.common.replacing import replace_once
from moe_runtime.hf.dropin.gates import has_stacks
from moe_runtime.modules import packed, trainable

PARTIAL = "moe_runtime_partial"  # attribute of a model: its _Partial stacks by name
GUARDS = "moe_runtime_partial_guards"  # attribute of such a model: the hooks that raise
LOADED = "moe_runtime_loaded"  # attribute of a model inside `loading_whole`: its LoadedNames


@dataclass
class LoadedNames:
    """The names that have been loaded into a model."""

    names: set[str] = field(default_factory=set)  # of the model's parameters and buffers
    saved: set[str] = field(default_factory=set)  # of the converted tensors, as in the checkpoint


@dataclass
class _Partial:
    """The tensors of a stack that have arrived so far."""

    converter: Any  # transformers' WeightConverter
    # saved name -> (pattern, tensor)
    tensors: dict[str, tuple[str, Tensor]] = field(default_factory=dict)


def install() -> None:
    """Make load_state_dict of transformers' models accept saved names; calling it again has no
    effect.
    """
    from transformers import PreTrainedModel

    replace_once(PreTrainedModel, "_load_from_state_dict", _load)


def _load(stock: Callable, model, state_dict, prefix, *args) -> None:
    convert_saved(model, state_dict, prefix)
    loaded = model.__dict__.get(LOADED)
    if loaded is not None:
        loaded.names.update(key.removeprefix(prefix) for key in state_dict)
    stock(model, state_dict, prefix, *args)


@torch.no_grad()
def convert_saved(model: nn.Module, state_dict: dict[str, Tensor], prefix: str = "") -> None:
    """Replace saved names and layouts in `state_dict`, whose keys start with `prefix`, by those of
    `model`.

    Converted stacks are copied into the model's parameters at once, and `state_dict` gets the
    parameters themselves. Tensors of incomplete stacks are removed from it and stored until the
    next call. A state_dict in the model's layout is not changed.
    """
    targets = _tensors_of(model)
    partial = model.__dict__.get(PARTIAL, {})
    if not partial and _local_keys(state_dict, prefix) <= targets.keys():
        return
    _rename(model, state_dict, prefix, targets, partial)
    for name in list(partial):
        if prefix + name in state_dict:  # whole, in the model's layout
            del partial[name]
        elif _is_complete(partial[name], name, targets):
            for target, value in _convert(partial.pop(name), name, model).items():
                state_dict[prefix + target] = _write(value, targets.get(target))
    _set_partial(model, partial)


def _rename(
    model: nn.Module,
    state_dict: dict[str, Tensor],
    prefix: str,
    targets: Mapping[str, Tensor],
    partial: dict[str, _Partial],
) -> None:
    """Give tensors of a `state_dict` with saved names the model's names; move those to be converted
    into `partial`.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.integrations import is_deepspeed_zero3_enabled

    # ZeRO-3 has partitioned the parameters; a quantizer has conversions of its own, and only
    # adapters are trained
    is_excluded = is_deepspeed_zero3_enabled() or getattr(model, "hf_quantizer", None) is not None
    if is_excluded:
        return
    renamings = []
    converters = []
    by_pattern = {}
    for conversion in get_model_conversion_mapping(model, add_legacy=False):
        if isinstance(conversion, WeightRenaming):
            renamings.append(conversion)
        elif isinstance(conversion, WeightConverter):
            converters.append(conversion)
            by_pattern |= dict.fromkeys(conversion.source_patterns, conversion)
    renamed = {}
    for key in _local_keys(state_dict, prefix):
        name, pattern = rename_source_key(key, renamings, converters)
        if name in targets:
            renamed[key] = (name, pattern)
    if renamed.keys() <= targets.keys():
        return
    skipped = _modules_with_hooks(model)
    loaded = model.__dict__.get(LOADED, LoadedNames())
    moved = {}
    for key, (name, pattern) in renamed.items():
        if name.rpartition(".")[0] in skipped:
            continue
        tensor = state_dict.pop(prefix + key)
        if pattern is None:
            moved[prefix + name] = tensor
        else:
            partial.setdefault(name, _Partial(by_pattern[pattern])).tensors[key] = (pattern, tensor)
        loaded.saved.add(key)
    state_dict.update(moved)


def _local_keys(state_dict: Mapping[str, Tensor], prefix: str) -> set[str]:
    """Return the keys that start with `prefix`, without it."""
    return {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name, without the hooks of state_dict."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def _modules_with_hooks(model: nn.Module) -> set[str]:
    """Return the paths of experts whose hooks read saved names: packed stacks and separately
    trained rows.
    """
    paths = set()
    for path, module in model.named_modules():
        if packed.layouts(module) or trainable.split_of(module) is not None:
            paths.add(path)
    return paths


def _is_complete(stack: _Partial, name: str, targets: Mapping[str, Tensor]) -> bool:
    """Return whether all tensors of a stack have arrived, by the number of values, which no
    conversion changes.
    """
    first, *others = stack.converter.target_patterns
    names = {name, *(name.replace(first, other) for other in others)}
    arrived = sum(tensor.numel() for _, tensor in stack.tensors.values())
    return arrived >= sum(targets[one].numel() for one in names if one in targets)


def _convert(stack: _Partial, name: str, model: nn.Module) -> dict[str, Tensor]:
    """Return the converted tensors by the names of the model's parameters."""
    converter = copy.deepcopy(stack.converter)
    # experts are stacked in the order in which they are added
    for key in sorted(stack.tensors, key=_natural):
        pattern, tensor = stack.tensors[key]
        converter.add_tensor(name, key, pattern, tensor)
    values = converter.convert(name, model=model, config=model.config)
    for target, value in values.items():
        if isinstance(value, list):
            values[target] = value[0]
    return values


def _natural(key: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]


def _write(value: Tensor, target: Tensor | None) -> Tensor:
    """Copy a tensor into a parameter and return that; return a tensor that does not fit, for torch
    to report.
    """
    if target is None or target.is_meta or target.shape != value.shape:
        return value
    if isinstance(target, DTensor):
        # every rank has read the whole tensor
        value = distribute_tensor(
            value.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        )
    target.copy_(value)
    return target.detach()


def _set_partial(model: nn.Module, partial: dict[str, _Partial]) -> None:
    """Store the incomplete stacks of a model, and make using or saving their modules raise."""
    for hook in model.__dict__.pop(GUARDS, ()):
        hook.remove()
    model.__dict__.pop(PARTIAL, None)
    if not partial:
        return
    refuse = functools.partial(_refuse, partial)
    hooks = []
    for path in {name.rpartition(".")[0] for name in partial}:
        module = model.get_submodule(path)
        hooks += [
            module.register_forward_pre_hook(refuse),
            module.register_state_dict_pre_hook(refuse),
        ]
    model.__dict__[PARTIAL] = partial
    model.__dict__[GUARDS] = tuple(hooks)


def _refuse(partial: Mapping[str, _Partial], *_) -> None:
    """Raise ValueError for the first incomplete stack."""
    for name, stack in partial.items():
        raise ValueError(
            f"Only {len(stack.tensors)} of the tensors of {name} were loaded. Load a complete "
            "checkpoint into a new model"
        )


@contextmanager
def loading_whole(model: nn.Module) -> Iterator[LoadedNames]:
    """Load a whole checkpoint in the block, in one or more files; raise ValueError if a stack got
    no weights.
    """
    install()
    model.__dict__[LOADED] = loaded = LoadedNames()
    try:
        yield loaded
    finally:
        del model.__dict__[LOADED]
    _refuse(model.__dict__.get(PARTIAL, {}))
    targets = _tensors_of(model)
    ignored = model._keys_to_ignore_on_save or ()
    # tied stacks have several names
    arrived = {id(targets[name]) for name in loaded.names if name in targets}
    for path, module in model.named_modules():
        parameters = module.named_parameters(recurse=False) if has_stacks(module) else ()
        for name, parameter in parameters:
            if id(parameter) not in arrived and f"{path}.{name}" not in ignored:
                raise ValueError(
                    f"The checkpoint has no weights for {path}.{name}, which would stay as before. "
                    "Resume from a checkpoint of this model"
                )
