"""What files say reaches messages in one printable line of bounded length, whichever reader refuses
it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from moe_runtime import cli
from moe_runtime.config import MoEConfig, one_line
from moe_runtime.hf.models import folders
from moe_runtime.hf.training import ranks
from moe_runtime.io import rows
from moe_runtime.io.checkpoint import INDEX, SINGLE, Checkpoint, check_keys
from moe_runtime.io.files import parse_object, read_json
from moe_runtime.methods.esft.selection import ExpertSelection
from moe_runtime.methods.lora.adapters import read_adapter
from moe_runtime.methods.ultrafuser.folders import read as read_fuser
from moe_runtime.methods.upit.experts import open_expert
from moe_runtime.methods.xft.official import BIN_INDEX, open_model
from papers.engine.recipe import read_yaml
from papers.engine.tiny import train_tokenizer
from papers.xft.recipe import Recipe
from tests.fuzz.attempts import LONGEST
from tests.support.checkpoints import raw_file

ESCAPES = "\x1b]0;title\x07\x1b[31mred\u202e\n"
EVIL = ESCAPES + "x" * 1_000_000
TENSOR = {
    "dtype": "F32",
    "shape": [0],
    "data_offsets": [0, 0],
}


def written(folder: Path, **values) -> Path:
    """Write JSON files to a folder and return it; `_` stands for a dot in their names."""
    for name, value in values.items():
        (folder / name.replace("_json", ".json")).write_text(json.dumps(value))
    return folder


def single(folder: Path, header: dict) -> Path:
    raw_file(folder / SINGLE, header)
    return folder


def row(folder: Path, text: str | dict, name: str = "rows.jsonl"):
    (folder / name).write_text(text if isinstance(text, str) else json.dumps(text) + "\n")
    return rows.read_rows(folder / name)


def broken_template(_: Path):
    tokenizer = train_tokenizer(["a b"], 300)
    tokenizer.chat_template = "{{ raise_exception(messages[0]['content']) }}"
    chat = [{"role": "user", "content": EVIL}]
    return rows.tokenize_pairs(tokenizer, [{"messages": chat}], 8)


READERS: dict[str, Callable[[Path], object]] = {
    "key of a tensor": lambda folder: Checkpoint(single(folder, {EVIL: TENSOR})),
    "entry of a tensor": lambda folder: Checkpoint(single(folder, {"a": EVIL})),
    "dtype of a tensor": lambda folder: Checkpoint(single(folder, {"a": TENSOR | {"dtype": EVIL}})),
    "shard of an index": lambda folder: Checkpoint(
        written(folder, **{INDEX: {"weight_map": {"a": EVIL}}})
    ),
    "missing shard": lambda folder: Checkpoint(
        written(folder, **{INDEX: {"weight_map": {"a": "x" * 9000 + ".safetensors"}}})
    ),
    "file beside": lambda folder: Checkpoint(written(folder, **{"\x1b[31m.bin": 1})),
    "key asked for": lambda folder: Checkpoint(single(folder, {"a": TENSOR})).get(EVIL),
    "keys compared": lambda _: check_keys({EVIL: None}, {}, source="a"),
    "pickles' index": lambda folder: open_model(
        written(folder, **{BIN_INDEX: {"weight_map": {"a": EVIL}}})
    ),
    "json": lambda folder: read_json(written(folder, a_json={EVIL: 1}) / "a.json"),
    "text": lambda _: parse_object(EVIL.encode(), "a"),
    "config.json, type": lambda folder: folders.read_config(
        written(folder, config_json={"model_type": EVIL})
    ),
    "config.json, size": lambda folder: folders.read_config(
        written(folder, config_json={"hidden_size": EVIL})
    ),
    "config.json, act": lambda folder: folders.skeleton(
        AutoConfig.for_model("llama", hidden_act=EVIL)
    ),
    "moe_runtime block": lambda _: MoEConfig.from_dict({EVIL: 1}),
    "tokenizer": lambda folder: ranks.load_tokenizer(
        written(folder, tokenizer_json={EVIL: EVIL}, tokenizer_config_json={})
    ),
    "column": lambda folder: row(folder, {EVIL: 1}),
    "column of .json": lambda folder: row(folder, [{EVIL: 1}], "rows.json"),
    "line": lambda folder: row(folder, EVIL),
    "value": lambda _: rows.tokenize_pairs(None, [{"text": [EVIL]}], 8),
    "chat template": broken_template,
    "recipe, key": lambda _: Recipe.from_dict({EVIL: 1}),
    "yaml, key twice": lambda folder: read_yaml(evil_yaml(folder, '{"%s": 1, "%s": 2}')),
    "yaml, tag": lambda folder: read_yaml(evil_yaml(folder, "!!%s 1")),
    "side file": lambda folder: folders.side_files(written(folder, **{ESCAPES: {}})),
    "selection": lambda _: ExpertSelection.from_dict({"experts": {EVIL: [0]}}),
    "adapter": lambda folder: read_adapter(written(folder, adapter_config_json={"r": EVIL})),
    "expert": lambda folder: open_expert(written(folder, expert_json={"format": EVIL})),
    "fused model": lambda folder: read_fuser(written(folder, fuser_config_json={"format": EVIL})),
}


def evil_yaml(folder: Path, text: str) -> Path:
    (folder / "a.yaml").write_text(text.replace("%s", "x" * 100_000))
    return folder / "a.yaml"


@pytest.mark.parametrize("reader", READERS)
def test_an_error_is_a_printable_line_of_bounded_length(tmp_path, monkeypatch, reader):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "in"
    folder.mkdir()

    with pytest.raises((ValueError, OSError)) as error:
        READERS[reader](folder)
    message = str(error.value)
    assert message.isprintable(), message[:300]
    assert len(message) <= LONGEST


def test_the_command_line_prints_one_bounded_line(monkeypatch, capsys):
    def fail(app):
        raise ValueError(EVIL)

    monkeypatch.setattr(cli, "_run", fail)

    with pytest.raises(SystemExit):
        cli.main()
    printed = capsys.readouterr().err
    assert printed.startswith("error: \\x1b]0;title\\x07\\x1b[31mred\\u202e x")
    assert printed.endswith("...\n")
    assert printed.count("\n") == 1
    assert printed[:-1].isprintable()
    assert len(printed) < 4100


def test_one_line_leaves_what_prints():
    assert one_line("a é 日本 \n\n b\tc") == "a é 日本 b c"
    assert one_line("x" * 9, 6) == "xxx..."
