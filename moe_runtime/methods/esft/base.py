"""Which model an ESFT adapter belongs to: fields of its config, its experts' shapes, and a few of its weights.

An adapter replaces whole experts: on another base of the same shapes it would silently do harm. The description is stored
in expert_cfg.json as it is, not as a hash alone, so that an error can say what differs.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moe_runtime.hf.dropin.layers import experts_module, numbered_layers, plain_name
from moe_runtime.hf.training.trained_files import experts_path, layout_of, parse_name, split_row, stack_parts

# what a model computes depends on these; names that a config lacks are left out
FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "kv_lora_rank", "q_lora_rank", "hidden_act", "num_experts",
    "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "norm_topk_prob", "topk_method",
    "scoring_func", "n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "tie_word_embeddings",
)  # fmt: skip
SAMPLED = 2  # weights of each matrix
DIFFERENT = 0.2  # share of the sampled weights; another dtype of one base seldom rounds to another bfloat16


def describe(model: nn.Module) -> dict[str, Any]:
    """Return what distinguishes a model from others without reading its weights, JSON-ready."""
    config = model.config.get_text_config().to_dict()
    config = {name: config[name] for name in FIELDS if isinstance(config.get(name), str | int | float)}
    config |= {"model_type": model.config.model_type}
    experts = {}
    for number, layer in numbered_layers(model).items():
        module = experts_module(model, layer)
        experts[str(number)] = {name: list(getattr(module, name).shape) for name in stack_parts(layout_of(module))}
    text = json.dumps([config, experts], sort_keys=True)
    return {"hash": hashlib.sha256(text.encode()).hexdigest(), "config": config, "experts": experts}


@torch.no_grad()
def sample_weights(
    tensors: Mapping[str, Any], read: Callable[[str], torch.Tensor] | None = None
) -> dict[str, list[float]]:
    """Return the first weights of the middle row of each matrix, by name; `read` gets the row of a name, flat."""
    sample = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) < 2 or not tensor.dtype.is_floating_point or not all(tensor.shape):
            continue
        row = tensor[tensor.shape[0] // 2] if read is None else read(name)
        sample[name] = row.flatten()[:SAMPLED].double().tolist()
    return sample


def sampled_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that `sample_weights` reads, by plain name: all that are not in the experts' stacks.

    Those that are split over processes or offloaded are left out.
    """
    stacks = {
        id(p)
        for layer in numbered_layers(model).values()
        for p in experts_module(model, layer).parameters(recurse=False)
    }
    return {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in stacks and not hasattr(parameter, "placements") and not parameter.is_meta
    }


def sampled_experts(model: nn.Module, trained: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Return an expert of each layer, the first routed one that is not in `trained`; none where all are."""
    found = {}
    for number, layer in numbered_layers(model).items():
        left = (e for e in range(layer.num_shared, layer.num_experts) if e not in trained.get(number, ()))
        if (expert := next(left, None)) is not None:
            found[number] = expert
    return found


def expert_matrices(model: nn.Module, experts: Mapping[int, int]) -> dict[str, torch.Tensor]:
    """Return the matrices of one expert of each layer, by an adapter's names; views."""
    layers, found = numbered_layers(model), {}
    for number, e in experts.items():
        module, path = experts_module(model, layers[number]), experts_path(layers[number])
        layout = layout_of(module)
        for name in stack_parts(layout):
            stack = getattr(module, name)
            if stack.is_floating_point() and not (hasattr(stack, "placements") or stack.is_meta):
                found |= {f"{path}.{e}.{part}": view for part, view in split_row(layout, name, stack[e]).items()}
    return found


@torch.no_grad()
def base_of(model: nn.Module, trained: Mapping[int, Sequence[int]] | None = None) -> dict[str, Any]:
    """Return `describe` with a sample of the weights: what an adapter of the `trained` experts records of its base."""
    matrices = expert_matrices(model, sampled_experts(model, trained or {}))
    return describe(model) | {"weights": sample_weights(sampled_parameters(model) | matrices)}


def check_base(base: Mapping[str, Any], model: Mapping[str, Any], source: str) -> None:
    """Raise ValueError unless a model, as `describe` or `base_of` describes it, is the base that the adapter names.

    Only what both know is compared. `source` names the adapter.
    """
    difference = _difference(base, model)
    if difference is not None:
        raise ValueError(f"{source} is for a base {difference}; use the base that it was trained on")


def _difference(base: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    for part in ("config", "experts") if base.get("hash") != model["hash"] else ():
        theirs = model[part]
        for name, value in base.get(part, {}).items():
            # versions of transformers know other names of a config, but a layer has experts or not
            if value != theirs.get(name) and (name in theirs or part == "experts"):
                what = f"the experts of layer {name}" if part == "experts" else name
                return f"whose {what} is {_say(value)}, the model's is {_say(theirs.get(name))}"
    ours, theirs = base.get("weights", {}), model.get("weights", {})
    # separately, since a base may differ in its experts alone
    for kind, is_expert in (("weights", False), ("experts", True)):
        names = [name for name in ours if name in theirs and (parse_name(name) is not None) == is_expert]
        pairs = [pair for name in names for pair in zip(ours[name], theirs[name], strict=False)]
        if (different := _different(pairs)) > DIFFERENT:
            return (
                f"with other {kind}: {different:.0%} of {len(pairs)} sampled weights differ from the model's "
                "(check_weights=False skips this check)"
            )
    return None


def _different(pairs: list[tuple[float, float]]) -> float:
    """Return the share of pairs of weights that differ in bfloat16."""
    if not pairs:
        return 0.0
    ours, theirs = torch.tensor(pairs, dtype=torch.float64).to(torch.bfloat16).unbind(1)
    return (ours != theirs).double().mean().item()


def _say(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else repr(value)
