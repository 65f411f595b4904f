"""What an upcycled model returns, and the auxiliary part of its loss.

    loss     = lm_loss + aux_loss
    aux_loss = sum over layers of RouterOutput.balance_loss + router_aux_loss_coef * pooled

pooled is `ops.balance.pooled_loss`, transformers' loss over the router logits of all layers together (Switch, Eq. (4) to (6)).
"""

from dataclasses import dataclass

import torch
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

from moe_runtime.modules.moe import MoE, RouterOutput
from moe_runtime.ops.balance import pooled_loss


@dataclass
class MoeRuntimeModelOutput(MoeModelOutputWithPast):
    """What the inner model returns; `balance_loss` is the layers' sum, coefficients included."""

    balance_loss: torch.FloatTensor | None = None


@dataclass
class MoeRuntimeCausalLMOutput(MoeCausalLMOutputWithPast):
    """`loss` is `lm_loss` plus `aux_loss`: balance losses and pooled loss, with their coefficients."""

    lm_loss: torch.FloatTensor | None = None


def refuse_lost_gradients(blocks: list[MoE], records: list[RouterOutput]) -> None:
    """Raise ValueError if checkpointing with use_reentrant=True cut the routers' outputs off the graph."""
    check_gradients([p for block in blocks for p in block.gate.parameters()], [r.router_logits for r in records])


def check_gradients(parameters: list[torch.nn.Parameter], router_logits: list[torch.Tensor]) -> None:
    """Raise ValueError if routers with these `parameters` train but their logits are off the graph."""
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
    if trains and router_logits and not any(logits.requires_grad for logits in router_logits):
        raise ValueError(
            "use_reentrant is True for gradient checkpointing; want False with a balance loss or router_aux_loss_coef, "
            "whose gradient would be lost; pass gradient_checkpointing_kwargs={'use_reentrant': False}"
        )


def sum_balance_losses(records: list[RouterOutput]) -> torch.Tensor | None:
    """Sum the layers' balance losses on the first one's device; None if no layer has one."""
    losses = [record.balance_loss for record in records if record.balance_loss is not None]
    return sum(loss.to(losses[0].device) for loss in losses) if losses else None


def aux_loss(config, records, logits, attention_mask, device) -> torch.Tensor:
    """The auxiliary part of the loss, [] float32: balance losses and the pooled loss, each with its coefficient."""
    balance = sum_balance_losses(records)
    aux = torch.zeros((), device=device) if balance is None else balance.to(device)
    if not config.router_aux_loss_coef or not config.num_experts_per_tok:
        return aux
    rows = logits[0].shape[0]
    fits = attention_mask is not None and attention_mask.dim() == 2 and attention_mask.numel() == rows
    mask = attention_mask.reshape(-1) if fits else None
    pooled = pooled_loss(logits, config.num_experts_per_tok, mask)
    return aux + config.router_aux_loss_coef * pooled.to(device)


def share_of_batch(kwargs: dict, device) -> torch.Tensor | float:
    """Which part of the step's tokens this call holds; 1 unless Trainer says by num_items_in_batch that there are more.

    The base's loss is then a sum over num_items_in_batch; without this factor, gradient accumulation over n calls would
    count an auxiliary loss n times.
    """
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("shift_labels")
    if items is None:
        return 1.0
    labels = kwargs["labels"][..., 1:] if labels is None else labels
    items = items.to(device) if isinstance(items, torch.Tensor) else items
    return labels.ne(-100).sum().to(device) / items
