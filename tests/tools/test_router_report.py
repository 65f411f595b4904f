"""tools/router_report.py and the command `stats`: the router load of a model folder, stock or ours,
on a file of text.
"""

import contextlib
import csv
import json
from pathlib import Path

import pytest
import torch

from moe_runtime import cli
from moe_runtime.tools import router_report as reports
from moe_runtime.tools.router_report import FILES, router_report
from tests.hf import tiny
from tests.hf.dropin.test_layers import TEXTS, TOKENIZER, stock

LINES = [", ".join(TEXTS[i : i + 1 + i % 4]) for i in range(len(TEXTS))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stock("mixtral").save_pretrained("stock")
    tiny.upcycled(changes={"vocab_size": len(TOKENIZER)}).save_pretrained("ours")
    for name in ("stock", "ours"):
        TOKENIZER.save_pretrained(name)
    lines = [json.dumps({"text": text}) for text in LINES]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_progress_counts_to_the_tokens_of_the_data(folder, monkeypatch):
    told = []

    @contextlib.contextmanager
    def bar(*_):
        yield lambda done, total: told.append((done, total))

    monkeypatch.setattr(reports, "bar", bar)
    found = router_report("stock", "data.jsonl", "out", batch_size=4)
    tokens = int(found.counts[0].sum()) // 2
    assert told[-1] == (tokens, tokens)
    assert all(done <= total < 131072 for done, total in told)


def lengths() -> list[int]:
    # and EOS, as they are trained on
    return [len(TOKENIZER(text)["input_ids"]) + 1 for text in LINES]


@pytest.mark.parametrize(("model", "slots"), [("stock", 2), ("ours", 3)])
def test_every_token_is_counted_once_and_padding_never(model, slots, folder):
    stats = router_report(model, "data.jsonl", "out", batch_size=5)
    assert len(set(lengths())) > 1  # so some rows are padded
    assert stats.counts.sum(1).tolist() == [sum(lengths()) * slots] * 2
    with open("out/router_load.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["slots"]) for row in rows) == stats.counts.sum()
    assert len(rows) == 8
    assert (folder / "out" / "router_load.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "out").iterdir()) == sorted(FILES)


def test_it_does_not_depend_on_the_batches(folder):
    one, four = (
        router_report("stock", "data.jsonl", "out", batch_size=n, overwrite=True).counts
        for n in (1, 7)
    )
    assert torch.equal(one, four)


def test_stops_at_the_number_of_tokens(folder):
    assert router_report("stock", "data.jsonl", "out", tokens=17).counts.sum() == 17 * 2 * 2
    cut = sum(min(n, 4) for n in lengths())
    assert (
        router_report("stock", "data.jsonl", "out", max_length=4, overwrite=True).counts.sum()
        == cut * 2 * 2
    )


def test_bad_input_is_named(folder):
    with pytest.raises(ValueError, match="tokens must be an integer of at least 1"):
        router_report("stock", "data.jsonl", "out", tokens=0)
    with pytest.raises(ValueError, match="has no config.json"):
        router_report("nowhere", "data.jsonl", "out")
    tiny.dense("llama").save_pretrained("dense")
    TOKENIZER.save_pretrained("dense")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts that use transformers"):
        router_report("dense", "data.jsonl", "out")
    assert not (folder / "out").exists()


def write(row, *more):
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, (row, *more))))


TURNS = [{"role": "user", "content": "3 and 4"}, {"role": "assistant", "content": "make 7"}]


def test_a_chat_has_the_special_tokens_of_its_template_only(folder):
    want = len(TOKENIZER.apply_chat_template(TURNS, return_dict=True)["input_ids"])
    for row in ({"messages": TURNS}, {"prompt": TURNS[:1], "completion": TURNS[1:]}):
        write(row)
        assert (
            router_report("stock", "rows.jsonl", "out", overwrite=True).counts.sum(1).tolist()
            == [2 * want] * 2
        )
    write({"prompt": "3 and 4", "completion": " make 7"})
    want = (
        len(TOKENIZER("3 and 4")["input_ids"])
        + len(TOKENIZER.encode(" make 7", add_special_tokens=False))
        + 1
    )
    assert (
        router_report("stock", "rows.jsonl", "out", overwrite=True).counts.sum(1).tolist()
        == [2 * want] * 2
    )


def test_command(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["moe-runtime", "stats", "stock", "--data", "data.jsonl", "--out", "there"]
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert "wrote there/router_load.csv, there/router_load.png" in out
    lines = out.splitlines()
    assert lines[1].split() == ["layer", "experts", "dead", "max", "violation", "entropy"]
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
