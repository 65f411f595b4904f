"""moe_runtime.methods.xft: the invariants of upcycling, mixing and merging, on whole models."""

import copy
import math
import warnings

import pytest
import torch

from moe_runtime.hf.models.families import FAMILIES
from moe_runtime.io.files import read_json
from moe_runtime.methods import xft
from moe_runtime.methods.xft.baselines import to_ewa
from tests.hf.tiny import dense
from tests.hf.tiny import distance as relative
from tests.support.checkpoints import assert_equal

IDS = torch.arange(3, 21).view(2, 9)


def logits(model):
    return model.eval()(input_ids=IDS, use_cache=False).logits


def perturb(model, scale=0.05):
    """Simulate tuning: no two experts are equal any more."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * scale)
    return model


def tuned(**settings):
    model = dense("llama")
    xft.upcycle(
        model,
        **({"num_experts": 4, "top_k": 3} | settings),
    )
    return perturb(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_receipt_measures_equality_for_every_family(family):
    model = dense(family)
    before = logits(model)
    receipt = xft.upcycle(model, num_experts=4, top_k=3)
    assert receipt.error <= 1e-5
    assert receipt.preserves
    assert relative(logits(model), before) <= 1e-5
    assert receipt.moe_parameters == sum(p.numel() for p in model.parameters())
    assert receipt.dense_parameters < receipt.active_parameters < receipt.moe_parameters
    assert len(receipt.layers) == model.config.num_hidden_layers
    assert receipt.copied
    assert receipt.drawn
    assert "relative error" in str(receipt)


def test_gate_that_does_not_sum_to_one_is_reported_as_such():
    receipt = xft.upcycle(
        dense("llama"),
        num_experts=4,
        top_k=3,
        gate="nonorm",
    )
    assert not receipt.preserves
    assert receipt.error > 1e-3


@pytest.mark.parametrize(
    "changes, match", [({"top_k": 9}, "top_k must be"), ({"gate": "best"}, "gate must be")]
)
def test_bad_settings_leave_the_model_alone(changes, match):
    model = dense("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match):
        xft.upcycle(model, **changes)
    assert_equal(model.state_dict(), before)


def test_weights_that_are_not_finite_are_refused_or_said():
    """They are in a layer that the check of the formula does not sample, or outside the MLPs, where
    the logits show them.
    """
    model = dense("llama", num_hidden_layers=4)
    weight = model.model.layers[1].mlp.down_proj.weight
    before = weight[0, 0].item()
    weight.data[0, 0] = math.nan
    for call in (xft.upcycle, to_ewa):
        with pytest.raises(ValueError, match="layers.1.mlp.down_proj.weight contains NaN or inf"):
            call(model, num_experts=8)
    assert not hasattr(model.config, "moe_runtime")
    assert hasattr(
        model.model.layers[0].mlp,
        "gate_proj",
    )
    weight.data[0, 0] = before
    model.model.norm.weight.data[0] = math.nan
    receipt = xft.upcycle(model, num_experts=4, top_k=3)
    assert not math.isfinite(receipt.error)
    assert "are not finite: look for broken weights" in str(receipt)


def move_mixing_logits(model, changes) -> None:
    for name, p in model.named_parameters():
        if name.endswith("mixing_logits"):
            p.data.add_(changes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "soup",
    [False, True],
    ids=["lambda", "soup"],
)
def test_merged_equals_mergeable(family, soup):
    model = dense(family)
    base_class = type(model)
    base_keys = model.state_dict().keys()
    xft.upcycle(model, num_experts=4, top_k=3)
    perturb(model)
    xft.to_mergeable(model, soup=soup)
    move_mixing_logits(
        model,
        torch.randn(4 if soup else 3),
    )
    before = logits(model)
    merged = xft.merge(model)
    assert type(merged) is base_class
    assert merged.state_dict().keys() == base_keys
    assert relative(logits(merged), before) <= 1e-5
    assert not hasattr(merged.config, "moe_runtime")
    assert not hasattr(merged.config, "num_experts")


def test_only_the_mixing_logits_train_and_all_else_stays_bit_identical():
    model = xft.to_mergeable(tuned(), shared_rate=0.6)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=0.1,
        weight_decay=0.1,
    )
    for _ in range(5):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        trains = name.endswith("mixing_logits")
        assert model.get_parameter(name).requires_grad == trains
        assert torch.equal(value, before[name]) == (not trains), name
    alpha = xft.mixing_coefficients(model)
    torch.testing.assert_close(
        alpha.sum(1),
        torch.ones(2),
    )
    torch.testing.assert_close(
        alpha[:, 0],
        torch.full((2,), 0.6),
    )


def test_a_merge_says_whether_mixing_was_learned():
    mergeable = xft.to_mergeable(tuned())
    # a few steps at TRL's default learning rate
    move_mixing_logits(
        mergeable,
        torch.tensor([1e-4, -1e-4, 0]),
    )
    with pytest.warns(UserWarning, match="within .*e-06 of the initial .*Learn to mix before"):
        xft.merge(copy.deepcopy(mergeable))
    move_mixing_logits(
        mergeable,
        torch.tensor([0.1, 0, 0]),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xft.merge(mergeable)


@pytest.mark.parametrize(
    "options, alpha",
    [
        pytest.param(
            {"shared_rate": 0.0},
            [0, 1 / 3, 1 / 3, 1 / 3],
            id="without the shared expert",
        ),
        pytest.param(
            {"alpha": "uniform"},
            [0.25] * 4,
            id="uniform",
        ),
        pytest.param({"alpha": [[1, 0, 0, 0], [0, 1, 0, 0]]}, torch.eye(2, 4), id="per layer"),
    ],
)
def test_merged_weights_are_the_mixture(options, alpha):
    model = tuned()
    stacks = [copy.deepcopy(layer.mlp.experts) for layer in model.model.layers]
    merged = xft.merge(model, **options)
    rows = torch.as_tensor(alpha).float().expand(2, 4)
    for layer, stack, row in zip(
        merged.model.layers,
        stacks,
        rows,
        strict=True,
    ):
        down = torch.tensordot(row, stack.down_proj, 1)
        torch.testing.assert_close(
            layer.mlp.down_proj.weight,
            down,
        )
        up = torch.tensordot(row, stack.gate_up_proj, 1)
        both = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
        torch.testing.assert_close(both, up)


def test_a_rate_that_would_have_no_effect_is_refused():
    with pytest.raises(ValueError, match="shared_rate must be None, but"):
        xft.merge(
            xft.to_mergeable(tuned()),
            shared_rate=0.1,
        )
    with pytest.raises(ValueError, match="shared_rate must be None, but"):
        xft.merge(tuned(), shared_rate=0.1, alpha="uniform")


def test_a_saved_dense_model_has_the_rotary_keys_of_both_spellings(tmp_path):
    xft.save_dense(
        xft.merge(tuned()),
        tmp_path / "dense",
    )
    config = read_json(tmp_path / "dense" / "config.json")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e5
    with pytest.raises(ValueError, match="exists"):
        xft.save_dense(dense("llama"), tmp_path / "dense")


def test_a_gate_without_shared_expert_needs_alpha_or_soup():
    with pytest.raises(ValueError, match="no shared expert"):
        xft.merge(tuned(gate="topk_softmax"))
    with pytest.raises(ValueError, match="Pass soup=True"):
        xft.to_mergeable(tuned(gate="topk_softmax"))
    xft.merge(xft.to_mergeable(tuned(gate="topk_softmax"), soup=True))
