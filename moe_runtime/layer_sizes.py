"""Sizes of MoE layers: of published models, and of a model's folder; and counts in config.json that no model has."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_runtime import files
from moe_runtime.config import MoEConfig, check_positive, shown

MAX_LAYERS, MAX_EXPERTS, MAX_LABELS = 10_000, 2**16, 2**20
# keys of a config.json for each of which transformers, or this package, makes something; in parts of it too (text_config)
_COUNTS = {r"\w*layers|n_layer": MAX_LAYERS, r"\w*experts(_per_tok)?": MAX_EXPERTS, "num_labels": MAX_LABELS}


class Layer(NamedTuple):
    """Sizes of one MoE layer; experts and slots count a shared expert, which is expert 0 and sees every token."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    shared: bool = False
    gated: bool = True

    def check(self) -> None:
        """Raise ValueError for sizes that are none."""
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
            check_positive(name, getattr(self, name))
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, num_experts is {self.num_experts}; want top_k <= num_experts")


LAYERS = {  # of published models; the XFT ones as in its paper, or guessed where it names no expert count
    "XFT-DSCoder-1.3B": Layer(2048, 5504, 8, 6, shared=True),
    "XFT-StableCode-3B": Layer(2560, 6912, 4, 2, shared=True),
    "XFT-TinyLlama-1.1B": Layer(2048, 5632, 8, 6, shared=True),
    "XFT-TinyLlama-1.1B-4e": Layer(2048, 5632, 4, 2, shared=True),
    "DeepSeek-V2-Lite": Layer(2048, 1408, 64, 6),
    "Mixtral-8x7B": Layer(4096, 14336, 8, 2),
    "OLMoE": Layer(2048, 1024, 64, 8),
    "Qwen3-30B-A3B": Layer(2048, 768, 128, 8),
}


def check_counts(values: Mapping[str, Any], source: str | os.PathLike) -> None:
    """Raise ValueError for more layers, experts or labels in a config.json than a model has; before they fill the memory."""
    parts = [values]
    while parts:
        for key, value in parts.pop().items():
            if isinstance(value, Mapping):
                parts.append(value)
            most = next((most for keys, most in _COUNTS.items() if re.fullmatch(keys, key)), None)
            if most is not None and isinstance(value, int) and value > most:
                raise ValueError(f"{key} is {shown(value)}; want at most {most}, in {source}")


def check_folder(source: str | os.PathLike) -> None:
    """Call `check_counts` for the config.json of a model's folder, if it is one; ValueError for one that is not JSON too."""
    path = Path(source, "config.json")
    if os.path.isfile(path):  # which an id of the Hub is not, whatever its letters
        check_counts(files.read_json(path), path)


def read_layer(folder: Path) -> Layer:
    """Return the MoE layers' sizes from a model folder's config.json, ours or transformers'; 0 for what a dense one lacks."""
    values = files.read_json(Path(folder) / "config.json")
    if isinstance(block := values.get("moe_runtime"), dict):
        c = MoEConfig.from_dict(block["config"])
        return Layer(c.hidden_size, c.intermediate_size, c.num_experts, c.top_k, c.has_shared_expert, c.gated)
    values = values.get("text_config") or values

    def first(*names: str) -> int:
        return next((values[name] for name in names if values.get(name)), 0)

    return Layer(
        first("hidden_size"),
        first("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size"),
        first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        first("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k"),
    )
