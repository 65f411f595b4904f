"""Rows back to tokens against float64 loops over slots; every backend against the same oracle."""

from functools import partial

import pytest
import torch

from moe_runtime import backends
from moe_runtime.ops.combine import combine, gather_rows
from moe_runtime.ops.dispatch import dispatch
from moe_runtime.ops.grouped_gemm import grouped_gemm
from tests.support.oracle import (
    assert_parity,
    bounds,
    choose_experts,
    make_case,
    moe_oracle,
    relative_error,
)
from tests.support.oracle import run as run_case

WHY = backends.why_not(
    "triton", "combine", torch.device("cuda" if torch.cuda.is_available() else "cpu")
)
TRITON = pytest.mark.skipif(WHY is not None, reason=str(WHY))
BACKENDS = ["torch", pytest.param("triton", marks=TRITON)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CHOICES = [  # float64 is torch's
    *(pytest.param("torch", dtype, id=f"torch-{dtype}") for dtype in (torch.float64, *DTYPES)),
    *(pytest.param("triton", dtype, id=f"triton-{dtype}", marks=TRITON) for dtype in DTYPES),
]


def by_slots(y, topk_weight, slot_row):
    """out[t] = sum_k topk_weight[t, k] y[slot_row[t * K + k]]."""
    (T, K), slot_row = topk_weight.shape, slot_row.long()  # uint8 would be a mask
    rows = [
        sum((topk_weight[t, k] * y[slot_row[t * K + k]] for k in range(K)), 0 * y.sum(0))
        for t in range(T)
    ]
    if rows:
        return torch.stack(rows)
    return y.new_zeros(0, y.shape[1]) + 0 * y.sum() + 0 * topk_weight.sum()


def eager(y, topk_weight, slot_row):
    """transformers' way: gather, multiply in the rows' dtype, sum."""
    T, K = topk_weight.shape
    return (y[slot_row.long()].view(T, K, y.shape[1]) * topk_weight[..., None].to(y.dtype)).sum(1)


def run(f, leaves, slot_row, dout, view=None):
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    v = view(leaves) if view else leaves
    out = f(v["y"], v["topk_weight"], slot_row)
    grads = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
    return {"out": out.detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads)}


def check(T, K, H, dtype, tolerance, backend, device, view=None, change=None, index=torch.int32):
    leaves = {
        "y": torch.randn(T * K, H, device=device).to(dtype),
        "topk_weight": 0.2 + torch.rand(T, K, device=device),
    }
    leaves["topk_weight"] = leaves["topk_weight"].to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    slot_row = torch.randperm(T * K, device=device).to(index)
    dout = torch.randn(T, H, device=device).to(dtype)
    if change:
        change(leaves)
    want = run(by_slots, {n: leaf.double() for n, leaf in leaves.items()}, slot_row, dout, view)
    got = run(partial(combine, backend=backend), leaves, slot_row, dout, view)
    assert got["out"].dtype == dtype and got["dtopk_weight"].dtype == leaves["topk_weight"].dtype
    assert_parity(
        got, want, bounds(run(eager, leaves, slot_row, dout, view), want, tolerance[dtype])
    )


SHAPES = [
    pytest.param(0, 2, 33, id="no tokens"),
    pytest.param(1, 2, 33, id="one token"),
    pytest.param(29, 3, 33, id="ragged T, H=33"),
    pytest.param(29, 1, 17, id="one slot a token"),
    pytest.param(5, 64, 8, id="many slots: the sum is long"),
    pytest.param(7, 2, 1, id="H = 1"),
    pytest.param(3, 9, 1030, id="H and K beyond a block"),
]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("backend, dtype", CHOICES)
@pytest.mark.parametrize("T, K, H", SHAPES)
def test_parity(T, K, H, backend, dtype, index, tolerance, device):
    check(T, K, H, dtype, tolerance, backend, device, index=index)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", [torch.int8, torch.uint8, torch.int16])
