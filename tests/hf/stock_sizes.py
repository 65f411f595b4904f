"""Sizes of the tiny models in `tests.hf.stock`: field names shared by families, and settings of
single families.
"""

VOCAB = 96
# set if the family has the field with its own value
SMALL = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "out_hidden_size": 32,
    "intermediate_size": 23,
    "dense_intermediate_size": 23,
    "moe_hidden_size": 24,
    "shared_intermediate_size": 19,
    "shared_expert_intermediate_size": 19,
    "shared_experts_intermediate_size": 19,
    "moe_shared_expert_intermediate_size": 19,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_heads": 4,
    "num_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 8,
    "swa_head_dim": 8,
    "max_position_embeddings": 128,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_num_heads": 8,
    "mamba_n_heads": 8,
    "mamba_head_dim": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "rel_extent": 16,
    "projector_hidden_size": 32,
    "swiglu_limit": 0.75,
    "canvas_length": 8,
    "router_hidden_size": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 23,
    "d_model": 32,
    "output_dim": 32,
    "output_channels": 8,
    "downsample_hidden_size": 8,
    "mlp_dim": 23,
}
# set if the family has the field at all
MOE = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 3,
    "top_k_experts": 3,
    "moe_k": 3,
    "moe_topk": 3,
    "moe_intermediate_size": 17,
    "enable_moe_block": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# for families where the tables and the family's own pattern do not give a model that runs, or a
# tiny one with experts
CHANGES = {
    "dbrx": {"attn_config": {"rope_theta": 1e4}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"sam_config": {"downsample_channels": [8, 16]}},
    },
    "diffusion_gemma": {
        "text_config": {"global_head_dim": 8},
        "vision_config": {"model_type": "gemma4_vision"},
    },
    "dots1": {"n_shared_experts": 2},
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [17, 13],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
        }
    },
    "dots3_note": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_qk_rope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"global_head_dim": 8},
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 0],
            }
        }
    },
    "glm5_next": {
        "text_config": {
            "qk_rope_head_dim": 0,
            "head_dim": 0,
            "index_kpool": 4,
        }
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_hidden_layers": 4,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "muse_spark": {
        "audio_config": {
            "num_hidden_layers": 2,
            "patch_sizes": [4, 4],
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
        }
    },
    "qwen4_exp": {
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 61,
        "make_ngram_vocab_size_divisible_by": 8,
        "heads_per_ngram": 2,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "qwen3_omni_moe": {"vision_start_token_id": 90},
    "unlimited_ocr": {"vision_config": {"sam_config": {"downsample_channels": [8, 16]}}},
    "vitpose_backbone": {"part_features": 8},
    "zaya": {"num_experts_per_tok": 1},
}
# the class to test where the order of heads would select another one
CLASSES = {"qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration"}
