"""Rows and prompts: what is read and refused, and what is masked."""

import copy
import datetime
import functools
import json
import re
import sys
from pathlib import Path

import pytest

from moe_runtime.io import rows as data
from moe_runtime.io.prompts import put_prompt
from moe_runtime.methods.prompts import MAGICODER_CHAT
from papers.engine.tiny import train_tokenizer

CHATML = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
CHAT = [{"role": "user", "content": "two and two"}, {"role": "assistant", "content": "four"}]
LAYOUTS = {
    "messages": {"messages": CHAT},
    "prompt-completion": {"prompt": "two and two\n", "completion": "four"},
    "text": {"text": "two and two is four"},
    "instruction-response": {"instruction": "two and two\n", "response": "four"},
    "instruction-output": {"instruction": "two and two\n", "output": "four"},
    "query-response": {"query": "two and two\n", "response": "four"},
    "problem-solution": {"problem": "two and two\n", "solution": "four"},
    "question-answer": {"question": "two and two\n", "answer": "four"},
    "alpaca": {"instruction": "two and two", "input": "", "output": "four"},
    "alpaca-input": {"instruction": "add", "input": "two and two", "output": "four"},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "two and two"},
            {"from": "gpt", "value": "four"},
        ]
    },
    "conversations-of-messages": {"conversations": CHAT},
}
CHATS = ("messages", "sharegpt", "conversations-of-messages")


def in_form(layout: str) -> dict:
    """What a row of LAYOUTS is read as."""
    row = LAYOUTS[layout]
    if layout in CHATS:
        return {"messages": CHAT}
    if layout == "text":
        return row
    texts = list(row.values())
    return {
        "prompt": "add\n\ntwo and two" if layout == "alpaca-input" else texts[0],
        "completion": texts[-1],
    }


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["two and two is four: def f(x): return x + 1"] * 20, 300)


def write(path, rows, kind):
    import datasets

    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_read_rows_reads_each_layout(tmp_path, layout, kind):
    rows = [LAYOUTS[layout] | {"note": i} for i in range(3)]
    got = data.read_rows(write(tmp_path / f"rows.{kind}", rows, kind))

    assert len(got) == 3
    assert got.column_names == list(in_form(layout))
    assert got[2] == in_form(layout)


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_has_one_set_of_ids_and_labels(tokenizer, tmp_path, layout, train_on):
    """Every layout is one of three that are written out here; trained on all, only the mask
    differs.
    """
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHATML  # without {% generation %}
    (row,) = data.read_rows(write(tmp_path / "x.jsonl", [LAYOUTS[layout]], "jsonl"))
    form = in_form(layout)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    if layout in CHATS:
        want = [
            encode("<user>\ntwo and two<end>\n<assistant>\n"),
            encode("four<end>"),
            encode("\n"),
        ]
    elif layout == "text":
        want = [[], [tokenizer.bos_token_id, *encode(form["text"]), tokenizer.eos_token_id], []]
    else:
        want = [
            [tokenizer.bos_token_id, *encode(form["prompt"])],
            [*encode("four"), tokenizer.eos_token_id],
            [],
        ]
    ids = [i for part in want for i in part]
    masked = [-100] * len(want[0]) + want[1] + [-100] * len(want[2])

    for given in (row, LAYOUTS[layout]):  # as read, and as in the file
        assert data.encode(tokenizer, given, train_on=train_on) == (
            ids,
            ids if train_on == "all" else masked,
        )


@pytest.mark.parametrize(
    "row, says",
    [
        ({"prompt": "p"}, "The example has the columns prompt. Rename them to messages"),
        ({"question": "q", "answer": 3}, "The example: completion is 3, but expected a string"),
        ({"text": None}, "The example: text is null, but expected a string"),
    ],
)
def test_encode_names_what_it_cannot_use(tokenizer, row, says):
    with pytest.raises(ValueError, match=says):
        data.encode(tokenizer, row)


