"""moe_runtime.methods.xft.folders: bit-identical to the conversion in memory, in bounded memory, or
nothing at all.
"""

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.hf.models.families import FAMILIES
from moe_runtime.io.files import read_json
from moe_runtime.methods import xft
from moe_runtime.methods.xft import folders as xft_folders
from tests.hf.tiny import dense, distance, logits
from tests.support.checkpoints import assert_equal, tensors
from tests.support.edited import edit_tensors

SMALL = {"num_experts": 4, "top_k": 3}


LEGACY = {
    "rope_theta",
    "rope_scaling",
    "rotary_emb_base",
    "rotary_pct",
    "partial_rotary_factor",
    "rope_local_base_freq",
}


def config_of(folder: Path) -> dict:
    """Return config.json without the old rotary keys, which a stock model does not save."""
    values = read_json(folder / "config.json")
    return {key: value for key, value in values.items() if key not in LEGACY}


def assert_same(a: Path, b: Path) -> None:
    assert_equal(tensors(a), tensors(b))
    assert config_of(a) == config_of(b)


def perturb(folder: Path) -> None:
    """Simulate tuning with random noise on every tensor of a folder."""
    generator = torch.Generator().manual_seed(1)

    def noisy(tensors):
        result = {}
        for key, t in tensors.items():
            result[key] = t + torch.randn(t.shape, generator=generator).to(t.dtype) * 0.05
        return result

    edit_tensors(folder, noisy)


@pytest.fixture
def base(tmp_path):
    dense("llama").save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def moe(base, tmp_path):
    xft_folders.upcycle_folder(
        base,
        tmp_path / "moe",
        **SMALL,
    )
    perturb(tmp_path / "moe")
    return tmp_path / "moe"


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_stages_equal_those_in_memory(tmp_path, family, dtype):
    def load(name: str):
        return AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype)

    def compare(name: str, model) -> None:
        model.save_pretrained(tmp_path / f"{name}-in-memory")
        assert_same(
            tmp_path / name,
            tmp_path / f"{name}-in-memory",
        )

    dense(family, dtype=dtype).save_pretrained(tmp_path / "dense")
    receipt = xft_folders.upcycle_folder(
        tmp_path / "dense",
        tmp_path / "moe",
        **SMALL,
    )
    assert receipt.mlp_error < 1e-5
    model = load("dense")
    xft.upcycle(model, **SMALL)
    compare("moe", model)

    perturb(tmp_path / "moe")
    xft_folders.mergeable_folder(
        tmp_path / "moe",
        tmp_path / "mergeable",
    )
    compare("mergeable", xft.to_mergeable(load("moe")))

    receipt = xft_folders.merge_folder(
        tmp_path / "mergeable",
        tmp_path / "unlearned",
    )
    assert "Learn to mix with a larger learning rate" in receipt.mixing
    perturb(tmp_path / "mergeable")
    receipt = xft_folders.merge_folder(
        tmp_path / "mergeable",
        tmp_path / "merged",
    )
    assert "Learn to mix" not in receipt.mixing
    torch.testing.assert_close(
        torch.tensor(receipt.alpha).sum(1),
        torch.ones(2),
    )
    model = load("mergeable")
    expected = logits(model)
    compare("merged", xft.merge(model))
    merged = load("merged")
    assert type(merged).__module__.startswith("transformers.models")
    assert distance(logits(merged), expected) <= (1e-5 if dtype == torch.float32 else 2e-2)


def test_shards_and_side_files(base, tmp_path):
    (base / "tokenizer.json").write_text("{}")
    (base / "pytorch_model.bin").write_bytes(b"not to be copied")
    moe = tmp_path / "moe"
    receipt = xft_folders.upcycle_folder(base, moe, max_shard_size="20KB", **SMALL)
    assert len(list(moe.glob("*.safetensors"))) > 3
    assert "tokenizer.json" in receipt.side_files
    assert not (moe / "pytorch_model.bin").exists()
    xft_folders.mergeable_folder(moe, tmp_path / "one")
    assert (moe / "model.safetensors.index.json").exists()
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    assert logits(AutoModelForCausalLM.from_pretrained(moe)).isfinite().all()


