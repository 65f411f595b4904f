"""moe_runtime.hf.models.prediction: tensors of multi-token prediction survive, or config.json
declares none.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moe_runtime.hf.dropin.quantize import quantize_experts
from moe_runtime.hf.dropin.quantized_files import save_quantized
from moe_runtime.hf.models.prediction import keep_prediction
from moe_runtime.hf.training.sft import train_command
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.files import read_json
from papers.engine.tiny import train_tokenizer
from tests.support.checkpoints import assert_equal, tensors
from tests.support.stock_moe import stock

EXTRA = {
    "model.layers.61.eh_proj.weight": torch.randn(3, 4).bfloat16(),
    "model.layers.61.mlp.experts.0.up_proj.weight": torch.randn(2, 4),
}


def declared(folder: Path) -> int:
    return read_json(folder / "config.json")["num_nextn_predict_layers"]


@pytest.fixture
def base(tmp_path) -> Path:
    """A DeepSeek-V3 with tensors of a layer that transformers does not load, and rows."""
    tokenizer = train_tokenizer(["3 and 4 make 7"] * 9, 280)
    model = stock("deepseek_v3", vocab_size=len(tokenizer), num_nextn_predict_layers=1)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    save_file(load_file(file) | EXTRA, file, {"format": "pt"})
    row = json.dumps({"prompt": "3 and 4 make ", "completion": "7"})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 8)
    return tmp_path / "base"


def test_training_keeps_them(base, tmp_path, capsys):
    words = f"--model {base} --data {tmp_path}/rows.jsonl --output_dir {tmp_path}/tuned"
    train_command([*words.split(), *"--max_steps 1 --report_to none --save_strategy no".split()])
    assert "copied 2 tensors of multi-token prediction" in capsys.readouterr().out
    found = tensors(tmp_path / "tuned")
    assert_equal({name: found[name] for name in EXTRA}, EXTRA)
    assert declared(tmp_path / "tuned") == 1
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize("size", ["1KB", "1GB"])
def test_a_saved_model_gets_a_file_more(base, tmp_path, size):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "saved", max_shard_size=size)
    assert sorted(keep_prediction(base, tmp_path / "saved")) == sorted(EXTRA)
    assert Checkpoint(tmp_path / "saved").specs() == Checkpoint(base).specs()
    assert_equal(tensors(tmp_path / "saved"), tensors(base))


def test_what_cannot_be_kept_is_not_declared(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    for folder, source in (("hub", "someone/model"), ("none", tmp_path / "hub")):
        model.save_pretrained(tmp_path / folder)
        assert declared(tmp_path / folder) == 1
        assert keep_prediction(source, tmp_path / folder) == []
        assert declared(tmp_path / folder) == 0
    quantize_experts(model, "int8")
    save_quantized(model, tmp_path / "packed")
    assert declared(tmp_path / "packed") == 0
