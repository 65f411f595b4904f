"""papers.evaluation.decontaminate: rows with a benchmark's text are found, dropped and listed;
nothing else is touched.
"""

import errno
import gzip
import json
import os
import random
from pathlib import Path

import pytest

from papers.evaluation.decontaminate import NGrams, Substrings, decontaminate, texts_of

SOLUTION = "def both(a, b):\n    return a and b  # so"
BENCHMARK = [
    {"task_id": "t/0", "prompt": "  Return whether both are true.\n", "solution": SOLUTION},
    {"task_id": "t/1", "prompt": "", "solution": "return a + b"},
]
ROWS = [
    {"instruction": "Say hello.", "output": "print('hello')", "id": 7},
    {"instruction": "Please: return WHETHER both are true. Thanks", "output": "x", "id": 8},
    {"instruction": "Add.", "output": "    return a + b\n", "id": 9},
    {
        "messages": [
            {"role": "user", "content": "Both?"},
            {"role": "assistant", "content": f"It is\n{SOLUTION.upper()}"},
        ]
    },
]


@pytest.fixture()
def files(tmp_path):
    for name, rows in (("rows", ROWS), ("bench", BENCHMARK)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize(
    "columns, min_chars, dropped",
    [
        ("", 20, [1, 3]),
        (":prompt", 20, [1]),
        (":solution", 20, [3]),
        ("", 12, [1, 2, 3]),
        (":prompt,solution", 30, [3]),
    ],
)
def test_substrings(files, columns, min_chars, dropped):
    source = f"{files / 'bench.jsonl'}{columns}"
    report = decontaminate(files / "rows.jsonl", [source], files / "out.jsonl", min_chars=min_chars)
    kept = [row for place, row in enumerate(ROWS) if place not in dropped]
    assert [json.loads(line) for line in (files / "out.jsonl").read_text().splitlines()] == kept
    assert (report.rows, report.kept, report.by_benchmark) == (4, len(kept), {source: len(dropped)})
    listed = json.loads((files / "out.jsonl.dropped.json").read_text())
    assert [one["row"] for one in listed["dropped"]] == dropped
    assert listed["min_chars"] == min_chars
    for one in listed["dropped"]:
        assert one["text"] in "\n".join(texts_of(ROWS[one["row"]])).lower()


def test_a_benchmark_may_be_gzipped(files):
    packed = files / "bench.jsonl.gz"
    packed.write_bytes(gzip.compress((files / "bench.jsonl").read_bytes()))
    report = decontaminate(files / "rows.jsonl", [f"{packed}:prompt"], files / "out.jsonl")
    assert [one["row"] for one in report.dropped] == [1]


def test_what_is_found_is_what_a_plain_search_finds():
    drawn = random.Random(0)
    texts = ["".join(drawn.choice("ab ") for _ in range(drawn.randint(1, 24))) for _ in range(300)]
    finder = Substrings({"b": texts}, 4)
    wanted = [text.strip() for text in texts if len(text.strip()) >= 4]
    found = 0
    for _ in range(300):
        row = [
            "".join(drawn.choice("abcdef ") for _ in range(drawn.randint(1, 30))) for _ in range(2)
        ]
        row[0] += drawn.choice(["", texts[drawn.randrange(300)]])
        hit = finder.first(row)
        whole = "\n\n".join(row)
        assert (hit is not None) == any(text in whole for text in wanted)
        found += hit is not None
        assert hit is None or hit[1] in whole
    assert 20 < found < 280
    assert finder.searched == {"b": len(wanted)}
    assert NGrams({"b": ["a b"]}, 3).first(["a b c"]) is None


@pytest.mark.parametrize(
    "change, says",
    [
        ({"against": []}, "No benchmark is given"),
        ({"against": ["{}/missing.jsonl"]}, "missing.jsonl does not exist"),
        ({"against": ["{}/bench.jsonl:answer"]}, "Column 'answer' does not exist"),
        ({"columns": ["text"]}, "Column 'text' does not exist"),
        ({"method": "words"}, "method must be"),
        ({"n": 0}, "n must be"),
        ({"min_chars": 99}, "None of the 7 texts of .*bench.jsonl has 99 characters"),
        ({"method": "ngram"}, r"None of the 7 texts of .*bench.jsonl has 13 words \(--n\)"),
        ({"min_chars": 1}, "All 4 examples"),
    ],
)
def test_bad_input_writes_nothing(files, change, says):
    (files / "bench.jsonl").write_text(
        (files / "bench.jsonl").read_text() + json.dumps({"e": "e"}) + "\n"
    )
    against = [one.format(files) for one in change.pop("against", ["{}/bench.jsonl"])]
    with pytest.raises(ValueError, match=says):
        decontaminate(files / "rows.jsonl", against, files / "out.jsonl", **change)
    assert {path.name for path in files.iterdir()} == {"rows.jsonl", "bench.jsonl"}


def test_a_full_disk_leaves_neither_the_data_nor_the_list(files, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(os.listdir(files))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "write_text", full)
        decontaminate(files / "rows.jsonl", [str(files / "bench.jsonl")], files / "out.jsonl")
    assert sorted(os.listdir(files)) == before
    decontaminate(files / "rows.jsonl", [str(files / "bench.jsonl")], files / "out.jsonl")
    assert (files / "out.jsonl.dropped.json").is_file()


@pytest.mark.parametrize("columns", ["", ":prompt"])
def test_a_benchmark_is_never_replaced(files, columns):
    bench = files / "bench.jsonl"
    before = bench.read_bytes()
    with pytest.raises(ValueError, match=r"bench\.jsonl is read"):
        decontaminate(files / "rows.jsonl", [f"{bench}{columns}"], bench, overwrite=True)
    listed = bench.rename(files / "out.jsonl.dropped.json")
    with pytest.raises(ValueError, match=r"dropped\.json is read"):
        decontaminate(
            files / "rows.jsonl", [f"{listed}{columns}"], files / "out.jsonl", overwrite=True
        )
    assert listed.read_bytes() == before
