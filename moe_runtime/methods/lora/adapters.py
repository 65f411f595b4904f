"""LoRA experts as adapter folders that PEFT reads: adapter_model.safetensors and
adapter_config.json.

`save_single` writes one expert as a plain adapter for the dense base. The other direction:
`read_adapter` reads one folder as its pairs, W + scaling B A by the path of the linear layer, and
`read_experts` several as the experts of one model. Adapters with more than
pairs (DoRA, biases, whole modules, a rank or alpha per layer) are rejected. Pairs outside of the
MLPs change the backbone: W + mean_i s_i B_i A_i over the experts i, or not at all. UpIT (arXiv
2410.01610, Sec. 2.3) puts no LoRA there and leaves the backbone unchanged; the mean is what it uses
when it tunes all parameters.
"""

import functools
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_runtime.config import check_choice, shown
from moe_runtime.hf.models.families import Family
from moe_runtime.io.checkpoint import Checkpoint, check_finite, write_tensors
from moe_runtime.io.files import atomic_folder, atomic_write_json, read_json
from moe_runtime.modules.lora import LoRAExperts, check_expert
from moe_runtime.modules.lora_linear import LinearExperts

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
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
# a pair: A [r, in] and B [out, r], or of a stack, as our layers hold it, [E, r, in] and [E, r, out]
Halves = tuple[torch.Tensor, torch.Tensor]
# other initializations also change the base's weights
INITIAL = (None, True, False, "gaussian", "orthogonal", "eva")


def save_single(
    layers: Mapping[str, LoRAExperts | LinearExperts],
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
    tensors = {}
    for name, layer in layers.items():
        check_expert(expert, layer.num_experts)
        config = _config(layer, base_model) | {"target_modules": list(layer.targets)}
        for target in layer.targets:
            key = f"{PREFIX}{name}.{target}"
            tensors[key + HALVES[0]] = layer.lora_a[target][expert]
            tensors[key + HALVES[1]] = layer.lora_b[target][expert].t()
    write_adapter(folder, tensors, config, overwrite)


def _config(layer: LoRAExperts | LinearExperts, base_model: str) -> dict:
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


def write_adapter(
    folder: str | os.PathLike,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping,
    overwrite: bool,
    copied: Sequence[Path] = (),
) -> None:
    """Write an adapter folder atomically, with copies of the files `copied`."""
    with atomic_folder(folder, overwrite) as tmp:
        # copies, since safetensors rejects tensors that share memory, as a stack's experts do
        copies = {}
        for key, tensor in tensors.items():
            copies[key] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        write_tensors(tmp / WEIGHTS, copies)
        atomic_write_json(tmp / CONFIG, dict(config))
        for path in copied:
            shutil.copyfile(path, tmp / path.name)


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
        if not isinstance(values, dict) or not all(map(is_pattern, values)):
            raise ValueError(
                f"{name} in {path} has {shown(values)}, but must map names, with at most "
                f"{MAX_REPEATS} repetitions and no repeated group, to numbers"
            )
    targets = config.get("target_modules")
    if isinstance(targets, str) and re.search(r"\)[*+{]", targets):
        raise ValueError(
            f"target_modules in {path} is {shown(targets)}, but must be names or a pattern without "
            "repeated groups"
        )


class AdapterPair(NamedTuple):
    """The change s B A of a parameter; of a stack, of each expert."""

    a: torch.Tensor  # [E, r, in]; of a matrix [r, in]
    b: torch.Tensor  # [E, out, r]; of a matrix [out, r]
    scaling: float
    transposed: bool = False  # whether the stack is [E, in, out]

    @property
    def is_stack(self) -> bool:
        """Whether each expert has a pair."""
        return self.a.dim() == 3

    def delta(self, expert: int | None = None) -> torch.Tensor:
        """Return the change of the parameter, or of row `expert` of a stack, in float32 or
        wider.
        """
        if expert is not None:
            return self._replace(a=self.a[expert], b=self.b[expert]).delta()
        wide = torch.promote_types(self.a.dtype, torch.float32)
        change = (self.b.to(wide) @ self.a.to(wide)).mul_(self.scaling)
        return change.transpose(-2, -1) if self.transposed else change


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
    pairs: Mapping[str, Halves]

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    def delta(self, path: str) -> torch.Tensor:
        """Return scaling * B A [out, in] of one linear layer, in float32 or wider."""
        return AdapterPair(*self.pairs[path], self.scaling).delta()


def read_adapter(folder: str | os.PathLike) -> DenseAdapter:
    """Read an adapter folder written by PEFT or `save_single`; raises ValueError for anything
    beyond plain LoRA.
    """
    path = Path(folder, CONFIG)
    config = read_json(path)
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    odd = other_setting(config, PLAIN)
    if not isinstance(rank, int) or rank < 1:
        odd = odd or "r"
    if not isinstance(alpha, int | float):
        odd = odd or "lora_alpha"
    if odd is not None:
        raise ValueError(
            f"{odd} in {path} is {shown(config.get(odd))}, but only peft_type 'LORA' with "
            "pairs A, B is supported. If init_lora_weights changed the base, convert the adapter "
            "when saving it with path_initial_model_for_weight_conversion of peft's "
            "save_pretrained"
        )
    if config.get("use_rslora"):
        alpha *= rank**0.5
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
        if b is None or shapes != [[rank, a.shape[-1]], [b.shape[0], rank]]:
            odd = f"{name} with A, B of {shapes}"
        pairs[name.removeprefix(PREFIX)] = a, b
    if odd or tensors or not pairs:
        raise ValueError(
            f"{Path(folder, WEIGHTS)} has {odd or min(tensors, default='no tensor')}, but only "
            f"lora_A.weight [{rank}, in] and lora_B.weight [out, {rank}] of linear layers, at "
            "least one pair, are supported"
        )
    return DenseAdapter(str(folder), rank, float(alpha), pairs)


def other_setting(config: Mapping, names: Sequence[str]) -> str | None:
    """Return the first setting of PEFT that is not plain LoRA's, of those in `names`, or None."""
    for name in names:
        if config.get(name) not in (None, False, "none", [], {}):
            return name
    if config.get("peft_type") != "LORA":
        return "peft_type"
    return None if config.get("init_lora_weights") in INITIAL else "init_lora_weights"


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

    @torch.no_grad()
    def fill(self, layer: int, pairs: Any) -> None:
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
) -> AdapterExperts:
    """Read adapter folders of a stock `model`; raises ValueError if they do not fit it or each
    other.
    """
    is_one = isinstance(folders, str | Path)
    if is_one or len(folders) != num_experts:
        passed = repr(folders) if is_one else f"{len(folders)} folders"
        raise ValueError(
            f"experts must have a folder for each of the {num_experts} experts, but got {passed}"
        )
    read = functools.cache(read_adapter)  # the experts may start from one adapter
    adapters = tuple(read(str(folder)) for folder in folders)
    first = adapters[0]
    _check_alike(adapters)
    prefix, suffix = map(re.escape, family.path.split("{}"))
    inside = set()
    outside = []
    for path in first.pairs:
        _check_layer(model, path, adapters)
        match = re.fullmatch(rf"{prefix}(\d+){suffix}\.(\w+)", path)
        if match is None:
            outside.append(path)
        else:
            inside.add((int(match[1]), match[2]))
    _check_backbone(model, outside, backbone, first.folder)
    layers = sorted({layer for layer, _ in inside})
    names = {name for _, name in inside}
    if not inside or len(inside) != len(layers) * len(names):
        raise ValueError(
            f"Adapter {first.folder} changes {sorted(names)} in {len(layers)} layers, but not all "
            "of them in each. It must change the same linear layers of the MLP in each layer, at "
            "least one"
        )
    return AdapterExperts(
        adapters,
        family.path,
        tuple(name for name in (*family.up, family.down) if name in names),
        tuple(layers),
        tuple(outside) if backbone == "mean" else (),
    )


