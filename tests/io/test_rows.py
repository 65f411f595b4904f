"""Data, prompts, the standard library and hf/models/tiny.py: what is read, what the library gives, what is masked."""

import ast
import copy
import datetime
import gzip
import json
import sys
import time

import pytest

from moe_runtime.experiments import corpora
from moe_runtime.experiments.corpora import standard_library_files, standard_library_pairs, standard_library_text
from moe_runtime.hf.models.tiny import SMALLEST, pair_collator, train_tokenizer
from moe_runtime.io import rows as data
from moe_runtime.io.prompts import MAGICODER_CHAT, put_prompt

CHAT = [{"role": "user", "content": "two and two"}, {"role": "assistant", "content": "four"}]
LAYOUTS = {
    "messages": {"messages": CHAT},
    "prompt-completion": {"prompt": "two and two\n", "completion": "four"},
    "text": {"text": "two and two is four"},
    "instruction-response": {"instruction": "two and two\n", "response": "four"},
    "instruction-output": {"instruction": "two and two\n", "output": "four"},
}
SCAN = corpora._library_rows.__wrapped__  # without its cache


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
    renamed = {"instruction": "prompt", "response": "completion", "output": "completion"}
    want = {renamed.get(name, name): value for name, value in LAYOUTS[layout].items()}
    assert len(got) == 3 and got.column_names == list(want) and got[2] == want


def test_read_rows_keeps_tools_and_prefers_messages(tmp_path):
    rows = [{"prompt": "p", "completion": "c", "messages": CHAT, "tools": "[]"}]
    assert data.read_rows(write(tmp_path / "x.jsonl", rows, "jsonl")).column_names == ["messages", "tools"]


def test_read_rows_refuses_an_input_beside_the_instruction(tmp_path):
    rows = [{"instruction": "add", "input": "2 2", "output": "4"}]
    with pytest.raises(ValueError, match="whose column input has text; want it in the column instruction"):
        data.read_rows(write(tmp_path / "x.jsonl", rows, "jsonl"))
    rows[0]["input"] = ""
    assert data.read_rows(write(tmp_path / "y.jsonl", rows, "jsonl"))[0] == {"prompt": "add", "completion": "4"}


MAGICODER = """You are an exceptionally intelligent coding assistant that consistently delivers accurate and reliable \
responses to user instructions.

@@ Instruction
{}

@@ Response
"""


