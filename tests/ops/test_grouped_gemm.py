"""One matrix product per expert against float64 loops over rows."""

import contextlib

import pytest
import torch

from moe_runtime.ops.grouped_gemm import grouped_gemm
from tests.support.oracle import assert_parity, bounds


def by_rows(x, weight, expert_offsets, bias=None):
    """y[r] = weight[e] x[r] + bias[e], row by row; 0 behind the last expert."""
    rows = []
    for r in range(x.shape[0]):
        owners = [
            e for e in range(weight.shape[0]) if expert_offsets[e] <= r < expert_offsets[e + 1]
        ]
        y = 0 * (weight[0] @ x[r])
        for e in owners:
            y = weight[e] @ x[r] + (0 if bias is None else bias[e])
        rows.append(y)
    if rows:
        return torch.stack(rows)
    return x.new_zeros(0, weight.shape[1]) + 0 * weight.sum() + 0 * x.sum()


def by_experts(x, weight, expert_offsets, bias=None):
    """The eager path, in the inputs' dtype."""
    bounds = expert_offsets.tolist()
    parts = [
        x[a:b] @ w.t() + (0 if bias is None else bias[e])
        for e, (a, b, w) in enumerate(zip(bounds, bounds[1:], weight))
    ]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - bounds[-1], weight.shape[1])])


def run(f, leaves, offsets, dy, view=None):
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    v = view(leaves) if view else leaves
    y = f(v["x"], v["weight"], offsets, v.get("bias"))
    grads = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype), allow_unused=True)
    zeros = (torch.zeros_like(leaf) for leaf in leaves.values())
    return {"y": y.detach()} | {
        f"d{n}": z if g is None else g for n, z, g in zip(leaves, zeros, grads)
    }


def check(sizes, dtype, tolerance, bias=True, rows=None, d_in=33, d_out=17, view=None, change=None):
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
    R = rows if rows is not None else sum(sizes)
    E = len(sizes)
    leaves = {"x": torch.randn(R, d_in), "weight": torch.randn(E, d_out, d_in) / d_in**0.5}
    leaves |= {"bias": torch.randn(E, d_out)} if bias else {}
    leaves = {name: leaf.to(dtype) for name, leaf in leaves.items()}
    if change:
        change(leaves)
    dy = torch.randn(R, d_out).to(dtype)
    want = run(by_rows, {n: leaf.double() for n, leaf in leaves.items()}, offsets, dy, view)
    eager = run(by_experts, leaves, offsets, dy, view)
    got = run(grouped_gemm, leaves, offsets, dy, view)
    assert got["y"].dtype == dtype
    assert_parity(got, want, bounds(eager, want, tolerance[dtype]))
    return got


