"""Mixed logits and their cross-entropy against the equations in float64: every backend, reduction
and gradient.
"""

import os

import pytest
import torch
import torch.nn.functional as F

from moe_runtime import backends
from moe_runtime.ops import fusion as fusion_gradients
from moe_runtime.ops import fusion_torch
from moe_runtime.ops.fusion import fuse_logits, fused_cross_entropy
from tests.support.oracle import assert_parity, mismatches

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=str(why)))
    for name in ("torch", "triton")
    for why in [
        backends.why_not(
            name,
            "fused_cross_entropy",
            torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        )
    ]
]
IGNORED = -100


def by_the_paper(hidden, heads, gate, labels, reduction="mean"):
    """CE of sum_s w_s h_s W_s^T over the ids that all have, -log softmax of the label
    spelled out.
    """
    V = min(len(head) for head in heads)
    logits = sum(
        gate[:, s : s + 1] * (h @ head[:V].t()) for s, (h, head) in enumerate(zip(hidden, heads))
    )
    shifted = logits - logits.detach().amax(1, keepdim=True)
    nll = shifted.exp().sum(1).log() - shifted.gather(1, labels.clamp_min(0)[:, None])[:, 0]
    nll = torch.where(labels == IGNORED, 0.0, nll)
    return {"none": nll, "sum": nll.sum(), "mean": nll.sum() / (labels != IGNORED).sum()}[reduction]


def sample(T, sizes, vocabularies, dtype=torch.float32, device="cpu", ignored=0.25):
    """Leaves whose mixed logits are O(1), and labels."""
    hidden = [torch.randn(T, size).to(device, dtype) for size in sizes]
    heads = [
        (torch.randn(V, size) / size**0.5).to(device, dtype)
        for size, V in zip(sizes, vocabularies, strict=True)
    ]
    gate = (2 * torch.randn(T, len(sizes), device=device)).softmax(-1)
    labels = torch.randint(0, min(vocabularies), (T,), device=device)
    labels[torch.rand(T, device=device) < ignored] = IGNORED
    return hidden, heads, gate, labels


def run(f, case, dtype=None, train=("hidden", "heads", "gate"), scale=1.0, **options):
    """The loss and the gradients of what trains."""
    hidden, heads, gate, labels = case
    leaves = {f"hidden{s}": h for s, h in enumerate(hidden)} | {
        f"heads{s}": w for s, w in enumerate(heads)
    }
    leaves = {
        n: t.detach().to(dtype or t.dtype).clone() for n, t in {**leaves, "gate": gate}.items()
    }
    wanted = [n for n in leaves if n.startswith(train)]
    for name in wanted:
        leaves[name].requires_grad_()
    S = len(hidden)
    loss = f(
        [leaves[f"hidden{s}"] for s in range(S)],
        [leaves[f"heads{s}"] for s in range(S)],
        leaves["gate"],
        labels,
        **options,
    )
    upstream = scale * torch.cos(
        torch.arange(loss.numel(), device=loss.device, dtype=loss.dtype)
    ).view(loss.shape)
    grads = torch.autograd.grad(loss, [leaves[n] for n in wanted], upstream, allow_unused=True)
    return {"loss": loss.detach()} | {f"d{n}": g for n, g in zip(wanted, grads)}


