"""LoRA experts with a router for each linear layer, and what both forms share: merging and
draws.
"""

import copy

import pytest
import torch
from torch import nn

from moe_runtime.config import MoEConfig
from moe_runtime.modules.lora import TARGETS
from moe_runtime.modules.lora_linear import LinearExperts, LoRALinear, add_experts
from moe_runtime.tools.conformance import oracle
from tests.modules.test_lora import MLP, H, I, make
from tests.support.oracle import assert_parity

E = 4
RANK = 3
ALPHA = 5.0
SETTINGS = {
    "dense": {"top_k": E, "gate": "softmax_topk"},
    "top-2": {"top_k": 2, "gate": "softmax_topk_renorm"},
    "not-renormalised": {"top_k": 2, "gate": "softmax_topk"},
    "shared": {"top_k": 3, "gate": "xft"},
}


def config_of(top_k=2, gate="softmax_topk_renorm", **settings) -> MoEConfig:
    return MoEConfig(
        hidden_size=H, intermediate_size=I, num_experts=E, top_k=top_k, gate=gate, **settings
    )


def linear(bias=False, **settings) -> LoRALinear:
    """A layer with distinct experts whose router affects the output."""
    torch.manual_seed(0)
    layer = LoRALinear(
        nn.Linear(H, I, bias=bias),
        config_of(**settings),
        RANK,
        alpha=ALPHA,
    )
    with torch.no_grad():
        layer.lora_b.normal_(std=0.3)
        layer.gate.weight.normal_(std=0.5)
    return layer


def assert_close(result: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert_parity(
        {"it": result.detach()},
        {"it": expected.detach()},
        bound,
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_layer_is_the_equation_with_its_gradients(name, bias):
    layer = linear(
        bias,
        **SETTINGS[name],
        balance_loss="switch",
        balance_loss_coef=0.5,
    )
    double = copy.deepcopy(layer).double()
    x = torch.randn(2, 7, H, requires_grad=True)
    dout = torch.randn(14, I)
    layer.records = []
    out = layer(x).flatten(0, 1)
    found = [
        x,
        layer.lora_a,
        layer.lora_b,
        layer.gate.weight,
    ]
    gradients = torch.autograd.grad(out, found, dout)
    (record,) = layer.records
    assert record.balance_loss > 0

    wide = (
        x.detach()
        .double()
        .flatten(
            0,
            1,
        )
        .requires_grad_()
    )
    logits = wide @ double.gate.weight.t()
    gate = layer.config.gate
    idx = oracle.best_experts(
        logits,
        layer.config.top_k,
        gate,
    )
    assert record.topk_idx.sort(1).values.equal(idx.sort(1).values)
    weight = torch.zeros(14, E, dtype=torch.float64)
    weight = weight.scatter(
        1,
        idx.long(),
        oracle.gate_weights(logits, idx, gate),
    )
    expected = wide @ double.base.weight.t()
    if bias:
        expected = expected + double.base.bias
    for e in range(E):
        change = wide @ double.lora_a[e].t() @ double.lora_b[e]
        expected = expected + ALPHA / RANK * weight[:, e : e + 1] * change
    leaves = [
        wide,
        double.lora_a,
        double.lora_b,
        double.gate.weight,
    ]
    assert_close(out, expected, 1e-6)
    for one, other in zip(
        gradients,
        torch.autograd.grad(
            expected,
            leaves,
            dout.double(),
        ),
        strict=True,
    ):
        assert_close(one.view_as(other), other, 1e-5)
    assert not layer.base.weight.requires_grad


def test_starts_as_the_linear_layer():
    base = nn.Linear(H, I)
    layer = LoRALinear(base, config_of(), RANK)
    x = torch.randn(5, H)
    assert layer.base is base
    assert torch.equal(layer(x), base(x))
    assert layer.scaling == 2 * 8 / RANK
    assert not layer.lora_b.any()
    for weight in (layer.lora_a, layer.gate.weight):
        assert 0.9 * H**-0.5 < weight.abs().max() <= H**-0.5
    assert layer(torch.randn(0, H)).shape == (0, I)


def test_wide_pairs_over_a_narrow_base_and_autocast():
    base = nn.Linear(H, I, dtype=torch.bfloat16)
    layer = LoRALinear(
        base,
        config_of(),
        RANK,
        dtype=torch.float32,
    )
    layer.lora_b.data.normal_(std=0.3)
    x = torch.randn(6, H)
    wide = copy.deepcopy(layer).float()
    out = layer(x.bfloat16())
    assert layer.lora_a.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        mixed = wide(x)
    for narrow in (out, mixed):
        assert narrow.dtype == torch.bfloat16
        assert_close(narrow, wide(x), 2e-2)


def both() -> dict[str, nn.Module]:
    """An MLP of each form, over the same weights and with the same pairs."""
    torch.manual_seed(0)
    block = make(E=E, rank=RANK)
    mlp = copy.deepcopy(block.experts.base)
    mlp = add_experts(
        mlp,
        block.config,
        form="linear",
        rank=RANK,
        alpha=3.0,
    )
    for target in TARGETS:
        with torch.no_grad():
            getattr(mlp, target).lora_a.copy_(block.experts.lora_a[target])
            getattr(mlp, target).lora_b.copy_(block.experts.lora_b[target])
    return {"block": block, "linear": mlp}


@pytest.mark.parametrize("form", ["block", "linear"])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16],
)
def test_merged_weight_is_the_sum(form, dtype):
    layer = both()[form].to(dtype)
    if form == "block":
        pairs = layer.experts
    else:
        pairs = LinearExperts(layer)
    alpha = torch.tensor(
        [0.1, 0.6, 0.0, 0.3],
        dtype=torch.float64,
    )
    for target in TARGETS:
        weight = getattr(pairs.base, target)
        if form == "linear":
            weight = weight.base
        weight = weight.weight
        a = pairs.lora_a[target].double()
        b = pairs.lora_b[target].double()
        change = torch.einsum("e,ero,eri->oi", alpha, b, a)
        merged = pairs.merged_weight(target, alpha.float())
        assert merged.dtype == dtype
        if dtype == torch.float32:
            bound = 1e-6
        else:
            bound = 4e-3
        assert_close(
            merged,
            weight.double() + 3.0 / RANK * change,
            bound,
        )


def test_unwrap_gives_the_mlp_back():
    mlp = MLP()
    linears = [getattr(mlp, name) for name in TARGETS]
    x = torch.randn(3, H)
    expected = mlp(x)
    layer = add_experts(
        mlp,
        config_of(),
        form="linear",
        rank=2,
        alpha=4.0,
    )
    assert layer is mlp
    assert torch.equal(layer(x), expected)
    assert LinearExperts(layer).unwrap() is mlp
    assert [getattr(mlp, name) for name in TARGETS] == linears
    assert torch.equal(mlp(x), expected)
