"""Chats to ids and a loss mask, with templates shaped like published ones, and with TRL's."""

import copy
import re
from pathlib import Path

import pytest

from moe_runtime.io import rows as data
from moe_runtime.io.prompts import PROMPTS, encode_chat, put_prompt, register_prompt
from papers.engine.tiny import train_tokenizer

LOOP = "{% for m in messages %}"
CHATML = LOOP + (
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# reasoning is rendered only after the last user turn, as an empty block if there is none
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set "
    "ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role "
    "}}\n{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}{% if "
    "loop.index0 > ns.last %}<think>\n{% if parts | length > 1 %}{{ parts[0].replace('<think>', "
    "'').strip() }}{% endif %}{{ '\n</think>\n\n' }}{% endif %}{{ parts[-1].lstrip('\n') }}{% else "
    "%}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif "
    "%}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}"
    + LOOP
    + (
        "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% "
        "endfor %}{% if add_generation_prompt "
        "%}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )
)
DEEPSEEK = (
    "{{ bos_token }}"
    + LOOP
    + (
        "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<|User|>{{ m.content "
        "}}{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif "
        "%}{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
    )
)
# the prompt opens the reasoning
REASONER = DEEPSEEK.replace("<|Assistant|>{% endif %}", "<|Assistant|><think>\n{% endif %}")
# no generation prompt; the system text is part of the first user turn, and the roles must alternate
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + "
    "'\n\n' %}{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if (m.role == "
    "'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('the roles must alternate') }}{% endif "
    "%}{% if m.role == 'user' %}[INST] {% if loop.first and first %}{{ first }}{% endif %}{{ "
    "m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# the system text is in the last user turn
LATE = MISTRAL.replace("if loop.first", "if loop.last or loop.revindex == 2")
GEMMA = (
    (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no role system') "
        "}}{% endif %}"
    )
    + LOOP
    + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role "
    "}}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt "
    "%}<start_of_turn>model\n{% endif %}"
)
ZEPHYR = LOOP + (
    "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>\n{% endif %}"
)
UNPROMPTED = CHATML.partition("{% if add")[0]  # a header per role, and no generation prompt
OTHER_END = CHATML.replace(
    "<|im_end|>", "{{ '<|eot_id|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}"
)
# the token of the next role ends a turn
OPEN = LOOP + (
    "<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% "
    "endif %}"
)
PLAIN = LOOP + (
    "{{ m.role }}:\n{{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}assistant:\n{% "
    "endif %}"
)
TOKENIZER = train_tokenizer(
    ["two and two is four: system user assistant model\n\n def f(x): return x + 1"] * 20, 330
)
SPECIAL = set(re.findall(r"<\|?\w+\|?>", CHATML + LLAMA3 + REASONER + GEMMA)) | {
    "<think>",
    "</think>",
    "[INST]",
    "[/INST]",
}
TOKENIZER.add_special_tokens(
    {"additional_special_tokens": sorted(SPECIAL - set(TOKENIZER.get_vocab()))}
)


def chat(*texts: str, system: bool = True) -> list[dict]:
    """Alternate turns of a user and an assistant."""
    turns = [{"role": "system", "content": "Be brief."}] if system else []
    for i, text in enumerate(texts):
        turns.append({"role": ("user", "assistant")[i % 2], "content": text})
    return turns


def with_template(template: str | None):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    return tokenizer


def trained_spans(tokenizer, ids, mask) -> list[str]:
    """Return the trained spans of an example as texts."""
    text = "".join(tokenizer.decode([i]) if one else "\0" for i, one in zip(ids, mask, strict=True))
    return [part for part in text.split("\0") if part]


# the second answer repeats the first, the third is a letter of "assistant", the last ends with a
# line feed
TEXTS = ("two and two", "four", "and?", "four", "an a?", "a", "code?", "def f(x):\n    return x\n")


@pytest.mark.parametrize(
    "template, first, end, strips",
    [
        pytest.param(CHATML, "", "<|im_end|>", False, id="chatml"),
        pytest.param(LLAMA3, "", "<|eot_id|>", True, id="llama3"),
        pytest.param(QWEN3, "", "<|im_end|>", False, id="qwen3"),
        pytest.param(REASONER, "", "</s>", False, id="deepseek-reasoner"),
        pytest.param(MISTRAL, " ", "</s>", False, id="mistral"),
        pytest.param(GEMMA, "", "<end_of_turn>", True, id="gemma"),
        pytest.param(ZEPHYR, "", "</s>", False, id="zephyr"),
        pytest.param(UNPROMPTED, "", "<|im_end|>", False, id="no-generation-prompt"),
        pytest.param(OTHER_END, "", "<|im_end|>", False, id="another-end-of-the-last-turn"),
        pytest.param(PLAIN, "", "\n\n", False, id="whitespace-ends-a-turn"),
        pytest.param(OPEN, "", "<|user|>", False, id="the-next-role-ends-a-turn"),
    ],
)
@pytest.mark.parametrize("system", [True, False], ids=["system", "no-system"])
def test_answers_and_the_ends_of_their_turns_are_trained(template, first, end, strips, system):
    tokenizer = with_template(template)
    row = {"messages": chat(*TEXTS, system=system)}
    if template is GEMMA and system:
        with pytest.raises(ValueError, match="The chat template rejects .*no role system."):
            encode_chat(tokenizer, row)
        return
    ids, mask = encode_chat(tokenizer, row)

    assert ids == tokenizer.apply_chat_template(row["messages"])["input_ids"]
    assert ids.count(tokenizer.bos_token_id) <= 1
    answers = []
    for text in TEXTS[1::2]:
        answers.append(first + (text.strip() if strips else text) + end)
    if template is QWEN3:
        answers[-1] = "<think>\n\n</think>\n\n" + answers[-1]
    if template is OTHER_END:
        answers[-1] = TEXTS[-1] + "<|eot_id|>"
    if template is OPEN:
        answers[-1] = TEXTS[-1]
    assert trained_spans(tokenizer, ids, mask) == answers
    assert data.encode(tokenizer, row, train_on="all") == (ids, ids)
    assert data.encode(tokenizer, row)[0] == ids


THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(
    "template, options, answers",
    [
        pytest.param(
            QWEN3,
            {},
            ["four<|im_end|>", f"{THOUGHT}a<|im_end|>"],
            id="qwen3",
        ),
        pytest.param(
            QWEN3,
            {"enable_thinking": False},
            ["four<|im_end|>", "a<|im_end|>"],
            id="the-prompt-ends-it",
        ),
        pytest.param(
            REASONER,
            {},
            ["four</s>", "a</s>"],
            id="dropped-everywhere",
        ),
    ],
)
def test_reasoning_that_the_template_drops_is_not_looked_for(template, options, answers):
    tokenizer = with_template(template)
    messages = chat(
        "two?",
        f"{THOUGHT}four",
        "and a?",
        f"{THOUGHT}a",
    )
    ids, mask = encode_chat(tokenizer, {"messages": messages, "chat_template_kwargs": options})

    assert [part.strip("\n") for part in trained_spans(tokenizer, ids, mask)] == answers
    assert ids == tokenizer.apply_chat_template(messages, **options)["input_ids"]


def trl_template(name: str) -> str:
    trl = pytest.importorskip("trl")
    path = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"this TRL has no {path.name}")
    return path.read_text()


