"""The config of an upcycled model: the fields it adds to its base's, their conversion, and the
format of config.json.

base's --become_moe--> upcycled --become_mergeable--> mergeable
   ^                      '-------------.--------------'
   '----------- stock_config -----------'

config.json has the rotary keys of transformers 4 in addition to `rope_parameters` of version 5, as
4.57 and other readers of the old keys would otherwise silently use a base of 10000 without scaling.
"""

import copy
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from moe_runtime.config import MoEConfig, shown
from moe_runtime.hf.common.sources import StrPath
from moe_runtime.io.files import atomic_write_json, read_json

# per-model names of (base, rotated share of a head)
_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}


def legacy_rope(config: dict) -> dict:
    """Return the rotary keys of transformers 4 to add to `config`, the content of a config.json."""
    rope = config.get("rope_parameters")
    if not rope:
        return {}
    block = config.get("moe_runtime", {})
    base_type = block.get("base_model_type") or config.get("model_type", "")
    if "rope_theta" in rope:
        base, share = _NAMES.get(base_type, ("rope_theta", "partial_rotary_factor"))
        keys = {base: rope["rope_theta"], share: rope.get("partial_rotary_factor")}
    elif "full_attention" in rope and "sliding_attention" in rope:
        # one rope per layer type: the old format has two of them, for gemma3
        keys = {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
        rope = rope["full_attention"]
        keys["rope_theta"] = rope["rope_theta"]
    else:
        return {}
    keys["rope_scaling"] = _scaling(rope, base_type)
    return {key: value for key, value in keys.items() if value is not None}


def write_legacy_rope(folder: str | os.PathLike, **fields: Any) -> None:
    """Add the rotary keys of transformers 4 to `folder`/config.json of a stock model, such as a
    merged one, and set other `fields`.
    """
    path = Path(folder) / "config.json"
    config = read_json(path) | fields
    config |= legacy_rope(config)
    atomic_write_json(path, dict(sorted(config.items())))


def _scaling(rope: dict, model_type: str) -> dict | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if model_type == "phi3":  # its old config takes exactly these three
        factors = {key: rope[key] for key in ("short_factor", "long_factor") if key in rope}
        return {"type": kind, **factors}
    others = ("rope_theta", "partial_rotary_factor")
    return {key: value for key, value in rope.items() if key not in others}


FORMAT = 1
STAGES = ("moe", "mergeable", "ewa", "lora")
SHIM = "modeling_moe_runtime"  # the file beside a checkpoint that leads trust_remote_code here
# fields that an upcycled config adds to its base's; all are removed when the model becomes dense
# again
MOE_FIELDS = (
    "moe_runtime",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "output_router_logits",
    "router_aux_loss_coef",
    "auto_map",
)


def moe_fields(
    config: MoEConfig,
    *,
    layers: list[int],
    base_model_type: str,
    base_architecture: str,
    method: str = "xft",
    stage: str = "moe",
    shared_rate: float | None = None,
    soup: bool = False,
    lora: dict | None = None,
) -> dict:
    """Return the fields that an upcycled model's config adds: our block, and the names that
    transformers and TRL read.

    The latter count only routed experts: `num_experts` is the width of the router logits. `lora`
    has the additional settings of stage "lora": form, rank, alpha, targets, the pairs' dtype (None:
    the model's), train_backbone, and the backbone, which is that of the "base" or changed by the
    "mean" of adapters.
    """
    block = {
        "format": FORMAT,
        "method": method,
        "stage": stage,
        "config": config.to_dict(),
        "layers": list(layers),
        "base_model_type": base_model_type,
        "base_architecture": base_architecture,
        "shared_rate": shared_rate,
        "soup": soup,
    }
    if lora is not None:
        block["lora"] = lora
    return {
        "moe_runtime": block,
        "num_experts": config.num_routed_experts,
        "num_local_experts": config.num_routed_experts,
        "num_experts_per_tok": config.num_routed_per_token,
        "moe_intermediate_size": config.intermediate_size,
        "decoder_sparse_step": 1,
        "output_router_logits": False,
        # not 0.001, the default in transformers, as TRL enables the pooled loss if this is not zero
        "router_aux_loss_coef": 0.0,
        "auto_map": {},
    }


def become_moe(config: PreTrainedConfig, classes: Any, fields: dict) -> None:
    """Convert a base's config to that of an upcycled model, in place.

    `fields` come from `moe_fields`, `classes` from `modeling.model_classes` for the base.
    """
    config.__class__ = classes.config
    for name, value in fields.items():
        setattr(config, name, value)
    config.architectures = [classes.causal_lm.__name__]


def become_mergeable(config: PreTrainedConfig, shared_rate: float, soup: bool) -> None:
    """Convert an upcycled model's config to that of the mergeable one, in place."""
    config.moe_runtime = config.moe_runtime | {
        "stage": "mergeable",
        "shared_rate": shared_rate,
        "soup": soup,
    }
    # there is nothing to balance without routers
    config.output_router_logits = False
    config.router_aux_loss_coef = 0.0


def check_mergeable(config: MoEConfig, soup: bool) -> None:
    """Raise ValueError unless the experts of `config` can be mixed, as XFT's mixture needs a shared
    expert.
    """
    if not (soup or config.has_shared_expert):
        raise ValueError(f"Gate {config.gate!r} has no shared expert. Pass soup=True")


def stock_config(config: PreTrainedConfig, base: type) -> PreTrainedConfig:
    """Return the config of the base, without our fields, as a new object of class `base`."""
    new = copy.deepcopy(config)
    new.__class__ = base
    for name in MOE_FIELDS:
        new.__dict__.pop(name, None)
    # of the rotary keys that our config.json adds, a reader may keep some as attributes that the
    # base does not have
    values = new.to_dict()
    added = legacy_rope(values)
    read = base(**{key: value for key, value in values.items() if key not in added})
    for name in set(added) - set(vars(read)):
        new.__dict__.pop(name, None)
    new.architectures = [config.moe_runtime["base_architecture"]]
    return new


def moe_config(hf_config: PreTrainedConfig) -> MoEConfig:
    """Return the layers' MoEConfig of an upcycled model's config; raises ValueError unless
    upcycling wrote its block.
    """
    block = getattr(hf_config, "moe_runtime", None)
    count = hf_config.num_hidden_layers
    needed = {"config", "base_model_type", "base_architecture"}
    fits = False
    if isinstance(block, dict):
        stage = block.get("stage")
        if stage == "mergeable":
            needed |= {"soup", "shared_rate"}
        layers = block.get("layers")
        fits = block.get("format") == FORMAT and stage in STAGES and needed <= block.keys()
        fits = fits and isinstance(layers, list)
        fits = fits and all(type(one) is int and 0 <= one < count for one in layers)
    if not fits:
        raise ValueError(
            f"moe_runtime in config.json must have format {FORMAT}, a stage of "
            f"{', '.join(STAGES)}, a config and layers from 0 to {count - 1}, but is "
            f"{shown(block)}. Upcycle a dense model, or upgrade moe_runtime if a newer one wrote "
            "this"
        )
    return MoEConfig.from_dict(block["config"])


class ConfigMixin:
    """Mixin of the config classes, placed before the base's config class."""

    output_router_logits = False
    router_aux_loss_coef = 0.0
    # TRL reads it from every config and expects a dict
    auto_map: dict = {}

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.make_models()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing, as transformers would copy this file into each checkpoint and point auto_map
        at the copy.
        """

    def to_diff_dict(self) -> dict:
        """Return what config.json holds: with auto_map for trust_remote_code, and the rotary keys
        of transformers 4.
        """
        values = super().to_diff_dict()
        stem = type(self).__name__.removesuffix("Config")
        kinds = {
            "AutoConfig": "Config",
            "AutoModel": "Model",
            "AutoModelForCausalLM": "ForCausalLM",
        }
        values["auto_map"] = {auto: f"{SHIM}.{stem}{kind}" for auto, kind in kinds.items()}
        return values | legacy_rope(values)

    def save_pretrained(self, save_directory: StrPath, *args: Any, **kwargs: Any) -> Any:
        """Save config.json and the module that auto_map names, which imports this package."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / f"{SHIM}.py").write_text(self.shim(), encoding="utf-8")
        return super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def shim(cls) -> str:
        """Return the source of the module that auto_map names."""
        stem = cls.__name__.removesuffix("Config")
        return (
            "# needs moe_runtime\n"
            f"from {cls.__module__} import {stem}Config, {stem}ForCausalLM, {stem}Model\n"
        )