def test_the_page_on_data_has_every_layout_in_order():
    text = (Path(__file__).parents[2] / "docs/data.md").read_text()
    table = [
        re.findall(r"`(\w+)`", line.split("|")[1])
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    named = [
        tuple(names[: len(layout)])
        for names, layout in zip(table[:1] + table[2:], data.LAYOUTS, strict=True)
    ]

    assert named == list(data.LAYOUTS)
    assert table[1] == ["prompt", "completion"]


def test_bos_and_eos_are_not_doubled(tokenizer):
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    ids, labels = data.encode(tokenizer, {"text": "<s>two is four</s>"})

    assert ids == labels == [bos, *tokenizer.encode("two is four", add_special_tokens=False), eos]
    ids, _ = data.encode(tokenizer, {"prompt": "<s>two\n", "completion": "four</s>"})
    assert ids[0] == bos
    assert ids.count(bos) == ids.count(eos) == 1


def test_read_rows_keeps_tools_and_prefers_messages(tmp_path):
    rows = [{"prompt": "p", "completion": "c", "messages": CHAT, "tools": "[]"}]
    assert data.read_rows(write(tmp_path / "x.jsonl", rows, "jsonl")).column_names == [
        "messages",
        "tools",
    ]


BAD = {
    "text-null": ({"text": None}, "text is null, but expected a string"),
    "text-number": ({"text": 3}, "text is 3, but expected a string"),
    "completion-null": (
        {"prompt": "p", "completion": None},
        "completion is null, but expected a string",
    ),
    "answer-list": (
        {"question": "q", "answer": ["a"]},
        r"completion is \['a'\], but expected a string",
    ),
    "no-completion": ({"prompt": "p", "completion": "c"}, None),
    "messages-null": ({"messages": None}, "messages is null, but expected a list of messages"),
    "messages-text": (
        {"messages": "hello"},
        "messages is 'hello', but expected a list of messages",
    ),
    "content-null": (
        {"messages": [CHAT[0], CHAT[1] | {"content": None}]},
        "the content of turn 2 is null, but expected a string",
    ),
    "content-number": (
        {"messages": [CHAT[0] | {"content": 7}, CHAT[1]]},
        "the content of turn 1 is 7, but expected a string",
    ),
    "turn-text": (
        {"messages": ["hello", CHAT[1]]},
        "turn 1 is 'hello', but expected role and content",
    ),
    "no-role": (
        {"messages": [{"content": "hi"}, CHAT[1]]},
        "turn 1 is .*, but expected role and content",
    ),
    "input-number": (
        {"instruction": "add", "input": 3, "output": "4"},
        "prompt is 3, but expected a string",
    ),
    "no-answer": (
        {"messages": CHAT[:1]},
        r"the roles are \['user'\], but expected at least one assistant turn",
    ),
    "no-answer-behind-the-prompt": (
        {"prompt": CHAT, "completion": CHAT[:1]},
        "the roles are .*, but expected at least one assistant turn",
    ),
    "sharegpt-role": (
        {"conversations": [{"from": "bob", "value": "hi"}]},
        "turn 1 is {'from': 'bob', .*, but expected role .* gpt",
    ),
    "sharegpt-no-answer": (
        {"conversations": [{"from": "human", "value": "hi"}]},
        r"the roles are \['user'\], but expected",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_with_file_and_line(tmp_path, name):
    bad, says = BAD[name]
    good = next(good for good in LAYOUTS.values() if good.keys() == bad.keys())
    if isinstance(bad.get("prompt"), list):
        good = {"prompt": CHAT[:1], "completion": CHAT[1:]}
    if says is None:  # a later row that lacks a column
        bad = {"prompt": "p"}
        says = "completion is null, but expected a string"
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [good, good, bad])).replace("\n", "\n\n", 1) + "\n")

    with pytest.raises(ValueError, match=f"^line 4 of {path}: {says}") as error:
        data.read_rows(path)
    assert "\n" not in str(error.value)


