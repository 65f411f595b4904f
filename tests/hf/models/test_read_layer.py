"""Reads the sizes of a MoE layer: those of the benchmarks, and those of model folders."""

import json

from moe_runtime.bench import shapes
from moe_runtime.config import Layer, MoEConfig
from moe_runtime.hf.models.folders import read_layer
from moe_runtime.tools.layer_shapes import LAYERS


def config(folder, **values):
    (folder / "config.json").write_text(json.dumps(values))
    return read_layer(folder)


def test_layers_of_model_folders(tmp_path):
    assert config(
        tmp_path, hidden_size=64, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2
    ) == Layer(64, 96, 8, 2)
    qwen = {
        "hidden_size": 64,
        "intermediate_size": 999,
        "moe_intermediate_size": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    }

    assert (
        config(tmp_path, **qwen)
        == Layer(64, 32, 16, 4)
        == config(tmp_path, text_config=qwen, hidden_size=1)
    )
    assert config(
        tmp_path,
        hidden_size=64,
        intermediate_size=96,
    ) == Layer(64, 96, 0, 0)
    block = {
        "config": MoEConfig(
            hidden_size=64,
            intermediate_size=96,
        ).to_dict()
    }
    assert config(
        tmp_path,
        moe_runtime=block,
        num_experts=7,
    ) == Layer(64, 96, 8, 6, shared=True)


def test_layers_are_those_of_the_benchmarks():
    assert {name: (s.H, s.I, s.E, s.K, s.shared) for name, s in shapes.GPU.items()} == {
        name: (
            layer.hidden_size,
            layer.intermediate_size,
            layer.num_experts,
            layer.top_k,
            layer.shared,
        )
        for name, layer in LAYERS.items()
    }