@pytest.mark.parametrize(
    "convert",
    [xft_folders.mergeable_folder, xft_folders.merge_folder],
)
def test_training_metadata_stays_with_the_weights(convert, moe, tmp_path):
    stays = {"router_stats.csv", "README.md", "trainer_state.json", "adapter_config.json"}
    goes = {"tokenizer.json", "LICENSE", "chat_template.jinja"}
    for name in stays | goes:
        (moe / name).write_text("{}")
    receipt = convert(moe, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert goes <= names
    assert goes <= set(receipt.side_files)
    assert not stays & names


def test_alpha_is_what_memory_makes_of_it(moe, tmp_path):
    alpha = torch.eye(2, 4)
    receipt = xft_folders.merge_folder(moe, tmp_path / "folders", alpha=alpha)
    assert receipt.alpha == alpha.tolist()
    merged = xft.merge(
        AutoModelForCausalLM.from_pretrained(moe),
        alpha=alpha,
    )
    merged.save_pretrained(tmp_path / "memory")
    assert_same(tmp_path / "folders", tmp_path / "memory")


KEY = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "change, match",
    [
        pytest.param({KEY: None}, KEY, id="missing"),
        pytest.param({QUERY: None}, QUERY, id="missing, of no MLP"),
        pytest.param({KEY: torch.ones(32, 5)}, KEY, id="misshapen"),
        pytest.param(
            {KEY: torch.ones(32, 48).half()},
            KEY,
            id="another dtype",
        ),
        pytest.param(
            {"model.layers.7.mlp.up_proj.weight": torch.ones(48, 32)},
            "layers.7",
            id="a layer too many",
        ),
    ],
)
def test_wrong_tensors_are_named_and_nothing_is_written(base, tmp_path, change, match):
    def changed(tensors):
        return {key: t for key, t in (tensors | change).items() if t is not None}

    edit_tensors(base, changed)
    with pytest.raises(ValueError, match=match):
        xft_folders.upcycle_folder(
            base,
            tmp_path / "moe",
            **SMALL,
        )
    assert list(tmp_path.iterdir()) == [base]


def test_layers_that_stay_dense(base, tmp_path):
    receipt = xft_folders.upcycle_folder(
        base,
        tmp_path / "moe",
        layers=[1],
        **SMALL,
    )
    assert receipt.layers == [1]
    assert receipt.mlp_error < 1e-5
    old, new = (AutoModelForCausalLM.from_pretrained(path) for path in (base, tmp_path / "moe"))
    assert distance(logits(new), logits(old)) < 1e-5
    assert xft_folders.merge_folder(
        tmp_path / "moe",
        tmp_path / "merged",
    ).layers == [1]


def test_wrong_stage_folder_and_settings(base, moe, tmp_path):
    mergeable = tmp_path / "mergeable"
    xft_folders.mergeable_folder(moe, mergeable)
    upcycle = functools.partial(xft_folders.upcycle_folder, **SMALL)
    merge = xft_folders.merge_folder
    for call, source, options, match in (
        (xft_folders.mergeable_folder, mergeable, {}, "a model of stage 'moe'"),
        (merge, base, {}, "Expected the folder of an upcycled model"),
        (upcycle, moe, {}, "already upcycled"),
        (upcycle, base, {"layers": [5]}, r"layers must be .*but got \[5\]"),
        (merge, moe, {"alpha": [0.5] * 4}, "with the sums"),
        (merge, mergeable, {"shared_rate": 0.5}, "shared_rate must be None, but got 0.5"),
    ):
        with pytest.raises(ValueError, match=match):
            call(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="exists"):
        upcycle(base, moe)
