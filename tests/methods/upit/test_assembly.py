"""moe_runtime.methods.upit.assembly: experts and routers in order, the backbone's mean, all equal
is dense, or nothing.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.methods.lora import forced_experts, lora_layers
from moe_runtime.methods.upit.assembly import assemble
from tests.hf.tiny import batch, distance, logits
from tests.support import upit


@pytest.fixture(scope="module")
def tokenizer():
    return upit.make_tokenizer()


@pytest.fixture(scope="module")
def experts(tmp_path_factory, tokenizer):
    return upit.save_experts(tmp_path_factory.mktemp("experts"), tokenizer)


@pytest.fixture(scope="module")
def vectors():
    return torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(3))


def stacks_of(experts, layer: int) -> dict[str, torch.Tensor]:
    """The stacks of a layer by hand, from the experts' files."""
    tensors = [upit.tensors_of(expert) for expert in experts]
    path = f"model.layers.{layer}.mlp"
    up = [torch.cat([t[f"{path}.gate_proj.weight"], t[f"{path}.up_proj.weight"]]) for t in tensors]
    down = [t[f"{path}.down_proj.weight"] for t in tensors]
    return {
        f"{path}.experts.gate_up_proj": torch.stack(up),
        f"{path}.experts.down_proj": torch.stack(down),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_tensor_is_in_its_place(tmp_path, tokenizer, vectors, dtype):
    experts = upit.save_experts(tmp_path, tokenizer, dtype=dtype)
    receipt = assemble(experts, list(vectors), tmp_path / "moe", max_shard_size="50KB")
    found = upit.tensors_of(tmp_path / "moe")
    tensors = [upit.tensors_of(expert) for expert in experts]
    want = stacks_of(experts, 0) | stacks_of(experts, 1)
    for layer in range(2):
        want[f"model.layers.{layer}.mlp.gate.weight"] = vectors[:, layer].to(dtype)
    for name in tensors[0]:
        if ".mlp." not in name:
            want[name] = torch.stack([t[name].double() for t in tensors]).mean(0).to(dtype)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert (receipt.tensors, receipt.layers) == (len(want), [0, 1])
    assert receipt.bytes == sum(tensor.numel() * tensor.element_size() for tensor in want.values())
    assert len(list((tmp_path / "moe").glob("*.safetensors"))) > 2


def test_the_folder_loads_and_says_what_it_is(tmp_path, experts, vectors, tokenizer):
    assemble(experts, vectors, tmp_path / "moe", top_k=1, balance_loss_coef=0.02)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    config = model.config.moe_runtime["config"]
    assert model.config.moe_runtime["method"] == "upit"
    assert (config["num_experts"], config["top_k"], config["gate"]) == (3, 1, "softmax_topk_renorm")
    assert (config["balance_loss"], config["balance_loss_coef"]) == ("switch", 0.02)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "moe")) == len(tokenizer)
    assert torch.equal(model.model.layers[1].mlp.gate.weight, vectors[:, 1])
    out = model(batch(), labels=batch())
    assert out.aux_loss > 0 and out.loss.isfinite()


def test_all_experts_equal_is_the_dense_model(tmp_path, experts, vectors):
    want = logits(AutoModelForCausalLM.from_pretrained(experts[1]))
    for top_k in (1, 2, 3):
        assemble([experts[1]] * 3, vectors, tmp_path / "moe", top_k=top_k, overwrite=True)
        assert distance(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "moe")), want) < 2e-6


def test_one_expert_alone_decides_where_its_vectors_do(tmp_path, experts):
    # a router that sends every token to expert 2 whatever it is: the others' rows are far below on
    # both sides
    base = upit.tensors_of(experts[0].parent / "base")
    for path in experts:  # one backbone
        upit.change(
            path, lambda t: {name: t[name] if ".mlp." in name else base[name] for name in t}
        )
    assemble(experts, None, tmp_path / "moe", top_k=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    for chosen, expert in enumerate(experts):
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_pre_hook(
                lambda gate, args, chosen=chosen: (
                    args[0],
                    None,
                    torch.full((len(args[0]), 1), chosen, dtype=torch.int32),
                )
            )
        assert distance(logits(model), logits(AutoModelForCausalLM.from_pretrained(expert))) < 2e-6
        for layer in model.model.layers:
            layer.mlp.gate._forward_pre_hooks.clear()


def test_without_vectors_routers_are_drawn_by_the_seed(tmp_path, experts):
    found = []
    for i, seed in enumerate((1, 1, 2)):
        assemble(experts, None, tmp_path / str(i), seed=seed)
        found.append(upit.tensors_of(tmp_path / str(i))["model.layers.1.mlp.gate.weight"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert 0.01 < found[0].std() < 0.03


def test_the_backbone_may_be_the_bases(tmp_path, experts, vectors):
    base = experts[0].parent / "base"
    assemble(experts, vectors, tmp_path / "moe", backbone="base", base=base)
    found = upit.tensors_of(tmp_path / "moe")
    want = upit.tensors_of(base)
    assert all(torch.equal(found[name], want[name]) for name in want if ".mlp." not in name)
    with pytest.raises(ValueError, match="backbone 'base' requires base="):
        assemble(experts, vectors, tmp_path / "other", backbone="base")


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "phi3", "qwen2"])
def test_other_families_with_biases_tied_embeddings_and_fused_weights(
    tmp_path, tokenizer, vectors, model_type
):
    changes = {"tie_word_embeddings": model_type != "gpt_neox"} | (
        {"mlp_bias": True} if model_type == "llama" else {}
    )
    experts = upit.save_experts(tmp_path, tokenizer, 2, model_type=model_type, **changes)
    assemble([experts[0]] * 2, vectors[:2], tmp_path / "same")
    got = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "same"))
    assert distance(got, logits(AutoModelForCausalLM.from_pretrained(experts[0]))) < 2e-6
    assemble(experts, vectors[:2], tmp_path / "moe")
    assert distance(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "moe")), got) > 1e-3


