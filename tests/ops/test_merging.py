"""Mixing coefficients and merged weights against the equations in plain Python; every backend
against the same oracle.
"""

import math
import os

import numpy as np
import pytest
import torch

from moe_runtime import backends
from moe_runtime.ops.merging import merge_experts, merge_rows, mixing, soup_logits
from tests.support.oracle import assert_parity, mixing_oracle

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=str(why)))
    for name in ("torch", "triton")
    for why in [
        backends.why_not(
            name, "merge_experts", torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
    ]
]


def by_experts(weight, alpha):
    """W = sum_e alpha_e W_e."""
    total = 0 * weight[0]
    for e in range(weight.shape[0]):
        total = total + alpha[e] * weight[e]
    return total


def run(f, weight, alpha, dout, view=lambda w: w, **kwargs):
    weight = weight.detach().clone().requires_grad_()
    alpha = alpha.detach().clone().requires_grad_()
    out = f(view(weight), alpha, **kwargs)
    dweight, dalpha = torch.autograd.grad(out, (weight, alpha), dout.to(out.dtype))
    return {"out": out.detach(), "dweight": dweight, "dalpha": dalpha}


SHAPES = [
    pytest.param((8, 34, 33), id="XFT: 8 experts"),
    pytest.param((1, 17, 33), id="E = 1"),
    pytest.param((3, 17), id="E = 3, a bias"),
    pytest.param((5, 1), id="one number each"),
    pytest.param((4,), id="experts that are numbers"),
    pytest.param((4, 2, 3, 5), id="more dims"),
    pytest.param((2, 0, 7), id="no elements"),
    pytest.param((33, 129), id="many experts, odd sizes"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_parity(shape, dtype, backend, device, tolerance):
    weight = torch.randn(shape, device=device).to(dtype)
    alpha = torch.randn(shape[0], device=device).softmax(-1)
    dout = torch.randn(shape[1:], device=device).to(dtype)
    got = run(merge_experts, weight, alpha, dout, backend=backend)
    assert got["out"].dtype == dtype and got["dalpha"].dtype == torch.float32
    assert_parity(
        got, run(by_experts, weight.double(), alpha.double(), dout.double()), tolerance[dtype]
    )


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_one_by_one_are_the_stack_bit_by_bit(shape, dtype):
    weight = torch.randn(shape).to(dtype)
    alpha = torch.randn(shape[0]).softmax(-1)
    want = merge_experts(weight, alpha, backend="torch")
    got = merge_rows((row.clone() for row in weight), alpha)
    assert got.dtype == dtype and torch.equal(got, want)


def test_another_number_of_rows_than_alphas_is_refused():
    for count in (2, 4):
        with pytest.raises(ValueError, match=r"zip\(\) argument 2"):
            merge_rows(iter(torch.ones(count, 5)), torch.ones(3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "stored, view",
    [
        pytest.param((6, 33, 34), lambda w: w.transpose(1, 2), id="transposed"),
        pytest.param((34, 33, 6), lambda w: w.permute(2, 0, 1), id="the expert as the fastest dim"),
        pytest.param(
            (1, 34, 33), lambda w: w.expand(6, -1, -1), id="E views of one expert (stride 0)"
        ),
        pytest.param((12, 34, 33), lambda w: w[::2], id="every other expert"),
        pytest.param((6, 34, 66), lambda w: w[:, :, 1::2], id="strided"),
    ],
)
def test_layouts(stored, view, backend, device, tolerance):
    weight = torch.randn(stored, device=device)
    alpha = torch.randn(6, device=device).softmax(-1)
    dout = torch.randn(34, 33, device=device)
    want = run(by_experts, weight.double(), alpha.double(), dout.double(), view)
    assert_parity(
        run(merge_experts, weight, alpha, dout, view, backend=backend),
        want,
        tolerance[torch.float32],
    )
    dout = dout[:1, :1].expand(34, 33)  # as of sum()
    want = run(by_experts, weight.double(), alpha.double(), dout.double(), view)
    assert_parity(
        run(merge_experts, weight, alpha, dout, view, backend=backend),
        want,
        tolerance[torch.float32],
    )


def test_gradcheck():
    weight = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    alpha = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w, a: merge_experts(w, a), (weight, alpha))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_in_float32_and_rounds_once(dtype, backend, device):
    weight = torch.randn(8, 64, 33, device=device).to(dtype)
    alpha = torch.rand(8, device=device).softmax(-1)
    want = torch.tensordot(alpha.double(), weight.double(), 1)
    got = merge_experts(weight, alpha, backend=backend)
    assert (got.double() - want).norm() <= 1.01 * (want.to(dtype).double() - want).norm()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared_rate", [0.0, 0.3, 0.75, 0.85, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equal_experts_merge_to_themselves(dtype, shared_rate, backend, device):
    one = torch.randn(34, 33, device=device).to(dtype)
    alpha = mixing(3 * torch.randn(7, device=device), shared_rate)
    got = merge_experts(one.expand(8, -1, -1), alpha, backend=backend)
    if dtype == torch.float32:
        torch.testing.assert_close(got, one, rtol=1e-6, atol=0)
    else:  # the float32 sum is nearer to `one` than its neighbours in the narrow dtype
        assert torch.equal(got, one)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rate_one_is_the_shared_expert_exactly_and_rate_zero_never_sees_it(backend, device):
    weight = torch.randn(8, 34, 33, device=device)
    logits = torch.randn(7, device=device, requires_grad=True)
    merged = merge_experts(weight, mixing(logits, 1.0), backend=backend)
    assert torch.equal(merged, weight[0])
    assert not torch.autograd.grad(merged.square().sum(), logits)[0].any()
    other = weight.clone()
    other[0] = 1e30
    zero = [merge_experts(w, mixing(logits, 0.0), backend=backend) for w in (weight, other)]
    assert torch.equal(*zero)


# alpha
@pytest.mark.parametrize("shared_rate", [0.0, 0.5, 0.75, 0.85, 1.0, None])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_mixing_follows_the_formula(n, shared_rate):
    logits = 2 * torch.randn(n)
    alpha = mixing(logits, shared_rate)
    assert alpha.dtype == torch.float32 and alpha.shape == (n + (shared_rate is not None),)
    torch.testing.assert_close(
        alpha, torch.tensor(mixing_oracle(logits.tolist(), shared_rate)), rtol=1e-6, atol=1e-7
    )
    assert alpha.sum().item() == pytest.approx(1.0, abs=1e-6) and alpha.min() >= 0
    if shared_rate is not None:
        assert alpha[0].item() == pytest.approx(shared_rate, abs=1e-7)


@pytest.mark.parametrize("shared_rate", [0.75, None])
def test_a_constant_changes_nothing_and_the_gradient_sums_to_zero(shared_rate):
    logits = torch.randn(7, requires_grad=True)
    torch.testing.assert_close(
        mixing(logits, shared_rate), mixing(logits + 5, shared_rate), rtol=1e-5, atol=1e-7
    )
    (grad,) = torch.autograd.grad(
        (mixing(logits, shared_rate) * torch.arange(7 + (shared_rate is not None))).sum(), logits
    )
    assert grad.abs().max() > 1e-3 and abs(grad.sum().item()) < 1e-6


def test_gradient_of_the_logits_is_the_papers():
    """XFT, Eq. (5), (6): da_i = (1 - lambda) sigma_i (g_i - sum_j sigma_j g_j), g_i = sum over the
    projections <dW, W_i>.
    """
    rate = 0.75
    logits = torch.randn(7, requires_grad=True)
    stacks = [torch.randn(8, 34, 33), torch.randn(8, 33, 17)]
    douts = [torch.randn(34, 33), torch.randn(33, 17)]
    alpha = mixing(logits, rate)
    total = sum((merge_experts(w, alpha) * d).sum() for w, d in zip(stacks, douts))
    (got,) = torch.autograd.grad(total, logits)
    g = [
        sum((d.double() * w[i + 1].double()).sum().item() for w, d in zip(stacks, douts))
        for i in range(7)
    ]
    sigma = mixing_oracle(logits.tolist(), None)
    mean = sum(s * v for s, v in zip(sigma, g))
    want = torch.tensor(
        [(1 - rate) * s * (v - mean) for s, v in zip(sigma, g)], dtype=torch.float64
    )
    assert_parity({"da": got}, {"da": want}, 1e-5)


@pytest.mark.parametrize("E, rate", [(8, 0.75), (4, 0.85), (2, 0.5), (1, 0.75), (8, 0.0), (8, 1.0)])
def test_soup_starts_at_the_mixture_that_xft_fixes(E, rate):
    alpha = mixing(soup_logits(E, rate), None)
    want = [1.0] if E == 1 else [rate] + [(1 - rate) / (E - 1)] * (E - 1)
    torch.testing.assert_close(alpha, torch.tensor(want), rtol=1e-5, atol=1e-6)
    assert math.isfinite(alpha.sum().item())


def test_soup_moves_the_shared_expert_too():
    logits = soup_logits(8, 0.75).requires_grad_()
    (grad,) = torch.autograd.grad(mixing(logits, None)[0], logits)
    assert grad[0].item() == pytest.approx(0.75 * 0.25, rel=1e-5)  # lambda (1 - lambda)


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_rate_outside_is_an_error(rate):
    with pytest.raises(ValueError, match=f"shared_rate must be .*but got {rate}"):
        mixing(torch.zeros(7), rate)


@pytest.mark.parametrize("logits, words", [(torch.zeros(2, 3), "(2, 3)"), (torch.zeros(()), "()")])
def test_bad_logits_are_named(logits, words):
    with pytest.raises(ValueError) as error:
        mixing(logits, 0.75)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "weight, alpha, words",
    [
        pytest.param(torch.randn(8, 3), torch.rand(7), "alpha is (7,)", id="alpha of another E"),
        pytest.param(
            torch.randn(8, 3), torch.rand(8, 1), "alpha is (8, 1)", id="alpha with a dim too many"
        ),
        pytest.param(torch.randn(()), torch.rand(()), "weight ()", id="a number"),
        pytest.param(torch.randn(0, 3), torch.rand(0), "weight (0, 3)", id="no experts"),
    ],
)
def test_bad_arguments_are_named(weight, alpha, words):
    with pytest.raises(ValueError) as error:
        merge_experts(weight, alpha)
    assert words in str(error.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_twenty_runs_give_the_same_bits(backend, device):
    weight, alpha, dout = (torch.randn(s, device=device) for s in ((8, 34, 33), (8,), (34, 33)))
    first = run(merge_experts, weight, alpha, dout, backend=backend)
    for _ in range(20 if backend == "torch" or "TRITON_INTERPRET" not in os.environ else 3):
        again = run(merge_experts, weight, alpha, dout, backend=backend)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("needed", ["weight", "alpha"])
def test_each_gradient_alone(needed):
    leaves = {"weight": torch.randn(4, 5, 6), "alpha": torch.rand(4)}
    dout = torch.randn(5, 6)
    want = run(merge_experts, leaves["weight"], leaves["alpha"], dout)[f"d{needed}"]
    leaves[needed].requires_grad_()
    assert torch.equal(torch.autograd.grad(merge_experts(**leaves), leaves[needed], dout)[0], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["plain", "transposed", "expanded"])
def test_opcheck(layout, dtype):
    weight = {
        "plain": torch.randn(3, 4, 5),
        "transposed": torch.randn(3, 5, 4).transpose(1, 2),
        "expanded": torch.randn(1, 4, 5).expand(3, 4, 5),
    }
    weight = weight[layout].to(dtype)
    alpha = torch.rand(3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    torch.library.opcheck(
        torch.ops.moe_runtime.merge_experts,
        (weight.detach().requires_grad_(layout != "expanded"), alpha.requires_grad_(), "torch"),
    )
    torch.library.opcheck(
        torch.ops.moe_runtime.merge_experts_backward_alpha,
        (torch.randn(4, 5).to(dtype), weight, "torch"),
    )


def test_compiles_without_a_graph_break():
    def merge(logits, weight):
        return merge_experts(weight, mixing(logits, 0.75))

    torch._dynamo.reset()
    logits = torch.randn(3, requires_grad=True)
    weight = torch.randn(4, 5, 6, requires_grad=True)
    assert torch._dynamo.explain(merge)(logits, weight).graph_break_count == 0
    compiled = torch.compile(merge, fullgraph=True, backend="aot_eager")
    grads = [
        torch.autograd.grad(f(logits, weight).square().sum(), (logits, weight))
        for f in (merge, compiled)
    ]
    assert torch.equal(merge(logits, weight), compiled(logits, weight))
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want)


def test_keeps_nothing_but_its_inputs():
    kept = []
    weight = torch.randn(4, 64, 64).bfloat16()
    alpha = torch.rand(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.data_ptr()) or t, lambda t: t
    ):
        merge_experts(weight, alpha)
    assert set(kept) <= {weight.data_ptr(), alpha.data_ptr()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "stride", [2**31 - 1, 2**31, 2**31 + 1], ids=["2^31 - 1", "2^31", "2^31 + 1"]
)
def test_offsets_beyond_int32(stride, backend):
    if torch.cuda.is_available():
        pytest.skip("on a GPU tests/gpu/test_merging.py fills that many elements")
    # calloc gives pages that take no memory before they are touched
    memory = torch.from_numpy(np.zeros(stride + 8, dtype=np.float16))
    weight = memory.as_strided((2, 5), (stride, 1))
    weight[0], weight[1] = torch.arange(5), torch.arange(5, 10)
    alpha = torch.tensor([0.5, 2.0], requires_grad=True)
    out = merge_experts(weight, alpha, backend=backend)
    assert out.tolist() == [0.5 * i + 2 * (i + 5) for i in range(5)]
    (dalpha,) = torch.autograd.grad(out, alpha, torch.ones(5, dtype=torch.float16))
    assert dalpha.tolist() == [10, 35]


def test_float64_is_never_summed_in_float32(monkeypatch):
    weight = torch.randn(3, 5, dtype=torch.float64)
    alpha = torch.rand(3, dtype=torch.float64)
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    torch.testing.assert_close(merge_experts(weight, alpha), alpha @ weight, rtol=1e-14, atol=1e-14)
    with pytest.raises(ValueError, match="Use backend 'torch' for float64"):
        merge_experts(weight, alpha, backend="triton")