def test_put_prompt_is_magicoders():
    row = {"prompt": "Write f(x) = {x}.", "completion": "{x}"}
    assert put_prompt(row, "magicoder") == {"prompt": MAGICODER.format(row["prompt"]), "completion": "{x}"}
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
    both = tokenizer.apply_chat_template([*chat, chat[0]], tokenize=False, add_generation_prompt=True)
    assert both == f"{whole}\n\n@@ Instruction\nWrite f.\n\n\n@@ Response\n"
    (learned,) = data.tokenize_pairs(tokenizer, [{"messages": chat}], 600)
    (direct,) = data.tokenize_pairs(tokenizer, [put], 600)
    assert tokenizer.decode([i for i in learned["labels"] if i != -100]) == "def f(): {}\n</s>"
    assert tokenizer.decode(learned["input_ids"]) == tokenizer.decode(direct["input_ids"])
    with pytest.raises(Exception, match="the roles are user and assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


@pytest.mark.parametrize(
    "prompt, row", [("magicoder", {"text": "x"}), ("magicoder", {"messages": CHAT}), ("chat", {"text": "x"})]
)
def test_put_prompt_refuses_other_layouts(prompt, row):
    with pytest.raises(ValueError, match=f"prompt is '{prompt}', a row has the columns {next(iter(row))}; want prompt"):
        put_prompt(row, prompt)


def test_put_prompt_knows_its_names():
    with pytest.raises(ValueError, match="prompt is 'alpaca'; want one of plain, magicoder, chat"):
        put_prompt({"text": "x"}, "alpaca")


def test_hold_out_parts_the_rows():
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": str(i % 30), "completion": "c"} for i in range(40)])  # ten doubles
    rest, held_out = data.hold_out(rows, 12)
    rest, held = [row["prompt"] for row in rest], [row["prompt"] for row in held_out]
    assert len(held) == 12 and not set(rest) & set(held) and set(rest) | set(held) == set(rows["prompt"])
    assert len(rest) == sum(prompt not in held for prompt in rows["prompt"]) <= 28 and rest != sorted(rest)
    assert [row["prompt"] for row in data.hold_out(rows, 12)[1]] == held
    with pytest.raises(ValueError, match="held_out_rows is 40, the data has 40 rows; want fewer"):
        data.hold_out(rows, 40)
    with pytest.raises(ValueError, match="every other row equals one of them"):
        data.hold_out(rows.select([0, 30, 0]), 1)


def test_rows_survive_the_disk(tmp_path, tokenizer):
    rows = data.tokenize_pairs(tokenizer, [LAYOUTS["text"]] * 3, 64)
    data.save_rows(rows, tmp_path / "rows")
    assert data.load_rows(tmp_path / "rows").to_list() == rows.to_list()


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


@pytest.mark.parametrize("kind", ["jsonl", "json"])
@pytest.mark.parametrize("layout", DATED)
def test_texts_that_look_like_dates_stay_texts(tmp_path, layout, kind):
    path = write(tmp_path / f"rows.{kind}", [DATED[layout]] * 2, "jsonl")
    want = {data.TRL_NAMES.get(name, name): value for name, value in DATED[layout].items()}
    if "text" in want:
        del want["completion"]
    assert data.read_rows(path).to_list() == [want] * 2


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_dates_beside_the_texts_are_no_matter(tmp_path, kind):
    when = datetime.datetime(2026, 11, 22) if kind == "parquet" else 17
    chat = [{"role": "user", "content": "now?", "timestamp": when}]
    tools = [{"name": "timestamp", "parameters": {"timestamp": when}}]
    rows = [{"messages": chat, "tools": tools, "chat_template_kwargs": {"timestamp": when}}] * 2
    assert data.read_rows(write(tmp_path / f"rows.{kind}", rows, kind)).to_list() == rows
    rows = [{"text": datetime.datetime(2026, 11, 22)}]
    with pytest.raises(ValueError, match="whose text was read as dates; want texts"):
        data.read_rows(write(tmp_path / "dates.parquet", rows, "parquet"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "set/rows.jsonl", "set/rows.json", "set/rows.jsonl.gz"])
@pytest.mark.parametrize(
    "line", ['{"text": ' + "[" * 20_000 + "]" * 20_000 + "}", '{"text": '], ids=["deep", "cut off"]
)
def test_a_broken_line_is_named(tmp_path, name, line):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    text = ('{"text": "a"}\n' * 5000 + line + "\n").encode()
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    with pytest.raises(ValueError, match=f"line 5001 of {path} is not valid JSON"):
        data.read_rows(tmp_path / name.partition("/")[0])


def test_what_is_not_used_is_not_judged(tmp_path):
    """Hidden folders, NaN in a column that is dropped, a .json over several lines."""
    folder = tmp_path / "set"
    for name in (".ipynb_checkpoints", "__pycache__"):
        (folder / name).mkdir(parents=True)
        (folder / name / "rows.jsonl").write_text("{")
    (folder / "rows.jsonl").write_text('{"text": "a", "score": NaN}\n')
    assert data.read_rows(folder).to_list() == [{"text": "a"}]
    (folder / "rows.jsonl").write_text('{"text": NaN}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* \(text has NaN or Infinity\)"):
        data.read_rows(folder)
    (tmp_path / "rows.json").write_text('{\n "text":\n "a"\n}\n')
    assert data.read_rows(tmp_path / "rows.json").to_list() == [{"text": "a"}]
    (tmp_path / "array.jsonl").write_text('[{"text": "a"},\n{"text": "b"}]\n')
    with pytest.raises(ValueError, match="begins with a JSON array; want one object a line"):
        data.read_rows(tmp_path / "array.jsonl")


@pytest.mark.parametrize(
    "name, text, says",
    [
        pytest.param("none.jsonl", None, "does not exist", id="missing"),
        pytest.param("empty.jsonl", "", "is empty", id="empty-file"),
        pytest.param("empty.json", "[]", "want", id="empty-list"),
        pytest.param("bad.jsonl", "{'a':\n", "cannot be read", id="no-json"),
        pytest.param("rows.txt", "hello", "ends in '.txt'", id="unknown-kind"),
        pytest.param("other.jsonl", '{"question": "q", "prompt": "p"}', "columns question, prompt; want", id="columns"),
    ],
)  # fmt: skip
def test_read_rows_says_what_is_wrong(tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="data is ") as error:
        data.read_rows(tmp_path / name)
    assert says in str(error.value) and "want" in str(error.value) and "\n" not in str(error.value)


def test_read_rows_names_the_columns_wanted(tmp_path):
    with pytest.raises(ValueError, match=r"messages \| prompt \+ completion \| text \| instruction \+ response"):
        data.read_rows(write(tmp_path / "x.jsonl", [{"q": 1}], "jsonl"))


def test_read_rows_of_an_unreachable_hub_id_is_one_error(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="data is 'nobody/no-such-set', which cannot be read"):
        data.read_rows("nobody/no-such-set")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'moe-runtime\[train\]'"):
        data.read_rows("x.jsonl")


@pytest.fixture(scope="module")
def pairs():
    start = time.process_time()
    pairs = standard_library_pairs()
    assert time.process_time() - start < 30  # 4 s on one core of a Xeon, 2026-11-20
    return pairs


def test_library_pairs_are_many_and_bounded(pairs):
    assert len(pairs.train) > 2000 and len(pairs.held_out) > 150
    for row in [*pairs.train, *pairs.held_out]:
        assert list(row) == ["prompt", "completion", "module"]
        assert corpora.SIZE[0] <= len(row["completion"]) <= corpora.SIZE[1] >= len(row["prompt"])
        assert row["prompt"].endswith("\n") and not row["prompt"].endswith("\n\n")


def test_library_pairs_are_functions_without_their_docstring(pairs):
    for row in [*pairs.train, *pairs.held_out]:
        (function,) = ast.parse(row["completion"]).body
        assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        assert f" {function.name}(" in row["prompt"].partition("\n")[0]
        doc = row["prompt"].partition("\n")[2].strip()
        assert ast.get_docstring(function) is None and (len(doc) < 60 or doc not in row["completion"])


def test_library_pairs_keep_comments_and_say_what_they_are(pairs):
    (row,) = (row for row in pairs.train + pairs.held_out if row["completion"].startswith("def insort_right("))
    signature = "insort_right(a, x, lo=0, hi=None, *, key=None)"
    assert row["prompt"].startswith(f"Write a Python function {signature}.\nInsert item x in list a")
    assert any("#" in row["completion"] for row in pairs.train)


def test_library_pairs_do_not_leak(pairs):
    modules = [{row["module"] for row in rows} for rows in pairs]
    assert not modules[0] & modules[1]
    assert all(corpora.is_held_out(module) == held for held, names in enumerate(modules) for module in names)
    completions = [row["completion"] for row in pairs.train + pairs.held_out]
    assert len(set(completions)) == len(completions)


def library(monkeypatch, *files):
    """Pairs of a library of these files; "b.py" is not held out, "held.py" is."""
    held = next(f"held{i}.py" for i in range(99) if corpora.is_held_out(f"held{i}.py"))
    assert not corpora.is_held_out("b.py")
    files = tuple((held if name == "held.py" else name, text) for name, text in files)
    monkeypatch.setattr(corpora, "standard_library_files", lambda: files)
    monkeypatch.setattr(corpora, "_library_rows", SCAN)
    return standard_library_pairs()


@pytest.mark.parametrize(
    "copy, leaks",
    [
        pytest.param('def f(x):\n    """Doc."""\n    # twice\n    return x * 2  # as said above', True, id="same"),
        pytest.param("def f(x):\n    # twice\n    return x * 2  # as said above", True, id="undocumented"),
        pytest.param('def f(x):\n    """Other."""\n    # twice\n    return x * 2  # as said above', True, id="reworded"),
        pytest.param("class A:\n    def f(x):\n        # twice\n        return x * 2  # as said above", True, id="deeper"),
        pytest.param("def f(x):\n    # thrice\n    return x * 3  # as said above", False, id="another"),
    ],
)  # fmt: skip
def test_what_a_train_file_defines_is_not_held_out(monkeypatch, copy, leaks):
    held = 'def f(x):\n    """Doc."""\n    # twice\n    return x * 2  # as said above\n'
    assert len(library(monkeypatch, ("b.py", copy), ("held.py", held)).held_out) == (not leaks)
    assert len(library(monkeypatch, ("held.py", held), ("b.py", copy)).held_out) == (not leaks)


def test_a_function_behind_a_form_feed_is_left_out(monkeypatch):
    """Such a line counts as one to the parser and as two to splitlines; Python 3.10's own library has one."""
    text = 'def f(x):\n    """Doc."""\n    value = x * 2  # twice\n    other = value + 1\n    return other * value\n'
    assert len(library(monkeypatch, ("b.py", text)).train) == 1
    assert library(monkeypatch, ("b.py", "x = 1\n\f\n" + text)).train == []


def test_library_pairs_repeat_and_limit(pairs):
    again = standard_library_pairs(limit=50)
    assert again.train == pairs.train[:50] and again.held_out == pairs.held_out[:50]
    other = standard_library_pairs(seed=1)
    assert other.train != pairs.train and sorted(map(str, other.train)) == sorted(map(str, pairs.train))
    again.train[0]["prompt"] = "changed"
    assert standard_library_pairs(limit=50).train == pairs.train[:50]
    with pytest.raises(ValueError, match="limit is 0"):
        standard_library_pairs(limit=0)


def test_library_text_is_the_files_in_pieces():
    documents = standard_library_text()
    files = [text for module, text in standard_library_files() if not corpora.is_held_out(module)]
    assert len(files) > 100 and sum(map(len, documents)) > 0.99 * sum(map(len, files))
    assert sorted(map(len, documents))[len(documents) // 2] > corpora.PIECE * 0.9
    assert documents[0] == "".join(files)[: len(documents[0])]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param('def f(x): "Doc."; return x + 12345678901234567890123456789', id="one-line"),
        pytest.param('def f(x):\n    """Doc."""\n    raise NotImplementedError("a text over the lower bound")', id="stub"),
        pytest.param('class A:\n    def f(x):\n        """Doc."""\n        return """\nabc""" + x * 10**9', id="string"),
        pytest.param('def f(x):\n    """Doc."""\n    ' + "x += 1\n    " * 200 + "return x", id="long"),
        pytest.param('def f(x):\n    """Doc."""\n    return x', id="short"),
        pytest.param("def f(x):\n    y = x * x + 1234567890\n    return y * y * y", id="no-docstring"),
    ],
)  # fmt: skip
def test_functions_without_a_clean_pair_are_left_out(monkeypatch, source):
    good = '\n\ndef g(x):\n    """Double it."""\n    # twice\n    return x * 2  # as said above\n'
    (row,) = library(monkeypatch, ("b.py", source + good)).train
    assert row["completion"] == "def g(x):\n    # twice\n    return x * 2  # as said above"
    assert row["prompt"] == "Write a Python function g(x).\nDouble it.\n"


def test_tokenize_pairs_masks_the_prompt(tokenizer):
    row = {"prompt": "two and two\n", "completion": "four"}
    (got,) = data.tokenize_pairs(tokenizer, [row], 64)
    prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in row.values())
    assert got["input_ids"] == [tokenizer.bos_token_id, *prompt, *answer, tokenizer.eos_token_id]
    assert got["labels"] == [-100] * (1 + len(prompt)) + [*answer, tokenizer.eos_token_id]


