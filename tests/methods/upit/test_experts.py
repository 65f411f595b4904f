"""moe_runtime.methods.upit.experts: the three kinds read alike, and which checkpoints are
chosen.
"""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.methods.upit.checkpoints import fingerprint, save_expert
from moe_runtime.methods.upit.experts import (
    choose_checkpoints,
    materialize,
    open_expert,
    saved_experts,
)
from tests.hf.tiny import dense, logits
from tests.support.checkpoints import tensors


def stirred(base: Path, seed: int, only: str = ".mlp."):
    """The model of `base`, as if trained: noise on the parameters whose names have `only`."""
    model = AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 50)
    return model


def record_of(base: Path) -> dict:
    with Checkpoint(base) as checkpoint:
        return {"base": str(base), "base_hash": fingerprint(checkpoint)}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """base, and the same expert as a whole model, a delta, and an adapter of its own."""
    import peft

    folder = tmp_path_factory.mktemp("experts")
    dense("llama", tie_word_embeddings=True).save_pretrained(folder / "base")
    model = stirred(folder / "base", 1)
    save_expert(model, folder / "ffn", max_shard_size=20_000)
    save_expert(model, folder / "delta", base=folder / "base", record=record_of(folder / "base"))
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "gate_proj", "down_proj"], init_lora_weights=False
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    save_expert(peft.get_peft_model(model, config), folder / "lora")
    return folder


def test_a_delta_reads_as_the_whole_model(place):
    with open_expert(place / "ffn") as whole, open_expert(place / "delta") as delta:
        assert (whole.kind, delta.kind) == ("ffn", "delta")
        assert whole.specs() == delta.specs() and set(whole.keys()) == set(delta.keys())
        for key in whole.keys():
            assert torch.equal(whole.get(key), delta.get(key)), key
            assert torch.equal(
                whole.get_rows(key, slice(2, 7)), delta.get_rows(key, slice(2, 7))
            ), key
            assert delta.differs(key) == delta.is_ffn(key) == whole.is_ffn(key) == (".mlp." in key)
        assert delta.config.to_diff_dict() == whole.config.to_diff_dict()


def test_a_delta_is_as_large_as_what_differs(place):
    sizes = {
        name: sum(f.stat().st_size for f in (place / name).glob("*.safetensors"))
        for name in ("ffn", "delta")
    }
    with open_expert(place / "ffn") as expert:
        mlps = sum(spec.nbytes for key, spec in expert.specs().items() if expert.is_ffn(key))
    assert mlps < sizes["delta"] < mlps + 4000 < sizes["ffn"]


def test_an_adapter_of_peft(place):
    with open_expert(place / "lora") as expert:
        assert expert.kind == "lora" and str(expert.base) == str(place / "base")
        assert expert.adapter["r"] == 2 and expert.config.hidden_size == 32
        ffn = [key for key in expert.keys() if expert.is_ffn(key)]
        assert len(expert.keys()) == 2 * 2 * 3 and len(ffn) == 2 * 2 * 2  # q_proj is none
        place_of = expert.locate("base_model.model.model.layers.1.mlp.gate_proj.lora_B.weight")
        assert (place_of.layer, place_of.name, place_of.part) == (1, "gate_up_proj", 0)
        assert expert.get(ffn[0]).shape == expert.specs()[ffn[0]].shape


def test_materialize(place, tmp_path):
    materialize(place / "delta", tmp_path / "out", max_shard_size="20KB")
    assert tensors(tmp_path / "out").keys() == tensors(place / "ffn").keys()
    models = [
        AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", place / "ffn")
    ]
    assert torch.equal(*map(logits, models))
    assert not (tmp_path / "out" / "expert.json").exists()
    with pytest.raises(ValueError, match="already exists"):
        materialize(place / "delta", tmp_path / "out")
    with pytest.raises(ValueError, match="Expected a delta, but expert .* is an adapter"):
        materialize(place / "lora", tmp_path / "other")


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param(lambda f: shutil.rmtree(f), "is not a folder", id="no folder"),
        pytest.param(lambda f: (f / "config.json").unlink(), "has no config.json", id="no model"),
        pytest.param(
            lambda f: (f / "expert.json").write_text('{"format": 2, "kind": "ffn"}'),
            "format 2",
            id="format",
        ),
        pytest.param(
            lambda f: (f / "expert.json").write_text('{"format": 1, "kind": "x"}'),
            "kind 'x'",
            id="kind",
        ),
        pytest.param(
            lambda f: (f / "model.safetensors").unlink(),
            "Expected model.safetensors",
            id="no weights",
        ),
    ],
)
def test_bad_folders_are_named(place, tmp_path, change, words):
    save_expert(AutoModelForCausalLM.from_pretrained(place / "base"), tmp_path / "expert")
    change(tmp_path / "expert")
    with pytest.raises(ValueError) as error, open_expert(tmp_path / "expert") as expert:
        expert.is_ffn(expert.keys()[0])
    assert words in str(error.value)


def folders(tmp_path: Path, names) -> Path:
    for name in names:
        (tmp_path / name).mkdir()
    return tmp_path


def test_experts_are_in_the_order_of_their_steps(tmp_path):
    place = folders(
        tmp_path, ["step-20", "step-100", "step-3", "checkpoint-5", ".step-30.tmp-1", "step-x"]
    )
    assert [path.name for path in saved_experts(place)] == ["step-3", "step-20", "step-100"]
    (
        shutil.rmtree(place / "step-3"),
        shutil.rmtree(place / "step-20"),
        shutil.rmtree(place / "step-100"),
    )
    assert [path.name for path in saved_experts(place)] == ["checkpoint-5"]
    assert saved_experts(place / "nowhere") == []


@pytest.mark.parametrize(
    "which, count, want",
    [
        ("back", 3, [6, 7, 8]),
        ("front", 3, [1, 2, 3]),
        ("uniform", 4, [2, 4, 6, 8]),
        ("uniform", 3, [2, 5, 8]),
        ("uniform", 1, [8]),
        ("uniform", 8, [1, 2, 3, 4, 5, 6, 7, 8]),
        ("back", 8, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_choose_checkpoints(tmp_path, which, count, want):
    place = folders(tmp_path, [f"step-{n}" for n in range(1, 9)])
    assert [path.name for path in choose_checkpoints(place, count, which)] == [
        f"step-{n}" for n in want
    ]
    assert choose_checkpoints([str(path) for path in saved_experts(place)], count, which) == [
        place / f"step-{n}" for n in want
    ]


def test_a_bad_choice_is_named(tmp_path):
    place = folders(tmp_path, ["step-1", "step-2"])
    for count in (0, 3):
        with pytest.raises(
            ValueError, match=f"count must be from 1 to the 2 checkpoints in .*, but got {count}"
        ):
            choose_checkpoints(place, count)
    with pytest.raises(ValueError, match="which must be .*but got 'middle'"):
        choose_checkpoints(place, 1, "middle")
