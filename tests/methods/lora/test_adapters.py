"""LoRA experts from PEFT adapters and to them, merged or made whole: the ways in and out of
moe_runtime.methods.lora.
"""

import copy
import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from moe_runtime.hf.models import modeling, swap
from moe_runtime.hf.training.trainable import train_rows
from moe_runtime.methods import lora
from moe_runtime.methods.lora import (
    forced_experts,
    load_adapters,
    lora_layers,
    save_adapters,
    to_lora_moe,
    to_moe,
)
from moe_runtime.modules.moe import MoE
from tests.hf import tiny
from tests.hf.models.test_swap import snapshot, unchanged
from tests.support.lora_models import adapters, alone, lora_model

FORMS = pytest.mark.parametrize("form", ["block", "linear"])


# ways out
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_whole_experts_are_the_same_function(model_type, tmp_path):
    model = lora_model(model_type, balance_loss="switch", balance_loss_coef=0.1)
    want = tiny.logits(model)
    assert to_moe(model) is model and tiny.distance(tiny.logits(model), want) < 1e-5
    assert model.config.moe_runtime["stage"] == "moe" and "lora" not in model.config.moe_runtime
    assert all(type(module) is MoE for module in modeling.moe_layers(model).values())
    assert all(p.requires_grad for p in model.parameters())
    model.save_pretrained(tmp_path)
    assert torch.equal(
        tiny.logits(AutoModelForCausalLM.from_pretrained(tmp_path)), tiny.logits(model)
    )
    stock = swap.moe_to_dense(
        model, lambda moe: {n: w[0] for n, w in moe.experts.named_parameters()}
    )
    assert type(stock) is modeling.model_classes(model_type).base_causal_lm


@FORMS
def test_an_expert_is_the_adapter_that_is_saved_of_it(form, tmp_path):
    model = lora_model(form=form)
    folders = save_adapters(model, tmp_path / "out", "base")
    assert [folder.name for folder in folders] == [f"expert-{e}" for e in range(4)]
    for e in (0, 3):
        by_peft = PeftModel.from_pretrained(tiny.dense(), str(folders[e])).eval()
        want = tiny.logits(by_peft)
        with forced_experts(model, [e, e]):
            assert tiny.distance(tiny.logits(model), want) < 1e-5
        merged = lora.merge(copy.deepcopy(model), alone(model, e))
        assert tiny.distance(tiny.logits(merged), want) < 1e-5
        assert tiny.distance(tiny.logits(by_peft.merge_and_unload()), tiny.logits(merged)) < 1e-5
    again = to_lora_moe(tiny.dense(), experts=folders, form=form)
    assert again.config.moe_runtime["lora"] == model.config.moe_runtime["lora"]
    for name, p in model.named_parameters():
        assert ".gate." in name or torch.equal(again.get_parameter(name), p), name


def test_the_stacked_adapter_is_the_whole_model_to_peft(tmp_path):
    from moe_runtime.methods import xft

    model = lora_model()
    base = tiny.dense()
    xft.upcycle(base, num_experts=4, top_k=2, gate="softmax_topk_renorm")
    base.save_pretrained(tmp_path / "base")
    save_adapters(model, tmp_path / "out", "base", upcycled=tmp_path / "base")
    by_peft = PeftModel.from_pretrained(base, str(tmp_path / "out" / "stacked")).eval()
    assert tiny.distance(tiny.logits(by_peft), tiny.logits(model)) < 1e-5
    assert len(list((tmp_path / "out").iterdir())) == 5
    for settings, words in (
        ({"top_k": 1}, "has top_k 1, but the model has 2"),
        (
            {"gate": "softmax_topk"},
            "has gate 'softmax_topk', but the model has 'softmax_topk_renorm'",
        ),
        ({"layers": [0]}, r"has layers \[0\], but the model has \[0, 1\]"),
    ):
        other = tiny.dense()
        xft.upcycle(
            other, **{"num_experts": 4, "top_k": 2, "gate": "softmax_topk_renorm"} | settings
        )
        other.config.save_pretrained(tmp_path / "other")
        with pytest.raises(ValueError, match=words):
            save_adapters(model, tmp_path / "none", "base", upcycled=tmp_path / "other")
    tiny.dense_config("llama").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="other has no upcycled model"):
        save_adapters(model, tmp_path / "none", "base", upcycled=tmp_path / "other")
    assert not (tmp_path / "none").exists()


