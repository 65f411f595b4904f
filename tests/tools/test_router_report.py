"""tools/router_report.py and the command `stats`: the router load of a model folder, stock or ours,
on a text file.
"""

import csv
import json

import pytest

from moe_runtime import cli
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


def lengths() -> list[int]:
    # including EOS, as in training
    return [len(TOKENIZER(text)["input_ids"]) + 1 for text in LINES]


@pytest.mark.parametrize(("model", "slots"), [("stock", 2), ("ours", 3)])
def test_every_token_is_counted_once_and_padding_never(model, slots, folder):
    stats = router_report(
        model,
        "data.jsonl",
        "out",
        batch_size=5,
    )
    assert len(set(lengths())) > 1  # so some rows are padded
    assert stats.counts.sum(1).tolist() == [sum(lengths()) * slots] * 2
    with open("out/router_load.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["slots"]) for row in rows) == stats.counts.sum()
    assert len(rows) == 8
    assert (folder / "out" / "router_load.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "out").iterdir()) == sorted(FILES)


def slots(data="data.jsonl", **options) -> int:
    """How many slots of each layer of the stock model are used, two per token."""
    report = router_report(
        "stock",
        data,
        "out",
        overwrite=True,
        **options,
    )
    first, second = report.counts.sum(1).tolist()
    assert first == second
    return first


def test_how_many_tokens_are_counted(folder):
    assert slots(tokens=17) == 2 * 17
    assert slots(max_length=4) == 2 * sum(min(n, 4) for n in lengths())
    assert slots(batch_size=1) == slots(batch_size=7) == 2 * sum(lengths())


def test_bad_input_is_named(folder):
    tiny.dense("llama").save_pretrained("dense")
    TOKENIZER.save_pretrained("dense")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts that use transformers"):
        router_report("dense", "data.jsonl", "out")
    assert not (folder / "out").exists()


def test_command(folder, capsys, monkeypatch):
    words = "moe-runtime stats stock --data data.jsonl --out there"
    monkeypatch.setattr("sys.argv", words.split())
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "wrote there/router_load.csv, there/router_load.png" in out
    _, head, first, second, *_ = out.splitlines()
    assert head.split() == ["layer", "experts", "dead", "max", "violation", "entropy"]
    assert first.split()[0] == "0"
    assert second.split()[0] == "1"
    violation, entropy = map(float, first.split()[3:])
    assert violation > 1 > entropy
