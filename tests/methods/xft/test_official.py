"""moe_runtime.methods.xft.official: the released code's folders compute here what they do there,
and back, bit for bit.
"""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.config import MoEConfig
from moe_runtime.io.checkpoint import Checkpoint
from moe_runtime.methods import xft
from moe_runtime.methods.xft import folders as xft_folders
from moe_runtime.methods.xft import official as xft_official
from moe_runtime.methods.xft import official_config as xft_official_config
from moe_runtime.methods.xft.official import open_model
from moe_runtime.methods.xft.presets import PRESETS
from tests.hf import tiny
from tests.support import official_xft as released

IDS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(2))
LINEAR = {"type": "linear", "factor": 4.0}
DYNAMIC = {"type": "dynamic", "factor": 2.0}
MODELS = {
    "as convert_dense_to_moe leaves it": {},
    "linear router without noise": {"gate_network": "linear", "gate_add_noise": False},
    "nonorm": {"gate_type": released.NONORM},
    "vanilla": {"gate_type": released.VANILLA},
    "vanilla, linear, top 2": {
        "gate_type": released.VANILLA,
        "gate_network": "linear",
        "num_selects": 2,
    },
    "every expert selected": {"num_selects": 4},
    "the shared expert and a routed one": {"num_experts": 2, "num_selects": 2},
    "no balance loss": {"gate_use_balance": False},
    "another weight and epsilon": {"gate_balance_loss_weight": 0.5, "gate_noise_epsilon": 0.1},
    "scaled positions": {"rope_scaling": LINEAR},
    "positions beyond the longest": {"rope_scaling": DYNAMIC, "max_position_embeddings": 8},
    "tied": {"tie_word_embeddings": True},
    "no grouped heads, E=8, K=6": {
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_selects": 6,
        "pretraining_tp": 2,
    },
}


def case(names):
    return pytest.mark.parametrize(
        "changes", [pytest.param(MODELS[name], id=name) for name in names]
    )


