"""Write a stock MoE model as a dense one: the experts that any token may need become one MLP.

For K experts kept in a layer (arXiv 2605.28207, Sec. 3), with G the mean over the tokens of the sum
of a token's gates, 1 where the router normalizes them:

    gate' = [gate_1; ...; gate_K]    up' = [up_1; ...; up_K]    down' = G / K [down_1, ..., down_K]

which is exact if all K experts are chosen with equal gates. Shared experts, which every token sees,
are appended with their own weights; MLPs of layers that are dense already are padded with zeros to
the same width. The loss that this causes is to be trained away: `moe-runtime train --distill`.

A family with a dense sibling becomes that one; others stay of their class with every layer dense,
if their config can say so.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig

from moe_runtime.config import check_choice
from moe_runtime.hf.common.loading import reason_of
from moe_runtime.hf.dropin.gates import gate_of
from moe_runtime.hf.models.families import activation_name
from moe_runtime.hf.models.folders import SHARD, Progress, check_tensors, skeleton
from moe_runtime.io.checkpoint import TensorSpec
from moe_runtime.io.files import check_out_dir, read_json
from moe_runtime.methods.shrink import choice
from moe_runtime.methods.shrink.experts import LayerExperts
from moe_runtime.methods.shrink.folders import Shrinking, ShrinkReceipt, Tensors
from moe_runtime.methods.shrink.statistics import ExpertStatistics
from moe_runtime.ops.activation import Activation

# model_type of a MoE family -> of the dense one with the same attention, norms and names
SIBLINGS = {
    "qwen3_moe": "qwen3",
    "mixtral": "mistral",
    "flex_olmo": "olmo2",
    "granitemoe": "granite",
}
NAMES = ("gate_proj", "up_proj", "down_proj")
_MLP = re.compile(r"^(?P<path>.+)\.(?P<name>gate_proj|up_proj|down_proj)\.weight$")
_SHARED = re.compile(r"^(?P<block>.+)\.(shared_experts?|shared_mlp)\.(?P<name>\w+)\.weight$")


def dense_folder(
    source: str | Path,
    statistics: ExpertStatistics | str | Path,
    out: str | Path,
    keep: int,
    *,
    by: str = "do-acp",
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ShrinkReceipt:
    """Write a MoE model's folder as a dense model with MLPs of `keep` experts each.

    Args:
        source: Folder of a stock MoE model.
        statistics: Those of the model, or the file; with outputs for acp and do-acp.
        out: The folder to write.
        keep: Experts that become the MLP.
        by: cp, acp or do-acp.
        max_shard_size: Largest file.
        overwrite: Whether `out` is replaced if it exists.
        progress: Called with the bytes done and all bytes.

    Raises:
        ValueError: The family has no dense form that computes the same, or the experts are
            quantized, or the statistics are of another model. Nothing is written then.
    """
    check_choice("by", by, choice.DENSE)
    check_out_dir(out, overwrite, [source, statistics])
    shrinking = Shrinking(source, statistics)
    shrinking.check_dense(keep, choice.NEEDED.get(by, ()))
    kept = {}
    for number, sums in shrinking.statistics.layers.items():
        kept[number] = choice.kept(sums, by, keep)
    form = _form(shrinking, keep)
    return shrinking.write(
        out,
        _tensors(shrinking, form, kept),
        form.config,
        {"method": "to-dense", "by": by, "keep": keep, "kept": kept},
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        progress=progress,
    )


class _Form(NamedTuple):
    """The dense model to write."""

    config: dict[str, Any]  # config.json
    mlps: dict[int, str]  # layer -> path of its MLP, in the folder
    width: int
    shared: dict[int, dict[str, str]]  # layer -> projection -> tensor of its shared experts
    left_out: frozenset[str]  # tensors that become part of an MLP, or are not needed
    padded: dict[str, int]  # tensors of dense MLPs and the dimension that grows


class _Planned(NamedTuple):
    """The tensors of a folder that is not written yet."""

    path: Path
    tensors: Mapping[str, TensorSpec]

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return the tensors."""
        return self.tensors


def _form(shrinking: Shrinking, keep: int) -> _Form:
    """Return the dense form of a model; raises ValueError if there is none."""
    cuts = shrinking.cuts
    specs = shrinking.checkpoint.specs()
    module = cuts.model.get_submodule(next(iter(cuts.layers.values())))
    gate = gate_of(module)
    if gate is None or gate != Activation(gate.act) or module.has_bias:
        raise ValueError(
            f"The experts of {cuts.path} compute more than down(act(gate x) * up x), so no dense "
            "model of transformers computes the same"
        )
    used = {key for key, place in shrinking.places.items() if place is not None}
    shared: dict[int, dict[str, str]] = {}
    mlps = {}
    numbers = {block: number for number, block in shrinking.saved_blocks().items()}
    for key in specs:
        match = _SHARED.match(key)
        if match is not None and match["block"] in numbers and match["name"] in NAMES:
            shared.setdefault(numbers[match["block"]], {})[match["name"]] = key
            used.add(key)
    width = keep * module.intermediate_dim
    width += max((specs[names["up_proj"]].shape[0] for names in shared.values()), default=0)
    dense_mlps = {}
    # of the same stack of layers: their paths differ in numbers
    alike = {re.sub(r"\d+", "*", block) for block in numbers}
    for key, spec in specs.items():
        match = _MLP.match(key)
        if match is not None and re.sub(r"\d+", "*", match["path"]) in alike:
            dim = int(match["name"] == "down_proj")
            dense_mlps[key] = dim
            width = max(width, spec.shape[dim])
    config = _dense_config(shrinking, width)
    for number, block in cuts.blocks.items():
        mlps[number] = block.replace(".block_sparse_moe", ".mlp")
    form = _Form(config, mlps, width, shared, frozenset(used), dense_mlps)
    _check(shrinking, form, gate.act)
    return form


