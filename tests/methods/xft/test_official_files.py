"""moe_runtime.methods.xft.official: the forms that folders come in, and everything that is refused
before a byte is written.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.methods.xft import official as xft_official
from moe_runtime.methods.xft.official import EXPERTS
from tests.hf import tiny
from tests.support import official_xft as released

EXPERT = EXPERTS.format(1, "weight_up", 2)


@pytest.fixture
def theirs(tmp_path) -> Path:
    released.write_moe(tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.fixture
def weighted(tmp_path) -> Path:
    released.write_weighted(tmp_path / "weighted", tmp_path / "ffn")
    return tmp_path / "weighted"


def tensors_of(folder: Path) -> dict:
    with Checkpoint(folder) as checkpoint:
        return {key: checkpoint.get(key) for key in checkpoint.keys()}


def edit(folder: Path, **changes) -> None:
    """Change config.json; a value of ... takes the key away."""
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in values.items() if v is not ...})
    )


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- forms
@pytest.mark.parametrize("form", ["bin", "shards", "old"])
def test_every_form_is_imported_to_the_same_bits(form, theirs, tmp_path):
    xft_official.import_official(theirs, tmp_path / "from safetensors")
    released.write_moe(tmp_path / form, form)
    seen = []
    receipt = xft_official.import_official(
        tmp_path / form,
        tmp_path / "ours",
        max_shard_size="40KB",
        progress=lambda done, total: seen.append((done, total)),
    )
    want = tensors_of(tmp_path / "from safetensors")
    got = tensors_of(tmp_path / "ours")
    assert want.keys() == got.keys() and all(torch.equal(got[key], want[key]) for key in want)
    assert receipt.tensors == len(got) and receipt.bytes == sum(t.nbytes for t in got.values())
    assert seen[-1][0] == seen[-1][1] and len(list((tmp_path / "ours").glob("*.safetensors"))) > 3
    assert not list((tmp_path / "ours").glob("*.bin*"))


def test_what_is_tied_or_rebuilt_there_is_left_out(theirs, tmp_path):
    released.write_moe(theirs, tie_word_embeddings=True)
    extra = {
        "lm_head.weight": torch.zeros(96, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    edit_tensors(theirs, lambda t: t.update(extra))
    xft_official.import_official(theirs, tmp_path / "ours")
    assert not set(extra) & tensors_of(tmp_path / "ours").keys()


def test_side_files_go_along(theirs, tmp_path):
    (theirs / "tokenizer.json").write_text("{}")
    (theirs / "training_args.bin").write_bytes(b"not to be copied")
    assert xft_official.import_official(theirs, tmp_path / "ours").side_files == ["tokenizer.json"]
    assert xft_official.export_official(tmp_path / "ours", tmp_path / "again").side_files == [
        "tokenizer.json"
    ]
    assert not (tmp_path / "again" / "modeling_moe_runtime.py").exists()


def test_where_the_experts_of_a_weighted_model_are_looked_for(weighted, tmp_path, monkeypatch):
    want = None
    for said, place, given in (
        (str(tmp_path / "ffn"), tmp_path / "ffn", None),
        ("ffn", tmp_path / "ffn", None),  # from the folder that the released code was run in
        ("elsewhere/beside", tmp_path / "beside", None),
        ("nowhere", weighted, None),
        ("nowhere", tmp_path / "given", tmp_path / "given"),
    ):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        edit(weighted, ffn_folder_path=said)
        if place != tmp_path / "ffn":
            place.mkdir(exist_ok=True)
            for file in (tmp_path / "ffn").iterdir():
                shutil.copy(file, place)
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            xft_official.import_official(weighted, tmp_path / "out", ffn_folder=given)
        got = tensors_of(tmp_path / "out")
        want = want or got
        assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)
        if place != tmp_path / "ffn":
            for file in place.glob("*.pt"):
                file.unlink()


def test_the_mixing_logits_are_float32_whatever_they_were(weighted, tmp_path):
    name = "model.layers.0.mlp.average_weights"
    edit_tensors(weighted, lambda t: t.update({name: t[name].bfloat16()}))
    xft_official.import_official(weighted, tmp_path / "ours")
    got = tensors_of(tmp_path / "ours")["model.layers.0.mlp.mixing_logits"]
    assert got.dtype == torch.float32 and torch.equal(
        got, load_file(weighted / "model.safetensors")[name].float()
    )


# --- pickles
class Harmful:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
def test_a_pickle_that_asks_for_more_than_tensors_is_refused_and_not_run(
    zipped, theirs, weighted, tmp_path
):
    tensors = load_file(theirs / "model.safetensors")
    (theirs / "model.safetensors").unlink()
    bad = tensors | {"harm": Harmful(tmp_path / "ran")}
    torch.save(bad, theirs / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    torch.save(
        {kind: {0: Harmful(tmp_path / "ran")} for kind in released.KINDS},
        tmp_path / "ffn" / "ffn_layer_1.pt",
        _use_new_zipfile_serialization=zipped,
    )
    for source, file in ((theirs, "pytorch_model.bin"), (weighted, "ffn_layer_1.pt")):
        with pytest.raises(
            ValueError,
            match=rf"{file} cannot be loaded .*Pass a complete file with a dict of tensors",
        ):
            xft_official.import_official(source, tmp_path / "out")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


# --- what is refused
@pytest.mark.parametrize(
    "changes, match",
    [
        ({"gate_use_softmax": False}, "gate_use_softmax must be True, but is False"),
        ({"multiply_gate_scores": False}, "multiply_gate_scores must be True, but is False"),
        ({"score_scale_factor": 2.0}, "score_scale_factor must be 1.0, but is 2.0"),
        (
            {"score_scale_factor": [1.0, 4.0]},
            r"score_scale_factor must be 1.0.*, but is \[1.0, 4.0\]",
        ),
        (
            {"calculator_type": "SwitchDropTokenCalculator"},
            "calculator_type must be .*but is 'SwitchDropTokenCalculator'",
        ),
        ({"add_weight_norm": True}, "add_weight_norm must be False, but is True"),
        (
            {"gate_type": "SwitchBalancedGate"},
            "gate_type must be one of TopKUniversal.*but is 'SwitchBalancedGate'",
        ),
        ({"gate_type": ["SwitchBalancedGate"]}, "gate_type must be one of TopKUniversal"),
        ({"quantization_config": {"bits": 4}}, "config.json has a quantization_config"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor above 1"),
        ({"gate_network": "attention"}, "router must be"),
        ({"gate_use_balance": "yes"}, "gate_use_balance must be"),
        ({"gate_balance_loss_weight": -1.0}, "balance_loss_coef must be"),
        (
            {"num_selects": 5},
            "with num_selects as top_k: top_k must be at most num_experts .4., but got 5",
        ),
        ({"num_selects": 1}, "top_k must be at least 2 for gate 'xft'"),
        ({"shared_expert_weight": 1.5}, "shared_expert_weight must be from 0 to 1"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_scaling must be null, or type linear or dynamic",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling must be"),
        ({"hidden_act": "softmax"}, "hidden_act must be"),
        ({"hidden_size": "32"}, "hidden_size in .*config.json must be an integer"),
        ({"num_attention_heads": 5}, "config.json is not that of a Llama"),
        (
            {"model_type": "mixtral"},
            "model_type of .* is 'mixtral'. Pass a folder .*'llama_moe_upscaling'",
        ),
        ({"model_type": "llama"}, "model_type is 'llama' .* contains the experts"),
        ({"num_hidden_layers": 3}, "(?s)missing: .*layers.2"),
        ({"num_experts": 5}, "(?s)missing: .*experts.weight_gate.4"),
        ({"gate_network": "linear"}, "(?s)missing: .*gate_network.weight"),
        ({"gate_add_noise": False}, "(?s)unexpected: .*weight_noise"),
        ({"intermediate_size": 40}, r"(?s)with a wrong shape: .*is \[48, 32\], not \[40, 32\]"),
        (
            {"moe_runtime_extra": {"config": {"top_k": 1}}},
            "moe_runtime_extra may only have .*top_k",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_are_not_computed_here_are_refused(changes, match, theirs, tmp_path):
    edit(theirs, **changes)
    with pytest.raises(ValueError, match=match):
        xft_official.import_official(theirs, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


@pytest.mark.parametrize(
    "change, match",
    [
        pytest.param(lambda t: t.pop(EXPERT), rf"1 missing: {EXPERT}", id="an expert missing"),
        pytest.param(
            lambda t: t.update({EXPERT + "x": torch.ones(2)}), "1 unexpected", id="unexpected"
        ),
        pytest.param(
            lambda t: t.update({EXPERT: t[EXPERT].T.contiguous()}),
            r"is \[32, 48\], not \[48, 32\]",
            id="turned",
        ),
        pytest.param(
            lambda t: t.update({EXPERT: t[EXPERT].half()}), "with a wrong dtype", id="another dtype"
        ),
        pytest.param(
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].long()}),
            "must be .*but is torch.int64",
            id="int64",
        ),
        pytest.param(
            lambda t: t.pop("model.norm.weight"),
            "1 missing: model.norm.weight",
            id="a norm missing",
        ),
        pytest.param(
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            "q_proj.bias",
            id="a bias",
        ),
    ],
)
def test_other_tensors_than_the_configs_are_named(change, match, theirs, tmp_path):
    edit_tensors(theirs, change)
    with pytest.raises(ValueError, match=match):
        xft_official.import_official(theirs, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


@pytest.mark.parametrize(
    "family, changes, settings, match",
    [
        ("mistral", {}, {}, "base_model_type must be 'llama'"),
        ("llama", {"mlp_bias": True}, {}, "bias must be False"),
        ("llama", {"attention_bias": True}, {}, "attention_bias must be False .*but is True"),
        ("llama", {"head_dim": 16}, {}, "head_dim must be 8, but is 16"),
        ("llama", {}, {"layers": [1]}, r"layers must be all 2, but is \[1\]"),
        ("llama", {}, {"gate": "softmax_topk"}, "gate must be one of xft, nonorm, topk_softmax"),
        ("llama", {}, {"balance_loss": "switch"}, "balance_loss must be 'cv2' or 'none'"),
        (
            "llama",
            {
                "rope_theta": None,
                "rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0},
            },
            {},
            "rope_type must be linear or dynamic, but is 'yarn'",
        ),
    ],
)
def test_what_their_code_has_no_option_for_is_not_exported(
    family, changes, settings, match, tmp_path
):
    stock = ({"mlp_bias": False} if family == "llama" else {}) | {"rope_theta": 1e4} | changes
    tiny.upcycled(family, changes=stock, **settings).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=match):
        xft_official.export_official(tmp_path / "ours", tmp_path / "out")
    assert not (tmp_path / "out").exists()
