"""The mergeable layer: XFT's claims about merging a layer, and what trains."""

import pytest
import torch

from moe_runtime.config import MoEConfig
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.tools.conformance import oracle
from tests.support.layer import dense_mlp
from tests.support.oracle import assert_parity


def make(E=8, soup=False, shared_rate=0.75, dtype=None, **kwargs) -> MergedMLP:
    config = MoEConfig(
        hidden_size=33,
        intermediate_size=17,
        num_experts=E,
        top_k=min(E, 2),
        initializer_range=0.3,
        **kwargs,
    )
    layer = MergedMLP(
        config,
        shared_rate=shared_rate,
        soup=soup,
        dtype=dtype,
    )
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.endswith("_bias") or name == "mixing_logits":
                p.normal_()
    return layer


def mixture(layer: MergedMLP) -> torch.Tensor:
    """alpha in float64."""
    if layer.soup:
        rate = None
    else:
        rate = layer.shared_rate
    return oracle.mixing(
        layer.mixing_logits.detach().double(),
        rate,
    )


VARIANTS = [
    pytest.param({}, id="XFT"),
    pytest.param({"soup": True}, id="learned soup"),
    pytest.param(
        {"bias": True, "gated": False, "hidden_act": "gelu"},
        id="biases, no gate",
    ),
    pytest.param({"E": 1}, id="E = 1"),
    pytest.param({"E": 1, "soup": True}, id="E = 1, soup"),
    pytest.param({"E": 2}, id="E = 2: one logit"),
    pytest.param({"E": 3, "bias": True}, id="E = 3"),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_is_the_dense_mlp_with_merged_weights(variant, tolerance):
    layer = make(**variant)
    x = torch.randn(11, 33)
    alpha = mixture(layer)
    torch.testing.assert_close(
        layer.alpha().double(),
        alpha,
        rtol=1e-6,
        atol=1e-7,
    )
    weights = {}
    for name, stack in layer.experts.named_parameters():
        weights[name] = torch.tensordot(
            alpha,
            stack.detach().double(),
            1,
        )
    expected = {"out": dense_mlp(layer, weights, x), **weights}
    result = {"out": layer(x), **layer.merged_weights()}
    assert_parity(
        result,
        expected,
        tolerance[torch.float32],
    )


def test_weights_keep_the_experts_dtype_and_the_logits_float32():
    # lr 1e-5, the official one, is smaller than the spacing of bfloat16 at 1: casting the layer
    # must not silently freeze the mixing coefficients
    for layer in (make(dtype=torch.bfloat16), make().to(torch.bfloat16)):
        assert layer.mixing_logits.dtype == torch.float32
        assert layer.alpha().dtype == torch.float32
        assert {w.dtype for w in layer.merged_weights().values()} == {torch.bfloat16}
        assert layer(torch.randn(4, 33, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "soup",
    [False, True],
    ids=["XFT", "soup"],
)
def test_gradient_of_the_logits_is_the_papers(soup):
    """XFT, Eq. (5), (6): da_i = (1 - lambda) sigma_i (g_i - sum_j sigma_j g_j), g_i = sum over {Wg,
    Wu, Wd} <dWbar, W_i>.
    """
    layer = make(bias=True, soup=soup)
    x = torch.randn(7, 33)
    dout = torch.randn(7, 33)
    (result,) = torch.autograd.grad(
        layer(x),
        layer.mixing_logits,
        dout,
    )

    alpha = mixture(layer)
    stacks = {n: p.detach().double() for n, p in layer.experts.named_parameters()}
    merged = {n: torch.tensordot(alpha, w, 1).requires_grad_() for n, w in stacks.items()}
    out = dense_mlp(layer, merged, x)
    gradients = torch.autograd.grad(
        out,
        list(merged.values()),
        dout.double(),
    )
    g = torch.zeros(8, dtype=torch.float64)
    for stack, gradient in zip(stacks.values(), gradients, strict=True):
        g += (stack * gradient).flatten(1).sum(1)
    rate = 0.75
    if soup:
        rate = 0.0
    else:
        g = g[1:]
    sigma = oracle.mixing(
        layer.mixing_logits.detach().double(),
        None,
    )
    expected = (1 - rate) * sigma * (g - (sigma * g).sum())
    assert_parity({"da": result}, {"da": expected}, 2e-5)
    assert result.sum().abs() < 1e-5 * result.abs().sum()


def test_state_dict_round_trip():
    a = make(bias=True)
    b = make(bias=True)
    b.load_state_dict(a.state_dict())
    x = torch.randn(3, 33)
    assert torch.equal(a(x), b(x))
    stacks = {f"experts.{n}" for n, _ in a.experts.named_parameters()}
    assert a.state_dict().keys() == {"mixing_logits", *stacks}
