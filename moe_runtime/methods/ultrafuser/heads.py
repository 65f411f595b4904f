"""How a specialist's logits come from its last hidden states, and the loss of several such mixed.

    o_s = cap(scale_s (W_s h_s + b_s)),  cap(x) = c tanh(x / c) where the model has a soft cap c

Cohere and Granite scale, Gemma caps, Phi has a bias. Where no specialist caps or has a bias and all are on one device
in one dtype, the loss is `ops.fusion`'s, which never has the logits; a scale goes into the states. Else (also for a head
with an adapter, quantised or loaded piece by piece) it goes in chunks of tokens through the specialists' own heads, and
each chunk's logits are computed again in the backward pass.

A specialist's last hidden states: its own prompts, padded on the left, and the answer that all share.

What is padded must not be seen. A model that looks at masked tokens all the same (RWKV, RecurrentGemma) is found out by
`padding_error`. Weights that accelerate keeps elsewhere are on "meta"; their hooks say where the layer runs.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import Cache

from moe_runtime.modules.fuser import FuserGate, FuserLoss, chunked_loss, fuser_loss
from moe_runtime.ops.fusion import fuse_logits, mix


def inner_model(model: nn.Module) -> nn.Module:
    """Return the part of a causal LM that ends in the last hidden states: its head does not run on all positions."""
    return getattr(model, model.base_model_prefix or "model", model)


def device_of(layer: nn.Module) -> torch.device:
    """Return where a layer runs: where its weight is, or where accelerate's hook brings an offloaded one."""
    device, hook = layer.weight.device, getattr(layer, "_hf_hook", None)
    if device.type == "meta":
        for one in getattr(hook, "hooks", [hook]):
            place = getattr(one, "execution_device", None)
            device = device if place is None else torch.device(place)
    return device


def run(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, answer: torch.Tensor, cache: Cache | None = None):
    """Return the last hidden states of prompts `ids` [B, P], `mask`, padded on the left, followed by `answer` [B, R].

    [B, P + R, H]; with a cache that holds something, the answer's last token alone: [B, 1, H].
    """
    inner, device = inner_model(model), device_of(model.get_input_embeddings())
    ids, mask, answer = ids.to(device), mask.to(device), answer.to(device)
    # the answer's padding is behind all that counts
    mask = torch.cat([mask, mask.new_ones(answer.shape)], 1)
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    ids = torch.cat([ids, answer], 1)
    if cache is not None and cache.get_seq_length():
        new = ids.shape[1] - cache.get_seq_length()
        ids, positions = ids[:, -new:], positions[:, -new:]
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": cache is not None, "past_key_values": cache}
    if "position_ids" in inspect.signature(inner.forward).parameters:
        inputs["position_ids"] = positions
    return inner(**inputs, return_dict=True).last_hidden_state


@torch.no_grad()
def padding_error(model: nn.Module) -> float:
    """Return the relative difference that masked tokens before a prompt make, at the token where it is least.

    The least, because rounding can send a token of a mixture to another expert; who ignores the mask is wrong everywhere.
    """
    ids = (torch.arange(8) % model.get_input_embeddings().weight.shape[0])[None]
    mask, nothing = torch.tensor([[0] * 4 + [1] * 4]), ids[:, :0]
    padded = run(model, ids, mask, nothing)[:, 4:].float()
    alone = run(model, ids[:, 4:], mask[:, 4:], nothing).float()
    return ((padded - alone).norm(dim=-1) / alone.norm(dim=-1).clamp_min(1e-30)).min().item()


PROBE = 1e-2  # relative difference between a head's logits and its model's, beyond what bfloat16 rounds
PADDING = 0.03  # relative difference between states with and without padding, beyond what many layers of bfloat16 round