def test_tokenize_pairs_stops_at_the_limit(tokenizer):
    seen = []
    long = {"prompt": "two " * 50, "completion": "four"}
    rows = (seen.append(row) or row for row in [LAYOUTS["text"], long, LAYOUTS["prompt-completion"]] * 9)
    got = data.tokenize_pairs(tokenizer, rows, 32, limit=2)
    assert got.to_list() == data.tokenize_pairs(tokenizer, [seen[0], seen[2]], 32).to_list() and len(seen) == 4


def test_tokenize_pairs_learns_all_of_a_text(tokenizer):
    (got,) = data.tokenize_pairs(tokenizer, [{"text": "two is four"}], 64)
    assert got["labels"] == got["input_ids"] and got["input_ids"][0] == tokenizer.bos_token_id
    assert got["input_ids"][-1] == tokenizer.eos_token_id


def test_tokenize_pairs_learns_what_the_assistant_says(tokenizer):
    (got,) = data.tokenize_pairs(tokenizer, [{"messages": CHAT}], 64)
    learnt = [i for i, label in zip(got["input_ids"], got["labels"], strict=True) if label != -100]
    assert tokenizer.decode(learnt) == "four</s>"


def test_tokenize_pairs_cuts_the_end_and_drops_what_is_all_prompt(tokenizer):
    short = {"prompt": "two\n", "completion": "two two two two two two"}
    rows = [{"prompt": "two and two " * 20, "completion": "four"}, short]
    (whole,) = data.tokenize_pairs(tokenizer, [short], 64)
    (got,) = data.tokenize_pairs(tokenizer, rows, 8, row_ids=True)
    assert got["row_id"] == 1 and got["input_ids"] == whole["input_ids"][:8] and got["labels"] == whole["labels"][:8]
    with pytest.raises(ValueError, match="max_length is 8"):
        data.tokenize_pairs(tokenizer, rows[:1], 8)