SIZES = [
    pytest.param([0, 0, 0], id="no rows"),
    pytest.param([0, 1, 0], id="one row"),
    pytest.param([5, 0, 11, 3], id="an expert without rows"),
    pytest.param([0, 0, 23, 0], id="all rows at one expert"),
    pytest.param([19], id="E = 1"),
    pytest.param([7, 1, 6], id="E = 3, ragged"),
    pytest.param([0, 4, 4, 0], id="nothing at the first and the last expert"),
]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("sizes", SIZES)
def test_parity(sizes, bias, dtype, tolerance):
    check(sizes, dtype, tolerance, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_behind_the_last_expert_give_zero_and_get_zero(dtype, tolerance):
    got = check([3, 0, 4], dtype, tolerance, rows=12)
    assert not got["y"][7:].any() and not got["dx"][7:].any()


def test_rows_behind_the_last_expert_may_hold_anything():
    x = torch.randn(6, 5)
    weight = torch.randn(2, 4, 5)
    x[4:] = float("nan")
    x.requires_grad_(), weight.requires_grad_()
    y = grouped_gemm(x, weight, torch.tensor([0, 3, 4]))
    grads = torch.autograd.grad(y.square().sum(), (x, weight))
    assert not any(t.isnan().any() for t in (y, *grads))


def _transposed(leaves):
    leaves["weight"] = leaves["weight"].transpose(1, 2).contiguous()


def _one_expert(leaves):
    leaves["weight"] = leaves["weight"][:1].clone()


@pytest.mark.parametrize(
    "change, view",
    [
        pytest.param(
            _transposed,
            lambda v: v | {"weight": v["weight"].transpose(1, 2)},
            id="weights stored in x out",
        ),
        pytest.param(
            _one_expert,
            lambda v: v | {"weight": v["weight"].expand(3, -1, -1)},
            id="E views of one expert (stride 0)",
        ),
        pytest.param(
            lambda v: v.update(x=v["x"].t().contiguous()),
            lambda v: v | {"x": v["x"].t()},
            id="x transposed",
        ),
        pytest.param(
            lambda v: v.update(x=v["x"].repeat(1, 2)),
            lambda v: v | {"x": v["x"][:, ::2]},
            id="x strided",
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(change, view, dtype, tolerance):
    check([5, 0, 9], dtype, tolerance, d_in=32, view=view, change=change)


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_gradcheck(offsets_dtype):
    x, weight, bias = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((7, 4), (3, 2, 4), (3, 2))
    )
    offsets = torch.tensor([0, 3, 3, 6], dtype=offsets_dtype)
    assert torch.autograd.gradcheck(
        lambda x, w, b: grouped_gemm(x, w, offsets, b), (x, weight, bias)
    )
    assert torch.autograd.gradcheck(lambda x, w: grouped_gemm(x, w, offsets), (x, weight))


@pytest.mark.parametrize("needed", ["x", "weight", "bias"])
def test_each_gradient_alone(needed):
    leaves = {"x": torch.randn(7, 4), "weight": torch.randn(3, 2, 4), "bias": torch.randn(3, 2)}
    offsets = torch.tensor([0, 3, 3, 6])
    dy = torch.randn(7, 2)
    want = run(grouped_gemm, leaves, offsets, dy)[f"d{needed}"]
    leaf = leaves[needed].requires_grad_()
    y = grouped_gemm(leaves["x"], leaves["weight"], offsets, leaves["bias"])
    assert torch.equal(torch.autograd.grad(y, leaf, dy)[0], want)


def test_twenty_runs_give_the_same_bits():
    leaves = {
        "x": torch.randn(64, 33),
        "weight": torch.randn(4, 17, 33),
        "bias": torch.randn(4, 17),
    }
    offsets = torch.tensor([0, 20, 20, 41, 60])
    dy = torch.randn(64, 17)
    first = run(grouped_gemm, leaves, offsets, dy)
    for _ in range(20):
        again = run(grouped_gemm, leaves, offsets, dy)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_opcheck(layout, bias):
    x = torch.randn(7, 4)
    weight = torch.randn(3, 2, 4) if layout == "plain" else torch.randn(3, 4, 2).transpose(1, 2)
    offsets = torch.tensor([0, 3, 3, 6])
    b = torch.randn(3, 2) if bias else None
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    torch.library.opcheck(
        torch.ops.moe_runtime.grouped_gemm, (*leaves, offsets, b, None, None, "torch")
    )
    for needs in ([True, True, bias], [False, True, False], [True, False, False]):
        args = (torch.randn(7, 2), x, weight, offsets, None, None, needs, "torch")
        torch.library.opcheck(torch.ops.moe_runtime.grouped_gemm_backward, args)


def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    leaves = {"x": torch.randn(9, 33), "weight": torch.randn(3, 17, 33), "bias": torch.randn(3, 17)}
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    dy = torch.randn(9, 17)
    args = (leaves["x"], leaves["weight"], offsets, leaves["bias"])
    assert torch._dynamo.explain(grouped_gemm)(*args).graph_break_count == 0
    got = run(torch.compile(grouped_gemm, fullgraph=True, backend="aot_eager"), leaves, offsets, dy)
    want = run(grouped_gemm, leaves, offsets, dy)
    assert all(torch.equal(got[name], want[name]) for name in want)


PLACE = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)  # experts 3 and 1 train


def split(leaves, layout: str = "plain"):
    """The leaves with the weights of the experts that train apart, and something wrong in their
    place in the stack.
    """
    weight = leaves["weight"]
    turned = layout == "transposed"
    frozen = weight.masked_fill((PLACE >= 0)[:, None, None], 7.0)
    apart = weight[[3, 1]]
    if turned:
        frozen, apart = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (frozen, apart))
    return frozen, apart.requires_grad_()


def check_apart(backend: str, layout: str, bias: bool, dtype, tolerance, device="cpu"):
    """Expert 1, which trains, and expert 2 have no row."""
    offsets = torch.tensor([0, 5, 5, 5, 9], dtype=torch.int32)
    leaves = {"x": torch.randn(11, 33), "weight": torch.randn(4, 17, 33)} | (
        {"bias": torch.randn(4, 17)} if bias else {}
    )
    leaves = {name: leaf.to(dtype) for name, leaf in leaves.items()}
    dy = torch.randn(11, 17).to(dtype)
    want = run(by_rows, {name: leaf.double() for name, leaf in leaves.items()}, offsets, dy)
    want["dweight"] = want["dweight"][[3, 1]]
    if bias:
        want["dbias"].masked_fill_((PLACE < 0)[:, None], 0)
    on = {name: leaf.to(device).detach().requires_grad_() for name, leaf in leaves.items()}
    frozen, apart = split({name: leaf.to(device) for name, leaf in leaves.items()}, layout)
    y = grouped_gemm(
        on["x"],
        frozen,
        offsets.to(device),
        on.get("bias"),
        backend,
        trainable=PLACE.to(device),
        trained=apart,
    )
    inputs = {"x": on["x"], "weight": apart} | ({"bias": on["bias"]} if bias else {})
    grads = torch.autograd.grad(y, list(inputs.values()), dy.to(device))
    got = {"y": y.detach()} | {f"d{name}": grad for name, grad in zip(inputs, grads)}
    assert_parity({name: t.cpu() for name, t in got.items()}, want, tolerance[dtype] / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_weights_that_train_lie_apart(layout, bias, dtype, tolerance):
    check_apart("torch", layout, bias, dtype, tolerance)


def check_rows_of_nobody(backend: str, device="cpu"):
    """What the map names no expert for gets zero, in memory that holds NaN."""
    x = torch.randn(9, 33)
    weight = torch.randn(4, 17, 33)
    offsets = torch.tensor([0, 5, 5, 5, 9])
    # rows 1 and 3 of 5
    x, weight, offsets, place = (t.to(device) for t in (x, weight, offsets, 2 * PLACE + 1))
    apart = torch.randn(5, 17, 33, device=device, requires_grad=True)
    with filled_memory():
        y = grouped_gemm(x, weight, offsets, backend=backend, trainable=place, trained=apart)
        gradient = torch.autograd.grad(y.square().sum(), apart)[0]
    assert gradient.isfinite().all() and gradient.flatten(1).any(1).tolist() == [
        False,
        True,
        False,
        False,
        False,
    ]


@contextlib.contextmanager
def filled_memory():
    """Let new tensors that nothing was written into hold NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_rows_of_nobody_get_zero():
    check_rows_of_nobody("torch")


def test_opcheck_of_weights_apart():
    x = torch.randn(9, 33)
    weight = torch.randn(4, 17, 33)
    offsets = torch.tensor([0, 5, 5, 5, 9])
    frozen, apart = split({"weight": weight})
    torch.library.opcheck(
        torch.ops.moe_runtime.grouped_gemm,
        (x.clone().requires_grad_(), frozen, offsets, torch.randn(4, 17), PLACE, apart, "torch"),
    )
    args = (torch.randn(9, 17), x, frozen, offsets, PLACE, apart.detach(), [True] * 3, "torch")
    torch.library.opcheck(torch.ops.moe_runtime.grouped_gemm_backward, args)
