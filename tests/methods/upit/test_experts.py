"""moe_runtime.methods.upit.experts: both kinds are read in the same way, and which checkpoints are
chosen.
"""

import shutil
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.methods.upit.checkpoints import save_expert
from moe_runtime.methods.upit.experts import choose_checkpoints, open_expert, saved_experts
from tests.hf.tiny import dense
from tests.support.checkpoints import tensors


def perturbed(base: Path, seed: int, only: str = ".mlp."):
    """Return the model of `base` as if it were trained: noise on the parameters with `only` in
    their names.
    """
    model = AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 50)
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A base, an expert of it as a whole model, and an adapter."""
    folder = tmp_path_factory.mktemp("experts")
    base = folder / "base"
    dense("llama", tie_word_embeddings=True).save_pretrained(base)
    model = perturbed(base, 1)
    save_expert(model, folder / "ffn", max_shard_size=20_000)
    targets = ["q_proj", "gate_proj", "down_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model = AutoModelForCausalLM.from_pretrained(base)
    save_expert(
        peft.get_peft_model(model, config),
        folder / "lora",
    )
    return folder


def test_an_adapter_of_peft(place):
    expert = open_expert(place / "lora")
    assert expert.kind == "lora"
    assert str(expert.base) == str(place / "base")
    assert expert.adapter["r"] == 2
    assert expert.config.hidden_size == 32
    ffn = [key for key in expert.keys() if expert.is_ffn(key)]
    assert len(ffn) == 2 * 2 * 2  # q_proj is not an MLP matrix
    assert len(expert.keys()) == 2 * 2 * 3
    place_of = expert.locate("base_model.model.model.layers.1.mlp.gate_proj.lora_B.weight")
    assert (place_of.layer, place_of.name, place_of.part) == (1, "gate_up_proj", 0)
    assert expert.get(ffn[0]).shape == expert.specs()[ffn[0]].shape


def test_a_whole_model(place):
    expert = open_expert(place / "ffn")
    for key, tensor in tensors(place / "ffn").items():
        assert torch.equal(expert.get(key), tensor)
        assert torch.equal(expert.get_rows(key, slice(2, 7)), tensor[2:7])
        assert expert.is_ffn(key) == (".mlp." in key)


@pytest.mark.parametrize(
    "file, text, words",
    [
        (".", None, "is not a folder"),
        ("config.json", None, "has no config.json"),
        ("expert.json", '{"format": 2, "kind": "ffn"}', "format 2"),
        ("expert.json", '{"format": 1, "kind": "x"}', "kind 'x'"),
        ("model.safetensors", None, "Expected model.safetensors"),
    ],
)
def test_bad_folders_are_named(place, tmp_path, file, text, words):
    folder = tmp_path / "expert"
    save_expert(
        AutoModelForCausalLM.from_pretrained(place / "base"),
        folder,
    )
    if text is not None:
        (folder / file).write_text(text)
    elif file == ".":
        shutil.rmtree(folder)
    else:
        (folder / file).unlink()
    with pytest.raises(ValueError, match=words):
        expert = open_expert(folder)
        expert.is_ffn(expert.keys()[0])


def test_experts_are_in_the_order_of_their_steps(tmp_path):
    for name in ("checkpoint-5", ".step-30.tmp-1", "step-x"):
        (tmp_path / name).mkdir()
    assert [path.name for path in saved_experts(tmp_path)] == ["checkpoint-5"]
    for name in ("step-20", "step-100", "step-3"):
        (tmp_path / name).mkdir()
    assert [path.name for path in saved_experts(tmp_path)] == ["step-3", "step-20", "step-100"]
    assert saved_experts(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    "which, count, steps",
    [
        ("back", 3, [6, 7, 8]),
        ("front", 3, [1, 2, 3]),
        ("uniform", 4, [2, 4, 6, 8]),
        ("uniform", 3, [2, 5, 8]),
        ("uniform", 1, [8]),
        ("uniform", 8, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_choose_checkpoints(tmp_path, which, count, steps):
    folders = [tmp_path / f"step-{n}" for n in range(1, 9)]
    for folder in folders:
        folder.mkdir()
    expected = [tmp_path / f"step-{n}" for n in steps]
    assert list(choose_checkpoints(tmp_path, count, which)) == expected
    assert (
        list(
            choose_checkpoints(
                [str(path) for path in folders],
                count,
                which,
            )
        )
        == expected
    )


def test_a_bad_choice_is_named(tmp_path):
    (tmp_path / "step-1").mkdir()
    for count in (0, 2):
        with pytest.raises(ValueError, match=f"count must be from 1 to the 1 .*got {count}"):
            choose_checkpoints(tmp_path, count)
    with pytest.raises(ValueError, match="which must be .*but got 'middle'"):
        choose_checkpoints(tmp_path, 1, "middle")
