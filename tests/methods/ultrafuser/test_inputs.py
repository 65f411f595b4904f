"""Prompts in each specialist's template and answers by ids."""

import copy

import pytest
import torch
from tokenizers import processors

from moe_runtime.methods.ultrafuser.inputs import TEMPLATES, Encoder, check_template
from tests.methods.ultrafuser import fusers

VOCAB = fusers.VOCAB


@pytest.fixture(scope="module")
def encoder():
    chat = copy.deepcopy(fusers.tokenizer())
    templates = [TEMPLATES["ultralm"], "[INST] {system}{prompt} [/INST]", "chat"]
    return Encoder([fusers.tokenizer(), fusers.tokenizer(), chat], templates, VOCAB)


def text_of(encoder, ids):
    return encoder.tokenizer.decode(ids)


def test_each_specialist_sees_its_own_template(encoder):
    assert [text_of(encoder, ids) for ids in encoder.prompt("2+{prompt}?")] == [
        "<s>User: 2+{prompt}?\nAssistant:",
        "<s>[INST] 2+{prompt}? [/INST]",
        "<s><|user|>\n2+{prompt}?</s>\n<|assistant|>\n",
    ]


@pytest.mark.parametrize(
    "name, text",
    [
        ("ultralm", "<s>User: Why?\nAssistant:"),
        ("codellama", "<s>[INST] Why? [/INST]"),
        (
            "wizardmath",
            "<s>Below is an instruction that describes a task. Write a response that "
            "appropriately completes the request.\n"
            "\n"
            "### Instruction:\n"
            "Why?\n"
            "\n"
            "### Response:",
        ),
    ],
)
def test_templates_of_the_paper(name, text):
    own = fusers.tokenizer()
    ids = Encoder([own, own], [check_template(name)] * 2, VOCAB).prompt("Why?")
    assert own.decode(ids[0]) == text and ids[0] == ids[1]


def test_bos_stands_once():
    own = fusers.tokenizer()
    spelled = Encoder([own, own], ["<s>{prompt}", "{prompt}"], VOCAB)
    assert (
        spelled.prompt("hi")[0] == spelled.prompt("hi")[1]
        and spelled.prompt("hi")[0].count(own.bos_token_id) == 1
    )


def test_a_bos_that_the_tokenizer_does_not_put_is_left_out():
    own = copy.deepcopy(fusers.tokenizer())
    other = fusers.tokenizer()
    own.backend_tokenizer.post_processor = processors.Sequence([])
    assert own.bos_token_id is not None and own.encode("hi")[:1] != [own.bos_token_id]
    bare, begun = Encoder([own, other], ["{prompt}", "{prompt}"], VOCAB).prompt("hi")
    assert begun == [own.bos_token_id, *bare]
    assert Encoder([own, other], ["<s>{prompt}", "{prompt}"], VOCAB).prompt("hi") == [begun, begun]


def test_answers_and_padding_have_ids_that_all_have():
    larger = copy.deepcopy(fusers.tokenizer())
    larger.add_tokens(["<more>"], special_tokens=True)
    encoder = Encoder([larger, fusers.tokenizer()], ["{prompt}", "{prompt}"], VOCAB)
    assert encoder.tokenizer is encoder.tokenizers[1] and len(encoder.answer("<more>")) > 2
    larger.pad_token = "<more>"
    size = len(fusers.tokenizer())
    assert Encoder([larger, larger], ["{prompt}"] * 2, size).pad_token_id == 0
    assert Encoder([larger, larger], ["{prompt}"] * 2, VOCAB).pad_token_id == size


def test_chats_and_system_texts(encoder):
    fits = Encoder(encoder.tokenizers[1:], encoder.templates[1:], VOCAB)
    want = [
        "<s>[INST] Be brief. Hi [/INST]",
        "<s><|system|>\nBe brief. </s>\n<|user|>\nHi</s>\n<|assistant|>\n",
    ]
    chat = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi"}]
    assert [text_of(encoder, ids) for ids in fits.prompt(chat)] == want
    assert fits.prompt("Hi", system="Be brief. ") == fits.prompt(chat)
    turns = [*chat, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "?"}]
    only = Encoder(encoder.tokenizers[2:], ["chat"], VOCAB)
    assert text_of(encoder, only.prompt(turns)[0]).endswith(
        "Yo</s>\n<|user|>\n?</s>\n<|assistant|>\n"
    )
    with pytest.raises(
        ValueError, match="Template .*INST.* does not support the turns user, assistant, user"
    ):
        fits.prompt(turns)
    with pytest.raises(ValueError, match="does not support the turns system, user"):
        encoder.prompt(chat)
    with pytest.raises(ValueError, match="at most one system text, .* system is 'x'"):
        fits.prompt(chat, system="x")


def test_answers_are_the_same_ids_whatever_stands_before(encoder):
    batch = encoder.batch(["add 2 and 3", "fox"], ["2 + 3 = 5", "The quick brown fox jumps"])
    eos = encoder.tokenizer.eos_token_id
    pad = encoder.pad_token_id
    for row, text in enumerate(["2 + 3 = 5", "The quick brown fox jumps"]):
        ids = batch["labels"][row][batch["labels"][row] != -100]
        assert (
            ids.tolist()
            == encoder.answer(text)
            == [*encoder.tokenizer.encode(text, add_special_tokens=False), eos]
        )
        assert torch.equal(batch["response_ids"][row, : len(ids)], ids)
        assert (batch["response_ids"][row, len(ids) :] == pad).all()
        for s, own in enumerate(encoder.prompt(["add 2 and 3", "fox"][row])):
            assert batch["prompt_ids"][s][row][batch["prompt_mask"][s][row].bool()].tolist() == own
            assert batch["prompt_mask"][s][row].tolist() == sorted(
                batch["prompt_mask"][s][row].tolist()
            )
    assert encoder.answer("ab", end=False) + [eos] == encoder.answer("ab")
    assert set(encoder.batch(["x"])) == {"prompt_ids", "prompt_mask"}


@pytest.mark.parametrize(
    "call, words",
    [
        pytest.param(
            lambda e: e.batch("one"), "prompts is 'one' and responses is None", id="no list"
        ),
        pytest.param(lambda e: e.batch([]), "prompts is [] and responses is None", id="empty"),
        pytest.param(
            lambda e: e.batch(["a", "b"], ["c"]),
            "prompts is ['a', 'b'] and responses is ['c']",
            id="few",
        ),
        pytest.param(lambda e: e.batch([None]), "prompt is None and system is None", id="none"),
        pytest.param(lambda e: e.batch([3]), "prompt is 3 and system is None", id="number"),
        pytest.param(
            lambda e: e.batch([{"role": "user", "content": "x"}]),
            "prompt is {'role': 'user'",
            id="a turn alone",
        ),
        pytest.param(
            lambda e: e.prompt([{"role": "user"}]), "messages with role and content", id="turn"
        ),
        pytest.param(
            lambda e: e.prompt([{"role": "assistant", "content": "x"}]),
            "that end with the user's",
            id="no question",
        ),
        pytest.param(
            lambda e: Encoder(e.tokenizers, e.templates, 50).answer("x"),
            "must be below 50",
            id="ids",
        ),
    ],
)
def test_bad_prompts_are_named(encoder, call, words):
    with pytest.raises(ValueError) as error:
        call(encoder)
    assert words in str(error.value)
