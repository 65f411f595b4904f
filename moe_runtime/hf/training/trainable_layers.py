"""The layers of a model with experts, and which of them `hf.training.trainable` can train: what cannot is refused, by name."""

import operator
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import is_fsdp_enabled

from moe_runtime.hf.dropin import experts as stock
from moe_runtime.hf.dropin.layers import experts_module, numbered_layers
from moe_runtime.modules import trainable
from moe_runtime.ops.all_to_all import GRADIENTS_OF, is_distributed

STATE = "moe_runtime_trainable"  # attribute of a model whose rows train: what it was before


class ExpertsLayer(NamedTuple):
    """The experts of a layer and where they are."""

    name: str
    module: nn.Module
    names: tuple[str, ...]  # of its stacks
    num_experts: int
    num_shared: int


def layers_of(model: nn.Module, fresh: bool = True) -> dict[int, ExpertsLayer]:
    """Return the layers with experts by number; with `fresh`, raise ValueError if rows of `model` train already."""
    if fresh and any(STATE in m.__dict__ or trainable.split_of(m) is not None for m in model.modules()):
        raise ValueError("the model trains rows already; want fold_rows(model) or drop_rows(model) first")
    paths, layers = {module: name for name, module in model.named_modules()}, {}
    for number, layer in numbered_layers(model).items():
        module = experts_module(model, layer)
        names = tuple(name for name in stock.stack_names(module) if name) if layer.is_stock else module.stacks()
        layers[number] = ExpertsLayer(paths[module], module, names, layer.num_experts, layer.num_shared)
    return layers


def with_shared(layers: dict[int, ExpertsLayer], experts: Mapping, shared_experts: bool) -> dict:
    """Add our own shared experts to `experts`, which must not name them."""
    experts = {number: tuple(ids) for number, ids in experts.items()}
    for number, layer in layers.items():
        if layer.num_shared and 0 in experts.get(number, ()):
            raise ValueError(
                f"experts of layer {number} are {list(experts[number])}, of which 0 is the shared one; want routed ones alone; "
                "shared_experts=True trains it"
            )
    shared = {number: (0,) for number, layer in layers.items() if layer.num_shared} if shared_experts else {}
    return experts | {number: (*experts.get(number, ()), *ids) for number, ids in shared.items()}


def checked_experts(
    layers: dict[int, ExpertsLayer], experts: Mapping, dtype: torch.dtype | None
) -> dict[int, tuple[int, ...]]:
    """Return `experts` without layers of none; raise ValueError for what cannot be trained."""
    if dtype is not None and dtype not in stock.FLOATS:
        raise ValueError(f"dtype is {dtype}; want one of {', '.join(map(str, stock.FLOATS))}")
    checked = {}
    for number, ids in experts.items():
        ids = tuple(operator.index(e) for e in ids)
        if number not in layers:
            raise ValueError(f"experts name layer {number!r}; want layers with experts: {', '.join(map(str, layers))}")
        E = layers[number].num_experts
        if len(set(ids)) < len(ids) or any(not 0 <= e < E for e in ids):
            raise ValueError(
                f"experts of layer {number} are {list(ids)}; want ids from 0 to {E - 1}, none of them twice"
            )
        if ids:
            _check_stacks(layers[number])
            _check_untied(layers, number)
            checked[number] = ids
    return checked


def _check_untied(layers: dict[int, ExpertsLayer], number: int) -> None:
    own = {id(getattr(layers[number].module, name)) for name in layers[number].names}
    for other, layer in layers.items():
        for name in layer.names:
            if other != number and id(layer.module._parameters.get(name)) in own:
                raise ValueError(
                    f"{name} of layer {number} is layer {other}'s too; want stacks of its own, or an expert would move in both"
                )


def _check_stacks(layer: ExpertsLayer) -> None:
    if stock.ADAPTED.intersection(layer.name.split(".")):
        raise ValueError(f"{layer.name} lies in PEFT's adapters; want adapters of other modules, or none")
    for name in layer.names:
        stack = layer.module._parameters.get(name)
        if stack is None or not stack.is_floating_point():
            got = "no parameter" if stack is None else str(stack.dtype)
            raise ValueError(
                f"{layer.name}.{name} is {got}; want one of floats, neither quantized nor held by an engine"
            )
        # ranks that load nothing and wait for the first one's weights
        if stack.is_meta and not is_fsdp_enabled():
            raise ValueError(
                f"{layer.name}.{name} is on the meta device; want weights that stay where they are; load the model with "
                "from_pretrained and without offloading"
            )
        if is_distributed(stack) and GRADIENTS_OF not in layer.module.__dict__:
            raise ValueError(f"{layer.name}.{name} is sharded; want train_rows before FSDP2, and after shard_experts")
    if getattr(layer.module, "_is_expert_parallel", False):
        raise ValueError(
            f"{layer.name} holds a part of its experts; want shard_experts in place of transformers' expert-parallel plan"
        )


def check_unwrapped(model: nn.Module) -> None:
    """Raise ValueError for a model whose parameters others hold: DDP, FSDP2, transformers' tensor parallelism."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a second to import; nobody holds anything without it
    held = isinstance(model, nn.parallel.DistributedDataParallel) or any(
        (fsdp is not None and isinstance(m, fsdp.FSDPModule)) or (m.__dict__.get("_tp_size") or 1) > 1
        for m in model.modules()
    )
    if held:
        raise ValueError(
            f"model is {type(model).__name__}, whose parameters an engine holds; want it as it was before that"
        )
