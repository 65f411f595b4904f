"""Inputs of an UltraFuser: one prompt per specialist, each in its template, and a shared answer.

UltraFuser (arXiv 2403.08281), Sec. 3.1 and Table 7: a sample is wrapped once per specialist, x_s =
template_s(x), and y follows each. The answer's ids are appended to each prompt's, not tokenized
with it, so its positions are the same for all.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

# Table 7; the tokenizer puts a BOS before a text template, which is the <s> of CodeLlama's
TEMPLATES = {
    "ultralm": "User: {prompt}\nAssistant:",
    "codellama": "[INST] {prompt} [/INST]",
    "wizardmath": (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n"
        "\n"
        "### Instruction:\n"
        "{prompt}\n"
        "\n"
        "### Response:"
    ),
}
TEXT = (
    "def add(a, b):\n"
    "    return a + b  # sums: 12 + 345 = 357\n"
    "What's the capital of France? The answer is Paris."
)
CHAT = "chat"  # the specialist's own chat template


def check_template(template: str, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """Return a template, resolving names of `TEMPLATES`; raises ValueError if it has no place for a
    prompt.
    """
    text = TEMPLATES.get(template, template)
    if text == CHAT:
        if tokenizer is not None and not tokenizer.chat_template:
            raise ValueError("template is 'chat', but the tokenizer has no chat template")
    elif "{prompt}" not in text:
        raise ValueError(
            f"template is {template!r}. Use {', '.join(map(repr, (*TEMPLATES, CHAT)))} or a text "
            "with {prompt} and optionally {system}"
        )
    return text


def check_tokenizers(tokenizers: Sequence, names: Sequence[str], vocab_size: int) -> None:
    """Raise ValueError unless all tokenizers have the same ids below `vocab_size`, end of an
    answer, and ids of a text.
    """
    first = tokenizers[0]
    tokens = _tokens(first, vocab_size)
    text = first.encode(TEXT, add_special_tokens=False)
    for name, tokenizer in zip(names[1:], tokenizers[1:], strict=True):
        others = _tokens(tokenizer, vocab_size)
        problem = None
        if tokenizer.eos_token_id != first.eos_token_id:
            problem = f"eos_token of {name!r} is {tokenizer.eos_token!r}, but {first.eos_token!r}"
        differing = [i for i in tokens.keys() & others.keys() if tokens[i] != others[i]]
        if differing:
            i = min(differing)
            problem = f"id {i} of {name!r} is {others[i]!r}, but {tokens[i]!r}"
        # a vocabulary that is a prefix of another may still encode text differently
        if problem is None and tokenizer.encode(TEXT, add_special_tokens=False) != text:
            problem = f"{name!r} encodes a text to other ids than is the case"
        if problem is not None:
            raise ValueError(
                f"{problem} for {names[0]!r}. Specialists must have the same vocabulary and "
                "tokenizer.eos_token"
            )


def _tokens(tokenizer, vocab_size: int) -> dict[int, str]:
    """Return the tokens below `vocab_size` by id."""
    return {i: token for token, i in tokenizer.get_vocab().items() if i < vocab_size}


class Encoder:
    """Turns prompts and answers into ids, each prompt in every specialist's template.

    Args:
        tokenizers: One per specialist.
        templates: One per specialist.
        vocab_size: Number of ids that all specialists have.
    """

    def __init__(self, tokenizers: Sequence, templates: Sequence[str], vocab_size: int):
        self.tokenizers = tuple(tokenizers)
        self.templates = tuple(templates)
        self.vocab_size = vocab_size
        # some specialists may lack the added tokens of a larger vocabulary
        self.tokenizer = min(self.tokenizers, key=len)

    @property
    def pad_token_id(self) -> int:
        """Padding id; padding is masked."""
        for pad in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if pad is not None:
                return pad if pad < self.vocab_size else 0
        return 0

    def prompt(self, prompt: str | Sequence[Mapping], system: str | None = None) -> list[list[int]]:
        """Return the ids of a prompt for each specialist; `prompt` is a text or a chat, messages
        with role and content.

        A chat of several turns needs the template "chat" for all. Raises ValueError for a template
        that cannot hold it.
        """
        messages = _messages(prompt, system)
        ids = []
        for tokenizer, template in zip(self.tokenizers, self.templates, strict=True):
            if template == CHAT:
                ids.append(
                    tokenizer.apply_chat_template(
                        messages, add_generation_prompt=True, tokenize=True, return_dict=False
                    )
                )
            else:
                ids.append(_text_ids(tokenizer, template, messages))
        if not all(ids):
            raise ValueError(
                f"Prompt {prompt!r} has no tokens for specialist {ids.index([])}. Pass some text"
            )
        return ids

    def answer(self, text: str, end: bool = True) -> list[int]:
        """Return the ids of an answer, followed by EOS if `end`; raises ValueError for ids that
        some specialist lacks.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        eos = self.tokenizer.eos_token_id
        if end and eos is not None:
            ids = [*ids, eos]
        if any(i >= self.vocab_size for i in ids):
            raise ValueError(
                f"Ids of the response must be below {self.vocab_size}, the smallest vocabulary, "
                f"but got {max(ids)}"
            )
        return ids

    def batch(
        self,
        prompts: Sequence,
        responses: Sequence[str] | None = None,
        *,
        system: str | None = None,
        end: bool = True,
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Return UltraFuser.forward's inputs for B `prompts`, and for their answers if there are
        `responses`.
        """
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts must be a list of at least one prompt, but got {prompts!r}")
        rows = [{"prompt_ids": self.prompt(prompt, system)} for prompt in prompts]
        if responses is not None:
            for row, response in zip(rows, responses, strict=True):
                row["response_ids"] = self.answer(response, end)
        return self.collate(rows)

    def collate(self, rows: Sequence[Mapping]) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Pad rows of `prompt_ids`, one list per specialist, and of `response_ids` to tensors:
        prompts left, answers right.

        Returns prompt_ids and prompt_mask, S of [B, P_s], and with answers response_ids and labels
        [B, R].
        """
        pad = self.pad_token_id
        batch: dict[str, torch.Tensor | list[torch.Tensor]] = {"prompt_ids": [], "prompt_mask": []}
        for lists in zip(*(row["prompt_ids"] for row in rows), strict=True):
            ones = [[1] * len(ids) for ids in lists]
            batch["prompt_ids"].append(_padded(lists, pad, "left"))
            batch["prompt_mask"].append(_padded(ones, 0, "left"))
        if "response_ids" in rows[0]:
            lists = [row["response_ids"] for row in rows]
            batch["response_ids"] = _padded(lists, pad, "right")
            batch["labels"] = _padded(lists, -100, "right")
        return batch


def _padded(lists: Sequence[Sequence[int]], filler: int, side: str) -> torch.Tensor:
    tensors = [torch.tensor(ids, dtype=torch.long) for ids in lists]
    return pad_sequence(tensors, batch_first=True, padding_value=filler, padding_side=side)


def _messages(prompt: str | Sequence[Mapping], system: str | None) -> list[Mapping[str, str]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    roles = [turn["role"] for turn in messages]
    if roles[-1:] != ["user"] or "system" in roles[1:]:
        raise ValueError(
            "Expected a text, or messages that end with the user's, and at most one system text, "
            f"but prompt is {prompt!r} and system is {system!r}"
        )
    return messages


def _text_ids(tokenizer, template: str, messages: list[Mapping[str, str]]) -> list[int]:
    values = {"system": "", "prompt": messages[-1]["content"]}
    if messages[0]["role"] == "system" and "{system}" in template:
        values["system"] = messages[0]["content"]
        messages = messages[1:]
    if len(messages) > 1:
        roles = ", ".join(turn["role"] for turn in messages)
        raise ValueError(
            f"Template {template!r} does not support the turns {roles}. Use the template 'chat', "
            "or one turn of the user with a system text only if the template has {system}"
        )
    # in one pass, since a prompt may contain such braces
    text = re.sub(r"\{(prompt|system)\}", lambda match: values[match[1]], template)
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = [tokenizer.bos_token_id]
    # some tokenizers have a BOS that they never prepend: GPT-2's is its EOS
    puts_bos = tokenizer.encode(text, add_special_tokens=True)[:1] == bos
    return [*bos, *ids] if puts_bos and ids[:1] != bos else ids


def check_prompts(ids: Any, mask: Any, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return prompts and masks of `count` specialists, S of [B, P_s], padded on the left."""
    ids = list(ids or ())
    mask = list(mask or ())
    shapes = [tuple(tensor.shape) for tensor in ids]
    of_mask = [tuple(tensor.shape) for tensor in mask]
    fits = len(shapes) == count and shapes == of_mask
    if not fits or any(len(shape) != 2 or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(
            f"Expected prompt_ids and prompt_mask as from fuser.encode, {count} tensors [B, P_s] "
            f"each, but got {shapes} and {of_mask}"
        )
    return [left_padded(i, m) for i, m in zip(ids, mask, strict=True)]


def check_answers(ids: torch.Tensor | None, rows: int) -> None:
    """Raise ValueError unless `ids` are answers [rows, R]."""
    if ids is None or ids.dim() != 2 or len(ids) != rows:
        raise ValueError(
            f"Expected response_ids [{rows}, R], one row per prompt, but got "
            f"{ids if ids is None else tuple(ids.shape)}"
        )


def left_padded(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the padding of `ids` [B, P], zeros of `mask`, to the left: every prompt then ends where
    the answer begins.
    """
    order = mask.long().argsort(dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)
