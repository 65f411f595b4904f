"""Rows to train on from broken .jsonl files: what json reads, line by line, or one error."""

import json
import random
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from moe_runtime.hf.models.tiny import train_tokenizer
from moe_runtime.io.rows import read_rows, tokenize_pairs
from tests.fuzz.attempts import attempt, run_seeds
from tests.fuzz.mutations import mutate_bytes, mutate_value
from tests.support.stress import scaled

pytestmark = pytest.mark.stress
PAIRS = [
    {"prompt": "Add 1 and 2.\n", "completion": "3"},
    {"prompt": "2026-11-22", "completion": "2026-11-22T07:00:00Z"},
    {"prompt": "é\u2028\n", "completion": "12"},
]
CHATS = [
    {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]} for i in range(3)
]
TEXTS = [{"text": "a b c"}, {"text": ""}, {"text": "1.5"}]
COLUMNS = ("prompt", "completion", "text", "messages")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["Add 1 and 2.", "a b c"], 300)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def read(path: Path, tokenizer) -> list[dict]:
    rows = read_rows(path)
    tokenize_pairs(tokenizer, rows, 64)
    return list(rows)


def check(path: Path, tokenizer) -> bool:
    """Read a file; what is read must be the rows that json reads of it. Returns whether it was read."""
    verdict = attempt(lambda: read(path, tokenizer), str(path), "row ", "rows", "chat template")
    if not verdict.is_read:
        return False
    lines = [line for line in path.read_bytes().decode("utf-8-sig").split("\n") if line.strip()]
    rows = [json.loads(line) for line in lines]
    assert len(rows) == len(verdict.value), f"{len(verdict.value)} rows of {len(rows)}"
    for got, row in zip(verdict.value, rows, strict=True):
        for name in COLUMNS:
            if name in got:
                assert holds(got[name], row.get(name)), f"{name} is {got[name]!r:.100} of {row.get(name)!r:.100}"
    return True


def holds(got, row) -> bool:
    """Whether a value is that of a row; of a chat's messages, their roles and contents."""
    if isinstance(got, dict) and isinstance(row, dict):
        return all(holds(got.get(key), row.get(key)) for key in ("role", "content"))
    if isinstance(got, list) and isinstance(row, list):
        return len(got) == len(row) and all(map(holds, got, row))
    return got == row and isinstance(got, str) == isinstance(row, str)


@pytest.mark.parametrize("rows", [PAIRS, CHATS, TEXTS], ids=["pairs", "chats", "text"])
def test_mutated_rows(tmp_path, tokenizer, rows):
    path, read_at_all = tmp_path / "rows.jsonl", []

    def case(rng: random.Random) -> None:
        changed = mutate_value(rng, rows)
        changed = changed if isinstance(changed, list) else [changed]
        data = "\n".join(json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in changed)
        data = (data + "\n").encode("utf-8", "surrogatepass")
        path.write_bytes(mutate_bytes(rng, data) if rng.random() < 0.4 else data)
        read_at_all.append(check(path, tokenizer))

    run_seeds(scaled(40, 1000), case)
    assert any(read_at_all) and not all(read_at_all)


FILES = {
    "BOM": b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n',
    "CRLF": b'{"text": "a"}\r\n{"text": "b"}\r\n',
    "no line feed at the end": b'{"text": "a"}\n{"text": "b"}',
    "blank lines": b'\n{"text": "a"}\n\n{"text": "b"}\n',
    "dates": b'{"text": "2026-11-22"}\n{"text": "2026-11-23"}\n',
    "times": b'{"text": "2026-11-22T00:00:00Z"}\n',
    "times of chats": b'{"messages": [{"role": "assistant", "content": "2026-11-22"}]}\n',
    "numbers as text": b'{"text": "1"}\n{"text": "2"}\n',
    "escapes": b'{"text": "\\u00e9\\ud83d\\ude00\\u0000b"}\n',
    "other keys": b'{"text": "a", "b": 1}\n{"text": "b", "c": [2]}\n',
}
BROKEN = {
    "empty": b"", "blank": b"\n\n", "NUL": b'{"text": "a\0"}\n', "NULs": bytes(1000), "no JSON": b"text\n",
    "no object": b'["a"]\n[1]\n', "numbers": b'{"text": 1}\n', "null": b'{"text": null}\n', "lists": b'{"text": ["a"]}\n',
    "missing keys": b'{"prompt": "a"}\n', "cut off": b'{"text": "a"}\n{"text": ', "half a pair": b'{"text": "\\ud800"}\n',
    "Latin": b'{"text": "\xe9"}\n', "UTF-16": '{"text": "a"}'.encode("utf-16"), "gzip": b"\x1f\x8b\x08\0\0\0\0\0", 
    "deep": b'{"text": ' + b"[" * 20_000 + b"]" * 20_000 + b"}\n", "later number": b'{"text": "a"}\n{"text": 2}\n',
    "later null": b'{"text": "a"}\n{"text": null}\n', "later missing": b'{"text": "a"}\n{"b": "a"}\n',
}  # fmt: skip


@pytest.mark.parametrize("name", [*FILES, *BROKEN])
def test_files_that_are_read_or_refused(tmp_path, tokenizer, name):
    path = tmp_path / "rows.jsonl"
    path.write_bytes((FILES | BROKEN)[name])
    assert check(path, tokenizer) == (name in FILES)


def test_a_huge_line(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "' + "a b " * 50_000 + '"}\n{"text": "b"}\n')
    verdict = attempt(lambda: tokenize_pairs(tokenizer, read_rows(path), 64), str(path))
    assert [len(ids) for ids in verdict.value["input_ids"]] == [64, 3]


def test_broken_parquet(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path, read = tmp_path / "rows.parquet", []
    rows = [{"prompt": f"{i}?", "completion": "2026-11-22"} for i in range(40)]
    datasets.Dataset.from_list(rows).to_parquet(path)
    data = path.read_bytes()

    def case(rng: random.Random) -> None:
        path.write_bytes(mutate_bytes(rng, data))
        verdict = attempt(lambda: list(read_rows(path)), path.name)
        read.append(verdict.is_read)
        if verdict.is_read:
            assert all(isinstance(row["prompt"], str) for row in verdict.value if "prompt" in row)

    run_seeds(scaled(8, 600), case)
    assert not all(read)