def test_the_stacked_adapter_is_read_back_and_after_peft_has_trained_it(tmp_path):
    from moe_runtime.methods import xft

    model = lora_model()
    base = tiny.dense()
    xft.upcycle(base, num_experts=4, top_k=2, gate="softmax_topk_renorm")
    save_adapters(model, tmp_path / "out", "base", upcycled="moe")
    fresh = to_lora_moe(
        tiny.dense(),
        lora_layers(model)[0].config,
        rank=model.config.moe_runtime["lora"]["rank"],
        seed=7,
    )
    assert not torch.equal(tiny.logits(fresh), tiny.logits(model))
    assert load_adapters(fresh, tmp_path / "out" / "stacked") is fresh
    assert torch.equal(tiny.logits(fresh), tiny.logits(model))
    by_peft = PeftModel.from_pretrained(base, str(tmp_path / "out" / "stacked"), is_trainable=True)
    with torch.no_grad():
        for name, p in by_peft.named_parameters():
            if name.endswith("gate.modules_to_save.default.weight"):
                p.add_(0.1)
    by_peft.save_pretrained(tmp_path / "tuned")
    load_adapters(fresh, tmp_path / "tuned")
    assert tiny.distance(tiny.logits(fresh), tiny.logits(by_peft.eval())) < 1e-5
    assert tiny.distance(tiny.logits(fresh), tiny.logits(model)) > 0
    linear = lora_model(form="linear")
    with pytest.raises(ValueError, match="form must be 'block', but is 'linear'"):
        load_adapters(linear, tmp_path / "tuned")


# adapters as experts
@pytest.fixture(scope="module")
def peft_folders(tmp_path_factory):
    return adapters(tmp_path_factory.mktemp("mlp"), count=3)


@pytest.fixture(scope="module")
def with_attention(tmp_path_factory):
    names = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return adapters(
        tmp_path_factory.mktemp("attention"), count=2, use_rslora=True, target_modules=names
    )


def test_adapters_become_the_experts(peft_folders):
    vectors = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    model = to_lora_moe(
        tiny.dense(), experts=peft_folders, vectors=vectors, balance_loss="switch", method="upit"
    )
    block = model.config.moe_runtime
    assert (block["lora"]["rank"], block["lora"]["alpha"], block["method"]) == (2, 5.0, "upit")
    assert block["config"]["num_experts"] == 3 and block["config"]["top_k"] == 2
    for layer, moe in lora_layers(model).items():
        assert torch.equal(moe.gate.weight, vectors[layer]) and moe.gate.weight.requires_grad
    for e, folder in enumerate(peft_folders):
        want = tiny.logits(PeftModel.from_pretrained(tiny.dense(), str(folder)).eval())
        with forced_experts(model, [e, e]):
            assert tiny.distance(tiny.logits(model), want) < 1e-5


@FORMS
def test_equal_experts_are_that_adapter_for_any_router(form, peft_folders):
    model = to_lora_moe(
        tiny.dense(), experts=[peft_folders[0]] * 4, form=form, initializer_range=1.0
    )
    want = tiny.logits(PeftModel.from_pretrained(tiny.dense(), str(peft_folders[0])).eval())
    assert tiny.distance(tiny.logits(model), want) < 1e-5


@pytest.mark.parametrize("backbone", ["mean", "base"])
def test_pairs_on_the_attention_go_to_the_backbone(backbone, with_attention):
    model = to_lora_moe(tiny.dense(), experts=with_attention, backbone=backbone)
    merged = [
        PeftModel.from_pretrained(tiny.dense(), str(f)).merge_and_unload() for f in with_attention
    ]
    dense = tiny.dense()
    for name, weight in dense.named_parameters():
        if ".self_attn." not in name:
            continue
        if backbone == "mean":
            want = torch.stack([m.get_parameter(name) for m in merged]).mean(0)
        else:
            want = weight
        assert tiny.distance(model.get_parameter(name), want) < 1e-6, name
        if any(part in name for part in ("q_proj.weight", "o_proj.weight")):
            assert (backbone == "base") == torch.equal(model.get_parameter(name), weight)
    scaling = next(iter(lora_layers(model).values())).experts.scaling
    assert scaling == pytest.approx(5 / 2**0.5)
    for layer in lora_layers(model):  # the experts' own part is the MLP's alone
        got = model.model.layers[layer].mlp.experts.whole_weight("up_proj", 1)
        assert tiny.distance(got, merged[1].model.layers[layer].mlp.up_proj.weight) < 1e-6


