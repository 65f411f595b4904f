"""moe_runtime.methods.xft.folders: the same as in memory, bit for bit, in bounded memory, or
nothing at all.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from moe_runtime.hf.models.families import FAMILIES
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.methods import xft
from moe_runtime.methods.xft import folders as xft_folders
from tests.hf.tiny import dense, distance, logits

SMALL = {"num_experts": 4, "top_k": 3}


def assert_same(a: Path, b: Path) -> None:
    """Equal tensors, equal names, equal config.json but for the old rotary keys, which a stock
    model's own save lacks.
    """
    first = Checkpoint(a)
    second = Checkpoint(b)
    assert set(first.keys()) == set(second.keys())
    assert all(torch.equal(first.get(key), second.get(key)) for key in first.keys())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (a, b)]
    legacy = {
        "rope_theta",
        "rope_scaling",
        "rotary_emb_base",
        "rotary_pct",
        "partial_rotary_factor",
        "rope_local_base_freq",
    }
    assert {k: v for k, v in configs[0].items() if k not in legacy} == {
        k: v for k, v in configs[1].items() if k not in legacy
    }


def stir(folder: Path) -> None:
    """Stand in for tuning: random noise on every tensor of a folder."""
    for file in folder.glob("*.safetensors"):
        with Checkpoint(folder) as source:
            tensors = {key: source.get(key) for key in source.keys()}
        generator = torch.Generator().manual_seed(1)
        noisy = {
            k: t + torch.randn(t.shape, generator=generator).to(t.dtype) * 0.05
            for k, t in tensors.items()
        }
        save_file(noisy, file, metadata={"format": "pt"})


@pytest.fixture
def base(tmp_path):
    dense("llama").save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def moe(base, tmp_path):
    xft_folders.upcycle_folder(base, tmp_path / "moe", **SMALL)
    stir(tmp_path / "moe")
    return tmp_path / "moe"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_way_equals_the_way_in_memory(tmp_path, family, dtype):
    dense(family, dtype=dtype).save_pretrained(tmp_path / "dense")
    receipt = xft_folders.upcycle_folder(tmp_path / "dense", tmp_path / "moe", **SMALL)
    assert receipt.mlp_error < 1e-5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=dtype)
    xft.upcycle(model, **SMALL)
    model.save_pretrained(tmp_path / "moe-in-memory")
    assert_same(tmp_path / "moe", tmp_path / "moe-in-memory")

    stir(tmp_path / "moe")
    xft_folders.mergeable_folder(tmp_path / "moe", tmp_path / "mergeable")
    model = xft.to_mergeable(AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=dtype))
    model.save_pretrained(tmp_path / "mergeable-in-memory")
    assert_same(tmp_path / "mergeable", tmp_path / "mergeable-in-memory")

    stir(tmp_path / "mergeable")
    receipt = xft_folders.merge_folder(tmp_path / "mergeable", tmp_path / "merged")
    assert receipt.mixing.startswith("learned coefficients, up to ")
    xft_folders.mergeable_folder(tmp_path / "moe", tmp_path / "unlearned")
    unlearned = xft_folders.merge_folder(
        tmp_path / "unlearned", tmp_path / "unlearned-merged"
    ).mixing
    assert unlearned.startswith("initial coefficients: learning has moved them by ")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mergeable", dtype=dtype)
    want = logits(model)
    xft.merge(model).save_pretrained(tmp_path / "merged-in-memory")
    assert_same(tmp_path / "merged", tmp_path / "merged-in-memory")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype)
    assert type(merged).__module__.startswith("transformers.models")
    assert distance(logits(merged), want) <= (1e-5 if dtype == torch.float32 else 2e-2)
    assert len(receipt.alpha) == 2 and all(abs(sum(row) - 1) < 1e-6 for row in receipt.alpha)


def test_only_mlp_tensors_differ_from_the_base(base, moe, tmp_path):
    """A merged folder has the base's key names, and the base's bytes where tuning did not touch
    them.
    """
    shutil.rmtree(moe)
    xft_folders.upcycle_folder(base, moe, **SMALL)
    xft_folders.merge_folder(moe, tmp_path / "merged")
    first = Checkpoint(base)
    second = Checkpoint(tmp_path / "merged")
    assert set(first.keys()) == set(second.keys())
    assert all(torch.equal(first.get(k), second.get(k)) for k in first.keys() if ".mlp." not in k)


def test_shards_and_side_files(base, tmp_path):
    (base / "tokenizer.json").write_text("{}")
    (base / "pytorch_model.bin").write_bytes(b"not to be copied")
    receipt = xft_folders.upcycle_folder(base, tmp_path / "moe", max_shard_size="20KB", **SMALL)
    assert (
        len(list((tmp_path / "moe").glob("*.safetensors"))) > 3
        and "tokenizer.json" in receipt.side_files
    )
    assert not (tmp_path / "moe" / "pytorch_model.bin").exists()
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path / "moe")).isfinite().all()


def test_what_a_training_says_of_its_weights_stays_with_them(moe, tmp_path):
    stays = {
        "router_stats.csv",
        "README.md",
        "trainer_state.json",
        "all_results.json",
        "adapter_config.json",
    }
    goes = {"tokenizer.json", "LICENSE", "chat_template.jinja"}
    for name in stays | goes:
        (moe / name).write_text("{}")
    for convert, target in (
        (xft_folders.mergeable_folder, "mergeable"),
        (xft_folders.merge_folder, "merged"),
    ):
        receipt = convert(moe, tmp_path / target)
        there = {path.name for path in (tmp_path / target).iterdir()}
        assert goes <= there and goes <= set(receipt.side_files) and not stays & there


def test_alpha_uniform_and_by_hand(moe, tmp_path):
    xft_folders.merge_folder(moe, tmp_path / "uniform", alpha="uniform")
    xft_folders.merge_folder(moe, tmp_path / "hand", alpha=[0.25] * 4)
    assert_same(tmp_path / "uniform", tmp_path / "hand")


def test_alpha_of_each_layer_is_what_memory_makes_of_it(moe, tmp_path):
    alpha = torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0]])
    assert xft_folders.merge_folder(moe, tmp_path / "folders", alpha=alpha).alpha == alpha.tolist()
    xft.merge(AutoModelForCausalLM.from_pretrained(moe), alpha=alpha).save_pretrained(
        tmp_path / "memory"
    )
    assert_same(tmp_path / "folders", tmp_path / "memory")


def test_comparison_of_folders(base, moe, tmp_path):
    xft_folders.upcycle_folder(base, tmp_path / "fresh", **SMALL)
    assert (
        xft_folders.compare_folders(base, tmp_path / "fresh")
        < 1e-5
        < xft_folders.compare_folders(base, moe)
    )


def edit_tensors(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    with Checkpoint(folder) as source:
        tensors = {key: source.get(key) for key in source.keys()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


KEY = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "change, match",
    [
        pytest.param(lambda t: t.pop(KEY), KEY, id="missing"),
        pytest.param(lambda t: t.pop(QUERY), QUERY, id="missing, of no MLP"),
        pytest.param(
            lambda t: t.update({QUERY + "x": t[QUERY].clone()}), QUERY + "x", id="extra, of no MLP"
        ),
        pytest.param(
            lambda t: t.update({"model.norm.weight": torch.ones(5)}),
            r"model.norm.weight.*5",
            id="a norm cut short",
        ),
        pytest.param(lambda t: t.update({KEY: t[KEY][:, :5].clone()}), KEY, id="misshapen"),
        pytest.param(lambda t: t.update({KEY: t[KEY].half()}), KEY, id="another dtype"),
        pytest.param(
            lambda t: t.update({"model.layers.7.mlp.up_proj.weight": t[KEY].clone()}),
            "layers.7",
            id="a layer too many",
        ),
    ],
)
def test_wrong_tensors_are_named_and_nothing_is_written(base, tmp_path, change, match):
    edit_tensors(base, change)
    with pytest.raises(ValueError, match=match):
        xft_folders.upcycle_folder(base, tmp_path / "moe", **SMALL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense"]


def test_a_rate_that_would_have_no_effect_is_refused(moe, tmp_path):
    xft_folders.mergeable_folder(moe, tmp_path / "mix")
    for source, options in ((tmp_path / "mix", {}), (moe, {"alpha": "uniform"})):
        with pytest.raises(ValueError, match="shared_rate must be None, but got 0.5"):
            xft_folders.merge_folder(source, tmp_path / "out", shared_rate=0.5, **options)
    assert not (tmp_path / "out").exists()


def test_layers_that_stay_dense(base, tmp_path):
    receipt = xft_folders.upcycle_folder(base, tmp_path / "moe", layers=[1], **SMALL)
    assert receipt.layers == [1] and receipt.mlp_error < 1e-5
    assert xft_folders.compare_folders(base, tmp_path / "moe") < 1e-5
    assert xft_folders.merge_folder(tmp_path / "moe", tmp_path / "merged").layers == [1]


def test_wrong_stage_folder_and_settings(base, moe, tmp_path):
    xft_folders.mergeable_folder(moe, tmp_path / "mergeable")
    for call, match in (
        (
            lambda: xft_folders.mergeable_folder(tmp_path / "mergeable", tmp_path / "out"),
            "a model of stage 'moe'",
        ),
        (
            lambda: xft_folders.merge_folder(base, tmp_path / "out"),
            "Expected the folder of an upcycled model",
        ),
        (lambda: xft_folders.upcycle_folder(moe, tmp_path / "out", **SMALL), "already upcycled"),
        (lambda: xft_folders.upcycle_folder(tmp_path, tmp_path / "out", **SMALL), "no config.json"),
        (
            lambda: xft_folders.upcycle_folder(base, tmp_path / "out", num_experts=4, top_k=5),
            "top_k must be",
        ),
        (lambda: xft_folders.upcycle_folder(base, moe, **SMALL), "exists"),
        (
            lambda: xft_folders.merge_folder(moe, tmp_path / "out", alpha=[1.0]),
            r"Expected alpha \[4\]",
        ),
        (lambda: xft_folders.merge_folder(moe, tmp_path / "out", alpha=[0.5] * 4), "alpha sums to"),
        (
            lambda: xft_folders.merge_folder(moe, tmp_path / "out", alpha="mean"),
            "alpha must be one of uniform",
        ),
        (
            lambda: xft_folders.merge_folder(moe, tmp_path / "out", shared_rate=1.5),
            "shared_rate must be",
        ),
        (
            lambda: xft_folders.upcycle_folder(base, tmp_path / "out", layers=[5], **SMALL),
            r"layers must be .*but got \[5\]",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    assert not (tmp_path / "out").exists()
