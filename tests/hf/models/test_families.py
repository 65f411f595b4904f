"""The table of dense architectures against the models themselves."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from moe_runtime.hf.models import families
from moe_runtime.hf.models.families import FAMILIES
from tests.hf import tiny


def mlp_of(model_type: str, **changes):
    model = tiny.dense(model_type, **changes)
    family = FAMILIES[model_type]
    return model, family, model.get_submodule(family.path.format(1))


@pytest.mark.parametrize("model_type", tiny.EVERY)
def test_shape_from_config_is_the_mlps(model_type):
    model, family, mlp = mlp_of(model_type)
    shape = families.moe_shape(family, model.config)
    assert shape == families.moe_shape(family, mlp)
    assert (shape["hidden_size"], shape["intermediate_size"], shape["gated"]) == (
        32,
        48,
        family.gated,
    )
    assert shape["bias"] == (model_type in ("llama", "gpt_neox", "phi", "starcoder2"))


@pytest.mark.parametrize("model_type", tiny.EVERY)
def test_read_then_write_gives_the_same_mlp(model_type):
    _, family, mlp = mlp_of(model_type)
    weights = families.read_mlp(mlp, family)
    other = copy.deepcopy(mlp).to("meta")
    families.write_mlp(other, family, weights)
    x = torch.randn(3, 32)
    assert torch.equal(other(x), mlp(x))
    again = families.read_mlp(other, family)
    assert list(again) == list(weights)
    for name in weights:
        assert torch.equal(again[name], weights[name])


@pytest.mark.parametrize("model_type", tiny.EVERY)
def test_keys_are_the_checkpoints(model_type):
    model, family, mlp = mlp_of(model_type)
    bias = families.moe_shape(family, mlp)["bias"]
    state = {key: value for key, value in model.state_dict().items() if ".mlp." in key}
    located = {key: families.locate_key(family, key) for key in state}
    for layer in range(2):
        keys = families.mlp_keys(family, layer, bias)
        weights = families.read_mlp(model.get_submodule(family.path.format(layer)), family)
        assert list(keys) == list(weights)
        for name, parts in keys.items():
            assert torch.equal(torch.cat([state[key] for key in parts]), weights[name])
            assert [located.pop(key) for key in parts] == [
                (layer, name, part) for part in range(len(parts))
            ]
        split = families.split_weights(family, weights)
        assert {name: [part.shape for part in parts] for name, parts in split.items()} == {
            name: [state[key].shape for key in parts] for name, parts in keys.items()
        }
    assert not located


def test_expert_keys_are_the_upcycled_checkpoints():
    for model_type in ("llama", "phi3", "gpt_neox"):
        model = tiny.upcycled(model_type)
        family = FAMILIES[model_type]
        bias = model_type != "phi3"
        keys = []
        for layer in range(2):
            for key in families.expert_keys(family, layer, bias).values():
                keys.append(key)
        assert sorted(keys) == sorted(key for key in model.state_dict() if ".mlp.experts." in key)


def test_parts_of_a_split_tensor_own_their_memory():
    _, family, mlp = mlp_of("llama")
    gate, up = families.split_weights(family, families.read_mlp(mlp, family))["gate_up_proj"]
    assert gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_accurate", "gelu_tanh"),
        ("relu", "relu"),
        ("relu2", "relu2"),
        ("quick_gelu", "quick_gelu"),
    ],
)
def test_activations_are_ours_by_value(name, ours):
    assert families.activation_name(name) == ours


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("opt", "which has no separate MLP module"),
        ("biogpt", "which has no separate MLP module"),
        ("xglm", "which has no separate MLP module"),
        ("bloom", "which has an MLP that takes the residual as an argument"),
        ("mpt", "which has an MLP that takes the residual as an argument"),
        ("bitnet", "which has a norm inside its MLP"),
        ("mixtral", "which already has experts"),
        ("qwen3_moe", "which already has experts"),
        ("deepseek_v3", "which already has experts"),
    ],
)
def test_other_architectures_are_refused_with_the_reason(model_type, reason):
    with pytest.raises(
        ValueError, match=f"model_type must be one of llama, .*, but got '{model_type}', {reason}"
    ):
        families.family_of(AutoConfig.for_model(model_type))


def test_unknown_and_upcycled_models_are_refused():
    with pytest.raises(
        ValueError, match="model_type must be one of llama, mistral, .*starcoder2, but got 'mamba'$"
    ):
        families.family_of("mamba")
    with pytest.raises(ValueError, match="model_type must be .*but got None"):
        families.family_of(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match="but got 'moe_runtime_llama', which is already upcycled. Merge it"
    ):
        families.family_of(tiny.upcycled())


def test_a_family_is_found_by_model_config_and_name():
    model = tiny.dense("phi3")
    assert (
        families.family_of(model) is families.family_of(model.config) is families.family_of("phi3")
    )
    assert [name for name, family in FAMILIES.items() if family.fused] == ["phi3", "glm4"]


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda w: w.pop("down_proj"), id="a-name-missing"),
        pytest.param(lambda w: w.update(extra=torch.zeros(1)), id="a-name-too-many"),
        pytest.param(lambda w: w.update(down_proj=w["down_proj"].T), id="transposed"),
        pytest.param(lambda w: w.update(gate_up_proj=w["gate_up_proj"][:48]), id="half-of-it"),
    ],
)
def test_write_refuses_what_does_not_fit_and_writes_nothing(spoil):
    _, family, mlp = mlp_of("llama")
    before = tiny.state(mlp)
    weights = {name: value + 1 for name, value in families.read_mlp(mlp, family).items()}
    spoil(weights)
    with pytest.raises(
        ValueError, match="Expected an MLP with weights of shapes .*'gate_up_proj': \\(96, 32\\)"
    ):
        families.write_mlp(mlp, family, weights)
    tiny.assert_equal(before, mlp.state_dict())
