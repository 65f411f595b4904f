"""A small byte-level BPE tokenizer made from text at hand, and the collator for tokenized pairs."""

from collections.abc import Iterable

from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase, PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# a turn ends in EOS, inside the generated part, so that a model learns to stop where generate() does
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
SMALLEST = len((PAD, BOS, EOS, *ROLES)) + 256


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocab_size` ids: any text round-trips.

    It puts BOS before a text, pads right, and has a chat template that marks what the assistant says. Few texts give
    fewer ids: len(tokenizer) counts them. Raises ValueError for a vocab_size without room for bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if vocab_size < SMALLEST:
        raise ValueError(f"vocab_size is {vocab_size}; want at least {SMALLEST}: the 256 bytes and the special tokens")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bos = (BOS, bpe.token_to_id(BOS))
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[bos])
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


def pair_collator(tokenizer: PreTrainedTokenizerBase, pad_to_multiple_of: int | None = None) -> DataCollatorForSeq2Seq:
    """Return the collator for `data.tokenize_pairs`: pads input_ids as the tokenizer does, labels with -100."""
    return DataCollatorForSeq2Seq(tokenizer, padding=True, pad_to_multiple_of=pad_to_multiple_of)
