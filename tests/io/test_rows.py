"""Examples and prompts: what is read and rejected, and what is masked."""

import copy
import functools
import gzip
import json

import datasets
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


PAIR = {"prompt": "two and two\n", "completion": "four"}


TEXT = {"text": "two and two is four"}


# one example of each layout, and the result of reading it
LAYOUTS = {
    "messages": ({"messages": CHAT}, {"messages": CHAT}),
    "text": (TEXT, TEXT),
    "alpaca-input": (
        {"instruction": "add", "input": "two and two", "output": "four"},
        {"prompt": "add\n\ntwo and two", "completion": "four"},
    ),
    "conversations-of-messages": ({"conversations": CHAT}, {"messages": CHAT}),
    "sharegpt-system": (
        {
            "conversations": [
                {"from": "system", "value": "add"},
                {"from": "human", "value": "two and two"},
                {"from": "gpt", "value": "four"},
            ]
        },
        {"messages": [{"role": "system", "content": "add"}, *CHAT]},
    ),
}
for question, answer in [layout for layout in data.LAYOUTS if len(layout) == 2]:
    LAYOUTS[f"{question}-{answer}"] = ({question: "two and two\n", answer: "four"}, PAIR)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["two and two is four: def f(x): return x + 1"] * 20, 300)


def write(path, rows, kind):
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
    row, form = LAYOUTS[layout]
    path = write(tmp_path / f"rows.{kind}", [row | {"note": i} for i in range(3)], kind)
    rows = data.read_rows(path)
    assert len(rows) == 3
    assert rows.column_names == list(form)
    assert rows[2] == form


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_has_one_set_of_ids_and_labels(tokenizer, layout, train_on):
    """Every layout is one of the three that are written out here; with "all", only the mask
    differs.
    """
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHATML  # without {% generation %}
    row, form = LAYOUTS[layout]
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    end = []
    if "messages" in form:
        *before, _ = form["messages"]
        turns = "".join(f"<{turn['role']}>\n{turn['content']}<end>\n" for turn in before)
        prompt = encode(turns + "<assistant>\n")
        answer = encode("four<end>")
        end = encode("\n")
    elif "text" in form:
        prompt = []
        answer = [tokenizer.bos_token_id, *encode(form["text"]), tokenizer.eos_token_id]
    else:
        prompt = [tokenizer.bos_token_id, *encode(form["prompt"])]
        answer = [*encode("four"), tokenizer.eos_token_id]
    ids = prompt + answer + end
    labels = ids
    if train_on == "assistant":
        labels = [-100] * len(prompt) + answer + [-100] * len(end)
    for given in (row, form):  # as in the file, and as read
        assert data.encode(tokenizer, given, train_on=train_on) == (ids, labels)


def test_bos_and_eos_are_not_doubled(tokenizer):
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    ids, labels = data.encode(tokenizer, {"text": "<s>two is four</s>"})
    words = tokenizer.encode("two is four", add_special_tokens=False)
    assert ids == labels == [bos, *words, eos]
    ids, _ = data.encode(tokenizer, {"prompt": "<s>two\n", "completion": "four</s>"})
    assert ids[0] == bos
    assert ids.count(bos) == ids.count(eos) == 1


# a good example, a bad one, and the error
BAD = [
    (TEXT, {"text": 3}, "text is 3, but expected a string"),
    (PAIR, {"prompt": "p"}, "completion is None, but expected a string"),
    ({"messages": CHAT}, {"messages": "hello"}, "messages is 'hello', but expected a list of"),
    (
        {"messages": CHAT},
        {"messages": [CHAT[0], CHAT[1] | {"content": None}]},
        "the content of turn 2 is None, but expected a string",
    ),
    (
        {"conversations": CHAT},
        {"conversations": [{"from": "bob", "value": "hi"}]},
        "turn 1 is {'from': 'bob', .*, but expected role .* gpt",
    ),
    (
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"prompt": CHAT, "completion": CHAT[:1]},
        "the roles are .*, but expected at least one assistant turn",
    ),
]


@pytest.mark.parametrize("good, bad, says", BAD)
def test_a_bad_row_is_named_with_file_and_line(tmp_path, good, bad, says):
    path = tmp_path / "rows.jsonl"
    good = json.dumps(good)
    path.write_text(f"{good}\n\n{good}\n{json.dumps(bad)}\n")
    with pytest.raises(ValueError, match=f"^line 4 of {path}: {says}") as error:
        data.read_rows(path)
    assert "\n" not in str(error.value)