def _dense_config(shrinking: Shrinking, width: int) -> dict[str, Any]:
    """Return config.json of the dense model, of the sibling or with every layer dense."""
    cuts = shrinking.cuts
    values = read_json(cuts.path / "config.json")
    sibling = SIBLINGS.get(cuts.config.model_type)
    if sibling is not None:
        known = cuts.config.to_dict()
        fields = {"intermediate_size": width}
        for field in AutoConfig.for_model(sibling).to_dict():
            if field in known and field not in ("model_type", "architectures", *fields):
                fields[field] = known[field]
        fields.setdefault("head_dim", cuts.config.hidden_size // cuts.config.num_attention_heads)
        dense = AutoConfig.for_model(sibling, **fields)
        dense.architectures = [type(skeleton(dense)).__name__]
        return json.loads(dense.to_json_string(use_diff=True))
    text = cuts.config.get_text_config()
    count = text.num_hidden_layers
    every = {
        "first_k_dense_replace": count,
        "num_dense_layers": count,
        "mlp_only_layers": list(range(count)),
        "mlp_layer_types": ["dense"] * count,
        "moe_layer_start_index": count,
    }
    part = values
    for name in cuts.path_of_text():
        part = part[name]
    for field, value in every.items():
        if getattr(text, field, None) is not None:
            part[field] = value
    part["intermediate_size"] = width
    return values


def _check(shrinking: Shrinking, form: _Form, act: str) -> None:
    """Raise ValueError unless the dense form is a model of transformers with these tensors."""
    cuts = shrinking.cuts
    path = cuts.path
    planned = {}
    for key, spec in shrinking.checkpoint.specs().items():
        if key in form.padded:
            shape = list(spec.shape)
            shape[form.padded[key]] = form.width
            planned[key] = TensorSpec(tuple(shape), spec.dtype)
        elif key not in form.left_out and key not in shrinking.left_out:
            planned[key] = spec
    H = cuts.config.get_text_config().hidden_size
    for mlp in form.mlps.values():
        for name in NAMES:
            shape = (H, form.width) if name == "down_proj" else (form.width, H)
            planned[f"{mlp}.{name}.weight"] = TensorSpec(shape, torch.float32)
    try:
        config = AutoConfig.for_model(**form.config)
        check_tensors(config, _Planned(path, planned))
        computed = activation_name(config.get_text_config().hidden_act)
    except Exception as error:  # configs and models raise various ones
        raise ValueError(
            f"{cuts.config.model_type} has no dense form that its config or a sibling of its "
            f"family can describe: {reason_of(error)}"
        ) from error
    strategy = getattr(cuts.config, "shared_expert_combination_strategy", "sum")
    if strategy != "sum":
        raise ValueError(
            f"The layers of {path} combine their shared experts by {strategy}, so no dense layer "
            "computes the same"
        )
    if computed != act:
        raise ValueError(
            f"The experts of {path} use {act}, but its dense layers use {computed}, so no dense "
            "model of this family computes the same"
        )


def _tensors(shrinking: Shrinking, form: _Form, kept: Mapping[int, list[int]]) -> Tensors:
    """Yield the tensors of the dense model."""
    for number, ids in kept.items():
        experts = LayerExperts(shrinking.cuts, shrinking.checkpoint, number)
        for name, tensor in _mlp(shrinking, form, experts, number, ids).items():
            yield f"{form.mlps[number]}.{name}.weight", tensor
    for key in shrinking.checkpoint.keys():
        if key not in form.left_out and key not in shrinking.left_out:
            tensor = shrinking.checkpoint.get(key)
            if key in form.padded:
                tensor = _padded(tensor, form.padded[key], form.width)
            yield key, tensor
        shrinking.read(key)


def _mlp(
    shrinking: Shrinking, form: _Form, experts: LayerExperts, number: int, ids: list[int]
) -> dict[str, Tensor]:
    """Return a layer's MLP: the experts, then the shared ones."""
    sums = shrinking.statistics.layers[number]
    total = float(sums["gate"].sum() / shrinking.statistics.tokens)
    if abs(total - 1) < 1e-3:  # normalized gates, rounded
        total = 1.0
    columns: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    for expert in map(experts.parts, ids):
        columns["gate_proj"].append(expert["gate_proj.weight"])
        columns["up_proj"].append(expert["up_proj.weight"])
        down = expert["down_proj.weight"]
        columns["down_proj"].append((down.float() * (total / len(ids))).to(down.dtype))
    for name, key in form.shared.get(number, {}).items():
        columns[name].append(shrinking.checkpoint.get(key))
    result = {}
    for name, parts in columns.items():
        dim = int(name == "down_proj")
        result[name] = _padded(torch.cat(parts, dim), dim, form.width)
    return result


def _padded(tensor: Tensor, dim: int, width: int) -> Tensor:
    """Return a matrix with zeros appended to a dimension up to `width`."""
    missing = width - tensor.shape[dim]
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)
