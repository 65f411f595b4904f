"""How many parameters a model has, and how many of them a token passes through."""

from torch import nn

from moe_runtime.modules.ewa import EWAMLP
from moe_runtime.modules.lora import LoRAMoE
from moe_runtime.modules.lora_linear import LoRALinear
from moe_runtime.modules.moe import MoE


def sizes(model: nn.Module) -> tuple[int, int]:
    """Return the parameters of a model and those that a token passes through; tied weights count once."""
    total = sum(p.numel() for p in model.parameters())
    idle = 0.0
    for module in model.modules():
        if isinstance(module, MoE | EWAMLP | LoRALinear):
            # EWA deals each token out to one expert, whatever top_k is
            seen = 1 if isinstance(module, EWAMLP) else module.config.top_k
            idle += (1 - seen / module.config.num_experts) * sum(p.numel() for p in _of_experts(module))
    return total, round(total - idle)


def _of_experts(module: nn.Module) -> list[nn.Parameter]:
    """Return what belongs to single experts: all of a MoE's, of LoRA experts the pairs without their base."""
    if isinstance(module, LoRAMoE | LoRALinear):
        low_rank = module.experts if isinstance(module, LoRAMoE) else module
        return [half for pair in low_rank.pairs() for half in pair]
    return list(module.experts.parameters())
