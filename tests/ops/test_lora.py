"""LoRA experts over one base: cases that the conformance table does not draw, what runs only once,
and what is saved.
"""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.ops import lora as lora_ops
from moe_runtime.ops.lora import lora_mlp, lora_mlp_reference
from tests.support.lora import NAMES, arguments, make_case, oracle, run
from tests.support.oracle import assert_parity, assert_same, saved_bytes

OP = "lora_mlp"


@pytest.fixture
def layer(backend, device):
    """Return layer(case), which gives the output and every gradient of a backend."""

    def layer(case, **options):
        return run(case, lora_mlp, device=device, backend=backend, **options)

    return layer


@pytest.mark.parametrize("K", [2, None], ids=["two slots", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_beyond_a_vector_and_biases(dtype, K, layer, tolerance):
    case = make_case(40, 34, 48, 8, K, 33, dtype=dtype, bias=True)
    assert_parity(
        layer(case),
        run(case, oracle, torch.float64),
        tolerance[dtype],
    )


@pytest.mark.parametrize("K", [2, None], ids=["two slots", "dense"])
def test_reference_is_the_equation(K, tolerance):
    case = make_case(21, 33, 17, 3, K, 6, dtype=torch.float64, bias=True)
    assert_parity(
        run(case, lora_mlp_reference),
        run(case, oracle),
        tolerance[torch.float64],
    )


def test_recomputed_gives_the_same_bits(layer):
    case = make_case(37, 33, 49, 4, 2, 6, bias=True)
    assert_same(layer(case, recompute=True), layer(case, recompute=False))


@pytest.mark.filterwarnings("ignore:.*encountered")
def test_unused_experts_may_hold_anything(layer):
    """An expert that overflows affects only the tokens that chose it, and weights of dropped slots
    affect none.
    """
    case = make_case(24, 32, 48, 4, 2, 6, routing="skip")
    case.topk_idx[5] = torch.tensor([3, -1])
    case.leaves["topk_weight"][5, 1] = float("nan")
    others = torch.arange(24) != 5
    expected = layer(case)
    assert expected["out"].isfinite().all()
    assert expected["dtopk_weight"][5, 1] == 0
    for name in ("gate_b", "up_b"):
        case.leaves[name][3] *= 1e25
    got = layer(case)
    assert not got["out"][5].isfinite().any()
    for name in ("out", "dx", "dtopk_weight"):
        assert torch.equal(got[name][others], expected[name][others])
    for name in NAMES:
        for half in ("a", "b"):
            assert torch.equal(got[f"d{name}_{half}"][:3], expected[f"d{name}_{half}"][:3])


def test_a_weight_of_zero_has_a_gradient(layer, tolerance):
    case = make_case(21, 32, 48, 4, 2, 6)
    case.leaves["topk_weight"][::2, 0] = 0
    expected = run(case, oracle, torch.float64)
    assert expected["dtopk_weight"][::2, 0].abs().min() > 0
    assert_parity(layer(case), expected, tolerance[torch.float32])


class Products(TorchDispatchMode):
    """Counts the multiply-adds of matrix products, and those that involve `weights`."""

    def __init__(self, weights):
        super().__init__()
        self.weights = {w.data_ptr(): name for name, w in weights.items()}
        self.found = []
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in ("mm", "addmm", "addmm_"):
            a, b = [t for t in args if isinstance(t, torch.Tensor)][-2:]
            self.total += a.shape[0] * a.shape[1] * b.shape[1]
            for t in (a, b):
                if t.data_ptr() in self.weights:
                    self.found.append(self.weights[t.data_ptr()])
        return func(*args, **(kwargs or {}))


def test_the_base_runs_once_per_token(backend, device):
    T = 64
    H = 48
    I = 80
    E = 8
    K = 6
    rank = 4
    case = make_case(T, H, I, E, K, rank)
    leaves = {name: leaf.to(device) for name, leaf in case.leaves.items()}
    (x, gate, up, down, weight, idx), kwargs = arguments(
        case,
        leaves,
        None,
        device,
    )
    base = {"gate": gate, "up": up, "down": down}
    halves = []
    for name in NAMES:
        halves += kwargs[name]
    shared = (x, gate, up, down, None, None, weight, idx, *halves, E, 1.0, "silu", True, backend)
    dense = 3 * T * H * I
    adapters = 3 * T * E * rank * (H + I)
    with Products(base) as products:
        _, z, low = lora_ops._forward(*shared)
    assert sorted(products.found) == ["down", "gate", "up"]
    assert dense <= products.total <= dense + adapters < K * dense
    with Products(base) as products:
        lora_ops._backward(
            x,
            z,
            low,
            True,
            [True] * 6,
            *shared,
        )
    assert sorted(products.found) == ["down", "gate", "up"]  # and no gradient of the base
    assert products.total <= dense + 3 * adapters


def test_saves_the_input_one_pre_activation_and_what_has_rank_r():
    T = 256
    I = 96
    E = 4
    rank = 2
    case = make_case(T, 64, I, E, 2, rank)
    leaves = {name: leaf.requires_grad_() for name, leaf in case.leaves.items()}
    args, kwargs = arguments(case, leaves, None, "cpu")
    besides = [*leaves.values(), *args[1:4], args[5]]
    for recompute, kept in ((False, 2 * I), (True, 0)):
        call = functools.partial(lora_mlp, *args, recompute=recompute, **kwargs)
        assert saved_bytes(call, besides)[0] == 4 * T * (kept + 3 * E * rank)
