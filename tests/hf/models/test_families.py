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
    assert (shape["hidden_size"], shape["intermediate_size"]) == (32, 48)
    assert shape["gated"] == family.gated
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
    tiny.assert_equal(again, weights)


@pytest.mark.parametrize("model_type", tiny.EVERY)
def test_keys_are_the_checkpoints(model_type):
    model, family, mlp = mlp_of(model_type)
    bias = families.moe_shape(family, mlp)["bias"]
    state = {key: value for key, value in model.state_dict().items() if ".mlp." in key}
    located = {key: families.locate_key(family, key) for key in state}
    for layer in range(2):
        keys = families.mlp_keys(family, layer, bias)
        weights = families.read_mlp(
            model.get_submodule(family.path.format(layer)),
            family,
        )
        split = families.split_weights(family, weights)
        assert list(keys) == list(weights) == list(split)
        for name, parts in keys.items():
            assert torch.equal(
                torch.cat([state[key] for key in parts]),
                weights[name],
            )
            for number, (key, part) in enumerate(zip(parts, split[name], strict=True)):
                assert located.pop(key) == (layer, name, number)
                assert part.shape == state[key].shape

    assert not located


def test_parts_of_a_split_tensor_own_their_memory():
    _, family, mlp = mlp_of("llama")
    gate, up = families.split_weights(
        family,
        families.read_mlp(mlp, family),
    )["gate_up_proj"]
    assert gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_new", "gelu_tanh"),
        ("relu2", "relu2"),
        ("quick_gelu", "quick_gelu"),
    ],
)
def test_activations_are_ours_by_value(name, ours):
    assert families.activation_name(name) == ours


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        pytest.param("opt", "'opt'$", id="opt"),
        pytest.param(
            AutoConfig.for_model("mixtral"),
            "'mixtral', which already has experts",
            id="mixtral",
        ),
        pytest.param(nn.Linear(2, 2), "None", id="no-model"),
        pytest.param(
            tiny.upcycled(),
            "'moe_runtime_llama', which is already upcycled",
            id="ours",
        ),
    ],
)
def test_other_architectures_are_refused_with_the_reason(model, reason):
    with pytest.raises(
        ValueError,
        match=f"model_type must be one of llama, .*but got {reason}",
    ):
        families.family_of(model)


def test_a_family_is_found_by_model_config_and_name():
    model = tiny.dense("phi3")
    for given in (model, model.config, "phi3"):
        assert families.family_of(given) is FAMILIES["phi3"]
    assert [name for name, family in FAMILIES.items() if family.fused] == ["phi3", "glm4"]
