"""Adapters in ESFT's format: save the trained parameters of a model, and load them to resume.

A folder holds model.safetensors and expert_cfg.json. Row e of a layer's stacks is stored as

    <path of the experts>.{e}.gate_proj.weight [I, H], .up_proj.weight [I, H],
                             .down_proj.weight [H, I]

for every layout of the model's stacks; in a DeepSeek model these are the official names,
model.layers.{l}.mlp.experts.{e}.*. Experts with biases also have *.bias [I], [I] and [H]. Other
trained parameters keep their names in the model.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from moe_runtime.hf.common.sources import StrPath
from moe_runtime.hf.dropin.layers import RoutedLayer, experts_module, numbered_layers, plain_name
from moe_runtime.hf.training.ranks import whole
from moe_runtime.hf.training.trainable import holder, unguard
from moe_runtime.io.checkpoint import SINGLE, write_tensors
from moe_runtime.io.files import atomic_file, atomic_write_text, check_regular, weights_of
from moe_runtime.modules.trainable import PREFIX, split_of, trained_parameters
from moe_runtime.ops.all_to_all import is_distributed

CONFIG = "expert_cfg.json"
TRAINING = "moe_runtime_training"  # attribute of a model that trains rows: its TrainedParameters
Check = Callable[[dict[str, Any], StrPath], None]  # (config, folder); raises ValueError
_EXPERT = re.compile(
    r"(?P<path>(?:.*\.)?experts)\.(?P<expert>\d+)\.(?P<part>(?:gate|up|down)_proj\.(?:weight|bias))"
)


class ExpertLayout(NamedTuple):
    """Layout of the stacks of an experts module."""

    gated: bool
    transposed: bool = False  # [E, in, out]
    interleaved: bool = False  # rows of gate and up alternate
    bias: bool = False


class ExpertName(NamedTuple):
    """The parts of the name of an expert's tensor."""

    path: str  # of the experts module
    layer: int
    expert: int
    part: str  # such as gate_proj.weight


def parse_name(name: str) -> ExpertName | None:
    """Parse the name of an expert's tensor; None for any other name. The layer is the first number
    in the path.
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    digits = re.search(r"\d+", match["path"])
    if digits is None:
        return None
    return ExpertName(match["path"], int(digits[0]), int(match["expert"]), match["part"])


def layout_of(module: nn.Module) -> ExpertLayout:
    """Return the layout of an experts module, ours or transformers'."""
    if hasattr(module, "up_name"):
        return ExpertLayout(module.config.gated, bias=module.config.bias)
    interleaved = module.has_gate and not getattr(module, "is_concatenated", True)
    return ExpertLayout(module.has_gate, module.is_transposed, interleaved, module.has_bias)


def stack_parts(layout: ExpertLayout) -> dict[str, tuple[str, ...]]:
    """Return the parts of an expert that each stack holds, by the stack's name."""
    parts = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
    if layout.gated:
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    stacks = {}
    for stack, names in parts.items():
        stacks[stack] = tuple(f"{name}.weight" for name in names)
        if layout.bias:
            stacks[f"{stack}_bias"] = tuple(f"{name}.bias" for name in names)
    return stacks


def split_row(layout: ExpertLayout, stack: str, row: Tensor) -> dict[str, Tensor]:
    """Split a row of the stack of this name into views of an expert's tensors, by part: [out, in],
    or [out] for biases.
    """
    names = stack_parts(layout)[stack]
    if layout.transposed:
        row = row.t()  # no effect on a bias
    if len(names) == 1:
        return {names[0]: row}
    if layout.interleaved:
        return {names[0]: row[0::2], names[1]: row[1::2]}
    return dict(zip(names, row.chunk(2), strict=True))


