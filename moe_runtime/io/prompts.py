"""How a row's prompt is presented to the model: as it is, in Magicoder's format, as a chat; and the chat templates."""

from collections.abc import Mapping

# how a row's prompt is put to the model; "chat" is the tokenizer's own template
PROMPTS = {
    "plain": "{instruction}",
    # Magicoder's, of the XFT paper's models: text before the instruction, and none behind "@@ Response" but a line feed
    "magicoder": (
        "You are an exceptionally intelligent coding assistant that consistently delivers accurate and reliable "
        "responses to user instructions.\n\n@@ Instruction\n{instruction}\n\n@@ Response\n"
    ),
    "chat": None,
    "deepseek": None,  # DEEPSEEK_CHAT
}
# the same as a chat template, for whoever asks a tuned model by its tokenizer's: evaluations, servers
MAGICODER_CHAT = (
    "{{ bos_token or '' }}" + PROMPTS["magicoder"].partition("@@")[0] + "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '@@ Instruction\\n' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '@@ Response\\n' }}"
    "{% generation %}{{ message['content'] + (eos_token or '') }}{% endgeneration %}"
    "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}"
    "{% else %}{{ raise_exception('the roles are user and assistant') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '@@ Response\\n' }}{% endif %}"
)

# what ESFT's tasks were trained in: the prompt of DeepSeek's chat models, whose answers begin with a blank
DEEPSEEK_CHAT = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant:' }}"
    "{% generation %}{{ ' ' + message['content'] + (eos_token or '') }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def put_prompt(row: Mapping, prompt: str) -> Mapping:
    """Return a row whose prompt is put as PROMPTS says; raises ValueError for a layout that does not fit.

    "plain" takes every layout, "magicoder" prompt and completion, "chat" messages too, "deepseek" plain text as well.
    """
    if prompt not in PROMPTS:
        raise ValueError(f"prompt is {prompt!r}; want one of {', '.join(PROMPTS)}")
    if prompt == "plain" or (prompt != "magicoder" and "messages" in row) or (prompt == "deepseek" and "text" in row):
        return row
    question, answer = row.get("prompt"), row.get("completion")
    if not isinstance(question, str) or "completion" not in row:
        raise ValueError(f"prompt is {prompt!r}, a row has the columns {', '.join(row)}; want prompt and completion as text")
    if PROMPTS[prompt] is None:
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    # replace, not format: code has braces
    return {"prompt": PROMPTS[prompt].replace("{instruction}", question), "completion": answer}
