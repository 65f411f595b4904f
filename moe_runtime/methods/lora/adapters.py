"""LoRA experts as adapter folders that PEFT reads: adapter_model.safetensors and
adapter_config.json.

single   one expert as a plain adapter for the dense base: target_modules gate_proj, up_proj,
         down_proj.
stacked  one adapter for a model whose layers have all experts whole side by side, such as Mixtral
         or an upcycled model:
         PEFT's target_parameters on experts.gate_up_proj [E, 2I, H] and experts.down_proj [E, H,
         I], the router among modules_to_save. PEFT stores A as [E r, in], expert after expert, and
         B as [out, r E], rank after rank. gate and up share one weight there, so they share one
         pair of twice the rank, B being [B_gate 0; 0 B_up]; alpha / r stays.

Linear layers with routers of their own (LoRALinear) have no stacked form.

The other direction: `read_adapter` reads one folder as its pairs, W + scaling B A by the path of
the linear layer, and `read_experts` several as the experts of one model. Adapters with more than
pairs (DoRA, biases, whole modules, a rank or alpha per layer) are rejected. Pairs outside of the
MLPs change the backbone: W + mean_i s_i B_i A_i over the experts i, or not at all. UpIT (arXiv
2410.01610, Sec. 2.3) puts no LoRA there and leaves the backbone unchanged; the mean is what it uses
when it tunes all parameters.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moe_runtime.config import check_choice, shown
from moe_runtime.hf.models.families import Family
from moe_runtime.io.checkpoint import (
    Checkpoint,
    TensorSpec,
    check_finite,
    check_keys,
    write_tensors,
)
from moe_runtime.io.files import atomic_folder, atomic_write_json, read_json
from moe_runtime.modules.lora import LoRAExperts, LoRAMoE, check_expert
from moe_runtime.modules.lora_linear import LinearExperts

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
# PEFT nests: the first parameter's adapter is the inner one
PLACES = {"gate_up_proj": ".base_layer", "down_proj": ""}
HALVES = (".lora_A.weight", ".lora_B.weight")
# characters and repetitions of a pattern in a config
MAX_PATTERN = 1000
MAX_REPEATS = 3
BACKBONES = ("mean", "base")
# settings that change the equation, or whose weights are not pairs
PLAIN = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "bias",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "fan_in_fan_out",
    "megatron_config",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
)
# other initializations also change the base's weights
INITIAL = (None, True, False, "gaussian", "orthogonal", "eva")


def save_single(
    layers: Mapping[str, LoRAExperts | LoRAMoE | LinearExperts],
    folder: str | os.PathLike,
    expert: int,
    *,
    base_model: str,
    overwrite: bool = False,
) -> None:
    """Write one expert of all `layers`, keyed by the path of the dense MLP they replaced, as an
    adapter of the base.

    The layers have the same settings. Raises ValueError for an expert that does not exist.
    """
    experts = {name: _experts(layer) for name, layer in layers.items()}
    first = next(iter(experts.values()))
    check_expert(expert, first.num_experts)
    tensors = {}
    for name, layer in experts.items():
        for target in layer.targets:
            place = f"{PREFIX}{name}.{target}."
            tensors[f"{place}lora_A.weight"] = layer.lora_a[target][expert]
            tensors[f"{place}lora_B.weight"] = layer.lora_b[target][expert].t()
    _write(
        folder,
        tensors,
        _config(first, base_model) | {"target_modules": list(first.targets)},
        overwrite,
    )


def save_stacked(
    layers: Mapping[str, LoRAExperts | LoRAMoE],
    folder: str | os.PathLike,
    *,
    base_model: str,
    overwrite: bool = False,
) -> None:
    """Write one adapter of all `layers`, keyed by the path of their MoE block (model.layers.0.mlp).

    `base_model`, named in the config, is the model whose experts all equal the base. The layers
    have the same settings.
    """
    first = _experts(next(iter(layers.values())))
    parameters = [f"experts.{parameter}" for parameter in _stacked(first)]
    ranks = {}
    alphas = {}
    if "experts.gate_up_proj" in parameters:
        ranks["experts.gate_up_proj"] = 2 * first.rank
        alphas["experts.gate_up_proj"] = 2 * first.alpha
    gates = set()
    for name, layer in layers.items():
        if isinstance(layer, LoRAMoE):
            gates.add(f"{name.rpartition('.')[2]}.gate")
    config = _config(first, base_model) | {
        "target_modules": [],
        "target_parameters": parameters,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "modules_to_save": sorted(gates) or None,
    }
    _write(folder, _stacked_tensors(layers), config, overwrite)


def _stacked_tensors(layers: Mapping[str, LoRAExperts | LoRAMoE]) -> dict[str, torch.Tensor]:
    """Return the file's content: A [E r, in] and B [out, r E] of each stack, and the routers."""
    tensors = {}
    for name, layer in layers.items():
        for place, (a, b) in _places(name, _experts(layer)).values():
            tensors[place + HALVES[0]] = a.reshape(-1, a.shape[2])
            tensors[place + HALVES[1]] = b.permute(2, 1, 0).reshape(b.shape[2], -1)
    for name, layer in layers.items():
        if isinstance(layer, LoRAMoE):
            for key, value in layer.gate.state_dict().items():
                tensors[f"{PREFIX}{name}.gate.{key}"] = value
    return tensors


