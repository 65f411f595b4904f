"""Balance losses for the stock MoE models of transformers: the pooled one that they have, and one per layer.

    loss = lm_loss + coef * aux_loss,    aux_loss = pooled_loss or per_layer_loss of the router logits (moe_runtime.ops.balance)

`use_balance_loss` takes the logits where the model's own class says that its router gives them, so it works for families that
compute an auxiliary loss of their own, whose place it takes, and for those that have none.
"""

import functools
import re
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from moe_runtime.config import check_choice, check_number
from moe_runtime.hf.dropin.experts import is_experts
from moe_runtime.hf.dropin.layers import OpenCall, RoutedLayer, block_of, forget_compiled, ids_of, routed_layers, token_mask
from moe_runtime.hf.models import modeling
from moe_runtime.ops import balance

KINDS = ("per_layer", "pooled")
Place = Callable[[Sequence], torch.Tensor]  # finds the logits in what a router returns
_FIELDS = ("router_aux_loss_coef", "output_router_logits")
_MISSING = object()


def pooled_loss(
    router_logits: Sequence[torch.Tensor], num_experts: int, top_k: int, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """transformers' auxiliary loss of L router logits [T, E], with its means over all layers together, [] float32.

    `attention_mask` [B, S] leaves padding out. `top_k` when balanced, and also when the layers' imbalances cancel.
    """
    return balance.pooled_loss(router_logits, top_k, _checked(router_logits, num_experts, top_k, attention_mask))


def per_layer_loss(
    router_logits: Sequence[torch.Tensor], num_experts: int, top_k: int, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The mean of the layers' own auxiliary losses, of L router logits [T, E], [] float32; `top_k` when all are balanced."""
    return balance.per_layer_loss(router_logits, top_k, _checked(router_logits, num_experts, top_k, attention_mask))


def _checked(router_logits, num_experts: int, top_k: int, attention_mask) -> torch.Tensor | None:
    shapes = sorted({tuple(logits.shape) for logits in router_logits})
    fits = len(shapes) == 1 and shapes[0][1:] == (num_experts,) and 1 <= top_k <= num_experts
    if not fits or (attention_mask is not None and attention_mask.numel() != shapes[0][0]):
        got = "" if attention_mask is None else f", attention_mask is {tuple(attention_mask.shape)}"
        raise ValueError(
            f"router_logits are {shapes}, num_experts is {num_experts}, top_k is {top_k}{got}; want one [T, {num_experts}] per "
            "layer, 1 <= top_k <= num_experts and an attention_mask [B, S] with B S = T"
        )
    return None if attention_mask is None else attention_mask.reshape(-1) != 0


class BalanceLoss:
    """A model's balance loss while it is in use; `close` gives the model back as it was. Made by `use_balance_loss`.

    A router that gives probabilities (Gemma 4's) is known by its first call, and their logarithm is taken for logits.
    """

    def __init__(self, model: PreTrainedModel, kind: str, coef: float):
        self.model, self.kind, self.coef = model, kind, coef
        layers = [layer for layer in routed_layers(model).values() if layer.is_stock]
        self.routers = _declared_routers(model) or _routers_beside(model, layers)
        if not self.routers or not layers:
            raise ValueError(
                f"model is {type(model).__name__}, {'whose routers' if layers else 'whose MoE layers'} transformers "
                "does not know; want a stock MoE model; for our own layers set MoEConfig(balance_loss=...)"
            )
        self._logits: list[torch.Tensor] = []
        self._top_k, self._kwargs, self._wanted, self._as_tuple = 1, {}, False, False
        self._softmaxed: dict[type, bool] = {}  # by the router's class, once it was called
        forget_compiled()
        self._call = OpenCall(model, leave=self._forget)
        self._handles = [
            model.register_forward_pre_hook(self._prepare, with_kwargs=True),
            # before the call closes
            model.register_forward_hook(self._add, prepend=True),
            *(module.register_forward_hook(functools.partial(self._catch, i)) for module, i in self.routers),
            layers[0].module.register_forward_pre_hook(self._count, with_kwargs=True),
        ]
        self._before = self._take_over()

    def _take_over(self) -> list[tuple]:
        """Put the coefficient where TRL reads it, and return what was there."""
        config = self.model.config.get_text_config()
        before = [(config, name, config.__dict__.get(name, _MISSING)) for name in _FIELDS]
        config.router_aux_loss_coef = self.coef
        # TRL asks for an auxiliary loss where the config has this field
        config.output_router_logits = getattr(config, "output_router_logits", False)
        return before

    def close(self) -> None:
        """Take the hooks away and give the config its values back."""
        self._call.close()
        for handle in self._handles:
            handle.remove()
        for config, name, value in self._before:
            config.__dict__.pop(name, None)
            if value is not _MISSING:
                setattr(config, name, value)
        self._before = []

    def _prepare(self, module, args, kwargs):
        names, named, config = self._call.names, self._call.named(args, kwargs), self.model.config
        asked, as_dict = named.get("output_router_logits"), named.get("return_dict")
        self._wanted = bool(config.get_text_config().output_router_logits if asked is None else asked)
        self._as_tuple = not (config.return_dict if as_dict is None else as_dict)
        self._kwargs = named
        # the model's own auxiliary loss would come on top
        changes = {"output_router_logits": False} if asked or "output_router_logits" in names else {}
        if self._as_tuple:
            # a tuple does not say what its parts are; it is made when the loss is in
            changes["return_dict"] = True
        if any(name in names[: len(args)] for name in changes):
            args, kwargs = (), named
        return args, kwargs | changes

    def _catch(self, place: Place, module, args, out) -> None:
        if self._call.is_open:
            parts = out if isinstance(out, (tuple, list)) else (out,)
            found = place(parts)
            self._logits.append(self._as_logits(type(module), found.reshape(-1, found.shape[-1])))

    def _as_logits(self, router: type, found: torch.Tensor) -> torch.Tensor:
        """Return `found` [T, E], or its logarithm if the router's softmax is in it already."""
        softmaxed = self._softmaxed.get(router)
        if softmaxed is None:
            softmaxed = _are_probabilities(found)
            if torch.compiler.is_compiling():
                # compiled code cannot choose by values
                return torch.where(softmaxed, _log(found), found)
            if found.numel():
                self._softmaxed[router] = softmaxed = bool(softmaxed)
        return _log(found) if softmaxed else found

    def _count(self, module, args, kwargs) -> None:
        self._top_k = ids_of(args, kwargs).shape[-1]

    def _forget(self) -> None:
        self._logits, self._kwargs = [], {}

    def _add(self, module, args, out):
        """Put the loss into what the model returns, and make that the tuple which was asked for."""
        logits = self._logits
        if not isinstance(out, ModelOutput):
            if logits:
                raise ValueError(f"{type(module).__name__} returns a {type(out).__name__}; want a ModelOutput")
            return None
        loss = out.get("loss")
        if logits and (loss is not None or self._wanted):
            self._complete(out, logits, loss)
        return out.to_tuple() if self._as_tuple else out

    def _complete(self, out: ModelOutput, logits: list[torch.Tensor], loss: torch.Tensor | None) -> None:
        modeling.check_gradients([p for router, _ in self.routers for p in router.parameters()], logits)
        aux_loss = self._loss(logits)
        if self._wanted:
            out["aux_loss"] = aux_loss
            if hasattr(out, "router_logits"):
                out["router_logits"] = tuple(logits)
        else:
            # no item: evaluation would take it for a prediction
            out.aux_loss = aux_loss
        if loss is not None:
            share = modeling.share_of_batch(self._kwargs, loss.device)
            out.lm_loss = loss
            out["loss"] = loss + self.coef * share * aux_loss.to(loss.device)

    def _loss(self, logits: list[torch.Tensor]) -> torch.Tensor:
        rows, experts = {len(layer) for layer in logits}, {layer.shape[1] for layer in logits}
        if self.kind == "pooled" and len(experts) > 1:
            raise ValueError(f"the layers have {sorted(experts)} experts, kind is 'pooled'; want 'per_layer'")
        mask = token_mask(self._call.mask, rows.pop()) if len(rows) == 1 else None
        function = balance.per_layer_loss if self.kind == "per_layer" else balance.pooled_loss
        return function(logits, self._top_k, mask)


def use_balance_loss(model: nn.Module, kind: str = "per_layer", coef: float | None = None) -> BalanceLoss:
    """Add coef * (per-layer or pooled loss) to the loss that a stock MoE model returns, in place of its own auxiliary loss.

    `coef` is the config's router_aux_loss_coef unless given. The model's output has the parts as `lm_loss` and `aux_loss`
    (without coef). Works with Trainer and, set before it is made, TRL's SFTTrainer; over the micro-batches of a step
    the loss is a mean. Raises ValueError for a model whose router logits transformers does not know, or without a coef.
    """
    check_choice("kind", kind, KINDS)
    model = _unwrap(model)
    for hook in list(model._forward_hooks.values()):
        if isinstance(getattr(hook, "__self__", None), BalanceLoss):
            hook.__self__.close()
    coef = getattr(model.config.get_text_config(), "router_aux_loss_coef", None) if coef is None else coef
    check_number("coef", coef, positive=True)
    return BalanceLoss(model, kind, float(coef))


def _unwrap(model: nn.Module) -> PreTrainedModel:
    """Find transformers' model inside PEFT's, DDP's or torch.compile's."""
    inner = model
    while not isinstance(inner, PreTrainedModel):
        parts = [getattr(inner, name, None) for name in ("module", "_orig_mod", "model")]
        get = getattr(inner, "get_base_model", None)
        inner = get() if get is not None else next((part for part in parts if isinstance(part, nn.Module)), None)
        if inner is None:
            raise ValueError(f"model is {type(model).__name__}; want a model of transformers, or PEFT or DDP around one")
    return inner


def _declared_routers(model: PreTrainedModel) -> list[tuple[nn.Module, Place]]:
    """List the modules that give router logits, and at which place of their output, as the model's classes say."""
    found = {}
    for part in model.modules():
        specs = getattr(part, "_can_record_outputs", None) if isinstance(part, PreTrainedModel) else None
        specs = (specs or {}).get("router_logits", [])
        for spec in specs if isinstance(specs, list) else [specs]:
            for name, module in part.named_modules():
                # not one that names the whole block, whose output is no router's
                if _matches(spec, name, module) and not any(map(is_experts, module.modules())):
                    found[module] = functools.partial(_at, getattr(spec, "index", 1))
    return list(found.items())


def _routers_beside(model: PreTrainedModel, layers: list[RoutedLayer]) -> list[tuple[nn.Module, Place]]:
    """The same for classes that say nothing: the routers, by their names, in the blocks of `layers`."""
    found = {}
    for layer in layers:
        for name, module in block_of(model, layer).named_children():
            if name in ("gate", "router") or re.search("router|gating", type(module).__name__, re.IGNORECASE):
                found[module] = functools.partial(_first_as_wide, layer.num_experts)
    return list(found.items())


# not operator.itemgetter, which torch.compile cannot trace
def _at(index: int, parts: Sequence) -> torch.Tensor:
    return parts[index]


def _first_as_wide(E: int, parts: Sequence) -> torch.Tensor:
    floats = (part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point())
    return next(part for part in floats if part.shape[-1] >= E)


def _are_probabilities(found: torch.Tensor) -> torch.Tensor:
    """Whether all rows of `found` [T, E] are distributions, [] bool; the sum of bfloat16 is off by some thousandths."""
    return ((found >= 0).all(-1) & ((found.float().sum(-1) - 1).abs() < 1e-2)).all()


def _log(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()


def _matches(spec, name: str, module: nn.Module) -> bool:
    """Whether transformers' recorder, an OutputRecorder, a class or the end of a path, means this module."""
    kind = spec if isinstance(spec, type) else getattr(spec, "target_class", None)
    suffix = spec if isinstance(spec, str) else getattr(spec, "class_name", None)
    layer = (getattr(spec, "layer_name", None) or "").strip(".")
    is_it = (kind is not None and isinstance(module, kind)) or bool(suffix and name.endswith(suffix))
    return is_it and (not layer or f".{layer}." in f".{name}.")
