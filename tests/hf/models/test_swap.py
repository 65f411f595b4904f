"""Dense models to MoE models and back: the function and the other weights are the same, or the
model is left unchanged.
"""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from moe_runtime.config import MoEConfig
from moe_runtime.hf.models import folders, modeling, swap
from moe_runtime.methods import lora
from tests.hf import tiny


def snapshot(model):
    """Record everything that a refused swap must leave alone."""
    modules = []
    for name, module in model.named_modules():
        modules.append((name, id(module), type(module), module.training))
    parameters = []
    for name, p in model.named_parameters():
        parameters.append((name, id(p), p.requires_grad, p.dtype, p.detach().sum().item()))
    classes = (type(model), type(model.base_model), type(model.config))
    return classes, model.config.to_dict(), modules, parameters


def reloaded(model, folder):
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("training", [False, True])
def test_a_probe_leaves_the_mode(training):
    model = tiny.dense("llama").train(training)
    folders.probe_logits(model)
    assert model.training == training


def first_expert(module) -> dict[str, torch.Tensor]:
    values = {}
    for name, weight in module.experts.named_parameters():
        values[name] = weight[0].clone()
    return values


@pytest.mark.parametrize("model_type", tiny.EVERY)
def test_upcycled_is_dense_and_comes_back_dense(model_type, tmp_path):
    model = tiny.dense(model_type)
    logits = tiny.logits(model)
    config = model.config.to_dict()
    state = tiny.state(model)
    errors = swap.dense_to_moe(model, tiny.config_of(model))

    assert list(errors) == [0, 1]
    assert max(errors.values()) < 1e-12
    upcycled_logits = tiny.logits(model)
    assert tiny.distance(upcycled_logits, logits) < 1e-5
    loaded = reloaded(model, tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(tiny.logits(loaded), upcycled_logits)

    ignored = dict.fromkeys(("architectures", "dtype", "_name_or_path", "transformers_version"))
    for moe in (model, loaded):  # the config is restored, too, in memory and on disk
        assert swap.moe_to_dense(moe, first_expert) is moe
        assert type(moe) is modeling.model_classes(model_type).base_causal_lm
        assert list(moe.state_dict()) == list(state)
        tiny.assert_equal(moe.state_dict(), state)
        assert torch.equal(tiny.logits(moe), logits)
        assert moe.config.to_dict() | ignored == config | ignored
        assert moe.config.architectures == [type(moe).__name__]


def test_two_models_of_one_config_object():
    config = tiny.dense_config("llama")
    values = config.to_dict()
    baseline, first, second, adapted = (LlamaForCausalLM(config) for _ in range(4))
    for model in (first, second):
        swap.dense_to_moe(model, tiny.config_of(model))
    lora.to_lora_moe(adapted, num_experts=2, top_k=1)
    swap.moe_to_mergeable(first)
    stages = [model.config.moe_runtime["stage"] for model in (first, second, adapted)]

    assert stages == ["mergeable", "moe", "lora"]
    lora.to_moe(adapted)
    for model in (first, second, adapted):
        assert model.base_model.config is model.config
        for module in model.modules():
            if hasattr(module, "rope_init_fn"):
                assert module.config is model.config
    swap.moe_to_dense(second, first_expert)
    assert first.config.moe_runtime["stage"] == "mergeable"
    assert baseline.config is config
    assert config.to_dict() == values
    assert not hasattr(config, "moe_runtime")
    assert type(AutoModelForCausalLM.from_config(config)) is LlamaForCausalLM


@pytest.mark.parametrize(
    "dtype, tolerance",
    # gates are float32 for every dtype: their sum is 1 up to 6e-8
    [(torch.bfloat16, 2e-2), (torch.float16, 2e-2), (torch.float64, 1e-6)],
)
def test_dtype_is_kept(dtype, tolerance, tmp_path):
    model = tiny.dense(dtype=dtype)
    logits = tiny.logits(model)
    swap.dense_to_moe(model, tiny.config_of(model))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert tiny.distance(tiny.logits(model), logits) < tolerance
    loaded = reloaded(model, tmp_path)
    assert loaded.dtype == dtype
    assert torch.equal(tiny.logits(loaded), tiny.logits(model))


def test_some_layers_only(tmp_path):
    model = tiny.dense(num_hidden_layers=3)
    logits = tiny.logits(model)
    middle = model.model.layers[1].mlp
    swap.dense_to_moe(model, tiny.config_of(model), layers=[2, 0])

    assert list(modeling.moe_layers(model)) == [0, 2]
    assert model.model.layers[1].mlp is middle
    assert tiny.distance(tiny.logits(model), logits) < 1e-5
    assert torch.equal(
        tiny.logits(reloaded(model, tmp_path)),
        tiny.logits(model),
    )


def test_routers_depend_on_seed_and_layer_alone():
    def routers(**options) -> dict[int, torch.Tensor]:
        model = tiny.dense(num_hidden_layers=3)
        swap.dense_to_moe(model, tiny.config_of(model), **options)
        values = {}
        for layer, moe in modeling.moe_layers(model).items():
            values[layer] = moe.gate.weight
        return values

    one = routers()
    tiny.assert_equal(routers(), one)

    assert torch.equal(one[2], routers(layers=[2])[2])
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], routers(seed=7)[0])
    assert 0.01 < torch.cat(list(one.values())).std() < 0.03


