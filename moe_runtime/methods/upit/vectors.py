"""Routing vectors next to the MLPs of a dense model: each learns to recognize the tokens its expert
is good at.

UpIT (arXiv 2410.01610), Eq. (1) and (2), for expert i on its own rows:

    L     = alpha L_lm + (1 - alpha) L_aux
    L_aux = CrossEntropy(sigmoid(h r), 1) = mean over tokens and layers of -log sigmoid(h . r)

h [T, H] is the input of a layer's MLP, r [H] float32 the layer's routing vector, alpha 0.5. Padding
does not count. r is not part of the forward pass: L_lm does not depend on it, and L_aux trains the
MLPs of the layers below through h. The paper leaves open which h is used, and what the mean is
over.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerBase

from moe_runtime.hf.common.outputs import share_of_batch
from moe_runtime.hf.dropin.layers import OpenCall
from moe_runtime.hf.models.families import family_of
from moe_runtime.hf.training import ranks
from moe_runtime.hf.training.trainer import MoETrainer
from moe_runtime.methods.upit.models import each_row, row_means

NAME = "routing_vector"  # of the parameter that an MLP gets


class RoutingVectors:
    """Adds routing vectors to a model, which then returns the loss L until `close`.

    `vectors` [L, H] are the initial values. The model's output has the two parts of L as `lm_loss`
    and `aux_loss`, which MoETrainer logs. Works with gradient checkpointing, autocast, DDP and
    gradient accumulation.
    """

    def __init__(self, model: nn.Module, vectors: torch.Tensor, alpha: float = 0.5):
        self.mlps = mlps_of(model)
        H = model.config.hidden_size
        if vectors.shape != (len(self.mlps), H) or not 0 <= alpha <= 1:
            raise ValueError(
                f"Expected vectors [{len(self.mlps)}, {H}] and alpha from 0 to 1, but got "
                f"{tuple(vectors.shape)} and {alpha}"
            )
        self.model = model
        self.alpha = alpha
        self._logits: list[torch.Tensor] = []  # [B, S] of each layer, in this call
        self._kwargs: dict = {}
        # [L, B, S], the logits of the last call without gradient
        self._last: torch.Tensor | None = None
        self._call = OpenCall(model, leave=self._forget)
        self._handles = [
            model.register_forward_pre_hook(self._prepare, with_kwargs=True),
            model.register_forward_hook(self._add, prepend=True),  # before the call closes
        ]
        for mlp, vector in zip(self.mlps, vectors, strict=True):
            vector = vector.detach().to(next(mlp.parameters()).device, torch.float32, copy=True)
            mlp.register_parameter(NAME, nn.Parameter(vector))
            self._handles.append(mlp.register_forward_pre_hook(self._catch))

    def close(self) -> None:
        """Remove the vectors and restore the model."""
        self._call.close()
        for handle in self._handles:
            handle.remove()
        for mlp in self.mlps:
            delattr(mlp, NAME)

    def train_only(self) -> None:
        """Freeze all but the vectors and the MLPs or their adapters."""
        self.model.requires_grad_(False)
        has_adapters = any("lora_" in name for name, _ in self.model.named_parameters())
        for mlp in self.mlps:
            for name, parameter in mlp.named_parameters():
                is_trained = name == NAME or not has_adapters or "lora_" in name
                parameter.requires_grad_(is_trained)

    def values(self) -> torch.Tensor:
        """Return the vectors [L, H] float32 on the CPU; under FSDP2 every process must call
        this.
        """
        return torch.stack([ranks.whole(getattr(mlp, NAME)) for mlp in self.mlps]).clone()

    def measure(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        bf16: bool = False,
    ) -> "Measured":
        """Return L_lm and the mean sigmoid(h . r) on tokenized `rows`; every process must call
        this.
        """

        def take(model, batch: dict) -> list[tuple]:
            labels = batch.pop("labels")
            out = model(**batch, use_cache=False)
            mask = batch["attention_mask"] != 0
            fired = (self._last.sigmoid().to(mask.device) * mask).double().sum(2).t()  # [B, L]
            counts = (labels[:, 1:] != -100).sum(1).tolist()
            losses = row_means(out.logits, labels)
            tokens = mask.sum(1).tolist()
            return list(zip(losses, counts, fired.tolist(), tokens, strict=True))

        try:
            by_row = each_row(self.model, rows, tokenizer, batch_size, take, bf16)
        finally:
            self._last = None
        columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*by_row)]
        losses, counts, fired, tokens = columns
        loss = losses @ counts / counts.sum()
        return Measured(loss.item(), (fired.sum(0) / tokens.sum()).tolist())

    def _prepare(self, module, args, kwargs) -> None:
        self._kwargs = self._call.named(args, kwargs)

    def _catch(self, mlp: nn.Module, args: tuple) -> None:
        h = args[0]
        # also in the recomputation of checkpointing, which must build the same graph
        with torch.autocast(h.device.type, enabled=False):
            logits = h.float() @ getattr(mlp, NAME).float()
        if self._call.is_open:
            self._logits.append(logits)

    def _add(self, module, args, out):
        """Replace the loss in the model's output by L."""
        if not torch.is_grad_enabled():
            self._last = _stacked(self._logits)
        lm_loss = out.get("loss")
        if lm_loss is None:
            return
        aux_loss = (1 - self.alpha) * routing_loss(self._logits, self._call.mask).to(lm_loss.device)
        out.lm_loss = self.alpha * lm_loss
        out.aux_loss = aux_loss
        out["loss"] = out.lm_loss + share_of_batch(self._kwargs, lm_loss.device) * aux_loss

    def _forget(self) -> None:
        self._logits = []
        self._kwargs = {}


