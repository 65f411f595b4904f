"""A specialist's last hidden states: its own prompts, padded on the left, and the answer that all share.

What is padded must not be seen. A model that looks at masked tokens all the same (RWKV, RecurrentGemma) is found out by
`padding_error`. Weights that accelerate keeps elsewhere are on "meta"; their hooks say where the layer runs.
"""

import inspect

import torch
from torch import nn
from transformers import Cache


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
