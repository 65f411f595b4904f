"""Activations: by definition, and their derivatives against autograd through the definition."""

import pytest
import torch

from moe_runtime.config import ACTIVATIONS
from moe_runtime.ops.activation import ACT, ACT_BACKWARD, Activation
from tests.support import oracle


def test_every_name_of_the_config_has_a_function_and_a_derivative():
    assert set(ACT) == set(ACT_BACKWARD) == set(ACTIVATIONS) == set(oracle.ACT)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_follows_its_definition(act):
    x = torch.cat(
        [torch.linspace(-12, 12, 97, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    )
    torch.testing.assert_close(ACT[act](x), oracle.ACT[act](x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_derivative_is_that_of_the_definition(act):
    x = torch.randn(200, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(200, dtype=torch.float64)
    (want,) = torch.autograd.grad(oracle.ACT[act](x), x, grad)
    torch.testing.assert_close(ACT_BACKWARD[act](grad, x.detach()), want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("act", ["relu", "relu2"])
def test_kink_has_the_derivative_zero(act):
    zero = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(ACT_BACKWARD[act](torch.ones_like(zero), zero), zero)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gate_is_the_first_half_and_goes_through_the_activation(act):
    gate = torch.randn(5, 17, dtype=torch.float64)
    up = torch.randn(5, 17, dtype=torch.float64)
    got = Activation(act).apply(torch.cat([gate, up], -1))
    torch.testing.assert_close(got, oracle.ACT[act](gate) * up, rtol=1e-12, atol=1e-14)


def test_ungated_has_no_second_half():
    z = torch.randn(5, 17, dtype=torch.float64)
    torch.testing.assert_close(
        Activation("silu", gated=False).apply(z), oracle.ACT["silu"](z), rtol=1e-12, atol=1e-14
    )


def test_any_leading_shape():
    z = torch.randn(2, 3, 34)
    gelu = Activation("gelu")
    assert torch.equal(gelu.apply(z).flatten(0, 1), gelu.apply(z.flatten(0, 1)))


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("value", [1e4, -1e4])
def test_large_values_do_not_turn_into_nan(act, value):
    got = ACT[act](torch.tensor([value]))
    assert not got.isnan().any()
    assert got.item() == (0 if value < 0 else value**2 if act == "relu2" else value)