SHAPES = [
    pytest.param(37, (33, 33, 33), (50, 50, 50), id="three alike"),
    pytest.param(37, (48, 33, 17), (50, 67, 51), id="hidden sizes and vocabularies differ"),
    pytest.param(64, (32, 32), (64, 64), id="two, whole tiles"),
    pytest.param(1, (16, 16, 16), (33, 33, 40), id="one token"),
    pytest.param(5, (65,), (100,), id="one specialist"),
    pytest.param(19, (16,) * 5, (31,) * 5, id="five"),
    pytest.param(7, (8, 8), (1, 3), id="one id"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("T, sizes, vocabularies", SHAPES)
def test_parity(T, sizes, vocabularies, reduction, dtype, backend, device, tolerance):
    case = sample(T, sizes, vocabularies, dtype, device)
    case[3][0] = 0  # a label at least
    got = run(fused_cross_entropy, case, reduction=reduction, backend=backend)
    assert (
        got["loss"].dtype == torch.float32
        and got["dhidden0"].dtype == dtype == got["dheads0"].dtype
    )
    assert_parity(
        got, run(by_the_paper, case, torch.float64, reduction=reduction), tolerance[dtype]
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("T, sizes, vocabularies", SHAPES)
def test_frozen_specialists(T, sizes, vocabularies, reduction, dtype, backend, device, tolerance):
    """Stage 1: the gate's gradient from the forward pass is the one from the backward products."""
    case = sample(T, sizes, vocabularies, dtype, device)
    case[3][0] = 0
    options = {"reduction": reduction, "train": ("gate",)}
    got = run(fused_cross_entropy, case, backend=backend, **options)
    assert_parity(got, run(by_the_paper, case, torch.float64, **options), tolerance[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "train",
    [("hidden",), ("heads",), ("hidden1", "gate"), ("heads0", "hidden2"), ("heads", "gate")],
)
def test_any_part_trains_alone(train, reduction, backend, device, tolerance):
    case = sample(21, (17, 16, 33), (40, 41, 42), device=device)
    got = run(fused_cross_entropy, case, train=train, reduction=reduction, backend=backend)
    want = run(by_the_paper, case, torch.float64, train=train, reduction=reduction)
    assert_parity(got, want, tolerance[torch.float32])


@pytest.fixture
def small_blocks(monkeypatch):
    """Several chunks of tokens, several blocks of the vocabulary, the last of each in part."""
    monkeypatch.setattr(fusion_gradients, "CHUNK", 2000)
    for name, value in {"ROWS": 8, "CACHED": 0}.items():
        monkeypatch.setattr(fusion_torch, name, value)
    if any(not mark.args[0] for param in BACKENDS[1:] for mark in param.marks):
        from moe_runtime.kernels import fusion as kernels

        monkeypatch.setattr(kernels, "ROWS", 24)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("train", [("hidden", "heads", "gate"), ("gate",)], ids=["all", "gate"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks(reduction, train, dtype, backend, small_blocks, device, tolerance):
    case = sample(45, (33, 16), (150, 161), dtype, device)
    got = run(fused_cross_entropy, case, train=train, reduction=reduction, backend=backend)
    want = run(by_the_paper, case, torch.float64, train=train, reduction=reduction)
    assert_parity(got, want, tolerance[dtype])


def test_gradients_of_many_chunks_are_rounded_once(small_blocks):
    case = sample(320, (16, 16), (200, 200), torch.bfloat16)
    got = run(fused_cross_entropy, case, train=("heads",))
    want = run(by_the_paper, case, torch.float64, train=("heads",))
    for name in ("dheads0", "dheads1"):
        error = (got[name].double() - want[name]).norm() / want[name].norm()
        assert error < 5e-3, name  # a running sum in bfloat16 is at 1e-2


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float16_neither_underflows_nor_overflows(reduction):
    """p / T alone is below what float16 holds, and the sum of a label's states above it; the scaled
    loss's are not.
    """
    hidden, heads, gate, labels = sample(2000, (16, 16), (1000, 1000), torch.float16)
    hidden[0][:, 0] = 100
    labels[:1500] = 3
    options = {"reduction": reduction, "scale": 1e-2 if reduction == "none" else 65536 / 2000}
    got = run(fused_cross_entropy, (hidden, heads, gate, labels), **options)
    want = run(by_the_paper, (hidden, heads, gate, labels), torch.float64, **options)
    assert want["dheads0"].abs().max() < 65504
    assert_parity(got, want, 5e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("train", [("hidden", "heads", "gate"), ("gate",)], ids=["all", "gate"])
def test_all_labels_ignored_is_as_in_torch(train, backend, device):
    hidden, heads, gate, _ = sample(9, (16, 17), (20, 20), device=device)
    labels = torch.full((9,), IGNORED, device=device)
    mean = run(fused_cross_entropy, (hidden, heads, gate, labels), train=train, backend=backend)
    assert mean.pop("loss").isnan() and not any(grad.any() for grad in mean.values())
    for reduction in ("sum", "none"):
        got = run(
            fused_cross_entropy,
            (hidden, heads, gate, labels),
            train=train,
            reduction=reduction,
            backend=backend,
        )
        assert not any(t.any() for t in got.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_no_tokens(reduction, backend, device):
    case = sample(0, (16, 17), (20, 21), device=device)
    got = run(fused_cross_entropy, case, reduction=reduction, backend=backend)
    assert got["loss"].shape == (() if reduction == "sum" else (0,)) and not got["dheads1"].any()
    assert (
        got["dheads1"].shape == (21, 17)
        and got["dhidden0"].shape == (0, 16)
        and got["dgate"].shape == (0, 2)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_tokens_have_no_gradient_and_another_index_may_say_so(backend, device):
    hidden, heads, gate, labels = sample(24, (16, 16), (30, 30), device=device)
    case = hidden, heads, gate, torch.where(labels == IGNORED, 7, labels)
    got = run(fused_cross_entropy, case, reduction="none", ignore_index=7, backend=backend)
    out = case[3] == 7
    assert (
        not got["loss"][out].any()
        and not got["dgate"][out].any()
        and not got["dhidden1"][out].any()
    )
    assert got["loss"][~out].all() and got["dgate"][~out].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_dims_and_layouts(backend, device, tolerance):
    """[B, R] of positions; states that are slices and transposed heads."""
    hidden, heads, gate, labels = sample(24, (32, 33), (40, 40), device=device)
    want = run(by_the_paper, (hidden, heads, gate, labels), torch.float64)
    wide = [torch.cat([h, h], 1)[:, : h.shape[1]].view(4, 6, -1) for h in hidden]
    turned = [head.t().contiguous().t() for head in heads]
    assert not wide[0].is_contiguous() and not turned[1].is_contiguous()
    leaves = [t.requires_grad_() for t in (*wide, *turned, gate.view(4, 6, 2).clone())]
    loss = fused_cross_entropy(
        leaves[:2], leaves[2:4], leaves[4], labels.view(4, 6).int(), backend=backend
    )
    grads = torch.autograd.grad(loss, leaves)
    names = ("dhidden0", "dhidden1", "dheads0", "dheads1", "dgate")
    got = {"loss": loss.detach()} | {n: g.reshape(want[n].shape) for n, g in zip(names, grads)}
    assert_parity(got, want, tolerance[torch.float32])
    assert fused_cross_entropy(
        wide, turned, leaves[4], labels.view(4, 6), reduction="none"
    ).shape == (4, 6)


# what the mixture is
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_specialists_are_one_whatever_the_gate(backend, device):
    (h,), (head,), _, labels = sample(30, (32,), (50,), device=device)
    gate = torch.randn(30, 3, device=device).softmax(-1)
    got = fused_cross_entropy([h] * 3, [head] * 3, gate, labels, backend=backend)
    torch.testing.assert_close(got, F.cross_entropy(h @ head.t(), labels), rtol=1e-6, atol=1e-6)
    score = run(
        fused_cross_entropy, ([h] * 3, [head] * 3, gate, labels), train=("gate",), backend=backend
    )["dgate"]
    # a softmax in front makes it 0
    torch.testing.assert_close(score, score[:, :1].expand(-1, 3), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_one_is_that_specialist(backend, device):
    hidden, heads, gate, labels = sample(30, (32, 16, 24), (50, 60, 55), device=device)
    for s in range(3):
        one = torch.zeros_like(gate)
        one[:, s] = 1
        want = F.cross_entropy(hidden[s] @ heads[s][:50].t(), labels)
        torch.testing.assert_close(
            fused_cross_entropy(hidden, heads, one, labels, backend=backend), want
        )
        torch.testing.assert_close(fuse_logits(hidden, heads, one), hidden[s] @ heads[s][:50].t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_logits_for_generation(dtype, tolerance):
    hidden, heads, gate, _ = sample(6, (32, 17), (40, 45), dtype)
    got = fuse_logits([h.view(2, 3, -1) for h in hidden], heads, gate.view(2, 3, 2))
    want = sum(
        gate[:, s : s + 1].double() * (hidden[s].double() @ heads[s][:40].double().t())
        for s in range(2)
    )
    assert got.shape == (2, 3, 40) and got.dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    assert_parity({"logits": got.view(6, 40)}, {"logits": want}, max(tolerance[dtype], 1e-7))


def test_ids_that_not_all_have_get_no_gradient():
    case = sample(16, (16, 16), (20, 33))
    grad = run(fused_cross_entropy, case)["dheads1"]
    assert grad.shape == (33, 16) and grad[:20].any() and not grad[20:].any()


# what torch asks of an op
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradcheck(reduction, frozen):
    hidden, heads, gate, labels = sample(5, (4, 3), (6, 7), torch.float64)
    leaves = [t.double().requires_grad_(not frozen or t is gate) for t in (*hidden, *heads, gate)]

    def loss(*t):
        return fused_cross_entropy(t[:2], t[2:4], t[4].softmax(-1), labels, reduction=reduction)

    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_opcheck(dtype):
    hidden, heads, gate, labels = sample(5, (4, 3), (6, 7), dtype)
    gate = gate.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    ops = torch.ops.moe_runtime
    torch.library.opcheck(ops.fused_nll, (gate, labels, hidden, heads, IGNORED, True, "torch"))
    leaves = [[t.requires_grad_() for t in tensors] for tensors in (hidden, heads)]
    torch.library.opcheck(ops.fused_nll, (gate, labels, *leaves, IGNORED, False, "torch"))
    needs = ([True, False], [True, True])
    leaves[0][1].requires_grad_(False)
    torch.library.opcheck(ops.fused_loss, (gate, labels, *leaves, IGNORED, *needs, "torch"))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("train", [("hidden", "heads", "gate"), ("gate",)], ids=["all", "gate"])
def test_compiles_without_a_graph_break(train, reduction):
    def loss(hidden, heads, gate, labels, **options):
        return fused_cross_entropy(hidden, heads, gate.softmax(-1), labels, **options)

    torch._dynamo.reset()
    case = sample(12, (16, 17), (20, 21))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    want, got = (
        run(f, case, train=train, reduction=reduction, scale=3.0) for f in (loss, compiled)
    )
    for name in want:
        torch.testing.assert_close(got[name], want[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("train", [("hidden", "heads", "gate"), ("gate",)], ids=["all", "gate"])
def test_the_backward_pass_may_run_twice(train, dtype):
    """A graph that is kept keeps its gradients, one that is not gives them away; scaled by the
    loss's own gradient.
    """
    case = sample(12, (16, 17), (20, 21), dtype)
    alone = run(fused_cross_entropy, case, train=train, scale=1 / 3)

    def twice(hidden, heads, gate, labels):
        loss = fused_cross_entropy(hidden, heads, gate, labels)
        leaves = [t for t in (*hidden, *heads, gate) if t.requires_grad]
        first = torch.autograd.grad(loss, leaves, torch.tensor(7.0), retain_graph=True)
        again = torch.autograd.grad(loss, leaves, torch.tensor(7.0), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again))
        return loss

    got = run(twice, case, train=train, scale=1 / 3)
    assert all(torch.equal(got[name], alone[name]) for name in alone)
    whole = run(fused_cross_entropy, case, train=train)
    bound = 4e-3 if dtype == torch.bfloat16 else 1e-6  # one rounding
    for name in whole.keys() - {"loss"}:
        assert (alone[name].double() * 3 - whole[name].double()).norm() <= bound * whole[
            name
        ].double().norm()


def test_gradients_add_up_over_micro_batches():
    """param.grad that a first backward pass left is not the memory of a second one."""
    hidden, heads, gate, labels = sample(12, (16, 17), (20, 21))
    heads = [torch.nn.Parameter(head) for head in heads]
    for _ in range(3):
        fused_cross_entropy(hidden, heads, gate, labels).backward()
    want = run(by_the_paper, (hidden, heads, gate, labels), torch.float64, train=("heads",))
    for s, head in enumerate(heads):
        torch.testing.assert_close(head.grad.double(), 3 * want[f"dheads{s}"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "train, reduction, op",
    [
        ("hidden heads gate", "mean", "fused_loss"),
        ("hidden heads gate", "none", "fused_nll"),
        ("gate", "sum", "fused_nll"),
    ],
)
def test_a_second_gradient_is_refused_by_name(train, reduction, op, backend, device):
    hidden, heads, gate, labels = sample(6, (16, 17), (20, 21), device=device)
    for t in (*hidden, *heads) if "hidden" in train else ():
        t.requires_grad_()
    gate.requires_grad_()
    loss = fused_cross_entropy(
        hidden, heads, gate, labels, reduction=reduction, backend=backend
    ).sum()
    (dgate,) = torch.autograd.grad(loss, gate, create_graph=True)
    assert dgate.abs().sum() > 0
    with pytest.raises(RuntimeError, match=f"moe_runtime::{op} has no second derivative"):
        torch.autograd.grad(dgate.square().sum(), gate)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("train", [("hidden", "heads", "gate"), ("gate",)], ids=["all", "gate"])
def test_twenty_runs_give_the_same_bits(train, backend, device):
    case = sample(24, (33, 17), (70, 70), device=device)
    first = run(fused_cross_entropy, case, train=train, backend=backend)
    for _ in range(20 if backend == "torch" or "TRITON_INTERPRET" not in os.environ else 2):
        again = run(fused_cross_entropy, case, train=train, backend=backend)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("train", [("hidden", "heads", "gate"), ("gate",)], ids=["all", "gate"])
def test_autocast_is_as_for_a_linear_layer(train):
    case = sample(20, (16, 17), (30, 30))
    rounded = [t.bfloat16() for t in case[0]], [t.bfloat16() for t in case[1]], case[2], case[3]
    want = run(fused_cross_entropy, rounded, train=train)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(fused_cross_entropy, case, train=train)
    for name in want:
        torch.testing.assert_close(got[name], want[name].to(got[name].dtype))


def products(profile) -> int:
    """How many matrix products a profile holds."""
    return sum(
        event.name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
        for event in profile.function_events
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_specialists_need_no_product_in_the_backward_pass(reduction):
    """And nothing of the size of a state is kept for it."""
    kept = []
    hidden, heads, gate, labels = sample(30, (16, 17), (40, 40))
    gate.requires_grad_()
    note = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    )
    with torch.autograd.profiler.profile() as forward, note:
        loss = fused_cross_entropy(hidden, heads, gate, labels, reduction=reduction).sum()
    with torch.autograd.profiler.profile() as backward:
        loss.backward()
    assert products(forward) == 2 and products(backward) == 0 and max(kept) == gate.numel()


def test_gradients_come_with_one_forward_pass():
    hidden, heads, gate, labels = sample(30, (16, 17), (40, 40))
    leaves = [t.requires_grad_() for t in (*hidden, *heads)]
    with torch.autograd.profiler.profile() as forward:
        loss = fused_cross_entropy(hidden, heads, gate, labels)
    with torch.autograd.profiler.profile() as backward:
        torch.autograd.grad(loss, leaves)
    assert products(forward) == 6 and products(backward) == 0  # of each head: logits, dx, dW


# wrong arguments
def good():
    return dict(
        zip(("hidden", "heads", "gate_weight", "labels"), sample(6, (16, 17), (20, 21), ignored=0))
    )


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param({"hidden": []}, "0 hidden states [(), H_s] and 2 heads", id="none"),
        pytest.param(
            {"heads": [torch.randn(20, 16)]},
            "2 hidden states [(6,), H_s] and 1 heads",
            id="a head is missing",
        ),
        pytest.param(
            {"heads": [torch.randn(20, 16)] * 2},
            "hidden[1] is (6, 17) and heads[1] is (20, 16)",
            id="H_s",
        ),
        pytest.param(
            {"heads": [torch.randn(0, 16), torch.randn(9, 17)]}, "heads[0] is (0, 16)", id="no ids"
        ),
        pytest.param(
            {"hidden": [torch.randn(6, 16), torch.randn(5, 17)]},
            "hidden[1] is (5, 17)",
            id="positions",
        ),
        pytest.param(
            {"gate_weight": torch.rand(6, 3)}, "gate_weight is (6, 3)", id="weights of another S"
        ),
        pytest.param(
            {"labels": torch.zeros(5, dtype=torch.int64)},
            "labels is (5,) torch.int64",
            id="labels' shape",
        ),
        pytest.param(
            {"labels": torch.zeros(6)}, "labels is (6,) torch.float32", id="labels that are no ids"
        ),
        pytest.param(
            {"labels": torch.full((6,), 20)},
            "below 20, the size of the smallest vocabulary, but got 20",
            id="id",
        ),
        pytest.param({"labels": torch.full((6,), -1)}, "but got -1", id="a negative id"),
        pytest.param({"reduction": "batchmean"}, "reduction must be", id="reduction"),
        pytest.param({"backend": "cuda"}, "fused_cross_entropy has no cuda kernel", id="backend"),
        pytest.param(
            {"hidden": [torch.randn(6, 16).half(), torch.randn(6, 17)]},
            "are torch.float16, torch.float32",
            id="dtypes",
        ),
        pytest.param(
            {"gate_weight": torch.rand(6, 2, device="meta")}, "on cpu, meta", id="devices"
        ),
    ],
)
@pytest.mark.parametrize("train", [False, True])
def test_bad_arguments_are_named(change, words, train):
    arguments = good() | change
    for head in arguments["heads"] if train else ():
        head.requires_grad_()
    with pytest.raises(ValueError) as error:
        fused_cross_entropy(**arguments)
    assert words in str(error.value)


def test_float64_is_never_summed_in_float32(monkeypatch):
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    case = sample(9, (16, 17), (20, 21), torch.float64)
    got = run(fused_cross_entropy, case, torch.float64)
    assert_parity(got, run(by_the_paper, case, torch.float64), 1e-13)


# mutants of the torch backend's source; each has to be caught by the checks above
def caught() -> list[str]:
    """What parity says in the dtypes' paths, in several blocks and chunks."""
    torch.manual_seed(0)
    found = []
    for dtype, bound in ((torch.float32, 5e-6), (torch.bfloat16, 1.5e-2)):
        case = sample(45, (33, 16, 16), (150, 161, 150), dtype)
        for train in (("hidden", "heads", "gate"), ("gate",)):
            got = run(fused_cross_entropy, case, train=train, reduction="sum", backend="torch")
            want = run(by_the_paper, case, torch.float64, train=train, reduction="sum")
            found += mismatches(got, want, bound)
    return found


MUTANTS = [
    pytest.param("range(0, V, width)", "range(0, V - width, width)", id="last ids left out"),
    pytest.param("labels[rows] - first", "labels[rows]", id="labels of the first block"),
    pytest.param(
        "torch.exp(self.top - top)", "torch.ones_like(top)", id="sums of different highest logits"
    ),
    pytest.param(
        "self.mean * shrink[:, 0] + ", "self.mean + ", id="expectations of different highest logits"
    ),
    pytest.param("parts.mul_(mix).sum(2)", "parts.sum(2)", id="expectation without the softmax"),
    pytest.param(
        "self.mean / self.total[:, 0]", "self.mean", id="expectation without its denominator"
    ),
    pytest.param("(labels >= 0) & (labels < n)", "(labels < n)", id="a label of an earlier block"),
    pytest.param(
        "gate[:, s : s + 1])\n        inside",
        "gate[:, :1])\n        inside",
        id="first weight for all",
    ),
    pytest.param("beta=min(s, 1)", "beta=0", id="last specialist only"),
    pytest.param(
        "block.addcmul_(wide, weight)", "block.add_(wide)", id="narrow logits without a weight"
    ),
    pytest.param(".scatter_add_(1, y, -weight)", "", id="softmax without the label"),
    pytest.param(
        "block.mul_(weight / total)", "block.div_(total)", id="ignored tokens have a gradient"
    ),
    pytest.param(
        "dlogits[rows] = block", "dlogits[rows] = logits[:1]", id="one row's gradient for all"
    ),
    pytest.param(
        "product.mul_(hidden)", "product.mul_(dx)", id="gate's gradient without the state"
    ),
    pytest.param(
        "torch.mul(dx, gate[:, None], out=dhidden)",
        "dhidden.copy_(dx)",
        id="state's gradient without the weight",
    ),
    pytest.param(
        "torch.mul(hidden, gate[:, None], out=scaled)",
        "scaled.copy_(hidden)",
        id="head's gradient without it",
    ),
]


@pytest.mark.parametrize("old, new", MUTANTS)
def test_mutant_is_caught(old, new, small_blocks, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    from tests.support.mutants import edited

    mutant = edited(fusion_torch, tmp_path, old, new)
    mutant.ROWS = fusion_torch.ROWS
    mutant.CACHED = fusion_torch.CACHED
    monkeypatch.setattr(fusion_gradients, "fusion_torch", mutant)
    assert caught()


def test_unharmed_backend_passes(small_blocks):
    assert not caught()
