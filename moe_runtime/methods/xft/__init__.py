"""XFT: upcycle a dense model, tune it, learn how to mix its experts, merge it back to a dense
model.

    upcycle       every MLP becomes E copies of itself behind a router     Sec. 3.1, Eq. (1), (2)
    (tune)        instruction tuning of all parameters, with any trainer
    to_mergeable  MLP weights become sum_e alpha_e W_e, alpha learnable    Sec. 3.2, Eq. (4) to (6)
    (tune)        the mixing logits alone, on the same data, with any trainer
    merge         the dense model of Eq. (3), in the base's own architecture

`moe_runtime.methods.xft.folders` does the same from disk to disk, for models that do not fit into
memory.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from moe_runtime.config import MoEConfig
from moe_runtime.hf.dropin.layers import sizes
from moe_runtime.hf.models import families, swap
from moe_runtime.hf.models.configuration import write_legacy_rope
from moe_runtime.hf.models.folders import probe_logits
from moe_runtime.io.files import atomic_folder
from moe_runtime.modules.ewa import EWAMLP
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.modules.moe import MoE
from moe_runtime.ops.merging import alpha_rows, check_mixture, init_mixture, merge_experts

# a token's weights sum to 1, so equal experts are the dense MLP
EXACT_GATES = ("xft", "topk_softmax", "softmax_topk_renorm")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpcycleReceipt:
    """What `upcycle` changed, and how far the logits moved; print it for a summary.

    Attributes:
        config: Of the MoE layers.
        layers: Numbers of the layers whose MLP was replaced.
        dense_parameters: Number of parameters before.
        moe_parameters: Number of parameters after.
        active_parameters: Number of parameters that one token passes through.
        copied: Names of the expert stacks, which hold E copies of the dense MLP each.
        drawn: Names of the randomly initialized router tensors.
        error: ||upcycled - dense|| / ||dense|| of the logits of a probe batch.
        preserves: Whether a token's weights sum to 1, so that the error can only be rounding.
    """

    config: MoEConfig
    layers: tuple[int, ...]
    dense_parameters: int
    moe_parameters: int
    active_parameters: int  # used per token
    copied: tuple[str, ...]  # expert stacks, E copies of the dense MLP each
    drawn: tuple[str, ...]  # randomly initialized router tensors
    error: float  # ||upcycled - dense|| / ||dense|| of the logits of the probe batch
    preserves: bool  # whether the gate's weights sum to 1, so that the error can only be rounding

    def __str__(self) -> str:
        """Return the receipt as a few lines of text."""
        c = self.config
        if not math.isfinite(self.error):
            what = (
                "the dense model's own logits, or the new one's, are not finite: look for broken "
                "weights outside of the MLPs"
            )
        elif not self.preserves:
            what = f"gate {c.gate} does not preserve the dense model's scale"
        elif self.error < 1e-5:
            what = "rounding only"
        else:
            what = "the rounding of a narrow dtype, or more"
        return (
            f"upcycled {len(self.layers)} layers: {c.num_experts} experts, {c.top_k} per token, "
            f"gate {c.gate}\n"
            f"parameters: {self.dense_parameters:,} dense -> {self.moe_parameters:,}, "
            f"{self.active_parameters:,} active\n"
            f"copied {len(self.copied)} expert stacks, initialized {len(self.drawn)} router "
            "tensors\n"
            f"upcycled against dense logits: relative error {self.error:.1e} ({what})"
        )


def config_for(model: nn.Module, **settings: Any) -> MoEConfig:
    """Return the MoEConfig for a dense transformers model.

    Args:
        model: A model of a supported architecture; its sizes, activation and biases are read.
        settings: The other fields of MoEConfig, such as num_experts=8.

    Returns:
        A config for `upcycle`.

    Raises:
        ValueError: If the architecture is not supported, or a setting is invalid.
    """
    families.check_module(model)
    return MoEConfig(**families.moe_shape(families.family_of(model), model.config), **settings)


def upcycle(
    model: nn.Module,
    config: MoEConfig | None = None,
    *,
    layers: Sequence[int] | None = None,
    seed: int = 42,
    **settings: Any,
) -> UpcycleReceipt:
    """Replace the MLPs of a dense transformers model by MoE layers, in place (XFT, Sec. 3.1).

    Every expert is a copy of the MLP, so that the MoE model computes what the dense one did; the
    receipt says how exactly.

    Args:
        model: A dense causal language model of a supported architecture.
        config: The MoE layers' settings, such as those of `config_for`.
        layers: Numbers of the layers to upcycle; None is all.
        seed: Initializes the routers.
        settings: Fields of MoEConfig, in place of `config`: num_experts=8, top_k=6, gate="xft" and
            so on.

    Returns:
        The sizes before and after, and the relative error of the logits.

    Raises:
        ValueError: With the model unchanged, if the architecture is not supported, an MLP does not
            compute what its family's should, or the config does not fit.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
        >>> print(xft.upcycle(model, num_experts=8, top_k=6))
    """
    if config is not None and settings:
        raise ValueError(
            f"Pass either config or separate settings, but got config and {', '.join(settings)}"
        )
    families.check_module(model)
    family = families.family_of(model)
    config = config or MoEConfig(**families.moe_shape(family, model.config), **settings)
    return upcycle_to("moe", model, family, config, layers=layers, seed=seed)


def upcycle_to(
    stage: str, model: nn.Module, family: families.Family, config: MoEConfig, **options: Any
) -> UpcycleReceipt:
    """Call `swap.dense_to_moe` with `options` on a dense model of `family` and measure what
    changed.
    """
    swap.check_stock(model, family, config, options.get("layers"))
    before = probe_logits(model)
    dense_parameters = sum(parameter.numel() for parameter in model.parameters())
    swap.dense_to_moe(model, config, stage=stage, family=family, **options)
    after = probe_logits(model)
    moe_parameters, active_parameters = sizes(model)
    layers = {family.path.format(layer): layer for layer in model.config.moe_runtime["layers"]}
    names = [name for name, _ in model.named_parameters()]
    return UpcycleReceipt(
        config=config,
        layers=tuple(layers.values()),
        dense_parameters=dense_parameters,
        moe_parameters=moe_parameters,
        active_parameters=active_parameters,
        copied=tuple(name for name in names if name.partition(".experts.")[0] in layers),
        drawn=tuple(name for name in names if name.partition(".gate.")[0] in layers),
        error=((after - before).norm() / before.norm()).item(),
        preserves=stage == "ewa" or config.gate in EXACT_GATES,
    )


def to_mergeable(model: nn.Module, shared_rate: float = 0.75, soup: bool = False) -> nn.Module:
    """Replace the experts by learnable mixing coefficients of them, in place (XFT, Sec. 3.2).

    One float32 logit for each routed expert and layer trains, with a learning rate of 1e-2 for
    example; everything else is frozen.

    Args:
        model: An upcycled model.
        shared_rate: lambda of Eq. (5), the shared expert's coefficient, 0 to 1.
        soup: Whether to learn the coefficients of all experts, from the same initial values
            (learned soup). Required for a gate without a shared expert.

    Returns:
        The same model.

    Raises:
        ValueError: If the model is not an upcycled one, or the gate needs soup=True.
    """
    swap.moe_to_mergeable(model, shared_rate=shared_rate, soup=soup)
    return model


def mixing_coefficients(model: nn.Module) -> torch.Tensor:
    """Return the mixing coefficients of a mergeable model.

    Args:
        model: A model after `to_mergeable`.

    Returns:
        alpha [L, E] float32 on the CPU, a row for each layer; the shared expert comes first.

    Raises:
        ValueError: If the model has no mergeable layers.
    """
    rows = [
        module.alpha().detach().cpu() for module in model.modules() if isinstance(module, MergedMLP)
    ]
    if not rows:
        raise ValueError(f"{type(model).__name__} has no mergeable layers. Call to_mergeable first")
    return torch.stack(rows)


# largest change of a mixing coefficient that counts as none: 2e-5, TRL's learning rate, moves it
# less
UNMOVED = 1e-4


def distance_moved(alphas: Sequence[torch.Tensor], shared_rate: float) -> float:
    """Return the largest distance of learned coefficients [E], one per layer, from the initial
    ones.
    """
    experts = len(alphas[0])
    rest = (1 - shared_rate) / max(experts - 1, 1)
    initial = torch.tensor([shared_rate] + [rest] * (experts - 1)) if experts > 1 else torch.ones(1)
    return max((alpha.detach().float().cpu() - initial).abs().max().item() for alpha in alphas)


def merge(
    model: nn.Module,
    shared_rate: float | None = None,
    alpha: torch.Tensor | Sequence[float] | str | None = None,
) -> nn.Module:
    """Merge the experts of every layer to a dense MLP, in place: XFT's Eq. (3).

    A mergeable model uses its learned coefficients, with a warning where learning has hardly moved
    them; an EWA model uses its experts' mean. An upcycled model is merged without learning: the
    shared expert gets `shared_rate`, the others equal parts of the rest.

    Args:
        model: An upcycled, mergeable or EWA model.
        shared_rate: The shared expert's coefficient for an upcycled model; None is 0.75.
        alpha: Coefficients that override all others, [E] or [L, E] with sums of 1, or "uniform".

    Returns:
        The same model, dense, in the base's own architecture.

    Raises:
        ValueError: With the model unchanged, if it has no experts, if `shared_rate` would have no
            effect, or if coefficients are not finite or do not sum to 1.
    """
    families.check_module(model)
    block = getattr(getattr(model, "config", None), "moe_runtime", {"stage": "moe"})
    shared_rate = check_rate(shared_rate, alpha, block["stage"])
    layers = [module for module in model.modules() if isinstance(module, MoE | MergedMLP | EWAMLP)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no experts. Pass an upcycled or a mergeable model"
        )
    if alpha is None:
        rows = [None] * len(layers)
    else:
        rows = alpha_rows(alpha, len(layers), layers[0].config.num_experts)
    learned = []
    for name, layer in model.named_modules() if alpha is None else ():
        if isinstance(layer, MergedMLP):
            learned.append(check_mixture(layer.alpha().detach(), name))
    moved = distance_moved(learned, layers[0].shared_rate) if learned else math.inf
    if moved <= UNMOVED:
        warnings.warn(
            f"The mixing coefficients are within {moved:.1e} of the initial coefficients. Learn to "
            "mix before merging, with a larger learning rate, such as 1e-2",
            stacklevel=2,
        )
    given = {id(layer): row for layer, row in zip(layers, rows, strict=True)}
    return swap.moe_to_dense(
        model, lambda layer: merged_weights(layer, shared_rate, given[id(layer)])
    )


def check_rate(shared_rate: float | None, alpha: Tensor, stage: str) -> float:
    """Return the shared rate of an INIT merge (default: 0.75); raises ValueError if it would have
    no effect.
    """
    if stage == "lora":
        raise ValueError(
            "The model's stage is 'lora', but whole experts are required. Merge LoRA experts with "
            "lora.merge"
        )
    if shared_rate is not None and (stage != "moe" or alpha is not None):
        raise ValueError(
            f"shared_rate must be None, but got {shared_rate}: the coefficients of a model of "
            f"stage {stage!r}, or alpha, decide"
        )
    return 0.75 if shared_rate is None else shared_rate


def save_dense(
    model: nn.Module,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
) -> None:
    """Save a dense model, atomically, for transformers 4 and 5.

    transformers 5 writes only `rope_parameters`, which older readers ignore, falling back to their
    default base; this also writes the older keys.

    Args:
        model: A dense model, such as that of `merge`.
        folder: The folder to write.
        tokenizer: Saved beside the model, if given.
        overwrite: Whether to replace an existing folder.

    Raises:
        ValueError: If the model still has experts.
    """
    families.check_module(model)
    block = getattr(getattr(model, "config", None), "moe_runtime", None)
    if block is not None:
        raise ValueError(
            f"{type(model).__name__} has experts (stage {block['stage']!r}). Merge it first, with "
            "xft.merge or lora.merge, or save it with model.save_pretrained"
        )
    with atomic_folder(folder, overwrite) as new:
        model.save_pretrained(new)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        write_legacy_rope(new)


@torch.no_grad()
def merged_weights(
    layer: MoE | MergedMLP | EWAMLP, shared_rate: float = 0.75, alpha: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return one dense weight per expert stack of the layer, [E, ...] -> [...], under the stack's
    name and in its dtype.

    `alpha` [E] overrides the layer's own coefficients, or INIT's by `shared_rate`. XFT, Eq. (3); no
    gradient.
    """
    if alpha is None and isinstance(layer, MoE):
        alpha = init_mixture(layer.config, shared_rate)
    elif alpha is None:
        alpha = layer.alpha()
    alpha = alpha.to(layer.experts.down_proj.device)
    weights = {}
    for name, weight in layer.experts.named_parameters():
        weights[name] = merge_experts(weight.detach(), alpha)
    return weights
