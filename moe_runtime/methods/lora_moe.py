"""LoRA experts: UpIT's (arXiv 2410.01610) and LoRAMoE's (arXiv 2312.09979), from a dense model and back to one.

    to_lora_moe      low-rank experts over the frozen MLPs, fresh or from PEFT adapters, behind routers    UpIT, Sec. 3.1
    (tune)           pairs and routers, by any trainer
    merge            the dense model W + s sum_e alpha_e B_e A_e, in the base's own architecture
    to_moe           or an upcycled model whose experts are whole
    save_adapters    or each expert as a PEFT adapter of the base; and all as one, which load_adapters reads back

`forced_experts` sends each row of a batch to one expert: what expert-specific data is chosen by.
"""

from collections.abc import Sequence

import torch
from torch import nn

from moe_runtime.hf.lora_moe import (
    forced_experts,
    load_adapters,
    lora_config,
    lora_layers,
    merge_experts,
    save_adapters,
    to_lora_moe,
    to_moe,
)  # fmt: skip
from moe_runtime.methods.xft import alpha_rows

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
