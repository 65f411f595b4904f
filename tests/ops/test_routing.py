"""Routing: every gate against its equation token by token, the closed-form gradient, ties, NaN, and
the papers' claims.
"""

import itertools

import pytest
import torch

from moe_runtime.ops.routing import route, route_reference
from tests.support.oracle import GATES, SHARED, SUM_ONE, route_mismatches, route_oracle

SHAPES = [  # T, experts in the router, experts that it picks
    pytest.param(1, 7, 5, id="one token"),
    pytest.param(23, 7, 5, id="XFT: 8 experts, top 6"),
    pytest.param(9, 3, 1, id="the shared expert and a routed one"),
    pytest.param(9, 3, 3, id="K = E"),
    pytest.param(5, 1, 1, id="one expert to choose from"),
    pytest.param(5, 33, 17, id="odd sizes"),
    pytest.param(6, 2, 1, id="XFT's E=3, K=2 or E=2"),
]


def slots(gate: str, k: int) -> int:
    """top_k of a gate that picks k experts: the shared one counts."""
    return k + (gate in SHARED)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("T, R, k", SHAPES)
@pytest.mark.parametrize("gate", GATES)
def test_equals_the_equation(gate, T, R, k, dtype, tolerance):
    logits = (2 * torch.randn(T, R)).to(dtype)
    weight, idx = route(logits, slots(gate, k), gate)
    assert idx.dtype == torch.int32
    # gates are fp32 end to end
    assert weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not route_mismatches(route, logits, slots(gate, k), gate, tolerance[dtype])


@pytest.mark.parametrize("T, R, k", SHAPES)
@pytest.mark.parametrize("gate", GATES)
def test_gradcheck(gate, T, R, k):
    # apart from ties, where the choice jumps
    T = min(T, 3)
    logits = (
        torch.stack([torch.randperm(R) for _ in range(T)]).double() / 4
        + torch.rand(T, R, dtype=torch.float64) / 10
    )
    noise = torch.rand(T, R, dtype=torch.float64) / 20

    def weight(logits, noise):
        return route(logits, slots(gate, k), gate, noise=noise).topk_weight

    assert torch.autograd.gradcheck(weight, (logits.requires_grad_(), noise.requires_grad_()))


@pytest.mark.parametrize("gate", GATES)
def test_second_gradient(gate):
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda logits: route(logits, 3, gate).topk_weight, logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_narrow_logits_are_computed_in_float32_and_rounded_once(gate, dtype):
    logits = torch.randn(9, 7).to(dtype).requires_grad_()
    dweight = torch.randn(9, 4)
    wide = logits.detach().float().requires_grad_()
    got = route(logits, 4, gate)
    want = route(wide, 4, gate)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    dlogits, dwide = (
        torch.autograd.grad(r.topk_weight, x, dweight)[0] for r, x in ((got, logits), (want, wide))
    )
    assert torch.equal(dlogits, dwide.to(dtype))


@pytest.mark.parametrize("gate", GATES)
def test_reference_and_op_agree_even_at_ties(gate):
    logits = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 2.0, 2.0], [0.5, 0.1, 0.2, 0.3]],
        dtype=torch.float64,
        requires_grad=True,
    )
    dweight = torch.randn(3, 3, dtype=torch.float64)
    got = route(logits, 3, gate)
    want = route_reference(logits, 3, gate)
    assert torch.equal(got.topk_idx, want.topk_idx) and torch.equal(
        got.topk_weight, want.topk_weight
    )
    grads = [torch.autograd.grad(r.topk_weight, logits, dweight)[0] for r in (got, want)]
    # the routing of a new layer with zero weights is one big tie; m = s[:, 0]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("gate", GATES)
