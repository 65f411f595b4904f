"""moe_runtime.methods.esft.adapters: official names for every layout, bit-exact in and out of any
model, clear errors.
"""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_runtime.hf.dropin.layers import experts_module, numbered_layers
from moe_runtime.hf.training.trained_files import (
    ExpertLayout,
    experts_path,
    join_row,
    layout_of,
    split_row,
    stack_parts,
)
from moe_runtime.io.files import read_json
from moe_runtime.methods.esft.adapters import Adapter, apply, load_adapter, remove
from tests.hf import stock as every
from tests.hf.tiny import upcycled
from tests.support.checkpoints import assert_equal
from tests.support.esft_adapter import random_adapter, weights
from tests.support.stock_moe import stock

# models with two stacks of layers, in which each number names two layers
TWICE = ("diffusion_gemma", "ernie4_5_vl_moe")


def saved(model, folder, **options) -> Adapter:
    random_adapter(model, **options).save(folder)
    return load_adapter(folder)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_is_the_matrices_of_a_linear_mlp(gated, transposed, interleaved, bias):
    layout = ExpertLayout(
        gated,
        transposed,
        interleaved and gated,
        bias,
    )
    gate = torch.randn(5, 3)
    up = torch.randn(5, 3)
    down = torch.randn(3, 5)
    parts = {"up_proj.weight": up, "down_proj.weight": down}
    rows = {"up_proj": up, "down_proj": down}
    if gated:
        if interleaved:
            both = torch.stack([gate, up], 1).flatten(
                0,
                1,
            )
        else:
            both = torch.cat([gate, up])
        parts["gate_proj.weight"] = gate
        rows = {"gate_up_proj": both, "down_proj": down}
    if bias:
        rows |= {f"{name}_bias": row[:, 0].clone() for name, row in rows.items()}
        parts |= {name.replace("weight", "bias"): t[:, 0].clone() for name, t in parts.items()}
    assert rows.keys() == stack_parts(layout).keys()
    result = {}
    for name, row in rows.items():
        if transposed and row.dim() == 2:
            row = row.t()
        found = split_row(layout, name, row)
        assert torch.equal(
            join_row(layout, name, found),
            row,
        )
        result |= found
    assert_equal(result, parts)


def build(family: str):
    if family == "ours":
        return upcycled("llama", layers=[1])
    return every.build(family)


@pytest.mark.parametrize(
    "family",
    ["ours", *(f for f in every.FAMILIES if f not in TWICE)],
)
def test_in_and_out_of_every_family(tmp_path, family):
    model = build(family)
    before = weights(model)
    adapter = saved(
        model,
        tmp_path / "adapter",
        others=family != "ours",
    )
    apply(model, adapter)
    after = weights(model)
    for number, layer in numbered_layers(model).items():
        layout = layout_of(experts_module(model, layer))
        ids = adapter.selection.experts[number]
        path = experts_path(layer)
        for stack in stack_parts(layout):
            name = f"{path}.{stack}"
            changed = [
                not torch.equal(*both)
                for both in zip(
                    before[name],
                    after[name],
                )
            ]
            assert changed == [e in ids for e in range(layer.num_experts)]
            for e in ids:
                for part, tensor in split_row(
                    layout,
                    stack,
                    after[name][e],
                ).items():
                    assert torch.equal(
                        tensor,
                        adapter.tensors[f"{path}.{e}.{part}"],
                    )
    for name, tensor in adapter.others.items():
        assert torch.equal(after[name], tensor)
    remove(model)
    assert_equal(before, weights(model))


def test_the_shared_expert_of_our_own_layers_needs_its_flag():
    model = upcycled("llama", gate="xft")
    adapter = random_adapter(model, others=True)

    def with_expert(e: int) -> dict[str, torch.Tensor]:
        tensors = dict(adapter.tensors)
        for name, tensor in adapter.tensors.items():
            if "experts.1." in name:
                tensors[name.replace("experts.1.", f"experts.{e}.")] = tensor + 1
        return tensors

    before = weights(model)
    apply(
        model,
        replace(adapter, tensors=with_expert(0)),
    )
    remove(model)
    assert_equal(before, weights(model))
    for wrong in (0, 2):  # a shared expert is never selected
        selection = replace(adapter.selection, shared_experts=wrong != 0)
        tensors = with_expert(wrong)
        with pytest.raises(ValueError, match=f"expert {wrong} of layer 0, which its selection"):
            apply(
                model,
                replace(adapter, tensors=tensors, selection=selection),
            )


def test_the_folder_is_the_official_one(tmp_path):
    adapter = random_adapter(stock("deepseek_v2"))
    adapter.save(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"expert_cfg.json", "model.safetensors"}
    shapes = {}
    for layer in (1, 2):
        for e in (1, 7):
            path = f"model.layers.{layer}.mlp.experts.{e}"
            shapes[f"{path}.gate_proj.weight"] = (24, 32)
            shapes[f"{path}.up_proj.weight"] = (24, 32)
            shapes[f"{path}.down_proj.weight"] = (32, 24)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    config = read_json(tmp_path / "expert_cfg.json")
    stacks = config.pop("moe_runtime")["base"]["experts"]["1"]
    assert stacks == {"gate_up_proj": [8, 48, 32], "down_proj": [8, 32, 24]}
    assert config == {
        "experts": {"1": [7, 1], "2": [7, 1]},
        "shared_experts": False,
        "non_expert_modules": False,
    }
    assert adapter.num_parameters == 12 * 32 * 24
    assert adapter.nbytes == 4 * adapter.num_parameters


