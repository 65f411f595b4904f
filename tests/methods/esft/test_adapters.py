"""moe_runtime.methods.esft.adapters: official names for every layout, in and out of any model bit
by bit, clear errors.
"""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_runtime.hf.dropin.experts import register
from moe_runtime.hf.dropin.layers import experts_module, numbered_layers
from moe_runtime.hf.training.trained_files import (
    ExpertLayout,
    experts_path,
    join_row,
    layout_of,
    parse_name,
    split_row,
    stack_parts,
)
from moe_runtime.methods.esft.adapters import Adapter, apply, load_adapter, remove
from moe_runtime.methods.esft.selection import ExpertSelection
from tests.hf import stock as every
from tests.hf.tiny import upcycled
from tests.support.esft_adapter import random_adapter, same, weights
from tests.support.stock_moe import batch, stock

# two stacks of layers, whose numbers name two layers each
TWICE = ("diffusion_gemma", "ernie4_5_vl_moe")


def saved(model, folder, **options) -> Adapter:
    random_adapter(model, **options).save(folder)
    return load_adapter(folder)


@pytest.mark.parametrize(
    "name, want",
    [
        (
            "model.layers.1.mlp.experts.12.gate_proj.weight",
            ("model.layers.1.mlp.experts", 1, 12, "gate_proj.weight"),
        ),
        (
            "model.layers.3.feed_forward.experts.0.down_proj.bias",
            ("model.layers.3.feed_forward.experts", 3, 0, "down_proj.bias"),
        ),
        ("model.layers.1.mlp.shared_experts.gate_proj.weight", None),
        ("model.layers.1.mlp.shared_experts.0.gate_proj.weight", None),
        ("model.layers.1.mlp.gate_proj.weight", None),
        ("model.layers.1.mlp.experts.gate_up_proj", None),
        ("experts.0.up_proj.weight", None),  # no layer
    ],
)
def test_names_of_experts(name, want):
    assert parse_name(name) == want


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_is_the_matrices_of_a_linear_mlp(gated, transposed, interleaved, bias):
    I = 5
    H = 3
    layout = ExpertLayout(gated, transposed, interleaved and gated, bias)
    up = torch.randn(I * (1 + gated), H)
    rows = {"gate_up_proj" if gated else "up_proj": up, "down_proj": torch.randn(H, I)}
    if bias:
        rows |= {name + "_bias": torch.randn(len(row)) for name, row in rows.items()}
    halves = (up[0::2], up[1::2]) if layout.interleaved else up.chunk(2) if gated else (None, up)
    assert rows.keys() == stack_parts(layout).keys()
    for stack, row in rows.items():
        stored = row.t() if transposed and row.dim() == 2 else row
        parts = split_row(layout, stack, stored)
        assert all(t.shape[0] == (H if n.startswith("down") else I) for n, t in parts.items())
        assert torch.equal(join_row(layout, stack, parts), stored)
        if stack.endswith("up_proj"):
            assert torch.equal(parts["up_proj.weight"], halves[1])
            assert not gated or torch.equal(parts["gate_proj.weight"], halves[0])


@pytest.mark.parametrize("family", [f for f in every.FAMILIES if f not in TWICE])
def test_in_and_out_of_every_family(tmp_path, family):
    model = every.build(family)
    before = weights(model)
    adapter = saved(model, tmp_path / "adapter", others=True)
    apply(model, adapter)
    after = weights(model)
    for number, layer in numbered_layers(model).items():
        module = experts_module(model, layer)
        ids = adapter.selection.experts[number]
        for stack in stack_parts(layout_of(module)):
            name = f"{experts_path(layer)}.{stack}"
            changed = [
                e
                for e in range(layer.num_experts)
                if not torch.equal(before[name][e], after[name][e])
            ]
            assert changed == sorted(ids)
            for e in ids:
                for part, got in split_row(layout_of(module), stack, after[name][e]).items():
                    assert torch.equal(got, adapter.tensors[f"{experts_path(layer)}.{e}.{part}"])
    assert all(torch.equal(after[name], tensor) for name, tensor in adapter.others.items())
    remove(model)
    assert same(before, weights(model))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "moe_runtime"])
def test_any_implementation_runs_it(tmp_path, implementation):
    register()
    model = stock("qwen3_moe").eval()
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        before = model(**batch()).logits
        apply(model, saved(model, tmp_path / "adapter"))
        after = model(**batch()).logits
        model.set_experts_implementation("eager")
        torch.testing.assert_close(after, model(**batch()).logits, atol=1e-4, rtol=1e-4)
        model.set_experts_implementation(implementation)
        remove(model)
        assert torch.equal(model(**batch()).logits, before) and not torch.allclose(
            before, after, atol=1e-2
        )


