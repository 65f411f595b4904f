"""Train only some experts of a model's MoE layers.

    train_rows(model, {1: [0, 7], 2: [3]})
    ...                     # any training loop over the parameters that require a gradient
    fold_rows(model)        # write the experts to the stacks; drop_rows restores the base instead

Trained experts are stored outside of their stacks (modules.trainable), in parameters
`trained_<stack>` [n, ...] that the layers read instead of the stacks' rows. Layers are numbered as
in `hf.dropin.layers.numbered_layers`, experts as in their stacks: the shared expert of our own
layers is expert 0. Call `shard_experts` before, DDP and fully_shard after. No gradient is computed
below the lowest trained layer, unless transformers requires that of the embeddings' output: with
gradient checkpointing, until model.disable_input_require_grads() (not for the reentrant kind). Such
a model cannot be saved in checkpoints: MoETrainer raises before the first step, transformers'
Trainer at the first checkpoint. Experts that cannot be trained raise an error with their path.
"""

import contextlib
import functools
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import is_fsdp_enabled

from moe_runtime.hf.dropin import experts as stock
from moe_runtime.hf.dropin import parallel
from moe_runtime.hf.dropin.layers import (
    experts_module,
    forget_compiled,
    numbered_layers,
    plain_name,
)
from moe_runtime.modules import trainable
from moe_runtime.modules.moe import FLOATS, is_quantized
from moe_runtime.ops.all_to_all import GRADIENTS_OF, is_distributed

STATE = "moe_runtime_trainable"  # attribute of a model with trained rows: its previous state


class ExpertsLayer(NamedTuple):
    """The experts of a layer and where they are."""

    name: str
    module: nn.Module
    names: tuple[str, ...]  # of its stacks
    num_experts: int
    num_shared: int


def holder(model: nn.Module, attribute: str = STATE) -> nn.Module | None:
    """Return the module with the attribute, `model` or one that it wraps, or None."""
    return next((module for module in model.modules() if attribute in module.__dict__), None)


def _is_split(model: nn.Module) -> bool:
    return any(trainable.split_of(module) is not None for module in model.modules())


def layers_of(model: nn.Module, fresh: bool = True) -> dict[int, ExpertsLayer]:
    """Return the MoE layers by number; with `fresh`, raise ValueError if experts of `model` are
    already trained.
    """
    if fresh and (holder(model) is not None or _is_split(model)):
        raise ValueError(
            "The model already trains some experts. Call fold_rows(model) or drop_rows(model) first"
        )
    paths = {module: name for name, module in model.named_modules()}
    layers = {}
    for number, layer in numbered_layers(model).items():
        module = experts_module(model, layer)
        names = stock.stack_names(module)
        layers[number] = ExpertsLayer(
            paths[module], module, names, layer.num_experts, layer.num_shared
        )
    return layers


def checked_experts(
    layers: dict[int, ExpertsLayer], experts: Mapping, dtype: torch.dtype | None
) -> dict[int, tuple[int, ...]]:
    """Return `experts` without empty layers; raises ValueError for experts that cannot be
    trained.
    """
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, FLOATS))}, but got {dtype}")
    checked = {}
    for number, ids in experts.items():
        ids = tuple(map(operator.index, ids))
        if number not in layers:
            raise ValueError(
                f"experts must name layers with experts ({', '.join(map(str, layers))}), but got "
                f"layer {number!r}"
            )
        E = layers[number].num_experts
        if len(set(ids)) < len(ids) or not set(ids) <= set(range(E)):
            raise ValueError(
                f"experts of layer {number} must be different ids from 0 to {E - 1}, but got "
                f"{list(ids)}"
            )
        if ids:
            reason = _unfit(layers, number)
            if reason is not None:
                raise ValueError(reason)
            checked[number] = ids
    return checked


def _unfit(layers: dict[int, ExpertsLayer], number: int) -> str | None:
    """Return why the experts of a layer cannot be trained, or None if they can."""
    layer = layers[number]
    if stock.ADAPTED.intersection(layer.name.split(".")):
        return f"{layer.name} is wrapped by a PEFT adapter. Use adapters of other modules, or none"
    if getattr(layer.module, "_is_expert_parallel", False):
        return (
            f"{layer.name} holds only a part of its experts. Use shard_experts, not transformers' "
            "expert-parallel plan"
        )
    owners = {}
    for other_number, other in layers.items():
        if other_number != number:
            stacks = [other.module._parameters.get(name) for name in other.names]
            owners |= dict.fromkeys(map(id, stacks), other_number)
    for name in layer.names:
        stack = layer.module._parameters.get(name)
        path = f"{layer.name}.{name}"
        if stack is None or not stack.is_floating_point() or is_quantized(stack):
            actual = "no parameter" if stack is None else f"{stack.dtype} ({type(stack).__name__})"
            return (
                f"{path} must be a floating-point tensor that is not quantized or held by an "
                f"engine, but is {actual}"
            )
        # under FSDP the other ranks load nothing and get rank 0's weights
        if stack.is_meta and not is_fsdp_enabled():
            return f"{path} is on the meta device. Load the model without offloading"
        if is_distributed(stack) and GRADIENTS_OF not in layer.module.__dict__:
            return f"{path} is sharded. Call train_rows before FSDP2, and after shard_experts"
        if id(stack) in owners:
            return (
                f"{name} of layer {number} is shared with layer {owners[id(stack)]}, which is not "
                "supported"
            )
    return None


