"""moe_runtime.methods.esft.folders: what apply and save_pretrained write, bit for bit, in bounded
memory, or nothing at all.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moe_runtime.hf.models.saved_rows import saved_tensors
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.methods.esft.adapters import apply
from moe_runtime.methods.esft.folders import merge_folder
from moe_runtime.methods.esft.selection import ExpertSelection
from tests.hf import stock as every
from tests.hf.tiny import dense, upcycled
from tests.methods.esft.test_adapters import TWICE
from tests.support.checkpoints import tensors
from tests.support.esft_adapter import random_adapter, same
from tests.support.stock_moe import stock


def assert_merged(model, tmp_path: Path, adapter, **options) -> None:
    """Merge base and adapter, and compare with the same in memory; `model` is the base."""
    adapter.save(tmp_path / "adapter")
    receipt = merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", **options)
    apply(model, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "want")
    base, out, want = (tensors(tmp_path / name) for name in ("base", "out", "want"))
    assert same(out, want)
    assert receipt.changed == sum(not torch.equal(base[key], out[key]) for key in out)
    assert receipt.experts == sum(len(ids) for ids in adapter.experts.values())
    assert receipt.tensors == len(out) and receipt.bytes == sum(
        t.numel() * t.element_size() for t in out.values()
    )
    for name in ("config.json", "generation_config.json"):
        if (tmp_path / "base" / name).exists():
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()


@pytest.mark.parametrize("family", [f for f in every.FAMILIES if f not in TWICE])
def test_every_family_in_its_saved_form(tmp_path, family):
    model = every.build(family)
    model.save_pretrained(tmp_path / "base")
    assert_merged(model, tmp_path, random_adapter(model, others=True))


def test_both_names_of_a_tied_weight_change(tmp_path):
    model = dense("llama", tie_word_embeddings=True)
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    old = model.get_input_embeddings().weight.detach()
    save_file({name: old.clone() for name in names}, tmp_path / "model.safetensors")
    new = {names[1]: torch.ones_like(old)}
    found = saved_tensors(model, new, Checkpoint(tmp_path))
    assert sorted(found) == names and all((tensor == 1).all() for tensor in found.values())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_a_folder_with_the_model_s_own_stacks(tmp_path, family):
    model = stock(family)
    model.save_pretrained(tmp_path / "base", save_original_format=False)
    assert (
        "model.layers.0.mlp.experts.down_proj" in tensors(tmp_path / "base")
        or family == "granitemoe"
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapter = random_adapter(model)
    adapter.save(tmp_path / "adapter")
    merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    apply(loaded, adapter)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same(dict(merged.state_dict()), dict(loaded.state_dict()))


@pytest.mark.parametrize("layers", [None, [1]], ids=["all layers", "one layer"])
def test_our_own_folders(tmp_path, layers):
    model = upcycled("llama", layers=layers)
    model.save_pretrained(tmp_path / "base")
    assert_merged(model, tmp_path, random_adapter(model))
    assert (tmp_path / "out" / "modeling_moe_runtime.py").is_file()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same(dict(merged.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trained_wide_saved_narrow_and_in_shards(tmp_path, dtype):
    model = stock("qwen3_moe").to(dtype)
    model.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    adapter = random_adapter(model, dtype=torch.float32)
    assert_merged(model, tmp_path, adapter, max_shard_size="25KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def folder(tmp_path, family="qwen3_moe", **changes):
    """A base in a folder and an adapter of it."""
    model = stock(family, **changes)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base", random_adapter(model)


def _other_config(base, adapter):
    config = json.loads((base / "config.json").read_text()) | {"num_experts_per_tok": 3}
    (base / "config.json").write_text(json.dumps(config))
    return adapter


def _quantized(base, adapter):
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    whole = load_file(base / "model.safetensors")
    save_file(
        whole | {name: whole[name].to(torch.float8_e4m3fn)},
        base / "model.safetensors",
        metadata={"format": "pt"},
    )
    return adapter


def _other_weights(base, adapter):
    whole = {name: tensor * 1.02 for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(whole, base / "model.safetensors", metadata={"format": "pt"})
    return adapter


def _without_an_expert(base, adapter):
    whole = load_file(base / "model.safetensors")
    del whole["model.layers.1.mlp.experts.7.down_proj.weight"]
    save_file(whole, base / "model.safetensors", metadata={"format": "pt"})
    return adapter


def _unknown_expert(_, adapter):
    renamed = {
        name.replace("experts.7.", "experts.9."): tensor for name, tensor in adapter.tensors.items()
    }
    return replace(
        adapter, tensors=renamed, selection=ExpertSelection(experts={0: (1, 9), 1: (1, 9)})
    )


def _not_a_number(_, adapter):
    name = next(name for name in adapter.tensors if "experts.7." in name)
    return replace(
        adapter,
        tensors=adapter.tensors | {name: torch.full_like(adapter.tensors[name], float("nan"))},
    )


@pytest.mark.parametrize(
    "damage, match",
    [
        pytest.param(
            _not_a_number, "experts.7.*of the merge of adapter contains NaN or infinity", id="NaN"
        ),
        pytest.param(
            _other_config,
            "whose num_experts_per_tok is 2, but the model's is 3",
            id="another config",
        ),
        pytest.param(_other_weights, "for a base with other weights", id="other weights"),
        pytest.param(_quantized, "up_proj.weight in .* is torch.float8_e4m3fn", id="quantized"),
        pytest.param(
            _without_an_expert,
            "should have .*experts.7.down_proj.weight .*, but lacks it",
            id="an expert is missing",
        ),
        pytest.param(
            _unknown_expert, r"selection has experts \[9\] of layer 0, .* to 7", id="unknown expert"
        ),
        pytest.param(
            lambda base, a: base.rename(base.with_name("gone")) and a,
            "has no config.json",
            id="no base",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(tmp_path, damage, match):
    base, adapter = folder(tmp_path)
    adapter = damage(base, adapter)
    with pytest.raises(ValueError, match=match):
        merge_folder(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_target_that_exists(tmp_path):
    base, adapter = folder(tmp_path)
    before = tensors(base)
    with pytest.raises(ValueError, match="already exists"):
        merge_folder(base, adapter, base)
    with pytest.raises(ValueError, match="which is read. Choose another"):
        merge_folder(base, adapter, base, overwrite=True)
    assert same(before, tensors(base))
    merged = tmp_path / "merged"
    merge_folder(base, adapter, merged)
    (merged / "of_before").touch()
    merge_folder(base, adapter, merged, overwrite=True)
    assert not same(before, tensors(merged)) and not (merged / "of_before").exists()
