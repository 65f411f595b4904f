"""moe_runtime.methods.xft: the invariants of upcycling, mixing and merging, on whole models."""

import copy
import json
import math
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.config import MoEConfig
from moe_runtime.hf.models.families import FAMILIES
from moe_runtime.methods import xft
from moe_runtime.methods.xft.baselines import to_ewa
from tests.hf.tiny import dense
from tests.hf.tiny import distance as relative

IDS = torch.arange(3, 21).view(2, 9)


def logits(model):
    return model.eval()(input_ids=IDS, use_cache=False).logits


def perturb(model, scale=0.05):
    """Stand in for tuning: no two experts are equal any more."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * scale)
    return model


def tuned(**settings):
    model = dense("llama")
    xft.upcycle(model, **({"num_experts": 4, "top_k": 3} | settings))
    return perturb(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_receipt_measures_equality_for_every_family(family):
    model = dense(family)
    before = logits(model)
    receipt = xft.upcycle(model, num_experts=4, top_k=3)
    assert receipt.error <= 1e-5 and receipt.preserves
    assert relative(logits(model), before) <= 1e-5
    assert receipt.moe_parameters == sum(p.numel() for p in model.parameters())
    assert receipt.dense_parameters < receipt.active_parameters < receipt.moe_parameters
    assert (
        len(receipt.layers) == model.config.num_hidden_layers and receipt.copied and receipt.drawn
    )
    assert "relative error" in str(receipt)


def test_gate_that_does_not_sum_to_one_is_reported_as_such():
    receipt = xft.upcycle(dense("llama"), num_experts=4, top_k=3, gate="nonorm")
    assert not receipt.preserves and receipt.error > 1e-3 and "does not preserve" in str(receipt)


@pytest.mark.parametrize(
    "changes, match", [({"top_k": 9}, "top_k must be"), ({"gate": "best"}, "gate must be")]
)
def test_bad_settings_leave_the_model_alone(changes, match):
    model = dense("llama")
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match):
        xft.upcycle(model, **changes)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_refused_or_said(value):
    """In a layer that the check of the formula does not sample, and outside the MLPs, where the
    logits show them.
    """
    model = dense("llama", num_hidden_layers=4)
    weight = model.model.layers[1].mlp.down_proj.weight
    before = weight[0, 0].item()
    weight.data[0, 0] = value
    for call in (xft.upcycle, to_ewa):
        with pytest.raises(
            ValueError, match=r"model.layers.1.mlp.down_proj.weight contains NaN or infinity"
        ):
            call(model, num_experts=8)
    assert not hasattr(model.config, "moe_runtime") and hasattr(
        model.model.layers[0].mlp, "gate_proj"
    )
    weight.data[0, 0] = before
    model.model.norm.weight.data[0] = value
    receipt = xft.upcycle(model, num_experts=4, top_k=3)
    assert not math.isfinite(receipt.error) and "are not finite: look for broken weights" in str(
        receipt
    )


def test_some_layers_only():
    model = dense("llama")
    receipt = xft.upcycle(model, num_experts=4, top_k=3, layers=[1])
    assert receipt.layers == (1,) and hasattr(model.model.layers[0].mlp, "gate_proj")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("soup", [False, True], ids=["lambda", "soup"])
def test_merged_equals_mergeable(family, soup):
    model = dense(family)
    base_class = type(model)
    base_keys = set(model.state_dict())
    xft.upcycle(model, num_experts=4, top_k=3)
    perturb(model)
    xft.to_mergeable(model, soup=soup)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("mixing_logits"):
                p.add_(torch.randn_like(p))
    before = logits(model)
    merged = xft.merge(model)
    assert type(merged) is base_class and set(merged.state_dict()) == base_keys
    assert relative(logits(merged), before) <= 1e-5
    assert not hasattr(merged.config, "moe_runtime") and not hasattr(merged.config, "num_experts")


def test_merged_folder_is_a_stock_model(tmp_path):
    merged = xft.merge(tuned())
    want = logits(merged)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(again).__module__.startswith("transformers.") and torch.equal(logits(again), want)


def test_only_the_mixing_logits_train_and_all_else_stays_bit_identical():
    model = xft.to_mergeable(tuned())
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trains and all(name.endswith("mixing_logits") for name in trains)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(5):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in trains), name


def test_init_merge_equals_one_step_before_training():
    model = tuned()
    mergeable = xft.to_mergeable(copy.deepcopy(model))
    assert relative(logits(xft.merge(model)), logits(mergeable)) <= 1e-6


def test_a_merge_says_whether_mixing_was_learned():
    mergeable = xft.to_mergeable(tuned())
    with torch.no_grad():
        for name, logit in mergeable.named_parameters():
            if name.endswith("mixing_logits"):
                # a few steps of TRL's default learning rate
                logit.add_(torch.tensor([1e-4, -1e-4, 0]))
    with pytest.warns(
        UserWarning, match="within .*e-06 of the initial coefficients. Learn to mix before merging"
    ):
        xft.merge(copy.deepcopy(mergeable))
    with torch.no_grad():
        for name, logit in mergeable.named_parameters():
            if name.endswith("mixing_logits"):
                logit[0] += 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xft.merge(mergeable)


def test_mixing_sums_to_one_and_keeps_lambda():
    alpha = xft.mixing_coefficients(xft.to_mergeable(tuned(), shared_rate=0.6))
    torch.testing.assert_close(alpha.sum(1), torch.ones(2))
    torch.testing.assert_close(alpha[:, 0], torch.full((2,), 0.6))


def test_lambda_one_is_the_shared_expert_alone():
    model = tuned()
    shared = [layer.mlp.experts.gate_up_proj[0].clone() for layer in model.model.layers]
    merged = xft.merge(model, shared_rate=1.0)
    for layer, want in zip(merged.model.layers, shared):
        assert torch.equal(torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]), want)


def test_lambda_zero_ignores_the_shared_expert():
    model = tuned()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mlp.experts.down_proj[0].fill_(7.0)
    assert torch.equal(
        logits(xft.merge(model, shared_rate=0.0)), logits(xft.merge(other, shared_rate=0.0))
    )


def test_equal_experts_merge_to_the_base():
    model = dense("llama")
    want = {name: value.clone() for name, value in model.state_dict().items()}
    xft.upcycle(model, num_experts=4, top_k=3)
    got = xft.merge(model).state_dict()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-7)


def test_alpha_given_by_hand():
    model = tuned()
    first = [layer.mlp.experts.down_proj[2].clone() for layer in model.model.layers]
    merged = xft.merge(model, alpha=[0.0, 0.0, 1.0, 0.0])
    assert all(
        torch.equal(layer.mlp.down_proj.weight, want)
        for layer, want in zip(merged.model.layers, first)
    )


def test_alpha_given_by_hand_for_each_layer():
    model = tuned()
    want = [layer.mlp.experts.down_proj[e].clone() for e, layer in enumerate(model.model.layers)]
    alpha = torch.eye(len(want), 4).tolist()
    merged = xft.merge(model, alpha=alpha)
    assert len(want) > 1
    for layer, expert in zip(merged.model.layers, want, strict=True):
        assert torch.equal(layer.mlp.down_proj.weight, expert)


def test_uniform_alpha_is_the_mean_of_the_experts():
    model = tuned()
    want = [layer.mlp.experts.down_proj.mean(0) for layer in model.model.layers]
    merged = xft.merge(model, alpha="uniform")
    for layer, mean in zip(merged.model.layers, want):
        torch.testing.assert_close(layer.mlp.down_proj.weight, mean)


def test_a_rate_that_would_have_no_effect_is_refused():
    with pytest.raises(
        ValueError, match="shared_rate must be None, but got 0.1, as the model is mergeable"
    ):
        xft.merge(xft.to_mergeable(tuned()), shared_rate=0.1)
    with pytest.raises(
        ValueError, match="shared_rate must be None, but got 0.1, as alpha is given"
    ):
        xft.merge(tuned(), shared_rate=0.1, alpha="uniform")


def test_a_saved_dense_model_has_the_rotary_keys_of_both_spellings(tmp_path):
    xft.save_dense(xft.merge(tuned()), tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e5
    with pytest.raises(ValueError, match="exists"):
        xft.save_dense(dense("llama"), tmp_path / "dense")


def test_recomputation_gives_the_same_gradients():
    models = [tuned(), tuned(recompute=True)]
    for model in models:
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
    for a, b in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_gate_without_shared_expert_needs_alpha_or_soup():
    with pytest.raises(ValueError, match="no shared expert"):
        xft.merge(tuned(gate="topk_softmax"))
    with pytest.raises(ValueError, match="Pass soup=True"):
        xft.to_mergeable(tuned(gate="topk_softmax"))
    xft.merge(xft.to_mergeable(tuned(gate="topk_softmax"), soup=True))


def test_at_init_the_router_has_no_gradient_and_the_experts_share_the_dense_one():
    base = dense("llama")
    moe = copy.deepcopy(base)
    xft.upcycle(moe, num_experts=4, top_k=3)
    for model in (base, moe):
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
    for old, new in zip(base.model.layers, moe.model.layers):
        want = old.mlp.down_proj.weight.grad
        assert relative(new.mlp.experts.down_proj.grad.sum(0), want) <= 1e-5
        want = torch.cat([old.mlp.gate_proj.weight.grad, old.mlp.up_proj.weight.grad])
        assert relative(new.mlp.experts.gate_up_proj.grad.sum(0), want) <= 1e-5
        assert new.mlp.gate.weight.grad.norm() <= 1e-5 * want.norm()


def test_one_expert_is_the_dense_model_in_gradient_too():
    base = dense("llama")
    moe = copy.deepcopy(base)
    xft.upcycle(moe, MoEConfig(**xft.config_for(base).to_dict() | {"num_experts": 1, "top_k": 1}))
    for model in (base, moe):
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
    for old, new in zip(base.model.layers, moe.model.layers):
        assert relative(new.mlp.experts.down_proj.grad[0], old.mlp.down_proj.weight.grad) <= 1e-6


def test_the_router_seed_decides_the_router():
    same, again, other = (dense("llama") for _ in range(3))
    for model, seed in ((same, 3), (again, 3), (other, 4)):
        xft.upcycle(model, num_experts=4, top_k=3, seed=seed)
    weights = [model.model.layers[0].mlp.gate.weight for model in (same, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