@pytest.mark.parametrize(
    "targets", [upit.ADAPTED, (*upit.ADAPTED, "v_proj")], ids=["mlp", "attention-too"]
)
@pytest.mark.parametrize("backbone", ["mean", "base"])
def test_adapters_become_lora_experts(tmp_path, experts, vectors, targets, backbone):
    base = experts[0].parent / "base"
    adapters = upit.save_adapters(tmp_path, base, targets=targets)
    receipt = assemble(adapters, vectors, tmp_path / "moe", base=base, backbone=backbone)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert all(
        torch.equal(m.gate.weight, vectors[:, layer]) for layer, m in lora_layers(model).items()
    )
    assert receipt.layers == [0, 1] and (tmp_path / "moe" / "tokenizer.json").is_file()
    assert (
        model.config.moe_runtime["method"] == "upit"
        and model.config.moe_runtime["config"]["balance_loss"] == "switch"
    )
    want = AutoModelForCausalLM.from_pretrained(base)
    weights = dict(want.named_parameters())
    pairs = upit.tensors_of(adapters[1])
    with torch.no_grad():
        for path in {name.partition(".lora_")[0] for name in pairs}:
            # expert 1's own of the MLPs; of attention the mean of all, or nothing
            own = [adapters[1]] if ".mlp." in path else adapters * (backbone == "mean")
            tensors = [upit.tensors_of(folder) for folder in own]
            change = sum(
                2.0 * t[f"{path}.lora_B.weight"] @ t[f"{path}.lora_A.weight"] for t in tensors
            )
            weight = weights[f"{path.removeprefix('base_model.model.')}.weight"]
            weight.add_(change / max(len(own), 1))
    with forced_experts(model, [1, 1]):
        assert distance(logits(model), logits(want)) < 3e-6


def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path, experts, vectors, tokenizer):
    out = tmp_path / "moe"
    other = upit.save_experts(tmp_path / "other", tokenizer, 1, rope_theta=5e4)[0]
    wide = upit.save_experts(tmp_path / "wide", tokenizer, 1, dtype=torch.bfloat16)[0]
    adapter = upit.save_adapters(tmp_path, experts[0].parent / "base", 1)[0]
    for arguments, settings, message in [
        (([experts[0], other], vectors[:2]), {}, "rope_parameters of .*other.* is .*50000"),
        (([experts[0], wide], vectors[:2]), {}, "with a wrong dtype"),
        (
            (experts, vectors[:2]),
            {},
            (
                r"vectors must be finite and \[2, 32\] for each of the "
                r"3 "
                r"experts, "
                r"but "
                r"are "
                r"\[\(2, "
                r"32\), \(2, 32\)\]"
            ),
        ),
        ((experts, vectors[:, :1]), {}, r"vectors must be finite and \[2, 32\]"),
        ((experts, vectors / 0), {}, r"those of experts \[0, 1, 2\] have NaN or infinite"),
        (
            (experts, vectors),
            {"gate": "xft"},
            "Gate 'xft' has a shared expert, which has no routing vector",
        ),
        ((experts, vectors), {"top_k": 4}, "top_k must be at most num_experts .3., but got 4"),
        ((experts, vectors), {"backbone": "median"}, "backbone must be"),
        (
            ([experts[0], adapter], vectors[:2]),
            {},
            r"experts must be .* either all adapters or none, but got \[ffn, lora\]",
        ),
        (([], None), {}, r"experts must be one or more folders, .*but got \[\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            assemble(*arguments, out, **settings)
        assert not out.exists()
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(ValueError, match="already exists"):
        assemble(experts, vectors, out)
    assert [path.name for path in out.iterdir()] == ["mine"]
