"""LoRA experts in a live model: UpIT's and LoRAMoE's form, their saved form, and the ways out of it.

    stock model --to_lora_moe--> LoRA experts --to_moe--> an upcycled model with whole experts (form "block")
         ^                            |   '---save_adapters--> PEFT folders
         '-----------merge------------'

form "block": FFN_e = base + s B_e A_e in each projection, one router per MLP (UpIT, arXiv 2410.01610, Sec. 2.3; the
equations: `moe_runtime.ops.lora`). form "linear": one router per linear layer (LoRAMoE, arXiv 2312.09979; the equation:
`moe_runtime.modules.lora_linear`). The base is frozen in both. All work in place, as in `moe_runtime.hf.models.swap`: checks come
first, a refused model is untouched.

    save_pretrained / from_pretrained   stage "lora" of `moe_runtime.hf.models.modeling`: the base's MLP at mlp.experts.base (block)

What `moe_runtime.methods.lora` takes, checked: the routers' config, the pairs' settings, the model of a stacked adapter.

LoRA experts: UpIT's (arXiv 2410.01610) and LoRAMoE's (arXiv 2312.09979), from a dense model and back to one.

    to_lora_moe      low-rank experts over the frozen MLPs, fresh or from PEFT adapters, behind routers    UpIT, Sec. 3.1
    (tune)           pairs and routers, by any trainer
    merge            the dense model W + s sum_e alpha_e B_e A_e, in the base's own architecture
    to_moe           or an upcycled model whose experts are whole
    save_adapters    or each expert as a PEFT adapter of the base; and all as one, which load_adapters reads back

`forced_experts` sends each row of a batch to one expert: what expert-specific data is chosen by.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from moe_runtime.config import MoEConfig, check_bool, check_choice, check_number, check_positive
from moe_runtime.hf.models import swap
from moe_runtime.hf.models.configuration import moe_fields
from moe_runtime.hf.models.families import FAMILIES, Family, family_of, moe_shape
from moe_runtime.hf.models.modeling import freeze_for_lora, model_classes, moe_layers
from moe_runtime.io.files import atomic_folder, check_out_dir, read_json
from moe_runtime.methods.lora.adapters import add_to_backbone, load_stacked, read_experts, save_single, save_stacked
from moe_runtime.modules.lora import TARGETS, LoRAMoE, check_base, check_plain
from moe_runtime.modules.lora_linear import FORMS, LinearExperts, LoRALinear, add_experts
from moe_runtime.ops.merging import alpha_rows

RANK, ALPHA = 8, 16.0  # UpIT names neither
SEEDS = 1 << 40  # a layer's own seed is 65537 times it, below 2^63
# what an upcycled model's layers share with the experts of an adapter for it
ALIKE = (
    "hidden_size", "intermediate_size", "num_experts", "top_k", "gate", "router", "noisy_gate", "hidden_act", "gated", "bias",
)  # fmt: skip


def lora_config(model: nn.Module, num_experts: int = 8, top_k: int | None = 2, **settings) -> MoEConfig:
    """Return the routers' MoEConfig for a dense model; `settings` are MoEConfig's other fields.

    gate is softmax_topk_renorm unless given; top_k None sends every token to every expert by a softmax over all (LoRAMoE).
    Raises ValueError for a balance_loss "switch" of routers that choose all experts: it is a constant.
    """
    if top_k is None:
        if settings.setdefault("gate", "softmax_topk") != "softmax_topk":
            raise ValueError(f"top_k is None, gate is {settings['gate']!r}; want 'softmax_topk', LoRAMoE's, or a top_k")
        top_k = num_experts
    settings.setdefault("gate", "softmax_topk_renorm")
    shape = moe_shape(family_of(model), model.config)
    config = MoEConfig(**shape, num_experts=num_experts, top_k=top_k, **settings)
    if config.balance_loss == "switch" and config.num_routed_per_token == config.num_routed_experts:
        raise ValueError(
            f"balance_loss is 'switch', top_k is {top_k} of {num_experts} experts; want 'none' or 'cv2': where every expert "
            "sees every token it is a constant"
        )
    return config


def lora_block(family: Family, form: str, rank, alpha, targets, train_backbone: bool) -> dict:
    """Return what config.json says of the pairs, None being the default; raises ValueError for what does not fit."""
    check_choice("form", form, FORMS)
    names = (*family.up, family.down)
    if form == "block" and names != TARGETS:
        raise ValueError(
            f"form is 'block', model_type is {family.model_type!r}, whose MLP has {', '.join(names)}; want "
            f"{', '.join(TARGETS)}, or form='linear'"
        )
    if targets is not None and (isinstance(targets, str) or not targets or set(targets) - set(names)):
        raise ValueError(f"targets is {targets!r}; want some of {', '.join(names)}")
    rank, alpha = RANK if rank is None else rank, ALPHA if alpha is None else alpha
    check_positive("rank", rank)
    check_number("alpha", alpha, positive=True)
    check_bool("train_backbone", train_backbone)
    return {
        "form": form,
        "rank": rank,
        "alpha": float(alpha),
        "targets": [name for name in names if targets is None or name in targets],
        "train_backbone": train_backbone,
    }


def listed(values):
    """Return what may be any iterable as a list; None and a lone name, which the checks refuse, as they are."""
    return values if values is None or isinstance(values, str | Path) else list(values)


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """Return what config.json calls a dtype."""
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}; want a floating torch.dtype, or None for the base's")
    return str(dtype).removeprefix("torch.")


def check_routers(vectors: torch.Tensor | None, config: MoEConfig, form: str, layers: int, seed: int) -> None:
    """Raise ValueError for routers that `to_lora_moe` cannot make.

    For `vectors` that are not [L, E, H] finite numbers, a seed without room, and what form "linear" lacks.
    """
    if not isinstance(seed, int) or abs(seed) >= SEEDS:
        raise ValueError(f"seed is {seed!r}; want an integer of less than {SEEDS}")
    if config.recompute and form == "linear":
        raise ValueError("recompute is True, form is 'linear'; want recompute=False, or gradient checkpointing")
    if vectors is None:
        return
    if not isinstance(vectors, torch.Tensor):
        raise ValueError(f"vectors is a {type(vectors).__name__}; want a tensor [L, E, H]; torch.stack makes one")
    want = (layers, config.num_routed_experts, config.hidden_size)
    if form != "block" or config.router != "linear" or tuple(vectors.shape) != want:
        raise ValueError(
            f"vectors is {tuple(vectors.shape)}, form is {form!r}, router is {config.router!r}; want {want}, 'block', 'linear'"
        )


def check_upcycled(folder: Path, block: dict) -> None:
    """Raise ValueError unless the folder is of an upcycled model with the layers and the routers of `block`."""
    theirs = read_json(folder / "config.json").get("moe_runtime")
    if not isinstance(theirs, dict) or theirs.get("stage") != "moe":
        raise ValueError(f"upcycled is {folder}, no upcycled model; want the base upcycled; xft.upcycle makes one")
    sides = []
    for side in (theirs, block):
        sides.append({name: side[name] for name in ("base_model_type", "layers")})
        sides[-1] |= {name: side["config"][name] for name in ALIKE}
    other = [name for name, value in sides[1].items() if sides[0][name] != value]
    if other:
        name = other[0]
        raise ValueError(f"{name} in {folder} is {sides[0][name]!r}, of the model {sides[1][name]!r}; want the same")


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
    **settings,
) -> nn.Module:
    """Give the MLPs of a stock model LoRA experts, in place, and return it; pairs and routers train, the rest is frozen.

    `config`, or `settings` of `lora_config`; rank 8, alpha 16 and all linear layers of the MLP unless given. At first every
    expert is the base. `experts` are PEFT adapter folders of the base, one for each expert, which then say rank, alpha,
    targets and layers; pairs of theirs outside of the MLPs (attention) need a choice: `backbone` "mean" adds the mean of the
    experts' changes to the base's weights, "base" leaves them out. `vectors` [L, E, H] are the routers' rows, in the order of
    `layers`, drawn by `seed` otherwise. `train_backbone` trains all but the MLPs (form "block", which wants a frozen base), or
    all but the linear layers that have pairs ("linear"). `dtype` is the pairs' own, which saving keeps; None is the base's.
    Raises ValueError, with the model untouched, for what does not fit.
    """
    experts, layers, targets = (listed(value) for value in (experts, layers, targets))
    if config is not None and settings:
        raise ValueError(f"config is given and so is {', '.join(settings)}; want one of the two")
    family = family_of(model)
    if config is None:
        counted = {"num_experts": len(experts)} if experts else {}
        config = lora_config(model, **counted | settings)
    found, given_layers = None, layers
    if experts is not None:
        found = read_experts(
            model, family, experts, config.num_experts, backbone, rank=rank, alpha=alpha, targets=targets, layers=layers
        )
        rank, alpha, targets, layers = found.rank, found.alpha, found.targets, found.layers
    elif backbone is not None:
        raise ValueError(f"backbone is {backbone!r}, experts is None; want backbone=None without adapters")
    lora = lora_block(family, form, rank, alpha, targets, train_backbone)
    lora |= {"dtype": dtype_name(dtype), "backbone": "mean" if found is not None and found.backbone else "base"}
    layers = swap.check_stock(model, family, config, layers)
    for layer in layers if form == "block" else ():
        check_base(model.get_submodule(family.path.format(layer)))
    check_routers(vectors, config, form, len(layers), seed)
    swap.verify_mlp(model, layers, family)
    own = {} if vectors is None else dict(zip(given_layers or layers, vectors, strict=True))
    for layer in layers:
        rows = swap.draw_router(config, seed, layer)
        rows |= {"weight": own[layer]} if own else {}
        module = _replace(model, family, layer, config, lora, rows, seed, dtype)
        if found is not None:
            found.fill(layer, _pairs_of(module))
    if found is not None:
        add_to_backbone(model, found)
    base = {"base_model_type": family.model_type, "base_architecture": type(model).__name__}
    swap.become_moe(model, moe_fields(config, layers=layers, **base, method=method, stage="lora", lora=lora))
    freeze_for_lora(model)
    return model


@torch.no_grad()
def _replace(
    model: nn.Module, family: Family, layer: int, config: MoEConfig, lora: dict, rows: dict, seed: int, dtype
) -> nn.Module:
    """Put LoRA experts over or into one layer's MLP, of form "block" with the router's weights `rows`; return them."""
    path = family.path.format(layer)
    mlp = model.get_submodule(path)
    settings = {name: lora[name] for name in ("form", "rank", "alpha", "targets")}
    module = add_experts(mlp, config, **settings, dtype=dtype).train(mlp.training)
    # of the seed and the layer alone, and not the numbers that the router is drawn from
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
    """Return the pairs of what took an MLP's place: LoRAExperts, or the LinearExperts of an MLP with LoRALinears in it."""
    return module.experts if isinstance(module, LoRAMoE) else LinearExperts(module)