# what TRL trains in addition: the header of a role, a line feed after the end of a turn
@pytest.mark.parametrize(
    "name, before, after",
    [
        ("llama3", "", ""),
        ("qwen2_5", "\n", "\n"),
        ("gemma", "", "\n"),
        ("deepseekv3", "<｜Assistant｜>", ""),
        ("gptoss", "<|start|>assistant", ""),
    ],
)
def test_the_mask_is_that_of_trls_training_templates(name, before, after):
    """Compares TRL's copies of published templates, without {% generation %}, with TRL's own
    templates, which have it.
    """
    stock = trl_template(name)
    tokenizer = with_template(trl_template(f"{name}_training"))
    tokens = sorted(set(re.findall(r"<[|｜]?[\w▁]+[|｜]?>", stock)) - set(tokenizer.get_vocab()))
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    messages = chat(*TEXTS, system=name != "gemma")
    theirs = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    masks = [bool(one) for one in theirs["assistant_masks"]]

    assert encode_chat(tokenizer, {"messages": messages}) == (theirs["input_ids"], masks)
    tokenizer.chat_template = stock
    ids, mask = encode_chat(tokenizer, {"messages": messages})
    assert ids == theirs["input_ids"]
    ours = trained_spans(tokenizer, ids, mask)
    wider = trained_spans(tokenizer, ids, masks)
    assert wider.pop().removeprefix(before) in (ours[-1], ours[-1] + after)
    assert [part.removeprefix(before).removesuffix(after) for part in wider] == ours[:-1]