def test_tokenize_pairs_names_what_it_cannot_use(tokenizer):
    with pytest.raises(ValueError, match="columns question; want prompt"):
        data.tokenize_pairs(tokenizer, [{"question": "q"}], 8)
    with pytest.raises(ValueError, match="marks nothing as generated"):
        data.tokenize_pairs(tokenizer, [{"messages": CHAT[:1]}], 8)


def test_the_collator_pads_labels_with_minus_100(tokenizer):
    rows = data.tokenize_pairs(tokenizer, [{"prompt": "a" * n + "\n", "completion": "four"} for n in (1, 9)], 64)
    batch = pair_collator(tokenizer)(list(rows))
    short = len(rows[0]["input_ids"])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, len(rows[1]["input_ids"]))
    assert (batch["input_ids"][0, short:] == tokenizer.pad_token_id).all()
    assert (batch["labels"][0, short:] == -100).all() and batch["labels"][0, short - 1] == tokenizer.eos_token_id
    assert batch["attention_mask"].sum(1).tolist() == [short, len(rows[1]["input_ids"])]


def test_the_tokenizer_round_trips_any_text_and_its_folder(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n\treturn  x # 漢字 \U0001f600 é  \n\n"
    for each in (tokenizer, loaded):
        ids = each(text)["input_ids"]
        assert ids[0] == each.bos_token_id and each.decode(ids[1:]) == text
        assert (each.bos_token_id, each.eos_token_id, each.pad_token_id) == (1, 2, 0) and each.padding_side == "right"
    assert loaded.chat_template == tokenizer.chat_template and len(loaded) == len(tokenizer) <= 300
    prompt = loaded.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert loaded.apply_chat_template(CHAT, tokenize=False) == prompt + "four</s>\n"


def test_the_tokenizer_needs_room():
    with pytest.raises(ValueError, match=f"vocab_size is 100; want at least {SMALLEST}"):
        train_tokenizer(["a"], 100)
    assert len(train_tokenizer(["a"], SMALLEST)) == SMALLEST


def test_pack_cuts_joined_documents_into_rows(tokenizer):
    documents = ["def f(x):\n    return x\n" * 9, "import os\n" * 20]
    rows = data.pack(tokenizer, documents, 16)
    ids = [i for text in documents for i in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]]
    assert len(rows) == len(ids) // 16
    assert [i for row in rows for i in row["input_ids"]] == ids[: 16 * len(rows)]
    assert all(row["labels"] == row["input_ids"] for row in rows)


def test_token_ids_are_those_of_all_rows_that_have_some(tokenizer):
    rows = [
        {"prompt": "two and two\n" * 9, "completion": "four"},
        {"prompt": "", "completion": "four"},
        {"text": "two"},
    ]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = tokenizer.eos_token = None
    want = [tokenizer.encode(text, add_special_tokens=False) for text in (rows[0]["prompt"], "four", "two")]
    assert list(data.token_ids(tokenizer, [*rows, {"text": ""}], 8)) == [ids[:8] for ids in want]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"  # which marks nothing
    want = tokenizer.encode("two and twofour", add_special_tokens=False)
    assert list(data.token_ids(tokenizer, [{"messages": CHAT}], 50)) == [want]
    with pytest.raises(ValueError, match="row 0 has text 3; want text"):
        list(data.token_ids(tokenizer, [{"text": 3}], 8))