def check_unwrapped(model: nn.Module) -> None:
    """Raise ValueError for a model whose parameters are held by DDP, FSDP2 or transformers' tensor
    parallelism.
    """
    # importing takes a second; if not imported, nothing is sharded
    fsdp = sys.modules.get("torch.distributed.fsdp")
    engines = (nn.parallel.DistributedDataParallel,)
    if fsdp is not None:
        engines += (fsdp.FSDPModule,)
    for module in model.modules():
        if isinstance(module, engines) or (module.__dict__.get("_tp_size") or 1) > 1:
            raise ValueError(
                f"The parameters of {type(model).__name__} are held by an engine. Pass the model "
                "before it is wrapped"
            )


class _Before(NamedTuple):
    """The previous state of a model."""

    patched: bool  # whether its experts ran on moe_runtime
    requires_grad: dict[str, bool]  # of the parameters that `others` changed, by plain name


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainableReceipt:
    """What trains.

    Attributes:
        experts: Layer number to ids of the trained experts, in the given order; without empty
            layers.
        shared_experts: Paths of the trained shared MLPs, if a method trains them.
        trainable_parameters: Number of all parameters that require a gradient.
        total_parameters: Number of the model's own parameters.
    """

    experts: dict[int, tuple[int, ...]]  # layer -> ids, in the given order; without empty layers
    shared_experts: tuple[str, ...]  # paths of the trained shared MLPs, if a method sets them
    trainable_parameters: int  # these and all others that require a gradient
    total_parameters: int  # the model's own

    @property
    def share(self) -> float:
        """Share of trainable parameters."""
        return self.trainable_parameters / self.total_parameters


def train_rows(
    model: nn.Module,
    experts: Mapping[int, Sequence[int]],
    *,
    dtype: torch.dtype | None = None,
    others: Mapping[str, bool] | None = None,
    layers: dict[int, ExpertsLayer] | None = None,
) -> TrainableReceipt:
    """Make the experts `experts` (layer -> ids) of `model` trainable in place, and freeze the other
    experts of these layers.

    `others` says which other parameters, by name, require a gradient from now on; by default they
    are left as they are. `layers` are those of `layers_of(model)`, if known.

    Their weights become parameters `trained_<stack>` [n, ...] in `dtype`, by default their stack's;
    no stack is copied. In float32 next to a bfloat16 model, they are cast where used, and their
    gradients are float32. (A float32 model under autocast keeps a cast copy of every stack until
    the backward pass: load it in bfloat16 and pass dtype=torch.float32.) The model then runs on
    moe_runtime (`hf.dropin.experts.patch`), and raises for other implementations and in
    save_pretrained, which would write the untrained base.

    Call this before the model reaches DDP, FSDP2, torch.compile or an optimizer, and after
    `shard_experts` and PEFT's adapters, which freeze existing parameters. If only sharded experts
    train, DDP raises, as it has no parameters: call the model directly. Parameters of one FSDP2
    group must have one dtype: if other parameters train in another dtype than the rows, make each
    experts module a separate group, or name its class to accelerate in addition to the layers'.

    Raises ValueError, before anything is changed, for unknown layers or ids, for experts that are
    sharded, adapted, quantized, not loaded, offloaded or tied to those of another layer, and for a
    model with experts that are already trained.
    """
    if layers is None:
        layers = layers_of(model)
    experts = checked_experts(layers, experts, dtype)
    parameters = dict(model.named_parameters())
    for name, trains in (others or {}).items():
        if trains and parameters[name].dtype not in FLOATS:
            raise ValueError(
                f"{name} is {parameters[name].dtype}, but only floating-point parameters can be "
                "trained. Freeze it"
            )
    before = {plain_name(name): parameters[name].requires_grad for name in others or ()}
    _split(model, layers, experts, dtype, before)
    for name, trains in (others or {}).items():
        parameters[name].requires_grad_(trains)
    return _receipt(model)


def _split_modules(model: nn.Module) -> dict[int, tuple[nn.Module, trainable.Split]]:
    """Return the experts modules with separately stored rows, by layer number."""
    _state_of(model)
    modules = {}
    for number, layer in layers_of(model, fresh=False).items():
        split = trainable.split_of(layer.module)
        if split is not None:
            modules[number] = (layer.module, split)
    return modules