def load(folder: Path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def assert_same(a: Path, b: Path, config: bool = True) -> None:
    """Equal tensors, names, dtypes and, with `config`, config.json."""
    first = open_model(a)
    second = open_model(b)
    assert first.specs() == second.specs()
    assert all(torch.equal(first.get(key), second.get(key)) for key in first.keys())
    if config:
        assert json.loads((a / "config.json").read_text()) == json.loads(
            (b / "config.json").read_text()
        )


# --- what is imported computes what the released code does
@case(MODELS)
def test_an_moe_gives_the_released_codes_logits_and_balance_loss(changes, tmp_path, monkeypatch):
    values, tensors = released.write_moe(tmp_path / "theirs", **changes)
    receipt = xft_official.import_official(tmp_path / "theirs", tmp_path / "ours")
    model = load(tmp_path / "ours").eval()
    with torch.no_grad():
        out = model(input_ids=IDS, labels=IDS)
    want, balance = released.forward(values, tensors, IDS)
    torch.testing.assert_close(out.logits, want, rtol=1e-5, atol=1e-5)
    assert receipt.layers == [0, 1] and receipt.config == model.model.layers[0].mlp.config
    if not values["gate_use_balance"]:
        assert receipt.config.balance_loss == "none" and "aux_loss" not in out
        return
    # in evaluation too, and apart from the language model's loss
    assert out.aux_loss.item() == pytest.approx(balance.item(), rel=1e-4, abs=1e-9)
    assert (out.loss - out.lm_loss).item() == pytest.approx(balance.item(), rel=1e-3, abs=1e-6)

    noise = [torch.randn(24, receipt.config.num_routed_experts) for _ in range(2)]
    if values["gate_add_noise"]:
        draws = iter(noise)
        monkeypatch.setattr(torch, "randn_like", lambda like: next(draws))
        want, balance = released.forward(values, tensors, IDS, eps=noise)
    with torch.no_grad():
        out = model.train()(input_ids=IDS, labels=IDS)
    torch.testing.assert_close(out.logits, want, rtol=1e-5, atol=1e-5)
    assert out.aux_loss.item() == pytest.approx(balance.item(), rel=1e-4, abs=1e-9)


@case(
    [
        "as convert_dense_to_moe leaves it",
        "nonorm",
        "the shared expert and a routed one",
        "scaled positions",
        "tied",
    ]
)
def test_a_weighted_model_gives_the_released_codes_logits_and_merges_to_them(changes, tmp_path):
    changes = {"shared_expert_weight": 0.85, "rope_theta": 5e5} | changes
    values, tensors, experts = released.write_weighted(
        tmp_path / "theirs", tmp_path / "ffn", **changes
    )
    xft_official.import_official(tmp_path / "theirs", tmp_path / "ours")
    want, _ = released.forward(values, tensors, IDS, experts)
    mergeable = load(tmp_path / "ours")
    assert mergeable.model.layers[0].mlp.shared_rate == 0.85
    torch.testing.assert_close(tiny.logits(mergeable, IDS), want, rtol=1e-5, atol=1e-5)
    xft_folders.merge_folder(tmp_path / "ours", tmp_path / "dense")
    torch.testing.assert_close(
        tiny.logits(load(tmp_path / "dense"), IDS), want, rtol=1e-5, atol=1e-5
    )


def test_the_moes_rope_base_is_10000_whatever_its_config_says(tmp_path):
    values, tensors = released.write_moe(tmp_path / "theirs", rope_theta=1e5)
    with pytest.warns(
        UserWarning, match="rope_theta 100000.0, which the released MoE code ignores"
    ):
        xft_official.import_official(tmp_path / "theirs", tmp_path / "ours")
    want, _ = released.forward(values, tensors, IDS)
    got = tiny.logits(load(tmp_path / "ours"), IDS)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    # a folder whose attention was trained with its own base, by a reader that heeds it, is imported
    # as that
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xft_official.import_official(tmp_path / "theirs", tmp_path / "heeded", rope_theta=1e5)
    heeded = load(tmp_path / "heeded")
    assert heeded.config.rope_parameters["rope_theta"] == 1e5
    assert tiny.distance(tiny.logits(heeded, IDS), want) > 1e-2


def test_defaults_are_the_released_config_classs(tmp_path):
    """convert_dense_to_moe names three options; a config.json that names no more means the rest of
    its class's.
    """
    said = {
        "model_type": "llama_moe_upscaling",
        "gate_type": released.XFT,
        "num_experts": 8,
        "num_selects": 6,
    }
    config = xft_official_config.import_config(said, "moe")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (2048, 24, 32256)
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    got = MoEConfig.from_dict(config.moe_runtime["config"])
    sizes = {"hidden_size": 2048, "intermediate_size": 5504, "num_experts": 8, "top_k": 6}
    assert got == MoEConfig(**sizes, **PRESETS["xft-official"])
    config = xft_official_config.import_config({"model_type": "llama_moe_upscaling"}, "moe")
    assert (
        config.moe_runtime["config"] | {"num_experts": 8, "top_k": 2, "gate": "topk_softmax"}
        == (config.moe_runtime["config"])
    )


@pytest.mark.parametrize(
    "name, router, noisy, balance, coef, quirk",
    [
        pytest.param(
            "xft-paper",
            "linear",
            False,
            "none",
            0.0,
            False,
            id="Sec. 3.1: u^T e_i, no noise, no loss",
        ),
        pytest.param(
            "xft-official",
            "mlp",
            True,
            "cv2",
            0.01,
            True,
            id="X1 mlp, X2 noise, X3 cv2 0.01, X4 quirk",
        ),
    ],
)
def test_presets_are_the_papers_router_and_the_released_codes(
    name, router, noisy, balance, coef, quirk
):
    config = MoEConfig(hidden_size=8, intermediate_size=16, **PRESETS[name])
    assert (config.gate, config.router, config.noisy_gate) == ("xft", router, noisy)
    assert (config.balance_loss, config.balance_loss_coef, config.load_quirk) == (
        balance,
        coef,
        quirk,
    )


# --- there and back
@case(
    [
        "as convert_dense_to_moe leaves it",
        "linear router without noise",
        "no balance loss",
        "scaled positions",
        "tied",
    ]
)
def test_theirs_comes_back_bit_for_bit(changes, tmp_path):
    values, _ = released.write_moe(tmp_path / "theirs", **changes)
    xft_official.import_official(tmp_path / "theirs", tmp_path / "ours")
    xft_official.export_official(tmp_path / "ours", tmp_path / "again")
    assert_same(tmp_path / "theirs", tmp_path / "again", config=False)
    got = json.loads((tmp_path / "again" / "config.json").read_text())
    left_out = {"ffn_folder_path", "transformers_version"}
    assert {k: got[k] for k in values.keys() - left_out} == {
        k: values[k] for k in values.keys() - left_out
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_their_weighted_model_comes_back_bit_for_bit(dtype, tmp_path):
    _, tensors, experts = released.write_weighted(tmp_path / "theirs", tmp_path / "ffn", dtype)
    xft_official.import_official(tmp_path / "theirs", tmp_path / "ours")
    xft_official.export_official(tmp_path / "ours", tmp_path / "again")
    got = Checkpoint(tmp_path / "again")
    assert set(got.keys()) == set(tensors)
    unused = [
        name
        for name in tensors
        if name.endswith(("gate_proj.weight", "up_proj.weight", "down_proj.weight"))
    ]
    assert all(torch.equal(got.get(name), tensors[name]) for name in tensors.keys() - set(unused))
    for layer, want in enumerate(experts):
        files = torch.load(tmp_path / "again" / f"ffn_layer_{layer}.pt", weights_only=True)
        assert {kind: list(part) for kind, part in files.items()} == {
            kind: list(part) for kind, part in want.items()
        }
        assert all(torch.equal(files[kind][e], want[kind][e]) for kind in want for e in want[kind])
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["ffn_folder_path"] == str(tmp_path / "again") and config["model_type"] == "llama"
    # the unused MLP is the merged one
    xft_folders.merge_folder(tmp_path / "ours", tmp_path / "dense")
    dense = Checkpoint(tmp_path / "dense")
    assert all(torch.equal(got.get(name), dense.get(name)) for name in unused)


OURS = {
    "paper": {},
    "official": PRESETS["xft-official"],
    "noise without a loss": {"noisy_gate": True, "noise_epsilon": 0.5},
    "what their config cannot say": {
        "balance_loss": "cv2",
        "balance_loss_coef": 0.3,
        "initializer_range": 0.1,
        "recompute": True,
        "shared": "dense",
    },
    "nonorm": {"gate": "nonorm", "router": "mlp"},
    "vanilla, all": {"gate": "topk_softmax", "top_k": 4},
}
STOCK = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "linear": {
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
    },
    "as the hub spells it": {"rope_theta": 10000, "rope_scaling": LINEAR},
    "mha": {"num_key_value_heads": 4, "num_hidden_layers": 1},
}


def ours(folder: Path, changes: dict, dtype=torch.float32, **settings) -> Path:
    """A folder of ours at stage "moe", its experts and routers unlike each other."""
    stock = {"mlp_bias": False, "rope_theta": 1e4} | changes
    model = tiny.upcycled("llama", changes=stock | {"dtype": dtype}, **settings)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "stage, stock, settings, dtype",
    [pytest.param("moe", {}, settings, torch.float32, id=name) for name, settings in OURS.items()]
    + [pytest.param("moe", stock, {}, torch.bfloat16, id=name) for name, stock in STOCK.items()]
    + [
        pytest.param(
            "mergeable", {}, OURS["what their config cannot say"], torch.float32, id="mergeable"
        ),
        pytest.param(
            "mergeable", STOCK["tied"], OURS["official"], torch.bfloat16, id="mergeable, tied"
        ),
        pytest.param(
            "mergeable",
            STOCK["linear"],
            OURS["nonorm"],
            torch.float32,
            id="mergeable, nonorm, linear",
        ),
    ],
)
def test_ours_comes_back_bit_for_bit_config_and_all(stage, stock, settings, dtype, tmp_path):
    source = ours(tmp_path / "moe", stock, dtype, **settings)
    if stage == "mergeable":
        xft_folders.mergeable_folder(source, tmp_path / "mergeable", shared_rate=0.6)
        source = tmp_path / "mergeable"
    xft_official.export_official(source, tmp_path / "theirs", max_shard_size="30KB")
    xft_official.import_official(tmp_path / "theirs", tmp_path / "again")
    assert_same(source, tmp_path / "again")
    assert (tmp_path / "again" / "modeling_moe_runtime.py").read_text() == (
        source / "modeling_moe_runtime.py"
    ).read_text()


