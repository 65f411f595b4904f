"""`merged_linear` under autograd and autocast: what it saves, second gradients, and offsets."""

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.ops.merging import merge_experts, merged_linear
from tests.support.oracle import assert_parity

OP = "merge_experts"


def by_experts(weight, alpha):
    """W = sum_e alpha_e W_e."""
    return sum(alpha[e] * weight[e] for e in range(len(weight)))


def equation(x, weight, alpha, bias):
    """y = x (sum_e alpha_e W_e)^T + b."""
    return x @ by_experts(weight, alpha).t() + bias


def sample(T=23, dtype=torch.float32, device="cpu"):
    """x, weight, alpha, bias, dout."""
    x = torch.randn(T, 33)
    weight = torch.randn(8, 34, 33)
    alpha = torch.rand(8).softmax(-1).to(torch.promote_types(dtype, torch.float32))
    bias = torch.randn(34)
    dout = torch.randn(T, 34)
    x, weight, bias, dout = (t.to(device, dtype) for t in (x, weight, bias, dout))
    return x, weight, alpha.to(device), bias, dout


def run(f, x, weight, alpha, bias, dout, **options):
    leaves = [t.detach().clone().requires_grad_() for t in (x, alpha, bias)]
    x, alpha, bias = leaves
    out = f(x, weight, alpha, bias=bias, **options)
    dx, dalpha, dbias = torch.autograd.grad(
        out,
        leaves,
        dout.to(out.dtype),
    )
    return {"out": out.detach(), "dx": dx, "dalpha": dalpha, "dbias": dbias}


def exact(case):
    return run(equation, *(t.double() for t in case))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_that_of_linear(stored, backend, device, tolerance):
    x, weight, alpha, bias, dout = sample(device=device)
    weight = weight.to(stored)
    merged = merge_experts(weight, alpha)
    case = (x, weight, alpha, bias, dout)
    with torch.autocast(device, torch.bfloat16):
        got = run(merged_linear, *case, merged=merged, backend=backend)
        assert torch.equal(
            got["out"],
            F.linear(
                x,
                merged,
                bias,
            ),
        )
    assert got["out"].dtype == torch.bfloat16
    assert got["dx"].dtype == got["dbias"].dtype == torch.float32
    assert_parity(got, exact(case), tolerance[torch.bfloat16])


def test_float64_under_autocast_stays_float64():
    case = sample(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(merged_linear, *case)
    assert_parity(got, exact(case), 1e-12)


@pytest.mark.parametrize(
    "needed, saved",
    [
        ((), ()),
        (("x",), ("merged",)),
        (("alpha",), ("x", "weight", "alpha")),
        (("bias",), ()),
        (("x", "alpha", "bias"), ("merged", "x", "weight", "alpha")),
    ],
    ids=str,
)
def test_saves_only_what_its_gradients_need(needed, saved):
    found = set()
    x, weight, alpha, bias, _ = sample()
    merged = merge_experts(weight, alpha)
    tensors = {
        "x": x,
        "weight": weight,
        "alpha": alpha,
        "merged": merged,
        "bias": bias,
    }
    for name in needed:
        tensors[name].requires_grad_()

    def note(tensor):
        found.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = merged_linear(**tensors)
    assert found == {tensors[name].data_ptr() for name in saved}
    assert out.requires_grad == bool(needed)


def second_gradients(f, *leaves):
    """Return gradients of the squares of the gradients of f(*leaves)."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    loss = f(*leaves).tanh().square().sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    total = sum(gradient.square().sum() for gradient in first)
    return dict(enumerate(torch.autograd.grad(total, leaves)))


def test_second_gradient_of_the_layer_is_the_equations(backend, device):
    """create_graph=True: the kernels' results have no graph, and would silently give zero."""
    x, weight, alpha, bias, _ = sample(device=device)

    def layer(x, alpha):
        return merged_linear(x, weight, alpha, bias=bias, backend=backend)

    def want(x, alpha):
        return equation(x, weight.double(), alpha, bias.double())

    got = second_gradients(layer, x, alpha)
    assert_parity(
        got,
        second_gradients(want, x.double(), alpha.double()),
        1e-4,
    )


def test_second_gradient_of_merging_is_the_equations(backend, device):
    _, weight, alpha, _, _ = sample(device=device)
    got = second_gradients(
        lambda w, a: merge_experts(w, a, backend=backend),
        weight,
        alpha,
    )
    assert_parity(
        got,
        second_gradients(by_experts, weight.double(), alpha.double()),
        1e-4,
    )
