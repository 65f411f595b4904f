"""load_state_dict with the names and layouts of saved folders: one matrix per expert, in one file
or across many.
"""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import load_sharded_checkpoint

from moe_runtime.hf.dropin import loading
from tests.hf import stock

FAST = ("mixtral", "deepseek_v3", "gpt_oss", "nemotron_h")


@pytest.fixture(autouse=True)
def _installed():
    loading.install()


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with other weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    return other


def saved(model: PreTrainedModel, folder) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def different(model: nn.Module, other: nn.Module) -> list[str]:
    tensors = other.state_dict()
    values = []
    for name, one in model.state_dict().items():
        if not torch.equal(one, tensors[name]):
            values.append(name)
    return values


def families():
    """The fast tests load only some of them, including Mixtral with more than ten experts."""
    for name in stock.FAMILIES:
        yield pytest.param(
            name,
            marks=() if name in FAST else pytest.mark.slow,
        )


@pytest.mark.parametrize("family", families())
def test_every_family_loads_what_it_has_saved(family, tmp_path):
    """The model is in one file, or in files of which few contain a whole stack."""
    config = stock.config_of(family)
    if family == "mixtral":
        config.num_local_experts = 12
    model = stock.model_class(family)(config)
    one = moved(model)
    result = one.load_state_dict(saved(model, tmp_path / "one"), strict=False)

    assert different(one, model) == []
    assert result.unexpected_keys == []
    assert not any("experts" in name for name in result.missing_keys) or model.all_tied_weights_keys
    many = moved(model)
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len([*(tmp_path / "many").glob("*.safetensors")]) > 3
    with loading.loading_whole(many):
        load_sharded_checkpoint(many, tmp_path / "many", strict=False)
    assert different(many, model) == []


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    "form",
    ["strict", "wrapped", "inner", "own-names", "meta"],
)
def test_forms(form, assign, tmp_path):
    model = stock.build("mixtral")
    tensors = saved(model, tmp_path)
    other = moved(model)
    target = other
    if form == "wrapped":
        target = nn.ModuleDict({"module": other})
        tensors = {f"module.{name}": tensor for name, tensor in tensors.items()}
    elif form == "inner":
        target = other.model
        other.lm_head.load_state_dict({"weight": tensors.pop("lm_head.weight")})
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    elif form == "own-names":
        tensors = model.state_dict()
    elif form == "meta":
        target = other.to("meta")
    names = list(tensors)
    target.load_state_dict(tensors, assign=assign or form == "meta")

    assert different(other, model) == []
    for parameter in other.parameters():
        assert not (parameter.is_meta)
    assert list(tensors) == names


def test_a_partially_loaded_stack_cannot_be_used_or_saved(tmp_path):
    model = stock.build("mixtral")
    tensors = saved(model, tmp_path)
    other = moved(model)
    late = "model.layers.1.block_sparse_moe.experts.5.w2.weight"
    rest = {late: tensors.pop(late)}
    other.load_state_dict(tensors, strict=False)
    says = "^Only 7 of the tensors of model.layers.1.mlp.experts.down_proj were loaded. Load a"
    for use in (lambda: other(**stock.batch()), other.state_dict):
        with pytest.raises(ValueError, match=says):
            use()
    other.load_state_dict(rest, strict=False)

    assert different(other, model) == []
    assert torch.equal(
        other(**stock.batch()).logits,
        model(**stock.batch()).logits,
    )


def test_weights_that_a_model_does_not_save_are_not_expected():
    model = stock.build("mixtral")
    state = model.state_dict()
    experts = {name for name in state if ".experts." in name}
    tensors = {}
    for name, tensor in state.items():
        if name not in experts:
            tensors[name] = tensor
    with (
        pytest.raises(ValueError, match="no weights for model.layers.0.mlp.experts.gate_up_proj"),
        loading.loading_whole(model),
    ):
        model.load_state_dict(tensors, strict=False)
    model._keys_to_ignore_on_save = experts
    with loading.loading_whole(model):
        model.load_state_dict(tensors, strict=False)