@pytest.mark.parametrize("name", OURS)
def test_what_is_exported_computes_the_same_there(name, tmp_path):
    source = ours(tmp_path / "ours", {}, **OURS[name])
    xft_official.export_official(source, tmp_path / "theirs")
    values = json.loads((tmp_path / "theirs" / "config.json").read_text())
    files = Checkpoint(tmp_path / "theirs")
    tensors = {key: files.get(key) for key in files.keys()}
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == released.shapes(values)
    assert released.VALUES.keys() <= values.keys()
    want, _ = released.forward(values, tensors, IDS)
    torch.testing.assert_close(tiny.logits(load(source), IDS), want, rtol=1e-5, atol=1e-5)


def test_a_mergeable_model_of_any_base_is_exported_with_it(tmp_path):
    """Their weighted model reads rope_theta, as Llama's does, and attention biases."""
    model = tiny.upcycled(
        "llama", changes={"mlp_bias": False, "attention_bias": True, "rope_theta": 1e5}
    )
    xft.to_mergeable(model, shared_rate=0.3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.mixing_logits.add_(torch.randn(3))
    model.save_pretrained(tmp_path / "ours")
    xft_official.export_official(tmp_path / "ours", tmp_path / "theirs")
    values = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (values["rope_theta"], values["attention_bias"], values["shared_expert_weight"]) == (
        1e5,
        True,
        0.3,
    )
    xft_official.import_official(tmp_path / "theirs", tmp_path / "again")
    assert torch.equal(
        tiny.logits(load(tmp_path / "again"), IDS), tiny.logits(load(tmp_path / "ours"), IDS)
    )


def test_their_folder_trains_on_here(tmp_path):
    released.write_moe(tmp_path / "theirs")
    xft_official.import_official(tmp_path / "theirs", tmp_path / "ours")
    model = load(tmp_path / "ours").train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


# --- what goes wrong there and does not here
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_weighted_model_is_causal_and_runs_the_attention_that_was_asked_for(attention, tmp_path):
    """No row is padded: there the causal mask gets lost, and the attention's choice is not heard at
    all.
    """
    values, tensors, experts = released.write_weighted(tmp_path / "theirs", tmp_path / "ffn")
    xft_official.import_official(tmp_path / "theirs", tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation=attention)
    assert model.config._attn_implementation == attention
    changed = IDS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 96
    before = tiny.logits(model, IDS)
    after = tiny.logits(model, changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=1e-6, atol=1e-6)
    assert tiny.distance(after[:, -1], before[:, -1]) > 1e-2
    torch.testing.assert_close(
        before, released.forward(values, tensors, IDS, experts)[0], rtol=1e-5, atol=1e-5
    )


def test_every_deviation_has_a_test_that_exists():
    """docs/xft-official.md names X1 to X14 in order, and in each row tests that are there."""
    root = Path(__file__).resolve().parents[3]
    rows = re.findall(
        r"^\| (X\d+) \|(.*)\|$", (root / "docs" / "xft-official.md").read_text(), re.MULTILINE
    )
    assert [name for name, _ in rows] == [f"X{i}" for i in range(1, 15)]
    for name, row in rows:
        assert len(row.split(" | ")) == 5, name
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, name
        for file, test in named:
            assert f"\ndef {test}(" in (root / file).read_text(), f"{name}: {file}::{test}"