class Head(NamedTuple):
    """A specialist's head: its model, whose output layer this is, and what the model does to the product."""

    model: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    @property
    def linear(self) -> nn.Module:
        """The output layer as it is now: an adapter or a resized vocabulary may have replaced it."""
        return self.model.get_output_embeddings()

    @property
    def plain(self) -> bool:
        """Whether the logits are a product with a weight: what the fused loss takes."""
        linear = self.linear
        # a quantised layer or one with an adapter does more than its weight says; an offloaded weight is on no device
        own = type(linear) is nn.Linear and linear.weight.device.type != "meta"
        return own and linear.bias is None and self.softcap is None

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V_s] of last states [..., H_s], on the head's device."""
        linear = self.linear
        logits = linear(h.to(device_of(linear)))
        logits = logits * self.scale if self.scale != 1.0 else logits
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def head_of(model, name: str) -> Head:
    """Return the head of a causal LM, tried on a few tokens where it has weights.

    Raises ValueError if its logits come about otherwise, or if it sees tokens that are masked.
    """
    linear, config = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
    if not hasattr(linear, "out_features") or inner_model(model) is model:
        raise ValueError(
            f"specialist {name!r} is {type(model).__name__}; want a causal language model with a linear head"
        )
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    head = Head(model, float(scale), getattr(config, "final_logit_softcapping", None))
    if device_of(linear).type != "meta":
        with _evaluating(model):
            error, shift = _probe(model, head), padding_error(model)
        if not error <= PROBE:
            raise ValueError(
                f"specialist {name!r} is {type(model).__name__}, whose logits differ by {error:.1e} from those of its head "
                "on its last states; want a model with logits of the form cap(scale (W h + b))"
            )
        if not shift <= PADDING:
            raise ValueError(
                f"specialist {name!r} is {type(model).__name__}, whose states differ by {shift:.1e} where masked tokens stand "
                "before a prompt; want a model that heeds attention_mask: a batch's prompts are padded"
            )
    return head


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Run a block with a model in eval mode; each of its modules gets its own mode back."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@torch.no_grad()
def _probe(model, head: Head) -> float:
    """Return the relative difference of the two ways to a few tokens' logits."""
    ids = torch.arange(4, device=device_of(model.get_input_embeddings()))[None]
    want = model(input_ids=ids, use_cache=False).logits.float()
    got = head(inner_model(model)(input_ids=ids, use_cache=False)[0]).float()
    return ((got - want.to(got.device)).norm() / want.norm().clamp_min(1e-30)).item()


def _fits_fused_loss(heads: Sequence[Head], hidden: Sequence[torch.Tensor]) -> bool:
    if not all(head.plain for head in heads):
        return False
    tensors = [*hidden, *(head.linear.weight for head in heads)]
    one_dtype = len({t.dtype for t in tensors}) == 1 or torch.is_autocast_enabled(tensors[0].device.type)
    return one_dtype and len({t.device for t in tensors}) == 1


def gate_weight(gate: FuserGate, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gate's weights [..., S] of states that may be on several devices, on the gate's."""
    return gate([h.to(gate.score.weight.device) for h in hidden])


def logits_of(heads: Sequence[Head], hidden: Sequence[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """Mix the specialists' logits of states [..., H_s] by `weight` [..., S]: [..., V] float32, differentiable."""
    if _fits_fused_loss(heads, hidden):
        states = [h * head.scale if head.scale != 1.0 else h for h, head in zip(hidden, heads, strict=True)]
        return fuse_logits(states, [head.linear.weight for head in heads], weight)
    return mix((head(h) for h, head in zip(hidden, heads, strict=True)), weight)


def loss_of(
    gate: FuserGate,
    heads: Sequence[Head],
    hidden: Sequence[torch.Tensor],
    labels: torch.Tensor,
    *,
    reduction: str = "mean",
    backend: str | None = None,
) -> FuserLoss:
    """Return the loss of answers `labels` [B, R] from the states before each token, S of [B, R, H_s].

    Raises ValueError for a `backend` with heads that the fused loss does not take.
    """
    if _fits_fused_loss(heads, hidden):
        weights, scales = [head.linear.weight for head in heads], [head.scale for head in heads]
        return fuser_loss(gate, hidden, weights, labels, reduction=reduction, scales=scales, backend=backend)
    if backend is not None:
        raise ValueError(
            f"backend is {backend!r}; want None: a head has a bias, a soft cap or an adapter, or they differ in device or dtype"
        )
    return chunked_loss(gate, hidden, heads, labels, reduction=reduction)
