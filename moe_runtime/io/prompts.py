"""Prompt formats of examples, and which tokens of a chat are trained.

`register_prompt` adds a format to PROMPTS; plain, chat and deepseek are always there, and
`moe_runtime.methods` registers those of its papers. `encode_chat` finds the assistant's turns in
what a chat template writes. A template with {% generation %} marks them itself. Otherwise turn i of
the text that the whole chat renders to is found by rendering parts of the chat:

    begins at   the length of render(messages[:i], add_generation_prompt=True), a prefix of the text
    ends at     the length of render(messages[:i+1]), a prefix too, less the whitespace behind the
                end-of-turn token
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from moe_runtime.config import check_choice, one_line, shown

TRAIN_ON = ("assistant", "all")  # tokens of an example that are trained: the answers, or all


class PromptFormat(NamedTuple):
    """A format of examples' prompts; without a text and a chat template, the tokenizer's own."""

    text: str | None  # of a prompt, around {instruction}; None: it becomes a chat
    accepts_text: bool  # examples of plain text are trained as they are
    # (tokenizer, turns) -> the ids and labels of a chat; None: by `encode_chat`
    encode_turns: Callable[[Any, list[Mapping]], tuple[list[int], list[int]]] | None


PROMPTS: dict[str, PromptFormat] = {}
TEMPLATES: dict[str, str] = {}  # the chat templates of the formats that have one


def register_prompt(
    name: str,
    *,
    text: str | None = None,
    chat_template: str | None = None,
    accepts_text: bool = False,
    encode_turns: Callable[[Any, list[Mapping]], tuple[list[int], list[int]]] | None = None,
) -> None:
    """Add a prompt format to PROMPTS.

    Args:
        name: What `--prompt` and recipes call it.
        text: The prompt, around {instruction}, of examples with prompt and completion; chats are
            then refused. By default they become chats.
        chat_template: The template of chats; by default the tokenizer's own.
        accepts_text: Whether examples of plain text are trained as they are.
        encode_turns: (tokenizer, turns) -> the ids and labels of a chat; by default `encode_chat`.
    """
    PROMPTS[name] = PromptFormat(text, accepts_text, encode_turns)
    if chat_template is not None:
        TEMPLATES[name] = chat_template


# the prompt of DeepSeek's chat models, whose answers begin with a space
DEEPSEEK_CHAT = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant:' }}"
    "{% generation %}{{ ' ' + message['content'] + (eos_token or '') }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
register_prompt("plain", text="{instruction}", accepts_text=True)
register_prompt("chat")
register_prompt("deepseek", chat_template=DEEPSEEK_CHAT, accepts_text=True)


def put_prompt(row: Mapping, prompt: str) -> Mapping:
    """Return an example with its prompt in a format of PROMPTS.

    "plain" accepts every layout, formats with a text prompt and completion, "chat" also messages,
    "deepseek" also plain text.

    Raises:
        ValueError: The format is unknown, or the layout does not fit.
    """
    check_choice("prompt", prompt, tuple(PROMPTS))
    if prompt == "plain":
        return row
    form = PROMPTS[prompt]
    if (form.text is None and chat_of(row)) or (form.accepts_text and "text" in row):
        return row
    question = row.get("prompt")
    answer = row.get("completion")
    if not isinstance(question, str) or "completion" not in row:
        raise ValueError(
            f"Prompt {prompt!r} requires the columns prompt and completion as text, but got "
            f"{', '.join(row)}"
        )
    if form.text is None:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": turns}
    # replace instead of format, as code contains braces
    return {"prompt": form.text.replace("{instruction}", question), "completion": answer}


def chat_of(row: Mapping) -> tuple[list[Mapping], int] | None:
    """Return the turns of a chat and how many of them form its prompt; None if it is no chat."""
    if "messages" in row:
        return list(row["messages"]), 0
    if isinstance(row.get("prompt"), list | tuple):
        return [*row["prompt"], *row["completion"]], len(row["prompt"])
    return None


def encode_chat(
    tokenizer: Any, row: Mapping, train_on: str = "assistant", prompt: str = "plain"
) -> tuple[list[int], list[bool]]:
    """Return the ids of a chat, as apply_chat_template computes them, and which are trained.

    Args:
        tokenizer: A transformers tokenizer.
        row: An example with messages, or with prompt and completion as lists of turns.
        train_on: "assistant" for the assistant's turns with their end-of-turn tokens, except those
            in the prompt; or "all".
        prompt: One of PROMPTS, whose template replaces the tokenizer's.

    Raises:
        ValueError: The template rejects the chat, or the turns cannot be located in its output.
    """
    messages, first = chat_of(row) or ([], 0)
    tools = row.get("tools") or None
    options = dict(row.get("chat_template_kwargs") or {})
    if prompt in TEMPLATES:
        options["chat_template"] = TEMPLATES[prompt]
    elif not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "The tokenizer has no chat template, which chats require. Pass --chat_template_path to "
            "moe-runtime train, or put a chat_template.jinja into the model's folder"
        )

    def render(turns: Sequence[Mapping], **more: Any) -> Any:
        return tokenizer.apply_chat_template(
            turns,
            **options,
            **{"tokenize": False} | more,
        )

    problem = f"The chat template rejects {shown(messages)}"
    remedy = "Use roles and contents that it supports"
    try:  # a template is a program and may raise anything
        options["tools"] = json.loads(tools) if isinstance(tools, str) else tools
        ids = render(messages, tokenize=True, return_dict=True)["input_ids"]
        if train_on == "all":
            return ids, [True] * len(ids)
        problem = "The assistant's turns cannot be located in the output of the chat template"
        remedy = (
            "Mark them with {% generation %} and {% endgeneration %}, or train on all tokens with "
            "--train-on all"
        )
        template = tokenizer.get_chat_template(options.get("chat_template"), options["tools"])
        if _GENERATION.search(template):
            mask = _marked_mask(render, messages, first)
        else:
            mask = _rendered_mask(tokenizer, render, messages, first)
        if any(mask):
            return ids, mask
        reason = f"no token of {shown(messages)} belongs to an answer"
    except Exception as error:
        reason = one_line(error, 300) or type(error).__name__
    raise ValueError(f"{problem}: {reason}. {remedy}")


_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers searches for it
_MARK = "\ufdd0"  # a Unicode noncharacter, which occurs in no template


def _common(one: Sequence, other: Sequence) -> int:
    """Return the length of the common prefix."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _marked_mask(render: Callable, messages: list[Mapping], first: int) -> list[bool]:
    """Return which ids after the first turns the template marks as generated."""
    whole = render(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    skip = 0
    if first:
        prompt = render(
            messages[:first],
            tokenize=True,
            return_dict=True,
            add_generation_prompt=True,
        )
        skip = _common(prompt["input_ids"], whole["input_ids"])
    return [bool(mark) and i >= skip for i, mark in enumerate(whole["assistant_masks"])]


def _rendered_mask(
    tokenizer: Any, render: Callable, messages: list[Mapping], first: int
) -> list[bool]:
    """Return which ids after the first turns are in the assistant's turns, by their positions."""
    text = render(messages)
    turns = []
    for i in range(first, len(messages)):
        if messages[i]["role"] == "assistant":
            turns.append(_turn(tokenizer, render, text, messages, i))
    encoded = render(
        messages, tokenize=True, return_dict=True, tokenizer_kwargs={"return_offsets_mapping": True}
    )
    offsets = encoded["offset_mapping"]
    return [any(a < end and b > start for start, end in turns) for a, b in offsets]


def _turn(
    tokenizer: Any, render: Callable, text: str, messages: list[Mapping], i: int
) -> tuple[int, int]:
    """Return where the assistant's turn i begins and ends in the rendered chat.

    Raises ValueError if it is not found.
    """
    content = messages[i].get("content")
    if not isinstance(content, str):
        content = ""
    # templates drop the reasoning of earlier turns
    answer = content.rpartition("</think>")[2]
    visible = answer.strip()

    def position(at: int) -> int:
        """Return where this character of the content is in the text, or 0 if it is not there."""
        marked = {
            **messages[i],
            "content": content[:at] + _MARK + content[at:],
        }
        other = render([*messages[:i], marked, *messages[i + 1 :]])
        return _common(text, other) if other != text else 0

    before = ""
    prompt = ""
    if i:
        before = render(messages[:i])
        prompt = render(messages[:i], add_generation_prompt=True)
    until = render(messages[: i + 1])
    start = len(prompt)
    end = len(until)
    # no generation prompt, or one that differs from what precedes an answer
    if prompt == before or not text.startswith(prompt):
        start = len(before) if text.startswith(before) else end
        begin = position(len(content) - len(answer))
        if text[start:begin].strip():
            start = begin  # after the role's header
    tail = until[start:]
    if visible:
        tail = tail.partition(visible)[2]
    ends = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    # later turns change this one: its reasoning is dropped, or it ends with another token
    if not text.startswith(until):
        end = position(len(content))
        ends = [tail.strip(), *ends]
    elif tail:
        ends = []
        if tail.strip():  # whitespace ends a turn only where nothing else does
            end = len(until.rstrip())
    end += max((len(one) for one in ends if one and text.startswith(one, end)), default=0)
    if start >= end:
        raise ValueError(
            f"turn {i + 1} of {shown(messages)} is rendered differently when other turns follow it"
        )
    return start, end
