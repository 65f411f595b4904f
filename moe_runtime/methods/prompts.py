"""Prompt formats of the methods' papers; importing `moe_runtime.methods` registers them.

magicoder    Magicoder's, which the XFT paper's models use (arXiv 2404.15247)
esft         of ESFT's training tasks, with the ids and labels of its released code
"""

from collections.abc import Mapping
from typing import Any

from moe_runtime.config import shown
from moe_runtime.io.prompts import DEEPSEEK_CHAT, PROMPTS, register_prompt

__all__ = ["ESFT_CHAT", "MAGICODER", "MAGICODER_CHAT", "PROMPTS", "encode_turns"]

_INTRODUCTION = (
    "You are an exceptionally intelligent coding assistant that consistently delivers accurate and "
    "reliable responses to user instructions.\n\n"
)
# text before the instruction, and only a line feed after "@@ Response"
MAGICODER = _INTRODUCTION + "@@ Instruction\n{instruction}\n\n@@ Response\n"
# the same as a chat template, for code that prompts a tuned model through its tokenizer:
# evaluations, servers
MAGICODER_CHAT = (
    "{{ bos_token or '' }}" + _INTRODUCTION + "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '@@ Instruction\\n' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '@@ Response\\n' }}"
    "{% generation %}{{ message['content'] + (eos_token or '') }}{% endgeneration %}"
    "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}"
    "{% else %}{{ raise_exception('the roles must be user and assistant') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '@@ Response\\n' }}{% endif %}"
)
ESFT_CHAT = DEEPSEEK_CHAT.replace("message['content']", "message['content'] | trim")


def encode_turns(tokenizer: Any, turns: list[Mapping]) -> tuple[list[int], list[int]]:
    r"""Return the ids and labels of a chat as ESFT's released code computes them.

    Each turn is stripped and encoded separately: "User: {content}\n\nAssistant:" with the labels
    -100, then " {content}" and EOS, with labels unless the turn has `mask: 1`. BOS comes first and
    has its id as label (arXiv 2407.01906, Sec. 4.1). Raises ValueError for other roles.
    """
    ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    labels = list(ids)
    for number, turn in enumerate(turns, 1):
        role = turn["role"]
        content = turn.get("content")
        if role not in ("user", "assistant") or not isinstance(content, str):
            raise ValueError(
                "Prompt 'esft' requires text by the user or the assistant, but turn "
                f"{number} is {shown(turn)}"
            )
        is_user = role == "user"
        text = f"User: {content.strip()}\n\nAssistant:" if is_user else f" {content.strip()}"
        turn_ids = tokenizer.encode(text, add_special_tokens=False)
        if not is_user and tokenizer.eos_token_id is not None:
            turn_ids.append(tokenizer.eos_token_id)
        ids += turn_ids
        labels += [-100] * len(turn_ids) if is_user or turn.get("mask") == 1 else turn_ids
    return ids, labels


register_prompt("magicoder", text=MAGICODER, chat_template=MAGICODER_CHAT)
register_prompt("esft", chat_template=ESFT_CHAT, accepts_text=True, encode_turns=encode_turns)
