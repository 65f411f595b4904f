"""The cpp backend of merging: torch's bits forward, float64 within rounding backward, on every
instruction set and layout.
"""

import numpy as np
import pytest
import torch

from moe_runtime import backends
from moe_runtime.config import MoEConfig
from moe_runtime.modules.merged import MergedMLP
from moe_runtime.native.library import cpp
from moe_runtime.ops import merging
from moe_runtime.ops.merging import merge_experts, merge_rows, merged_linear, mixing
from tests.ops.test_merged_linear import doubled, equation, sample
from tests.ops.test_merged_linear import run as run_linear
from tests.ops.test_merging import SHAPES, by_experts, run
from tests.ops.test_moe_mlp_cpp import FLOATS, VARIANTS, _library, variant  # noqa: F401  fixtures
from tests.support.merging import CASES, merge_mismatches
from tests.support.oracle import assert_parity

BLOCK = 4096  # of csrc/cpu/kernels.h
LAYOUTS = [
    pytest.param((6, 33, 34), lambda w: w.transpose(1, 2), True, id="transposed"),
    pytest.param(
        (6, 5, 7, 3), lambda w: w.permute(0, 2, 3, 1), True, id="three dims in another order"
    ),
    pytest.param((12, 34, 33), lambda w: w[::2], True, id="every other expert"),
    pytest.param((6, 68, 33), lambda w: w.chunk(2, 1)[1], True, id="a half of each expert"),
    pytest.param((1, 34, 33), lambda w: w.expand(6, -1, -1), True, id="E views of one expert"),
    pytest.param(
        (34, 33, 6), lambda w: w.permute(2, 0, 1), False, id="the expert as the fastest dim"
    ),
    pytest.param((6, 34, 66), lambda w: w[:, :, 1::2], False, id="strided"),
    pytest.param((6, 34, 1), lambda w: w.expand(-1, -1, 33), False, id="one number a row"),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_parity(shape, dtype, variant, tolerance):  # noqa: F811
    weight = torch.randn(shape).to(dtype)
    alpha = torch.rand(shape[0]).softmax(-1)
    dout = torch.randn(shape[1:]).to(dtype)
    got = run(merge_experts, weight, alpha, dout, backend="cpp")
    assert got["out"].dtype == dtype and got["dalpha"].dtype == torch.float32
    assert_parity(
        got, run(by_experts, weight.double(), alpha.double(), dout.double()), tolerance[dtype]
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("E, P", CASES)
def test_the_bits_are_torchs_and_the_gradient_float64s(E, P, dtype, variant):  # noqa: F811
    assert not merge_mismatches(E, P, dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_one_by_one_are_the_stack_bit_by_bit(dtype, variant):  # noqa: F811
    weight = torch.randn(11, 130, 33).to(dtype)
    alpha = torch.randn(11)
    assert torch.equal(
        merge_rows((row.clone() for row in weight), alpha),
        merge_experts(weight, alpha, backend="cpp"),
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("stored, view, whole", LAYOUTS)
def test_layouts_are_read_where_they_lie(stored, view, whole, dtype):
    weight = view(torch.randn(stored).to(dtype))
    shape = weight.shape[1:]
    alpha = torch.randn(6)
    out = merge_experts(weight, alpha, backend="cpp")
    assert out.is_contiguous() and torch.equal(
        out, merge_experts(weight.contiguous(), alpha, backend="torch")
    )
    full = torch.randn(shape).to(dtype)
    for dout in (
        full,
        full.flatten()[0].expand(shape),
        torch.randn(shape[::-1]).to(dtype).permute(*range(len(shape))[::-1]),
    ):
        want = merging._merge_backward_alpha_cpp(dout.contiguous(), weight.contiguous())
        assert_parity(
            {"dalpha": merging._merge_backward_alpha_cpp(dout, weight)}, {"dalpha": want}, 1e-5
        )
    assert (merging._as_stored(weight)[0].data_ptr() == weight.data_ptr()) == whole


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_threads_change_no_bit(dtype, monkeypatch, variant):  # noqa: F811
    weight = torch.randn(9, 11 * BLOCK + 77).to(dtype)
    alpha = torch.randn(9)
    dout = torch.randn(11 * BLOCK + 77).to(dtype)

    def results(threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return [merging._merge_cpp(weight, alpha), merging._merge_backward_alpha_cpp(dout, weight)]

    want = results(1)
    for threads in (2, 3, 8, 64):
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(want, results(threads)))


@pytest.mark.parametrize(
    "given", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_gradient_may_come_in_another_dtype(dtype, given, variant):  # noqa: F811
    weight = torch.randn(11, 5003).to(dtype)
    dout = torch.randn(5003).to(given)
    assert_parity(
        {"dalpha": merging._merge_backward_alpha_cpp(dout, weight)},
        {"dalpha": weight.double() @ dout.double()},
        1e-6,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_is_no_number_goes_where_it_goes_in_torch(value, dtype, variant):  # noqa: F811
    weight = torch.randn(9, 300).to(dtype)
    alpha = torch.randn(9)
    dout = torch.randn(300).to(dtype)
    alpha[4] = 0.0  # times infinity is no number
    weight[4, 7], weight[0, 130], weight[8, 299] = value, value, -value
    want, got = (run(merge_experts, weight, alpha, dout, backend=name) for name in ("torch", "cpp"))
    torch.testing.assert_close(got["out"], want["out"], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got["dalpha"], want["dalpha"], rtol=1e-4, atol=1e-5, equal_nan=True)
    alpha[4], dout[299] = value, value
    want, got = (run(merge_experts, weight, alpha, dout, backend=name) for name in ("torch", "cpp"))
    torch.testing.assert_close(got["out"], want["out"], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got["dalpha"], want["dalpha"], rtol=1e-4, atol=1e-5, equal_nan=True)


def test_long_sums_keep_float32s_last_digits(variant):  # noqa: F811
    """Numbers of one sign: a float32 that sums a million of them one by one is wrong by a
    thousandth.
    """
    weight = torch.rand(2, 1_000_003)
    dout = torch.rand(1_000_003)
    want = weight.double() @ dout.double()
    got = merging._merge_backward_alpha_cpp(dout, weight)
    torchs = weight.mv(dout)
    assert ((got - want).abs() / want).max() <= max(
        ((torchs - want).abs() / want).max().item(), 2e-7
    )


@pytest.mark.parametrize("shape", [(2, 0, 7), (1, 1), (1,), (70, 3)], ids=str)
def test_nothing_and_next_to_nothing(shape):
    weight = torch.randn(shape)
    alpha = torch.randn(shape[0])
    dout = torch.randn(shape[1:])
    want, got = (run(merge_experts, weight, alpha, dout, backend=name) for name in ("torch", "cpp"))
    assert torch.equal(got["out"], want["out"])
    assert_parity({"dalpha": got["dalpha"]}, {"dalpha": want["dalpha"]}, 1e-6)


def test_coefficients_may_lie_apart():
    weight = torch.randn(6, 100)
    alpha = torch.randn(6, 3)
    want = merge_experts(weight, alpha[:, 1].contiguous(), backend="torch")
    assert torch.equal(merge_experts(weight, alpha[:, 1], backend="cpp"), want)
    assert torch.equal(
        merge_experts(weight, alpha[:1, 0].expand(6), backend="cpp"),
        merge_experts(weight, alpha[:1, 0].repeat(6), backend="torch"),
    )


@pytest.mark.parametrize("stride", [2**31 - 1, 2**31 + 1], ids=["2^31 - 1", "2^31 + 1"])
def test_experts_beyond_int32(stride):
    # pages take memory once touched
    memory = torch.from_numpy(np.zeros(stride + 8, dtype=np.int16)).view(torch.bfloat16)
    weight = memory.as_strided((2, 5), (stride, 1))
    weight[0], weight[1] = torch.arange(5), torch.arange(5, 10)
    alpha = torch.tensor([0.5, 2.0], requires_grad=True)
    out = merge_experts(weight, alpha, backend="cpp")
    assert out.tolist() == [0.5 * i + 2 * (i + 5) for i in range(5)]
    assert torch.autograd.grad(out, alpha, torch.ones(5, dtype=torch.bfloat16))[0].tolist() == [
        10,
        35,
    ]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [{}, {"T": 0}, {"T": (2, 3, 5), "E": 9, "bias": False}], ids=str)
def test_merged_linear(shape, dtype, tolerance):
    x, weight, alpha, bias, dout = sample(**shape, dtype=dtype)
    got = run_linear(merged_linear, x, weight, alpha, bias, dout, backend="cpp")
    assert_parity(
        got, run_linear(equation, *doubled(x, weight, alpha, bias, dout)), tolerance[dtype]
    )


def test_gradient_of_the_gradient_is_the_equations():
    weight = torch.randn(8, 34, 33)
    alpha = torch.rand(8).softmax(-1)

    def second(f, *leaves):
        leaves = [t.detach().requires_grad_() for t in leaves]
        first = torch.autograd.grad(f(*leaves).tanh().square().sum(), leaves, create_graph=True)
        return dict(enumerate(torch.autograd.grad(sum(g.square().sum() for g in first), leaves)))

    got = second(lambda w, a: merge_experts(w, a, backend="cpp"), weight, alpha)
    assert_parity(got, second(by_experts, weight.double(), alpha.double()), 1e-4)


@pytest.mark.parametrize(
    "dtype, transposed", [(torch.float32, False), (torch.bfloat16, True)], ids=str
)
def test_opcheck(dtype, transposed):
    weight = torch.randn(3, 5, 4).transpose(1, 2) if transposed else torch.randn(3, 4, 5)
    weight = weight.to(dtype)
    alpha = torch.rand(3)
    leaves = weight.detach().requires_grad_(), alpha.requires_grad_()
    torch.library.opcheck(torch.ops.moe_runtime.merge_experts, (*leaves, "cpp"))
    dout = torch.randn(4, 5).to(dtype)
    torch.library.opcheck(torch.ops.moe_runtime.merge_experts_backward_alpha, (dout, weight, "cpp"))


def test_opcheck_of_the_linear_layer():
    x, weight, alpha, bias, _ = sample(5, E=3, N=4, K=5)
    leaves = [t.requires_grad_() for t in (x, alpha, bias)]
    args = (leaves[0], weight, leaves[1], merge_experts(weight, alpha.detach()), leaves[2], "cpp")
    torch.library.opcheck(torch.ops.moe_runtime.merged_linear, args)


def test_is_the_default_and_compiles_without_a_graph_break():
    def merge(logits, weight):
        return merge_experts(weight, mixing(logits, 0.75))

    logits = torch.randn(3, requires_grad=True)
    weight = torch.randn(4, 5, 6)
    assert backends.pick("merge_experts", weight) == "cpp"
    torch._dynamo.reset()
    compiled = torch.compile(merge, fullgraph=True, backend="aot_eager")
    got, want = (
        [f(logits, weight), *torch.autograd.grad(f(logits, weight).sum(), logits)]
        for f in (compiled, merge)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_mergeable_layer_keeps_its_mixture_and_sees_new_logits(dtype, monkeypatch):
    layer = MergedMLP(
        MoEConfig(hidden_size=34, intermediate_size=17, num_experts=4, top_k=2), dtype=dtype
    )
    (
        torch.nn.init.normal_(layer.experts.gate_up_proj),
        torch.nn.init.normal_(layer.experts.down_proj),
    )
    x = torch.randn(5, 34).to(dtype)
    taken = []
    forward = merging._merge_cpp
    monkeypatch.setattr(merging, "_merge_cpp", lambda *args: taken.append(1) or forward(*args))

    def step(backend):
        monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
        layer.release()
        return torch.autograd.grad(layer(x).sum(), layer.mixing_logits)[0], layer(x)

    for _ in range(2):
        taken.clear()
        got = step("cpp")
        assert len(taken) == 2  # once for each projection, and kept
        want = step("torch")
        assert torch.equal(got[1], want[1])
        torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
        layer.mixing_logits.data.add_(torch.randn(3))


def test_dtypes_that_it_lacks_are_refused_and_go_elsewhere_by_default():
    assert backends.pick("merge_experts", torch.zeros(1, dtype=torch.float16)) == "torch"
    with pytest.raises(
        ValueError,
        match="'cpp' cannot run merge_experts: the tensor is torch.float16, but float32 or bfl",
    ):
        merge_experts(torch.zeros(2, 3, dtype=torch.float16), torch.ones(2), backend="cpp")
    with pytest.raises(ValueError, match="Use backend 'torch' for float64"):
        merge_experts(torch.zeros(2, 3, dtype=torch.float64), torch.ones(2), backend="cpp")
    assert set(cpp.DTYPES) == set(FLOATS) and "generic" in VARIANTS