def test_any_integer_dtype(index, backend, tolerance, device):
    check(11, 3, 17, torch.float32, tolerance, backend, device, index=index)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_by_token_and_slot_as_well(backend, device):
    y = torch.randn(12, 5)
    weight = torch.rand(4, 3)
    slot_row = torch.randperm(12).int()
    y = y.to(device)
    weight = weight.to(device)
    slot_row = slot_row.to(device)
    want = combine(y, weight, slot_row, backend)
    assert torch.equal(combine(y, weight, slot_row.view(4, 3), backend), want)
    assert torch.equal(combine(y, weight, slot_row.view(4, 3).t().contiguous().t(), backend), want)


@pytest.mark.parametrize(
    "change, view",
    [
        pytest.param(
            lambda v: v.update(y=v["y"].t().contiguous()),
            lambda v: v | {"y": v["y"].t()},
            id="y transposed",
        ),
        pytest.param(
            lambda v: v.update(y=v["y"].repeat(1, 2)),
            lambda v: v | {"y": v["y"][:, ::2]},
            id="y strided",
        ),
        pytest.param(
            lambda v: v.update(topk_weight=v["topk_weight"].t().contiguous()),
            lambda v: v | {"topk_weight": v["topk_weight"].t()},
            id="weights stored [K, T]",
        ),
        pytest.param(
            lambda v: v.update(topk_weight=v["topk_weight"][:, :1].clone()),
            lambda v: v | {"topk_weight": v["topk_weight"].expand(-1, 3)},
            id="one weight for all slots (stride 0)",
        ),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(change, view, dtype, backend, tolerance, device):
    check(11, 3, 32, dtype, tolerance, backend, device, view, change)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "T, K, H", [(4, 0, 5), (0, 3, 5), (4, 3, 0)], ids=["K = 0", "T = 0", "H = 0"]
)
def test_nothing_to_sum(T, K, H, backend, device):
    y = torch.zeros(T * K, H, device=device, requires_grad=True)
    weight = torch.zeros(T, K, device=device, requires_grad=True)
    out = combine(y, weight, torch.arange(T * K, dtype=torch.int32, device=device), backend)
    assert out.shape == (T, H) and not out.any()
    dy, dweight = torch.autograd.grad(out.sum(), (y, weight))
    assert dy.shape == (T * K, H) and dweight.shape == (T, K) and not dweight.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_in_float32(dtype, backend, device):
    # 1 + 64 * tiny: the terms vanish one by one in the narrow dtype, not in float32
    tiny = torch.finfo(dtype).eps / 8
    y = torch.full((65, 4), tiny, dtype=dtype, device=device)
    y[0] = 1
    out = combine(y, torch.ones(1, 65, device=device), torch.arange(65, device=device), backend)
    assert relative_error(out.cpu(), torch.full((1, 4), 1 + 64 * tiny)) < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_are_not_rounded(dtype, backend, device):
    eps = torch.finfo(dtype).eps
    y = torch.tensor([[1.0], [-1.0]], dtype=dtype, device=device)
    out = combine(
        y,
        torch.tensor([[1 + eps / 4, 1.0]], device=device),
        torch.arange(2, device=device),
        backend,
    )
    assert out.item() == pytest.approx(eps / 4, rel=0.01)


def test_gradcheck():
    y = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    slot_row = torch.randperm(12)
    assert torch.autograd.gradcheck(lambda y, w: combine(y, w, slot_row), (y, weight))


@pytest.mark.parametrize("routing", ["random", "skip", "all", "twice", "dropped"])
def test_the_steps_make_up_the_layer(routing, tolerance):
    def steps(x, up, down, topk_weight, topk_idx, *, up_bias, down_bias, act, gated):
        d = dispatch(topk_idx, up.shape[0])
        gate, value = grouped_gemm(x[d.row_token.long()], up, d.expert_offsets, up_bias).chunk(
            2, -1
        )
        y = grouped_gemm(torch.nn.functional.silu(gate) * value, down, d.expert_offsets, down_bias)
        return combine(y, topk_weight, d.slot_row)

    case = make_case(23, 33, 17, 4, 2, routing=routing, bias=True)
    assert_parity(
        run_case(case, steps), run_case(case, moe_oracle, torch.float64), tolerance[torch.float32]
    )


def test_backward_inside_autocast_is_not_rounded():
    leaves = (torch.randn(12, 33, requires_grad=True), torch.rand(4, 3, requires_grad=True))
    dout = torch.randn(4, 33)
    out = combine(*leaves, torch.randperm(12))
    want = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(out, leaves, dout)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_rows_in_expert_order_come_back_in_token_order():
    idx = choose_experts(20, 5, 3, "random")
    d = dispatch(idx, 5)
    y = idx.reshape(-1)[d.row_slot.long()].float()[:, None]  # each row says which expert owns it
    for k in range(3):
        weight = torch.zeros(20, 3)
        weight[:, k] = 1
        assert combine(y, weight, d.slot_row)[:, 0].tolist() == idx[:, k].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_twenty_runs_give_the_same_bits(backend, device):
    leaves = {
        "y": torch.randn(96, 33, device=device),
        "topk_weight": torch.rand(32, 3, device=device),
    }
    slot_row = torch.randperm(96, device=device)
    dout = torch.randn(32, 33, device=device)
    args = partial(combine, backend=backend), leaves, slot_row, dout
    first = run(*args)
    for _ in range(3 if backend == "triton" and backends.interpreted() else 20):
        again = run(*args)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [0, 3], ids=["no tokens", "tokens"])
