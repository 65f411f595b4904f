"""papers.evaluation.decontaminate: examples with a benchmark's text are found, dropped and listed;
all others are unchanged.
"""

import errno
import json
import os
import random
from pathlib import Path

import pytest

from moe_runtime.io.files import read_json
from papers.evaluation.decontaminate import NGrams, Substrings, decontaminate, texts_of

SOLUTION = "def both(a, b):\n    return a and b  # so"
BENCHMARK = [
    {
        "task_id": "t/0",
        "prompt": "  Return whether both are true.\n",
        "solution": SOLUTION,
    },
    {
        "task_id": "t/1",
        "prompt": "",
        "solution": "return a + b",
    },
]


BOTH = [
    {"role": "user", "content": "Both?"},
    {
        "role": "assistant",
        "content": f"It is\n{SOLUTION.upper()}",
    },
]


ROWS = [
    {
        "instruction": "Say hello.",
        "output": "print('hello')",
        "id": 7,
    },
    {
        "instruction": "Please: return WHETHER both are true. Thanks",
        "output": "x",
        "id": 8,
    },
    {
        "instruction": "Add.",
        "output": "    return a + b\n",
        "id": 9,
    },
    {"messages": BOTH},
]


@pytest.fixture()
def files(tmp_path):
    """A folder of examples, a benchmark, and the benchmark gzipped."""
    for name, rows in (("rows", ROWS), ("bench", BENCHMARK)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize(
    "columns, min_chars, dropped",
    [
        ("", 20, [1, 3]),
        (":prompt", 20, [1]),
        ("", 12, [1, 2, 3]),
    ],
)
def test_substrings(files, columns, min_chars, dropped):
    source = f"{files / 'bench.jsonl'}{columns}"
    out = files / "out.jsonl"
    report = decontaminate(
        files / "rows.jsonl",
        [source],
        out,
        min_chars=min_chars,
    )
    left = [row for place, row in enumerate(ROWS) if place not in dropped]
    assert [json.loads(line) for line in out.read_text().splitlines()] == left
    assert report.rows == 4
    assert report.kept == len(left)
    assert report.by_benchmark == {source: len(dropped)}
    listed = read_json(files / "out.jsonl.dropped.json")
    assert listed["min_chars"] == min_chars
    assert [one["row"] for one in listed["dropped"]] == dropped
    for one in listed["dropped"]:
        assert one["text"] in "\n".join(texts_of(ROWS[one["row"]])).lower()


def test_what_is_found_is_what_a_plain_search_finds():
    draw = random.Random(0)

    def text(letters: str, most: int) -> str:
        return "".join(draw.choice(letters) for _ in range(draw.randint(1, most)))

    texts = [text("ab ", 24) for _ in range(300)]
    finder = Substrings({"b": texts}, 4)
    searched = [text.strip() for text in texts if len(text.strip()) >= 4]
    assert finder.searched == {"b": len(searched)}
    hits = 0
    for _ in range(300):
        row = [text("abcdef ", 30), text("abcdef ", 30)]
        row[0] += draw.choice(["", texts[draw.randrange(300)]])
        whole = "\n\n".join(row)
        hit = finder.first(row)
        assert (hit is not None) == any(text in whole for text in searched)
        if hit:
            assert hit[1] in whole
            hits += 1
    assert 20 < hits < 280
    assert NGrams({"b": ["a b"]}, 3).first(["a b c"]) is None


@pytest.mark.parametrize(
    "change, says",
    [
        ({"against": []}, "No benchmark is given"),
        ({"columns": ["text"]}, "Column 'text' does not exist"),
        ({"min_chars": 99}, r"None of the \d texts of bench.jsonl has 99 characters"),
        ({"method": "ngram"}, r"None of the \d texts of bench.jsonl has 13 words \(--n\)"),
        ({"min_chars": 1}, "All 4 examples"),
    ],
)
def test_bad_input_writes_nothing(files, monkeypatch, change, says):
    with (files / "bench.jsonl").open("a") as file:
        file.write('{"e": "e"}\n')
    monkeypatch.chdir(files)
    with pytest.raises(ValueError, match=says):
        decontaminate(
            "rows.jsonl",
            out="out.jsonl",
            **{"against": ["bench.jsonl"]} | change,
        )
    assert sorted(os.listdir(files)) == ["bench.jsonl", "rows.jsonl"]


def test_a_full_disk_leaves_neither_the_data_nor_the_list(files, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(os.listdir(files))
    against = [str(files / "bench.jsonl")]
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "write_text", full)
        decontaminate(
            files / "rows.jsonl",
            against,
            files / "out.jsonl",
        )
    assert sorted(os.listdir(files)) == before
    decontaminate(
        files / "rows.jsonl",
        against,
        files / "out.jsonl",
    )
    assert (files / "out.jsonl.dropped.json").is_file()
