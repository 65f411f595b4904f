"""moe_runtime.methods.esft.folders: apply and save_pretrained write exact bits in bounded memory,
or nothing at all.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from moe_runtime.hf.models.saved_rows import saved_tensors
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.io.files import read_json
from moe_runtime.methods.esft.adapters import apply
from moe_runtime.methods.esft.folders import merge_folder
from moe_runtime.methods.esft.selection import ExpertSelection
from tests.hf import stock as every
from tests.hf.tiny import dense, upcycled
from tests.methods.esft.test_adapters import TWICE
from tests.support.checkpoints import assert_equal, tensors
from tests.support.edited import edit_tensors
from tests.support.esft_adapter import random_adapter
from tests.support.stock_moe import stock


def assert_merged(model, tmp_path: Path, adapter, **options) -> None:
    """Merge base and adapter, and compare with merging in memory; `model` is the base."""
    adapter.save(tmp_path / "adapter")
    receipt = merge_folder(
        tmp_path / "base",
        tmp_path / "adapter",
        tmp_path / "out",
        **options,
    )
    apply(model, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "expected")
    base = tensors(tmp_path / "base")
    out = tensors(tmp_path / "out")
    assert_equal(out, tensors(tmp_path / "expected"))
    changed = [
        key
        for key in out
        if not torch.equal(
            base[key],
            out[key],
        )
    ]
    assert receipt.changed == len(changed)
    assert receipt.experts == sum(map(len, adapter.experts.values()))
    assert receipt.tensors == len(out)
    assert receipt.bytes == sum(tensor.nbytes for tensor in out.values())
    for file in (tmp_path / "base").glob("*config.json"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "family",
    [f for f in every.FAMILIES if f not in TWICE],
)
def test_every_family_in_its_saved_form(tmp_path, family):
    model = every.build(family)
    model.save_pretrained(tmp_path / "base")
    assert_merged(model, tmp_path, random_adapter(model, others=True))


def test_both_names_of_a_tied_weight_change(tmp_path):
    model = dense("llama", tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"
    old = model.get_input_embeddings().weight.detach()
    both = {"lm_head.weight": old.clone(), embedding: old.clone()}
    save_file(both, tmp_path / "model.safetensors")
    new = torch.ones_like(old)
    changed = saved_tensors(
        model,
        {embedding: new},
        Checkpoint(tmp_path),
    )
    assert_equal(changed, dict.fromkeys(both, new))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_a_folder_with_the_model_s_own_stacks(tmp_path, family):
    model = stock(family)
    model.save_pretrained(tmp_path / "base", save_original_format=False)
    if family != "granitemoe":
        assert "model.layers.0.mlp.experts.down_proj" in tensors(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapter = random_adapter(model)
    merge_folder(
        tmp_path / "base",
        adapter,
        tmp_path / "out",
    )
    apply(loaded, adapter)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_equal(merged.state_dict(), loaded.state_dict())


@pytest.mark.parametrize(
    "layers",
    [None, [1]],
    ids=["all layers", "one layer"],
)
def test_our_own_folders(tmp_path, layers):
    model = upcycled("llama", layers=layers)
    model.save_pretrained(tmp_path / "base")
    assert_merged(model, tmp_path, random_adapter(model))
    assert (tmp_path / "out" / "modeling_moe_runtime.py").is_file()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_equal(merged.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16],
)
def test_trained_wide_saved_narrow_and_in_shards(tmp_path, dtype):
    model = stock("qwen3_moe").to(dtype)
    model.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    adapter = random_adapter(model, dtype=torch.float32)
    assert_merged(model, tmp_path, adapter, max_shard_size="25KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def folder(tmp_path):
    """A base in a folder and an adapter for it."""
    model = stock("qwen3_moe")
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base", random_adapter(model)


LAST = "model.layers.1.mlp.experts.7.down_proj.weight"


def quantized(name, tensor):
    if name == LAST:
        return tensor.to(torch.float8_e4m3fn)
    return tensor


def without_an_expert(name, tensor):
    if name == LAST:
        return None
    return tensor


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda name, tensor: tensor * 1.02, "for a base with other weights"),
        (quantized, "down_proj.weight in .* is torch.float8_e4m3fn"),
        (without_an_expert, "should have .*experts.7.down_proj.weight .*, but lacks it"),
    ],
    ids=["other weights", "quantized", "an expert is missing"],
)
def test_another_base_is_refused_and_nothing_written(tmp_path, change, match):
    base, adapter = folder(tmp_path)
    edit_tensors(base, lambda whole: {name: change(name, tensor) for name, tensor in whole.items()})
    with pytest.raises(ValueError, match=match):
        merge_folder(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_refused_and_nothing_written(tmp_path):
    base, adapter = folder(tmp_path)
    nan = torch.full_like(
        adapter.tensors[LAST],
        float("nan"),
    )
    broken = replace(
        adapter,
        tensors=adapter.tensors | {LAST: nan},
    )
    names = {name: name.replace("experts.7.", "experts.9.") for name in adapter.tensors}
    tensors = {new: adapter.tensors[name] for name, new in names.items()}
    selection = ExpertSelection(experts={0: (1, 9), 1: (1, 9)})
    unknown = replace(adapter, tensors=tensors, selection=selection)
    other = shutil.copytree(base, tmp_path / "other")
    config = read_json(other / "config.json") | {"num_experts_per_tok": 3}
    (other / "config.json").write_text(json.dumps(config))
    for source, given, match in (
        (base, broken, "experts.7.*of the merge of adapter contains NaN or infinity"),
        (base, unknown, r"selection has experts \[9\] of layer 0, .* to 7"),
        (other, adapter, "whose num_experts_per_tok is 2, but the model's is 3"),
        (tmp_path, adapter, "has no config.json"),
    ):
        with pytest.raises(ValueError, match=match):
            merge_folder(source, given, tmp_path / "out")
    assert not (tmp_path / "out").exists()
