"""ESFT's released data: the ids and labels of the prompt "esft", and its files."""

import json

import pytest

import moe_runtime.methods  # noqa: F401 - registers the prompt
from moe_runtime.io import rows as data
from papers.engine.tiny import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["User: 1 and 2\n\nAssistant: 3 \n"] * 9, 300)


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CHATS = {
    "one answer": [turn("user", " 1 and 2\n"), turn("assistant", "3\n\n")],
    "a masked answer": [
        turn("user", "1"),
        turn("assistant", "2", mask=1),
        turn("user", "2"),
        turn("assistant", " 3", mask=0),
    ],
}


@pytest.mark.parametrize("name", CHATS)
def test_turns_are_stripped_and_encoded_apart(tokenizer, name):
    expected = [tokenizer.bos_token_id]
    labels = [tokenizer.bos_token_id]  # BOS is its own label
    for one in CHATS[name]:
        is_user = one["role"] == "user"
        if is_user:
            text = f"User: {one['content'].strip()}\n\nAssistant:"
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(
                f" {one['content'].strip()}",
                add_special_tokens=False,
            )
            ids.append(tokenizer.eos_token_id)
        expected += ids
        if is_user or one.get("mask"):
            labels += [-100] * len(ids)
        else:
            labels += ids
    chat = {"messages": CHATS[name]}
    assert data.encode(tokenizer, chat, "esft") == (expected, labels)
    assert data.encode(tokenizer, chat, "esft", "all") == (expected, expected)
    if name == "one answer":
        pair = {"prompt": " 1 and 2\n", "completion": "3\n\n"}
        assert data.encode(tokenizer, pair, "esft") == (expected, labels)


@pytest.mark.parametrize(
    "first", [turn("system", "s"), turn("user", ["1"])], ids=["system", "parts"]
)
def test_other_turns_are_refused(tokenizer, first):
    chat = [first, turn("user", "1"), turn("assistant", "2")]
    with pytest.raises(ValueError, match="requires text by the user or the assistant, but turn 1"):
        data.encode(tokenizer, {"messages": chat}, "esft")


def write_rows(path, rows):
    """Write JSON or JSONL, depending on the file's name."""
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_keys_of_later_turns_are_read(tmp_path):
    """`datasets` infers types from the first thousand examples."""
    rows = []
    for _ in range(1501):
        rows.append({"messages": [turn("user", "1"), turn("assistant", "2")]})
    rows[1500]["messages"][1]["mask"] = 1
    read = data.read_rows(write_rows(tmp_path / "rows.jsonl", rows))
    assert [read[0], read[1500]] == [rows[0], rows[1500]]


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_evaluation_files(tmp_path, kind):
    row = {
        "idx": 0,
        "prompt": "User: 7?\n\nAssistant:",
        "raw_answers": ["7", "x"],
        "answers": [[1]],
    }
    path = write_rows(tmp_path / f"intent.{kind}", [row])
    assert list(data.read_rows(path)) == [{"prompt": "7?", "completion": "7"}]


@pytest.mark.parametrize("kind", ["jsonl", "json"])
@pytest.mark.parametrize("is_oss", [True, False])
def test_oss_instruct_asks_for_a_solution(tmp_path, kind, is_oss):
    row = {"problem": "Add.", "solution": "+"}
    prompt = "Add."
    if is_oss:
        row |= {"lang": "python", "seed": "x"}
        prompt = "Write a solution to the following coding problem:\nAdd."
    path = write_rows(tmp_path / f"oss.{kind}", [row])
    assert list(data.read_rows(path)) == [{"prompt": prompt, "completion": "+"}]


def test_a_chat_that_would_train_only_bos_is_dropped(tokenizer):
    masked = [turn("user", "1"), turn("assistant", "2", mask=1)]
    chats = [{"messages": masked}, {"messages": CHATS["one answer"]}]
    assert len(data.tokenize_pairs(tokenizer, chats, 64, prompt="esft")) == 1