@torch.no_grad()
def add_to_backbone(model: nn.Module, experts: AdapterExperts) -> None:
    """Add the experts' mean change to the weights outside of the MLPs, in place; summed in float32,
    rounded once.
    """
    for path in experts.backbone:
        weight = model.get_submodule(path).weight
        mean = sum(adapter.delta(path) for adapter in experts.adapters) / len(experts.adapters)
        weight.copy_(weight.to(mean.dtype) + mean.to(weight.device))


def _check_alike(adapters: Sequence[DenseAdapter]) -> None:
    first = adapters[0]
    for adapter in adapters[1:]:
        difference = None
        if (first.rank, first.scaling) != (adapter.rank, adapter.scaling):
            difference = f"has rank {adapter.rank}"
        for path in sorted(first.pairs.keys() ^ adapter.pairs.keys()):
            difference = f"changes other layers, such as {path}"
        if difference is not None:
            raise ValueError(
                f"{adapter.folder} {difference}, scaling {adapter.scaling}. All experts must match "
                f"{first.folder}, rank {first.rank} and scaling {first.scaling}"
            )


def _check_layer(model: nn.Module, path: str, adapters: Sequence[DenseAdapter]) -> None:
    module = dict(model.named_modules()).get(path)
    shape = list(module.weight.shape) if isinstance(module, nn.Linear) else None
    for adapter in adapters:
        a, b = adapter.pairs[path]
        if [b.shape[0], a.shape[1]] != shape:
            raise ValueError(
                f"{path} in {adapter.folder} is for {[b.shape[0], a.shape[1]]}, but the model has "
                f"{shape or 'no linear layer'}. Pass an adapter of this model"
            )


def _check_backbone(
    model: nn.Module, paths: Sequence[str], backbone: str | None, folder: str
) -> None:
    if backbone is not None:
        check_choice("backbone", backbone, BACKBONES)
    elif paths:
        raise ValueError(
            f"{folder} changes {paths[0]} and {len(paths) - 1} more outside of the MLPs, but "
            "backbone is None. Use backbone='mean' to add the experts' mean change there, or "
            "backbone='base' to ignore it"
        )
    head = model.get_output_embeddings()
    for path in paths if backbone == "mean" else ():
        is_head = model.get_submodule(path) is head
        if is_head and head.weight is model.get_input_embeddings().weight:
            raise ValueError(
                f"{folder} changes the head, whose weights are the embeddings' outside of the "
                "MLPs, but backbone is mean. Use backbone='base' to ignore it"
            )
