"""Tensors of multi-token prediction, which transformers passes over when it loads a model, and
which `save_pretrained` therefore loses while config.json still declares their layers.

    keep_prediction   copy them from the folder that a saved model comes from
    without           a config.json that declares none
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from moe_runtime.hf.models.folders import read_config, skeleton
from moe_runtime.io.checkpoint import INDEX, SINGLE, Checkpoint, write_tensors
from moe_runtime.io.files import atomic_file, atomic_write_json, read_json

FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
FILE = "model-prediction.safetensors"


def passed_over(model: nn.Module, keys: Iterable[str]) -> list[str]:
    """Return those keys of a folder that transformers passes over when it loads `model`."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [key for key in keys if any(re.search(pattern, key) for pattern in patterns)]


def declared(config: dict[str, Any]) -> bool:
    """Return whether a config.json declares layers of multi-token prediction."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return any(part.get(field) for part in parts for field in FIELDS)


def without(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json that declares no such layers."""
    result = {}
    for name, value in config.items():
        if isinstance(value, dict):
            value = without(value)
        result[name] = 0 if name in FIELDS and value else value
    return result


def keep_prediction(source: str | Path, out: str | Path) -> list[str]:
    """Add the tensors of multi-token prediction in `source` to the model saved in `out`.

    They are copied byte for byte to a file of their own, which the index names. If `source` is no
    folder, or has none, config.json in `out` declares none any more.

    Args:
        source: Folder of the model before it was trained, or a Hub id.
        out: Folder that save_pretrained has written, of the same sizes.

    Returns:
        The names of the copied tensors.
    """
    out = Path(out)
    config = read_json(out / "config.json")
    if not declared(config):
        return []
    if not Path(source).is_dir():
        atomic_write_json(out / "config.json", without(config))
        return []
    checkpoint = Checkpoint(source)
    names = passed_over(skeleton(read_config(source)), checkpoint)
    if not names:
        atomic_write_json(out / "config.json", without(config))
        return []
    saved = Checkpoint(out).specs()
    index: dict[str, Any] = {"metadata": {}, "weight_map": dict.fromkeys(saved, SINGLE)}
    if (out / INDEX).is_file():
        index = read_json(out / INDEX)
    index["weight_map"] |= dict.fromkeys(names, FILE)
    sizes = saved | {name: checkpoint.specs()[name] for name in names}
    index["metadata"]["total_size"] = sum(spec.nbytes for spec in sizes.values())
    with atomic_file(out / FILE) as beside:
        write_tensors(Path(beside), {name: checkpoint.get(name) for name in names})
    with atomic_file(out / INDEX) as beside:
        Path(beside).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return names
