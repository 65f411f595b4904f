"""Specialists' last hidden states, their logits, and the loss of mixed logits.

    o_s = cap(scale_s (W_s h_s + b_s)),  cap(x) = c tanh(x / c) where the model has a soft cap c

h_s are the states of the specialist's own prompt, padded on the left, and the shared answer.
Padding must not be seen: `padding_error` detects models that ignore the mask (RWKV,
RecurrentGemma). Cohere and Granite scale, Gemma caps, Phi has a bias. If no specialist caps or has
a bias and all are on one device in one dtype, the loss is `ops.fusion`'s, which never stores the
logits. Otherwise it runs the specialists' own heads on chunks of tokens, each recomputed in the
backward pass.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from moe_runtime.modules.fuser import FuserGate, FuserLoss, chunked_loss, fuser_loss
from moe_runtime.ops.fusion import fuse_logits, mix

# largest relative difference between a head's logits and its model's; above bfloat16's rounding
PROBE = 1e-2
# largest relative difference of states with and without padding; above many bfloat16 layers'
# rounding
PADDING = 0.03


def inner_model(model: nn.Module) -> nn.Module:
    """Return the inner model of a causal LM, which returns the last hidden states, so that the head
    need not run.
    """
    return getattr(model, model.base_model_prefix or "model", model)


def device_of(layer: nn.Module) -> torch.device:
    """Return a layer's execution device: that of its weight, or of accelerate's hook if the weight
    is offloaded ("meta").
    """
    hook = getattr(layer, "_hf_hook", None)
    if layer.weight.device.type == "meta":
        for one in getattr(hook, "hooks", [hook]):
            if getattr(one, "execution_device", None) is not None:
                return torch.device(one.execution_device)
    return layer.weight.device


def run(
    model: nn.Module,
    ids: torch.Tensor,
    mask: torch.Tensor,
    answer: torch.Tensor,
    cache: Cache | None = None,
) -> tuple[Tensor, Cache | None]:
    """Return the last hidden states of prompts `ids` [B, P], `mask`, padded on the left, followed
    by `answer` [B, R].

    Shape [B, P + R, H]; with a non-empty cache only the answer's last token, [B, 1, H].
    """
    inner = inner_model(model)
    device = device_of(model.get_input_embeddings())
    ids = ids.to(device)
    mask = mask.to(device)
    answer = answer.to(device)
    # the answer's padding comes last, so no token that counts sees it
    mask = torch.cat([mask, mask.new_ones(answer.shape)], 1)
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    ids = torch.cat([ids, answer], 1)
    if cache is not None and cache.get_seq_length():
        new = ids.shape[1] - cache.get_seq_length()
        ids = ids[:, -new:]
        positions = positions[:, -new:]
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "use_cache": cache is not None,
        "past_key_values": cache,
    }
    if "position_ids" in inspect.signature(inner.forward).parameters:
        inputs["position_ids"] = positions
    return inner(**inputs, return_dict=True).last_hidden_state


@torch.no_grad()
def padding_error(model: nn.Module) -> float:
    """Return the relative effect of masked tokens before a prompt, at the token where it is
    smallest.
    """
    ids = (torch.arange(8) % model.get_input_embeddings().weight.shape[0])[None]
    mask = torch.tensor([[0] * 4 + [1] * 4])
    nothing = ids[:, :0]
    padded = run(model, ids, mask, nothing)[:, 4:].float()
    alone = run(model, ids[:, 4:], mask[:, 4:], nothing).float()
    difference = (padded - alone).norm(dim=-1) / alone.norm(dim=-1).clamp_min(1e-30)
    return difference.min().item()


class Head(NamedTuple):
    """A specialist's head.

    Attributes:
        model: The specialist.
        scale: Factor of its logits.
        softcap: Bound of its logits, as in Gemma 2.
    """

    model: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    @property
    def linear(self) -> nn.Module:
        """The current output layer, which an adapter or a resized vocabulary may have replaced."""
        return self.model.get_output_embeddings()

    @property
    def plain(self) -> bool:
        """Return whether the logits are a plain product with a weight, as the fused loss
        requires.
        """
        linear = self.linear
        # a quantized layer or one with an adapter computes more than its weight says; an offloaded
        # weight has no device
        is_plain = type(linear) is nn.Linear and linear.weight.device.type != "meta"
        return is_plain and linear.bias is None and self.softcap is None

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V_s] of last states [..., H_s], on the head's device."""
        linear = self.linear
        logits = linear(h.to(device_of(linear)))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def head_of(model: nn.Module, name: str) -> Head:
    """Return the head of a causal LM, checked on a few tokens if it has weights; raises ValueError
    for unsupported models.
    """
    linear = model.get_output_embeddings()
    config = model.config.get_text_config(decoder=True)
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    head = Head(model, float(scale), getattr(config, "final_logit_softcapping", None))
    reason = None
    if not hasattr(linear, "out_features") or inner_model(model) is model:
        reason = "no causal language model with a linear head"
    elif device_of(linear).type != "meta":
        with _evaluating(model):
            error = _probe(model, head)
            shift = padding_error(model)
        if not error <= PROBE:
            reason = (
                f"whose logits differ by {error:.1e} from its head's, of the form cap(scale (W h + "
                "b))"
            )
        elif not shift <= PADDING:
            reason = (
                f"whose states differ by {shift:.1e} with padding before a prompt: it ignores "
                "attention_mask"
            )
    if reason is not None:
        raise ValueError(
            f"UltraFuser cannot use specialist {name!r}, a {type(model).__name__} {reason}"
        )
    return head


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode for a block, and restore each module's mode afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@torch.no_grad()
def _probe(model, head: Head) -> float:
    """Return the relative difference between the head's and the model's logits on a few tokens."""
    ids = torch.arange(4, device=device_of(model.get_input_embeddings()))[None]
    expected = model(input_ids=ids, use_cache=False).logits.float()
    logits = head(inner_model(model)(input_ids=ids, use_cache=False)[0]).float()
    difference = (logits - expected.to(logits.device)).norm()
    return (difference / expected.norm().clamp_min(1e-30)).item()