def lora_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return what took the MLPs' places, LoRAMoEs or MLPs with LoRALinears in them, by layer; ValueError for another model."""
    block = getattr(getattr(model, "config", None), "moe_runtime", None)
    if block is None or block["stage"] != "lora":
        what = type(model).__name__ + ("" if block is None else f" at stage {block['stage']!r}")
        raise ValueError(f"model is {what}; want one with LoRA experts; to_lora_moe makes one")
    ours = model_classes(block["base_model_type"]).causal_lm
    if not isinstance(model, ours):
        raise ValueError(
            f"model is {type(model).__name__}; want {ours.__name__} itself; unwrap it, and merge adapters (merge_and_unload)"
        )
    return moe_layers(model)


def _whole_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return `lora_layers`; raises ValueError where their weights are not there, or are not all that they compute."""
    layers = lora_layers(model)
    swap.refuse_offloaded(model, type(model).__name__, recurse=False)
    for layer, module in layers.items():
        swap.refuse_offloaded(module, f"layer {layer}'s {type(module).__name__}")
        if isinstance(module, LoRAMoE):
            check_base(module.experts.base)
        else:
            for name, linear in LinearExperts(module).linears.items():
                check_plain(linear.base, name)
    return layers


@contextlib.contextmanager
def forced_experts(model: nn.Module, ids: torch.Tensor | Sequence[int]) -> Iterator[None]:
    """Send every token of row b of a batch to expert `ids`[b] with weight 1, within the block; routers are not asked.

    The base runs once for the batch, whatever the experts: n experts on one row are that row n times. `model` may be wrapped.
    With gradient checkpointing the backward pass belongs into the block too. Raises ValueError for an expert that is not
    there, and within the block for a batch of another number of rows.
    """
    ids = torch.as_tensor(ids)
    layers = [module for module in model.modules() if isinstance(module, LoRAMoE | LoRALinear)]
    if not layers:
        raise ValueError(f"model is {type(model).__name__} without LoRA experts; to_lora_moe makes them")
    count = layers[0].config.num_experts
    if ids.dim() != 1 or ids.is_floating_point() or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count):
        raise ValueError(f"ids is {ids.tolist()}; want one of 0 to {count - 1} for each row of the batch")
    ids = ids.to(layers[0].gate.weight.device)
    before = [layer.forced for layer in layers]
    for layer in layers:
        layer.forced = ids
    try:
        yield
    finally:
        for layer, old in zip(layers, before):
            layer.forced = old


def to_moe(model: nn.Module) -> nn.Module:
    """Make the LoRA experts whole, in place: an ordinary upcycled model (stage "moe"), the same function; all of it trains.

    Raises ValueError for form "linear": what its linear layers mix before the activation are no experts.
    """
    layers, block = _whole_layers(model), model.config.moe_runtime
    if block["lora"]["form"] != "block":
        raise ValueError(
            f"form is {block['lora']['form']!r}; want 'block': one router for a whole MLP; or merge the experts"
        )
    path, config = FAMILIES[block["base_model_type"]].path, None
    for layer, module in layers.items():
        whole = module.to_moe()
        config = whole.config
        model.set_submodule(path.format(layer), whole)
    values = {name: value for name, value in block.items() if name != "lora"}
    model.config.moe_runtime = values | {"stage": "moe", "config": config.to_dict()}
    return model.requires_grad_(True)


@torch.no_grad()
def merge_experts(model: nn.Module, alpha: Mapping[int, torch.Tensor]) -> nn.Module:
    """Turn a model with LoRA experts into its base's stock class, in place: W + s sum_e alpha_e B_e A_e; all of it trains.

    `alpha` [E] by layer. The sums are float32 and rounded once. The routers go.
    """
    layers, path = _whole_layers(model), FAMILIES[model.config.moe_runtime["base_model_type"]].path
    for layer, module in layers.items():
        pairs = _pairs_of(module)
        merged = {target: pairs.merged_weight(target, alpha[layer]) for target in pairs.targets}
        mlp = pairs.base if isinstance(module, LoRAMoE) else pairs.unwrap()
        for target, weight in merged.items():
            getattr(mlp, target).weight.copy_(weight)
        model.set_submodule(path.format(layer), mlp.train(module.training))
    swap.become_stock(model)
    return model.requires_grad_(True)


def save_adapters(
    model: nn.Module,
    folder: str | Path,
    base_model: str | Path,
    *,
    upcycled: str | Path | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write each expert as a PEFT adapter of the dense base, FOLDER/expert-<e>, whole or not at all; return the folders.

    `base_model` is the dense base, as they name it. `upcycled`, the folder of the base upcycled to as many equal experts, adds
    FOLDER/stacked: one adapter of all experts and the routers, for that model (form "block"). Raises ValueError for a folder of
    other routers or layers, and for a model whose backbone is not the base's: the adapters would not be its experts.
    """
    layers, block = _whole_layers(model), model.config.moe_runtime
    path, lora = FAMILIES[block["base_model_type"]].path, block["lora"]
    if lora["train_backbone"] or lora.get("backbone") == "mean":
        why = "train_backbone is True" if lora["train_backbone"] else "backbone is 'mean'"
        raise ValueError(
            f"{why} in the model's config: its backbone is not the base's, which adapters are of; want experts over the base's "
            "own; or lora_moe.merge, or to_moe, which keep the backbone as it is"
        )
    if upcycled is not None and lora["form"] != "block":
        raise ValueError(f"upcycled is {upcycled!r}, form is {lora['form']!r}; want upcycled=None, or form 'block'")
    if upcycled is not None and Path(upcycled).is_dir():
        check_upcycled(Path(upcycled), block)
    check_out_dir(folder, overwrite, [base_model, upcycled])
    pairs = {path.format(layer): _pairs_of(module) for layer, module in layers.items()}
    names = [f"expert-{e}" for e in range(block["config"]["num_experts"])]
    with atomic_folder(folder, overwrite) as new:
        for e, name in enumerate(names):
            save_single(pairs, new / name, e, base_model=str(base_model))
        if upcycled is not None:
            save_stacked(
                {path.format(layer): m for layer, m in layers.items()}, new / "stacked", base_model=str(upcycled)
            )
    return [Path(folder) / name for name in names]


