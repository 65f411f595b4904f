"""What an UltraFuser reads: one prompt per specialist, each in its own template, and one answer for all.

UltraFuser, Sec. 3.2 and Table 7: a sample is wrapped once per specialist, x_s = template_s(x), and y follows each.
The answer's ids are added to each prompt's, not found anew by each tokenizer, so its positions are the same for all.
"""

import re
from collections.abc import Mapping, Sequence

import torch

# Table 7; a text template follows the BOS that the tokenizer puts before texts, which is the <s> of CodeLlama's
TEMPLATES = {
    "ultralm": "User: {prompt}\nAssistant: ",
    "codellama": "[INST] {prompt} [/INST]",
    "wizardmath": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{prompt}\n\n### Response:"
    ),
}
CHAT = "chat"  # the specialist's own chat template
_WANTED = f"want {', '.join(map(repr, (*TEMPLATES, CHAT)))} or a text with {{prompt}} and, if you like, {{system}}"


def check_template(template: str, tokenizer=None) -> str:
    """Return a template with names of `TEMPLATES` replaced; raises ValueError for one that no prompt fits into."""
    text = TEMPLATES.get(template, template)
    if text != CHAT and (not isinstance(text, str) or "{prompt}" not in text):
        raise ValueError(f"template is {template!r}; {_WANTED}")
    if text == CHAT and tokenizer is not None and not tokenizer.chat_template:
        raise ValueError(f"template is {template!r}, the specialist's tokenizer has no chat template; {_WANTED}")
    return text


def check_tokenizers(tokenizers: Sequence, names: Sequence[str], vocab_size: int) -> None:
    """Raise ValueError unless the ids below `vocab_size` and the end of an answer are the same in all tokenizers."""
    vocabularies = [{i: token for token, i in t.get_vocab().items() if i < vocab_size} for t in tokenizers]
    for name, tokenizer, vocabulary in zip(names[1:], tokenizers[1:], vocabularies[1:], strict=True):
        for i in sorted(vocabulary.keys() & vocabularies[0].keys()):
            if vocabulary[i] != vocabularies[0][i]:
                raise ValueError(
                    f"tokenizer of {name!r} has {vocabulary[i]!r} for the id {i}, that of {names[0]!r} "
                    f"{vocabularies[0][i]!r}; want specialists with one vocabulary"
                )
        if tokenizer.eos_token_id != tokenizers[0].eos_token_id:
            raise ValueError(
                f"eos_token of {name!r} is {tokenizer.eos_token!r}, of {names[0]!r} {tokenizers[0].eos_token!r}; want one "
                "end for all; set tokenizer.eos_token"
            )


class Encoder:
    """Turns prompts and answers into ids: `tokenizers` and `templates` are one per specialist."""

    def __init__(self, tokenizers: Sequence, templates: Sequence[str], vocab_size: int):
        self.tokenizers, self.templates, self.vocab_size = tuple(tokenizers), tuple(templates), vocab_size
        # an added token of a larger vocabulary is none that all specialists know
        self.tokenizer = min(self.tokenizers, key=len)

    @property
    def pad_token_id(self) -> int:
        """An id to pad with; what stands there is masked."""
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        return 0 if pad is None or pad >= self.vocab_size else pad

    def prompt(self, prompt: str | Sequence[Mapping], system: str | None = None) -> list[list[int]]:
        """Return the ids of a prompt for each specialist; `prompt` is a text or a chat, messages with role and content.

        A chat of several turns needs the template "chat" for all. Raises ValueError where a template cannot say it.
        """
        messages = _messages(prompt, system)
        pairs = zip(self.tokenizers, self.templates, strict=True)
        ids = [
            _chat_ids(t, messages) if template == CHAT else _text_ids(t, template, messages) for t, template in pairs
        ]
        for s, found in enumerate(ids):
            if not found:
                raise ValueError(
                    f"prompt is {prompt!r}, of which specialist {s} sees no token; want text, or a BOS token"
                )
        return ids

    def answer(self, text: str, end: bool = True) -> list[int]:
        """Return the ids of an answer, with EOS behind it if `end`; raises ValueError for ids that not all have."""
        if not isinstance(text, str):
            raise ValueError(f"response is {text!r}; want a text")
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        eos = self.tokenizer.eos_token_id
        ids = ids + [eos] if end and eos is not None else ids
        if any(i >= self.vocab_size for i in ids):
            raise ValueError(
                f"response has the id {max(ids)}; want ids below {self.vocab_size}, which all specialists have"
            )
        return ids

    def batch(
        self,
        prompts: Sequence[str | Sequence[Mapping]],
        responses: Sequence[str] | None = None,
        *,
        system: str | None = None,
        end: bool = True,
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Return what UltraFuser.forward takes of B `prompts`, and of their answers if there are `responses`."""
        if isinstance(prompts, str) or not len(prompts):
            raise ValueError(f"prompts is {prompts!r}; want a list of at least one prompt")
        if responses is not None and (isinstance(responses, str) or len(responses) != len(prompts)):
            raise ValueError(f"responses is {responses!r}, with {len(prompts)} prompts; want a list of one for each")
        rows = [{"prompt_ids": self.prompt(prompt, system)} for prompt in prompts]
        for row, response in zip(rows, responses or (), strict=False):
            row["response_ids"] = self.answer(response, end)
        return self.collate(rows)

    def collate(self, rows: Sequence[Mapping]) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Pad rows of `prompt_ids`, one list per specialist, and of `response_ids` to tensors: prompts left, answers right.

        Gives prompt_ids and prompt_mask, S of [B, P_s], and with answers response_ids and labels [B, R].
        """
        batch: dict[str, torch.Tensor | list[torch.Tensor]] = {"prompt_ids": [], "prompt_mask": []}
        for lists in zip(*(row["prompt_ids"] for row in rows), strict=True):
            width = max(map(len, lists))
            fill = [[self.pad_token_id] * (width - len(ids)) + list(ids) for ids in lists]
            mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in lists]
            batch["prompt_ids"].append(torch.tensor(fill))
            batch["prompt_mask"].append(torch.tensor(mask))
        if "response_ids" in rows[0]:
            lists = [list(row["response_ids"]) for row in rows]
            width = max(map(len, lists))
            for name, filler in (("response_ids", self.pad_token_id), ("labels", -100)):
                padded = [ids + [filler] * (width - len(ids)) for ids in lists]
                batch[name] = torch.tensor(padded, dtype=torch.long).view(len(lists), width)
        return batch


