"""moe_runtime.hf.models.stock: transformers' own models compute the same as the upcycled one;
otherwise the export is refused or the error is measured.
"""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_runtime.config import SHARED_GATES, STOCK_FAMILIES
from moe_runtime.hf.models.stock import STOCK, exact_settings, export_stock, is_exact, stock_config
from tests.hf import tiny

PAGE = Path(__file__).resolve().parents[3] / "docs" / "serving.md"


def cases():
    """Yield every base of a family with its first gate, and every gate with its first base."""
    for to, stock in STOCK.items():
        for base in stock.bases:
            yield to, base, next(iter(stock.gates))
        for gate in stock.gates:
            yield to, stock.bases[0], gate
        if "shared" in stock.also:
            for gate in SHARED_GATES:
                yield to, stock.bases[-1], gate


CASES = sorted(set(cases()))


def upcycled(base: str, gate: str, top_k: int = 3, layers=None, **changes):
    """A tiny model with distinct experts and routers, on a base that every family supports."""
    window = {} if "sliding_window" in changes else {"sliding_window": None}
    model = tiny.upcycled(
        base,
        layers,
        {"mlp_bias": None} | changes,
        gate=gate,
        top_k=top_k,
    )
    model.config.update(window if base == "mistral" else {})
    return model


def exported(model, folder: Path, to: str, **options):
    """Export a model; return transformers' own model from the folder, without missing or unexpected
    keys, and the receipt.
    """
    model.save_pretrained(folder / "moe")
    receipt = export_stock(folder / "moe", folder / "out", to, **options)
    stock, info = AutoModelForCausalLM.from_pretrained(
        folder / "out",
        output_loading_info=True,
    )
    assert type(stock).__module__.startswith(f"transformers.models.{to}.")
    assert not any(info.values())
    return stock, receipt


@pytest.mark.parametrize("to, base, gate", CASES, ids=lambda word: word)
def test_a_stock_model_computes_the_same(to, base, gate, tmp_path):
    changes = {}
    if to == "mixtral" and base == "mistral":
        changes["sliding_window"] = 5
    model = upcycled(base, gate, exact_settings(to, gate)[1] or 3, **changes)
    stock, receipt = exported(model, tmp_path, to)
    assert receipt.logits_error is None
    assert tiny.distance(tiny.logits(stock), tiny.logits(model)) < 2e-6


@pytest.mark.parametrize(
    "to, base",
    [("qwen2_moe", "qwen2"), ("qwen3_moe", "qwen3")],
)
def test_dense_layers_stay_where_the_family_has_them(to, base, tmp_path):
    model = upcycled(base, "softmax_topk", layers=[1], head_dim=16)
    stock, receipt = exported(
        model,
        tmp_path,
        to,
        check=True,
        max_shard_size="60KB",
    )
    assert stock.config.mlp_only_layers == [0]

    assert receipt.layers == [1]
    assert receipt.logits_error < 2e-6
    assert tiny.distance(tiny.logits(stock), tiny.logits(model)) < 2e-6


def test_no_rounding_where_the_shared_expert_moves(tmp_path):
    model = upcycled("llama", "xft", 2).to(torch.bfloat16)
    stock, _ = exported(model, tmp_path, "qwen2_moe")
    ours = model.model.layers[1].mlp.experts.down_proj
    mlp = stock.model.layers[1].mlp
    routed, minus_shared = mlp.experts.down_proj.split(ours.shape[2], -1)
    assert torch.equal(routed, ours[1:])
    assert torch.equal(minus_shared, -ours[:1].expand(3, -1, -1))
    assert torch.equal(mlp.shared_expert.down_proj.weight, 2 * ours[0])


REFUSED = [
    (
        "mixtral",
        "llama",
        {"gate": "softmax_topk"},
        {},
        "but mixtral supports only .* --to qwen2_moe, .* --for mixtral",
    ),
    ("qwen2_moe", "llama", {"gate": "xft"}, {}, "top_k 3, but .* with top_k 2"),
    ("mixtral", "llama", {"router": "mlp"}, {}, "router is 'mlp'"),
    ("mixtral", "llama", {}, {"attention_bias": True}, "attention_bias is True"),
    ("mixtral", "qwen3", {}, {}, "base is 'qwen3', but mixtral supports only 'llama'"),
    ("gpt2", "llama", {}, {}, "to must be one of mixtral, qwen2_moe"),
]


@pytest.mark.parametrize("to, base, settings, changes, says", REFUSED)
def test_what_a_family_cannot_say_is_refused(to, base, settings, changes, says):
    settings = {"gate": "topk_softmax"} | settings
    model = tiny.upcycled(
        base,
        changes={"mlp_bias": None} | changes,
        **settings,
    )
    with pytest.raises(ValueError, match=says):
        stock_config(model.config, to)


def test_the_page_has_the_table():
    """docs/serving.md lists families and bases, with the gates that are exact."""
    lines = re.findall(
        r"^\| `(\w+)` \| (.+?) \| (.+?) \|$",
        PAGE.read_text(),
        re.M,
    )
    assert tuple(STOCK) == STOCK_FAMILIES

    assert sorted(to for to, _, _ in lines) == sorted(STOCK)
    for to, bases, gates in lines:
        exact = set(STOCK[to].gates)
        if "shared" in STOCK[to].also:
            exact |= set(SHARED_GATES)
        assert re.findall(r"`(\w+)`", bases) == list(STOCK[to].bases)
        assert set(re.findall(r"`(\w+)`", gates)) == exact
    assert not is_exact(
        "qwen2_moe",
        tiny.config_of(tiny.dense("qwen2"), top_k=3, gate="xft"),
    )
