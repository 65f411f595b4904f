"""Every balance loss and its gradient, every measure of load, on drawn routers, against float64 equations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.ops import balance, router_load
from tests.stress.balance_cases import CASES, drawn
from tests.stress.measure import allowance, mismatches, run
from tests.stress.test_ops import quiet
from tests.support.stress import scaled

pytestmark = pytest.mark.stress


@pytest.mark.parametrize("name", CASES)
def test_is_the_equation(name):
    @quiet(scaled(8, 1500))
    @given(st.data())
    def check(data):
        case, upstream = drawn(name, data)
        got = run(case, "torch", upstream)
        assert all(tensor.isfinite().all() for tensor in got.values()), f"not finite: {case}"
        bad = mismatches(got, allowance(case, got, upstream))
        assert not bad, f"{case}: {'; '.join(bad)}"

    check()


@pytest.mark.parametrize("name", ["switch", "cv2", "top_k"])
def test_the_measure_sees_what_is_planted(name):
    """An output that is a hundredth off, or a gradient whose rows are each other's."""
    seen = set()

    @quiet(scaled(15, 300))
    @given(st.data())
    def check(data):
        case, upstream = drawn(name, data)
        got = run(case, "torch", upstream)
        allowed = allowance(case, got, upstream)
        for part, tensor in got.items():
            wrong = tensor * 1.01 if tensor.dim() < 2 else tensor.roll(1, 0)
            if (
                tensor.dtype != torch.float32
                or (wrong - tensor).norm() <= 9e-3 * tensor.norm()
                or tensor.abs().max() < 1e-4
            ):
                continue
            seen.add(part[:2])
            assert mismatches(got | {part: wrong}, allowed), f"{part} of {case}"

    check()
    assert "lo" in seen and "dl" in seen


def test_every_public_function_has_cases():
    ours = {
        name
        for module in (balance, router_load)
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    }
    cased = {"switch_loss", "cv2_loss", "noisy_load", "top_k_loss", "pooled_loss", "per_layer_loss", "selection_mask"}
    cased |= {"expert_load", "dead_experts", "max_violation", "load_entropy"}
    # cv2 is within cv2_loss, and balance_loss chooses between the two
    assert ours == cased | {"cv2", "balance_loss"}
