"""Small stock models with random weights, to pre-train on the machine at hand: heads of 32, tied embeddings, float32."""

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM


def small_llama(tokenizer, *, hidden_size: int, intermediate_size: int, num_layers: int, max_length: int, seed: int):
    """Return a dense LlamaForCausalLM for the tokenizer."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**_fields(tokenizer, hidden_size, intermediate_size, num_layers, max_length)))


def small_deepseek(
    tokenizer,
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    expert_size: int,
    shared_experts: int,
    dense_layers: int,
    max_length: int,
    seed: int,
):
    """Return a DeepseekV2ForCausalLM, a mixture of experts, for the tokenizer.

    Its layers are DeepSeek-V2-Lite's: `dense_layers` dense ones first, then `num_experts` routed experts, `top_k` per token
    with weights that are not normalised, beside `shared_experts`.
    """
    torch.manual_seed(seed)
    config = DeepseekV2Config(
        **_fields(tokenizer, hidden_size, intermediate_size, num_layers, max_length),
        moe_intermediate_size=expert_size,
        n_routed_experts=num_experts,
        num_experts_per_tok=top_k,
        n_shared_experts=shared_experts,
        first_k_dense_replace=dense_layers,
        q_lora_rank=None,
        kv_lora_rank=hidden_size // 2,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
    )
    model = DeepseekV2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".gate.weight"):
            # transformers makes it zeros, and experts that are all alike never part
            torch.nn.init.normal_(parameter, std=config.initializer_range)
    return model


def _fields(tokenizer, hidden_size: int, intermediate_size: int, num_layers: int, max_length: int) -> dict:
    """Return what the configs of both have."""
    heads = max(hidden_size // 32, 1)
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 2 * max_length,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
