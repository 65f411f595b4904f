"""What XFT is compared with: each baseline's source, and the call that makes it.

Most are settings of `moe_runtime.methods.xft`. EWA (arXiv 2308.06093) is here: the MLP becomes E experts without a router, each
sees a random part of every batch, after each of the optimizer's steps they are drawn to their mean, and the mean is the
dense model in the end.

    to_ewa               every MLP becomes E copies of itself
    (tune)               by any trainer, with AveragingCallback or average_after_steps
    xft.merge            the dense model: the experts' mean (of partition "router" with alpha="uniform")

UpIT's (arXiv 2410.01610, Tables 1 and 2): LoRA on the MLPs, and LoRAMoE over it, from fresh pairs or from copies of one.

    to_lora              peft's pairs on the MLPs' linear layers
    (tune, save)         an adapter folder
    lora_moe.to_lora_moe fresh pairs, or experts=[folder] * E
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from moe_runtime.config import check_choice
from moe_runtime.hf.averaging import SCHEDULES, Averaging, AveragingCallback, average_after_steps
from moe_runtime.hf.lora_baseline import add_mlp_lora as to_lora
from moe_runtime.methods import xft
from moe_runtime.methods.lora_moe import to_lora_moe

__all__ = [
    "BASELINES", "SCHEDULES", "Averaging", "AveragingCallback", "Baseline", "average_after_steps", "to_ewa", "to_lora",
    "to_lora_moe",
]  # fmt: skip
PARTITIONS = ("random", "router")


class Baseline(NamedTuple):
    """One line of a table."""

    label: str
    what: str
    source: str
    call: str  # on `model`: the dense base, or for a merge the tuned upcycled model; `adapter`: a tuned LoRA's folder


BASELINES = {
    "sft": Baseline("SFT", "the dense model, tuned on the same data", "XFT, Tables 1 to 3", "model"),
    "upcycling": Baseline(
        "sparse upcycling", "no shared expert, softmax over the chosen logits", "XFT, Table 4; official code",
        "xft.upcycle(model, gate='topk_softmax')",
    ),
    "upcycling_paper": Baseline(
        "sparse upcycling, Eq. (1)", "no shared expert, softmax over all logits, not renormalized", "XFT, Eq. (1)",
        "xft.upcycle(model, gate='softmax_topk')",
    ),
    "mocle": Baseline(
        "MoCLE gate", "the shared expert's weights without routing weight normalization",
        "XFT, Table 4; MoCLE, arXiv 2312.12379", "xft.upcycle(model, gate='nonorm')",
    ),
    "ewa": Baseline(
        "EWA", "tokens dealt out to the experts at random, experts averaged after each step",
        "arXiv 2308.06093; XFT, Tables 1 to 3", "baselines.to_ewa(model)",
    ),
    "ewa_router": Baseline(
        "EWA, router", "the same with a router that sends each token to one expert", "XFT's text leaves it open",
        "baselines.to_ewa(model, partition='router')",
    ),
    "init": Baseline("INIT", "merged as learning begins, nothing learned", "XFT, Table 5", "xft.merge(model)"),
    "soup": Baseline(
        "learned soup", "the shared expert's coefficient is learned too", "XFT, Table 5; model soups, arXiv 2203.05482",
        "xft.to_mergeable(model, soup=True)",
    ),
    "uniform": Baseline(
        "uniform mean", "all experts count alike, nothing learned", "model soups, arXiv 2203.05482",
        "xft.merge(model, alpha='uniform')",
    ),
    "lambda_0": Baseline(
        "lambda 0", "without the shared expert", "XFT, Table 6", "xft.to_mergeable(model, shared_rate=0.0)"
    ),
    "lambda_1": Baseline("lambda 1", "the shared expert alone", "XFT, Table 6", "xft.merge(model, shared_rate=1.0)"),
    "lora": Baseline("LoRA", "low-rank pairs on the MLPs", "UpIT, arXiv 2410.01610, Table 1", "baselines.to_lora(model)"),
    "loramoe_pt": Baseline(
        "LoRAMoE, PT", "fresh pairs as experts, a router per MLP, two experts per token",
        "UpIT, arXiv 2410.01610, Table 1; LoRAMoE, arXiv 2312.09979", "baselines.to_lora_moe(model, num_experts=8, top_k=2)",
    ),
    "loramoe_sft": Baseline(
        "LoRAMoE, SFT", "the same, of equal copies of one tuned LoRA",
        "UpIT, arXiv 2410.01610, Table 1; LoRAMoE, arXiv 2312.09979",
        "baselines.to_lora_moe(model, experts=[adapter] * 8, top_k=2)",
    ),
    "loramoe_dense": Baseline(
        "LoRAMoE", "a router per linear layer, all experts by their softmax", "LoRAMoE, arXiv 2312.09979",
        "baselines.to_lora_moe(model, num_experts=8, top_k=None, form='linear', rank=4, alpha=32)",
    ),
}  # fmt: skip


def to_ewa(
    model: nn.Module,
    *,
    num_experts: int = 8,
    partition: str = "random",
    layers: Sequence[int] | None = None,
    seed: int = 42,
) -> xft.UpcycleReceipt:
    """Replace the MLPs of a dense transformers model by EWA's experts, in place, and measure what changed.

    partition "random" deals the tokens of each batch out to the experts, each to one, and runs the mean expert in eval mode;
    "router" makes an ordinary upcycled model of gate topk_softmax with one expert per token, whose router, the weight
    of one expert always being 1, has no gradient; `seed` draws it. Neither averages yet: `average_after_steps` does.
    Raises ValueError, with the model untouched, for what `xft.upcycle` refuses.
    """
    check_choice("partition", partition, PARTITIONS)
    config = xft.config_for(model, num_experts=num_experts, top_k=1, gate="topk_softmax")
    stage = "ewa" if partition == "random" else "moe"
    return xft.upcycle_to(stage, model, config, layers=layers, seed=seed, method="ewa")
