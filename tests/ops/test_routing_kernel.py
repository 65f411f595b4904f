"""The router's kernels: every gate against the oracle, ties and bad rows against the reference,
layouts, offsets, mutants.
"""

import numpy as np
import pytest
import torch

from moe_runtime import backends
from moe_runtime.kernels import routing as kernels
from moe_runtime.ops.routing import route, route_reference
from tests.ops.test_routing import FORCED, forced_pairs, slots
from tests.support.mutants import edited, noting
from tests.support.oracle import GATES, SHARED, mismatches, route_mismatches, saved_bytes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WHY = backends.why_not(
    "triton", "route", torch.device("cuda" if torch.cuda.is_available() else "cpu")
)
pytestmark = [
    pytest.mark.skipif(WHY is not None, reason=str(WHY)),
    # numpy's, of NaN and inf rows
    pytest.mark.filterwarnings("ignore:(invalid|divide by zero|overflow):RuntimeWarning"),
]


def triton(logits, top_k, gate, **kwargs):
    return route(logits, top_k, gate, backend="triton", **kwargs)


def forward_backward(f, logits, top_k, gate, dweight, **kwargs) -> dict:
    logits = logits.detach().requires_grad_()
    weight, idx = f(logits, top_k, gate, **kwargs)
    (dlogits,) = torch.autograd.grad(weight, logits, dweight.to(weight.dtype))
    return {"weight": weight.detach(), "idx": idx, "dlogits": dlogits}


def same(a: dict, b: dict) -> bool:
    """Whether the two hold the same numbers, NaN at the same places."""
    return a.keys() == b.keys() and all(
        torch.allclose(a[n], b[n], rtol=0, atol=0, equal_nan=True) for n in a
    )