def fold_rows(model: nn.Module) -> None:
    """Write the trained experts into their stacks, rounded to the stacks' dtype, and undo
    `train_rows` otherwise.

    The model's previous experts implementation and requires_grad flags are restored. Under expert
    parallelism every rank folds its experts. Raises ValueError for a model without trained experts,
    and for one held by FSDP2 or DDP.
    """
    _undo(model, trainable.fold_rows)


def drop_rows(model: nn.Module) -> None:
    """Undo `train_rows` and discard the trained experts; the base is restored bit by bit. Raises
    ValueError as fold_rows.
    """
    _undo(model, trainable.drop_rows)


def _split(
    model: nn.Module, layers: dict[int, ExpertsLayer], experts: dict, dtype, before: dict[str, bool]
) -> None:
    """Store all rows separately, or none if memory is insufficient."""
    check_unwrapped(model)
    configs = [layer.module.config for layer in layers.values()]
    patched = all(
        getattr(config, "_experts_implementation", stock.NAME) == stock.NAME for config in configs
    )
    if experts:
        stock.patch(model)
        forget_compiled()
    setattr(model, STATE, _Before(patched, before))
    with contextlib.ExitStack() as undo:
        undo.callback(drop_rows, model)
        for number, ids in experts.items():
            _split_layer(model, layers[number], ids, dtype)
        _guard(model)
        undo.pop_all()


def _split_layer(
    model: nn.Module, layer: ExpertsLayer, ids: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    if is_distributed(layer.module.down_proj):
        parallel.split_spread_rows(model, layer.name, layer.names, ids, dtype)
    else:
        trainable.split_rows(layer.module, layer.names, ids, dtype)
    if stock.is_experts(layer.module):
        layer.module.register_forward_pre_hook(_refuse_others)


def _guard(model: nn.Module) -> None:
    """Make the parts of `model` with separate rows reject save_pretrained, unless `shard_experts`
    has already done so.
    """
    for module in model.modules():
        is_saved = hasattr(type(module), "save_pretrained")
        if is_saved and "save_pretrained" not in module.__dict__ and _is_split(module):
            module.save_pretrained = functools.partial(_refuse_to_save, module)


def is_guarded(module: nn.Module) -> bool:
    """Return whether `module` rejects save_pretrained because of separate rows."""
    return getattr(module.__dict__.get("save_pretrained"), "func", None) is _refuse_to_save


def _refuse_to_save(module: nn.Module, *_, **__) -> None:
    raise ValueError(
        f"Some experts of {type(module).__name__} are stored separately for training, and would be "
        "saved untrained. Call fold_rows(model) first, or use esft.train_only, which saves an "
        "adapter"
    )


def unguard(module: nn.Module) -> None:
    """Restore the save_pretrained of the class of `module` after train_rows has disabled it."""
    if is_guarded(module):
        del module.save_pretrained


def _refuse_others(module: nn.Module, args) -> None:
    """Hook of a stock experts module: raise for transformers' implementations, which would ignore
    separate rows.
    """
    implementation = module.config._experts_implementation
    if implementation != stock.NAME:
        raise ValueError(
            f"experts_implementation must be {stock.NAME!r} while some experts are stored "
            f"separately for training, but is {implementation!r}. Call fold_rows(model) first"
        )


def _state_of(model: nn.Module) -> tuple[nn.Module, _Before]:
    inner = holder(model)
    if inner is not None:
        return inner, inner.__dict__[STATE]
    if _is_split(model):
        return model, _Before(True, {})  # PEFT has unloaded the wrapper that stored the state
    raise ValueError(
        "The model has no separately trained experts. Pass a model prepared by train_rows"
    )


def _undo(model: nn.Module, rejoin) -> None:
    check_unwrapped(model)
    inner, before = _state_of(model)
    forget_compiled()
    for name, module in inner.named_modules():
        unguard(module)
        if trainable.split_of(module) is None:
            continue
        if is_distributed(module.down_proj):
            parallel.forget_rows(inner, name)
        rejoin(module)
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _refuse_others:
                del module._forward_pre_hooks[key]
    if not before.patched:
        stock.unpatch(inner)
    for name, parameter in inner.named_parameters():
        parameter.requires_grad_(
            before.requires_grad.get(plain_name(name), parameter.requires_grad)
        )
    inner.__dict__.pop(STATE, None)


def _receipt(model: nn.Module) -> TrainableReceipt:
    rows = 0
    experts = {}
    row_ids = set()
    for number, (module, split) in _split_modules(model).items():
        experts[number] = split.ids
        row_ids |= {id(p) for p in trainable.trained_parameters(module).values()}
        rows += sum(
            len(split.ids) * getattr(module, name).shape[1:].numel() for name in split.requires_grad
        )
    others = [p for p in model.parameters() if id(p) not in row_ids]
    return TrainableReceipt(
        experts=experts,
        shared_experts=(),
        trainable_parameters=rows + sum(p.numel() for p in others if p.requires_grad),
        total_parameters=sum(p.numel() for p in others),
    )