def _fits_fused_loss(heads: Sequence[Head], hidden: Sequence[torch.Tensor]) -> bool:
    if not all(head.plain for head in heads):
        return False
    tensors = [*hidden, *(head.linear.weight for head in heads)]
    has_one_device = len({tensor.device for tensor in tensors}) == 1
    has_one_dtype = len({tensor.dtype for tensor in tensors}) == 1
    return has_one_device and (has_one_dtype or torch.is_autocast_enabled(hidden[0].device.type))


def gate_weight(gate: FuserGate, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gate's weights [..., S] on its device, for states that may be on several."""
    return gate([h.to(gate.score.weight.device) for h in hidden])


def logits_of(
    heads: Sequence[Head], hidden: Sequence[torch.Tensor], weight: torch.Tensor
) -> torch.Tensor:
    """Mix the specialists' logits of states [..., H_s] by `weight` [..., S]: [..., V] float32,
    differentiable.
    """
    pairs = zip(hidden, heads, strict=True)
    if not _fits_fused_loss(heads, hidden):
        return mix((head(h) for h, head in pairs), weight)
    states = [h if head.scale == 1.0 else h * head.scale for h, head in pairs]
    return fuse_logits(states, [head.linear.weight for head in heads], weight)


def loss_of(
    gate: FuserGate,
    heads: Sequence[Head],
    hidden: Sequence[torch.Tensor],
    labels: torch.Tensor,
    *,
    reduction: str = "mean",
    backend: str | None = None,
) -> FuserLoss:
    """Return the loss of answers `labels` [B, R] from the states before each token, S of [B, R,
    H_s].
    """
    if _fits_fused_loss(heads, hidden):
        weights = [head.linear.weight for head in heads]
        scales = [head.scale for head in heads]
        return fuser_loss(
            gate, hidden, weights, labels, reduction=reduction, scales=scales, backend=backend
        )
    if backend is not None:
        raise ValueError(
            f"backend must be None, but got {backend!r}: a head has a bias, a soft cap or an "
            "adapter, or they differ in device or dtype"
        )
    return chunked_loss(gate, hidden, heads, labels, reduction=reduction)
