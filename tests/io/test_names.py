"""Text from files appears in messages as one printable line of bounded length, whichever reader
rejects it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from moe_runtime import cli
from moe_runtime.config import MoEConfig
from moe_runtime.hf.models import folders
from moe_runtime.io import rows
from moe_runtime.io.checkpoint import INDEX, Checkpoint, check_keys
from moe_runtime.io.files import read_json
from moe_runtime.methods.esft.selection import ExpertSelection
from moe_runtime.methods.lora.adapters import read_adapter
from moe_runtime.methods.ultrafuser.folders import read as read_fuser
from papers.xft.recipe import Recipe
from tests.fuzz.attempts import LONGEST

ESCAPES = "\x1b]0;title\x07\x1b[31mred\u202e\n"
EVIL = ESCAPES + "x" * 1_000_000


def written(folder: Path, **values) -> Path:
    """Write JSON files to a folder and return it; `_` stands for a dot in their names."""
    for name, value in values.items():
        (folder / name.replace("_json", ".json")).write_text(json.dumps(value))
    return folder


READERS: dict[str, Callable[[Path], object]] = {
    "shard of an index": lambda folder: Checkpoint(
        written(folder, **{INDEX: {"weight_map": {"a": EVIL}}})
    ),
    "file beside": lambda folder: Checkpoint(written(folder, **{"\x1b[31m.bin": 1})),
    "keys compared": lambda _: check_keys({EVIL: None}, {}, source="a"),
    "json": lambda folder: read_json(written(folder, a_json={EVIL: 1}) / "a.json"),
    "config.json, type": lambda folder: folders.read_config(
        written(folder, config_json={"model_type": EVIL})
    ),
    "config.json, act": lambda folder: folders.skeleton(
        AutoConfig.for_model("llama", hidden_act=EVIL)
    ),
    "moe_runtime block": lambda _: MoEConfig.from_dict({EVIL: 1}),
    "column": lambda folder: rows.read_rows(written(folder, a_json=[{EVIL: 1}]) / "a.json"),
    "value": lambda _: rows.tokenize_pairs(None, [{"text": [EVIL]}], 8),
    "recipe, key": lambda _: Recipe.from_dict({EVIL: 1}),
    "selection": lambda _: ExpertSelection.from_dict({"experts": {EVIL: [0]}}),
    "adapter": lambda folder: read_adapter(written(folder, adapter_config_json={"r": EVIL})),
    "fused model": lambda folder: read_fuser(written(folder, fuser_config_json={"format": EVIL})),
}


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
