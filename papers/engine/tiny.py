"""Small models that can be trained on any machine: stock architectures with random weights, a
tokenizer, a collator.

The models have heads of 32, tied embeddings and float32 weights. The tokenizer is a byte-level BPE
made from any text.
"""

from collections.abc import Iterable

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

BOS = "<s>"
EOS = "</s>"
PAD = "<pad>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# a turn ends in EOS, inside the generated part, so that a model learns to stop where generate()
# does
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}{% if "
    "message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% "
    "endgeneration %}{% else %}{{ message['content'] + eos_token }}{% endif %}{{ '\\n' }}{% "
    "endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
SMALLEST = len((PAD, BOS, EOS, *ROLES)) + 256


def small_llama(
    tokenizer,
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    max_length: int,
    seed: int,
):
    """Return a dense LlamaForCausalLM for the tokenizer."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(**_fields(tokenizer, hidden_size, intermediate_size, num_layers, max_length))
    )


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
    """Return a DeepseekV2ForCausalLM, an MoE model, for the tokenizer.

    Its layers are DeepSeek-V2-Lite's: `dense_layers` dense ones first, then `num_experts` routed
    experts, `top_k` per token with unnormalized weights, and `shared_experts`.
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
            # transformers initializes it to zero, and experts that start equal would stay equal
            torch.nn.init.normal_(parameter, std=config.initializer_range)
    return model


def _fields(
    tokenizer, hidden_size: int, intermediate_size: int, num_layers: int, max_length: int
) -> dict:
    """Return the common fields of both configs."""
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


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, split_digits: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocab_size` ids: any text round-trips.

    It puts BOS before a text, pads right, and has a chat template that marks the assistant's turns.
    Few texts give fewer ids: len(tokenizer) counts them. With `split_digits` every digit is a
    separate token. Raises ValueError for a vocab_size without room for bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if vocab_size < SMALLEST:
        raise ValueError(
            f"vocab_size must be at least {SMALLEST} (256 bytes and special tokens), but got "
            f"{vocab_size}"
        )
    bpe = Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_of]) if split_digits else bytes_of
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bos = (BOS, bpe.token_to_id(BOS))
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[bos],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
