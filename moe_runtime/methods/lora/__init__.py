"""Turn a dense model into LoRA experts and back: UpIT's (arXiv 2410.01610) and LoRAMoE's (arXiv
2312.09979).

    to_lora_moe     low-rank experts over the frozen MLPs, behind routers (UpIT, Sec. 3.1); fresh or
                    from PEFT adapters
    (tune)          pairs and routers, with any trainer
    merge           the dense model W + s sum_e alpha_e B_e A_e, in the base's own architecture
    to_moe          or an upcycled model whose experts are whole (form "block")
    save_adapters   or each expert as a PEFT adapter of the base

form "block": FFN_e = base + s B_e A_e in each projection, one router per MLP (UpIT, Sec. 2.3;
`moe_runtime.ops.lora` has the equations). form "linear": one router per linear layer (LoRAMoE;
`moe_runtime.modules.lora_linear` has the equation). The base is frozen in both. Everything works in
place, as in `moe_runtime.hf.models.swap`; checks come first, so a rejected model is unchanged.
save_pretrained writes stage "lora" of `moe_runtime.hf.models.modeling`, the base's MLP at
mlp.experts.base (form "block").

    adapters   folders that PEFT reads, and how several become experts
    baseline   plain PEFT LoRA, the methods' baseline
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_runtime.config import MoEConfig, check_bool, check_choice, check_number, check_positive
from moe_runtime.hf.models import swap
from moe_runtime.hf.models.configuration import moe_fields
from moe_runtime.hf.models.families import FAMILIES, Family, family_of, moe_shape
from moe_runtime.hf.models.modeling import freeze_for_lora, model_classes, moe_layers
from moe_runtime.io.files import atomic_folder, check_out_dir
from moe_runtime.methods.lora.adapters import add_to_backbone, read_experts, save_single
from moe_runtime.modules.lora import TARGETS, LoRAMoE, check_base, check_plain
from moe_runtime.modules.lora_linear import FORMS, LinearExperts, add_experts
from moe_runtime.ops.merging import alpha_rows

__all__ = [
    "lora_config",
    "lora_layers",
    "merge",
    "save_adapters",
    "to_lora_moe",
    "to_moe",
]

# the papers give no value
RANK = 8
ALPHA = 16.0


def lora_config(
    model: nn.Module, num_experts: int = 8, top_k: int | None = 2, **settings: Any
) -> MoEConfig:
    """Return the MoEConfig of LoRA experts for a dense model.

    Args:
        model: A model of a supported architecture.
        num_experts: Number of experts.
        top_k: Experts per token; None sends every token to every expert (LoRAMoE).
        settings: Other fields of MoEConfig; gate is by default "softmax_topk_renorm", or
            "softmax_topk" without top_k.

    Returns:
        A config for `to_lora_moe`.
    """
    settings.setdefault("gate", "softmax_topk" if top_k is None else "softmax_topk_renorm")
    top_k = num_experts if top_k is None else top_k
    shape = moe_shape(family_of(model), model.config)
    return MoEConfig(**shape, num_experts=num_experts, top_k=top_k, **settings)


def to_lora_moe(
    model: nn.Module,
    config: MoEConfig | None = None,
    *,
    rank: int | None = None,
    alpha: float | None = None,
    targets: Sequence[str] | None = None,
    form: str = "block",
    experts: Sequence[str | Path] | None = None,
    backbone: str | None = None,
    vectors: torch.Tensor | None = None,
    layers: Sequence[int] | None = None,
    train_backbone: bool = False,
    dtype: torch.dtype | None = None,
    method: str = "lora_moe",
    seed: int = 42,
    **settings: Any,
) -> nn.Module:
    """Give the MLPs of a dense model LoRA experts, in place (UpIT, Sec. 2.3; LoRAMoE).

    The experts' matrices and the routers train, the rest is frozen. Initially every expert equals
    the base.

    Args:
        model: A stock dense model.
        config: Of the routers, such as that of `lora_config`.
        rank: Of each expert's matrices; None is 8.
        alpha: The scaling is alpha / rank; None is 16.
        targets: Names of the MLP's linear layers; None is all.
        form: "block", one router for each MLP (UpIT), or "linear", one for each linear layer
            (LoRAMoE).
        experts: PEFT adapters of the base, one for each expert, which determine rank, alpha,
            targets and layers.
        backbone: What becomes of adapters' matrices outside of the MLPs: "mean" adds their mean
            change to the base's weights, "base" ignores them.
        vectors: [L, E, H], the routers' rows; None draws them.
        layers: Numbers of the layers; None is all.
        train_backbone: Whether all but the MLPs ("block"), or all but the layers with matrices
            ("linear"), train too.
        dtype: Of the experts' matrices; None is the base's.
        method: Recorded in the config.
        seed: Of matrices and routers.
        settings: Arguments of `lora_config`, in place of `config`.

    Returns:
        The same model.

    Raises:
        ValueError: With the model unchanged, if the architecture is not supported, or arguments do
            not fit together.
    """
    # accept any iterable; None and a single name are left to the checks
    experts = _listed(experts)
    layers = _listed(layers)
    targets = _listed(targets)
    if config is not None and settings:
        raise ValueError(
            f"Pass either config or separate settings, but got config and {', '.join(settings)}"
        )
    family = family_of(model)
    if config is None:
        counted = {"num_experts": len(experts)} if experts else {}
        config = lora_config(model, **counted | settings)
    adapters = None
    rows_of = layers  # the layers of `vectors`, in their order
    if experts is not None:
        if (rank, alpha, targets, layers) != (None, None, None, None):
            raise ValueError(
                "Pass experts, or some of rank, alpha, targets and layers, which the experts' "
                f"adapters determine, but got rank={rank}, alpha={alpha}, targets={targets}, "
                f"layers={layers}"
            )
        adapters = read_experts(model, family, experts, config.num_experts, backbone)
        rank = adapters.adapters[0].rank
        alpha = adapters.adapters[0].alpha
        targets = adapters.targets
        layers = adapters.layers
    lora = _lora_block(family, form, rank, alpha, targets, train_backbone)
    lora["dtype"] = None if dtype is None else str(dtype).removeprefix("torch.")
    lora["backbone"] = "mean" if adapters is not None and adapters.backbone else "base"
    layers = swap.check_stock(model, family, config, layers)
    for layer in layers if form == "block" else ():
        check_base(model.get_submodule(family.path.format(layer)))
    _check_routers(vectors, dtype, config, form, len(layers))
    swap.verify_mlp(model, layers, family)
    routers = {layer: swap.draw_router(config, seed, layer) for layer in layers}
    if vectors is not None:
        for layer, rows in zip(rows_of or layers, vectors, strict=True):
            routers[layer]["weight"] = rows
    for layer in layers:
        module = _replace(model, family, layer, config, lora, routers[layer], seed, dtype)
        if adapters is not None:
            adapters.fill(layer, _pairs_of(module))
    if adapters is not None:
        add_to_backbone(model, adapters)
    swap.become_moe(
        model,
        moe_fields(
            config,
            layers=layers,
            base_model_type=family.model_type,
            base_architecture=type(model).__name__,
            method=method,
            stage="lora",
            lora=lora,
        ),
    )
    freeze_for_lora(model)
    return model


def _listed(value):
    return value if value is None or isinstance(value, str | Path) else list(value)


def _lora_block(family: Family, form: str, rank, alpha, targets, train_backbone: bool) -> dict:
    """Return the pairs' settings for config.json (None: default); raises ValueError if they do not
    fit the model.
    """
    check_choice("form", form, FORMS)
    names = (*family.up, family.down)
    targets = names if targets is None else targets
    is_known = bool(targets) and not isinstance(targets, str) and set(targets) <= set(names)
    if not is_known or (form == "block" and names != TARGETS):
        raise ValueError(
            f"targets is {targets!r} with form {form!r} for model_type {family.model_type!r}. Pass "
            f"some of {', '.join(names)}, and form='linear' for an MLP without {', '.join(TARGETS)}"
        )
    rank = RANK if rank is None else rank
    alpha = ALPHA if alpha is None else alpha
    check_positive("rank", rank)
    check_number("alpha", alpha, positive=True)
    check_bool("train_backbone", train_backbone)
    return {
        "form": form,
        "rank": rank,
        "alpha": float(alpha),
        "targets": [name for name in names if name in targets],
        "train_backbone": train_backbone,
    }


def _check_routers(
    vectors: torch.Tensor | None, dtype, config: MoEConfig, form: str, layers: int
) -> None:
    """Raise ValueError for unsupported vectors or dtypes, and for options that form "linear" does
    not support.
    """
    shape = None
    expected = (layers, config.num_routed_experts, config.hidden_size)
    if vectors is not None:
        shape = tuple(getattr(vectors, "shape", ())) or type(vectors).__name__
    is_float = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    fits = shape is None or (shape == expected and form == "block" and config.router == "linear")
    if not is_float or not fits or (config.recompute and form == "linear"):
        raise ValueError(
            f"Expected a floating torch.dtype or None, vectors {expected} for a 'linear' router if "
            f"any, and neither vectors nor recompute for form 'linear', but dtype is {dtype!r}, "
            f"form is {form!r}, router is {config.router!r}, recompute is {config.recompute}, "
            f"vectors is {shape}"
        )


@torch.no_grad()
def _replace(
    model: nn.Module,
    family: Family,
    layer: int,
    config: MoEConfig,
    lora: dict,
    rows: dict,
    seed: int,
    dtype,
) -> nn.Module:
    """Add LoRA experts to one layer's MLP, in form "block" with the router weights `rows`; return
    them.
    """
    path = family.path.format(layer)
    mlp = model.get_submodule(path)
    settings = {name: lora[name] for name in ("form", "rank", "alpha", "targets")}
    module = add_experts(mlp, config, **settings, dtype=dtype).train(mlp.training)
    # depends on seed and layer alone, and is not the stream that the router is drawn from
    generator = torch.Generator().manual_seed((1 << 48) + seed * 65537 + layer)
    if isinstance(module, LoRAMoE):
        for name, weight in module.gate.named_parameters():
            weight.copy_(rows[name])
        module.experts.reset_parameters(generator)
    else:
        for target in lora["targets"]:
            getattr(module, target).reset_parameters(generator)
    model.set_submodule(path, module)
    return module


def _pairs_of(module: nn.Module):
    """Return the pairs of a converted MLP: LoRAExperts, or the LinearExperts of an MLP with
    LoRALinears.
    """
    return module.experts if isinstance(module, LoRAMoE) else LinearExperts(module)


@torch.no_grad()
def merge(model: nn.Module, alpha: torch.Tensor | Sequence[float] | str = "uniform") -> nn.Module:
    """Merge the LoRA experts of every layer to a dense MLP, in place.

    The weights are W + s sum_e alpha_e B_e A_e, summed in float32 and rounded once. The routers are
    dropped, so the function differs from the routed one unless all experts are equal.

    Args:
        model: A model after `to_lora_moe`.
        alpha: Coefficients, [E] or [L, E] with sums of 1, or "uniform".

    Returns:
        The same model, dense, in the base's own architecture; all of it trains.

    Raises:
        ValueError: If the model has no LoRA experts, or the coefficients do not fit.
    """
    layers = _whole_layers(model)
    rows = alpha_rows(alpha, len(layers), model.config.moe_runtime["config"]["num_experts"])
    for (path, module), row in zip(layers.items(), rows, strict=True):
        pairs = _pairs_of(module)
        merged = {target: pairs.merged_weight(target, row) for target in pairs.targets}
        mlp = pairs.base if isinstance(module, LoRAMoE) else pairs.unwrap()
        for target, weight in merged.items():
            getattr(mlp, target).weight.copy_(weight)
        model.set_submodule(path, mlp.train(module.training))
    swap.become_stock(model)
    return model.requires_grad_(True)


def to_moe(model: nn.Module) -> nn.Module:
    """Convert LoRA experts to whole experts, in place, with equal outputs.

    Args:
        model: A model after `to_lora_moe` with form "block".

    Returns:
        The same model, upcycled; all of it trains.

    Raises:
        ValueError: If the model has no LoRA experts, or their form is "linear".
    """
    layers = _whole_layers(model)
    block = dict(model.config.moe_runtime)
    if block["lora"]["form"] != "block":
        raise ValueError(
            "form must be 'block', but is 'linear': whole experts need one router per MLP. Use "
            "merge to make the model dense"
        )
    del block["lora"]
    for path, module in layers.items():
        whole = module.to_moe()
        block |= {"stage": "moe", "config": whole.config.to_dict()}
        model.set_submodule(path, whole)
    swap.set_config(model, copy.deepcopy(model.config))
    model.config.moe_runtime = block
    return model.requires_grad_(True)


def save_adapters(
    model: nn.Module,
    folder: str | Path,
    base_model: str | Path,
    *,
    overwrite: bool = False,
) -> list[Path]:
    """Write each expert as a PEFT adapter of the dense base, atomically.

    Args:
        model: A model after `to_lora_moe`, whose other weights are the base's.
        folder: The adapters are written to FOLDER/expert-<e>.
        base_model: The dense base, which the adapters name.
        overwrite: Whether to replace an existing folder.

    Returns:
        The adapters' folders.

    Raises:
        ValueError: If weights outside of the experts differ from the base's.
    """
    layers = _whole_layers(model)
    block = model.config.moe_runtime
    lora = block["lora"]
    if lora["train_backbone"] or lora.get("backbone") == "mean":
        why = "train_backbone is True" if lora["train_backbone"] else "backbone is 'mean'"
        raise ValueError(
            f"{why} in the model's config, so its backbone differs from the base, and adapters "
            "cannot represent it. Use lora.merge or lora.to_moe, which keep the backbone"
        )
    check_out_dir(folder, overwrite, [base_model])
    pairs = {path: _pairs_of(module) for path, module in layers.items()}
    names = [f"expert-{e}" for e in range(block["config"]["num_experts"])]
    with atomic_folder(folder, overwrite) as new:
        for e, name in enumerate(names):
            save_single(pairs, new / name, e, base_model=str(base_model))
    return [Path(folder) / name for name in names]


def lora_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return the layers with LoRA experts.

    Args:
        model: A model after `to_lora_moe`, not wrapped.

    Returns:
        Layer number to its LoRAMoE, or to its MLP with LoRALinears.

    Raises:
        ValueError: If the model has no LoRA experts.
    """
    block = getattr(getattr(model, "config", None), "moe_runtime", None)
    is_lora = block is not None and block["stage"] == "lora"
    if not is_lora or not isinstance(model, model_classes(block["base_model_type"]).causal_lm):
        stage = f" at stage {block['stage']!r}" if block else ""
        raise ValueError(
            "Expected an unwrapped model with LoRA experts (see to_lora_moe), but got "
            f"{type(model).__name__}{stage}. Merge PEFT adapters (merge_and_unload)"
        )
    return moe_layers(model)


def _whole_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return `lora_layers` by path; raises ValueError if their weights are absent or do not
    determine their outputs alone.
    """
    layers = lora_layers(model)
    swap.refuse_offloaded(model, type(model).__name__, recurse=False)
    for layer, module in layers.items():
        swap.refuse_offloaded(module, f"layer {layer}'s {type(module).__name__}")
        if isinstance(module, LoRAMoE):
            check_base(module.experts.base)
        else:
            for name, linear in LinearExperts(module).linears.items():
                check_plain(linear.base, name)
    path = FAMILIES[model.config.moe_runtime["base_model_type"]].path
    return {path.format(layer): module for layer, module in layers.items()}