def test_gradient_at_ties_is_the_equations(gate):
    logits = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    dweight = torch.randn(2, 3, dtype=torch.float64)
    (got,) = torch.autograd.grad(route(logits, 3, gate).topk_weight, logits, dweight)
    (want,) = torch.autograd.grad(route_oracle(logits, 3, gate)[0], logits, dweight)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "R", [4, 64, 257], ids=["few", "a sort that is not stable by itself", "odd and many"]
)
def test_ties_go_to_the_lower_id(gate, R):
    logits = torch.zeros(3, R)
    logits[1, R // 2 :] = 1.0
    logits[2] = torch.where(torch.arange(R) % 2 == 0, 0.0, -0.0)  # equal, though their bits differ
    k = min(R // 2, 6)
    picked = route(logits, slots(gate, k), gate).topk_idx[:, :k] - int(gate in SHARED)
    assert picked.tolist() == [list(range(k)), list(range(R // 2, R // 2 + k)), list(range(k))]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param([float("nan")] * 6, id="all NaN"),
        pytest.param([1.0, float("nan"), 0.0, float("nan"), 2.0, -1.0], id="some NaN"),
        pytest.param([-float("inf")] * 6, id="all experts masked"),
        pytest.param([float("inf"), float("inf"), 0.0, 0.0, 0.0, 0.0], id="overflown logits"),
        pytest.param(
            [-float("inf"), 1.0, -float("inf"), -float("inf"), -float("inf"), -float("inf")],
            id="one expert left",
        ),
    ],
)
def test_bad_rows_keep_distinct_valid_ids_and_harm_no_other_row(gate, row):
    logits = torch.randn(3, 6)
    clean = route(logits, 4, gate)
    logits[1] = torch.tensor(row)
    weight, idx = route(logits, 4, gate)
    E = 6 + (gate in SHARED)
    for token in idx.tolist():
        assert len(set(token)) == 4 and all(0 <= e < E for e in token)
    assert torch.equal(weight[::2], clean.topk_weight[::2]) and torch.equal(
        idx[::2], clean.topk_idx[::2]
    )


@pytest.mark.parametrize("gate", GATES)
def test_masked_experts_are_not_chosen_and_get_no_gradient(gate):
    logits = torch.randn(5, 6)
    logits[:, 2] = -float("inf")
    logits.requires_grad_()
    weight, idx = route(logits, 4, gate)
    assert not (idx == 2 + (gate in SHARED)).any() and not weight.isnan().any()
    (dlogits,) = torch.autograd.grad(weight.square().sum(), logits)
    assert not dlogits.isnan().any() and not dlogits[:, 2].any()


# XFT
@pytest.mark.parametrize("top_k", [2, 3, 6, 8])
@pytest.mark.parametrize("gate", SUM_ONE)
def test_gates_sum_to_one(gate, top_k):
    weight = route(4 * torch.randn(64, 8 - (gate in SHARED)), top_k, gate).topk_weight
    assert (weight.sum(-1) - 1).abs().max() < 1e-6 and weight.min() >= 0


@pytest.mark.parametrize("top_k", [2, 3, 6, 8])
def test_nonorm_sums_to_one_or_more(top_k):
    logits = 2 * torch.randn(64, 7)
    weight = route(logits, top_k, "nonorm").topk_weight
    s = logits.softmax(-1).sort(-1, descending=True).values[:, : top_k - 1]
    torch.testing.assert_close(weight.sum(-1), 1 - s[:, 0] + s.sum(-1))
    assert weight.sum(-1).min() >= 1 - 1e-6


def test_vanilla_of_the_paper_sums_to_less_than_one():
    weight = route(torch.randn(64, 8), 6, "softmax_topk").topk_weight
    assert weight.sum(-1).max() < 1


def test_one_routed_expert_makes_nonorm_and_xft_the_same():
    logits = torch.randn(64, 7)
    xft = route(logits, 2, "xft")
    nonorm = route(logits, 2, "nonorm")
    torch.testing.assert_close(xft.topk_weight, nonorm.topk_weight, rtol=0, atol=1e-7)
    assert torch.equal(xft.topk_idx, nonorm.topk_idx)


def test_xft_is_softmax_of_probabilities_and_not_of_logits():
    weight = route(torch.tensor([[3.0, 1.0, 0.0, -1.0]], dtype=torch.float64), 3, "xft").topk_weight
    e = torch.tensor([3.0, 1.0, 0.0, -1.0], dtype=torch.float64).exp()
    p = e / e.sum()
    w = torch.exp(p[:2]) / torch.exp(p[:2]).sum() * p[0]
    torch.testing.assert_close(
        weight, torch.stack([w[0], w[1], 1 - p[0]])[None], rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("gate", SHARED)
def test_shared_expert_comes_last_for_every_token(gate):
    idx = route(torch.randn(40, 7), 6, gate).topk_idx
    assert bool((idx[:, -1] == 0).all()) and bool((idx[:, :-1] > 0).all())
    assert torch.bincount(idx.flatten(), minlength=8)[1:].sum() == 40 * 5


@pytest.mark.parametrize("gate", GATES)
def test_slots_are_in_descending_order_of_logit(gate):
    logits = torch.randn(40, 8)
    k = 5
    picked = route(logits, slots(gate, k), gate).topk_idx[:, :k].long() - int(gate in SHARED)
    assert bool((logits.gather(1, picked).diff(dim=1) <= 0).all())


@pytest.mark.parametrize("gate", GATES)
def test_experts_relabelled_are_weights_relabelled(gate):
    logits = torch.randn(20, 7, dtype=torch.float64)
    order = torch.randperm(7)
    a = route(logits, 5, gate)
    b = route(logits[:, order], 5, gate)
    n = 7 + (gate in SHARED)
    shared = int(gate in SHARED)
    names = torch.cat([torch.zeros(shared, dtype=torch.int64), order + shared])
    dense = [
        torch.zeros(20, n, dtype=torch.float64).scatter(1, idx, r.topk_weight)
        for r, idx in ((a, a.topk_idx.long()), (b, names[b.topk_idx.long()]))
    ]
    torch.testing.assert_close(*dense, rtol=1e-12, atol=1e-14)


def test_bias_moves_the_choice_and_not_the_weights():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([-1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    weight, idx = route(logits, 2, "sigmoid_topk", bias=bias)
    assert idx.tolist() == [[3, 1]]
    torch.testing.assert_close(weight, torch.sigmoid(logits[:, [3, 1]]))
    (dlogits,) = torch.autograd.grad(weight.sum(), logits)
    assert dlogits[0, 0] == dlogits[0, 2] == 0 and dlogits[0, 1] > 0


def test_noise_is_added_before_the_choice_and_carries_a_gradient():
    logits = torch.randn(30, 7, requires_grad=True)
    noise = torch.randn(30, 7, requires_grad=True)
    got = route(logits, 4, noise=noise)
    want = route((logits + noise).detach(), 4)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    dlogits, dnoise = torch.autograd.grad(got.topk_weight.square().sum(), (logits, noise))
    assert torch.equal(dlogits, dnoise) and dnoise.abs().sum() > 0


@pytest.mark.parametrize("gate", GATES)
def test_no_tokens(gate):
    logits = torch.zeros(0, 7, requires_grad=True)
    weight, idx = route(logits, 3, gate)
    assert weight.shape == idx.shape == (0, 3)
    weight.sum().backward()
    assert logits.grad.shape == (0, 7)


@pytest.mark.parametrize("gate", SHARED)
def test_shared_expert_alone(gate):
    weight, idx = route(torch.zeros(4, 0), 1, gate)
    assert weight.tolist() == [[1.0]] * 4 and idx.tolist() == [[0]] * 4


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: x.repeat(1, 2)[:, ::2],
        lambda x: x[:1].expand(9, 7),
    ],
    ids=["transposed", "strided", "expanded"],
)
def test_layout_of_the_logits_does_not_matter(gate, view):
    logits = view(torch.randn(9, 7)).detach().requires_grad_()
    plain = logits.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    got = route(logits, 4, gate)
    want = route(plain, 4, gate)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    dweight = torch.randn(9, 4)
    assert torch.equal(
        torch.autograd.grad(got.topk_weight, logits, dweight)[0],
        torch.autograd.grad(want.topk_weight, plain, dweight)[0],
    )


@pytest.mark.parametrize("gate", GATES)
def test_twenty_runs_give_the_same_bits(gate):
    logits = torch.randn(64, 8, requires_grad=True)

    def step():
        r = route(logits, 4, gate)
        return *r, torch.autograd.grad(r.topk_weight.square().sum(), logits)[0]

    first = step()
    assert all(torch.equal(a, b) for _ in range(20) for a, b in zip(first, step()))


@pytest.mark.parametrize(
    "kwargs, words",
    [
        pytest.param({"gate": "top2"}, "gate must be", id="unknown gate"),
        pytest.param({"top_k": 9}, "top_k must be", id="more experts than there are"),
        pytest.param({"top_k": 1}, "top_k must be", id="shared expert without a routed one"),
        pytest.param({"top_k": 0, "gate": "topk_softmax"}, "top_k must be", id="no expert"),
        pytest.param({"router_logits": torch.randn(2, 3, 7)}, "(2, 3, 7)", id="batch dims"),
        pytest.param(
            {"router_logits": torch.ones(2, 7, dtype=torch.int64)},
            "torch.int64",
            id="integer logits",
        ),
        pytest.param({"noise": torch.randn(7)}, "noise is (7,)", id="noise that would broadcast"),
        pytest.param({"bias": torch.randn(7)}, "bias is (7,)", id="bias with a softmax gate"),
        pytest.param(
            {"bias": torch.randn(6), "gate": "sigmoid_topk"},
            "bias is (6,)",
            id="bias of another size",
        ),
    ],
)
def test_bad_arguments_are_named(kwargs, words):
    with pytest.raises(ValueError) as error:
        route(**{"router_logits": torch.randn(4, 7), "top_k": 3} | kwargs)
    assert words in str(error.value)


OPCHECK = [
    *itertools.product(GATES, ["contiguous"]),
    ("xft", "transposed"),
    ("topk_softmax", "transposed"),
]


@pytest.mark.parametrize("gate, layout", OPCHECK)
def test_opcheck(gate, layout):
    logits = torch.randn(5, 7) if layout == "contiguous" else torch.randn(7, 5).t()
    weight, idx = torch.ops.moe_runtime.route(logits, None, 3, gate, "torch")
    torch.library.opcheck(
        torch.ops.moe_runtime.route, (logits.detach().requires_grad_(), None, 3, gate, "torch")
    )
    torch.library.opcheck(
        torch.ops.moe_runtime.route_backward, (torch.randn_like(weight), logits, idx, gate, "torch")
    )


@pytest.mark.parametrize("gate", GATES)
def test_compiles_without_a_graph_break(gate):
    def step(logits):
        weight, idx = route(logits, 3, gate)
        return weight, idx, (weight * torch.arange(1, 4)).sum()

    torch._dynamo.reset()
    logits = torch.randn(6, 7, requires_grad=True)
    assert torch._dynamo.explain(step)(logits).graph_break_count == 0
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(logits)
    want = step(logits)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert torch.equal(
        torch.autograd.grad(got[2], logits)[0], torch.autograd.grad(want[2], logits)[0]
    )


@pytest.mark.parametrize("gate", GATES)
def test_forced_with_its_own_choice_changes_no_bit(gate):
    logits = torch.randn(23, 7)
    dweight = torch.randn(23, slots(gate, 5))
    results = []
    for idx in (None, route(logits, slots(gate, 5), gate).topk_idx):
        x = logits.clone().requires_grad_()
        routing = route(x, slots(gate, 5), gate, topk_idx=idx)
        (dlogits,) = torch.autograd.grad(routing.topk_weight, x, dweight)
        results.append([*routing, dlogits])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("gate", GATES)
def test_forced_ids_keep_the_routers_weights(gate):
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    shared = int(gate in SHARED)
    idx = torch.rand(6, 5).argsort(1)[:, :3] + shared
    idx = torch.cat([idx, idx.new_zeros(6, shared)], 1)
    weight, got = route(logits, 3 + shared, gate, topk_idx=idx)
    assert torch.equal(got, idx.int())
    assert torch.allclose(
        weight, route_reference(logits, 3 + shared, gate, topk_idx=idx).topk_weight
    )
    s = logits.sigmoid() if gate == "sigmoid_topk" else logits.softmax(-1)
    chosen = s.gather(1, idx[:, :3] - shared)
    want = {
        "xft": lambda: chosen.softmax(-1) * chosen[:, :1],
        "topk_softmax": lambda: chosen / chosen.sum(-1, keepdim=True),
        "softmax_topk_renorm": lambda: chosen / chosen.sum(-1, keepdim=True),
    }.get(gate, lambda: chosen)()
    assert torch.allclose(weight[:, :3], want)
    assert not shared or torch.allclose(weight[:, 3], 1 - chosen[:, 0])
    assert torch.autograd.gradcheck(
        lambda x: route(x, 3 + shared, gate, topk_idx=idx).topk_weight, logits
    )


FORCED = {  # logits of the three experts that the router would choose, the ids of the caller
    "one expert twice": (1.0, [[3, 3, 5], [4, 0, 4], [2, 2, 2]]),
    "logits 104 below the largest": (104.0, [[3, 4, 5], [5, 3, 4], [4, 3, 5]]),
}


def forced_pairs(gate: str, case: str, backend: str, device="cpu"):
    """Weights and gradient of the logits of `route` in float32, each with that of the equation in
    float64.
    """
    top, ids = FORCED[case]
    logits = torch.randn(3, 6, device=device)
    logits[:, :3] += top
    shared = int(gate in SHARED)
    chosen = torch.tensor(ids, device=device)
    idx = torch.cat([chosen + shared, chosen.new_zeros(3, shared)], 1)

    def equation(x):
        s = x.softmax(-1).gather(1, chosen)
        selected = x.gather(1, chosen)
        weight = s
        if gate == "xft":
            weight = s.softmax(-1) * s[:, :1]
        elif gate in ("topk_softmax", "softmax_topk_renorm"):
            weight = selected.exp() / selected.exp().sum(-1, keepdim=True)
        elif gate == "sigmoid_topk":
            weight = selected.sigmoid()
        return torch.cat([weight, 1 - s[:, :shared]], 1)

    x = logits.clone().requires_grad_()
    wide = logits.double().requires_grad_()
    got = route(x, 3 + shared, gate, topk_idx=idx, backend=backend).topk_weight
    want = equation(wide)
    dweight = torch.randn(3, 3 + shared, device=device)
    (dx,), (dwide,) = (
        torch.autograd.grad(got, x, dweight),
        torch.autograd.grad(want, wide, dweight.double()),
    )
    return (got, want), (dx, dwide)


@pytest.mark.parametrize("case", FORCED)
@pytest.mark.parametrize("gate", GATES)
def test_forced_ids_that_no_router_would_choose(gate, case):
    for got, want in forced_pairs(gate, case, "torch"):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_forced_ids_of_a_wrong_shape_are_refused():
    for bad in (torch.zeros(4, 3, dtype=torch.int64), torch.zeros(5, 2)):
        with pytest.raises(ValueError, match=r"Expected topk_idx \(5, 2\) of integers, but"):
            route(torch.randn(5, 4), 2, "softmax_topk", topk_idx=bad)


def test_opcheck_of_the_forced_route():
    logits = torch.randn(5, 4, requires_grad=True)
    idx = torch.tensor([[1, 2]] * 5, dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.moe_runtime.route_to.default, (logits, idx, "softmax_topk", "torch")
    )