def load_adapters(model: nn.Module, folder: str | Path) -> nn.Module:
    """Read one adapter of all experts and the routers into a model with LoRA experts of form "block", in place; return it.

    `folder` is the FOLDER/stacked that `save_adapters` wrote, or what PEFT made of it by training on. Raises ValueError, with
    the model untouched, for another form, and for an adapter of other layers, sizes or settings.
    """
    layers, block = _whole_layers(model), model.config.moe_runtime
    if block["lora"]["form"] != "block":
        raise ValueError(f"form is {block['lora']['form']!r}; want 'block': linear layers have no stacked adapter")
    path = FAMILIES[block["base_model_type"]].path
    load_stacked({path.format(layer): module for layer, module in layers.items()}, folder)
    return model


__all__ = [
    "forced_experts", "load_adapters", "lora_config", "lora_layers", "merge", "save_adapters", "to_lora_moe", "to_moe",
]  # fmt: skip


def merge(model: nn.Module, alpha: torch.Tensor | Sequence[float] | str = "uniform") -> nn.Module:
    """Merge the LoRA experts of every layer into the MLPs and return the dense model in its stock architecture, in place.

    `alpha` [E], [L, E] or "uniform" must sum to 1; for one expert alone, a one at its place. The routers go, so that this is
    another function than the routed one unless all experts are equal. Raises ValueError for a model without LoRA experts.
    """
    layers = lora_layers(model)
    rows = alpha_rows(alpha, len(layers), model.config.moe_runtime["config"]["num_experts"])
    return merge_experts(model, dict(zip(layers, rows)))