@pytest.mark.parametrize("changes", [{}, {"mlp_bias": False}], ids=["biases", "no biases"])
def test_our_own_layers(tmp_path, changes):
    model = upcycled("llama", changes=changes, layers=[1])
    before = weights(model)
    adapter = saved(model, tmp_path / "adapter")
    assert list(adapter.experts) == [1]
    apply(model, adapter)
    assert not same(before, weights(model))
    model.save_pretrained(tmp_path / "whole")
    remove(model)
    assert same(before, weights(model))


def test_the_shared_expert_of_our_own_layers_needs_its_flag(tmp_path):
    model = upcycled("llama", gate="xft")
    adapter = random_adapter(model, others=True)
    tensors = dict(adapter.tensors) | {
        name.replace("experts.1.", "experts.0."): tensor + 1
        for name, tensor in adapter.tensors.items()
        if "experts.1." in name
    }
    before = weights(model)
    apply(model, replace(adapter, tensors=tensors))
    remove(model)
    assert same(before, weights(model))
    for wrong in (0, 2):  # never selected, and no shared one
        renamed = {
            n.replace("experts.1.", f"experts.{wrong}."): t for n, t in adapter.tensors.items()
        } | adapter.tensors
        selection = replace(adapter.selection, shared_experts=wrong != 0)
        with pytest.raises(
            ValueError, match=f"expert {wrong} of layer 0, which its selection lacks"
        ):
            apply(model, replace(adapter, tensors=renamed, selection=selection))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_rounded_to_the_model(tmp_path, dtype):
    model = stock("olmoe").to(torch.bfloat16)
    before = weights(model)
    adapter = saved(model, tmp_path / "adapter", dtype=dtype)
    apply(model, adapter)
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    assert torch.equal(
        model.model.layers[0].mlp.experts.down_proj[1], adapter.tensors[name].to(torch.bfloat16)
    )
    remove(model)
    assert same(before, weights(model))


def test_the_folder_is_the_official_one(tmp_path):
    model = stock("deepseek_v2")
    adapter = random_adapter(model)
    adapter.save(tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "expert_cfg.json",
        "model.safetensors",
    ]
    tensors = load_file(tmp_path / "adapter" / "model.safetensors")
    H = 32
    I = 24
    assert {name: list(t.shape) for name, t in tensors.items()} == {
        f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight": [H, I]
        if part == "down"
        else [I, H]
        for layer in (1, 2)
        for e in (1, 7)
        for part in ("gate", "up", "down")
    }
    config = json.loads((tmp_path / "adapter" / "expert_cfg.json").read_text())
    assert config.pop("moe_runtime")["base"]["experts"]["1"] == {
        "gate_up_proj": [8, 2 * I, H],
        "down_proj": [8, H, I],
    }
    assert config == {
        "experts": {"1": [7, 1], "2": [7, 1]},
        "shared_experts": False,
        "non_expert_modules": False,
    }
    assert (
        adapter.num_parameters == 2 * 2 * 3 * H * I and adapter.nbytes == 4 * adapter.num_parameters
    )


@pytest.mark.parametrize("legacy", [False, True], ids=["model.layers", "layers"])
def test_official_folders_are_read(tmp_path, legacy):
    model = stock("deepseek_v2")
    adapter = random_adapter(model)
    names = {name: name.removeprefix("model.") if legacy else name for name in adapter.tensors}
    first = sorted(adapter.tensors)[:5]
    for number, part in enumerate((first, sorted(set(adapter.tensors) - set(first)))):
        tensors = {names[name]: adapter.tensors[name].contiguous() for name in part}
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
    (tmp_path / "expert_cfg.json").write_text(json.dumps(adapter.selection.to_dict()))
    read = load_adapter(tmp_path)
    assert read.base is None and same(
        dict(read.tensors), {n: t.contiguous() for n, t in adapter.tensors.items()}
    )
    apply(model, read)


CHANGED = {
    "experts": (dict(num_experts=4), r"whose num_\w*experts is 8, but the model's is 4"),
    "routing": (
        dict(num_experts_per_tok=3),
        "whose num_experts_per_tok is 2, but the model's is 3",
    ),
    "width": (
        dict(moe_intermediate_size=16),
        "whose moe_intermediate_size is 24, but the model's is 16",
    ),
    "depth": (dict(num_hidden_layers=1), "whose num_hidden_layers is 2, but the model's is 1"),
}


@pytest.mark.parametrize("changes, match", CHANGED.values(), ids=CHANGED)
def test_another_base_is_refused(tmp_path, changes, match):
    adapter = saved(stock("qwen3_moe"), tmp_path / "adapter")
    model = stock("qwen3_moe", **changes)
    before = weights(model)
    with pytest.raises(ValueError, match=match):
        apply(model, adapter)
    assert same(before, weights(model))