def test_chats_without_an_answer_are_read_where_none_is_needed(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"messages": CHAT[:1]}], "jsonl")
    assert data.read_rows(path, answers=False)[0] == {"messages": CHAT[:1]}
    with pytest.raises(ValueError, match="^example 1 of .*x.parquet: the roles are"):
        data.read_rows(write(tmp_path / "x.parquet", [{"messages": CHAT[:1]}], "parquet"))


MAGICODER = """You are an exceptionally intelligent coding assistant that consistently delivers \
accurate and reliable responses to user instructions.

@@ Instruction
{}

@@ Response
"""


def test_put_prompt_is_magicoders():
    row = {"prompt": "Write f(x) = {x}.", "completion": "{x}"}
    assert put_prompt(row, "magicoder") == {
        "prompt": MAGICODER.format(row["prompt"]),
        "completion": "{x}",
    }
    assert put_prompt(row, "plain") is row
    assert put_prompt(row, "chat")["messages"] == [
        {"role": "user", "content": "Write f(x) = {x}."},
        {"role": "assistant", "content": "{x}"},
    ]
    assert put_prompt({"messages": CHAT}, "chat") == {"messages": CHAT}


def test_magicoders_chat_template_says_the_same(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = MAGICODER_CHAT
    row = {"prompt": "Write f.\n", "completion": "def f(): {}\n"}
    chat = put_prompt(row, "chat")["messages"]
    put = put_prompt(row, "magicoder")
    whole = tokenizer.bos_token + put["prompt"] + put["completion"] + tokenizer.eos_token

    assert tokenizer.apply_chat_template(chat, tokenize=False) == whole
    asked = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert asked == tokenizer.bos_token + put["prompt"]
    both = tokenizer.apply_chat_template(
        [*chat, chat[0]], tokenize=False, add_generation_prompt=True
    )
    assert both == f"{whole}\n\n@@ Instruction\nWrite f.\n\n\n@@ Response\n"
    (learned,) = data.tokenize_pairs(tokenizer, [{"messages": chat}], 600)
    (direct,) = data.tokenize_pairs(tokenizer, [put], 600)
    assert tokenizer.decode([i for i in learned["labels"] if i != -100]) == "def f(): {}\n</s>"
    assert tokenizer.decode(learned["input_ids"]) == tokenizer.decode(direct["input_ids"])
    with pytest.raises(Exception, match="the roles must be user and assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


@pytest.mark.parametrize(
    "prompt, row",
    [("magicoder", {"text": "x"}), ("magicoder", {"messages": CHAT}), ("chat", {"text": "x"})],
)
def test_put_prompt_refuses_other_layouts(prompt, row):
    with pytest.raises(
        ValueError,
        match=(
            f"Prompt '{prompt}' requires the columns prompt and completion as text, but got "
            f"{next(iter(row))}"
        ),
    ):
        put_prompt(row, prompt)


def test_put_prompt_knows_its_names():
    with pytest.raises(ValueError, match="prompt must be one of plain, chat, .*magicoder"):
        put_prompt({"text": "x"}, "alpaca")


def test_hold_out_parts_the_rows():
    import datasets

    # ten doubles
    rows = datasets.Dataset.from_list(
        [{"prompt": str(i % 30), "completion": "c"} for i in range(40)]
    )
    rest, held_out = data.hold_out(rows, 12)
    rest = [row["prompt"] for row in rest]
    held = [row["prompt"] for row in held_out]

    assert len(held) == 12
    assert not set(rest) & set(held)
    assert set(rest) | set(held) == set(rows["prompt"])
    assert len(rest) == sum(prompt not in held for prompt in rows["prompt"]) <= 28
    assert rest != sorted(rest)
    assert [row["prompt"] for row in data.hold_out(rows, 12)[1]] == held
    with pytest.raises(
        ValueError, match="held_out_rows .40. leaves no training examples: the data has 40"
    ):
        data.hold_out(rows, 40)
    with pytest.raises(
        ValueError,
        match="held_out_rows .1. leaves no training examples: the data has 3, .* duplicates",
    ):
        data.hold_out(rows.select([0, 30, 0]), 1)


def test_read_rows_reads_a_folder(tmp_path):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", [LAYOUTS["text"]] * 2, "jsonl")
    assert len(data.read_rows(tmp_path / "set")) == 2


DAY = "2026-11-22"
DATED = {
    "pair": {"prompt": DAY, "completion": DAY},
    "instruction-output": {"instruction": DAY, "output": DAY},
    "text-output": {"text": DAY, "output": DAY},
    "tools": {"messages": [{"role": "user", "content": DAY}], "tools": [{"name": "today"}]},
}


@pytest.mark.parametrize("layout", DATED)
def test_texts_that_look_like_dates_stay_texts(tmp_path, layout):
    path = write(tmp_path / "rows.jsonl", [DATED[layout]] * 2, "jsonl")
    want = {"instruction-output": DATED["pair"], "text-output": {"text": DAY}}.get(
        layout, DATED[layout]
    )
    assert data.read_rows(path, answers=False).to_list() == [want] * 2


def test_columns_of_later_rows_are_kept(tmp_path):
    rows = [{"messages": CHAT}, {"messages": CHAT, "tools": "[]"}]
    assert data.read_rows(write(tmp_path / "x.jsonl", rows, "jsonl")).to_list() == [
        rows[0] | {"tools": None},
        rows[1],
    ]


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_dates_beside_the_texts_are_no_matter(tmp_path, kind):
    when = datetime.datetime(2026, 11, 22) if kind == "parquet" else 17
    chat = [{"role": "user", "content": "now?", "timestamp": when}]
    tools = [{"name": "timestamp", "parameters": {"timestamp": when}}]
    rows = [{"messages": chat, "tools": tools, "chat_template_kwargs": {"timestamp": when}}] * 2

    assert (
        data.read_rows(write(tmp_path / f"rows.{kind}", rows, kind), answers=False).to_list()
        == rows
    )
    rows = [{"text": datetime.datetime(2026, 11, 22)}]
    with pytest.raises(
        ValueError,
        match="text is datetime.*, but expected a string. Use a .jsonl file, which keeps strings",
    ):
        data.read_rows(write(tmp_path / "dates.parquet", rows, "parquet"))


@pytest.mark.parametrize(
    "line", ['{"text": ' + "[" * 20_000 + "]" * 20_000 + "}", '{"text": '], ids=["deep", "cut off"]
)
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 5000 + line + "\n")
    with pytest.raises(ValueError, match=f"line 5001 of {path} is not valid JSON"):
        data.read_rows(path)


def test_what_is_not_used_is_not_judged(tmp_path):
    """NaN in a column that is dropped, a .json over several lines."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "score": NaN}\n')
    assert data.read_rows(tmp_path / "rows.jsonl").to_list() == [{"text": "a"}]
    (tmp_path / "rows.json").write_text('{\n "text":\n "a"\n}\n')
    assert data.read_rows(tmp_path / "rows.json").to_list() == [{"text": "a"}]
    (tmp_path / "array.jsonl").write_text('[{"text": "a"}, {"text": "b"}]\n')
    with pytest.raises(ValueError, match="line 1 of .* must be a JSON object, but got a list"):
        data.read_rows(tmp_path / "array.jsonl")


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("none.jsonl", None, "does not exist"),
        ("empty.jsonl", "", "is empty"),
        ("empty.json", "[]", "no data"),
        ("bad.jsonl", "{'a':\n", "cannot be read"),
        ("rows.txt", "hello", "ends in '.txt'"),
        (
            "other.jsonl",
            '{"question": "q", "prompt": "p"}',
            "columns question, prompt. Rename them",
        ),
        ("blank.jsonl", "\n\n", "has no examples"),
    ],
)
def test_read_rows_says_what_is_wrong(tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="^Data ") as error:
        data.read_rows(tmp_path / name)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_read_rows_of_an_unreachable_hub_id_is_one_error(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="Data 'nobody/no-such-set' cannot be read"):
        data.read_rows("nobody/no-such-set")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'moe-runtime\[train\]'"):
        data.read_rows("x.jsonl")


def test_tokenize_pairs_stops_at_the_limit(tokenizer):
    seen = []
    long = {"prompt": "two " * 50, "completion": "four"}
    rows = (
        seen.append(row) or row for row in [LAYOUTS["text"], long, LAYOUTS["prompt-completion"]] * 9
    )
    got = data.tokenize_pairs(tokenizer, rows, 32, limit=2)

    assert got.to_list() == data.tokenize_pairs(tokenizer, [seen[0], seen[2]], 32).to_list()
    assert len(seen) == 4


def test_tokenize_pairs_cuts_the_end_and_drops_what_is_all_prompt(tokenizer):
    short = {"prompt": "two\n", "completion": "two two two two two two"}
    rows = [{"prompt": "two and two " * 20, "completion": "four"}, short]
    (whole,) = data.tokenize_pairs(tokenizer, [short], 64)
    (got,) = data.tokenize_pairs(tokenizer, rows, 8, row_ids=True)

    assert got["row_id"] == 1
    assert got["input_ids"] == whole["input_ids"][:8]
    assert got["labels"] == whole["labels"][:8]
    with pytest.raises(ValueError, match="within max_length .8."):
        data.tokenize_pairs(tokenizer, rows[:1], 8)


def test_tokenize_pairs_names_what_it_cannot_use(tokenizer):
    with pytest.raises(
        ValueError,
        match=r"example 1: the columns are \['question'\], but expected messages, prompt",
    ):
        data.tokenize_pairs(tokenizer, [{"question": "q"}], 8)
    with pytest.raises(ValueError, match="no token of .* belongs to an answer"):
        data.tokenize_pairs(tokenizer, [{"messages": CHAT[:1]}], 8)


def test_pack_cuts_joined_documents_into_rows(tokenizer):
    documents = ["def f(x):\n    return x\n" * 9, "import os\n" * 20]
    rows = data.pack(tokenizer, documents, 16)
    ids = [
        i
        for text in documents
        for i in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    ]

    assert len(rows) == len(ids) // 16
    assert [i for row in rows for i in row["input_ids"]] == ids[: 16 * len(rows)]
    for row in rows:
        assert row["labels"] == row["input_ids"]


def test_token_ids_are_those_of_all_rows_that_have_some(tokenizer):
    rows = [
        {"prompt": "two and two\n" * 9, "completion": "four"},
        {"prompt": "", "completion": "four"},
        {"text": "two"},
    ]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = tokenizer.eos_token = None
    want = [
        tokenizer.encode(text, add_special_tokens=False)
        for text in (rows[0]["prompt"], "four", "two")
    ]

    assert list(data.token_ids(tokenizer, [*rows, {"text": ""}], 8)) == [ids[:8] for ids in want]
    # which marks nothing
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    want = tokenizer.encode("two and twofour", add_special_tokens=False)
    assert list(data.token_ids(tokenizer, [{"messages": CHAT}], 50)) == [want]
    with pytest.raises(ValueError, match="example 1: text is 3, but expected a string"):
        list(data.token_ids(tokenizer, [{"text": 3}], 8))


def test_half_a_surrogate_pair_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00 is one"}\n{"text": "half \\ud83d"}\n')
    with pytest.raises(
        ValueError,
        match=rf"line 2 of {re.escape(str(path))} has '.ud83d', half of a surrogate pair",
    ):
        list(data.read_rows(path))
