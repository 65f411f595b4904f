"""Every stock MoE family: stock transformers loads what `save_quantized` writes, with equal logits,
or refuses it.
"""

import copy

import pytest
import torch
from torch import nn
from transformers.quantizers.quantizers_utils import should_convert_module

import moe_runtime
from moe_runtime.hf.dropin import quantize
from moe_runtime.hf.dropin.quantize import METHOD
from moe_runtime.io.files import read_json
from moe_runtime.modules import packed as modules
from moe_runtime.ops import packed
from tests.hf import stock, stock_sizes
from tests.hf.tiny import distance

# families with the checkpoint names of DeepSeek, Mixtral, stacks, GPT-OSS and a model nested in
# another one
FAST = ("qwen3_moe", "mixtral", "granitemoe", "gpt_oss", "deepseek_ocr2")
SIZE = 128  # size of the experts: whole blocks of FP8


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            f,
            marks=[] if f in FAST else pytest.mark.slow,
        )
        for f in stock.FAMILIES
    ],
)
def model(request):
    """A tiny model with experts that fit every format."""
    with pytest.MonkeyPatch.context() as patch:
        for table in (stock_sizes.SMALL, stock_sizes.MOE):
            for name in table:
                if "intermediate" in name or name == "moe_hidden_size":
                    patch.setitem(table, name, SIZE)
        changes = stock_sizes.CHANGES.get(request.param, {})
        if "moe_intermediate_size" in changes.get("text_config", {}):
            text = changes["text_config"] | {"moe_intermediate_size": [SIZE, SIZE]}
            patch.setitem(
                stock_sizes.CHANGES,
                request.param,
                changes | {"text_config": text},
            )
        return stock.build(request.param)


def unpacked(model, quantized):
    """Return `model` with the dequantized weights of `quantized`."""
    twin = copy.deepcopy(model)
    theirs = quantize.experts_of(quantized)
    for path, module in quantize.experts_of(twin).items():
        for name in modules.layouts(theirs[path]):
            weight = packed.reference(*modules.get(theirs[path], name)).float()
            getattr(module, name).data.copy_(
                weight.transpose(1, 2) if module.is_transposed else weight
            )
    return twin


@torch.no_grad()
# NF4, which is saved like int8, does not fit these rows of 64
@pytest.mark.parametrize("form", ["mxfp4", "fp8_block", "int8"])
def test_stock_transformers_loads_what_save_quantized_writes(form, model, tmp_path):
    quantized = copy.deepcopy(model)
    try:
        moe_runtime.quantize_experts(quantized, form)
    except ValueError as error:
        assert "no kernel supports" in str(error)
        return
    expected = stock.run(unpacked(model, quantized), "eager").logits
    moe_runtime.save_quantized(quantized, tmp_path)
    ours = moe_runtime.load_quantized(tmp_path).eval()

    assert torch.equal(
        stock.run(ours, "moe_runtime").logits, stock.run(quantized, "moe_runtime").logits
    )
    assert distance(stock.run(ours, "moe_runtime").logits, expected) < 1e-5
    config = read_json(tmp_path / "config.json")["quantization_config"]
    if config["quant_method"] == METHOD:  # the bytes are not mistaken for weights
        with pytest.raises(
            RuntimeError, match="size mismatch|ignore_mismatched_sizes|automatic conversion"
        ):
            type(model).from_pretrained(tmp_path)
        return
    loaded, report = type(model).from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    assert distance(stock.run(loaded.eval(), "eager").logits, expected) < 1e-5
    # on a GPU, which keeps FP8, only the experts are quantized
    for name, module in loaded.named_modules():
        if isinstance(module, nn.Linear):
            assert not should_convert_module(
                name,
                config["modules_to_not_convert"],
            )
