"""A merge exports only the base's model: stock loaders read it where moe_runtime cannot be
imported.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.hf.models.configuration import MOE_FIELDS, SHIM
from moe_runtime.hf.models.families import FAMILIES, locate_key
from moe_runtime.io.files import read_json
from moe_runtime.methods import xft
from moe_runtime.methods.xft import folders as xft_folders
from papers.engine.tiny import train_tokenizer
from tests.hf import tiny
from tests.support.captured import captured
from tests.support.checkpoints import tensors
from tests.support.patience import PATIENCE

# family: changes to tests.hf.tiny's config, which has grouped attention and a rope base of 1e5
MODELS = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True},  # and biases in the MLP
    "qwen2": {"rope_theta": 5e5},  # biases in attention
    "phi3": {},  # gate and up are one matrix; query, key and value are another
    "gpt_neox": {},  # no gate, other names, embed_out
}
SETTINGS = {
    "num_experts": 4,
    "top_k": 3,
    "router": "mlp",
    "noisy_gate": True,
    "balance_loss": "cv2",
}
TOKENIZER = train_tokenizer(
    [f"{i} and {j}" for i in range(6) for j in range(6)],
    270,
)
WAYS = ("memory", "folders")


class Exported(NamedTuple):
    """The folders of one family: the base, the tuned MoE, and the results of merging it."""

    base: Path
    moe: Path
    merged: dict[str, Path]


def merge_both_ways(moe: Path, out: Path) -> dict[str, Path]:
    """Merge an MoE folder through the mergeable stage, with logits changed by hand, in memory and
    in folders.
    """
    model = xft.to_mergeable(AutoModelForCausalLM.from_pretrained(moe))
    with torch.no_grad():
        for name, logits in model.named_parameters():
            if name.endswith("mixing_logits"):
                logits.add_(torch.arange(3) / 3)
    model.save_pretrained(out / "mergeable")
    for file in moe.iterdir():
        if not (out / "mergeable" / file.name).exists():
            shutil.copy(file, out / "mergeable")
    xft_folders.merge_folder(
        out / "mergeable",
        out / "folders",
    )
    xft.save_dense(
        xft.merge(model),
        out / "memory",
        TOKENIZER,
    )
    return {way: out / way for way in WAYS}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, Exported]:
    """Run every family through all stages."""
    made = {}
    for family, changes in MODELS.items():
        root = tmp_path_factory.mktemp(family)
        model = tiny.dense(family, **changes)
        model.generation_config.update(do_sample=True, top_k=5)
        model.save_pretrained(root / "base")
        TOKENIZER.save_pretrained(root / "base")
        moe = root / "tuned" / "moe"
        xft_folders.upcycle_folder(root / "base", moe, **SETTINGS)
        tuned = AutoModelForCausalLM.from_pretrained(moe)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in tuned.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 20)
        tuned.save_pretrained(moe)
        made[family] = Exported(root / "base", moe, merge_both_ways(moe, root / "tuned"))
    return made


def every(test):
    return pytest.mark.parametrize("way", WAYS)(pytest.mark.parametrize("family", MODELS)(test))


@every
def test_the_names_are_the_bases_and_only_mlp_weights_are_new(family, way, exported):
    base = tensors(exported[family].base)
    moe = tensors(exported[family].moe)
    merged = tensors(exported[family].merged[way])
    assert merged.keys() == base.keys()
    mlp = 0
    for key, tensor in merged.items():
        assert not torch.equal(tensor, base[key]), key
        if locate_key(FAMILIES[family], key) is None:  # from the tuned MoE
            assert torch.equal(tensor, moe[key]), key
            continue
        mlp += 1
        assert tensor.shape == base[key].shape
        assert tensor.dtype == base[key].dtype
    assert mlp == {"llama": 12, "qwen2": 6, "phi3": 4, "gpt_neox": 8}[family]


@every
def test_config_tokenizer_and_generation_config_are_the_bases(family, way, exported):
    base = exported[family].base
    merged = exported[family].merged[way]
    names = {path.name for path in merged.iterdir()}
    assert names == {path.name for path in base.iterdir()}
    assert f"{SHIM}.py" not in names
    files = {}
    for name in names:
        if name.endswith(".json") and "index" not in name:
            files[name] = read_json(merged / name)
    config = files["config.json"]
    assert config.keys().isdisjoint(MOE_FIELDS)
    assert "moe_runtime" not in str(config)
    assert files["generation_config.json"]["top_k"] == 5
    for name, values in files.items():
        expected = read_json(base / name)
        if name == "config.json":
            # the old spelling of the rotary keys is added for readers that need it
            for key in LEGACY - expected.keys():
                values.pop(key, None)
        assert values == expected, name


LEGACY = {"rope_theta", "partial_rotary_factor", "rotary_emb_base", "rotary_pct"}


READER = """
import importlib.abc, json, sys

class NoRuntime(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "moe_runtime":
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, NoRuntime())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folders, out = json.loads(sys.argv[1]), {}
ids = torch.load(sys.argv[2])
for folder in folders:
    options = {"output_loading_info": True, "trust_remote_code": False}
    model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert not any(info.get(kind) for kind in kinds), (folder, info)
    assert type(model).__module__.startswith("transformers.models."), type(model)
    with torch.no_grad():
        out[folder] = model.eval()(ids).logits
    assert AutoTokenizer.from_pretrained(folder)("1 and 2")["input_ids"]
    assert model.generation_config.top_k == 5
assert not any(name.partition(".")[0] == "moe_runtime" for name in sys.modules)
torch.save(out, sys.argv[3])
"""


@pytest.mark.slow
def test_stock_transformers_loads_it_where_moe_runtime_cannot_be_imported(exported, tmp_path):
    torch.save(tiny.batch(), tmp_path / "ids.pt")
    folders = [str(made.merged[way]) for made in exported.values() for way in WAYS]
    command = [
        sys.executable,
        "-c",
        READER,
        json.dumps(folders),
        str(tmp_path / "ids.pt"),
        str(tmp_path / "out.pt"),
    ]
    done = captured(command, cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    got = torch.load(tmp_path / "out.pt")
    for made in exported.values():
        memory, folder = (got[str(made.merged[way])] for way in WAYS)
        mergeable = AutoModelForCausalLM.from_pretrained(made.merged["memory"].parent / "mergeable")
        assert torch.equal(memory, folder)
        assert tiny.distance(memory, tiny.logits(mergeable)) < 1e-5
