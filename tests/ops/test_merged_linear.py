"""`merged_linear` against the equation in float64, on every backend; what it keeps, and what its
gradient never makes.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moe_runtime.ops.merging import merge_experts, merged_linear, mixing
from tests.ops.test_merging import BACKENDS, by_experts
from tests.support.oracle import assert_parity

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def equation(x, weight, alpha, bias):
    """y = x (sum_e alpha_e W_e)^T + b."""
    y = x @ by_experts(weight, alpha).t()
    return y if bias is None else y + bias


def run(f, x, weight, alpha, bias, dout, view=lambda x: x, **kwargs):
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in (x, alpha, bias)]
    out = f(view(leaves[0]), weight, leaves[1], bias=leaves[2], **kwargs)
    names = [name for name, leaf in zip(("dx", "dalpha", "dbias"), leaves) if leaf is not None]
    grads = torch.autograd.grad(
        out, [leaf for leaf in leaves if leaf is not None], dout.to(out.dtype)
    )
    return {"out": out.detach()} | dict(zip(names, grads))


def doubled(*tensors):
    return [t if t is None else t.double() for t in tensors]


def sample(T=23, E=8, N=34, K=33, dtype=torch.float32, device="cpu", bias=True):
    """x, weight, alpha, bias, dout."""
    shape = T if isinstance(T, tuple) else (T,)
    x = torch.randn(*shape, K)
    weight = torch.randn(E, N, K)
    dout = torch.randn(*shape, N)
    tensors = [x, weight, torch.rand(E).softmax(-1), torch.randn(N) if bias else None, dout]
    return [
        t if t is None else t.to(device, torch.float32 if t.shape == (E,) else dtype)
        for t in tensors
    ]


SHAPES = [
    pytest.param({}, id="XFT: 8 experts, ragged"),
    pytest.param({"T": 0}, id="T = 0"),
    pytest.param({"T": 1, "bias": False}, id="T = 1"),
    pytest.param({"T": ()}, id="x is one row without a dim"),
    pytest.param({"T": (2, 3, 5), "E": 3, "N": 66, "K": 17, "bias": False}, id="more dims, E = 3"),
    pytest.param({"T": 65, "E": 1, "N": 17, "K": 33}, id="E = 1, several steps along T"),
    pytest.param({"T": 32, "E": 11, "N": 64, "K": 96}, id="no ragged tile"),
    pytest.param({"E": 2, "N": 1, "K": 1}, id="one number each"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_parity(shape, dtype, backend, device, tolerance):
    x, weight, alpha, bias, dout = sample(**shape, dtype=dtype, device=device)
    merged = merge_experts(weight, alpha, backend=backend)
    got = run(merged_linear, x, weight, alpha, bias, dout, merged=merged, backend=backend)
    assert got["out"].dtype == got["dx"].dtype == dtype and got["dalpha"].dtype == torch.float32
    bound = dict.fromkeys(got, tolerance[dtype])
    if backend == "triton":  # dW is float32 in registers, never rounded to x's dtype
        bound["dalpha"] = tolerance[torch.float32]
    assert_parity(got, run(equation, *doubled(x, weight, alpha, bias, dout)), bound)


@pytest.mark.parametrize("backend", BACKENDS)
def test_merges_itself_if_not_given_the_merged_weight(backend, device):
    x, weight, alpha, bias, dout = sample(device=device)
    merged = merge_experts(weight, alpha, backend=backend)
    want = run(merged_linear, x, weight, alpha, bias, dout, merged=merged, backend=backend)
    got = run(merged_linear, x, weight, alpha, bias, dout, backend=backend)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "stored, view",
    [
        pytest.param((7, 66), lambda x: x[:, ::2], id="strided"),
        pytest.param((33, 7), lambda x: x.t(), id="transposed"),
        pytest.param((1, 33), lambda x: x.expand(7, -1), id="one row"),
        pytest.param((5, 3, 33), lambda x: x.transpose(0, 1), id="batch and tokens swapped"),
    ],
)
def test_layouts_of_x(stored, view, backend, device, tolerance):
    x = torch.randn(stored, device=device)
    _, weight, alpha, bias, dout = sample(T=tuple(view(x).shape[:-1]), device=device)
    for dy in (dout, dout[..., :1].expand_as(dout), dout.flatten()[0].expand_as(dout)):
        got = run(merged_linear, x, weight, alpha, bias, dy, view, backend=backend)
        assert_parity(
            got, run(equation, *doubled(x, weight, alpha, bias, dy), view), tolerance[torch.float32]
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "stored, view",
    [
        pytest.param((8, 33, 34), lambda w: w.transpose(1, 2), id="transposed"),
        pytest.param((34, 33, 8), lambda w: w.permute(2, 0, 1), id="the expert as the fastest dim"),
        pytest.param(
            (1, 34, 33), lambda w: w.expand(8, -1, -1), id="E views of one expert (stride 0)"
        ),
        pytest.param((16, 34, 33), lambda w: w[::2], id="every other expert"),
    ],
)
def test_layouts_of_the_experts(stored, view, backend, device, tolerance):
    x, _, alpha, bias, dout = sample(device=device)
    weight = view(torch.randn(stored, device=device))
    got = run(merged_linear, x, weight, alpha, bias, dout, backend=backend)
    assert_parity(
        got, run(equation, *doubled(x, weight, alpha, bias, dout)), tolerance[torch.float32]
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "stored, given", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str
)
def test_autocast_is_that_of_linear(stored, given, backend, device, tolerance):
    x, weight, alpha, bias, dout = sample(device=device)
    x = x.to(given)
    bias = bias.to(given)
    weight = weight.to(stored)
    merged = merge_experts(weight, alpha)

    def linear(x, weight, alpha, bias):
        return F.linear(x, merged, bias)

    with torch.autocast(device, torch.bfloat16):
        got = run(merged_linear, x, weight, alpha, bias, dout, merged=merged, backend=backend)
        assert torch.equal(got["out"], linear(x, weight, alpha, bias))
    assert got["out"].dtype == torch.bfloat16 and got["dx"].dtype == got["dbias"].dtype == given
    assert_parity(
        got, run(equation, *doubled(x, weight, alpha, bias, dout)), tolerance[torch.bfloat16]
    )


def test_float64_under_autocast_stays_float64():
    x, weight, alpha, bias, dout = doubled(*sample())
    with torch.autocast("cpu", torch.bfloat16):
        got = run(merged_linear, x, weight, alpha, bias, dout)
    assert_parity(got, run(equation, x, weight, alpha, bias, dout), 1e-12)


@pytest.mark.parametrize(
    "needed", [(), ("x",), ("alpha",), ("bias",), ("x", "alpha", "bias")], ids=str
)
def test_keeps_only_what_its_gradients_need(needed):
    kept = set()
    x, weight, alpha, bias, _ = sample()
    merged = merge_experts(weight, alpha)
    tensors = {"x": x, "weight": weight, "alpha": alpha, "merged": merged, "bias": bias}
    for name in needed:
        tensors[name].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.add(t.data_ptr()) or t, lambda t: t
    ):
        out = merged_linear(**tensors)
    want = {"x": ["merged"], "alpha": ["x", "weight", "alpha"]}
    assert kept == {tensors[name].data_ptr() for need in needed for name in want.get(need, ())}
    assert out.requires_grad == bool(needed)


@pytest.mark.parametrize("needed", ["x", "alpha", "bias"])
def test_each_gradient_alone(needed):
    x, weight, alpha, bias, dout = sample()
    want = run(merged_linear, x, weight, alpha, bias, dout)[f"d{needed}"]
    leaf = {"x": x, "alpha": alpha, "bias": bias}[needed].requires_grad_()
    assert torch.equal(
        torch.autograd.grad(merged_linear(x, weight, alpha, bias=bias), leaf, dout)[0], want
    )


def test_experts_that_train_get_their_gradient():
    x, weight, alpha, bias, dout = (t.double() for t in sample())
    merged = merge_experts(weight, alpha)
    leaves = [t.requires_grad_() for t in (x, weight, alpha, bias)]
    got = torch.autograd.grad(merged_linear(x, weight, alpha, merged, bias), leaves, dout)
    want = torch.autograd.grad(equation(x, weight, alpha, bias), leaves, dout)
    assert_parity(dict(enumerate(got)), dict(enumerate(want)), 1e-12)
    with torch.no_grad():
        assert not merged_linear(x, weight, alpha, merged, bias).requires_grad


def test_gradcheck():
    x, weight, alpha, bias, _ = (t.double().requires_grad_() for t in sample(T=3, E=3, N=4, K=5))
    weight = weight.detach()
    f = lambda x, alpha, bias: merged_linear(x, weight, alpha, bias=bias)  # noqa: E731
    assert torch.autograd.gradcheck(f, (x, alpha, bias))
    assert torch.autograd.gradgradcheck(lambda *v: f(*v).tanh(), (x, alpha, bias))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_the_gradient_is_the_equations(backend, device):
    """create_graph=True: the kernels' results have no graph, and a zero would be silent."""
    x, weight, alpha, bias, _ = sample(device=device)

    def second(f, *leaves):
        leaves = [t.detach().requires_grad_() for t in leaves]
        first = torch.autograd.grad(f(*leaves).tanh().square().sum(), leaves, create_graph=True)
        return dict(enumerate(torch.autograd.grad(sum(g.square().sum() for g in first), leaves)))

    got = second(lambda x, a: merged_linear(x, weight, a, bias=bias, backend=backend), x, alpha)
    assert_parity(
        got,
        second(lambda x, a: equation(x, weight.double(), a, bias.double()), *doubled(x, alpha)),
        1e-4,
    )
    got = second(lambda a, w: merge_experts(w, a, backend=backend), alpha, weight)
    assert_parity(got, second(lambda a, w: by_experts(w, a), *doubled(alpha, weight)), 1e-4)


