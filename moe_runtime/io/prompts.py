"""Prompt formats (plain, Magicoder's, chat templates), and which tokens of a chat are trained.

`encode_chat` finds the assistant's turns in what a chat template writes. A template with {%
generation %} marks them itself. Otherwise turn i of the text that the whole chat renders to is
found by rendering parts of the chat:

    begins at   the length of render(messages[:i], add_generation_prompt=True), a prefix of the text
    ends at     the length of render(messages[:i+1]), a prefix too, less the whitespace behind the
                end-of-turn token
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_runtime.config import check_choice, one_line, shown

TRAIN_ON = ("assistant", "all")  # tokens of an example that are trained: the answers, or all
# formats of an example's prompt; "chat" is the tokenizer's own template
PROMPTS = {
    "plain": "{instruction}",
    # Magicoder's, which the XFT paper's models use: text before the instruction, and only a line
    # feed after "@@ Response"
    "magicoder": (
        "You are an exceptionally intelligent coding assistant that consistently delivers accurate "
        "and reliable responses to user instructions.\n\n@@ Instruction\n{instruction}\n\n@@ "
        "Response\n"
    ),
    "chat": None,
    "deepseek": None,  # see DEEPSEEK_CHAT
    "esft": None,  # the same, with the ids and labels of ESFT's released code: encode_turns
}
# the same as a chat template, for code that prompts a tuned model through its tokenizer:
# evaluations, servers
MAGICODER_CHAT = (
    "{{ bos_token or '' }}"
    + PROMPTS["magicoder"].partition("@@")[0]
    + "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '@@ Instruction\\n' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '@@ Response\\n' }}"
    "{% generation %}{{ message['content'] + (eos_token or '') }}{% endgeneration %}"
    "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}"
    "{% else %}{{ raise_exception('the roles must be user and assistant') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '@@ Response\\n' }}{% endif %}"
)

# the format of ESFT's training tasks: the prompt of DeepSeek's chat models, whose answers begin
# with a space
DEEPSEEK_CHAT = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant:' }}"
    "{% generation %}{{ ' ' + message['content'] + (eos_token or '') }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
ESFT_CHAT = DEEPSEEK_CHAT.replace("message['content']", "message['content'] | trim")
TEMPLATES = {
    "magicoder": MAGICODER_CHAT,
    "deepseek": DEEPSEEK_CHAT,
    "esft": ESFT_CHAT,
}  # chat templates that belong to a prompt format


def put_prompt(row: Mapping, prompt: str) -> Mapping:
    """Return an example with its prompt in a format of PROMPTS; raises ValueError for a layout that
    does not fit.

    "plain" accepts every layout, "magicoder" prompt and completion, "chat" also messages,
    "deepseek" and "esft" also plain text.
    """
    check_choice("prompt", prompt, tuple(PROMPTS))
    if (
        prompt == "plain"
        or (prompt != "magicoder" and chat_of(row))
        or (prompt in ("deepseek", "esft") and "text" in row)
    ):
        return row
    question = row.get("prompt")
    answer = row.get("completion")
    if not isinstance(question, str) or "completion" not in row:
        raise ValueError(
            f"Prompt {prompt!r} requires the columns prompt and completion as text, but got "
            f"{', '.join(row)}"
        )
    if PROMPTS[prompt] is None:
        return {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
    # replace instead of format, as code contains braces
    return {"prompt": PROMPTS[prompt].replace("{instruction}", question), "completion": answer}


def chat_of(row: Mapping) -> tuple[list[Mapping], int] | None:
    """Return the turns of an example and the number of them that form its prompt; None if it is not
    a chat.
    """
    if "messages" in row:
        return list(row["messages"]), 0
    if isinstance(row.get("prompt"), list | tuple):
        return [*row["prompt"], *row["completion"]], len(row["prompt"])
    return None


def encode_turns(tokenizer, row: Mapping) -> tuple[list[int], list[int]]:
    """Return the ids and labels of a chat as ESFT's released code computes them (arXiv 2407.01906,
    Sec. 4.1).

    Each turn is stripped and encoded separately: "User: {content}\\n\\nAssistant:" with the labels
    -100, then " {content}" and EOS, with labels unless the turn has `mask: 1`. BOS comes first and
    has its id as label. Raises ValueError for other roles.
    """
    ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    labels = list(ids)
    for number, turn in enumerate(chat_of(row)[0], 1):
        role = turn["role"]
        content = turn.get("content")
        if role not in ("user", "assistant") or not isinstance(content, str):
            raise ValueError(
                f"Prompt 'esft' requires text by the user or the assistant, but turn {number} is "
                f"{shown(turn)}"
            )
        asks = role == "user"
        text = f"User: {content.strip()}\n\nAssistant:" if asks else f" {content.strip()}"
        own = tokenizer.encode(text, add_special_tokens=False)
        own += [] if asks or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        ids += own
        labels += [-100] * len(own) if asks or turn.get("mask") == 1 else own
    return ids, labels


def encode_chat(
    tokenizer, row: Mapping, train_on: str = "assistant", prompt: str = "plain"
) -> tuple[list[int], list[bool]]:
    """Return the ids of a chat, as apply_chat_template computes them, and which of them are
    trained.

    Trained are the assistant's turns with their end-of-turn tokens, except those in the prompt; or
    all. Raises ValueError for a chat that the template rejects, and if the turns cannot be located
    in the template's output.
    """
    messages, first = chat_of(row)
    tools = row.get("tools") or None
    options = dict(row.get("chat_template_kwargs") or {})
    if prompt in TEMPLATES:
        options["chat_template"] = TEMPLATES[prompt]
    elif not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "The tokenizer has no chat template, which chats require. Pass --chat_template_path to "
            "moe-runtime train, or put a chat_template.jinja into the model's folder"
        )

    def render(turns: Sequence[Mapping], **more) -> Any:
        return tokenizer.apply_chat_template(turns, **options, **{"tokenize": False} | more)

    found = {}
    problem = f"The chat template rejects {shown(messages)}"
    try:  # a template is a program and may raise anything
        options["tools"] = json.loads(tools) if isinstance(tools, str) else tools
        found = render(messages, tokenize=True, return_dict=True)
        if train_on == "all":
            return found["input_ids"], [True] * len(found["input_ids"])
        problem = "The assistant's turns cannot be located in the output of the chat template"
        template = tokenizer.get_chat_template(options.get("chat_template"), options["tools"])
        if _GENERATION.search(template):
            mask = _marked(render, messages, first)
        else:
            mask = _found(tokenizer, render, messages, first)
        if any(mask):
            return found["input_ids"], mask
        reason = f"no token of {shown(messages)} belongs to an answer"
    except Exception as error:
        reason = one_line(error, 300) or type(error).__name__
    remedy = (
        "Mark them with {% generation %} and {% endgeneration %}, or train on all tokens with "
        "--train-on all"
    )
    raise ValueError(
        f"{problem}: {reason}. {remedy if found else 'Use roles and contents that it supports'}"
    )


_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers searches for it
_MARK = "\ufdd0"  # a Unicode noncharacter, which occurs in no template


def _common(one: Sequence, other: Sequence) -> int:
    """Return the length of the common prefix."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _marked(render: Callable, messages: list[Mapping], first: int) -> list[bool]:
    """Return which ids after the first turns the template marks as generated."""
    out = render(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    if first:
        given = render(
            messages[:first], tokenize=True, return_dict=True, add_generation_prompt=True
        )["input_ids"]
    else:
        given = []
    skip = _common(given, out["input_ids"])
    return [bool(one) and place >= skip for place, one in enumerate(out["assistant_masks"])]


def _found(tokenizer, render: Callable, messages: list[Mapping], first: int) -> list[bool]:
    """Return which ids after the first turns belong to the assistant's turns, by their positions in
    the text.
    """
    text = render(messages)
    places = range(first, len(messages))
    turns = [
        _turn(tokenizer, render, text, messages, i)
        for i in places
        if messages[i]["role"] == "assistant"
    ]
    offsets = render(
        messages, tokenize=True, return_dict=True, tokenizer_kwargs={"return_offsets_mapping": True}
    )
    return [
        any(a < end and b > start for start, end in turns) for a, b in offsets["offset_mapping"]
    ]


def _turn(
    tokenizer, render: Callable, text: str, messages: list[Mapping], i: int
) -> tuple[int, int]:
    """Return where the assistant's turn i begins and ends in the rendered chat; raises ValueError
    if it is not found.
    """
    content = messages[i].get("content")
    content = content if isinstance(content, str) else ""
    # templates drop the reasoning of earlier turns
    visible = content.rpartition("</think>")[2].strip()

    def place(at: int) -> int:
        """Return the position in the text of this character of the content (where replacing it
        changes the text), or 0.
        """
        marked = {**messages[i], "content": content[:at] + _MARK + content[at:]}
        other = render([*messages[:i], marked, *messages[i + 1 :]])
        return _common(text, other) if other != text else 0

    before = render(messages[:i]) if i else ""
    head = render(messages[:i], add_generation_prompt=True) if i else ""
    own = render(messages[: i + 1])
    start = len(head)
    end = len(own)
    # no generation prompt, or one that differs from what precedes an answer
    if head == before or not text.startswith(head):
        start = len(before) if text.startswith(before) else end
        answer = place(len(content) - len(content.rpartition("</think>")[2]))
        start = answer if text[start:answer].strip() else start  # after the role's header
    tail = own[start:].partition(visible)[2] if visible else own[start:]
    ends = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    # later turns change this one: its reasoning is dropped, or it ends with another token
    if not text.startswith(own):
        end = place(len(content))
        ends = [tail.strip(), *ends]
    elif tail:  # whitespace ends a turn only where nothing else does
        end = len(own.rstrip() if tail.strip() else own)
        ends = []
    end += max((len(one) for one in ends if one and text.startswith(one, end)), default=0)
    if start >= end:
        raise ValueError(
            f"turn {i + 1} of {shown(messages)} is rendered differently when other turns follow it"
        )
    return start, end
