"""Dense models to mixtures of experts and back: the same function, the same untouched rest, or no
change at all.
"""

import types

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from moe_runtime.hf.models import folders, modeling, swap
from moe_runtime.methods import lora
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.modules.moe import MoE
from tests.hf import tiny


def snapshot(model):
    """Everything that a refused swap must leave alone."""
    return (
        type(model),
        type(model.base_model),
        type(model.config),
        model.config.to_dict(),
        [
            (name, id(module), type(module), module.training)
            for name, module in model.named_modules()
        ],
        [
            (name, id(p), p.requires_grad, p.dtype, p.detach().clone())
            for name, p in model.named_parameters()
        ],
    )


@pytest.mark.parametrize("training", [False, True])
def test_a_probe_leaves_the_mode(training):
    model = tiny.dense("llama").train(training)
    folders.probe_logits(model)
    assert model.training == training


def unchanged(model, before) -> bool:
    after = snapshot(model)
    same = []
    for a, b in zip(after[-1], before[-1], strict=True):
        same.append(a[:-1] == b[:-1] and torch.equal(a[-1], b[-1]))
    return all(same) and after[:-1] == before[:-1]


def first_expert(module) -> dict[str, torch.Tensor]:
    return {name: weight[0].clone() for name, weight in module.experts.named_parameters()}


@pytest.mark.parametrize("model_type", tiny.EVERY)
def test_upcycled_is_dense_and_comes_back_dense(model_type, tmp_path):
    model = tiny.dense(model_type)
    want = tiny.logits(model)
    config = model.config.to_dict()
    state = tiny.state(model)
    errors = swap.dense_to_moe(model, tiny.config_of(model))
    assert list(errors) == [0, 1]
    assert max(errors.values()) < 1e-12
    got = tiny.logits(model)
    assert tiny.distance(got, want) < 1e-5
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(tiny.logits(loaded), got)

    for moe in (model, loaded):  # the config, too, comes back: from memory and from disk
        stock = swap.moe_to_dense(moe, first_expert)
        assert stock is moe
        assert type(moe) is modeling.model_classes(model_type).base_causal_lm
        assert {
            key: value
            for key, value in moe.state_dict().items()
            if not torch.equal(value, state[key])
        } == {}
        assert list(moe.state_dict()) == list(state)
        assert torch.equal(tiny.logits(moe), want)
        ignored = dict.fromkeys(("architectures", "dtype", "_name_or_path", "transformers_version"))
        assert moe.config.to_dict() | ignored == config | ignored
        assert moe.config.architectures == [type(moe).__name__]


def test_two_models_of_one_config_object(tmp_path):
    config = tiny.dense_config("llama")
    values = config.to_dict()
    baseline, first, second, adapted = (LlamaForCausalLM(config) for _ in range(4))
    generation = first.generation_config
    for model in (first, second):
        swap.dense_to_moe(model, tiny.config_of(model))
    lora.to_lora_moe(adapted, num_experts=2, top_k=1)
    swap.moe_to_mergeable(first)
    stages = [model.config.moe_runtime["stage"] for model in (first, second, adapted)]
    assert stages == ["mergeable", "moe", "lora"]
    lora.to_moe(adapted)
    assert first.generation_config is generation
    for model in (first, second, adapted):
        held = {id(module.config) for module in model.modules() if hasattr(module, "rope_init_fn")}
        assert model.base_model.config is model.config
        assert held <= {id(model.config)}
    swap.moe_to_dense(second, first_expert)
    assert first.config.moe_runtime["stage"] == "mergeable"

    assert baseline.config is config
    assert config.to_dict() == values
    assert not hasattr(config, "moe_runtime")
    assert type(AutoModelForCausalLM.from_config(config)) is LlamaForCausalLM
    baseline.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM
    assert torch.equal(tiny.logits(loaded), tiny.logits(baseline.eval()))