def test_other_weights_are_refused_unless_asked_for(tmp_path):
    model = stock("qwen3_moe")
    adapter = saved(model, tmp_path / "adapter")
    with torch.no_grad():  # another task's experts are no other base
        experts_module(model, numbered_layers(model)[0]).down_proj[3].mul_(2)
    apply(model, adapter)
    remove(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    with pytest.raises(ValueError, match="for a base with other weights: .*check_weights=False"):
        apply(model, adapter)
    apply(model, adapter, check_weights=False)


def _edit(adapter: Adapter, **changes) -> Adapter:
    return replace(adapter, base=None, **changes)


BAD = {
    "unknown layer": (
        lambda a: _edit(
            a,
            selection=ExpertSelection(experts={2: (1,)}),
            tensors={
                n.replace("layers.1.", "layers.2."): t
                for n, t in a.tensors.items()
                if "layers.1.mlp.experts.1." in n
            },
        ),
        r"selection has experts \[1\] of layer 2",
    ),
    "unknown expert": (
        lambda a: _edit(
            a,
            selection=ExpertSelection(experts={1: (9,)}),
            tensors={
                n.replace("experts.1.", "experts.9."): t
                for n, t in a.tensors.items()
                if "layers.1.mlp.experts.1." in n
            },
        ),
        r"selection has experts \[9\] of layer 1, .* 0 to 7",
    ),
    "missing expert": (
        lambda a: _edit(
            a, tensors={n: t for n, t in a.tensors.items() if "layers.1.mlp.experts.7." not in n}
        ),
        "lacks expert 7 of layer 1, which its selection has",
    ),
    "missing part": (
        lambda a: _edit(
            a, tensors={n: t for n, t in a.tensors.items() if "layers.1.mlp.experts.7.up" not in n}
        ),
        "has up_proj.weight missing of expert 7 of layer 1",
    ),
    "more experts": (
        lambda a: _edit(a, selection=ExpertSelection(experts={0: (1,), 1: (1, 7)})),
        "has expert 7 of layer 0, which its selection lacks",
    ),
    "shape": (
        lambda a: _edit(a, tensors={n: t[:, 1:] for n, t in a.tensors.items()}),
        (
            r"adapter has down_proj.weight \[32, 23\] of expert 1 of layer 0, "
            r"but "
            r"the "
            r"model "
            r"has "
            r"\[32, "
            r"24\]"
        ),
    ),
    "unknown parameter": (
        lambda a: _edit(
            a,
            tensors=dict(a.tensors) | {"model.n": torch.ones(1)},
            selection=replace(a.selection, non_expert_modules=True),
        ),
        r"has model.n \[1\], but the model has no such tensor",
    ),
    "parameter's shape": (
        lambda a: _edit(
            a,
            tensors=dict(a.tensors) | {"model.norm.weight": torch.ones(1)},
            selection=replace(a.selection, non_expert_modules=True),
        ),
        r"adapter has model.norm.weight \[1\], but the model has \[32\]",
    ),
}


@pytest.mark.parametrize("edit, match", BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused(edit, match):
    model = stock("qwen3_moe")
    before = weights(model)
    with pytest.raises(ValueError, match=match):
        apply(model, edit(random_adapter(model)))
    assert same(before, weights(model))
    with pytest.raises(ValueError, match="has no adapter in it"):
        remove(model)


def test_one_adapter_at_a_time(tmp_path):
    model = stock("qwen3_moe")
    adapter = saved(model, tmp_path / "law")
    apply(model, adapter)
    with pytest.raises(
        ValueError, match="The model has the adapter .*law in it. Call esft.remove first"
    ):
        apply(model, tmp_path / "law")
    copied = copy.deepcopy(model)
    remove(model)
    remove(copied)
    assert same(weights(model), weights(copied))


@pytest.mark.parametrize(
    "damage, match",
    [
        pytest.param(
            lambda f: (f / "expert_cfg.json").unlink(),
            "Cannot read the JSON file .*expert_cfg.json",
            id="no configuration",
        ),
        pytest.param(
            lambda f: (f / "model.safetensors").unlink(),
            "has no .safetensors file",
            id="no weights",
        ),
        pytest.param(
            lambda f: (f / "expert_cfg.json").write_text("{"), "is not valid JSON", id="no JSON"
        ),
        pytest.param(
            lambda f: (f / "expert_cfg.json").write_text(
                '{"experts": {}, "moe_runtime": {"format": 2}}'
            ),
            "must be an object of format 1",
            id="a later format",
        ),
        pytest.param(
            lambda f: (f / "model.safetensors").write_bytes(
                (f / "model.safetensors").read_bytes()[:-9]
            ),
            "model.safetensors is not a valid safetensors file",
            id="cut off",
        ),
        pytest.param(
            lambda f: (f / "copy.safetensors").write_bytes((f / "model.safetensors").read_bytes()),
            "which is also in another file of the folder",
            id="twice",
        ),
    ],
)
def test_a_bad_folder_is_named(tmp_path, damage, match):
    random_adapter(stock("qwen3_moe")).save(tmp_path / "adapter")
    damage(tmp_path / "adapter")
    with pytest.raises(ValueError, match=match):
        load_adapter(tmp_path / "adapter")