@pytest.mark.parametrize(
    "T, dtype",
    [(0, torch.float32), (5, torch.bfloat16), ((2, 3), torch.float32), ((), torch.float64)],
    ids=str,
)
def test_opcheck(T, dtype):
    x, weight, alpha, bias, dout = sample(T, E=3, N=4, K=5, dtype=dtype)
    alpha, merged = (
        alpha.to(torch.promote_types(dtype, torch.float32)),
        merge_experts(weight, alpha),
    )
    leaves = [t.requires_grad_() for t in (x, alpha, bias)]
    args = (leaves[0], weight, leaves[1], merged, leaves[2], "torch")
    torch.library.opcheck(torch.ops.moe_runtime.merged_linear, args)
    torch.library.opcheck(torch.ops.moe_runtime.merged_linear, (*args[:4], None, "torch"))
    x = x.detach()
    for given in ((x, weight, merged, True), (None, None, merged, False), (x, weight, None, False)):
        torch.library.opcheck(torch.ops.moe_runtime.merged_linear_backward, (dout, *given, "torch"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    def step(x, logits, weight, bias):
        alpha = mixing(logits, 0.75)
        return merged_linear(x, weight, alpha, merge_experts(weight, alpha.detach()), bias)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for T in (5, 7):
        x, weight, _, bias, dout = sample(T)
        leaves = [t.requires_grad_() for t in (x, torch.randn(7), bias)]
        assert torch._dynamo.explain(step)(*leaves[:2], weight, leaves[2]).graph_break_count == 0
        for f in (step, compiled):
            out = f(leaves[0], leaves[1], weight, leaves[2])
            grads = torch.autograd.grad(out, leaves, dout)
            if f is step:
                want = (out, *grads)
        assert all(torch.equal(a, b) for a, b in zip((out, *grads), want))


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_give_the_same_bits(backend, device):
    x, weight, alpha, bias, dout = sample(T=65, device=device)
    first = run(merged_linear, x, weight, alpha, bias, dout, backend=backend)
    for _ in range(3):
        again = run(merged_linear, x, weight, alpha, bias, dout, backend=backend)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "stride", [2**31 - 1, 2**31, 2**31 + 1], ids=["2^31 - 1", "2^31", "2^31 + 1"]
)
def test_experts_beyond_int32(stride, backend):
    if torch.cuda.is_available():
        pytest.skip("on a GPU tests/gpu/test_merging.py fills that many elements")
    # pages take memory once they are touched
    memory = torch.from_numpy(np.zeros(stride + 8, dtype=np.float16))
    weight = memory.as_strided((2, 2, 3), (stride, 3, 1))
    weight[0], weight[1] = torch.arange(6).view(2, 3), torch.arange(6, 12).view(2, 3)
    alpha = torch.tensor([0.5, 2.0], requires_grad=True)
    x = torch.eye(3, dtype=torch.float16)
    out = merged_linear(x, weight, alpha, backend=backend)
    assert out.t().tolist() == (0.5 * weight[0] + 2 * weight[1]).tolist()
    (dalpha,) = torch.autograd.grad(out.sum(), alpha)
    assert dalpha.tolist() == [15, 51]
