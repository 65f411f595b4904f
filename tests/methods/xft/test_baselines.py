"""moe_runtime.methods.xft.baselines: EWA from the dense model back to it, in memory and by folders;
the registry's calls.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.hf.models.families import FAMILIES
from moe_runtime.hf.models.modeling import moe_layers
from moe_runtime.methods import xft
from moe_runtime.methods.xft import baselines
from moe_runtime.methods.xft import folders as xft_folders
from moe_runtime.modules.ewa import EWAMLP
from moe_runtime.modules.moe import MoE
from tests.hf import tiny
from tests.hf.tiny import distance


def tuned(family: str = "llama", partition: str = "random", **changes):
    """A tiny model of EWA whose experts differ."""
    model = tiny.dense(family, **changes)
    baselines.to_ewa(model, num_experts=4, partition=partition)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) / 16)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_experts_are_the_dense_model_for_every_family(family):
    model = tiny.dense(family)
    want = tiny.logits(model)
    names = set(model.state_dict())
    receipt = baselines.to_ewa(model, num_experts=4)
    assert (
        receipt.error <= 1e-5 and receipt.preserves and not receipt.drawn and receipt.stage == "ewa"
    )
    assert "no router" in str(receipt) and receipt.active_parameters == receipt.dense_parameters
    assert receipt.moe_parameters == sum(p.numel() for p in model.parameters())
    assert distance(tiny.logits(model), want) <= 1e-5
    assert all(type(module) is EWAMLP for module in moe_layers(model).values())
    with torch.no_grad():  # a token is seen by one expert, and they are equal
        ids = tiny.batch()
        model.train()
        if not any(isinstance(m, torch.nn.Dropout) and m.p for m in model.modules()):
            assert distance(model(ids).logits, want) <= 1e-5
    assert set(xft.merge(model).state_dict()) == names


def test_a_router_is_an_ordinary_upcycled_model():
    model = tiny.dense("llama")
    want = tiny.logits(model)
    receipt = baselines.to_ewa(model, num_experts=4, partition="router", seed=7)
    config = receipt.config
    assert (config.gate, config.top_k, config.num_experts, receipt.stage) == (
        "topk_softmax",
        1,
        4,
        "moe",
    )
    assert receipt.drawn and "gate topk_softmax" in str(receipt)
    assert all(type(module) is MoE for module in moe_layers(model).values())
    assert distance(tiny.logits(model), want) <= 1e-5
    other = tiny.dense("llama")
    baselines.to_ewa(other, num_experts=4, partition="router", seed=8)
    assert not torch.equal(*(m.model.layers[0].mlp.gate.weight for m in (model, other)))
    with pytest.raises(ValueError, match="no shared expert. Pass alpha"):
        xft.merge(copy.deepcopy(model))
    assert distance(tiny.logits(xft.merge(model, alpha="uniform")), want) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox"])
def test_the_merged_model_is_the_mean_and_a_stock_model(family):
    model = tuned(family)
    want = tiny.logits(model)
    means = [module.experts.down_proj.mean(0) for module in moe_layers(model).values()]
    base = type(tiny.dense(family))
    merged = xft.merge(model)
    assert type(merged) is base and not hasattr(merged.config, "moe_runtime")
    assert distance(tiny.logits(merged), want) <= 1e-5
    path = FAMILIES[family].path
    for layer, mean in enumerate(means):
        down = getattr(merged.get_submodule(path.format(layer)), FAMILIES[family].down).weight
        torch.testing.assert_close(down, mean, rtol=1e-5, atol=1e-6)
    assert all(p.requires_grad for p in merged.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="float32"),
        pytest.param({"dtype": torch.bfloat16}, id="bfloat16"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
    ],
)
def test_folders_give_the_same_mean_bit_by_bit(changes, tmp_path):
    model = tuned("llama", **changes)
    model.save_pretrained(tmp_path / "ewa")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ewa", dtype="auto")
    assert type(loaded) is type(model) and torch.equal(tiny.logits(loaded), tiny.logits(model))
    assert all(p.requires_grad for p in loaded.parameters())
    receipt = xft_folders.merge_folder(tmp_path / "ewa", tmp_path / "dense")
    assert receipt.alpha == [[0.25] * 4] * 2
    by_folder = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype="auto").state_dict()
    for merged in (xft.merge(copy.deepcopy(model)), xft.merge(model, alpha="uniform")):
        assert type(merged).__module__ == "transformers.models.llama.modeling_llama"
        state = merged.state_dict()
        assert state.keys() == by_folder.keys() and all(
            torch.equal(state[name], by_folder[name]) for name in state
        )


def test_some_layers_only_and_other_alphas(tmp_path):
    model = tiny.dense("llama")
    assert baselines.to_ewa(model, num_experts=3, layers=[1]).layers == (1,)
    assert hasattr(model.model.layers[0].mlp, "gate_proj")
    with torch.no_grad():
        for p in model.model.layers[1].mlp.parameters():
            p.add_(torch.randn_like(p))
    first = model.model.layers[1].mlp.experts.down_proj[0].clone()
    model.save_pretrained(tmp_path / "ewa")
    xft_folders.merge_folder(tmp_path / "ewa", tmp_path / "one", alpha=[1.0, 0.0, 0.0])
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert torch.equal(one.model.layers[1].mlp.down_proj.weight, first)
    assert torch.equal(
        xft.merge(model, alpha=[1.0, 0.0, 0.0]).model.layers[1].mlp.down_proj.weight, first
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_averages_of_the_weights_over_the_steps(dtype):
    model = tiny.dense("llama").to(dtype)
    averages = baselines.WeightAverages(decay=0.3)
    weight = model.model.layers[1].mlp.up_proj.weight
    seen = []
    total = 6
    averages.on_train_begin(None, None, None, model=model)
    for step in range(1, total + 1):
        with torch.no_grad():
            weight.add_(torch.randn_like(weight))
        seen.append(weight.detach().double())
        averages.on_step_end(
            None, SimpleNamespace(global_step=step, max_steps=total), None, model=model
        )
    ema = seen[0]
    for step in range(2, total + 1):
        keep = min(0.3, step / (9 + step))
        ema = keep * ema + (1 - keep) * seen[step - 1]
    for name, expected in (("ema", ema), ("swa", sum(seen[3:]) / 3)):
        found = averages.models[name].module
        assert torch.allclose(
            found.model.layers[1].mlp.up_proj.weight.double(), expected, rtol=1e-5, atol=1e-6
        ), name
        assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert torch.equal(weight.double(), seen[-1])


# the registry
@pytest.mark.parametrize("name", baselines.BASELINES)
def test_every_call_runs_and_makes_what_it_says(name, tmp_path):
    call = baselines.BASELINES[name].call
    model = tiny.dense("llama")
    if "merge" in call:
        xft.upcycle(model, num_experts=4, top_k=3)
    if "adapter" in call:
        baselines.to_lora(model).save_pretrained(str(tmp_path))
        model = tiny.dense("llama")
    names = {"xft": xft, "baselines": baselines, "model": model, "adapter": str(tmp_path)}
    eval(call, names)
    assert torch.isfinite(tiny.logits(model)).all()
    block = getattr(model.config, "moe_runtime", None)
    want = {
        "sft": None,
        "upcycling": "topk_softmax",
        "upcycling_paper": "softmax_topk",
        "mocle": "nonorm",
        "ewa": "ewa",
        "ewa_router": "moe",
        "init": None,
        "soup": True,
        "uniform": None,
        "lambda_0": 0.0,
        "lambda_1": None,
        "lora": None,
        "loramoe_pt": "softmax_topk_renorm",
        "loramoe_sft": "lora",
        "loramoe_dense": "softmax_topk",
    }[name]
    if block is None:
        found = ()
    else:
        found = (block["config"]["gate"], block["stage"], block["soup"], block["shared_rate"])
    assert (want is None) == (block is None) and (want is None or want in found)
