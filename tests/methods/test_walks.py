"""How far a reader has to follow a model through a method; `tests.support.walks` defines what is
counted.
"""

import json

from moe_runtime.methods import esft, xft
from moe_runtime.methods.esft import runs
from papers.engine.tiny import train_tokenizer
from tests.hf.tiny import dense
from tests.support.stock_moe import stock
from tests.support.walks import follow


def test_an_esft_run_finds_its_layers_once(tmp_path, quick):
    base = tmp_path / "base"
    tokenizer = train_tokenizer(["Write 1: x = 1"] * 9, 300)
    stock("deepseek_v2", vocab_size=len(tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    rows = [{"prompt": f"Write {i}:\n", "completion": f"x = {i}"} for i in range(12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = runs.score_folder(
        base,
        data,
        tmp_path / "summary.json",
        n_tokens=64,
        max_length=32,
    )
    selection = esft.select_experts(scores, 0.4)
    training = runs.EsftTraining(steps=2, batch_size=2, learning_rate=1e-2)
    walk = follow(
        runs.train_folder, base, selection, data, tmp_path / "out", training, max_length=32
    )
    assert walk.stays <= 45, "\n".join(walk.places)
    looks = [place for place in walk.places if place.endswith("layers.numbered_layers")]
    assert len(looks) <= 2, looks  # only from layers_of


def test_xft_upcycles_a_model_in_few_places(quick):
    walk = follow(
        xft.upcycle,
        dense("llama"),
        num_experts=4,
        top_k=3,
    )
    assert walk.stays <= 10, "\n".join(walk.places)
    assert walk.result.preserves
