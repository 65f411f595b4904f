"""The parameters that ESFT trains (arXiv 2407.01906, Sec. 3.3 and Table 3)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from moe_runtime.hf.dropin.layers import plain_name
from moe_runtime.hf.training.trainable import ExpertsLayer, TrainableReceipt, layers_of, train_rows

# MLPs next to the experts that process every token; their gates are not part of them
SHARED = re.compile(r"(^|\.)shared_(experts?|mlp)$")
# parameters by which routers choose experts and sparse attention chooses keys, which get no
# gradient
CHOICE = re.compile(r"\.(e_score_correction_bias|expert_bias)$|(^|\.)indexer\.")


def freeze_for_esft(
    model: nn.Module,
    experts: Mapping[int, Sequence[int]],
    shared_experts: bool = False,
    non_expert_modules: bool = False,
    *,
    dtype: torch.dtype | None = None,
    layers: dict[int, ExpertsLayer] | None = None,
) -> TrainableReceipt:
    """Call `train_rows` and set whether other parameters are trained (ESFT, Table 3); by default
    none are.

    `shared_experts`: the MLPs next to the experts that process every token, and expert 0 of our own
    layers that have a shared one, which `experts` must not contain. `non_expert_modules`:
    everything but routed experts and shared MLPs: routers and the gates of shared MLPs, attention,
    norms, embeddings, head, dense layers. `layers` are those of `layers_of(model)`, if
    known. Raises ValueError as train_rows.
    """
    if layers is None:
        layers = layers_of(model)
    experts = _with_shared(layers, experts, shared_experts)
    # found by name or, as in Gemma 4, as the `mlp` of the experts' block
    in_blocks = {f"{layer.name.rpartition('.')[0]}.mlp" for layer in layers.values()}
    shared = []
    for name, _ in model.named_modules():
        if name in in_blocks or SHARED.search(plain_name(name)):
            shared.append(name)
    prefixes = tuple(f"{path}." for path in shared)
    stacks = {id(getattr(layer.module, name)) for layer in layers.values() for name in layer.names}
    others = {}
    for name, parameter in model.named_parameters():
        selected = shared_experts if name.startswith(prefixes) else non_expert_modules
        others[name] = selected and id(parameter) not in stacks and not CHOICE.search(name)
    receipt = train_rows(model, experts, dtype=dtype, others=others, layers=layers)
    return replace(receipt, shared_experts=tuple(shared) if shared_experts else ())


def _with_shared(
    layers: dict[int, ExpertsLayer], experts: Mapping, shared_experts: bool
) -> dict[int, tuple]:
    """Add the shared experts of our layers to `experts`, which must not contain them."""
    experts = {number: tuple(ids) for number, ids in experts.items()}
    for number, layer in layers.items():
        if not layer.num_shared:
            continue
        ids = experts.get(number, ())
        if 0 in ids:
            raise ValueError(
                f"experts of layer {number} must be routed ones, but are {list(ids)}, and 0 is the "
                "shared one. Pass shared_experts=True to train it"
            )
        if shared_experts:
            experts[number] = (*ids, 0)
    return experts
