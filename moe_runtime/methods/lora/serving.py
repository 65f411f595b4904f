"""Export a PEFT adapter of an MoE model for an inference engine: a pair for each expert and
projection.

ENGINES holds the names and the version whose source they come from. The export is exact: gate and
up each get A and their rows of B; since engines read one rank and one scaling from the config,
pairs are padded with zeros to one rank and scaled through B; a projection that the adapter does not
change gets zeros if its expert has other pairs. Anything that an engine would drop or misread is an
error: `stacks.merge_folder` writes a model that every engine reads.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from moe_runtime.config import check_choice
from moe_runtime.hf.dropin.peft_files import pack
from moe_runtime.hf.models.folders import to_saved
from moe_runtime.hf.training.trained_files import layout_of
from moe_runtime.io.files import check_out_dir
from moe_runtime.methods.lora.stacks import (
    WRITES,
    Pair,
    PeftAdapter,
    base_skeleton,
    check_peft,
    read_peft,
    write_adapter,
)


class Keys(NamedTuple):
    """How an engine names the pairs of experts, and its other requirements of an adapter."""

    version: str
    read: str  # when its source was read; no engine has been run here
    expert: str  # a pair [r, in], [out, r] of one expert
    # or pairs of stacks, flat like PEFT's, for families whose experts the engine stacks
    stacks: Mapping[str, str]
    stacked_families: tuple[str, ...]
    # always gate_proj, up_proj, down_proj, whatever the base's folder calls them
    own_names: bool = False
    together: tuple[str, ...] = ()  # linear layers that must all be adapted, or none


ENGINES = {
    "vllm": Keys(
        "0.29",
        "2026-11-22",
        "base_model.model.{experts}.{e}.{projection}.lora_{half}.weight",
        {
            "gate_up_proj": "base_model.model.{experts}.base_layer.lora_{half}.weight",
            "down_proj": "base_model.model.{experts}.lora_{half}.weight",
        },
        ("gpt_oss", "qwen3_5_moe", "qwen3_5_moe_text"),
    ),
    "sglang": Keys(
        "main",
        "2026-11-22",
        "base_model.model.{experts}.{e}.{projection}.lora_{half}.weight",
        {},
        (),
        True,
        ("q_proj", "v_proj"),
    ),
}
GATED = ("gate_up_proj", "down_proj")
_SAVED = re.compile(r"(.*\bexperts)\.(\d+)\.(\w+)\.weight")


class ExportReceipt(NamedTuple):
    """What `export_adapter` wrote."""

    path: Path
    engine: str
    version: str  # of the engine whose names these are
    read: str  # the date when they were read
    layers: int  # that have pairs of experts
    tensors: int
    bytes: int
    rank: int
    filled: list[str]  # stacks without a pair in the adapter, filled with zeros


def export_adapter(
    adapter: str | Path, base: str | Path, out: str | Path, engine: str, *, overwrite: bool = False
) -> ExportReceipt:
    """Write an adapter of the model in folder `base` to the folder `out` in the form that `engine`,
    one of ENGINES, reads.

    Raises ValueError for pairs that the engine would drop or misread. Only config.json of the base
    is read.
    """
    check_choice("engine", engine, tuple(ENGINES))
    check_out_dir(out, overwrite, [adapter, base])
    check_peft(adapter)
    model = base_skeleton(base)
    found = read_peft(adapter, model)
    keys = ENGINES[engine]
    _check(model, found, engine)
    rank = max(pair.rank for pair in found.pairs.values())
    scaling = next(iter(found.pairs.values())).scaling
    pairs = {name: _fitted(pair, rank, scaling) for name, pair in found.pairs.items()}
    paths = list(
        dict.fromkeys(name.rpartition(".")[0] for name, pair in pairs.items() if pair.is_stack)
    )
    tensors = {}
    filled = []
    for path in paths:
        layer = {name: pairs.get(f"{path}.{name}") for name in GATED}
        filled += [f"{path}.{name}" for name, pair in layer.items() if pair is None]
        layer = {
            name: pair or _zeros(model, path, name, rank, next(filter(None, layer.values())))
            for name, pair in layer.items()
        }
        tensors |= dict(_experts(model, path, layer, engine))
    for name, pair in pairs.items():
        if not pair.is_stack:
            (saved,) = to_saved(model, {name: pair.b})
            place = f"base_model.model.{saved.removesuffix('.weight')}"
            tensors |= {f"{place}.lora_A.weight": pair.a, f"{place}.lora_B.weight": pair.b}
    tensors = {
        key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()
    }
    is_stacked = any(
        key == keys.stacks.get("down_proj", "").format(experts=path, half="A")
        for key in tensors
        for path in paths
    )
    config = _config(
        found,
        tensors,
        rank,
        scaling,
        [f"{path}.{name}" for path in paths for name in GATED] if is_stacked else None,
    )
    write_adapter(out, tensors, config, copied_from=Path(adapter), overwrite=overwrite)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return ExportReceipt(
        Path(out), engine, keys.version, keys.read, len(paths), len(tensors), size, rank, filled
    )


def _check(model: nn.Module, adapter: PeftAdapter, engine: str) -> None:
    """Raise ValueError for pairs that the engine does not support."""
    keys = ENGINES[engine]
    odd = None
    leaves: dict[str, set[str]] = {}
    for name, pair in adapter.pairs.items():
        path, _, parameter = name.rpartition(".")
        module = model.get_submodule(path)
        is_gated = (
            pair.is_stack and not hasattr(module, "up_name") and getattr(module, "has_gate", False)
        )
        if isinstance(module, nn.Linear):
            leaves.setdefault(path.rpartition(".")[0], set()).add(path.rpartition(".")[2])
        elif not is_gated or parameter not in GATED:
            odd = odd or (
                f"changes {name}, which is neither a linear layer nor a stack of transformers' "
                "gated experts"
            )
    for path, names in leaves.items():
        missing = [
            name
            for name in keys.together
            if name not in names and hasattr(model.get_submodule(path), name)
        ]
        if names & {*keys.together, "k_proj"} and missing:
            odd = odd or (
                f"changes {path}.{min(names)} but not {missing[0]}, which {engine} reads together"
            )
    odd = odd or (f"holds all of {min(adapter.whole)}" if adapter.whole else None)
    if odd:
        raise ValueError(
            f"{adapter.folder} {odd}, which {engine} does not support. Merge the adapter instead "
            "with --to merged"
        )


def _fitted(pair: Pair, rank: int, scaling: float) -> Pair:
    """Return the same change with this rank and scaling."""
    more = rank - pair.rank
    b = pair.b if pair.scaling == scaling else (pair.b * (pair.scaling / scaling))
    a = nn.functional.pad(pair.a, (0, 0, 0, more))
    b = nn.functional.pad(b, (0, more))
    return pair._replace(a=a, b=b, scaling=scaling)


def _zeros(model: nn.Module, path: str, name: str, rank: int, like: Pair) -> Pair:
    E, *sizes = getattr(model.get_submodule(path), name).shape
    size, out = sizes if like.transposed else sizes[::-1]
    return like._replace(a=like.a.new_zeros(E, rank, size), b=like.b.new_zeros(E, out, rank))


def _experts(
    model: nn.Module, path: str, layer: Mapping[str, Pair], engine: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layer's experts under the engine's names."""
    keys = ENGINES[engine]
    layout = layout_of(model.get_submodule(path))
    for name, pair in layer.items():
        saved = to_saved(model, {f"{path}.{name}": pair.b})
        matches = {key: _SAVED.fullmatch(key) for key in saved}
        if all(matches.values()) and all(
            tensor.shape[-1] == pair.rank for tensor in saved.values()
        ):
            for key, match in matches.items():
                experts, e, projection = match.groups()
                yield from _of_expert(keys, experts, int(e), projection, pair, saved[key])
        elif model.config.model_type in keys.stacked_families:
            (stack,) = saved
            experts = stack.rpartition(".")[0]
            for half, tensor in zip("AB", pack(pair.a, pair.b), strict=True):
                yield keys.stacks[name].format(experts=experts, half=half), tensor
        elif keys.own_names and not layout.interleaved and list(saved) == [f"{path}.{name}"]:
            projections = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
            for e, b in enumerate(pair.b):
                for projection, half in zip(projections, b.chunk(len(projections)), strict=True):
                    yield from _of_expert(keys, path, e, projection, pair, half)
        else:
            raise ValueError(
                f"{engine} {keys.version} has no known name for the pairs of "
                f"{model.config.model_type!r}, whose experts are saved as {next(iter(saved))}. "
                "Merge the adapter instead with --to merged"
            )


def _of_expert(
    keys: Keys, experts: str, e: int, projection: str, pair: Pair, b: torch.Tensor
) -> Iterator[tuple]:
    for half, tensor in (("A", pair.a[e]), ("B", b.reshape(-1, pair.rank))):
        yield keys.expert.format(experts=experts, e=e, projection=projection, half=half), tensor


def _config(
    adapter: PeftAdapter, tensors: Mapping, rank: int, scaling: float, parameters: list[str] | None
) -> dict:
    """Return adapter_config.json with one rank and one scaling."""
    alpha = scaling * rank
    names = {key.rpartition(".lora_")[0].rpartition(".")[2] for key in tensors}
    return {
        **adapter.config,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted(names - {"experts", "base_layer"}),
        "target_parameters": parameters,
        "peft_version": WRITES,
        "inference_mode": True,
    }
