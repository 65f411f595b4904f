"""The launcher of kernels/averaging.py alone: numbers of experts and columns, what is not its own, mutants."""

import pytest
import torch

from tests.support.mutants import edited, noting
from tests.support.oracle import mismatches

pytest.importorskip("triton")

from moe_runtime.kernels import averaging

BOUND = 5e-6


def drawn(weight: torch.Tensor, pull: float) -> torch.Tensor:
    """W_e + pull (mean - W_e), in float64."""
    w = weight.double()
    return w + pull * (w.mean(0) - w)


@pytest.mark.parametrize("pull", [0.3, 0.75, 1.25])
@pytest.mark.parametrize("E, P", [(1, 17), (3, 1), (3, 2049), (8, 2049), (9, 17), (17, 2049), (256, 65), (300, 33)])
def test_every_number_of_experts(E, P, pull, device):
    weight = torch.randn(E, P, device=device)
    want = drawn(weight, pull)
    averaging.average_experts(weight, pull)
    assert not mismatches({"weight": weight}, {"weight": want}, BOUND)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("E", [5, 12])
def test_narrow_dtypes(E, dtype, device):
    weight = torch.randn(E, 4097, device=device).to(dtype)
    want = drawn(weight, 0.4)
    averaging.average_experts(weight, 0.4)
    assert (weight.double() - want).norm() <= 1.01 * (want.to(dtype).double() - want).norm()


def caught(module) -> list[str]:
    """What the checks say of the launcher of `module`."""
    torch.manual_seed(0)
    found = []
    for E, P, pull in ((3, 4097, 0.4), (300, 70, 0.4), (300, 70, 0.8)):
        memory = torch.randn(E, P + 3)  # experts that lie apart
        want = memory.double()
        want[:, :P] = drawn(memory[:, :P], pull)
        with noting(found):
            module.average_experts(memory[:, :P], pull)
            found += mismatches({"weight": memory}, {"weight": want}, BOUND)
    return found


MUTANTS = [
    pytest.param("(p < P)[None, :]\n", "(p <= P)[None, :]\n", id="an element too many"),
    pytest.param("mask = (e < E)[:, None] & ", "mask = ", id="an expert too many"),
    pytest.param("mask = (e0 + e < E)[:, None] & ", "mask = ", id="an expert too many of many"),
    pytest.param("tl.where((e < E)[:, None], w", "tl.where((e >= 0)[:, None], w", id="padding is summed"),
    pytest.param("tl.where((e0 + e < E)[:, None], w", "tl.where((e >= 0)[:, None], w", id="padding of many is summed"),
    pytest.param("total += ", "total = ", id="last experts only"),
    pytest.param("for e0 in range(0, E, BLOCK_E):\n", "for e0 in range(0, BLOCK_E, BLOCK_E):\n", id="first are summed"),
    pytest.param(
        "for e0 in range(0, E, BLOCK_E):  #", "for e0 in range(0, BLOCK_E, BLOCK_E):  #", id="first are written"
    ),
    pytest.param("total / E", "total / BLOCK_E", id="mean of another number"),
    pytest.param("first + total", "total", id="mean of the differences"),
    pytest.param("* stride_e + p", "* P + p", id="experts taken for neighbours"),
    pytest.param("if E <= BLOCK_E:", "if E <= 512:", id="first experts for all"),
    pytest.param("pull * (mean - w) if", "pull * (w - mean) if", id="driven apart"),
    pytest.param("(1 - pull) * (w - mean)", "pull * (w - mean)", id="the other share"),
    pytest.param("NEAR=pull < 0.5", "NEAR=True", id="never exactly the mean"),
    pytest.param("* BLOCK_P + tl.arange", "* (BLOCK_P - 1) + tl.arange", id="tiles that overlap"),
    pytest.param("triton.cdiv(P, config", "max(1, P // config", id="the last columns"),
]


@pytest.mark.parametrize("old, new", MUTANTS)
def test_mutant_is_caught(old, new, tmp_path):
    module = edited(averaging, tmp_path, old, new)
    if "NEAR=True" in new:  # right but for the last bit
        weight = torch.randn(5, 257)
        module.average_experts(weight, 1.0)
        assert not (weight == weight[0]).all()
    else:
        assert caught(module)


def test_unharmed_kernel_passes(tmp_path):
    assert not caught(edited(averaging, tmp_path, "", ""))
