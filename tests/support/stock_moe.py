"""Tiny stock MoE models with each kind of router: softmax, renormalized, after top-k, in groups
with a bias, sparsemixer.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moe_runtime.hf.dropin.experts import is_experts

VOCAB = 64
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_CHANGES = {
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {},
    "olmoe": {"num_key_value_heads": 4},
    "gpt_oss": {"sliding_window": 16},
    "granitemoe": {},
    "deepseek_v2": _LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "phimoe": {},
    "qwen3_5_moe_text": {
        "layer_types": ["full_attention"] * 2,
        "shared_expert_intermediate_size": 16,
    },
}
_REMOVED = {
    "mixtral": ("num_experts", "moe_intermediate_size"),
    "olmoe": ("num_local_experts",),
    "qwen3_moe": ("num_local_experts",),
    "deepseek_v2": ("num_experts", "num_local_experts"),
    "deepseek_v3": ("num_experts", "num_local_experts", "head_dim"),
}
# the last one has its own file layout, and is only for tests of it
FAMILIES = tuple(_CHANGES)[:-1]


def stock(model_type: str = "qwen3_moe", **changes):
    """A tiny model in training mode with large weights, so that routing depends on the token."""
    fields = _BASE | _CHANGES[model_type] | changes
    for name in _REMOVED.get(model_type, ()):
        fields.pop(name, None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model.train()


def batch(
    rows: int = 2, length: int = 9, padding: int = 0, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Token ids and labels, with a mask if the second row ends with `padding` tokens of padding."""
    ids = torch.randint(
        3,
        VOCAB,
        (rows, length),
        generator=torch.Generator().manual_seed(seed),
    )
    if not padding:
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    mask[1, -padding:] = 0
    ids[mask == 0] = 0
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(mask == 0, -100),
        "attention_mask": mask,
    }


def counted(model) -> dict[str, torch.Tensor]:
    """Count the tokens of each expert from here on."""
    counts = {}
    for name, module in model.named_modules():
        if is_experts(module):
            counts[name] = module.moe_runtime_counts = torch.zeros(
                module.num_experts, dtype=torch.int64
            )
    return counts
