"""Prompts in each specialist's template, and answers by ids."""

import copy

import pytest
from tokenizers import processors

from moe_runtime.methods.ultrafuser.inputs import TEMPLATES, Encoder, check_template
from tests.methods.ultrafuser import fusers

VOCAB = fusers.VOCAB


@pytest.fixture(scope="module")
def encoder():
    chat = copy.deepcopy(fusers.tokenizer())
    templates = [TEMPLATES["ultralm"], "[INST] {system}{prompt} [/INST]", "chat"]
    return Encoder(
        [fusers.tokenizer(), fusers.tokenizer(), chat],
        templates,
        VOCAB,
    )


def text_of(encoder, ids):
    return encoder.tokenizer.decode(ids)


def test_each_specialist_sees_its_own_template(encoder):
    assert [text_of(encoder, ids) for ids in encoder.prompt("2+{prompt}?")] == [
        "<s>User: 2+{prompt}?\nAssistant:",
        "<s>[INST] 2+{prompt}? [/INST]",
        "<s><|user|>\n2+{prompt}?</s>\n<|assistant|>\n",
    ]


def test_templates_of_the_paper():
    tokenizer = fusers.tokenizer()
    names = ("ultralm", "codellama", "wizardmath")
    templates = [check_template(name) for name in names]
    prompts = Encoder([tokenizer] * 3, templates, VOCAB).prompt("Why?")
    texts = [tokenizer.decode(ids) for ids in prompts]
    assert texts[:2] == ["<s>User: Why?\nAssistant:", "<s>[INST] Why? [/INST]"]
    assert texts[2].startswith("<s>Below is an instruction that describes a task. Write a response")
    assert texts[2].endswith("\n\n### Instruction:\nWhy?\n\n### Response:")


def test_bos_appears_once_if_the_tokenizer_adds_one():
    other = fusers.tokenizer()
    spelled, begun = Encoder([other] * 2, ["<s>{prompt}", "{prompt}"], VOCAB).prompt("hi")
    assert spelled == begun
    assert spelled.count(other.bos_token_id) == 1
    plain = copy.deepcopy(other)
    plain.backend_tokenizer.post_processor = processors.Sequence([])
    bare, spelled = Encoder([plain] * 2, ["{prompt}", "<s>{prompt}"], VOCAB).prompt("hi")
    assert begun == spelled == [plain.bos_token_id, *bare]


def test_answers_and_padding_have_ids_that_all_have():
    larger = copy.deepcopy(fusers.tokenizer())
    larger.add_tokens(["<more>"], special_tokens=True)
    encoder = Encoder(
        [larger, fusers.tokenizer()],
        ["{prompt}", "{prompt}"],
        VOCAB,
    )
    assert encoder.tokenizer is encoder.tokenizers[1]
    assert len(encoder.answer("<more>")) > 2
    larger.pad_token = "<more>"
    size = len(fusers.tokenizer())
    assert (
        Encoder(
            [larger, larger],
            ["{prompt}"] * 2,
            size,
        ).pad_token_id
        == 0
    )
    assert (
        Encoder(
            [larger, larger],
            ["{prompt}"] * 2,
            VOCAB,
        ).pad_token_id
        == size
    )


def test_chats_and_system_texts(encoder):
    fits = Encoder(
        encoder.tokenizers[1:],
        encoder.templates[1:],
        VOCAB,
    )
    chat = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi"}]
    assert [text_of(encoder, ids) for ids in fits.prompt(chat)] == [
        "<s>[INST] Be brief. Hi [/INST]",
        "<s><|system|>\nBe brief. </s>\n<|user|>\nHi</s>\n<|assistant|>\n",
    ]
    assert fits.prompt("Hi", system="Be brief. ") == fits.prompt(chat)
    turns = [
        *chat,
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": "?"},
    ]
    (ids,) = Encoder(
        encoder.tokenizers[2:],
        ["chat"],
        VOCAB,
    ).prompt(turns)
    assert text_of(encoder, ids).endswith("Yo</s>\n<|user|>\n?</s>\n<|assistant|>\n")
    with pytest.raises(ValueError, match="INST.* does not support the turns user, assistant, user"):
        fits.prompt(turns)
    with pytest.raises(ValueError, match="at most one system text, .* system is 'x'"):
        fits.prompt(chat, system="x")


def test_answer_ids_do_not_depend_on_the_prompt(encoder):
    prompts = ["add 2 and 3", "fox"]
    answers = ["2 + 3 = 5", "The quick brown fox jumps"]
    batch = encoder.batch(prompts, answers)
    eos = encoder.tokenizer.eos_token_id
    for row, text in enumerate(answers):
        expected = [*encoder.tokenizer.encode(text, add_special_tokens=False), eos]
        assert encoder.answer(text) == expected
        size = len(expected)
        assert batch["labels"][row, :size].tolist() == expected
        assert batch["response_ids"][row, :size].tolist() == expected
        assert (batch["labels"][row, size:] == -100).all()
        assert (batch["response_ids"][row, size:] == encoder.pad_token_id).all()
        for s, ids in enumerate(encoder.prompt(prompts[row])):
            # padded on the left
            assert batch["prompt_ids"][s][row, -len(ids) :].tolist() == ids
            mask = batch["prompt_mask"][s][row]
            assert mask[-len(ids) :].all()
            assert mask.sum() == len(ids)
    assert encoder.answer("ab", end=False) + [eos] == encoder.answer("ab")
    assert set(encoder.batch(["x"])) == {"prompt_ids", "prompt_mask"}


def test_bad_prompts_are_named(encoder):
    for prompts, words in (
        ("one", "prompts must be a list"),
        ([[{"role": "assistant", "content": "x"}]], "that end with the user's"),
    ):
        with pytest.raises(ValueError, match=words):
            encoder.batch(prompts)
    with pytest.raises(ValueError, match="must be below 50"):
        Encoder(encoder.tokenizers, encoder.templates, 50).answer("x")
