"""LoRA experts from and to PEFT adapters, merged or expanded: conversions of
moe_runtime.methods.lora.
"""

import copy
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moe_runtime.hf.models import modeling, swap
from moe_runtime.hf.training.trainable import train_rows
from moe_runtime.methods import lora
from moe_runtime.methods.lora import lora_layers, save_adapters, to_lora_moe, to_moe
from moe_runtime.modules.moe import MoE
from tests.hf import tiny
from tests.hf.models.test_swap import snapshot
from tests.support.edited import edit_json
from tests.support.lora_models import adapters, alone, lora_model

FORMS = pytest.mark.parametrize("form", ["block", "linear"])


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_whole_experts_are_the_same_function(model_type, tmp_path):
    model = lora_model(model_type, balance_loss="switch", balance_loss_coef=0.1)
    before = tiny.logits(model)
    assert to_moe(model) is model
    whole = tiny.logits(model)
    assert tiny.distance(whole, before) < 1e-5
    assert model.config.moe_runtime["stage"] == "moe"
    assert "lora" not in model.config.moe_runtime
    assert {type(module) for module in modeling.moe_layers(model).values()} == {MoE}
    for parameter in model.parameters():
        assert parameter.requires_grad
    model.save_pretrained(tmp_path)
    assert torch.equal(
        tiny.logits(AutoModelForCausalLM.from_pretrained(tmp_path)),
        whole,
    )


@FORMS
def test_an_expert_is_the_adapter_that_is_saved_of_it(form, tmp_path):
    model = lora_model(form=form)
    folders = save_adapters(model, tmp_path / "out", "base")
    assert [folder.name for folder in folders] == [f"expert-{e}" for e in range(4)]
    for e in (0, 3):
        by_peft = PeftModel.from_pretrained(
            tiny.dense(),
            str(folders[e]),
        ).eval()
        expected = tiny.logits(by_peft)
        merged = lora.merge(
            copy.deepcopy(model),
            alone(model, e),
        )
        assert tiny.distance(tiny.logits(merged), expected) < 1e-5
    again = to_lora_moe(tiny.dense(), experts=folders, form=form)
    assert again.config.moe_runtime["lora"] == model.config.moe_runtime["lora"]
    for name, p in model.named_parameters():
        assert ".gate." in name or torch.equal(again.get_parameter(name), p), name


@pytest.fixture(scope="module")
def peft_folders(tmp_path_factory):
    return adapters(tmp_path_factory.mktemp("mlp"), count=3)


@pytest.fixture(scope="module")
def with_attention(tmp_path_factory):
    names = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return adapters(
        tmp_path_factory.mktemp("attention"), count=2, use_rslora=True, target_modules=names
    )


def by_peft(folder):
    return PeftModel.from_pretrained(
        tiny.dense(),
        str(folder),
    ).eval()


def test_adapters_become_the_experts(peft_folders):
    vectors = torch.randn(
        2,
        3,
        32,
        generator=torch.Generator().manual_seed(0),
    )
    model = to_lora_moe(
        tiny.dense(), experts=peft_folders, vectors=vectors, balance_loss="switch", method="upit"
    )
    block = model.config.moe_runtime
    assert (block["lora"]["rank"], block["lora"]["alpha"], block["method"]) == (2, 5.0, "upit")
    assert block["config"]["num_experts"] == 3
    assert block["config"]["top_k"] == 2
    for layer, moe in lora_layers(model).items():
        assert torch.equal(
            moe.gate.weight,
            vectors[layer],
        )
        assert moe.gate.weight.requires_grad
    for e, folder in enumerate(peft_folders):
        merged = lora.merge(copy.deepcopy(model), torch.eye(3)[e])
        assert tiny.distance(tiny.logits(merged), tiny.logits(by_peft(folder))) < 1e-5