MARKED = LOOP + (
    "{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% "
    "endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}{% if "
    "add_generation_prompt %}assistant\n{% endif %}"
)


@pytest.mark.parametrize("template, answer", [(CHATML, "five<|im_end|>"), (MARKED, "five</s>")])
def test_of_a_prompt_of_messages_only_the_completion_is_trained(template, answer):
    turns = chat(
        "two?",
        "four",
        "again?",
        "five",
    )
    tokenizer = with_template(template)
    ids, mask = encode_chat(tokenizer, {"prompt": turns[:-1], "completion": turns[-1:]})

    assert trained_spans(tokenizer, ids, mask) == [answer]
    assert ids == tokenizer.apply_chat_template(turns)["input_ids"]


def test_tools_and_turns_without_content():
    called = "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.name }}{% endfor %}"
    template = CHATML.replace("{{ m.content }}", called)
    tokenizer = with_template("{% for t in tools or [] %}{{ t.name }};{% endfor %}" + template)
    turns = [
        *chat("time?"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"name": "now"}],
        },
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "noon"},
    ]
    ids, mask = encode_chat(tokenizer, {"messages": turns, "tools": '[{"name": "now"}]'})

    assert trained_spans(tokenizer, ids, mask) == ["<call>now<|im_end|>", "noon<|im_end|>"]
    assert tokenizer.decode(ids).startswith("now;<|im_start|>system")


BOTS = LOOP + (
    "{% if m.role == 'bot' %}{% generation %}x{% endgeneration %}{% endif %}{{ m.content }}{% "
    "endfor %}"
)


@pytest.mark.parametrize(
    "template, messages, says",
    [
        (LATE, chat(*TEXTS), "cannot be located .*turn 3 of .* is rendered differently"),
        (BOTS, chat("a", "b"), "no token of .* belongs to an answer"),
    ],
)
def test_a_template_that_cannot_be_masked_is_one_line_with_the_remedy(template, messages, says):
    tokenizer = with_template(template)
    with pytest.raises(ValueError, match=rf"{says}.*\. Mark them .*--train-on all") as error:
        encode_chat(tokenizer, {"messages": messages})
    assert "\n" not in str(error.value)
    ids, mask = encode_chat(tokenizer, {"messages": messages}, "all")
    assert ids == tokenizer.apply_chat_template(messages)["input_ids"]
    assert all(mask)


def test_a_tokenizer_without_a_template_names_the_options():
    tokenizer = with_template(None)
    row = {"messages": chat("a", "b")}
    with pytest.raises(ValueError, match=r"no chat template.*--chat_template_path.*jinja into"):
        encode_chat(tokenizer, row)
    ids, mask = encode_chat(tokenizer, row, prompt="deepseek")
    assert trained_spans(TOKENIZER, ids, mask) == [" b</s>"]


def test_a_registered_format(monkeypatch):
    monkeypatch.setitem(PROMPTS, "question", None)  # which also removes it afterwards
    register_prompt("question", text="Q: {instruction}\nA: ")
    row = {"prompt": "{x}?", "completion": "1"}

    assert put_prompt(row, "question") == {"prompt": "Q: {x}?\nA: ", "completion": "1"}