@pytest.mark.parametrize(
    "prefix",
    ["model.", ""],
    ids=["model.layers", "layers"],
)
def test_official_folders_are_read(tmp_path, prefix):
    model = stock("deepseek_v2")
    adapter = random_adapter(model)
    tensors = {name: tensor.contiguous() for name, tensor in adapter.tensors.items()}
    parts = [{}, {}]
    for number, (name, tensor) in enumerate(tensors.items()):
        parts[number % 2][prefix + name.removeprefix("model.")] = tensor
    for number, part in enumerate(parts):
        save_file(
            part,
            tmp_path / f"model-{number}.safetensors",
        )
    (tmp_path / "expert_cfg.json").write_text(json.dumps(adapter.selection.to_dict()))
    read = load_adapter(tmp_path)
    assert read.base is None
    assert_equal(dict(read.tensors), tensors)
    apply(model, read)


CHANGED = [
    ({"num_experts": 4}, r"whose num_\w*experts is 8, but the model's is 4"),
    ({"num_experts_per_tok": 3}, "whose num_experts_per_tok is 2, but the model's is 3"),
]


@pytest.mark.parametrize("changes, match", CHANGED)
def test_another_base_is_refused(tmp_path, changes, match):
    adapter = saved(stock("qwen3_moe"), tmp_path / "adapter")
    model = stock("qwen3_moe", **changes)
    before = weights(model)
    with pytest.raises(ValueError, match=match):
        apply(model, adapter)
    assert_equal(before, weights(model))


def test_other_weights_are_refused_unless_asked_for(tmp_path):
    model = stock("qwen3_moe")
    adapter = saved(model, tmp_path / "adapter")
    # another task's experts do not make it another base
    experts_module(model, numbered_layers(model)[0]).down_proj.data[3].mul_(2)
    apply(model, adapter)
    remove(model)
    for parameter in model.parameters():
        parameter.data.mul_(1.02)
    with pytest.raises(ValueError, match="for a base with other weights: .*check_weights=False"):
        apply(model, adapter)
    apply(model, adapter, check_weights=False)


LAST = "model.layers.1.mlp.experts.7"
BAD = [  # selected experts, tensors that are replaced or removed, whether other modules train
    ({0: (1, 7), 1: (1, 7, 9)}, {}, False, "lacks expert 9 of layer 1, which its selection has"),
    ({0: (1,), 1: (1, 7)}, {}, False, "has expert 7 of layer 0, which its selection lacks"),
    (
        None,
        {f"{LAST}.up_proj.weight": None},
        False,
        "up_proj.weight missing of expert 7",
    ),
    (
        None,
        {f"{LAST}.down_proj.weight": torch.ones(32, 23)},
        False,
        r"adapter has down_proj.weight \[32, 23\] of expert 7 of layer 1, but .* \[32, 24\]",
    ),
    (None, {"model.n": torch.ones(1)}, True, r"has model.n \[1\], but .* has no such tensor"),
]


@pytest.mark.parametrize("experts, changes, others, match", BAD)
def test_what_does_not_fit_is_refused(experts, changes, others, match):
    model = stock("qwen3_moe")
    before = weights(model)
    adapter = random_adapter(model)
    tensors = {n: t for n, t in (dict(adapter.tensors) | changes).items() if t is not None}
    selection = replace(adapter.selection, non_expert_modules=others)
    if experts is not None:
        selection = replace(selection, experts=experts)
    with pytest.raises(ValueError, match=match):
        apply(
            model,
            replace(adapter, base=None, tensors=tensors, selection=selection),
        )
    assert_equal(before, weights(model))
    with pytest.raises(ValueError, match="has no adapter in it"):
        remove(model)


def test_one_adapter_at_a_time(tmp_path):
    model = stock("qwen3_moe")
    before = weights(model)
    apply(model, saved(model, tmp_path / "law"))
    with pytest.raises(ValueError, match="has the adapter .*law in it. Call esft.remove first"):
        apply(model, tmp_path / "law")
    copied = copy.deepcopy(model)
    for one in (model, copied):
        remove(one)
        assert_equal(weights(one), before)


@pytest.mark.parametrize(
    "name, content, match",
    [
        ("expert_cfg.json", None, "Cannot read the JSON file .*expert_cfg.json"),
        ("expert_cfg.json", b"{", "is not valid JSON"),
        (
            "expert_cfg.json",
            b'{"experts": {}, "moe_runtime": {"format": 2}}',
            "must be an object of format 1",
        ),
        ("model.safetensors", None, "has no .safetensors file"),
        ("model.safetensors", slice(-9), "model.safetensors is not a valid safetensors file"),
        ("copy.safetensors", slice(None), "which is also in another file of the folder"),
    ],
)
def test_a_bad_folder_is_named(tmp_path, name, content, match):
    random_adapter(stock("qwen3_moe")).save(tmp_path)
    if isinstance(content, slice):
        content = (tmp_path / "model.safetensors").read_bytes()[content]
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        load_adapter(tmp_path)