def ids_of_the_rest(model) -> dict[str, int]:
    values = {}
    for name, p in model.named_parameters():
        if ".mlp." not in name:
            values[name] = id(p)
    return values


def test_the_rest_of_the_model_is_the_same_objects():
    model = tiny.dense("qwen2", tie_word_embeddings=True).train()
    first, second = model.model.layers
    first.mlp.requires_grad_(False)
    generation = model.generation_config
    calls = []
    second.self_attn.register_forward_hook(lambda *_: calls.append(1))
    before = ids_of_the_rest(model)
    swap.dense_to_moe(model, tiny.config_of(model))

    assert ids_of_the_rest(model) == before
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config is generation
    for module in model.modules():
        assert module.training
    assert not tiny.trained(first.mlp)
    for p in second.mlp.parameters():
        assert p.requires_grad
    model(tiny.batch())
    assert calls == [1]
    swap.moe_to_dense(model, first_expert)
    assert not tiny.trained(first.mlp)


class Tampered(nn.Module):
    """An MLP with the table's layers that computes something else."""

    def __init__(self, mlp):
        super().__init__()
        for name, child in mlp.named_children():
            self.add_module(name, child)

    def forward(self, x):
        return 1.01 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def scale_class(model):
    model.model.layers[1].mlp = Tampered(model.model.layers[1].mlp)


def scale_closure(model):
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: 1.01 * forward(x)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(
            scale_class,
            "layers.1.mlp .* must compute .* 1.0e-02",
            id="another-module",
        ),
        pytest.param(
            scale_closure,
            "layers.0.mlp .* must compute",
            id="replaced-forward",
        ),
        pytest.param(
            lambda m: setattr(
                m.model.layers[1].mlp,
                "act_fn",
                nn.GELU(),
            ),
            "'gelu'",
            id="act",
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tampered_model_is_refused_and_unchanged(spoil, says, dtype):
    model = tiny.dense().to(dtype)
    config = tiny.config_of(model)
    spoil(model)
    before = snapshot(model)
    with pytest.raises(ValueError, match=says):
        swap.dense_to_moe(model, config)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("settings", "layers", "says"),
    [
        ({"intermediate_size": 64}, None, "config must have .*'intermediate_size': 48.*64"),
        ({}, [2], r"layers must be .*\[2\]"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_untouched(settings, layers, says):
    model = tiny.dense()
    config = MoEConfig(**tiny.config_of(model).to_dict() | settings)
    before = snapshot(model)
    with pytest.raises(ValueError, match=says):
        swap.dense_to_moe(model, config, layers=layers)
    assert snapshot(model) == before


def test_mergeable_moves_the_experts_once():
    model = tiny.upcycled("qwen2").train()
    experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
    swap.moe_to_mergeable(model, shared_rate=0.8)
    for name, p in experts.items():
        assert model.get_parameter(name) is p
    for module in model.modules():
        assert module.training
    block = model.config.moe_runtime
    assert (block["stage"], block["shared_rate"], block["soup"]) == ("mergeable", 0.8, False)
    with pytest.raises(ValueError, match="stage must be 'moe', but is 'mergeable'"):
        swap.moe_to_mergeable(model)


@pytest.mark.parametrize("model_type", ["llama", "phi3", "gpt_neox"])
def test_merged_model_is_the_mergeable_one(model_type, tmp_path):
    model = tiny.upcycled(model_type)
    swap.moe_to_mergeable(model)
    with torch.no_grad():
        for module in modeling.moe_layers(model).values():
            module.mixing_logits.add_(torch.randn(3))
    logits = tiny.logits(model)
    stock = swap.moe_to_dense(model, lambda module: module.merged_weights())

    assert tiny.distance(tiny.logits(stock), logits) < 1e-6
    for p in stock.parameters():
        assert p.requires_grad
    loaded = reloaded(stock, tmp_path)
    assert type(loaded) is type(stock)
    assert torch.equal(tiny.logits(loaded), tiny.logits(stock))


def test_sampled_and_unusual_layers_are_verified():
    model = tiny.dense(num_hidden_layers=6)
    assert list(swap.verify_mlp(model)) == [0, 3, 5]
    assert list(swap.verify_mlp(model, layers=[2, 1])) == [1, 2]
    mlps = [layer.mlp for layer in model.model.layers]
    mlps[1].register_forward_hook(lambda *_: None)
    mlps[4].__class__ = type("OtherMLP", (type(mlps[4]),), {})

    assert list(swap.verify_mlp(model)) == [0, 1, 3, 4, 5]
    mlps[2].up_proj.forward = lambda x: x.new_ones(*x.shape[:-1], 48)
    with pytest.raises(
        ValueError,
        match=r"layers.2.mlp \(LlamaMLP\) must compute",
    ):
        swap.verify_mlp(model)
    swap.verify_mlp(model, layers=[0, 1, 3, 4, 5])