def test_put_prompt():
    row = {"prompt": "Write f(x) = {x}.", "completion": "{x}"}
    prompt = MAGICODER.format(row["prompt"])
    assert put_prompt(row, "magicoder") == {"prompt": prompt, "completion": "{x}"}

    assert put_prompt(row, "plain") is row
    assert put_prompt(row, "chat")["messages"] == [
        {"role": "user", "content": "Write f(x) = {x}."},
        {"role": "assistant", "content": "{x}"},
    ]
    assert put_prompt({"messages": CHAT}, "chat") == {"messages": CHAT}
    with pytest.raises(ValueError, match="Prompt 'magicoder' requires .* but got messages"):
        put_prompt({"messages": CHAT}, "magicoder")


def test_magicoders_chat_template_says_the_same(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = MAGICODER_CHAT
    row = {"prompt": "Write f.\n", "completion": "def f(): {}\n"}
    chat = put_prompt(row, "chat")["messages"]
    put = put_prompt(row, "magicoder")
    begun = tokenizer.bos_token + put["prompt"]
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    whole = begun + put["completion"] + tokenizer.eos_token

    assert render(chat) == whole
    assert render(chat[:1], add_generation_prompt=True) == begun
    both = render([*chat, chat[0]], add_generation_prompt=True)
    assert both == f"{whole}\n\n@@ Instruction\nWrite f.\n\n\n@@ Response\n"
    (learned,) = data.tokenize_pairs(tokenizer, [{"messages": chat}], 600)
    (direct,) = data.tokenize_pairs(tokenizer, [put], 600)
    assert learned == direct


MAGICODER = """You are an exceptionally intelligent coding assistant that consistently delivers \
accurate and reliable responses to user instructions.

@@ Instruction
{}

@@ Response
"""


def test_hold_out_parts_the_rows():
    # ten duplicates
    rows = [{"prompt": str(i % 30), "completion": "c"} for i in range(40)]
    rows = datasets.Dataset.from_list(rows)
    rest, held_out = data.hold_out(rows, 12)
    rest = rest["prompt"]
    held = set(held_out["prompt"])

    assert len(held_out) == 12
    assert sorted(rest) != list(rest)
    assert sorted(rest) == sorted(prompt for prompt in rows["prompt"] if prompt not in held)
    assert data.hold_out(rows, 12)[1].to_list() == held_out.to_list()
    with pytest.raises(ValueError, match="held_out_rows .40. leaves no .* the data has 40"):
        data.hold_out(rows, 40)


def test_columns_of_later_rows_are_read(tmp_path):
    (tmp_path / "set").mkdir()
    first = {"messages": CHAT[:1]}
    later = {"messages": CHAT, "tools": "[]"}
    write(tmp_path / "set" / "train.jsonl", [first, later], "jsonl")
    rows = data.read_rows(tmp_path / "set", answers=False)  # a folder

    assert rows.to_list() == [first | {"tools": None}, later]
    path = write(tmp_path / "x.parquet", [first], "parquet")
    with pytest.raises(ValueError, match="^example 1 of .*x.parquet: the roles are"):
        data.read_rows(path)
    # turns with different keys, and a text that looks like a date
    called = {"messages": [*CHAT, CHAT[1] | {"tool_calls": [{"n": 1}], "content": "2026-11-22"}]}
    path = write(tmp_path / "rows.jsonl", [{"messages": CHAT}, called], "jsonl")
    assert data.read_rows(path).to_list() == [{"messages": CHAT}, called]


def test_unused_columns_are_not_checked(tmp_path):
    """NaN in a dropped column, and a .json file with line breaks."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "score": NaN}\n')
    assert data.read_rows(tmp_path / "rows.jsonl").to_list() == [{"text": "a"}]
    (tmp_path / "marked.jsonl").write_text('\ufeff{"text": "a"}\n')  # a byte order mark
    assert data.read_rows(tmp_path / "marked.jsonl").to_list() == [{"text": "a"}]
    (tmp_path / "rows.json").write_text('{\n "text":\n "a"\n}\n')
    assert data.read_rows(tmp_path / "rows.json").to_list() == [{"text": "a"}]


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("none.jsonl", None, "does not exist"),
        ("empty.jsonl", "", "is empty"),
        ("bad.jsonl", '{"text": "a"}\n{"text": ', "line 2 of"),
        ("rows.txt", "hello", "ends in '.txt'"),
        ("other.jsonl", '{"question": "", "prompt": ""}', "columns question, prompt. Rename them"),
        ("blank.jsonl", "\n\n", "has no examples"),
    ],
)
def test_read_rows_says_what_is_wrong(tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as error:
        data.read_rows(tmp_path / name)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_tokenize_pairs_stops_at_the_limit(tokenizer):
    read = []
    long = {"prompt": "two " * 50, "completion": "four"}

    def rows():
        for row in [TEXT, long, PAIR] * 9:
            read.append(row)
            yield row

    tokenized = data.tokenize_pairs(
        tokenizer,
        rows(),
        32,
        limit=2,
    )

    assert tokenized.to_list() == data.tokenize_pairs(tokenizer, [TEXT, PAIR], 32).to_list()
    assert len(read) == 4


def test_tokenize_pairs_cuts_the_end_and_drops_what_is_all_prompt(tokenizer):
    short = {"prompt": "two\n", "completion": "two two two two two two"}
    rows = [{"prompt": "two and two " * 20, "completion": "four"}, short]
    (whole,) = data.tokenize_pairs(tokenizer, [short], 64)
    (cut,) = data.tokenize_pairs(
        tokenizer,
        rows,
        8,
        row_ids=True,
    )

    assert cut["row_id"] == 1
    assert cut["input_ids"] == whole["input_ids"][:8]
    assert cut["labels"] == whole["labels"][:8]
    with pytest.raises(ValueError, match="within max_length .8."):
        data.tokenize_pairs(tokenizer, rows[:1], 8)


def test_pack_cuts_joined_documents_into_rows(tokenizer):
    documents = ["def f(x):\n    return x\n" * 9, "import os\n" * 20]
    rows = data.pack(tokenizer, documents, 16)
    ids = []
    for text in documents:
        ids += [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    (whole,) = data.pack(tokenizer, documents, len(ids))

    assert whole["input_ids"] == ids
    assert len(rows) == len(ids) // 16
    for i, row in enumerate(rows):
        assert row["input_ids"] == row["labels"] == ids[16 * i : 16 * i + 16]


def test_token_ids_are_those_of_all_rows_that_have_some(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = tokenizer.eos_token = None
    prompt = "two and two\n" * 9
    rows = [{"prompt": prompt, "completion": "four"}, {"prompt": "", "completion": "four"}]
    expected = []
    for text in (prompt, "four", "two"):
        expected.append(tokenizer.encode(text, add_special_tokens=False)[:8])

    assert list(data.token_ids(tokenizer, [*rows, {"text": "two"}, {"text": ""}], 8)) == expected
    # a template without a mask
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ids = tokenizer.encode("two and twofour", add_special_tokens=False)
    assert list(data.token_ids(tokenizer, [{"messages": CHAT}], 50)) == [ids]


@pytest.mark.parametrize(
    "sizes, weights, repeat, counts",
    [
        ((4, 10), (0.25, 0.75), False, (3, 10)),
        ((4, 10), (0.25, 0.75), True, (4, 12)),
        ((10, 10), (1.0, 0.01), False, (10, 1)),
        ((4, 10), None, False, (4, 7)),
    ],
    ids=["weights", "weights, repeating", "a small weight", "all"],
)
def test_mix_takes_the_share_of_each_part(sizes, weights, repeat, counts):
    parts = []
    for part, size in enumerate(sizes):
        parts.append([{"text": f"{part}: {i}"} for i in range(size)])
    limits = (None, None) if weights else (None, 7)
    texts = data.mix(parts, weights, limits, repeat)["text"]
    for part, (size, count) in enumerate(zip(sizes, counts)):
        drawn = [text for text in texts if text.startswith(f"{part}:")]
        assert len(drawn) == count
        assert len(set(drawn)) == min(count, size)


def test_raw_rows_reads_compressed_lines(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a", "n": 1}\n'))
    assert list(data.raw_rows(path)) == [{"text": "a", "n": 1}]
