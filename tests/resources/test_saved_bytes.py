"""The memory that a training step saves for the backward pass matches docs/performance.md to the
byte, on every backend.

    T (s (H + Z K) + 12 K + s R) + 4 (E + 1)     of a layer; Z is 2 I with a gate, else I; R the
                                                 router's logits per token

Elements have s bytes; 12 K are weights, ids and rows of a token's slots; `recompute` drops the Z K.
"""

import re
from pathlib import Path

import pytest
import torch

from moe_runtime.config import MoEConfig
from moe_runtime.methods import esft, xft
from moe_runtime.methods.esft.selection import ExpertSelection
from moe_runtime.modules.moe import MoE
from moe_runtime.native.library import cpp
from tests.hf import tiny
from tests.support.oracle import SHARED, saved_bytes

ROOT = Path(__file__).resolve().parents[2]
T = 48
H = 32
I = 40
E = 4
K = 2
BACKENDS = ("torch", "cpp", "triton")


def formula(config: MoEConfig, tokens: int, size: int) -> int:
    """Return the bytes that one layer saves, from its config alone."""
    if config.recompute:
        rows = 0
    else:
        rows = config.intermediate_size * config.top_k * (2 if config.gated else 1)
    logits = config.num_experts - (config.gate in SHARED)
    if config.router == "mlp":
        logits *= 2  # its hidden layer has the same width
    per_token = size * (config.hidden_size + rows + logits) + 12 * config.top_k
    return tokens * per_token + 4 * (config.num_experts + 1)


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """The backend that MOE_RUNTIME_BACKEND selects."""
    if request.param == "cpp" and (reason := cpp.why_not(torch.device("cpu"))):
        pytest.skip(reason)
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="xft"),
        pytest.param({"gate": "nonorm"}, id="shared, no second softmax"),
        pytest.param({"gate": "softmax_topk_renorm"}, id="no shared expert"),
        pytest.param({"gate": "sigmoid_topk", "top_k": E}, id="all experts"),
        pytest.param({"router": "mlp"}, id="MLP router"),
        pytest.param({"bias": True, "gated": False}, id="biases, no gate"),
        pytest.param({"recompute": True}, id="recompute"),
        pytest.param(
            {"recompute": True, "router": "mlp", "gated": False},
            id="recompute, MLP router, no gate",
        ),
    ],
)
def test_a_layer(settings, dtype, backend, device):
    config = MoEConfig(
        **{
            "hidden_size": H,
            "intermediate_size": I,
            "num_experts": E,
            "top_k": K,
        }
        | settings
    )
    layer = MoE(config).to(device, dtype)
    x = torch.randn(T, H, dtype=dtype, device=device, requires_grad=True)
    kept, _ = saved_bytes(lambda: layer(x), list(layer.parameters()))
    assert kept == formula(config, T, dtype.itemsize)


def kept_by(model, ids: torch.Tensor) -> int:
    """Return the bytes that a model saves for the backward pass of a step, without its
    parameters.
    """
    kept, _ = saved_bytes(
        lambda: model(input_ids=ids, use_cache=False).logits,
        [*model.parameters(), *model.buffers()],
    )
    return kept


def mixture(layers: int, recompute: bool = False):
    model = tiny.dense("llama", num_hidden_layers=layers, mlp_bias=False)
    xft.upcycle(model, num_experts=E, top_k=K, recompute=recompute)
    return model.train()


def selected(model, chosen: list[int]):
    """Return the model with only `chosen` experts of each layer trained."""
    layers = range(model.config.num_hidden_layers)
    esft.train_only(
        model,
        ExpertSelection(experts=dict.fromkeys(layers, chosen)),
    )
    return model


def test_recompute_saves_the_pre_activations_of_a_whole_model_and_no_more(backend):
    ids = tiny.batch(2, 16)
    models = [mixture(2, recompute) for recompute in (False, True)]
    I = models[0].config.intermediate_size
    kept = [kept_by(model, ids) for model in models]
    assert kept[0] - kept[1] == 2 * ids.numel() * 4 * 2 * I * K


@pytest.mark.parametrize("recompute", [False, True])
def test_experts_that_do_not_train_keep_no_more(recompute, backend):
    ids = tiny.batch(2, 16)
    every, few = (
        kept_by(m, ids) for m in (mixture(2, recompute), selected(mixture(2, recompute), [1]))
    )
    assert 0 < few <= every, (few, every)


def test_the_formula_matches_the_page():
    text = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    per_token, each = re.search(
        r"([\dA-Z +]+) bytes in bfloat16, and ([^ ]+ \+ 1\)) a layer", text
    ).groups()
    values = {"H": H, "I": I, "K": K, "R": E - 1, "E": E}
    per_token, each = (
        eval(
            re.sub(r"(?<=[\dA-Z])(?=[A-Z(])", "*", part),
            values,
        )
        for part in (per_token, each)
    )
    config = MoEConfig(
        hidden_size=H,
        intermediate_size=I,
        num_experts=E,
        top_k=K,
    )
    assert formula(config, T, 2) == T * per_token + each
