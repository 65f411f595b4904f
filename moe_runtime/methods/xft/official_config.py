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
import warnings
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from moe_runtime.config import (
    MoEConfig,
    check_bool,
    check_choice,
    check_number,
    check_shared_rate,
    one_line,
    shown,
)
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
    "score_scale_factor": 1.0,
}
# keys of config.json that are not the model's around the experts, or are converted
_LEFT_OUT = {
    *_MOE_KEYS,
    "model_type",
    "architectures",
    "auto_map",
    "transformers_version",
    "_name_or_path",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
}


def read_values(source: str | Path) -> dict:
    """Return config.json of a folder of the released code, without defaults; raises ValueError for
    other folders.
    """
    path = Path(source) / "config.json"
    problem = f"{str(source)!r} has no config.json"
    if path.is_file():
        values = read_json(path)
        if "moe_runtime" not in values and values.get("model_type") in (MODEL_TYPE, "llama"):
            return values
        problem = f"model_type of {path} is {shown(values.get('model_type'))}"
    raise ValueError(
        f"{problem}. Pass a folder of the released XFT code with {MODEL_TYPE!r}, or 'llama' for a "
        "weighted model. Folders of moe_runtime need no import"
    )


def import_config(values: dict, stage: str, rope_theta: float | None = None) -> PreTrainedConfig:
    """Return the config of our upcycled ("moe") or mergeable model that computes the same as the
    released code.

    `rope_theta` replaces the RoPE base that it would use. Raises ValueError for an unsupported
    option.
    """
    if values.get("quantization_config"):
        raise ValueError(
            "config.json has a quantization_config, but quantized weights are not supported"
        )
    if values["model_type"] == MODEL_TYPE:
        values = _STOCK_KEYS | values
    else:
        for key in ("num_experts", "shared_expert_weight"):
            if key not in values:
                raise ValueError(f"config.json lacks {key}, which a weighted model's folder has")
    values = _MOE_KEYS | values
    settings = _moe_settings(values)
    try:
        config = _llama_config(values, stage, rope_theta)
        moe = folders.config_for_folder(config, **settings)
    except (StrictDataclassError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise ValueError(
            f"config.json is not that of a Llama with num_selects as top_k: {one_line(error, 1000)}"
        ) from error
    new = folders.upcycled_config(config, moe)
    rate = values["shared_expert_weight"]
    check_shared_rate(rate, "shared_expert_weight")
    if stage == "mergeable":
        return folders.mergeable_config(new, rate, soup=False)
    return new


def _moe_settings(values: dict) -> dict:
    """Return MoEConfig's settings; raises ValueError for an unsupported value of an option."""
    factors = values["score_scale_factor"]
    if isinstance(factors, list) and set(factors) == {1.0}:  # one per expert
        values = values | {"score_scale_factor": 1.0}
    for key, expected in _FIXED.items():
        if values[key] != expected:
            raise ValueError(f"{key} must be {expected!r}, but is {shown(values[key])}")
    gate = values["gate_type"]
    check_choice("gate_type", gate, tuple(GATES))
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
        "load_quirk": values["gate_use_balance"],
        "initializer_range": values.get("initializer_range", 0.02),
    }


def _llama_config(values: dict, stage: str, rope_theta: float | None):
    """Return the stock config of the model around the experts."""
    stock = {key: value for key, value in values.items() if key not in _LEFT_OUT}
    stock["mlp_bias"] = False  # the released code ignores it
    if stage == "moe":
        stock["attention_bias"] = False
    stock["head_dim"] = stock["hidden_size"] // stock["num_attention_heads"]
    stock["rope_parameters"] = _import_rope(values, stage, rope_theta)
    return AutoConfig.for_model("llama", **stock)


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
            stacklevel=4,
        )
    check_number("rope_theta", base, positive=True)
    rope = {"rope_theta": base, "rope_type": "default"}
    scaling = values.get("rope_scaling")
    if scaling is not None:
        is_known = isinstance(scaling, dict) and set(scaling) == {"type", "factor"}
        if not is_known or scaling["type"] not in ("linear", "dynamic"):
            raise ValueError(
                "rope_scaling must be null, or type linear or dynamic and a factor, but is "
                f"{shown(scaling)}"
            )
        check_number("rope_scaling's factor", scaling["factor"], positive=True)
        rope |= {"rope_type": scaling["type"], "factor": scaling["factor"]}
    saved = values.get("rope_parameters")
    if isinstance(saved, dict):
        # transformers writes the type twice, for older readers
        without_type = {key: value for key, value in saved.items() if key != "type"}
        if without_type == rope:
            return saved
    return rope


def export_values(
    config: PreTrainedConfig, ffn_folder: str | Path | None = None, keep_rope: bool = False
) -> dict:
    """Return the config.json with which the released code computes the same as our model of
    `config`.

    `ffn_folder` is the folder of a mergeable model's experts. Raises ValueError for settings that
    the code does not support.
    """
    moe = moe_config(config)
    stock = json.loads(folders.dense_config(config).to_json_string(use_diff=True))
    _check_exportable(config, moe, stock, keep_rope)
    if "dtype" in stock:
        stock["torch_dtype"] = stock.pop("dtype")
    rope = stock["rope_parameters"]
    scaling = None
    if rope["rope_type"] != "default":
        scaling = {"type": rope["rope_type"], "factor": float(rope["factor"])}
    values = stock | _MOE_KEYS
    values |= {
        "model_type": MODEL_TYPE,
        "architectures": ["LlamaMoEUpscalingForCausalLM"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "num_experts": moe.num_experts,
        "num_selects": moe.top_k,
        "gate_type": next(name for name, gate in GATES.items() if gate == moe.gate),
        "gate_network": moe.router,
        "gate_use_balance": moe.balance_loss == "cv2",
        "gate_balance_loss_weight": moe.balance_loss_coef,
        "gate_add_noise": moe.noisy_gate,
        "gate_noise_epsilon": moe.noise_epsilon,
        "ffn_folder_path": None,
    }
    if config.moe_runtime["stage"] == "mergeable":
        values |= {
            "model_type": "llama",
            "architectures": ["LlamaWeightedForCausalLM"],
            "shared_expert_weight": config.moe_runtime["shared_rate"],
            "ffn_folder_path": str(ffn_folder),
        }
    return values


def _check_exportable(config, moe: MoEConfig, stock: dict, keep_rope: bool) -> None:
    """Raise ValueError for settings that the released code does not support."""
    block = config.moe_runtime
    rope = stock["rope_parameters"]
    is_moe = block["stage"] == "moe"
    head_dim = config.hidden_size // config.num_attention_heads
    all_layers = list(range(config.num_hidden_layers))
    refused = {
        "base_model_type, other than llama": block["base_model_type"] != "llama",
        "layers, not all of them": block["layers"] != all_layers,
        "soup": block["soup"],
        "gate": moe.gate not in GATES.values(),
        "balance_loss": moe.balance_loss == "switch",
        "bias": moe.bias,
        "attention_bias": is_moe and bool(stock.get("attention_bias")),
        "head_dim": (stock.get("head_dim") or head_dim) != head_dim,
        "rope_type": rope["rope_type"] not in ("default", "linear", "dynamic"),
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"The released XFT code does not support the model's {name}")
    if is_moe and not keep_rope and rope["rope_theta"] != ROPE_BASE:
        raise ValueError(
            f"rope_theta must be {ROPE_BASE}, which the released MoE code uses in any case, but is "
            f"{rope['rope_theta']}. keep_rope=True writes the MoE for readers that use rope_theta"
        )