@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, layout, T, backend, device):
    if layout == "plain":
        y = torch.randn(2 * T, 5, dtype=dtype)
    else:
        y = torch.randn(5, 2 * T, dtype=dtype).t()
    weight = torch.rand(T, 2) if layout == "plain" else torch.rand(2, T).t()
    y = y.to(device)
    weight = weight.to(device)
    slot_row = torch.randperm(2 * T).int().to(device)
    leaves = [t.detach().requires_grad_() for t in (y, weight)]
    torch.library.opcheck(torch.ops.moe_runtime.combine, (*leaves, slot_row, backend))
    args = (torch.randn(T, 5, dtype=dtype, device=device), y, weight, slot_row, backend)
    torch.library.opcheck(torch.ops.moe_runtime.combine_backward, args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_without_a_graph_break(backend, device):
    torch._dynamo.reset()
    step = partial(combine, backend=backend)
    leaves = {
        "y": torch.randn(12, 5, device=device),
        "topk_weight": torch.rand(4, 3, device=device),
    }
    slot_row = torch.randperm(12, device=device).int()
    dout = torch.randn(4, 5, device=device)
    assert torch._dynamo.explain(step)(*leaves.values(), slot_row).graph_break_count == 0
    got = run(torch.compile(step, fullgraph=True, backend="aot_eager"), leaves, slot_row, dout)
    want = run(step, leaves, slot_row, dout)
    assert all(torch.equal(got[name], want[name]) for name in want)


@TRITON
def test_float64_is_never_summed_in_float32(monkeypatch):
    y = torch.randn(6, 5, dtype=torch.float64)
    weight = torch.rand(2, 3)
    slot_row = torch.randperm(6)
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    torch.testing.assert_close(
        combine(y, weight, slot_row), by_slots(y, weight, slot_row), rtol=1e-14, atol=1e-14
    )
    with pytest.raises(ValueError, match="Use backend 'torch' for float64"):
        combine(y, weight, slot_row, "triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "slots"), [(7, 3), (1, 1), (0, 2)])
def test_gather_rows_and_its_gradient(tokens, slots, backend, device, monkeypatch):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", backend)
    x = torch.randn(tokens, 5, device=device, requires_grad=True)
    slot_row = torch.randperm(tokens * slots, device=device).int()
    row_token = (torch.argsort(slot_row) // slots).int()
    rows = gather_rows(x, row_token, slot_row)
    assert torch.equal(rows, x[row_token.long()])
    weight = torch.randn_like(rows)
    got, want = (torch.autograd.grad((r * weight).sum(), x)[0] for r in (rows, x[row_token.long()]))
    torch.testing.assert_close(got, want)
