"""PEFT adapters as the experts of one model: what they must agree on, and what of them is the backbone's.

An adapter's pairs outside of the MLPs change the backbone: W + mean_i s_i B_i A_i over the experts i, or not at all. UpIT
(arXiv 2410.01610, Sec. 2.3) tunes none there with LoRA and leaves the backbone as it was; the mean is what it does where it
tunes all parameters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moe_runtime.config import check_choice
from moe_runtime.hf.families import Family
from moe_runtime.modules.lora_adapters import Adapter, read_adapter

BACKBONES = ("mean", "base")


@dataclass(frozen=True)
class AdapterExperts:
    """Adapters that agree: expert e's pairs are adapters[e]'s; `targets` are linear layers of the MLPs of `layers`."""

    adapters: tuple[Adapter, ...]
    path: str  # of a layer's MLP, with {}
    targets: tuple[str, ...]
    layers: tuple[int, ...]
    backbone: tuple[str, ...]  # paths of linear layers that get the mean change

    @property
    def rank(self) -> int:
        """Return the rank of all pairs."""
        return self.adapters[0].rank

    @property
    def alpha(self) -> float:
        """Return what, divided by the rank, is the scaling of all pairs."""
        return self.adapters[0].alpha

    @torch.no_grad()
    def fill(self, layer: int, pairs) -> None:
        """Copy a layer's pairs into `pairs`, LoRAExperts or LinearExperts: lora_a [E, r, in], lora_b [E, r, out]."""
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
    """Read adapter folders of `model`, a stock one; raises ValueError where they do not fit it, each other or the settings."""
    if isinstance(folders, str | Path) or len(folders) != num_experts:
        shown = repr(folders) if isinstance(folders, str | Path) else f"{len(folders)} folders"
        raise ValueError(f"experts is {shown}, num_experts is {num_experts}; want a folder for each expert")
    known = {str(folder): None for folder in folders}
    known = {folder: read_adapter(folder) for folder in known}
    adapters = tuple(known[str(folder)] for folder in folders)
    _check_alike(adapters)
    places = {path: _place(family, path) for path in adapters[0].pairs}
    for path in places:
        _check_layer(model, path, adapters)
    rest = tuple(path for path, place in places.items() if place is None)
    _check_backbone(model, rest, backbone, adapters[0].folder)
    inside = {place for place in places.values() if place is not None}
    places, names = sorted({layer for layer, _ in inside}), {name for _, name in inside}
    if not inside or len(inside) != len(places) * len(names):
        raise ValueError(
            f"the adapter {adapters[0].folder} changes {sorted(names)} in {len(places)} layers, not all in each; want the same "
            "linear layers of the MLP in each layer, one at least"
        )
    found = AdapterExperts(
        adapters,
        family.path,
        tuple(name for name in (*family.up, family.down) if name in names),
        tuple(places),
        rest if backbone == "mean" else (),
    )
    _check_settings(found, rank=rank, alpha=alpha, targets=targets, layers=layers)
    return found


@torch.no_grad()
def add_to_backbone(model: nn.Module, experts: AdapterExperts) -> None:
    """Add the experts' mean change to the weights outside of the MLPs, in place; summed in float32, rounded once."""
    for path in experts.backbone:
        weight = model.get_submodule(path).weight
        mean = sum(adapter.delta(path) for adapter in experts.adapters) / len(experts.adapters)
        weight.copy_(weight.to(mean.dtype) + mean.to(weight.device))


def _place(family: Family, path: str) -> tuple[int, str] | None:
    """Return the layer and the linear layer's name of a path inside an MLP; None for another path."""
    prefix, suffix = (re.escape(text) for text in family.path.split("{}"))
    match = re.fullmatch(rf"{prefix}(\d+){suffix}\.(\w+)", path)
    return None if match is None else (int(match[1]), match[2])


def _check_alike(adapters: Sequence[Adapter]) -> None:
    first = adapters[0]
    for adapter in adapters[1:]:
        for name, one, other in (
            ("rank", first.rank, adapter.rank),
            ("scaling", first.scaling, adapter.scaling),
            ("layers", set(first.pairs), set(adapter.pairs)),
        ):
            if one != other:
                if name == "layers":
                    one, other = (f"{len(paths)}, {sorted(one ^ other)[0]} of one alone" for paths in (one, other))
                raise ValueError(
                    f"{name} of {first.folder} is {one}, of {adapter.folder} {other}; want one for all experts"
                )


def _check_layer(model: nn.Module, path: str, adapters: Sequence[Adapter]) -> None:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear):
        raise ValueError(
            f"{adapters[0].folder} changes {path}, in the model a {type(module).__name__}; want linear layers of its base"
        )
    want = tuple(module.weight.shape)
    for adapter in adapters:
        a, b = adapter.pairs[path]
        if (b.shape[0], a.shape[1]) != want:
            raise ValueError(
                f"{path} in {adapter.folder} is of {[b.shape[0], a.shape[1]]}, in the model {list(want)}; want an adapter of it"
            )


def _check_backbone(model: nn.Module, paths: Sequence[str], backbone: str | None, folder: str) -> None:
    if backbone is not None:
        check_choice("backbone", backbone, BACKBONES)
    if paths and backbone is None:
        raise ValueError(
            f"backbone is None, {folder} changes {paths[0]} and {len(paths) - 1} more outside of the MLPs; want 'mean' to add "
            "the experts' mean change there, or 'base' to leave it out"
        )
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    if backbone == "mean" and tied and any(model.get_submodule(path) is head for path in paths):
        raise ValueError(f"{folder} changes the head, whose weights are the embeddings'; want backbone='base'")


def _check_settings(found: AdapterExperts, **given) -> None:
    """Raise ValueError where a setting that is given is not the adapters'."""
    for name, value in given.items():
        theirs = getattr(found, name)
        same = value == theirs if isinstance(theirs, int | float) else set(value or ()) == set(theirs)
        if value is not None and not same:
            raise ValueError(f"{name} is {value}, of the experts' adapters {theirs}; want {name}=None: they say it")
