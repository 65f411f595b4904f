"""Convert config.json of the released XFT code (ise-uiuc/xft) to ours and back.

    num_experts E, num_selects K    num_experts, top_k: both count the shared expert, as we do
    gate_type                       gate, by GATES below; gate_network mlp | linear is router,
                                    gate_add_noise noisy_gate
    gate_use_balance                balance_loss "cv2" weighted by gate_balance_loss_weight, with
                                    load_quirk; else "none"
    shared_expert_weight            shared_rate (lambda), which only the weighted model reads

The released MoE attention reads `rope_scaling` but not `rope_theta`: its base is always 10000. The
weighted and the merged model are Llama models and read both.
"""

import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from moe_runtime.config import (
    MoEConfig,
    check_bool,
    check_number,
    check_shared_rate,
    one_line,
    shown,
)
from moe_runtime.hf.common.loading import check_counts
from moe_runtime.hf.models import folders
from moe_runtime.hf.models.configuration import moe_config
from moe_runtime.io.files import read_json

MODEL_TYPE = "llama_moe_upscaling"
ROPE_BASE = 10000.0
GATES = {
    "TopKUniversalBalancedNoisyGate": "xft",
    "TopKUniversalBalancedNoNormalizationNoisyGate": "nonorm",
    "TopKBalancedNoisyGate": "topk_softmax",
}
# defaults of the released config class: of the experts
_MOE_KEYS = {
    "num_experts": 8,
    "num_selects": 2,
    "size_experts": None,
    "gate_type": "TopKBalancedNoisyGate",
    "gate_network": "mlp",
    "gate_use_softmax": True,
    "gate_use_balance": True,
    "gate_balance_loss_weight": 0.01,
    "gate_add_noise": True,
    "gate_noise_epsilon": 0.01,
    "calculator_type": "UniversalCalculator",
    "multiply_gate_scores": True,
    "score_scale_factor": 1.0,
    "add_weight_norm": False,
    "drop_tokens": True,
    "dropped_padding": "zero",
    "capacity_factor": 1.25,
    "shared_expert_weight": 0.75,
    "ffn_folder_path": "ds-8x6.7b-top-6-universal-evol-instruct-5e-5_bs_64_epoch_4_ffn",
}
# and of the rest, where they differ from Llama's
_STOCK_KEYS = {
    "vocab_size": 32256,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 16384,
    "pad_token_id": 32014,
    "bos_token_id": 32013,
    "eos_token_id": 32014,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
}
# options with one supported value
_FIXED = {
    "gate_use_softmax": True,
    "calculator_type": "UniversalCalculator",
    "multiply_gate_scores": True,
    "add_weight_norm": False,
}
# our settings that their config lacks are kept under this key, for the way back
EXTRA = "moe_runtime_extra"
_EXTRA_FIELDS = ("load_quirk", "initializer_range", "shared", "recompute")


def read_values(source: str | Path) -> dict:
    """Return config.json of a folder of the released code, without defaults; raises ValueError for
    other folders.
    """
    path = Path(source) / "config.json"
    values = {}
    if path.is_file():
        values = read_json(path)
    model_type = values.get("model_type")
    if "moe_runtime" in values or model_type not in (MODEL_TYPE, "llama"):
        if values:
            found = f"model_type of {path} is {shown(model_type)}"
        else:
            found = f"{str(source)!r} has no config.json"
        raise ValueError(
            f"{found}. Pass a folder of the released XFT code with {MODEL_TYPE!r}, or 'llama' for "
            "a weighted model. Folders of moe_runtime need no import"
        )
    return values


