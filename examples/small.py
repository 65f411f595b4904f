"""A small MoE model with random weights, and text for it: the examples need no download."""

import inspect
from types import ModuleType

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM


def moe_model(**sizes: int) -> OlmoeForCausalLM:
    """Return an OLMoE of two layers with 16 experts, 4 per token; `sizes` replace its own."""
    config = {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return OlmoeForCausalLM(OlmoeConfig(**config | sizes))


def batches(module: ModuleType, count: int) -> list[torch.Tensor]:
    """Return `count` batches [8, 128] of a module's source, with one id for each byte."""
    source = bytearray(inspect.getsource(module).encode())
    ids = torch.frombuffer(source, dtype=torch.uint8).long()
    wanted = count * 8 * 128
    repeats = 1 + wanted // len(ids)
    ids = ids.repeat(repeats)[:wanted]
    return list(ids.view(count, 8, 128))
