"""Routing on every backend: ties, NaN, forced choices, many experts, and the papers' claims."""

import pytest
import torch

from moe_runtime.ops.routing import route, route_reference
from tests.support.oracle import (
    GATES,
    SHARED,
    SUM_ONE,
    assert_parity,
    assert_same,
    route_mismatches,
    route_oracle,
)

OP = "route"
NAN = float("nan")
INF = float("inf")
EVERY_GATE = pytest.mark.parametrize("gate", GATES)
# numpy's warnings for NaN and inf rows
pytestmark = pytest.mark.filterwarnings("ignore:(invalid|divide by zero|overflow):RuntimeWarning")


def slots(gate: str, k: int) -> int:
    """Return top_k of a gate that chooses k experts, including the shared one."""
    return k + (gate in SHARED)


def results(f, logits, top_k, gate, dweight, **options) -> dict:
    """Return weights, ids and the gradient of the logits."""
    logits = logits.detach().requires_grad_()
    weight, idx = f(logits, top_k, gate, **options)
    (dlogits,) = torch.autograd.grad(
        weight,
        logits,
        dweight.to(weight.dtype),
    )
    return {"weight": weight.detach(), "idx": idx, "dlogits": dlogits}


@pytest.fixture
def run(backend):
    """run(logits, top_k, gate, dweight) returns the results of `route` on a backend."""

    def run(*args, **options):
        return results(route, *args, backend=backend, **options)

    return run


@pytest.mark.parametrize(
    "T, R, k",
    [  # tokens, experts in the router, experts per token
        pytest.param(69, 7, 5, id="XFT: 8 experts, top 6; the last block ragged"),
        pytest.param(6, 2, 1, id="XFT's E=3, K=2 or E=2"),
        pytest.param(17, 64, 8, id="E = 64"),
        pytest.param(2, 64, 64, id="K = E = 64"),
        pytest.param(5, 127, 7, id="E = 127, K = 7"),
        pytest.param(3, 256, 8, id="E = 256"),
        pytest.param(2, 1025, 3, id="a row of several warps"),
    ],
)
@EVERY_GATE
def test_equals_the_equation(gate, T, R, k, backend, device, tolerance):
    def f(logits, top_k, gate):
        return route(logits, top_k, gate, backend=backend)

    logits = (2 * torch.randn(T, R, device=device)).bfloat16()  # many of them equal
    weight, idx = f(logits, slots(gate, k), gate)
    assert idx.dtype == torch.int32
    assert weight.dtype == torch.float32
    assert not route_mismatches(
        f,
        logits,
        slots(gate, k),
        gate,
        tolerance[torch.bfloat16],
    )


