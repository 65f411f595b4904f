"""What `moe_runtime.hf.lora_moe` takes, checked: the routers' config, the pairs' settings, the model of a stacked adapter."""

from pathlib import Path

import torch
from torch import nn

from moe_runtime.config import MoEConfig, check_bool, check_choice, check_number, check_positive
from moe_runtime.files import read_json
from moe_runtime.hf.families import Family, family_of, moe_shape
from moe_runtime.modules.lora import TARGETS
from moe_runtime.modules.lora_linear import FORMS

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
