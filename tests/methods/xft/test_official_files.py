"""moe_runtime.methods.xft.official: the formats of folders, and everything that is refused before
anything is written.
"""

from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from moe_runtime.methods.xft import official as xft_official
from moe_runtime.methods.xft.official import EXPERTS
from tests.hf import tiny
from tests.support import official_xft as released
from tests.support.checkpoints import assert_equal, tensors
from tests.support.edited import edit_json, edit_tensors

EXPERT = EXPERTS.format(1, "weight_up", 2)


@pytest.fixture
def theirs(tmp_path) -> Path:
    released.write_moe(tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.fixture
def weighted(tmp_path) -> Path:
    released.write_weighted(
        tmp_path / "weighted",
        tmp_path / "ffn",
    )
    return tmp_path / "weighted"


@pytest.mark.parametrize("form", ["bin", "shards", "old"])
def test_every_form_is_imported_to_the_same_bits(form, theirs, tmp_path):
    ours = tmp_path / "ours"
    xft_official.import_official(theirs, tmp_path / "from safetensors")
    released.write_moe(tmp_path / form, form)
    progress = mock.Mock()
    receipt = xft_official.import_official(
        tmp_path / form,
        ours,
        max_shard_size="40KB",
        progress=progress,
    )
    imported = tensors(ours)
    assert_equal(imported, tensors(tmp_path / "from safetensors"))
    assert receipt.tensors == len(imported)
    assert receipt.bytes == sum(t.nbytes for t in imported.values())
    done, total = progress.call_args.args
    assert done == total
    assert len(list(ours.glob("*.safetensors"))) > 3
    assert not list(ours.glob("*.bin*"))


def test_what_is_tied_or_rebuilt_there_is_left_out(theirs, tmp_path):
    released.write_moe(theirs, tie_word_embeddings=True)
    extra = {
        "lm_head.weight": torch.zeros(96, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    edit_tensors(theirs, lambda whole: whole | extra)
    xft_official.import_official(theirs, tmp_path / "ours")
    assert extra.keys().isdisjoint(tensors(tmp_path / "ours"))


def test_side_files_go_along(theirs, tmp_path):
    (theirs / "tokenizer.json").write_text("{}")
    (theirs / "training_args.bin").write_bytes(b"not to be copied")
    receipt = xft_official.import_official(theirs, tmp_path / "ours")
    assert receipt.side_files == ["tokenizer.json"]
    receipt = xft_official.export_official(
        tmp_path / "ours",
        tmp_path / "again",
    )
    assert receipt.side_files == ["tokenizer.json"]
    assert not (tmp_path / "again" / "modeling_moe_runtime.py").exists()


@pytest.mark.parametrize(
    "written, beside, given",
    [
        pytest.param("{root}/ffn", "ffn", False, id="the whole path"),
        pytest.param("nowhere", "weighted", False, id="in the model's folder"),
        pytest.param("nowhere", "given", True, id="given"),
    ],
)
def test_where_the_experts_of_a_weighted_model_are_looked_for(
    written, beside, given, weighted, tmp_path
):
    """The mixing logits are float32, whatever their dtype was."""
    xft_official.import_official(weighted, tmp_path / "expected")
    name = "model.layers.0.mlp.average_weights"
    logits = load_file(weighted / "model.safetensors")[name].bfloat16()
    edit_tensors(weighted, lambda whole: whole | {name: logits})
    edit_json(weighted / "config.json", ffn_folder_path=written.format(root=tmp_path))
    folder = tmp_path / beside
    folder.mkdir(exist_ok=True)
    for file in list((tmp_path / "ffn").iterdir()):
        file.rename(folder / file.name)
    options = {"ffn_folder": folder} if given else {}
    xft_official.import_official(
        weighted,
        tmp_path / "out",
        **options,
    )
    expected = tensors(tmp_path / "expected")
    expected["model.layers.0.mlp.mixing_logits"] = logits.float()
    assert_equal(tensors(tmp_path / "out"), expected)


class Harmful:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "zipped",
    [True, False],
    ids=["zip", "old"],
)
def test_a_pickle_that_asks_for_more_than_tensors_is_refused_and_not_run(
    zipped, theirs, weighted, tmp_path
):
    form = {"_use_new_zipfile_serialization": zipped}
    harm = Harmful(tmp_path / "ran")
    bad = load_file(theirs / "model.safetensors") | {"harm": harm}
    (theirs / "model.safetensors").unlink()
    torch.save(bad, theirs / "pytorch_model.bin", **form)
    experts = {kind: {0: harm} for kind in released.KINDS}
    torch.save(
        experts,
        tmp_path / "ffn" / "ffn_layer_1.pt",
        **form,
    )
    for source, file in ((theirs, "pytorch_model.bin"), (weighted, "ffn_layer_1.pt")):
        with pytest.raises(ValueError, match=rf"{file} cannot be loaded .*a dict of tensors"):
            xft_official.import_official(source, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"gate_use_softmax": False}, "gate_use_softmax must be True, but is False"),
        ({"score_scale_factor": [1.0, 4.0]}, r"score_scale_factor must be 1.0.*is \[1.0, 4.0\]"),
        ({"gate_type": "SwitchBalancedGate"}, "gate_type must be one of TopKUniversal.*'Switch"),
        ({"quantization_config": {"bits": 4}}, "config.json has a quantization_config"),
        ({"gate_use_balance": "yes"}, "gate_use_balance must be"),
        ({"num_selects": 5}, "num_selects as top_k: top_k must be at most num_experts .4., but"),
        ({"shared_expert_weight": 1.5}, "shared_expert_weight must be from 0 to 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "must be null, or type linear or dyn"),
        ({"hidden_size": "32"}, "config.json is not that of a Llama"),
        ({"model_type": "mixtral"}, "model_type of .* is 'mixtral'. Pass .*'llama_moe_upscaling'"),
        ({"model_type": "llama"}, "model_type is 'llama' .* contains the experts"),
        ({"num_hidden_layers": 3}, "(?s)missing: .*layers.2"),
        ({"gate_add_noise": False}, "(?s)unexpected: .*weight_noise"),
        ({"intermediate_size": 40}, r"(?s)wrong shape or dtype: .*is \[48, 32\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_are_not_computed_here_are_refused(changes, match, theirs, tmp_path):
    edit_json(theirs / "config.json", **changes)
    with pytest.raises(ValueError, match=match):
        xft_official.import_official(theirs, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [theirs]


@pytest.mark.parametrize(
    "key, tensor, match",
    [
        (EXPERT, None, f"1 missing: {EXPERT}"),
        (EXPERT, torch.ones(48, 32).half(), "with a wrong shape or dtype"),
        ("model.norm.weight", torch.ones(32).long(), "must be .*but is torch.int64"),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(32), "q_proj.bias"),
    ],
)
def test_other_tensors_than_the_configs_are_named(key, tensor, match, theirs, tmp_path):
    edit_tensors(theirs, lambda whole: whole | {key: tensor})
    with pytest.raises(ValueError, match=match):
        xft_official.import_official(theirs, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [theirs]


YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    "family, changes, settings, match",
    [
        ("mistral", {}, {}, "base_model_type"),
        ("llama", {"mlp_bias": True}, {}, "bias"),
        ("llama", {}, {"layers": [1]}, "layers"),
        ("llama", {}, {"gate": "softmax_topk"}, "gate"),
        ("llama", {}, {"balance_loss": "switch"}, "balance_loss"),
        ("llama", {"rope_theta": None, "rope_parameters": YARN}, {}, "rope_type"),
        ("llama", {"rope_theta": 1e5}, {}, "rope_theta must be 10000.0"),
    ],
)
def test_what_their_code_has_no_option_for_is_not_exported(
    family, changes, settings, match, tmp_path
):
    stock = {"rope_theta": 1e4}
    if family == "llama":
        stock["mlp_bias"] = False
    tiny.upcycled(family, changes=stock | changes, **settings).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=match):
        xft_official.export_official(tmp_path / "ours", tmp_path / "out")
    assert not (tmp_path / "out").exists()
