"""MoEConfig: frozen, validated on construction, converted to a JSON object and back."""

import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest

from moe_runtime.config import (
    GATES,
    SHARED_GATES,
    MoEConfig,
    check_choice,
    check_fraction,
    check_positive,
)

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def test_defaults_are_the_papers():
    config = MoEConfig(**SIZES)  # XFT, Sec. 4.1
    assert (config.num_experts, config.top_k, config.gate) == (8, 6, "xft")
    assert (config.num_routed_experts, config.num_routed_per_token) == (7, 5)
    assert config.balance_loss == "none"
    assert config.balance_loss_coef == 0.0
    assert not config.noisy_gate


@pytest.mark.parametrize("gate", GATES)
def test_counts_include_the_shared_expert(gate):
    config = MoEConfig(
        **SIZES,
        gate=gate,
        num_experts=8,
        top_k=6,
    )
    shared = gate in ("xft", "nonorm")
    assert config.has_shared_expert == shared == (gate in SHARED_GATES)
    assert config.num_routed_experts == 8 - shared
    assert config.num_routed_per_token == 6 - shared
    one = MoEConfig(
        **SIZES,
        gate=gate,
        num_experts=1,
        top_k=1,
    )
    assert one.num_routed_experts == one.num_routed_per_token == 1 - shared


def test_is_frozen_and_takes_keywords_only():
    config = MoEConfig(**SIZES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 2
    with pytest.raises((AttributeError, TypeError)):  # slots: no new attributes either
        object.__setattr__(config, "topk", 2)
    with pytest.raises(TypeError):
        MoEConfig(64, 96)
    # a modified copy is validated as well
    with pytest.raises(ValueError, match="top_k must be .*but got 9"):
        dataclasses.replace(config, top_k=9)


ODD = MoEConfig(
    hidden_size=33,
    intermediate_size=17,
    num_experts=3,
    top_k=2,
    gate="nonorm",
    router="mlp",
    hidden_act="gelu",
    gated=False,
    bias=True,
    noisy_gate=True,
    noise_epsilon=0.5,
    balance_loss="cv2",
    balance_loss_coef=0.01,
    load_quirk=True,
    initializer_range=0.1,
)


@pytest.mark.parametrize("config", [MoEConfig(**SIZES), ODD], ids=["defaults", "every field set"])
def test_round_trips(config):
    text = json.dumps(config.to_dict())
    assert MoEConfig.from_dict(json.loads(text)) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert set(config.to_dict()) == {field.name for field in dataclasses.fields(MoEConfig)}


def test_from_dict_fills_in_defaults_and_refuses_what_it_does_not_know():
    assert MoEConfig.from_dict(SIZES) == MoEConfig(**SIZES)
    with pytest.raises(ValueError, match="topk"):
        MoEConfig.from_dict(SIZES | {"topk": 2})
    with pytest.raises(ValueError, match="nexperts, topk"):
        MoEConfig.from_dict(SIZES | {"topk": 2, "nexperts": 4})
    with pytest.raises((TypeError, ValueError), match="intermediate_size"):
        MoEConfig.from_dict({"hidden_size": 64})
    with pytest.raises(ValueError, match="top_k must be .*but got 9"):
        MoEConfig.from_dict(SIZES | {"top_k": 9})


BAD = [
    ({"gate": "top2"}, "gate must be"),
    ({"num_experts": 4, "top_k": 5}, "top_k must be at most num_experts (4), but got 5"),
    ({"gate": "xft", "top_k": 1}, "top_k must be"),
    ({"shared": "dense", "gate": "topk_softmax"}, "shared='dense' requires gate to be one of"),
    ({"balance_loss_coef": -0.01}, "balance_loss_coef must be"),
    ({"balance_loss_coef": math.nan}, "balance_loss_coef must be"),
    ({"balance_loss_coef": True}, "balance_loss_coef must be"),
    ({"noise_epsilon": 0.0}, "noise_epsilon must be"),
    ({"gated": "no"}, "gated must be"),
    ({"hidden_size": 0}, "hidden_size must be"),
    ({"top_k": 2.0}, "top_k must be"),
    ({"num_experts": True}, "num_experts must be"),
]


@pytest.mark.parametrize("change, words", BAD)
def test_message_names_the_bad_value_and_what_is_wanted(change, words):
    with pytest.raises(ValueError) as error:
        MoEConfig(**SIZES | change)
    assert words in str(error.value)
    *_, value = change.values()
    assert f"got {value!r}" in str(error.value)


def test_checks_by_themselves():
    check_choice("x", "a", ("a", "b"))
    check_positive("n", 1)
    check_fraction("p", 1, zero=False)
    with pytest.raises(ValueError, match="from 0 to below 1"):
        check_fraction("p", 1, one=False)
    with pytest.raises(ValueError, match="x must be one of a, b"):
        check_choice("x", "c", ("a", "b"))
    with pytest.raises(ValueError, match="n must be an integer of at least 1"):
        check_positive("n", np.float64(1))
