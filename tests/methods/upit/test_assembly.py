"""moe_runtime.methods.upit.assembly: experts and routers in order, the backbone's mean, equal
experts give the dense model, atomic output.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.methods.lora import lora_layers
from moe_runtime.methods.upit.assembly import assemble
from tests.hf.tiny import batch, distance, logits
from tests.support import upit
from tests.support.checkpoints import assert_equal
from tests.support.lora_models import equalize


@pytest.fixture(scope="module")
def tokenizer():
    return upit.make_tokenizer()


@pytest.fixture(scope="module")
def experts(tmp_path_factory, tokenizer):
    return upit.save_experts(tmp_path_factory.mktemp("experts"), tokenizer)


@pytest.fixture(scope="module")
def vectors():
    return torch.randn(
        3,
        2,
        32,
        generator=torch.Generator().manual_seed(3),
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16],
    ids=["fp32", "bf16"],
)
def test_every_tensor_is_in_its_place(tmp_path, tokenizer, vectors, dtype):
    experts = upit.save_experts(tmp_path, tokenizer, dtype=dtype)
    receipt = assemble(
        experts,
        list(vectors),
        tmp_path / "moe",
        max_shard_size="50KB",
    )
    sources = [upit.tensors_of(expert) for expert in experts]

    def stack(name: str) -> torch.Tensor:
        return torch.stack([source[name] for source in sources])

    expected = {}
    for name in sources[0]:
        if ".mlp." not in name:
            expected[name] = stack(name).double().mean(0).to(dtype)
    for layer in range(2):
        path = f"model.layers.{layer}.mlp"
        both = (stack(f"{path}.gate_proj.weight"), stack(f"{path}.up_proj.weight"))
        expected[f"{path}.experts.gate_up_proj"] = torch.cat(both, 1)
        expected[f"{path}.experts.down_proj"] = stack(f"{path}.down_proj.weight")
        expected[f"{path}.gate.weight"] = vectors[:, layer].to(dtype)
    assert_equal(
        upit.tensors_of(tmp_path / "moe"),
        expected,
    )
    assert receipt.tensors == len(expected)
    assert receipt.layers == [0, 1]
    assert receipt.bytes == sum(tensor.nbytes for tensor in expected.values())
    assert len(list((tmp_path / "moe").glob("*.safetensors"))) > 2


def test_the_folder_loads_and_says_what_it_is(tmp_path, experts, vectors, tokenizer):
    assemble(
        experts,
        vectors,
        tmp_path / "moe",
        top_k=1,
        balance_loss_coef=0.02,
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert model.config.moe_runtime["method"] == "upit"
    expected = {
        "num_experts": 3,
        "top_k": 1,
        "gate": "softmax_topk_renorm",
        "balance_loss": "switch",
        "balance_loss_coef": 0.02,
    }
    assert expected.items() <= model.config.moe_runtime["config"].items()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "moe")) == len(tokenizer)
    out = model(batch(), labels=batch())
    assert out.aux_loss > 0
    assert out.loss.isfinite()


def test_without_vectors_routers_are_drawn_by_the_seed(tmp_path, experts):
    def router(name: str, seed: int) -> torch.Tensor:
        assemble(
            experts,
            None,
            tmp_path / name,
            seed=seed,
        )
        return upit.tensors_of(tmp_path / name)["model.layers.1.mlp.gate.weight"]

    first = router("first", 1)
    assert torch.equal(router("again", 1), first)
    assert not torch.equal(router("other", 2), first)
    assert 0.01 < first.std() < 0.03


def test_the_backbone_may_be_the_bases(tmp_path, experts, vectors):
    base = experts[0].parent / "base"
    assemble(
        experts,
        vectors,
        tmp_path / "moe",
        backbone="base",
        base=base,
    )
    moe = upit.tensors_of(tmp_path / "moe")
    for name, tensor in upit.tensors_of(base).items():
        if ".mlp." not in name:
            assert torch.equal(moe[name], tensor)
    with pytest.raises(ValueError, match="backbone 'base' requires base="):
        assemble(experts, vectors, tmp_path / "other", backbone="base")


@pytest.mark.parametrize(
    "model_type, changes",
    [
        ("llama", {"tie_word_embeddings": True, "mlp_bias": True}),
        ("gpt_neox", {}),
        ("phi3", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_other_families_with_biases_tied_embeddings_and_fused_weights(
    tmp_path, tokenizer, vectors, model_type, changes
):
    experts = upit.save_experts(
        tmp_path,
        tokenizer,
        2,
        model_type=model_type,
        **changes,
    )
    assemble(
        [experts[0]] * 2,
        vectors[:2],
        tmp_path / "same",
    )
    assemble(experts, vectors[:2], tmp_path / "moe")
    folders = (experts[0], tmp_path / "same", tmp_path / "moe")
    dense, same, moe = (logits(AutoModelForCausalLM.from_pretrained(one)) for one in folders)
    assert distance(same, dense) < 2e-6
    assert distance(moe, dense) > 1e-3


@pytest.mark.parametrize("backbone", ["mean", "base"])
def test_adapters_become_lora_experts(tmp_path, experts, vectors, backbone):
    base = experts[0].parent / "base"
    adapters = upit.save_adapters(
        tmp_path,
        base,
        targets=(*upit.ADAPTED, "v_proj"),
    )
    receipt = assemble(
        adapters,
        vectors,
        tmp_path / "moe",
        base=base,
        backbone=backbone,
    )
    assert receipt.layers == [0, 1]
    assert (tmp_path / "moe" / "tokenizer.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    for layer, module in lora_layers(model).items():
        assert torch.equal(
            module.gate.weight,
            vectors[:, layer],
        )
    assert model.config.moe_runtime["method"] == "upit"
    assert model.config.moe_runtime["config"]["balance_loss"] == "switch"
    expected = AutoModelForCausalLM.from_pretrained(base)
    pairs = [upit.tensors_of(folder) for folder in adapters]
    for name, weight in expected.named_parameters():
        path = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{path}.lora_A.weight" not in pairs[1]:
            continue
        changes = [2.0 * t[f"{path}.lora_B.weight"] @ t[f"{path}.lora_A.weight"] for t in pairs]
        # expert 1's own pairs on the MLPs; on attention the mean of all, or nothing
        if ".mlp." in path:
            weight.data += changes[1]
        elif backbone == "mean":
            weight.data += sum(changes) / len(changes)
    equalize(model, 1)
    assert distance(logits(model), logits(expected)) < 3e-6


def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path, experts, vectors, tokenizer):
    out = tmp_path / "moe"
    other = upit.save_experts(
        tmp_path / "other",
        tokenizer,
        1,
        rope_theta=5e4,
    )[0]
    wide = upit.save_experts(
        tmp_path / "wide",
        tokenizer,
        1,
        dtype=torch.bfloat16,
    )[0]
    adapter = upit.save_adapters(
        tmp_path,
        experts[0].parent / "base",
        1,
    )[0]
    two = vectors[:2]
    for folders, given, settings, message in (
        ([experts[0], other], two, {}, "rope_parameters of .*other.* is .*50000"),
        ([experts[0], wide], two, {}, "with a wrong shape or dtype"),
        (experts, two, {}, r"vectors must be finite and \[2, 32\] .* 3 experts, but"),
        (experts, vectors / 0, {}, r"those of experts \[0, 1, 2\] have NaN or infinite"),
        (experts, vectors, {"gate": "xft"}, "Gate 'xft' has a shared expert"),
        (experts, vectors, {"top_k": 4}, "top_k must be at most num_experts .3., but got 4"),
        (experts, vectors, {"backbone": "median"}, "backbone must be"),
        ([experts[0], adapter], two, {}, r"either all adapters or none, but got \[ffn, lora\]"),
        ([], None, {}, r"experts must be one or more folders, .*but got \[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            assemble(folders, given, out, **settings)
        assert not out.exists()
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(ValueError, match="already exists"):
        assemble(experts, vectors, out)