def _messages(prompt: str | Sequence[Mapping], system: str | None) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not all(isinstance(turn, Mapping) for turn in prompt):
        raise ValueError(f"prompt is {prompt!r}; want a text, or a list of messages with role and content")
    messages = [dict(turn) for turn in prompt]
    for turn in messages:
        if not {"role", "content"} <= turn.keys() or not isinstance(turn["content"], str):
            raise ValueError(f"prompt has the turn {turn!r}; want a role and, as content, text")
    if not messages or messages[-1]["role"] != "user":
        raise ValueError(f"prompt is {prompt!r}; want a text, or messages whose last is the user's")
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise ValueError(f"system is {system!r}, and the chat begins with another; want one of them")
    return [{"role": "system", "content": system}, *messages]


def _chat_ids(tokenizer, messages: list[dict[str, str]]) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def _text_ids(tokenizer, template: str, messages: list[dict[str, str]]) -> list[int]:
    values = {"system": "", "prompt": messages[-1]["content"]}
    if messages[0]["role"] == "system" and "{system}" in template:
        values["system"] = messages[0]["content"]
        messages = messages[1:]
    if len(messages) > 1:
        roles = ", ".join(turn["role"] for turn in messages)
        raise ValueError(
            f"prompt has the turns {roles}, the template is {template!r}; want one turn of the user's, and a system text "
            "only where the template has {system}; or the template 'chat'"
        )
    # in one pass: a prompt may have braces, even these
    text = re.sub(r"\{(prompt|system)\}", lambda match: values[match[1]], template)
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    # some have a BOS that they put before nothing: GPT-2's is its EOS
    puts_bos = tokenizer.encode(text, add_special_tokens=True)[:1] == bos
    return ids if not puts_bos or ids[:1] == bos else [*bos, *ids]


def check_prompts(ids, mask, sizes: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return prompts and masks, S of [B, P_s], padded on the left; `sizes` are the specialists' numbers of ids.

    Raises ValueError unless they fit; what is in them is looked at on the CPU only, where nothing has to wait for it.
    """
    want = f"want {len(sizes)} tensors [B, P_s], one per specialist; fuser.encode makes them"
    for name, tensors in (("prompt_ids", ids), ("prompt_mask", mask)):
        if tensors is None or len(tensors) != len(sizes):
            raise ValueError(f"{name} is {'None' if tensors is None else f'of length {len(tensors)}'}; {want}")
    for s, (i, m, size) in enumerate(zip(ids, mask, sizes, strict=True)):
        if i.dim() != 2 or i.shape[1] == 0 or i.shape != m.shape or len(i) != len(ids[0]):
            raise ValueError(f"prompt_ids[{s}] is {tuple(i.shape)}, prompt_mask[{s}] {tuple(m.shape)}; {want}")
        if m.device.type == "cpu" and not m.bool().any(1).all():
            raise ValueError(f"prompt_mask[{s}] has a row of zeros; want at least one token in each prompt")
        _check_ids(f"prompt_ids[{s}]", i, size)
    return [left_padded(i, m) for i, m in zip(ids, mask, strict=True)]


def check_answers(ids: torch.Tensor | None, rows: int, vocab_size: int, least: int = 1) -> None:
    """Raise ValueError unless `ids` are answers [rows, R >= least] of ids that all specialists have."""
    if ids is None or ids.dim() != 2 or len(ids) != rows or ids.shape[1] < least:
        shape = None if ids is None else tuple(ids.shape)
        raise ValueError(f"response_ids is {shape}, with {rows} prompts; want [{rows}, R]")
    _check_ids("response_ids", ids, vocab_size)


def _check_ids(name: str, ids: torch.Tensor, size: int) -> None:
    if ids.device.type == "cpu" and ids.numel() and not (ids.min() >= 0 and ids.max() < size):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"{name} hold {wrong}; want ids from 0 to {size - 1}, padding too")


def left_padded(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the padding of `ids` [B, P], zeros of `mask`, to the left: every prompt then ends where the answer begins."""
    order = mask.long().argsort(dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)