@EVERY_GATE
def test_second_gradient(gate, backend, device):
    logits = torch.randn(9, 7, device=device)
    dweight = torch.randn(9, 4, device=device)
    ddlogits = torch.randn(9, 7, device=device)

    def second(f, dtype, **options):
        x = logits.to(dtype).requires_grad_()
        d = dweight.to(dtype).requires_grad_()
        weight = f(x, 4, gate, **options)[0]
        (dx,) = torch.autograd.grad(weight, x, d, create_graph=True)
        ddx, dd = torch.autograd.grad(
            dx,
            (x, d),
            ddlogits.to(dtype),
        )
        return {"dx": dx.detach(), "ddx": ddx, "dd": dd}

    got = second(route, torch.float32, backend=backend)
    assert_parity(got, second(route_reference, torch.float64), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@EVERY_GATE
def test_narrow_logits_are_computed_in_float32_and_rounded_once(gate, dtype, run, device):
    logits = torch.randn(21, 9, device=device).to(dtype)
    dweight = torch.randn(21, 4, device=device)
    expected = run(logits.float(), 4, gate, dweight)
    expected["dlogits"] = expected["dlogits"].to(dtype)
    assert_same(run(logits, 4, gate, dweight), expected)


@EVERY_GATE
def test_gradient_at_ties_is_the_equations(gate):
    """The routing of a new layer with zero weights is one large tie."""
    logits = torch.zeros(2, 4, dtype=torch.float64)
    dweight = torch.randn(2, 3, dtype=torch.float64)
    got = results(route, logits, 3, gate, dweight)["dlogits"]
    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        route_oracle(leaf, 3, gate)[0],
        leaf,
        dweight,
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "R", [4, 64, 257], ids=["few", "a sort that is not stable by itself", "odd and many"]
)
@EVERY_GATE
def test_ties_go_to_the_lower_id(gate, R, backend, device):
    logits = torch.zeros(3, R, device=device)
    logits[1, R // 2 :] = 1.0
    logits[2, 1::2] = -0.0  # equal, though their bits differ
    k = min(R // 2, 6)
    idx = route(
        logits,
        slots(gate, k),
        gate,
        backend=backend,
    ).topk_idx
    picked = idx[:, :k] - int(gate in SHARED)
    assert picked.tolist() == [
        list(range(k)),
        list(range(R // 2, R // 2 + k)),
        list(range(k)),
    ]


ROWS = {  # bad and equal numbers
    "one big tie": [0.0] * 6,
    "ties": [1.0, 2.0, 2.0, 0.0, 2.0, 1.0],
    "zeros of both signs": [-0.0, 0.0, -0.0, 0.0, 0.0, -0.0],
    "zeros among others": [-1.0, -0.0, 1e-38, 0.0, -1e-38, 2.0],
    "all NaN": [NAN] * 6,
    "some NaN": [1.0, NAN, 0.0, NAN, 2.0, -1.0],
    "negative NaN": [1.0, -NAN, INF, NAN, 2.0, -1.0],
    "NaN and nothing else": [
        -INF,
        NAN,
        -INF,
        -INF,
        -INF,
        -INF,
    ],
    "all experts masked": [-INF] * 6,
    "one expert left": [-INF, 1.0, -INF, -INF, -INF, -INF],
    "two experts left": [-INF, 1.0, -INF, -INF, 1.0, -INF],
    "overflown logits": [INF, INF, 0.0, 0.0, 0.0, 0.0],
    "overflown and masked": [-INF, 3e38, -3e38, INF, -INF, 0.0],
    "distant": [100.0, -100.0, 0.0, 90.0, -90.0, 99.0],
}


@pytest.mark.parametrize("k", [1, 4, 6])
@EVERY_GATE
def test_ties_and_bad_rows_are_as_in_the_reference(gate, k, run, device):
    logits = torch.tensor(list(ROWS.values()), device=device)
    top_k = slots(gate, k)
    dweight = torch.randn(len(ROWS), top_k, device=device)
    got = run(logits, top_k, gate, dweight)
    # the gradient in closed form, since autograd of the reference has NaN instead of 0 for 0 inf
    expected = results(route, logits, top_k, gate, dweight, backend="torch")
    torch.testing.assert_close(
        got,
        expected,
        rtol=1e-5,
        atol=1e-6,
        equal_nan=True,
    )
    assert torch.equal(
        got["idx"],
        route_reference(
            logits,
            top_k,
            gate,
        ).topk_idx,
    )
    for row in got["idx"].tolist():
        assert len(set(row)) == top_k
        assert 0 <= min(row) <= max(row) < 6 + (gate in SHARED)


@EVERY_GATE
def test_a_bad_row_harms_no_other(gate, backend, device):
    logits = torch.randn(3, 6, device=device)
    clean = route(logits, 4, gate, backend=backend)
    logits[1] = NAN
    weight, idx = route(logits, 4, gate, backend=backend)
    assert_same([weight[::2], idx[::2]], [clean.topk_weight[::2], clean.topk_idx[::2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", ["nonorm", "topk_softmax"])
def test_many_ties(gate, dtype, backend, device):
    logits = torch.randint(-2, 2, (40, 64), device=device).to(dtype)
    logits[::3, ::2] = -INF
    k = slots(gate, 40)
    got = route(logits, k, gate, backend=backend)
    expected = route_reference(logits.float(), k, gate)
    assert torch.equal(got.topk_idx, expected.topk_idx)
    torch.testing.assert_close(
        got.topk_weight,
        expected.topk_weight,
        rtol=1e-5,
        atol=1e-7,
    )


@EVERY_GATE
def test_masked_experts_are_not_chosen_and_get_no_gradient(gate, run, device):
    logits = torch.randn(5, 6, device=device)
    logits[:, 2] = -INF
    got = run(
        logits,
        4,
        gate,
        torch.randn(5, 4, device=device),
    )
    assert not (got["idx"] == 2 + (gate in SHARED)).any()
    assert got["weight"].isfinite().all()
    assert got["dlogits"].isfinite().all()
    assert not got["dlogits"][:, 2].any()


@pytest.mark.parametrize("gate", SHARED)
def test_shared_expert_comes_last_for_every_token(gate, backend, device):
    idx = route(
        torch.randn(40, 7, device=device),
        6,
        gate,
        backend=backend,
    ).topk_idx
    assert (idx[:, -1] == 0).all()
    assert (idx[:, :-1] > 0).all()


@EVERY_GATE
def test_slots_are_in_descending_order_of_logit(gate, backend, device):
    logits = torch.randn(40, 8, device=device)
    idx = route(
        logits,
        slots(gate, 5),
        gate,
        backend=backend,
    ).topk_idx
    picked = idx[:, :5].long() - int(gate in SHARED)
    assert (logits.gather(1, picked).diff(dim=1) <= 0).all()


@EVERY_GATE
def test_a_token_has_the_same_bits_in_any_batch(gate, run, device):
    logits = torch.randn(70, 8, device=device)
    dweight = torch.randn(70, 4, device=device)
    whole = run(logits, 4, gate, dweight)
    part = run(logits[5:43], 4, gate, dweight[5:43])
    assert_same(part, {name: value[5:43] for name, value in whole.items()})


@pytest.mark.parametrize("top_k", [2, 3, 6, 8])
def test_nonorm_sums_to_one_or_more(top_k):
    logits = 2 * torch.randn(64, 7)
    weight = route(logits, top_k, "nonorm").topk_weight
    s = logits.softmax(-1).sort(-1, descending=True).values[:, : top_k - 1]
    torch.testing.assert_close(weight.sum(-1), 1 - s[:, 0] + s.sum(-1))
    assert weight.sum(-1).min() >= 1 - 1e-6


def test_one_routed_expert_makes_nonorm_and_xft_the_same():
    logits = torch.randn(64, 7)
    xft = route(logits, 2, "xft")
    nonorm = route(logits, 2, "nonorm")
    torch.testing.assert_close(
        xft.topk_weight,
        nonorm.topk_weight,
        rtol=0,
        atol=1e-7,
    )
    assert torch.equal(xft.topk_idx, nonorm.topk_idx)


@pytest.mark.parametrize("top_k", [2, 3, 6, 8])
def test_sums_of_the_weights(top_k):
    logits = 2 * torch.randn(64, 8)
    for gate in GATES:
        total = route(logits[:, int(gate in SHARED) :], top_k, gate).topk_weight.sum(-1)
        if gate in SUM_ONE:
            assert (total - 1).abs().max() < 1e-6
        elif gate == "nonorm":
            assert total.min() >= 1 - 1e-6
        elif gate == "softmax_topk":
            assert total.max() < 1 + 1e-6


def test_xft_is_softmax_of_probabilities_and_not_of_logits():
    logits = torch.tensor([[3.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    weight = route(logits, 3, "xft").topk_weight
    p = logits[0].exp() / logits[0].exp().sum()
    first, second = torch.exp(p[:2]) / torch.exp(p[:2]).sum() * p[0]
    expected = torch.stack([first, second, 1 - p[0]])
    torch.testing.assert_close(
        weight[0],
        expected,
        rtol=1e-12,
        atol=1e-14,
    )


@pytest.mark.parametrize(
    "bias_dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_moves_the_choice_and_not_the_weights(dtype, bias_dtype, run, device, tolerance):
    logits = torch.randn(37, 13, device=device).to(dtype)
    bias = torch.randn(26, device=device).to(bias_dtype)[::2]
    bias[3] = -INF
    bias[5] = 2.0
    dweight = torch.randn(37, 4, device=device)
    got = run(logits, 4, "sigmoid_topk", dweight, bias=bias)
    exact = (logits.double(), 4, "sigmoid_topk", dweight)
    expected = results(route_reference, *exact, bias=bias.double())
    idx = got.pop("idx")
    assert torch.equal(idx, expected.pop("idx"))
    assert not (idx == 3).any()
    assert (idx == 5).any()
    assert_parity(got, expected, {"weight": 5e-6, "dlogits": tolerance[dtype]})


def test_noise_is_added_before_the_choice_and_carries_a_gradient(backend, device):
    logits = torch.randn(30, 7, device=device, requires_grad=True)
    noise = torch.randn(30, 7, device=device, requires_grad=True)
    got = route(logits, 4, noise=noise, backend=backend)
    assert_same(
        list(got),
        list(
            route(
                (logits + noise).detach(),
                4,
                backend=backend,
            )
        ),
    )
    dlogits, dnoise = torch.autograd.grad(got.topk_weight.square().sum(), (logits, noise))
    assert torch.equal(dlogits, dnoise)
    assert dnoise.abs().sum() > 0


@pytest.mark.parametrize("gate", SHARED)
def test_shared_expert_alone(gate, backend, device):
    logits = torch.zeros(4, 0, device=device, requires_grad=True)
    weight, idx = route(logits, 1, gate, backend=backend)
    assert weight.tolist() == [[1.0]] * 4
    assert idx.tolist() == [[0]] * 4
    assert torch.autograd.grad(weight.sum(), logits)[0].shape == (4, 0)


@EVERY_GATE
def test_forced_with_its_own_choice_changes_no_bit(gate, run, device):
    logits = torch.randn(35, 7, device=device)
    args = (logits, slots(gate, 3), gate, torch.randn(35, slots(gate, 3), device=device))
    free = run(*args)
    assert_same(run(*args, topk_idx=free["idx"].clone()), free)


def forced_weight(logits, chosen, gate):
    """Compute the equation for the routed experts `chosen`."""
    s = logits.softmax(-1).gather(1, chosen)
    selected = logits.gather(1, chosen)
    weight = s
    if gate == "xft":
        weight = s.softmax(-1) * s[:, :1]
    elif gate in ("topk_softmax", "softmax_topk_renorm"):
        weight = selected.exp() / selected.exp().sum(-1, keepdim=True)
    elif gate == "sigmoid_topk":
        weight = selected.sigmoid()
    return torch.cat([weight, 1 - s[:, : int(gate in SHARED)]], 1)


@pytest.mark.parametrize(
    "top, ids",
    [
        pytest.param(
            0.0,
            [[3, 4, 5], [5, 3, 1], [4, 0, 2]],
            id="any",
        ),
        pytest.param(
            1.0,
            [[3, 3, 5], [4, 0, 4], [2, 2, 2]],
            id="the same expert twice",
        ),
        pytest.param(
            104.0,
            [[3, 4, 5], [5, 3, 4], [4, 3, 5]],
            id="104 below the largest",
        ),
    ],
)
@EVERY_GATE
def test_forced_ids_have_the_weights_of_the_equation(gate, top, ids, run, device):
    shared = int(gate in SHARED)
    logits = torch.randn(3, 6, device=device)
    logits[:, :3] += top
    chosen = torch.tensor(ids, device=device)
    idx = torch.cat([chosen + shared, chosen.new_zeros(3, shared)], 1)
    dweight = torch.randn(3, 3 + shared, device=device)
    got = run(logits, 3 + shared, gate, dweight, topk_idx=idx)
    assert torch.equal(got["idx"], idx.int())
    wide = logits.double().requires_grad_()
    weight = forced_weight(wide, chosen, gate)
    (dlogits,) = torch.autograd.grad(weight, wide, dweight.double())
    torch.testing.assert_close(
        got["weight"].double(),
        weight.detach(),
        rtol=1e-5,
        atol=1e-6,
    )
    torch.testing.assert_close(
        got["dlogits"].double(),
        dlogits,
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        pytest.param({"gate": "top2"}, "gate must be", id="unknown gate"),
        pytest.param({"top_k": 9}, "top_k must be", id="more experts than available"),
        pytest.param({"noise": torch.randn(7)}, "noise is (7,)", id="noise that would broadcast"),
        pytest.param({"bias": torch.randn(7)}, "bias is (7,)", id="bias with a softmax gate"),
        pytest.param(
            {"topk_idx": torch.zeros(5, 3).long()},
            "topk_idx is (5, 3)",
            id="ids of other tokens",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError) as error:
        route(**{"router_logits": torch.randn(4, 7), "top_k": 3} | arguments)
    assert words in str(error.value)