def edited(folder, out, tensors=None, **values):
    """A copy of an adapter folder with other settings, and other tensors if asked."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    path = out / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    if tensors is not None:
        save_file(
            tensors(load_file(out / "adapter_model.safetensors")), out / "adapter_model.safetensors"
        )
    return out


def without(word):
    return lambda state: {key: value for key, value in state.items() if word not in key}


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param({"use_dora": True}, "use_dora in .* is True, but only", id="dora"),
        pytest.param({"bias": "all"}, "bias in .* is 'all', but only", id="bias"),
        pytest.param({"rank_pattern": {"up_proj": 4}}, "rank_pattern in", id="rank-by-layer"),
        pytest.param({"modules_to_save": ["lm_head"]}, "modules_to_save in", id="whole-modules"),
        pytest.param(
            {"init_lora_weights": "pissa"},
            "init_lora_weights in .* is 'pissa', .* path_initial",
            id="another-base",
        ),
        pytest.param(
            {"peft_type": "IA3"},
            "peft_type in .* is 'IA3', but only peft_type 'LORA'",
            id="no-lora",
        ),
        pytest.param(
            {"lora_alpha": 6},
            "scaling 3.0. All experts must match .* rank 2 and scaling 2.5",
            id="another-scaling",
        ),
        pytest.param({"r": 3}, r"with A, B of \[\[2, ", id="another-rank"),
        pytest.param(
            {"tensors": without("layers.0.mlp.up_proj")},
            "other layers, such as .*up_proj",
            id="another-layer",
        ),
        pytest.param(
            {"tensors": without("up_proj.lora_B")}, "with A, B of .* None", id="half-a-pair"
        ),
        pytest.param(
            {"tensors": lambda s: s | {"base_model.model.lm_head.weight": torch.zeros(2)}},
            "has base_model.model.lm_head",
            id="more",
        ),
        pytest.param(
            {
                "tensors": lambda s: {
                    k: v.repeat(1, 2) if "lora_A" in k else v for k, v in s.items()
                }
            },
            r"is for \[32, 96\], but the model has \[32, 48\]",
            id="another-model",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(change, words, peft_folders, tmp_path):
    change = dict(change)
    bad = edited(peft_folders[1], tmp_path / "bad", change.pop("tensors", None), **change)
    model = tiny.dense()
    before = snapshot(model)
    with pytest.raises(ValueError, match=words):
        to_lora_moe(model, experts=[peft_folders[0], bad])
    assert unchanged(model, before)


def test_models_of_another_kind_are_refused(peft_folders):
    with pytest.raises(
        ValueError,
        match=(
            "with form 'block' for model_type 'phi3'. Pass some of gate_up_proj, down_proj, and "
            "form='linear'"
        ),
    ):
        to_lora_moe(tiny.dense("phi3"))
    for wrong, words in (
        (tiny.upcycled(), "already upcycled"),
        (lora_model(), "already upcycled"),
        (
            PeftModel.from_pretrained(tiny.dense(), str(peft_folders[0])),
            "Expected a LlamaForCausalLM, .* Unwrap it",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            to_lora_moe(wrong)
    for call in (to_moe, lora_layers, lambda model: save_adapters(model, "nowhere", "base")):
        with pytest.raises(
            ValueError,
            match="with LoRA experts .*, but got MoeRuntimeLlamaForCausalLM at stage 'moe'",
        ):
            call(tiny.upcycled())
        with pytest.raises(ValueError, match="with LoRA experts .*, but got LlamaForCausalLM"):
            call(tiny.dense())
    linear = lora_model(form="linear")
    with pytest.raises(ValueError, match="form must be 'block', but is 'linear'"):
        to_moe(linear)
    with pytest.raises(
        ValueError, match="form must be 'block', but is 'linear': upcycled is 'base'"
    ):
        save_adapters(linear, "nowhere", "base", upcycled="base")
    for model in (lora_model(), linear):
        with pytest.raises(
            ValueError,
            match="The model's stage must be .* but is 'lora'. Convert it to whole experts",
        ):
            swap.moe_to_dense(model, None)
    for model in (lora_model(), lora_model(form="linear", targets=["up_proj"])):
        with pytest.raises(ValueError, match="gate has LoRA experts, but whole ones"):
            train_rows(model, {0: [1]})
