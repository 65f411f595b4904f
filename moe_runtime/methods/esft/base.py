"""Recognize the model that scores, a selection or an adapter were made with.

A selection of one model's experts means nothing for another, and an adapter replaces whole experts
and would break another base of the same shapes. So their files describe their model by fields of
its config, its experts' shapes and a few of its weights: plain values, not only a hash, so that
errors say what differs.

    describe, base_of   without and with sampled weights: the base of an adapter
    identify            what stays the same when experts are packed or divided among processes: the
                        model of a selection
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from moe_runtime.config import shown
from moe_runtime.hf.dropin.layers import RoutedLayer, plain_name
from moe_runtime.hf.training.trainable import ExpertsLayer
from moe_runtime.hf.training.trained_files import layout_of, parse_name, split_row, stack_parts

Layers = Mapping[int, ExpertsLayer]  # a model's layers, of `trainable.layers_of`
OURS = "moe_runtime"  # key of expert_cfg.json for what the official file lacks
# what a model computes depends on these; names that a config lacks are left out
FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "q_lora_rank",
    "hidden_act",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "topk_method",
    "scoring_func",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "tie_word_embeddings",
)
SAMPLED = 2  # weights of each matrix
# largest share of differing samples: one base saved in two dtypes rarely differs once rounded to
# bfloat16
DIFFERENT = 0.2


def describe(model: nn.Module, layers: Layers) -> dict[str, Any]:
    """Return a JSON-ready description of a model that does not require its weights."""
    experts = {}
    for number, layer in layers.items():
        stacks = stack_parts(layout_of(layer.module))
        experts[number] = {name: list(getattr(layer.module, name).shape) for name in stacks}
    return _described(model, experts)


def _described(model: nn.Module, experts: Mapping[int, Mapping]) -> dict[str, Any]:
    config = getattr(model, "module", model).config
    values = config.get_text_config().to_dict()
    fields = {}
    for name in FIELDS:
        if isinstance(values.get(name), str | int | float):
            fields[name] = values[name]
    fields["model_type"] = config.model_type
    by_text = {str(number): shapes for number, shapes in experts.items()}
    text = json.dumps([fields, by_text], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"hash": digest, "config": fields, "experts": by_text}


@torch.no_grad()
def sample_weights(
    tensors: Mapping[str, Any], read: Callable[[str], torch.Tensor] | None = None
) -> dict[str, list[float]]:
    """Return the first weights of the middle row of each matrix, by name; `read` gets the row of a
    name, flat.
    """
    sample = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) < 2 or not tensor.dtype.is_floating_point or not all(tensor.shape):
            continue
        row = tensor[tensor.shape[0] // 2] if read is None else read(name)
        sample[name] = row.flatten()[:SAMPLED].double().tolist()
    return sample


def sampled_parameters(model: nn.Module, layers: Layers) -> dict[str, nn.Parameter]:
    """Return the parameters outside of the experts' stacks, by plain name.

    Those that are split over processes or offloaded are left out.
    """
    stacks = set()
    for layer in layers.values():
        stacks |= {id(parameter) for parameter in layer.module.parameters(recurse=False)}
    sampled = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in stacks and _is_here(parameter):
            sampled[plain_name(name)] = parameter
    return sampled


def _is_here(parameter: torch.Tensor) -> bool:
    return not hasattr(parameter, "placements") and not parameter.is_meta


def sampled_experts(layers: Layers, trained: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Return the first routed expert of each layer that is not in `trained`, where there is one."""
    sampled = {}
    for number, layer in layers.items():
        for e in range(layer.num_shared, layer.num_experts):
            if e not in trained.get(number, ()):
                sampled.setdefault(number, e)
    return sampled


def expert_matrices(layers: Layers, experts: Mapping[int, int]) -> dict[str, torch.Tensor]:
    """Return views of the matrices of one expert of each layer, by the names that adapters use."""
    matrices = {}
    for number, e in experts.items():
        module = layers[number].module
        path = plain_name(layers[number].name)
        layout = layout_of(module)
        for name in stack_parts(layout):
            stack = getattr(module, name)
            if stack.is_floating_point() and _is_here(stack):
                for part, view in split_row(layout, name, stack[e]).items():
                    matrices[f"{path}.{e}.{part}"] = view
    return matrices


