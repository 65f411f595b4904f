"""moe_runtime.methods.upit.folders: plain transformers, without moe_runtime, computes the same."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.methods.upit.assembly import assemble
from moe_runtime.methods.upit.folders import export_mixtral
from tests.hf.tiny import batch, distance, logits
from tests.support import upit

PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM
for path in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    assert type(model).__name__ == "MixtralForCausalLM"
    with torch.no_grad():
        torch.save(model(torch.load(path + "/ids.pt")).logits, path + "/logits.pt")
assert not [name for name in sys.modules if name.startswith("moe_runtime")]
"""
CASES = {
    "llama": {},
    "mistral-sliding": {"model_type": "mistral", "sliding_window": 5},
    "tied": {"tie_word_embeddings": True},
    "llama3-rope": {
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "head_dim-gelu": {"head_dim": 16, "hidden_act": "gelu"},
    "bf16": {"dtype": torch.bfloat16},
}


@pytest.fixture(scope="module")
def tokenizer():
    return upit.make_tokenizer()


@pytest.fixture(scope="module")
def vectors():
    return torch.randn(
        3,
        2,
        32,
        generator=torch.Generator().manual_seed(3),
    )


@pytest.fixture(scope="module")
def experts(tmp_path_factory, tokenizer):
    return upit.save_experts(tmp_path_factory.mktemp("experts"), tokenizer)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tokenizer, vectors):
    """Every case assembled and exported, run by one plain process: {name: (our folder,
    Mixtral's)}.
    """
    found = {}
    root = tmp_path_factory.mktemp("cases")
    for i, (name, settings) in enumerate(CASES.items()):
        experts = upit.save_experts(
            root / name,
            tokenizer,
            **settings,
        )
        if name == "tied":
            gate = "topk_softmax"
        else:
            gate = "softmax_topk_renorm"
        assemble(
            experts,
            vectors,
            root / name / "moe",
            top_k=1 + i % 3,
            gate=gate,
        )
        export_mixtral(
            root / name / "moe",
            root / name / "mixtral",
            max_shard_size="60KB",
        )
        found[name] = root / name / "moe", root / name / "mixtral"
        torch.save(
            batch(),
            root / name / "mixtral" / "ids.pt",
        )
    command = [
        sys.executable,
        "-c",
        PLAIN,
        *(str(folder) for _, folder in found.values()),
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert result.returncode == 0, result.stderr[-4000:]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_plain_transformers_has_the_same_logits(exported, name):
    ours, theirs = exported[name]
    model = AutoModelForCausalLM.from_pretrained(ours)
    want = logits(model)
    got = torch.load(theirs / "logits.pt")
    assert got.dtype == want.dtype
    assert distance(got, want) < (3e-2 if name == "bf16" else 2e-6)
    if name == "bf16":  # the weights themselves are not rounded
        mine = model.state_dict()
        stock = AutoModelForCausalLM.from_pretrained(theirs).state_dict()
        assert mine.keys() == stock.keys()
        for key in mine:
            assert torch.equal(mine[key], stock[key])


def test_the_names_are_mixtrals_old_ones(exported, tokenizer, vectors):
    found = upit.tensors_of(exported["llama"][1])
    experts = {f"block_sparse_moe.experts.{e}.w{w}.weight" for e in range(3) for w in (1, 2, 3)}
    layer = {name.partition("layers.1.")[2] for name in found if "layers.1." in name}
    assert {name for name in layer if "moe" in name} == experts | {"block_sparse_moe.gate.weight"}
    assert not [name for name in layer if "mlp" in name]
    assert torch.equal(
        found["model.layers.1.block_sparse_moe.gate.weight"],
        vectors[:, 1],
    )
    assert len(list(exported["llama"][1].glob("*.safetensors"))) > 3
    assert len(AutoTokenizer.from_pretrained(exported["llama"][1])) == len(tokenizer)


def test_each_expert_is_the_one_it_was(exported):
    ours, theirs = exported["llama"]
    found = upit.tensors_of(theirs)
    for e in range(3):
        want = upit.tensors_of(ours.parent / f"expert-{e}")
        for theirs_name, name in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            key = f"model.layers.0.block_sparse_moe.experts.{e}.{theirs_name}.weight"
            assert torch.equal(
                found[key],
                want[f"model.layers.0.mlp.{name}.weight"],
            )