def join_row(layout: ExpertLayout, stack: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Assemble a row of the stack of this name from an expert's tensors, [out, in] each: the
    inverse of `split_row`.
    """
    halves = [parts[name] for name in stack_parts(layout)[stack]]
    if layout.interleaved:
        row = torch.stack(halves, dim=1).flatten(0, 1)  # a single one stays as it is
    else:
        row = torch.cat(halves)
    return row.t() if layout.transposed else row


def experts_path(layer: RoutedLayer) -> str:
    """Return the path of a layer's experts module without the parts of wrappers."""
    name = plain_name(layer.name)
    return name if layer.is_stock else f"{name.rpartition('.')[0]}.experts"


@dataclass(frozen=True, eq=False)
class TrainedParameters:
    """The trained parameters of a model, stored on it by `mark`."""

    config: dict[str, Any]  # expert_cfg.json
    others: tuple[str, ...]  # plain names of the trained parameters that are not experts
    # previous dtypes of those in `others` that are trained in another one
    dtypes: dict[str, torch.dtype]
    hooks: tuple = ()
    save: Any = None  # the instance's previous save_pretrained, if it was not that of its class
    check: Check | None = None


def mark(
    model: nn.Module,
    config: dict[str, Any],
    others: tuple[str, ...],
    dtype: torch.dtype | None = None,
    check: Check | None = None,
) -> None:
    """Record the trained parameters of `model`, and make it save only these; `others` are converted
    to `dtype` if given.

    `save_pretrained` then writes `config` and `trained_tensors`, like PEFT's models, whereas
    transformers' own would save the untrained stacks; `load_state_dict` accepts the names in these
    files as well as the model's own. `check(config, folder)` raises ValueError for a folder whose
    weights are for another model.
    """
    hooks = [
        module.register_load_state_dict_pre_hook(_take_names)
        for module in split_modules(model).values()
    ]
    dtypes = {}
    if dtype is not None:
        dtypes = _cast(model, dict.fromkeys(others, dtype))
    unguard(model)  # train_rows disables saving, which is now correct
    # shard_experts may have installed one that does not wait for other ranks
    save = model.__dict__.get("save_pretrained")
    setattr(model, TRAINING, TrainedParameters(config, others, dtypes, tuple(hooks), save, check))
    model.save_pretrained = functools.partial(save_trained, model)


def unmark(model: nn.Module) -> None:
    """Undo `mark`."""
    model = holder(model, TRAINING)
    training = getattr(model, TRAINING)
    for hook in training.hooks:
        hook.remove()
    _cast(model, training.dtypes)
    delattr(model, TRAINING)
    del model.save_pretrained
    if training.save is not None:
        model.save_pretrained = training.save


def _cast(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Change the dtypes of parameters, by plain name, in place; return the previous dtypes of those
    that changed.
    """
    before = {}
    for name, parameter in model.named_parameters():
        name = plain_name(name)
        if dtypes.get(name, parameter.dtype) != parameter.dtype:
            before[name] = parameter.dtype
            parameter.grad = None
            parameter.data = parameter.data.to(dtypes[name])
    return before


def needs_autocast(model: nn.Module) -> bool:
    """Return whether other parameters than experts train in another dtype than the rest, so `model`
    requires autocast.
    """
    training = training_of(model)
    return training is not None and bool(training.dtypes)


def check_trains(model: nn.Module) -> None:
    """Raise ValueError if a parameter recorded by `mark` no longer requires a gradient, as after
    PEFT.
    """
    model = holder(model, TRAINING)
    if model is None:
        return
    parameters = _plain_parameters(model)
    for name in _trained_names(model):
        if name in parameters and not parameters[name].requires_grad:
            raise ValueError(
                f"{name} was selected for training but is frozen. Add PEFT's adapters before the "
                "experts are selected, or none"
            )


def _plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def training_of(model: nn.Module) -> TrainedParameters | None:
    """Return the record that `mark` stored on `model`, or None if it trains no experts."""
    marked = holder(model, TRAINING)
    return None if marked is None else getattr(marked, TRAINING)


def split_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the experts modules with separately stored trained rows, by plain path."""
    modules = {}
    for layer in numbered_layers(model).values():
        module = experts_module(model, layer)
        if split_of(module) is not None:
            modules[experts_path(layer)] = module
    return modules


def _trained_names(model: nn.Module) -> list[str]:
    """Return the plain names of the parameters recorded by `mark`: the experts' rows, and the
    others.
    """
    names = list(training_of(model).others)
    for path, module in split_modules(model).items():
        names += [f"{path}.{PREFIX}{stack}" for stack in trained_parameters(module)]
    return names


def is_split(model: nn.Module) -> bool:
    """Return whether the trained parameters are distributed, so that all processes must take part
    in gathering them.
    """
    names = set(_trained_names(model))
    return any(
        is_distributed(parameter) and parameter.device_mesh.size() > 1
        for name, parameter in model.named_parameters()
        if plain_name(name) in names
    )


@torch.no_grad()
def gathered(model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """Return the trained parameters of `model`, gathered and on the CPU, by plain name.

    If the model is distributed, every process must call it; those without `keep` get nothing.
    """
    parameters = _plain_parameters(model)
    tensors = {}
    for name in _trained_names(model):
        # names changed by an engine raise an error when the file is written
        if name in parameters:
            tensor = whole(parameters[name])
            if keep:
                tensors[name] = tensor
    return tensors


@torch.no_grad()
def trained_tensors(
    model: nn.Module, state_dict: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the trained tensors of `model` on the CPU, by their names in the file; `state_dict`
    replaces its weights if given.

    Sharded tensors are gathered, so every process must call this, unless `state_dict` is complete.
    """
    if state_dict is None:
        state_dict = gathered(model)
    values = {plain_name(name): value for name, value in state_dict.items()}
    for name in _trained_names(model):
        if name not in values:
            raise ValueError(
                f"{name}, which the model trains, is missing from its {len(values)} tensors"
            )
        values[name] = whole(values[name])
    return _named_as_saved(model, values)


def _named_as_saved(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of the trained parameters, given by plain name, by their names in the file."""
    tensors = {}
    for path, module in split_modules(model).items():
        split = split_of(module)
        layout = layout_of(module)
        for stack in trained_parameters(module):
            rows = values[f"{path}.{PREFIX}{stack}"]
            for expert, row in zip(split.ids, split.places, strict=True):
                for part, view in split_row(layout, stack, rows[row]).items():
                    tensors[f"{path}.{expert}.{part}"] = view
    return tensors | {name: values[name] for name in training_of(model).others}


def save_trained(
    model: nn.Module,
    save_directory: StrPath,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    push_to_hub: bool = False,
    **_: Any,
) -> None:
    """Write the trained tensors of `model` into a folder, each file atomically: the
    `save_pretrained` of a marked model.

    Accepts the arguments of transformers' method; those not named here have no effect.
    """
    # a single rank would wait forever for the others
    if push_to_hub or (state_dict is None and is_split(model)):
        raise ValueError(
            f"The model trains only some experts, so push_to_hub ({push_to_hub}) and sharded "
            "states are not supported. Use model.push_to_hub(repository), or, for "
            "distributed experts, esft.save_adapter(model, folder) on every rank, and MoETrainer, "
            "or save_strategy='no' in Trainer"
        )
    tensors = trained_tensors(model, state_dict)
    if is_main_process:
        write_files(save_directory, tensors, training_of(model).config)


def check_place(folder: StrPath) -> None:
    """Raise ValueError for the folder of a whole model, as an adapter's file has the same name as
    its weights.
    """
    weights = weights_of(folder)
    # a config.json next to an adapter's two files is that of its base, as in Hub repositories
    if weights and not (weights == [SINGLE] and (Path(folder) / CONFIG).is_file()):
        raise ValueError(
            f"Folder {folder} holds a whole model ({weights[0]}), but only trained experts are "
            "being saved. Choose another folder"
        )


def write_files(folder: StrPath, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write the two files of an adapter into a folder, created if missing; raises ValueError as
    `check_place`.
    """
    check_place(folder)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / SINGLE) as file:
        write_tensors(file, {name: tensor.contiguous() for name, tensor in tensors.items()})
    atomic_write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def read_tensors(folder: StrPath) -> dict[str, Tensor]:
    """Read the safetensors files of an adapter, memory-mapped.

    Names in old files, which start with "layers.", are prefixed with "model.". Raises ValueError if
    there is no file, for a truncated file, and for a duplicate name.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{str(folder)!r} has no .safetensors file. Pass the folder of an adapter")
    tensors: dict[str, Tensor] = {}
    for file in files:
        check_regular(file)
        try:
            read = load_file(file)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is not a valid safetensors file ({error}). Download it again"
            ) from error
        for name, tensor in read.items():
            if name.startswith("layers."):
                name = f"model.{name}"
            if name in tensors:
                raise ValueError(f"{file} has {name}, which is also in another file of the folder")
            tensors[name] = tensor
    return tensors


@torch.no_grad()
def load_trained(model: nn.Module, folder: StrPath) -> None:
    """Load a folder of `save_trained` to resume training; `model` must train the same experts and
    parameters.

    Raises ValueError, with the model untouched, for a model that trains no rows, for tensors that
    differ in name or shape from those that it trains, and if the `check` of `mark` does.
    """
    training = training_of(model)
    tensors = read_tensors(folder)
    reason = None
    if training is None:
        reason = (
            f"{folder} is an adapter, but the model trains no experts separately. "
            "Prepare it with esft.train_only and the same selection, or apply the adapter with "
            "esft.apply"
        )
    elif any(hasattr(p, "placements") for p in model.parameters()):
        reason = "The model is distributed over processes. Load the adapter before distributing it"
    else:
        values = {name: p.detach() for name, p in _plain_parameters(model).items()}
        targets = _named_as_saved(model, values)
        others = sorted(targets.keys() ^ tensors.keys())
        if others:
            kind = "lacks" if others[0] in targets else "has"
            reason = (
                f"{folder} {kind} {others[0]}, but must have the {len(targets)} tensors that the "
                "model trains. Prepare the model with the selection in expert_cfg.json"
            )
        for name in targets.keys() & tensors.keys():
            if tensors[name].shape != targets[name].shape:
                reason = (
                    f"{name} in {folder} has shape {list(tensors[name].shape)}, but the model's is "
                    f"{list(targets[name].shape)}"
                )
    if reason is not None:
        raise ValueError(reason)
    if training.check is not None:
        training.check(training.config, folder)
    for name, target in targets.items():
        target.copy_(tensors[name])


def _take_names(module: nn.Module, state_dict, prefix: str, *others) -> None:
    """Hook of load_state_dict: assemble an experts module's rows from an adapter file's tensors, if
    present.
    """
    split = split_of(module)
    experts = {}  # id -> part -> tensor
    for name in [name for name in state_dict if name.startswith(prefix)]:
        parsed = parse_name(name)
        if split is not None and parsed is not None:
            experts.setdefault(parsed.expert, {})[parsed.part] = state_dict.pop(name)
    if not experts:
        return
    layout = layout_of(module)
    stacks = stack_parts(layout)
    parts = set().union(*stacks.values())
    if set(experts) != set(split.ids) or any(one.keys() != parts for one in experts.values()):
        errors = others[-1]
        errors.append(
            f"{prefix[:-1]}: the file must have the trained experts {sorted(split.ids)}, but has "
            f"{sorted(experts)}"
        )
        return
    for stack in stacks:
        rows = [join_row(layout, stack, experts[e]) for e in split.ids]
        state_dict[f"{prefix}{PREFIX}{stack}"] = torch.stack(rows)
