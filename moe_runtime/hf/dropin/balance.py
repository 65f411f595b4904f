"""Balance losses for the stock MoE models of transformers: their pooled loss, and one per layer.

    loss = lm_loss + coef * aux_loss,    aux_loss = pooled_loss or per_layer_loss of the router
                                         logits (moe_runtime.ops.balance)

`use_balance_loss` works for families with an auxiliary loss, which it replaces, and for families
without one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from moe_runtime.config import check_choice, check_number
from moe_runtime.hf.common.outputs import check_gradients, share_of_batch
from moe_runtime.hf.dropin.layers import (
    OpenCall,
    RoutedLayer,
    block_of,
    forget_compiled,
    ids_of,
    routed_layers,
    token_mask,
)
from moe_runtime.ops import balance

KINDS = ("per_layer", "pooled")
Place = Callable[[Sequence], Tensor]  # finds the logits in the output of a router
_FIELDS = ("router_aux_loss_coef", "output_router_logits")
_MISSING = object()


class BalanceLoss:
    """An active balance loss of a model, created by `use_balance_loss`; `close` restores the model.

    A router that returns probabilities (Gemma 4's) is detected at its first call, and their
    logarithm is used as logits.
    """

    def __init__(self, model: PreTrainedModel, kind: str, coef: float):
        self.model = model
        self.kind = kind
        self.coef = coef
        layers = [layer for layer in routed_layers(model).values() if layer.is_stock]
        self.routers = routers_of(model, layers)
        if not self.routers or not layers:
            missing = "routers" if layers else "MoE layers"
            raise ValueError(
                f"{type(model).__name__} has no {missing} of a stock MoE model of transformers. "
                "For layers of moe_runtime set MoEConfig(balance_loss=...)"
            )
        self._logits: list[Tensor] = []
        self._top_k = 1
        self._kwargs = {}
        self._wanted = False
        self._as_tuple = False
        self._softmaxed: dict[type, bool] = {}  # by the router's class, known after its first call
        forget_compiled()
        self._call = OpenCall(model, leave=self._forget)
        self._handles = [
            model.register_forward_pre_hook(self._prepare, with_kwargs=True),
            # before the call closes
            model.register_forward_hook(self._add, prepend=True),
            layers[0].module.register_forward_pre_hook(self._count, with_kwargs=True),
        ]
        for router, pick in self.routers:
            catch = functools.partial(self._catch, pick)
            self._handles.append(router.register_forward_hook(catch))
        self._before = self._take_over()

    def _take_over(self) -> list[tuple]:
        """Set the coefficient where TRL reads it, and return the previous values."""
        config = self.model.config.get_text_config()
        before = [(config, name, config.__dict__.get(name, _MISSING)) for name in _FIELDS]
        config.router_aux_loss_coef = self.coef
        # TRL requests an auxiliary loss if the config has this field
        config.output_router_logits = getattr(config, "output_router_logits", False)
        return before

    def close(self) -> None:
        """Remove the hooks and restore the config."""
        self._call.close()
        for handle in self._handles:
            handle.remove()
        for config, name, value in self._before:
            config.__dict__.pop(name, None)
            if value is not _MISSING:
                setattr(config, name, value)
        self._before = []

    def _prepare(self, module, args, kwargs):
        names = self._call.names
        named = self._call.named(args, kwargs)
        config = self.model.config
        with_logits = named.get("output_router_logits")
        if with_logits is None:
            with_logits = config.get_text_config().output_router_logits
        as_dict = named.get("return_dict")
        if as_dict is None:
            as_dict = config.return_dict
        self._wanted = bool(with_logits)
        self._as_tuple = not as_dict
        self._kwargs = named
        changes = {}
        if "output_router_logits" in (*names, *named):
            # the model's auxiliary loss would be added as well
            changes["output_router_logits"] = False
        if self._as_tuple:
            # the parts of a tuple have no names, so it is built after the loss is added
            changes["return_dict"] = True
        if any(name in names[: len(args)] for name in changes):
            return (), named | changes
        return args, kwargs | changes

    def _catch(self, pick: Place, module, args, out) -> None:
        if self._call.is_open:
            self._logits.append(self._as_logits(type(module), _scores(pick, out)))

    def _as_logits(self, router: type, scores: Tensor) -> Tensor:
        """Return `scores` [T, E], or their logarithm if the router has applied a softmax."""
        softmaxed = self._softmaxed.get(router)
        if softmaxed is None:
            softmaxed = _are_probabilities(scores)
            if torch.compiler.is_compiling():
                # compiled code cannot branch on values
                return torch.where(softmaxed, _log(scores), scores)
            if scores.numel():
                self._softmaxed[router] = softmaxed = bool(softmaxed)
        return _log(scores) if softmaxed else scores

    def _count(self, module, args, kwargs) -> None:
        self._top_k = ids_of(args, kwargs).shape[-1]

    def _forget(self) -> None:
        self._logits = []
        self._kwargs = {}

    def _add(self, module, args, out):
        """Add the loss to the model's output, and convert it to a tuple if one was requested."""
        logits = self._logits
        if not isinstance(out, ModelOutput):
            if logits:
                raise ValueError(
                    f"{type(module).__name__} must return a ModelOutput, but returned a "
                    f"{type(out).__name__}"
                )
            return None
        loss = out.get("loss")
        if logits and (loss is not None or self._wanted):
            self._complete(out, logits, loss)
        return out.to_tuple() if self._as_tuple else out

    def _complete(self, out: ModelOutput, logits: list[Tensor], loss: Tensor | None) -> None:
        parameters = []
        for router, _ in self.routers:
            parameters += router.parameters()
        check_gradients(parameters, logits)
        aux_loss = self._loss(logits)
        if self._wanted:
            out["aux_loss"] = aux_loss
            if hasattr(out, "router_logits"):
                out["router_logits"] = tuple(logits)
        else:
            # not an item, which evaluation would treat as a prediction
            out.aux_loss = aux_loss
        if loss is not None:
            share = share_of_batch(self._kwargs, loss.device)
            out.lm_loss = loss
            out["loss"] = loss + self.coef * share * aux_loss.to(loss.device)

    def _loss(self, logits: list[Tensor]) -> Tensor:
        rows = {len(layer) for layer in logits}
        experts = {layer.shape[1] for layer in logits}
        if self.kind == "pooled" and len(experts) > 1:
            raise ValueError(
                "kind 'pooled' requires the same number of experts in all layers, but got "
                f"{sorted(experts)}"
            )
        mask = token_mask(self._call.mask, rows.pop()) if len(rows) == 1 else None
        if self.kind == "per_layer":
            return balance.per_layer_loss(logits, self._top_k, mask)
        return balance.pooled_loss(logits, self._top_k, mask)


def use_balance_loss(
    model: nn.Module, kind: str = "per_layer", coef: float | None = None
) -> BalanceLoss:
    """Add a balance loss to the loss of a stock MoE model, in place of its own auxiliary loss.

    The model's output has the parts as `lm_loss` and `aux_loss` (without coef). Works with Trainer
    and, if called before its construction, with TRL's SFTTrainer; the loss is averaged over the
    micro-batches of a step.

    Args:
        model: A stock MoE model.
        kind: "per_layer", the mean of the layers' own losses, or "pooled", transformers' formula
            over the tokens of all layers together.
        coef: Weight in the loss; None is the config's router_aux_loss_coef.

    Returns:
        A handle, whose `close` restores the model.

    Raises:
        ValueError: For a model without routers, or without a coef.
    """
    check_choice("kind", kind, KINDS)
    model = _unwrap(model)
    for hook in list(model._forward_hooks.values()):
        if isinstance(getattr(hook, "__self__", None), BalanceLoss):
            hook.__self__.close()
    if coef is None:
        coef = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    check_number("coef", coef, positive=True)
    return BalanceLoss(model, kind, float(coef))


def _unwrap(model: nn.Module) -> PreTrainedModel:
    """Return transformers' model inside a PEFT, DDP or torch.compile wrapper."""
    for inner in model.modules():
        if isinstance(inner, PreTrainedModel):
            return inner
    raise ValueError(
        "Expected a model of transformers, or PEFT or DDP around one, but got "
        f"{type(model).__name__}"
    )


def routers_of(model: PreTrainedModel, layers: list[RoutedLayer]) -> list[tuple[nn.Module, Place]]:
    """List the modules in the blocks of `layers` that return router logits, found by their names,
    and the place of the logits in the output.
    """
    routers = {}
    for layer in layers:
        for name, module in block_of(model, layer).named_children():
            kind = type(module).__name__.lower()
            if hasattr(module, "tid2eid"):
                continue  # the token's id chooses its experts, whatever the logits are
            if name in ("gate", "router") or "router" in kind or "gating" in kind:
                routers[module] = functools.partial(_first_as_wide, layer.num_experts)
    return list(routers.items())


def logits_of(pick: Place, out: Any) -> Tensor:
    """Return the logits [T, E] in a router's output, or the logarithm of its probabilities."""
    scores = _scores(pick, out)
    return _log(scores) if _are_probabilities(scores) else scores


def _scores(pick: Place, out: Any) -> Tensor:
    """Return what a router returned for each expert, [T, E]."""
    scores = pick(out if isinstance(out, (tuple, list)) else (out,))
    return scores.reshape(-1, scores.shape[-1])


def _first_as_wide(E: int, parts: Sequence) -> Tensor:
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point() and part.shape[-1] >= E:
            return part
    raise ValueError(f"A router returned no scores of {E} experts")


def _are_probabilities(scores: Tensor) -> Tensor:
    """Return whether all rows of `scores` [T, E] are distributions, [] bool, to the precision of
    bfloat16.
    """
    sums = scores.float().sum(-1)
    return (scores >= 0).all() & ((sums - 1).abs() < 1e-2).all()


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