SHAPES = [  # T, experts in the router, experts that it picks
    pytest.param(1, 7, 5, id="one token"),
    pytest.param(69, 7, 5, id="XFT: 8 experts, top 6; the last block ragged"),
    pytest.param(64, 8, 2, id="full blocks"),
    pytest.param(9, 3, 1, id="the shared expert and a routed one"),
    pytest.param(9, 3, 3, id="K = E = 3"),
    pytest.param(18, 2, 1, id="E = 2"),
    pytest.param(17, 1, 1, id="E = 1"),
    pytest.param(5, 33, 17, id="odd sizes"),
]
WIDE_SHAPES = [
    pytest.param(17, 64, 8, id="E = 64"),
    pytest.param(2, 64, 64, id="K = E = 64"),
    pytest.param(5, 127, 7, id="E = 127, K = 7"),
    pytest.param(5, 128, 8, id="E = 128"),
    pytest.param(3, 256, 8, id="E = 256"),
    pytest.param(2, 1025, 3, id="a row of several warps"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, R, k", SHAPES)
@pytest.mark.parametrize("gate", GATES)
def test_equals_the_equation(gate, T, R, k, dtype, device, tolerance):
    logits = (2 * torch.randn(T, R, device=device)).to(dtype)
    weight, idx = triton(logits, slots(gate, k), gate)
    assert weight.dtype == torch.float32 and idx.dtype == torch.int32
    assert not route_mismatches(triton, logits, slots(gate, k), gate, tolerance[dtype])


@pytest.mark.parametrize("T, R, k", WIDE_SHAPES)
@pytest.mark.parametrize("gate", GATES)
def test_many_experts(gate, T, R, k, device, tolerance):
    logits = (2 * torch.randn(T, R, device=device)).bfloat16()  # many of them equal
    assert not route_mismatches(triton, logits, slots(gate, k), gate, tolerance[torch.bfloat16])


@pytest.mark.parametrize("gate", GATES)
def test_gradient_is_that_of_the_reference_in_float64(gate, device):
    logits = 2 * torch.randn(131, 64, device=device)
    dweight = torch.randn(131, slots(gate, 8), device=device)
    got = forward_backward(triton, logits, slots(gate, 8), gate, dweight)
    want = forward_backward(route_reference, logits.double(), slots(gate, 8), gate, dweight)
    assert not mismatches(got, want, 5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_narrow_logits_are_computed_in_float32_and_rounded_once(gate, dtype, device):
    logits = torch.randn(21, 9, device=device).to(dtype)
    dweight = torch.randn(21, 4, device=device)
    got = forward_backward(triton, logits, 4, gate, dweight)
    want = forward_backward(triton, logits.float(), 4, gate, dweight)
    assert same(got, want | {"dlogits": want["dlogits"].to(dtype)})


def test_keeps_the_logits_as_they_came_and_the_ids(device):
    logits = torch.randn(64, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    kept, _ = saved_bytes(lambda: triton(logits, 3, "xft").topk_weight, [logits])
    assert kept == 64 * 3 * 4


@pytest.mark.parametrize("gate", GATES)
def test_no_tokens(gate, device):
    logits = torch.zeros(0, 7, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight, idx = triton(logits, 3, gate)
    assert weight.shape == idx.shape == (0, 3)
    weight.sum().backward()
    assert logits.grad.shape == (0, 7) and logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("gate", SHARED)
def test_shared_expert_alone(gate, device):
    logits = torch.zeros(4, 0, device=device, requires_grad=True)
    weight, idx = triton(logits, 1, gate)
    assert weight.tolist() == [[1.0]] * 4 and idx.tolist() == [[0]] * 4
    assert torch.autograd.grad(weight.sum(), logits)[0].shape == (4, 0)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x.t().contiguous().t(), id="transposed"),
        pytest.param(lambda x: x.repeat(1, 2)[:, ::2], id="strided columns"),
        pytest.param(lambda x: x.repeat_interleave(2, 0)[::2], id="every other row"),
        pytest.param(lambda x: torch.cat([x, x, x], 1)[:, 3:10], id="columns of a wider matrix"),
        pytest.param(lambda x: x[:1].expand(19, 7), id="one row for all tokens"),
        pytest.param(lambda x: x[3:4], id="one row"),
        pytest.param(lambda x: x[:, :1].t().contiguous().t(), id="one column"),
    ],
)
@pytest.mark.parametrize("gate", ["xft", "softmax_topk_renorm", "sigmoid_topk"])
def test_layouts(gate, view, device):
    logits = view(torch.randn(19, 7, device=device))
    k = slots(gate, min(2, logits.shape[1]))
    plain = logits.clone(memory_format=torch.contiguous_format)
    for dweight in (
        torch.randn(logits.shape[0], k, device=device),
        torch.randn(1, 1, device=device).expand(len(logits), k),
    ):
        got = forward_backward(triton, logits, k, gate, dweight)
        assert same(got, forward_backward(triton, plain, k, gate, dweight.contiguous()))
        assert got["dlogits"].is_contiguous()


NAN = float("nan")
INF = float("inf")
ROWS = {  # bad and equal numbers
    "one big tie": [0.0] * 6,
    "ties": [1.0, 2.0, 2.0, 0.0, 2.0, 1.0],
    "zeros of both signs": [-0.0, 0.0, -0.0, 0.0, 0.0, -0.0],
    "zeros among others": [-1.0, -0.0, 1e-38, 0.0, -1e-38, 2.0],
    "all NaN": [NAN] * 6,
    "some NaN": [1.0, NAN, 0.0, NAN, 2.0, -1.0],
    "negative NaN": [1.0, -NAN, INF, NAN, 2.0, -1.0],
    "NaN and nothing else": [-INF, NAN, -INF, -INF, -INF, -INF],
    "all experts masked": [-INF] * 6,
    "one expert left": [-INF, 1.0, -INF, -INF, -INF, -INF],
    "two experts left": [-INF, 1.0, -INF, -INF, 1.0, -INF],
    "overflown logits": [INF, INF, 0.0, 0.0, 0.0, 0.0],
    "overflown and masked": [-INF, 3e38, -3e38, INF, -INF, 0.0],
    "far apart": [100.0, -100.0, 0.0, 90.0, -90.0, 99.0],
}


def bad_rows(device) -> torch.Tensor:
    return torch.tensor(list(ROWS.values()), device=device)


def close(got: dict, want: dict) -> list[str]:
    """Where `got` is not `want` up to the rounding of float32: the ids equal, NaN at the same
    places.
    """
    if torch.equal(got["idx"], want["idx"]):
        bad = []
    else:
        bad = [f"ids are {got['idx'].tolist()}, want {want['idx'].tolist()}"]
    return bad + [
        f"{name} is {got[name].tolist()}, want {want[name].tolist()}"
        for name in ("weight", "dlogits")
        if not torch.allclose(got[name], want[name], rtol=1e-5, atol=1e-6, equal_nan=True)
    ]


@pytest.mark.parametrize("k", [1, 4, 6])
@pytest.mark.parametrize("gate", GATES)
def test_ties_and_bad_rows_are_as_in_the_reference(gate, k, device):
    logits = bad_rows(device)
    dweight = torch.randn(len(ROWS), slots(gate, k), device=device)
    got = forward_backward(triton, logits, slots(gate, k), gate, dweight)
    # the gradient in closed form: autograd of the reference has NaN where 0 inf is meant
    assert not close(
        got, forward_backward(route, logits, slots(gate, k), gate, dweight, backend="torch")
    )
    reference = route_reference(logits, slots(gate, k), gate)
    assert torch.equal(got["idx"], reference.topk_idx)
    for row in got["idx"].tolist():
        assert len(set(row)) == len(row) and 0 <= min(row) <= max(row) < 6 + (gate in SHARED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", ["nonorm", "topk_softmax"])
def test_many_ties(gate, dtype, device):
    logits = torch.randint(-2, 2, (40, 64), device=device).to(dtype)
    logits[::3, ::2] = -INF
    k = slots(gate, 40)
    got = triton(logits, k, gate)
    want = route_reference(logits.float(), k, gate)
    assert torch.equal(got.topk_idx, want.topk_idx)
    torch.testing.assert_close(got.topk_weight, want.topk_weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bias_dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_moves_the_choice_and_not_the_weights(dtype, bias_dtype, device, tolerance):
    logits = torch.randn(37, 13, device=device).to(dtype)
    bias = torch.randn(26, device=device).to(bias_dtype)[::2]
    bias[3], bias[5] = -INF, 2.0
    dweight = torch.randn(37, 4, device=device)
    got = forward_backward(triton, logits, 4, "sigmoid_topk", dweight, bias=bias)
    want = forward_backward(
        route_reference, logits.double(), 4, "sigmoid_topk", dweight, bias=bias.double()
    )
    plain = triton(logits, 4, "sigmoid_topk")
    assert torch.equal(got["idx"], want["idx"]) and not torch.equal(got["idx"], plain.topk_idx)
    assert not mismatches({"w": got["weight"]}, {"w": want["weight"]}, 5e-6)
    assert not mismatches({"d": got["dlogits"]}, {"d": want["dlogits"]}, tolerance[dtype])
    assert not (got["idx"] == 3).any() and (got["idx"] == 5).any()


@pytest.mark.parametrize("gate", GATES)
def test_a_token_has_the_same_bits_in_any_batch_and_run(gate, device):
    logits = torch.randn(70, 8, device=device)
    dweight = torch.randn(70, 4, device=device)
    first = forward_backward(triton, logits, 4, gate, dweight)
    assert all(same(forward_backward(triton, logits, 4, gate, dweight), first) for _ in range(3))
    part = forward_backward(triton, logits[5:43], 4, gate, dweight[5:43])
    assert same(part, {name: value[5:43] for name, value in first.items()})


@pytest.mark.parametrize("gate", GATES)
def test_second_gradient(gate, device):
    logits = torch.randn(9, 7, device=device).requires_grad_()
    dweight = torch.randn(9, 4, device=device)
    ddlogits = torch.randn(9, 7, device=device)

    def second(f, dtype):
        x = logits.detach().to(dtype).requires_grad_()
        d = dweight.to(dtype).requires_grad_()
        (dx,) = torch.autograd.grad(f(x, 4, gate)[0], x, d, create_graph=True)
        return {"dlogits": dx.detach()} | dict(
            enumerate(torch.autograd.grad(dx, (x, d), ddlogits.to(dtype)))
        )

    got = second(triton, torch.float32)
    want = second(route_reference, torch.float64)
    assert not mismatches(got, want, 1e-5)


def test_float64_is_never_computed_in_float32(monkeypatch, device):
    logits = torch.randn(5, 7, dtype=torch.float64, device=device)
    with pytest.raises(
        ValueError,
        match="backend 'triton' cannot run route: the tensor is torch.float64. Use backend 'torch'",
    ):
        triton(logits, 3, "xft")
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    got = route(logits, 3, "xft")
    want = route_reference(logits, 3, "xft")
    assert torch.equal(got.topk_weight, want.topk_weight) and torch.equal(
        got.topk_idx, want.topk_idx
    )


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", ["xft", "topk_softmax", "sigmoid_topk"])
def test_opcheck(gate, dtype, layout, device):
    logits = (torch.randn(5, 7) if layout == "contiguous" else torch.randn(7, 5).t()).to(
        device, dtype
    )
    bias = torch.randn(7, device=device) if gate == "sigmoid_topk" else None
    weight, idx = torch.ops.moe_runtime.route(logits, bias, 3, gate, "triton")
    leaf = logits.detach().requires_grad_()
    torch.library.opcheck(torch.ops.moe_runtime.route, (leaf, bias, 3, gate, "triton"))
    torch.library.opcheck(
        torch.ops.moe_runtime.route_backward,
        (torch.randn_like(weight), logits, idx, gate, "triton"),
    )


def test_compiles_without_a_graph_break(device):
    def step(logits):
        weight, idx = triton(logits, 3, "xft")
        return weight, idx, (weight * torch.arange(1, 4, device=device)).sum()

    torch._dynamo.reset()
    logits = torch.randn(6, 7, device=device, dtype=torch.bfloat16, requires_grad=True)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(logits)
    want = step(logits)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert torch.equal(
        torch.autograd.grad(got[2], logits)[0], torch.autograd.grad(want[2], logits)[0]
    )


@pytest.mark.parametrize(
    "rows, stride",
    [
        pytest.param(2, 2**31 - 1, id="2^31 - 1"),
        pytest.param(2, 2**31 + 1, id="2^31 + 1"),
        pytest.param(34, 2**26 + 1, id="the second program begins behind 2^31"),
    ],
)
def test_offsets_beyond_int32(rows, stride, device):
    if device == "cuda":
        pytest.skip("calloc's trick is the CPU's")
    # calloc gives pages that take no memory before they are touched
    memory = torch.from_numpy(np.zeros((rows - 1) * stride + 8, dtype=np.float16))
    logits = memory.as_strided((rows, 7), (stride, 1))
    numbers = torch.randn(rows, 7).half()
    for t in range(rows):
        logits[t] = numbers[t]
    weight, idx = torch.ops.moe_runtime.route(logits, None, 3, "xft", "triton")
    want = triton(numbers, 3, "xft")
    assert torch.equal(weight, want.topk_weight) and torch.equal(idx, want.topk_idx)
    dweight = torch.randn(rows, 3)
    grads = [
        torch.ops.moe_runtime.route_backward(dweight, x, idx, "xft", "triton")
        for x in (logits, numbers)
    ]
    assert torch.equal(*grads)


@pytest.mark.parametrize("gate", GATES)
def test_forced_with_its_own_choice_changes_no_bit(gate, device):
    logits = torch.randn(35, 7, device=device)
    args = logits, slots(gate, 3), gate, torch.randn(35, slots(gate, 3), device=device)
    idx = triton(*args[:3]).topk_idx
    assert same(
        forward_backward(triton, *args), forward_backward(triton, *args, topk_idx=idx.clone())
    )


def forced_mismatches(gate: str, device) -> list[str]:
    """Where the kernels are not the equation for experts of the caller's choice."""
    shared = int(gate in SHARED)
    logits = torch.randn(35, 7, device=device)
    idx = torch.rand(35, 7, device=device).argsort(1)[:, :3] + shared
    idx = torch.cat([idx, idx.new_zeros(35, shared)], 1)
    args = logits, 3 + shared, gate, torch.randn(35, 3 + shared, device=device)
    return close(
        *(
            forward_backward(route, *args, topk_idx=idx, backend=backend)
            for backend in ("triton", "torch")
        )
    )


@pytest.mark.parametrize("gate", GATES)
def test_forced_ids_equal_the_equation(gate, device):
    assert not forced_mismatches(gate, device)


def unusual_forced_mismatches(gate: str, device) -> list[str]:
    """Where the kernels are not the equation for experts that no router would choose."""
    return [
        f"{case}: {got.tolist()}, want {want.tolist()}"
        for case in FORCED
        for got, want in forced_pairs(gate, case, "triton", device)
        if not torch.allclose(got.double(), want, rtol=1e-5, atol=1e-6)
    ]


@pytest.mark.parametrize("gate", GATES)
def test_forced_ids_that_no_router_would_choose(gate, device):
    assert not unusual_forced_mismatches(gate, device)


# mutants of the kernels' source; each has to be caught by the checks above
def caught(module, monkeypatch, device, tolerance) -> list[str]:
    """What the checks say of the kernels of `module`."""
    for name in ("route_forward", "route_backward"):
        monkeypatch.setattr(kernels, name, getattr(module, name))
    torch.manual_seed(0)
    found = []
    for gate in ("xft", "nonorm", "softmax_topk_renorm", "sigmoid_topk"):
        with noting(found):
            found += route_mismatches(
                triton, torch.randn(35, 7, device=device), slots(gate, 3), gate, tolerance
            )
            dweight = torch.randn(len(ROWS), slots(gate, 4), device=device)
            args = bad_rows(device), slots(gate, 4), gate, dweight
            found += close(
                forward_backward(triton, *args), forward_backward(route, *args, backend="torch")
            )
            # what is wrong with the choice already may not run without one
            found += [] if found else forced_mismatches(gate, device)
            found += [] if found else unusual_forced_mismatches(gate, device)
    return found


MUTANTS = [
    pytest.param("t < T)[:, None]", "t <= T)[:, None]", id="a row too many"),
    pytest.param("row = t < T\n", "row = t < T - 1\n", id="last row without a gradient"),
    pytest.param("BLOCK_T + tl.arange", "(BLOCK_T - 1) + tl.arange", id="blocks that overlap"),
    pytest.param("bits ^ 0x7FFFFFFF", "bits", id="negative numbers in reverse order"),
    pytest.param("> 0x7F800000", "> 0x7FFFFFFF", id="a negative NaN ranks lowest"),
    pytest.param("key == -1, 0, key", "key == -2, 0, key", id="-0.0 below 0.0"),
    pytest.param(
        "first = tl.min(tl.where(key == best[:, None], e,",
        "first = E - 1 - tl.min(tl.where(key == best[:, None], E - 1 - e,",
        id="ties to the higher id",
    ),
    pytest.param(
        "_key(choice), DEAD + E_PAD", "_key(choice), 0x7F800000", id="padding can be chosen"
    ),
    pytest.param("DEAD + slot, key)", "DEAD + K - 1 - slot, key)", id="slots in reverse order"),
    pytest.param(
        "e == first[:, None], DEAD", "key == best[:, None], DEAD", id="equal logits chosen together"
    ),
    pytest.param(
        "exp = tl.exp(weight)", "exp = exp", id="softmax of the logits, not of the probabilities"
    ),
    pytest.param("(largest / _sum", "(1 / _sum", id="s_max forgotten"),
    pytest.param("slots + K, 1 - largest", "slots + K, largest", id="shared expert gets s_max"),
    pytest.param("e + SHARED", "e", id="ids not shifted past the shared expert"),
    pytest.param(
        "tl.where(is_first, d + mean",
        "tl.where(is_first & (d != d), d + mean",
        id="no gradient through s_max",
    ),
    pytest.param(
        "d - dshared[:, None]",
        "d + dshared[:, None]",
        id="shared expert's gradient with the wrong sign",
    ),
    pytest.param(
        "q = tl.where(chosen, tl.exp(y), 0.0)",
        "q = tl.exp(y)",
        id="second softmax over all experts",
    ),
    pytest.param("tl.where(chosen, value, 0.0)", "value", id="sum over all experts"),
    pytest.param(
        "dx = y * (d", "dx = tl.where(chosen, y, 0.0) * (d", id="no gradient for experts not chosen"
    ),
    pytest.param("d * s * (1 - s)", "d * s", id="sigmoid's derivative"),
    pytest.param("other=-1) - SHARED", "other=-1)", id="the neighbour"),
    pytest.param(
        "(K + SHARED) + slot, mask", "(K + SHARED) + 0, mask", id="forced: one expert in all slots"
    ),
    pytest.param(
        "t, 0, T, K, SHARED), weight",
        "t, 1, T, K, SHARED), weight",
        id="forced: s_max of the second",
    ),
    pytest.param(
        "tl.where(is_first, y, 0.0)",
        "tl.max(y, 1)[:, None] * is_first",
        id="forced: dx of the largest",
    ),
    pytest.param(
        "x = tl.where(chosen, x, -float",
        "x = tl.where(chosen | True, x, -float",
        id="forced: 0 / 0",
    ),
    pytest.param(
        "value = value * count", "value = value", id="forced: an expert twice counts once"
    ),
    pytest.param(
        "d += tl.where(here",
        "d = tl.where(here, 0.0, d) + tl.where(here",
        id="forced: gradients do not add up",
    ),
    pytest.param(
        "_per_slot(tl.sum(y * d, 1)[:, None], count, FORCED)",
        "tl.sum(y * d, 1)[:, None]",
        id="forced: one slot's share of the mean",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("old, new", MUTANTS)
def test_mutant_is_caught(old, new, tmp_path, monkeypatch, device, tolerance):
    assert caught(
        edited(kernels, tmp_path, old, new), monkeypatch, device, tolerance[torch.float32]
    )


def test_unharmed_kernels_pass(tmp_path, monkeypatch, device, tolerance):
    assert not caught(
        edited(kernels, tmp_path, "", ""), monkeypatch, device, tolerance[torch.float32]
    )
