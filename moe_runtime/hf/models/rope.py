"""The rotary keys of config.json as transformers 4 spelled them, beside version 5's `rope_parameters`.

Version 5 writes `rope_parameters` only; 4.57, and whatever else reads the old keys, then runs with its default base of
10000 and without scaling, and says nothing. Version 5 reads both spellings, and they agree.
"""

import json
import os
from pathlib import Path

# per-model names of (base, rotated share of a head)
_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}


def legacy_rope(config: dict) -> dict:
    """Return the keys to add to `config`, a config.json's content, for readers of the old spelling."""
    rope = config.get("rope_parameters")
    if not rope:
        return {}
    if "rope_theta" in rope:
        base, share = _NAMES.get(_base_type(config), ("rope_theta", "partial_rotary_factor"))
        keys = {base: rope["rope_theta"], "rope_scaling": _scaling(rope, _base_type(config))}
        keys[share] = rope.get("partial_rotary_factor")
        return {key: value for key, value in keys.items() if value is not None}
    # one rope per layer type: the old spelling knew two of them, gemma3's
    if not {"full_attention", "sliding_attention"} <= set(rope):
        return {}
    scaling = _scaling(rope["full_attention"], _base_type(config))
    return {
        "rope_theta": rope["full_attention"]["rope_theta"],
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
    } | ({} if scaling is None else {"rope_scaling": scaling})


def write_legacy_rope(folder: str | os.PathLike) -> None:
    """Add the old spelling to `folder`/config.json, for a stock model's folder, such as a merged model's."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= legacy_rope(config)
    new = path.with_name("config.json.new")
    new.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(path)


def _base_type(config: dict) -> str:
    return config.get("moe_runtime", {}).get("base_model_type") or config.get("model_type", "")


def _scaling(rope: dict, model_type: str) -> dict | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if model_type == "phi3":  # its old config takes exactly these three
        return {"type": kind} | {key: rope[key] for key in ("short_factor", "long_factor") if key in rope}
    return {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
