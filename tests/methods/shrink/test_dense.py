"""moe_runtime.methods.shrink.dense: the same function where all experts are chosen equally, and the
way from dense to experts and back.
"""

import pytest
import torch
import transformers

from moe_runtime.hf.models.stock import export_stock
from moe_runtime.io.files import read_json
from moe_runtime.methods.shrink import dense_folder, prune_folder
from moe_runtime.methods.xft.folders import upcycle_folder
from tests.hf import stock as every
from tests.hf.tiny import dense
from tests.methods.shrink.shrinks import NOT_CUT, build, logits_of, saved, statistics_of
from tests.support.checkpoints import assert_equal, tensors

EVERY_EXPERT = {
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k"), 8),
    "norm_topk_prob": True,
}
DENSE = {
    "afmoe": "Afmoe",
    "beam": "Beam",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v32": "DeepseekV32",
    "dots1": "Dots1",
    "dots3_note": "Dots3Note",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "exaone_moe": "ExaoneMoe",
    "flex_olmo": "Olmo2",
    "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite",
    "glm4v_moe": "Glm4vMoe",
    "glm_moe_dsa": "GlmMoeDsa",
    "granitemoe": "Granite",
    "hy_v3": "HYV3",
    "laguna": "Laguna",
    "mellum": "Mellum",
    "mistral4": "Mistral4",
    "mixtral": "Mistral",
    "qwen3_moe": "Qwen3",
    "qwen3_omni_moe": "Qwen3OmniMoeThinker",
    "qwen3_vl_moe": "Qwen3VLMoe",
}


def with_equal_gates(family: str):
    """Build a model that sends every token to all experts with equal gates."""
    model = build(family, groups=1, **EVERY_EXPERT)
    for name, parameter in model.named_parameters():
        if ("gate.weight" in name or "router" in name) and len(parameter) == 8:
            parameter.data.zero_()
    return model


def load_dense(folder):
    """Load a dense model by the class that its config names."""
    architecture = read_json(folder / "config.json")["architectures"][0]
    cls = getattr(transformers, architecture)
    model, info = cls.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("family", [f for f in every.FAMILIES if f not in NOT_CUT])
def test_all_experts_with_equal_gates_are_one_mlp(tmp_path, family):
    model = with_equal_gates(family)
    source = saved(model, tmp_path / "source")
    statistics = statistics_of(model)
    if family not in DENSE:
        with pytest.raises(ValueError, match=r"no dense|computes the same"):
            dense_folder(source, statistics, tmp_path / "dense", 8)
        assert not (tmp_path / "dense").exists()
        return
    receipt = dense_folder(source, statistics, tmp_path / "dense", 8)
    loaded = load_dense(tmp_path / "dense")
    assert type(loaded).__name__.startswith(DENSE[family])
    assert receipt.parameters == loaded.num_parameters()
    with torch.no_grad():
        logits = loaded(**every.batch()).logits
    assert (logits - logits_of(model)).norm() < 1e-5 * logits.norm()


def test_experts_stand_one_after_the_other(tmp_path):
    model = build("qwen3_moe", norm_topk_prob=True)
    source = saved(model, tmp_path / "source")
    receipt = dense_folder(source, statistics_of(model), tmp_path / "dense", 3, by="cp")
    mlps = [layer.mlp for layer in load_dense(tmp_path / "dense").model.layers]
    for number, ids in receipt.facts["kept"].items():
        experts = model.model.layers[number].mlp.experts
        gate, up = experts.gate_up_proj[ids].chunk(2, dim=1)
        mean_down = torch.cat([*experts.down_proj[ids]], 1) / 3
        mlp = mlps[number]
        assert torch.equal(mlp.gate_proj.weight, gate.flatten(0, 1))
        assert torch.equal(mlp.up_proj.weight, up.flatten(0, 1))
        assert torch.allclose(mlp.down_proj.weight, mean_down)


def test_a_dense_model_comes_back_bit_for_bit(tmp_path):
    base = dense("mistral", sliding_window=None)
    base.save_pretrained(tmp_path / "base")
    upcycle_folder(
        tmp_path / "base", tmp_path / "moe", num_experts=4, top_k=2, gate="softmax_topk_renorm"
    )
    export_stock(tmp_path / "moe", tmp_path / "mixtral", to="mixtral")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral")
    statistics = statistics_of(model)
    dense_folder(tmp_path / "mixtral", statistics, tmp_path / "dense", 1)
    assert_equal(tensors(tmp_path / "dense"), tensors(tmp_path / "base"))
    # one expert, which gets every token with weight 1, is the MLP too
    prune_folder(tmp_path / "mixtral", statistics, tmp_path / "one", 1, top_k=1)
    one = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert torch.allclose(logits_of(one), base(**every.batch()).logits, atol=1e-5)


def test_refusals_write_nothing(tmp_path):
    model = build("qwen3_moe")
    source = saved(model, tmp_path / "source")
    routed = statistics_of(model, outputs=False)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="keep must be from 1 to 8"):
        dense_folder(source, routed, out, 9, by="cp")
    with pytest.raises(ValueError, match="lack norm, seen, products. Score the model again"):
        dense_folder(source, routed, out, 2)
    with pytest.raises(ValueError, match="by must be one of cp, acp, do-acp"):
        dense_folder(source, routed, out, 2, by="reap")
    assert not out.exists()