@pytest.mark.parametrize("backbone", ["mean", "base"])
def test_pairs_on_the_attention_go_to_the_backbone(backbone, with_attention):
    model = to_lora_moe(tiny.dense(), experts=with_attention, backbone=backbone)
    merged = [by_peft(folder).merge_and_unload() for folder in with_attention]
    for name, weight in tiny.dense().named_parameters():
        if ".self_attn." not in name:
            continue
        result = model.get_parameter(name)
        if backbone == "base":
            assert torch.equal(result, weight), name
            continue
        mean = torch.stack([one.get_parameter(name) for one in merged]).mean(0)
        assert tiny.distance(result, mean) < 1e-6, name
        if name.endswith(("q_proj.weight", "o_proj.weight")):
            assert not torch.equal(result, weight), name
    for layer, moe in lora_layers(model).items():  # the experts contain only the MLP's part
        assert moe.experts.scaling == pytest.approx(5 / 2**0.5)
        up = merged[1].model.layers[layer].mlp.up_proj.weight
        assert (
            tiny.distance(
                moe.experts.whole_weight("up_proj", 1),
                up,
            )
            < 1e-6
        )


def edited(folder, out, tensors, values):
    """Copy an adapter folder with other settings, and with its tensors changed by `tensors`."""
    shutil.copytree(folder, out)
    edit_json(out / "adapter_config.json", **values)
    file = out / "adapter_model.safetensors"
    save_file(tensors(load_file(file)), file)
    return out


def without(word):
    return lambda state: {key: value for key, value in state.items() if word not in key}


def with_head(state):
    return state | {"base_model.model.lm_head.weight": torch.zeros(2)}


def wider(state):
    return {key: v.repeat(1, 2) if "lora_A" in key else v for key, v in state.items()}


@pytest.mark.parametrize(
    "values, tensors, words",
    [
        ({"use_dora": True}, dict, "use_dora in .* is True, but only"),
        ({"init_lora_weights": "pissa"}, dict, "init_lora_weights in .* is 'pissa', .* path_init"),
        ({"lora_alpha": 6}, dict, "scaling 3.0. All experts must match .* rank 2 and scaling 2.5"),
        ({"r": 3}, dict, r"with A, B of \[\[2, "),
        ({}, without("layers.0.mlp.up_proj"), "other layers, such as .*up_proj"),
        ({}, without("up_proj.lora_B"), "with A, B of .* None"),
        ({}, with_head, "has base_model.model.lm_head"),
        ({}, wider, r"is for \[32, 96\], but the model has \[32, 48\]"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(values, tensors, words, peft_folders, tmp_path):
    bad = edited(
        peft_folders[1],
        tmp_path / "bad",
        tensors,
        values,
    )
    model = tiny.dense()
    before = snapshot(model)
    with pytest.raises(ValueError, match=words):
        to_lora_moe(
            model,
            experts=[peft_folders[0], bad],
        )
    assert snapshot(model) == before


def test_models_of_another_kind_are_refused(peft_folders):
    linear = lora_model(form="linear")
    adapted = PeftModel.from_pretrained(
        tiny.dense(),
        str(peft_folders[0]),
    )

    for call, model, words in (
        (to_lora_moe, tiny.dense("phi3"), "'phi3'. Pass some of gate_up_proj, .* form='linear'"),
        (to_lora_moe, adapted, "Expected a LlamaForCausalLM, .* Unwrap it"),
        (to_moe, tiny.upcycled(), "but got MoeRuntimeLlamaForCausalLM at stage 'moe'"),
        (to_lora_moe, tiny.upcycled(), "already upcycled"),
        (to_moe, linear, "form must be 'block', but is 'linear'"),
    ):
        with pytest.raises(ValueError, match=words):
            call(model)
    for model in (lora_model(), linear):
        with pytest.raises(ValueError, match="is 'lora'. Convert it to whole experts"):
            swap.moe_to_dense(model, None)
    for model in (lora_model(), lora_model(form="linear", targets=["up_proj"])):
        with pytest.raises(ValueError, match="gate has LoRA experts, but whole ones"):
            train_rows(model, {0: [1]})