class VectorTrainer(MoETrainer):
    """MoETrainer with a separate learning rate for the vectors, on the same schedule; None uses
    that of the rest.
    """

    def __init__(self, *args: Any, vector_rate: float | None, **kwargs: Any):
        self.vector_rate = vector_rate
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create transformers' optimizer, with the vectors of each parameter group in a group of
        their own.
        """
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if not is_new or self.vector_rate is None:
            return optimizer
        named = (self.model if model is None else model).named_parameters()
        vectors = {parameter for name, parameter in named if name.endswith(f".{NAME}")}
        for group in list(optimizer.param_groups):
            new = {"params": [one for one in group["params"] if one in vectors]}
            if new["params"]:
                group["params"] = [one for one in group["params"] if one not in vectors]
                optimizer.add_param_group(group | new | {"lr": self.vector_rate})
        return optimizer


class Measured(NamedTuple):
    """Losses on a bucket before or after training.

    Attributes:
        loss: Of the language model, per label token.
        sigmoid: [L], the mean of sigmoid(h . r) over the tokens for each layer.
    """

    loss: float  # L_lm, over the label tokens
    sigmoid: list[float]  # [L], mean of sigmoid(h . r) over the tokens


def routing_loss(logits: list[torch.Tensor], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Eq. (2): `logits` h . r of the layers, [B, S] each, `mask` [B, S] 0 on padding -> []
    float32.
    """
    losses = F.softplus(-_stacked(logits))
    if mask is None:
        return losses.mean()
    valid = (mask != 0).to(losses)
    return (losses * valid).sum() / (len(logits) * valid.sum())


def _stacked(logits: list[torch.Tensor]) -> torch.Tensor:
    """[L, B, S] on the first layer's device."""
    return torch.stack([layer.to(logits[0].device) for layer in logits])


def mlps_of(model: nn.Module) -> list[nn.Module]:
    """Return the MLPs of a dense model, layer by layer."""
    path = family_of(model).path
    layers = range(model.config.num_hidden_layers)
    return [model.get_submodule(path.format(layer)) for layer in layers]
