"""moe_runtime.methods.xft.baselines: EWA from the dense model and back to it, in memory and in
folders.
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
from tests.hf import tiny
from tests.hf.tiny import distance
from tests.support.checkpoints import assert_equal


def tuned(family: str = "llama", **changes):
    """A tiny EWA model with distinct experts."""
    model = tiny.dense(family, **changes)
    baselines.to_ewa(model, num_experts=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) / 16)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_experts_are_the_dense_model_for_every_family(family):
    model = tiny.dense(family)
    expected = tiny.logits(model)
    names = model.state_dict().keys()
    receipt = baselines.to_ewa(model, num_experts=4)
    assert receipt.error <= 1e-5
    assert receipt.preserves
    assert receipt.active_parameters == receipt.dense_parameters
    assert receipt.moe_parameters == sum(p.numel() for p in model.parameters())
    assert distance(tiny.logits(model), expected) <= 1e-5
    assert {type(module) for module in moe_layers(model).values()} == {EWAMLP}
    model.train()  # each token uses one expert, and the experts are equal
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        assert (
            distance(
                model(tiny.batch()).logits,
                expected,
            )
            <= 1e-5
        )
    assert xft.merge(model).state_dict().keys() == names


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="float32"),
        pytest.param({"dtype": torch.bfloat16}, id="bfloat16"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
    ],
)
def test_folders_give_the_same_mean_bit_by_bit(changes, tmp_path):
    def load(name: str):
        return AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")

    model = tuned("llama", **changes)
    model.save_pretrained(tmp_path / "ewa")
    loaded = load("ewa")
    assert type(loaded) is type(model)
    assert torch.equal(
        tiny.logits(loaded),
        tiny.logits(model),
    )
    receipt = xft_folders.merge_folder(
        tmp_path / "ewa",
        tmp_path / "dense",
    )
    assert receipt.alpha == [[0.25] * 4] * 2
    expected = load("dense").state_dict()
    for merged in (xft.merge(copy.deepcopy(model)), xft.merge(model, alpha="uniform")):
        assert_equal(merged.state_dict(), expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16],
    ids=str,
)
def test_averages_of_the_weights_over_the_steps(dtype):
    model = tiny.dense("llama").to(dtype)
    averages = baselines.WeightAverages(decay=0.3)
    weight = model.model.layers[1].mlp.up_proj.weight
    seen = []
    averages.on_train_begin(None, None, None, model=model)
    for step in range(1, 7):
        weight.data.add_(torch.randn_like(weight))
        seen.append(weight.detach().double())
        state = SimpleNamespace(global_step=step, max_steps=6)
        averages.on_step_end(None, state, None, model=model)
    ema = seen[0]
    for step in range(2, 7):
        decay = min(0.3, step / (9 + step))
        ema = decay * ema + (1 - decay) * seen[step - 1]
    for name, expected in (("ema", ema), ("swa", sum(seen[3:]) / 3)):
        average = averages.models[name].module
        result = average.model.layers[1].mlp.up_proj.weight
        torch.testing.assert_close(
            result.double(),
            expected,
            rtol=1e-5,
            atol=1e-6,
        )
        assert {p.dtype for p in average.parameters()} == {torch.float32}
    assert torch.equal(weight.double(), seen[-1])