def _places(
    name: str, layer: LoRAExperts
) -> dict[str, tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Return where the file has each stack's pair, and the pair (a [E, r, in], b [E, r, out]), by
    the stack's name.
    """
    pairs = _stacked(layer)
    places = {}
    for key, pair in pairs.items():
        nested = PLACES[key] if len(pairs) == 2 else ""
        places[key] = (f"{PREFIX}{name}.experts{nested}", pair)
    return places


@torch.no_grad()
def load_stacked(layers: Mapping[str, LoRAExperts | LoRAMoE], folder: str | os.PathLike) -> None:
    """Read what `save_stacked` wrote, or PEFT after training it, into `layers` of the same
    settings, in place.
    """
    path = os.path.join(folder, WEIGHTS)
    _check_config(_experts(next(iter(layers.values()))), os.path.join(folder, CONFIG))
    tensors = read_tensors(folder)
    pairs = []
    specs = {key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    expected = {}
    for key, tensor in _stacked_tensors(layers).items():
        dtype = specs[key].dtype if key in specs else None  # any dtype will do
        expected[key] = TensorSpec(tuple(tensor.shape), dtype)
    check_keys(specs, expected, source=path)
    for name, layer in layers.items():
        experts = _experts(layer)
        for parameter, (place, (a, b)) in _places(name, experts).items():
            new_a = tensors[place + HALVES[0]].view(a.shape)
            new_b = tensors[place + HALVES[1]].view(b.shape[::-1]).permute(2, 1, 0)
            split = {parameter: (new_a, new_b)}
            if parameter == "gate_up_proj":
                split = _split(experts, new_a, new_b, f"{place} in {path}")
            for target, (half_a, half_b) in split.items():
                pairs.append((experts.lora_a[target], half_a))
                pairs.append((experts.lora_b[target], half_b))
    for parameter, value in pairs:
        parameter.copy_(value)
    for name, layer in layers.items():
        if isinstance(layer, LoRAMoE):
            gate = layer.gate.state_dict()
            layer.gate.load_state_dict({key: tensors[f"{PREFIX}{name}.gate.{key}"] for key in gate})


def _experts(layer: nn.Module) -> LoRAExperts | LinearExperts:
    """Return the pairs of a layer."""
    return layer.experts if isinstance(layer, LoRAMoE) else layer


def _stacked(layer: LoRAExperts) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (a [E, r, in], b [E, r, out]) by the stack's name; gate and up together have twice the
    rank.
    """
    pairs = {}
    if {"gate_proj", "up_proj"} & set(layer.targets):
        gate_a, gate_b = _halves(layer, "gate_proj")
        up_a, up_b = _halves(layer, "up_proj")
        zero = torch.zeros_like(gate_b)
        b = torch.cat([torch.cat([gate_b, zero], 2), torch.cat([zero, up_b], 2)], 1)
        pairs["gate_up_proj"] = (torch.cat([gate_a, up_a], 1), b)
    if "down_proj" in layer.targets:
        pairs["down_proj"] = _halves(layer, "down_proj")
    return pairs


def _halves(layer: LoRAExperts, target: str) -> tuple[torch.Tensor, torch.Tensor]:
    if target in layer.targets:
        return layer.lora_a[target].detach(), layer.lora_b[target].detach()
    out, size = getattr(layer.base, target).weight.shape
    like = next(iter(layer.lora_a.values()))
    a = like.new_zeros(layer.num_experts, layer.rank, size)
    return a, like.new_zeros(layer.num_experts, layer.rank, out)


def _split(layer: LoRAExperts, a, b, key: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return gate's and up's halves of their shared pair; raises ValueError if a rank belongs to
    both.
    """
    r = layer.rank
    I = b.shape[2] // 2
    halves = {"gate_proj": (a[:, :r], b[:, :r, :I]), "up_proj": (a[:, r:], b[:, r:, I:])}
    beside = [b[:, :r, I:], b[:, r:, :I]]
    for target in ("gate_proj", "up_proj"):
        if target not in layer.targets:
            beside.append(halves.pop(target)[1])
    if any(part.any() for part in beside):
        raise ValueError(
            f"Each rank of {key} must belong to one of the targets {', '.join(layer.targets)}, but "
            "some belong to both gate and up or to another target. PEFT can load this adapter"
        )
    return halves


def _config(layer: LoRAExperts, base_model: str) -> dict:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": layer.rank,
        "lora_alpha": layer.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
    }


def _check_config(layer: LoRAExperts, path: str) -> None:
    config = read_json(path)
    ours = _config(layer, "")
    for key in ("r", "lora_alpha", "use_rslora"):
        if config.get(key) != ours[key]:
            raise ValueError(
                f"{key} in {path} must equal {ours[key]!r}, that of the layers, but is "
                f"{shown(config.get(key))}"
            )


def _write(folder, tensors: dict[str, torch.Tensor], config: dict, overwrite: bool) -> None:
    with atomic_folder(folder, overwrite) as tmp:
        # copies, since safetensors rejects tensors that share memory, as a stack's experts do
        copies = {}
        for key, tensor in tensors.items():
            copies[key] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        write_tensors(tmp / WEIGHTS, copies)
        atomic_write_json(tmp / CONFIG, config)


def read_tensors(folder: str | os.PathLike) -> dict[str, torch.Tensor]:
    """Return all tensors of an adapter folder; raises ValueError if they cannot be read or are not
    finite.
    """
    with Checkpoint(folder, WEIGHTS) as file:
        return {key: check_finite(file.get(key), key, Path(folder, WEIGHTS)) for key in file.keys()}


def is_pattern(text: str) -> bool:
    """Return whether a text is a regular expression that is matched in bounded time.

    PEFT matches the keys of rank_pattern and alpha_pattern with every name. A repeated group may
    take exponential time, and each further repetition multiplies the time by the length of a name.
    """
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    repeats = re.findall(r"[*+{]|(?<!\()\?", text)
    is_short = len(text) <= MAX_PATTERN and len(repeats) <= MAX_REPEATS
    return is_short and not re.search(r"\)[*+?{]", text)


def check_patterns(folder: str | os.PathLike) -> None:
    """Raise ValueError if PEFT could not match the patterns in an adapter's config in
    bounded time.
    """
    path = Path(folder, CONFIG)
    config = read_json(path) if path.is_file() else {}
    for name in ("rank_pattern", "alpha_pattern"):
        values = config.get(name) or {}
        for key in values if isinstance(values, dict) else [values]:
            if not isinstance(values, dict) or not is_pattern(key):
                raise ValueError(
                    f"{name} in {path} has {shown(key)}, but must map names, with at most "
                    f"{MAX_REPEATS} repetitions and no repeated group, to numbers"
                )
    targets = config.get("target_modules")
    if isinstance(targets, str) and re.search(r"\)[*+{]", targets):
        raise ValueError(
            f"target_modules in {path} is {shown(targets)}, but must be names or a pattern without "
            "repeated groups"
        )


@dataclass(frozen=True)
class DenseAdapter:
    """One adapter: `pairs` holds A [r, in] and B [out, r] by the path of the linear layer, as in
    the dense model.
    """

    folder: str
    rank: int
    # scaling = alpha / r, also for rank-stabilized LoRA, whose file has scaling = lora_alpha /
    # sqrt(r)
    alpha: float
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    def delta(self, path: str) -> torch.Tensor:
        """Return scaling * B A [out, in] of one linear layer, in float32 or wider."""
        a, b = self.pairs[path]
        wide = torch.promote_types(a.dtype, torch.float32)
        return (b.to(wide) @ a.to(wide)).mul_(self.scaling)


def read_adapter(folder: str | os.PathLike) -> DenseAdapter:
    """Read an adapter folder written by PEFT or `save_single`; raises ValueError for anything
    beyond plain LoRA.
    """
    path = os.path.join(folder, CONFIG)
    config = read_json(path)
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    odd = other_setting(config, PLAIN)
    if odd is None and (not isinstance(rank, int) or rank < 1):
        odd = "r"
    if odd is None and not isinstance(alpha, int | float):
        odd = "lora_alpha"
    if odd is not None:
        raise ValueError(
            f"{odd} in {path} is {shown(config.get(odd))}, but only peft_type 'LORA' with "
            "pairs A, B is supported. If init_lora_weights changed the base, convert the adapter "
            "when saving it with path_initial_model_for_weight_conversion of peft's "
            "save_pretrained"
        )
    if config.get("use_rslora"):
        alpha *= rank**0.5
    return DenseAdapter(str(folder), rank, float(alpha), _pairs(folder, rank))


def other_setting(config: Mapping, names: Sequence[str]) -> str | None:
    """Return the first setting of PEFT that is not plain LoRA's, of those in `names`, or None."""
    for name in names:
        if config.get(name) not in (None, False, "none", [], {}):
            return name
    if config.get("peft_type") != "LORA":
        return "peft_type"
    return None if config.get("init_lora_weights") in INITIAL else "init_lora_weights"


def _pairs(folder: str | os.PathLike, rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    tensors = read_tensors(folder)
    pairs = {}
    odd = None
    for key in list(tensors):
        if not key.startswith(PREFIX) or not key.endswith(HALVES[0]):
            continue
        name = key.removesuffix(HALVES[0])
        a = tensors.pop(key)
        b = tensors.pop(name + HALVES[1], None)
        shapes = [list(a.shape), None if b is None else list(b.shape)]
        if b is None or a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
            odd = f"{name} with A, B of {shapes}"
        pairs[name.removeprefix(PREFIX)] = a, b
    if odd or tensors or not pairs:
        raise ValueError(
            f"{os.path.join(folder, WEIGHTS)} has {odd or min(tensors, default='no tensor')}, but "
            f"only lora_A.weight [{rank}, in] and lora_B.weight [out, {rank}] of linear layers, at "
            "least one pair, are supported"
        )
    return pairs


@dataclass(frozen=True)
class AdapterExperts:
    """Adapters of equal form, one per expert; `targets` are the linear layers that they change in
    the MLPs of `layers`.
    """

    adapters: tuple[DenseAdapter, ...]
    path: str  # of a layer's MLP, with {}
    targets: tuple[str, ...]
    layers: tuple[int, ...]
    backbone: tuple[str, ...]  # paths of linear layers that get the mean change

    @property
    def rank(self) -> int:
        """The rank of all pairs."""
        return self.adapters[0].rank

    @property
    def alpha(self) -> float:
        """The alpha of all pairs; alpha / rank is the scaling."""
        return self.adapters[0].alpha

    @torch.no_grad()
    def fill(self, layer: int, pairs) -> None:
        """Copy a layer's pairs into `pairs`, LoRAExperts or LinearExperts: lora_a [E, r, in],
        lora_b [E, r, out].
        """
        for target in self.targets:
            path = f"{self.path.format(layer)}.{target}"
            for e, adapter in enumerate(self.adapters):
                a, b = adapter.pairs[path]
                pairs.lora_a[target][e].copy_(a)
                pairs.lora_b[target][e].copy_(b.t())


def read_experts(
    model: nn.Module,
    family: Family,
    folders: Sequence[str | Path],
    num_experts: int,
    backbone: str | None,
    *,
    rank: int | None = None,
    alpha: float | None = None,
    targets: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
) -> AdapterExperts:
    """Read adapter folders of a stock `model`; raises ValueError if they do not fit it, each other
    or the settings.
    """
    is_one = isinstance(folders, str | Path)
    if is_one or len(folders) != num_experts:
        given = repr(folders) if is_one else f"{len(folders)} folders"
        raise ValueError(
            f"experts must have a folder for each of the {num_experts} experts, but got {given}"
        )
    known = {}
    for folder in map(str, folders):
        if folder not in known:
            known[folder] = read_adapter(folder)
    adapters = tuple(known[str(folder)] for folder in folders)
    _check_alike(adapters)
    places = {path: _place(family, path) for path in adapters[0].pairs}
    for path in places:
        _check_layer(model, path, adapters)
    rest = tuple(path for path, place in places.items() if place is None)
    _check_backbone(model, rest, backbone, adapters[0].folder)
    inside = {place for place in places.values() if place is not None}
    places = sorted({layer for layer, _ in inside})
    names = {name for _, name in inside}
    if not inside or len(inside) != len(places) * len(names):
        raise ValueError(
            f"Adapter {adapters[0].folder} changes {sorted(names)} in {len(places)} layers, but "
            "not all of them in each. It must change the same linear layers of the MLP in each "
            "layer, at least one"
        )
    found = AdapterExperts(
        adapters,
        family.path,
        tuple(name for name in (*family.up, family.down) if name in names),
        tuple(places),
        rest if backbone == "mean" else (),
    )
    for name, value in {"rank": rank, "alpha": alpha, "targets": targets, "layers": layers}.items():
        theirs = getattr(found, name)
        if value is None:
            continue
        is_number = isinstance(theirs, int | float)
        if value != theirs if is_number else set(value) != set(theirs):
            raise ValueError(
                f"{name} is {value}, but {theirs} in the experts' adapters. Leave it None with "
                "adapters"
            )
    return found


@torch.no_grad()
def add_to_backbone(model: nn.Module, experts: AdapterExperts) -> None:
    """Add the experts' mean change to the weights outside of the MLPs, in place; summed in float32,
    rounded once.
    """
    for path in experts.backbone:
        weight = model.get_submodule(path).weight
        mean = sum(adapter.delta(path) for adapter in experts.adapters) / len(experts.adapters)
        weight.copy_(weight.to(mean.dtype) + mean.to(weight.device))


def _place(family: Family, path: str) -> tuple[int, str] | None:
    """Return the layer and the linear layer's name of a path inside an MLP; None for
    another path.
    """
    prefix, suffix = (re.escape(text) for text in family.path.split("{}"))
    match = re.fullmatch(rf"{prefix}(\d+){suffix}\.(\w+)", path)
    return None if match is None else (int(match[1]), match[2])


def _check_alike(adapters: Sequence[DenseAdapter]) -> None:
    first = adapters[0]
    for adapter in adapters[1:]:
        alone = sorted(first.pairs.keys() ^ adapter.pairs.keys())
        if alone or (first.rank, first.scaling) != (adapter.rank, adapter.scaling):
            what = (
                f"changes other layers, such as {alone[0]}" if alone else f"has rank {adapter.rank}"
            )
            raise ValueError(
                f"{adapter.folder} {what}, scaling {adapter.scaling}. All experts must match "
                f"{first.folder}, rank {first.rank} and scaling {first.scaling}"
            )


def _check_layer(model: nn.Module, path: str, adapters: Sequence[DenseAdapter]) -> None:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    want = list(module.weight.shape) if isinstance(module, nn.Linear) else None
    for adapter in adapters:
        a, b = adapter.pairs[path]
        if [b.shape[0], a.shape[1]] != want:
            raise ValueError(
                f"{path} in {adapter.folder} is for {[b.shape[0], a.shape[1]]}, but the model has "
                f"{want or 'no linear layer'}. Pass an adapter of this model"
            )


def _check_backbone(
    model: nn.Module, paths: Sequence[str], backbone: str | None, folder: str
) -> None:
    if backbone is not None:
        check_choice("backbone", backbone, BACKBONES)
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    if paths and backbone is None:
        raise ValueError(
            f"{folder} changes {paths[0]} and {len(paths) - 1} more outside of the MLPs, but "
            "backbone is None. Use backbone='mean' to add the experts' mean change there, or "
            "backbone='base' to ignore it"
        )
    if backbone == "mean" and tied and any(model.get_submodule(path) is head for path in paths):
        raise ValueError(
            f"{folder} changes the head, whose weights are the embeddings' outside of the MLPs, "
            "but backbone is mean. Use backbone='base' to ignore it"
        )
