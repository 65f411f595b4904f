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
from moe_runtime.modules.moe import FLOATS
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
    checked, reason = {}, None
    if dtype is not None and dtype not in FLOATS:
        reason = f"dtype is {dtype}; want one of {', '.join(map(str, FLOATS))}"
    for number, ids in experts.items() if reason is None else ():
        ids = tuple(operator.index(e) for e in ids)
        if number not in layers:
            reason = f"experts name layer {number!r}; want layers with experts: {', '.join(map(str, layers))}"
        elif len(set(ids)) < len(ids) or any(e not in range(layers[number].num_experts) for e in ids):
            most = layers[number].num_experts - 1
            reason = f"experts of layer {number} are {list(ids)}; want ids from 0 to {most}, none of them twice"
        elif ids:
            reason = _unfit(layers, number)
            checked[number] = ids
        if reason is not None:
            break
    if reason is not None:
        raise ValueError(reason)
    return checked


def _unfit(layers: dict[int, ExpertsLayer], number: int) -> str | None:
    """Say why the experts of a layer cannot be trained; None if they can."""
    layer = layers[number]
    if stock.ADAPTED.intersection(layer.name.split(".")):
        return f"{layer.name} lies in PEFT's adapters; want adapters of other modules, or none"
    if getattr(layer.module, "_is_expert_parallel", False):
        return f"{layer.name} holds a part of its experts; want shard_experts in place of transformers' expert-parallel plan"
    owners = {
        id(other.module._parameters.get(name)): n for n, other in layers.items() if n != number for name in other.names
    }
    for name in layer.names:
        stack, path = layer.module._parameters.get(name), f"{layer.name}.{name}"
        if stack is None or not stack.is_floating_point():
            got = "no parameter" if stack is None else str(stack.dtype)
            return f"{path} is {got}; want one of floats, neither quantized nor held by an engine"
        if (
            stack.is_meta and not is_fsdp_enabled()
        ):  # whose other ranks load nothing and wait for the first one's weights
            return f"{path} is on the meta device; want weights that stay where they are; load the model without offloading"
        if is_distributed(stack) and GRADIENTS_OF not in layer.module.__dict__:
            return f"{path} is sharded; want train_rows before FSDP2, and after shard_experts"
        if id(stack) in owners:
            return f"{name} of layer {number} is layer {owners[id(stack)]}'s too; want stacks of its own"
    return None


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