@pytest.mark.parametrize("gate", ["topk_softmax", "softmax_topk_renorm"])
def test_other_gates_whose_weights_sum_to_one(gate):
    model = tiny.dense()
    want = tiny.logits(model)
    swap.dense_to_moe(model, tiny.config_of(model, gate=gate, top_k=2))
    assert tiny.distance(tiny.logits(model), want) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_experts": 1, "top_k": 1}, id="one-expert"),
        pytest.param({"num_experts": 4, "top_k": 4}, id="all-experts"),
        pytest.param({"router": "mlp", "noisy_gate": True}, id="every-router-tensor"),
    ],
)
def test_corner_configs_are_dense_and_load(settings, tmp_path):
    model = tiny.dense("qwen2")
    want = tiny.logits(model)
    swap.dense_to_moe(model, tiny.config_of(model, **settings))
    got = tiny.logits(model)
    assert tiny.distance(got, want) < 1e-5
    model.save_pretrained(tmp_path)
    assert torch.equal(tiny.logits(AutoModelForCausalLM.from_pretrained(tmp_path)), got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_kept(dtype, tmp_path):
    model = tiny.dense(dtype=dtype)
    want = tiny.logits(model)
    swap.dense_to_moe(model, tiny.config_of(model))
    assert {p.dtype for p in model.parameters()} == {dtype}
    # gates are float32 at every dtype: their sum is 1 to 6e-8
    assert tiny.distance(tiny.logits(model), want) < {torch.float64: 1e-6}.get(dtype, 2e-2)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == dtype
    assert torch.equal(tiny.logits(loaded), tiny.logits(model))


def test_some_layers_only(tmp_path):
    model = tiny.dense(num_hidden_layers=3)
    want = tiny.logits(model)
    kept = model.model.layers[1].mlp
    swap.dense_to_moe(model, tiny.config_of(model), layers=[2, 0])
    assert list(modeling.moe_layers(model)) == [0, 2]
    assert model.model.layers[1].mlp is kept
    assert tiny.distance(tiny.logits(model), want) < 1e-5
    model.save_pretrained(tmp_path)
    assert torch.equal(
        tiny.logits(AutoModelForCausalLM.from_pretrained(tmp_path)), tiny.logits(model)
    )


def test_routers_depend_on_seed_and_layer_alone():
    def routers(**options):
        model = tiny.dense(num_hidden_layers=3)
        swap.dense_to_moe(model, tiny.config_of(model), **options)
        return {layer: moe.gate.weight for layer, moe in modeling.moe_layers(model).items()}

    one = routers()
    two = routers()
    other = routers(seed=7)
    part = routers(layers=[2])
    for layer in range(3):
        assert torch.equal(one[layer], two[layer])
    assert torch.equal(one[2], part[2])
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], other[0])
    assert 0.01 < torch.cat(list(one.values())).std() < 0.03


def test_the_rest_of_the_model_is_the_same_objects():
    model = tiny.dense("qwen2", tie_word_embeddings=True).train()
    model.model.layers[0].mlp.requires_grad_(False)
    model.generation_config.max_new_tokens = 7
    calls = []
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    kept = {name: id(p) for name, p in model.named_parameters() if ".mlp." not in name}
    swap.dense_to_moe(model, tiny.config_of(model))
    assert {name: id(p) for name, p in model.named_parameters() if ".mlp." not in name} == kept
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.max_new_tokens == 7
    for module in model.modules():
        assert module.training
    for p in model.model.layers[0].mlp.parameters():
        assert not p.requires_grad
    for p in model.model.layers[1].mlp.parameters():
        assert p.requires_grad
    model(tiny.batch())
    assert calls == [1]


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


def scale_method(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 1.01, mlp)