def import_config(values: dict, stage: str, rope_theta: float | None = None):
    """Return the config of our upcycled ("moe") or mergeable model that computes the same as the
    released code.

    `rope_theta` replaces the RoPE base that it would use. Raises ValueError for an unsupported
    option.
    """
    check_counts(values, "config.json")
    is_moe = values["model_type"] == MODEL_TYPE
    missing = [
        key for key in ("num_experts", "shared_expert_weight") if key not in values and not is_moe
    ]
    reason = f"lacks {', '.join(missing)}, which a weighted model's folder has" if missing else None
    if values.get("quantization_config"):
        reason = "has a quantization_config, but quantized weights are not supported"
    if reason is not None:
        raise ValueError(f"config.json {reason}")
    values = _MOE_KEYS | (_STOCK_KEYS if is_moe else {}) | values
    extra = values.get(EXTRA, {})
    settings = _moe_settings(values) | _extra_settings(extra)
    try:
        config = _llama_config(values, stage, rope_theta)
        moe = folders.config_for_folder(config, **settings)
    except (StrictDataclassError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise ValueError(
            f"config.json is not that of a Llama with num_selects as top_k: {one_line(error, 1000)}"
        ) from error
    new = folders.upcycled_config(config, moe)
    new.moe_runtime["method"] = extra.get("method", "xft")
    rate = values["shared_expert_weight"]
    check_shared_rate(rate, "shared_expert_weight")
    return folders.mergeable_config(new, rate, soup=False) if stage == "mergeable" else new


def _first_other(rows: Iterable[tuple[str, object, bool, str]]) -> str | None:
    """Describe the first of (name, value, is it valid, expected) that is not valid; None if all
    are.
    """
    return next(
        (
            f"{name} must be {want}, but is {shown(value)}"
            for name, value, fine, want in rows
            if not fine
        ),
        None,
    )


def _moe_settings(values: dict) -> dict:
    """Return MoEConfig's settings; raises ValueError for an unsupported value of an option."""
    factors = values["score_scale_factor"]
    gate = values["gate_type"]
    ones = all(factor == 1 for factor in (factors if isinstance(factors, list) else [factors]))
    other = _first_other(
        [
            *((key, values[key], values[key] == want, repr(want)) for key, want in _FIXED.items()),
            ("score_scale_factor", factors, ones, "1.0"),
            (
                "gate_type",
                gate,
                isinstance(gate, str) and gate in GATES,
                f"one of {', '.join(GATES)}",
            ),
        ]
    )
    if other is not None:
        raise ValueError(f"{other}. Other values are not supported")
    check_bool("gate_use_balance", values["gate_use_balance"])
    return {
        "num_experts": values["num_experts"],
        "top_k": values["num_selects"],
        "gate": GATES[gate],
        "router": str(values["gate_network"]).lower(),
        "noisy_gate": values["gate_add_noise"],
        "noise_epsilon": values["gate_noise_epsilon"],
        "balance_loss": "cv2" if values["gate_use_balance"] else "none",
        "balance_loss_coef": values["gate_balance_loss_weight"],
        "load_quirk": True,
        "initializer_range": values.get("initializer_range", 0.02),
    }


def _extra_settings(extra: dict) -> dict:
    fields = extra.get("config", {}) if isinstance(extra, dict) else None
    if (
        not isinstance(fields, dict)
        or set(fields) - set(_EXTRA_FIELDS)
        or set(extra) - {"config", "method"}
    ):
        raise ValueError(
            f"{EXTRA} may only have method and config (of {', '.join(_EXTRA_FIELDS)}), but is "
            f"{shown(extra)}"
        )
    return fields


def _llama_config(values: dict, stage: str, rope_theta: float | None):
    """Return the stock config of the model around the experts."""
    left_out = {
        *_MOE_KEYS,
        EXTRA,
        "model_type",
        "architectures",
        "auto_map",
        "transformers_version",
        "_name_or_path",
    }
    stock = {key: value for key, value in values.items() if key not in left_out}
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        stock.pop(key, None)
    stock["mlp_bias"] = False  # the released code ignores it
    if stage == "moe":
        stock["attention_bias"] = False
    stock["head_dim"] = stock["hidden_size"] // stock["num_attention_heads"]
    return AutoConfig.for_model(
        "llama", rope_parameters=_import_rope(values, stage, rope_theta), **stock
    )


def _import_rope(values: dict, stage: str, rope_theta: float | None) -> dict:
    """Return `rope_parameters`: the folder's own if they agree with the rest of the config."""
    configured = values.get("rope_theta", ROPE_BASE)
    base = configured if stage == "mergeable" else ROPE_BASE
    if rope_theta is not None:
        base = rope_theta
    elif base != configured:
        warnings.warn(
            f"config.json has rope_theta {configured}, which the released MoE code ignores: this "
            f"folder's attention is imported with the base {base}. Pass rope_theta={configured} to "
            "use that one",
            stacklevel=5,
        )
    check_number("rope_theta", base, positive=True)
    rope = {"rope_theta": base, "rope_type": "default"}
    scaling = values.get("rope_scaling")
    if scaling is not None:
        known = isinstance(scaling, dict) and set(scaling) == {"type", "factor"}
        known = known and scaling["type"] in ("linear", "dynamic") and _is_number(scaling["factor"])
        if not known or scaling["factor"] <= 1:
            raise ValueError(
                "rope_scaling must be null, or type linear or dynamic and a factor above 1, but "
                f"is {shown(scaling)}"
            )
        rope |= {"rope_type": scaling["type"], "factor": scaling["factor"]}
    kept = values.get("rope_parameters")
    same = (
        isinstance(kept, dict)
        and {key: value for key, value in kept.items() if key != "type"} == rope
    )
    return kept if same else rope


def _is_number(value) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def export_values(config, ffn_folder: str | Path | None = None, keep_rope: bool = False) -> dict:
    """Return the config.json with which the released code computes the same as our model of
    `config`.

    `ffn_folder` is the folder of a mergeable model's experts. Raises ValueError for settings that
    the code does not support.
    """
    stage = config.moe_runtime["stage"]
    moe = moe_config(config)
    stock = json.loads(folders.dense_config(config).to_json_string(use_diff=True))
    _check_exportable(config, moe, stock, keep_rope)
    if "dtype" in stock:
        stock["torch_dtype"] = stock.pop("dtype")
    rope = stock["rope_parameters"]
    kind = rope["rope_type"]
    names = {
        "moe": (MODEL_TYPE, "LlamaMoEUpscalingForCausalLM"),
        "mergeable": ("llama", "LlamaWeightedForCausalLM"),
    }
    values = stock | {
        "model_type": names[stage][0],
        "architectures": [names[stage][1]],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None
        if kind == "default"
        else {"type": kind, "factor": float(rope["factor"])},
    }
    values |= _MOE_KEYS | {
        "num_experts": moe.num_experts,
        "num_selects": moe.top_k,
        "gate_type": next(name for name, gate in GATES.items() if gate == moe.gate),
        "gate_network": moe.router,
        "gate_use_balance": moe.balance_loss == "cv2",
        "gate_balance_loss_weight": moe.balance_loss_coef,
        "gate_add_noise": moe.noisy_gate,
        "gate_noise_epsilon": moe.noise_epsilon,
        "shared_expert_weight": config.moe_runtime["shared_rate"] if stage == "mergeable" else 0.75,
        "ffn_folder_path": None if ffn_folder is None else str(ffn_folder),
    }
    return values | _extra(config, moe, values)


def _check_exportable(config, moe: MoEConfig, stock: dict, keep_rope: bool) -> None:
    """Raise ValueError for settings that the released code does not support."""
    block = config.moe_runtime
    rope = stock["rope_parameters"]
    layers = list(range(config.num_hidden_layers))
    base = rope["rope_theta"]
    head_dim = config.hidden_size // config.num_attention_heads
    is_moe = block["stage"] == "moe"
    other = _first_other(
        [
            (
                "base_model_type",
                block["base_model_type"],
                block["base_model_type"] == "llama",
                "'llama'",
            ),
            ("layers", block["layers"], block["layers"] == layers, f"all {len(layers)}"),
            ("soup", block["soup"], not block["soup"], "False: one shared_rate for all layers"),
            ("gate", moe.gate, moe.gate in GATES.values(), f"one of {', '.join(GATES.values())}"),
            ("balance_loss", moe.balance_loss, moe.balance_loss != "switch", "'cv2' or 'none'"),
            ("bias", moe.bias, not moe.bias, "False"),
            (
                "head_dim",
                stock.get("head_dim"),
                stock.get("head_dim") in (None, head_dim),
                str(head_dim),
            ),
            (
                "rope_type",
                rope["rope_type"],
                rope["rope_type"] in ("default", "linear", "dynamic"),
                "linear or dynamic",
            ),
            (
                "rope factor",
                rope.get("factor"),
                rope["rope_type"] == "default" or rope.get("factor", 0) > 1,
                "above 1",
            ),
            (
                "rope_parameters",
                rope,
                set(rope) <= {"rope_theta", "rope_type", "factor", "type"},
                "a base, a type, a factor",
            ),
            (
                "attention_bias",
                True,
                not (is_moe and stock.get("attention_bias")),
                "False in an MoE's attention",
            ),
            (
                "rope_theta",
                base,
                not is_moe or keep_rope or base == ROPE_BASE,
                (
                    f"{ROPE_BASE}, unless keep_rope=True writes the MoE for readers that use "
                    "rope_theta"
                ),
            ),
        ]
    )
    if other is not None:
        raise ValueError(f"{other}. The released XFT code supports no other value")


def _extra(config, moe: MoEConfig, values: dict) -> dict:
    """Return the settings that an import of `values` would lose."""
    sizes = {
        name: getattr(moe, name) for name in ("hidden_size", "intermediate_size", "hidden_act")
    }
    known = MoEConfig(**sizes, **_moe_settings(values))
    fields = {
        name: getattr(moe, name)
        for name in _EXTRA_FIELDS
        if getattr(moe, name) != getattr(known, name)
    }
    extra = {"config": fields} if fields else {}
    if config.moe_runtime["method"] != "xft":
        extra["method"] = config.moe_runtime["method"]
    return {EXTRA: extra} if extra else {}