@torch.no_grad()
def base_of(
    model: nn.Module, layers: Layers, trained: Mapping[int, Sequence[int]] | None = None
) -> dict[str, Any]:
    """Return `describe` with sampled weights, as an adapter of the `trained` experts records it."""
    matrices = expert_matrices(layers, sampled_experts(layers, trained or {}))
    weights = sample_weights(sampled_parameters(model, layers) | matrices)
    return describe(model, layers) | {"weights": weights}


def check_base(base: Mapping[str, Any], model: Mapping[str, Any], source: str) -> None:
    """Raise ValueError unless a model, described by `describe` or `base_of`, is the adapter's base.

    Fields that only one of them has are ignored. `source` names the adapter in errors.
    """
    difference = _difference(base, model)
    if difference is not None:
        raise ValueError(
            f"{source} is for a base {difference}. Use the base that it was trained on"
        )


def _difference(base: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    if base.get("hash") != model["hash"]:
        # config names differ between versions of transformers; which layers have experts does not
        for name, value in base.get("config", {}).items():
            theirs = model["config"].get(name, value)
            if value != theirs:
                return f"whose {name} is {value!r}, but the model's is {theirs!r}"
        for name, value in base.get("experts", {}).items():
            theirs = model["experts"].get(name)
            if value != theirs:
                return f"whose experts of layer {name} are {value}, but the model's are {theirs}"
    # separately, since a base may differ in its experts alone
    for kind in ("weights", "experts"):
        pairs = []
        for name, values in base.get("weights", {}).items():
            is_of_kind = (parse_name(name) is not None) == (kind == "experts")
            if is_of_kind and name in model.get("weights", {}):
                pairs += zip(values, model["weights"][name], strict=False)
        a, b = torch.tensor(pairs or [(0, 0)], dtype=torch.float64).to(torch.bfloat16).unbind(1)
        different = (a != b).double().mean().item()
        if different > DIFFERENT:
            return (
                f"with other {kind}: {different:.0%} of {len(pairs)} sampled weights differ from "
                "the model's (check_weights=False skips this check)"
            )
    return None


def identify(model: nn.Module, layers: Mapping[int, ExpertsLayer | RoutedLayer]) -> dict[str, Any]:
    """Return a JSON-ready description: config, experts per layer, weights outside of experts."""
    experts = {number: {"num_experts": layer.num_experts} for number, layer in layers.items()}
    matrices = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and ".experts." not in name and _is_here(parameter):
            matrices[plain_name(name)] = parameter
    return _described(model, experts) | {"weights": sample_weights(matrices)}


def check_model(
    base: Mapping[str, Any] | None,
    model: nn.Module,
    layers: Layers,
    trained: Mapping[int, Sequence[int]],
    check_weights: bool,
) -> dict[str, Any]:
    """Return the `base_of` an adapter of the `trained` experts; raises ValueError unless `base`, a
    selection's, is `model`, too. None fits any.
    """
    if base is not None:
        is_adapter = any("num_experts" not in shapes for shapes in base.get("experts", {}).values())
        described = base_of(model, layers) if is_adapter else identify(model, layers)
        if not check_weights:
            described.pop("weights")
        difference = _difference(base, described)
        if difference is not None:
            raise ValueError(
                f"The selection is for a model {difference}. Score this model and select its "
                "experts"
            )
    return base_of(model, layers, trained)


def read_base(values: Mapping[str, Any], source: str) -> Mapping[str, Any] | None:
    """Return the model that a file's values describe, or None; raises ValueError naming
    `source`.
    """
    ours = values.get(OURS, {})
    try:
        return _Ours.model_validate(ours).model_dump(exclude_unset=True).get("base")
    except ValidationError as error:
        raise ValueError(
            f"{OURS} in {source} must be an object of format 1 with the base, but is "
            f"{shown(ours, 60)}. A newer moe_runtime may have written it"
        ) from error


class _Base(BaseModel):
    """What `describe` and `identify` return."""

    model_config = {"extra": "allow"}
    config: dict = {}
    experts: dict = {}
    weights: dict = {}


class _Ours(BaseModel):
    format: Literal[1] = 1
    base: _Base | None = None


def write_base(base: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entry of a JSON file that `read_base` reads; no entry for None."""
    return {} if base is None else {OURS: {"format": 1, "base": base}}