def offload(model):
    from accelerate import cpu_offload

    cpu_offload(model.model.layers[0].mlp, execution_device="cpu")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(
            scale_class, "layers.1.mlp .* must compute .*difference is 1.0e-02", id="another-module"
        ),
        pytest.param(
            scale_closure, "layers.0.mlp .* must compute .*difference is", id="patched-by-closure"
        ),
        pytest.param(
            scale_method,
            "layers.1.mlp .* must compute .*difference is 1.0e-02",
            id="patched-by-method",
        ),
        pytest.param(
            lambda m: m.model.layers[1].mlp.to("meta"),
            "layers.1.mlp is on the meta device",
            id="meta",
        ),
        pytest.param(offload, "layers.0.mlp carries accelerate's hooks", id="offloaded"),
        pytest.param(
            lambda m: setattr(m.model.layers[1].mlp, "act_fn", nn.GELU()),
            "have .*'hidden_act': 'gelu'",
            id="act",
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_not_what_it_seems_is_refused_untouched(spoil, message, dtype):
    model = tiny.dense().to(dtype)
    config = tiny.config_of(model)
    spoil(model)
    if "meta" in message or "hooks" in message:
        with pytest.raises(ValueError, match=message):
            swap.dense_to_moe(model, config)
        assert type(model).__name__ == "LlamaForCausalLM"
        assert not hasattr(model.config, "moe_runtime")
        return
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        swap.dense_to_moe(model, config)
    assert unchanged(model, before)


@pytest.mark.parametrize(
    ("settings", "layers", "message"),
    [
        (
            {"intermediate_size": 64},
            None,
            "config must have .*'intermediate_size': 48.*but has .*64",
        ),
        ({"bias": False}, None, "must have .*'bias': True"),
        ({"gated": False}, None, "must have .*'gated': True"),
        ({"hidden_act": "gelu"}, None, "must have .*'hidden_act': 'silu'"),
        ({}, [], r"layers must be one or more different numbers from 0 to 1, but got \[\]"),
        ({}, [0, 0], r"layers must be .*\[0, 0\]"),
        ({}, [-1], r"layers must be .*\[-1\]"),
        ({}, [2], r"layers must be .*\[2\]"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_untouched(settings, layers, message):
    model = tiny.dense()
    config = tiny.config_of(model).to_dict() | settings
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        swap.dense_to_moe(model, type(tiny.config_of(model))(**config), layers=layers)
    assert unchanged(model, before)


def test_wrapped_and_headless_models_are_refused():
    from peft import LoraConfig, get_peft_model

    model = tiny.dense()
    config = tiny.config_of(model)
    with pytest.raises(ValueError, match="Expected a LlamaForCausalLM, but got LlamaModel"):
        swap.dense_to_moe(model.model, config)
    peft = get_peft_model(model, LoraConfig(target_modules=["up_proj"]))
    with pytest.raises(ValueError, match="Expected a LlamaForCausalLM, but got PeftModel"):
        swap.dense_to_moe(peft, config)
    with pytest.raises(
        ValueError,
        match="LlamaMLP.up_proj must be a plain torch.nn.Linear of floats, but is Linear",
    ):
        swap.dense_to_moe(model, config)


def test_mergeable_moves_the_experts_and_trains_the_logits_alone():
    model = tiny.upcycled("qwen2").train()
    experts = {name: id(p) for name, p in model.named_parameters() if ".experts." in name}
    swap.moe_to_mergeable(model, shared_rate=0.8)
    assert {name: id(p) for name, p in model.named_parameters() if ".experts." in name} == experts
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"model.layers.{layer}.mlp.mixing_logits" for layer in range(2)}
    for module in model.modules():
        assert module.training
    out = model(tiny.batch(), labels=tiny.batch())
    out.loss.backward()
    for p in model.parameters():
        if p.requires_grad:
            assert p.grad.abs().sum() > 0
    block = model.config.moe_runtime
    assert (block["stage"], block["shared_rate"], block["soup"]) == ("mergeable", 0.8, False)
    with pytest.raises(ValueError, match="stage must be 'moe', but is 'mergeable'"):
        swap.moe_to_mergeable(model)


def test_a_gate_without_shared_expert_wants_a_soup():
    model = tiny.upcycled(gate="topk_softmax")
    before = snapshot(model)
    with pytest.raises(
        ValueError, match="Gate 'topk_softmax' has no shared expert. Pass soup=True"
    ):
        swap.moe_to_mergeable(model)
    with pytest.raises(ValueError, match="shared_rate must be .*but got 1.5"):
        swap.moe_to_mergeable(model, shared_rate=1.5, soup=True)
    assert unchanged(model, before)
    swap.moe_to_mergeable(model, soup=True)
    for module in model.modules():
        if isinstance(module, MergedMLP):
            assert module.mixing_logits.shape == (4,)


@pytest.mark.parametrize("model_type", ["llama", "phi3", "gpt_neox"])
def test_merged_model_is_the_mergeable_one(model_type, tmp_path):
    model = tiny.upcycled(model_type)
    swap.moe_to_mergeable(model)
    with torch.no_grad():
        for module in modeling.moe_layers(model).values():
            module.mixing_logits.add_(torch.randn(3))
    want = tiny.logits(model)
    stock = swap.moe_to_dense(model, lambda module: module.merged_weights())
    assert tiny.distance(tiny.logits(stock), want) < 1e-6
    for p in stock.parameters():
        assert p.requires_grad
    stock.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(stock)
    assert torch.equal(tiny.logits(loaded), tiny.logits(stock))


def test_experts_of_a_frozen_model_come_back_frozen():
    model = tiny.dense().requires_grad_(False)
    swap.dense_to_moe(model, tiny.config_of(model))
    for p in model.parameters():
        assert not p.requires_grad
    assert sum(isinstance(module, MoE) for module in model.modules()) == 2
    swap.moe_to_dense(model, first_expert)
    for p in model.parameters():
        assert not p.requires_grad


def test_some_layers_are_verified_and_every_odd_one():
    model = tiny.dense(num_hidden_layers=6)
    assert list(swap.verify_mlp(model)) == [0, 3, 5]
    assert list(swap.verify_mlp(model, layers=[2, 1])) == [1, 2]
    layers = model.model.layers
    layers[1].mlp.register_forward_hook(lambda *_: None)
    layers[4].mlp = type("OtherMLP", (type(layers[4].mlp),), {})(model.config)
    assert list(swap.verify_mlp(model)) == [0, 1, 3, 4, 5]
    layers[2].mlp.up_proj.forward = lambda x: x.new_ones(*x.shape[:-1], 48)
    with pytest.raises(ValueError, match=r"layers.2.mlp \(LlamaMLP\) must compute"):
        swap.verify_mlp(model)
    swap.verify_mlp(model, layers=[0, 1, 3, 4, 5])
