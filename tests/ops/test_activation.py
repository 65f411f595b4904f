"""Activations match their definitions, and their derivatives match autograd of the definitions."""

import pytest
import torch

from moe_runtime.config import ACTIVATIONS
from moe_runtime.ops.activation import ACT, ACT_BACKWARD
from tests.support import oracle


def test_every_name_of_the_config_has_a_function_and_a_derivative():
    assert set(ACT) == set(ACT_BACKWARD) == set(ACTIVATIONS) == set(oracle.ACT)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_follows_its_definition(act):
    x = torch.linspace(-12, 12, 97, dtype=torch.float64)  # includes 0
    torch.testing.assert_close(
        ACT[act](x),
        oracle.ACT[act](x),
        rtol=1e-12,
        atol=1e-14,
    )


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_derivative_is_that_of_the_definition(act):
    x = torch.randn(200, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(200, dtype=torch.float64)
    (expected,) = torch.autograd.grad(
        oracle.ACT[act](x),
        x,
        grad,
    )
    torch.testing.assert_close(
        ACT_BACKWARD[act](grad, x.detach()),
        expected,
        rtol=1e-12,
        atol=1e-14,
    )


@pytest.mark.parametrize("act", ["relu", "relu2"])
def test_kink_has_the_derivative_zero(act):
    zero = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(ACT_BACKWARD[act](torch.ones_like(zero), zero), zero)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_large_values_do_not_turn_into_nan(act):
    square = 1e8 if act == "relu2" else 1e4
    assert ACT[act](torch.tensor([1e4, -1e4])).tolist() == [square, 0]
