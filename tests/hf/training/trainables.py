"""Models whose experts train partly, and how tests run and train them, for test_trainable*.py."""

import copy
import functools

import torch

from moe_runtime.hf.dropin.layers import experts_module, numbered_layers
from tests.hf import stock, tiny

# deepseek_v2: a dense layer, shared MLPs; gpt_oss: transposed, interleaved, biases; nemotron_h: not
# gated; qwen2_moe: a gate on the shared MLP; muse_spark: composed, a norm after each expert;
# inkling2: composed, its own gate
STOCK = ("deepseek_v2", "gpt_oss", "nemotron_h", "qwen2_moe", "muse_spark", "inkling2")
OURS = {"ours": {}, "ours-plain-gate": {"gate": "topk_softmax"}}
MODELS = (*STOCK, *OURS)


@functools.cache
def _made(name: str):
    model = tiny.upcycled("llama", **OURS[name]) if name in OURS else stock.build(name)
    return model.train()


def model_of(name: str):
    return copy.deepcopy(_made(name))


def batch(name: str) -> torch.Tensor:
    return tiny.batch() if name in OURS else stock.batch()["input_ids"]


def two_each(model) -> dict[int, list[int]]:
    """Two routed experts of each layer, the later one first."""
    values = {}
    for number, layer in numbered_layers(model).items():
        values[number] = [
            layer.num_experts - 1 - number % 2,
            layer.num_shared,
        ]
    return values


def paths_of(model) -> dict[int, str]:
    names = {module: name for name, module in model.named_modules()}
    values = {}
    for number, layer in numbered_layers(model).items():
        values[number] = names[experts_module(model, layer)]
    return values


def run(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the logits and every gradient, of a loss that is O(1)."""
    model.zero_grad()
    logits = model(ids).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).mean().backward()
    return {"logits": logits.detach()} | {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def optimizer_of(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1
    )


def train(model, ids: torch.Tensor, steps: int) -> torch.optim.Optimizer:
    optimizer = optimizer_of(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return optimizer


def count_calls(model) -> dict[int, int]:
    calls = dict.fromkeys(numbered_layers(model), 0)

    def count(number, *_):
        calls[number] += 1

    for number, layer in numbered_layers(model).items():
        experts_module(model, layer).register_forward_pre_hook(functools.partial(count, number))
    return calls
