"""moe_runtime.status: what runs each layer's experts."""

import pytest
import torch

import moe_runtime
from moe_runtime import backends
from tests.hf import stock as every
from tests.hf.tiny import dense, upcycled
from tests.support.stock_moe import stock


def test_a_stock_model_before_and_after():
    model = stock("qwen3_moe").bfloat16()
    model.set_experts_implementation("eager")
    before = moe_runtime.status(model)
    assert [str(layer) for layer in before] == [
        f"model.layers.{i}.mlp.experts: bfloat16, eager" for i in range(2)
    ]
    moe_runtime.patch(model)
    first = moe_runtime.status(model)[0]
    here = backends.choose("moe_mlp", torch.zeros(1).bfloat16())
    assert first[1:] == ("moe_runtime", here, True, "bfloat16")
    assert str(first).endswith(f"moe_runtime, backend {here}, one operator")
    moe_runtime.unpatch(model)
    assert moe_runtime.status(model) == before


@pytest.mark.parametrize("format", ["nf4", "int8", "fp8_block"])
def test_packed_experts(format, monkeypatch):
    model = stock("qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    moe_runtime.quantize_experts(model, format)
    monkeypatch.setattr(backends, "choose", lambda op, like: f"{op} {like.dtype}")
    layers = moe_runtime.status(model)
    assert {layer.format for layer in layers} == {format}
    assert {layer.backend for layer in layers} == {"frozen_mlp torch.float32"}


def test_other_models():
    composed = every.build("inkling2")
    moe_runtime.patch(composed)
    assert {layer.operator for layer in moe_runtime.status(composed)} == {False}
    assert {layer.runs_on for layer in moe_runtime.status(upcycled("llama"))} == {"moe_runtime"}
    assert moe_runtime.status(dense("llama")) == []
