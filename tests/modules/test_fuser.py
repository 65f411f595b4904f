"""The fuser's gate and loss: weights against the equation, dtypes, frozen specialists, the paper's
reduction.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.modules.fuser import FuserGate, chunked_loss, fuser_loss
from moe_runtime.ops.fusion import mix


def sample(B=3, R=5, sizes=(16, 16, 16), V=40, dtype=torch.float32):
    hidden = [torch.randn(B, R, size).to(dtype) for size in sizes]
    heads = [(torch.randn(V, size) / size**0.5).to(dtype) for size in sizes]
    labels = torch.randint(0, V, (B, R))
    labels[0, 3:] = -100
    return hidden, heads, labels


def weights_of(gate, hidden):
    """softmax_s of g(h_s), or of g(h_1 : ... : h_S), in float64."""
    parameters = {name: p.detach().double() for name, p in gate.named_parameters()}

    def g(x):
        if gate.kind == "mlp":
            x = (x @ parameters["up.weight"].t() + parameters["up.bias"]).clamp_min(0)
        return x @ parameters["score.weight"].t() + parameters["score.bias"]

    hidden = [h.double() for h in hidden]
    z = g(torch.cat(hidden, -1)) if gate.joint else torch.cat([g(h) for h in hidden], -1)
    return z.exp() / z.exp().sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["mlp", "linear"])
@pytest.mark.parametrize(
    "sizes, joint", [((16, 16, 16), False), ((16, 16), True), ((16, 24, 8), True), ((8,), False)]
)
def test_weights(sizes, joint, kind, dtype):
    gate = FuserGate(sizes, kind=kind, joint=joint)
    hidden, _, _ = sample(sizes=sizes, dtype=dtype)
    weight = gate(hidden)
    assert weight.shape == (3, 5, len(sizes)) and weight.dtype == torch.float32
    torch.testing.assert_close(weight.double(), weights_of(gate, hidden), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.sum(-1), torch.ones(3, 5))


@pytest.mark.parametrize("joint", [False, True])
def test_float64_parameters_give_float64_weights(joint):
    gate = FuserGate((16, 16), joint=joint)
    parameters = {name: p.detach().double() for name, p in gate.named_parameters()}
    hidden, _, _ = sample(sizes=(16, 16), dtype=torch.float64)
    weight = torch.func.functional_call(gate, parameters, (hidden,))
    assert weight.dtype == torch.float64
    torch.testing.assert_close(weight, weights_of(gate, hidden), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind, count", [("mlp", 16 * 16 + 16 + 16 + 1), ("linear", 16 + 1)])
def test_the_paper_has_one_gate_for_all_specialists(kind, count):
    gate = FuserGate((16,) * 3, kind=kind)
    assert sum(p.numel() for p in gate.parameters()) == count
    hidden, _, _ = sample()
    weight = gate(hidden)
    # who is who, the gate sees by the states alone
    torch.testing.assert_close(gate(hidden[::-1]), weight.flip(-1))
    torch.testing.assert_close(gate(hidden[:1] * 3), torch.full_like(weight, 1 / 3))


def test_the_last_bias_cancels():
    gate = FuserGate((16,) * 3)
    hidden, heads, labels = sample()
    before = gate(hidden)
    fuser_loss(gate, hidden, heads, labels).loss.backward()
    assert gate.score.bias.grad.abs().max() < 1e-7 < gate.score.weight.grad.abs().max()
    with torch.no_grad():
        gate.score.bias += 3
    torch.testing.assert_close(gate(hidden), before)


def test_stays_float32_under_casts_and_autocast():
    gate = FuserGate((16,) * 3)
    hidden, _, _ = sample()
    want = gate(hidden)
    for cast in (gate.bfloat16(), gate.half(), gate.to(torch.bfloat16), copy.deepcopy(gate)):
        assert {p.dtype for p in cast.parameters()} == {torch.float32}
    assert gate.score.weight.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        got = gate(hidden)
    # a cast to bfloat16 and back has rounded the parameters; autocast nothing
    assert got.dtype == torch.float32 and torch.equal(got, gate(hidden))
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.02)


def naive(gate, hidden, heads, labels, reduction):
    logits = sum(
        w[..., None] * F.linear(h, head)
        for w, h, head in zip(gate(hidden).unbind(-1), hidden, heads)
    )
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )
    return {
        "none": nll,
        "sum": nll.sum(),
        "mean": nll.sum() / (labels != -100).sum(),
        "sample": nll.sum(1).mean(),
    }[reduction]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "sample", "none"])
@pytest.mark.parametrize("frozen", [False, True], ids=["all train", "frozen specialists"])
def test_loss_is_the_naive_one(frozen, reduction, joint):
    gate = FuserGate((16,) * 3, joint=joint)
    hidden, heads, labels = sample()
    leaves = [*gate.parameters(), *(t.requires_grad_() for t in (*hidden, *heads) if not frozen)]
    got = fuser_loss(gate, hidden, heads, labels, reduction=reduction)
    want = naive(gate, hidden, heads, labels, reduction)
    torch.testing.assert_close(got.loss, want)
    assert torch.equal(got.weight, gate(hidden)) and not got.weight.requires_grad
    grads = [torch.autograd.grad(loss.sum(), leaves) for loss in (got.loss, want)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_scales_of_logits():
    gate, (hidden, heads, labels) = FuserGate((16,) * 3), sample()
    leaves = [*gate.parameters(), *(t.requires_grad_() for t in (*hidden, *heads))]
    scales = (0.5, 1.0, 3.0)
    got = fuser_loss(gate, hidden, heads, labels, scales=scales)
    scaled = [head * scale for head, scale in zip(heads, scales)]
    want = naive(gate, hidden, scaled, labels, "mean")
    torch.testing.assert_close(got.loss, want)
    for ours, theirs in zip(
        torch.autograd.grad(got.loss, leaves), torch.autograd.grad(want, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def bent(head, bias):
    """A head that is no product: a bias and a soft cap."""
    return lambda h: 4 * torch.tanh((F.linear(h, head) + bias) / 4)


@pytest.mark.parametrize("chunk", [1, 4, 15, 100, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "sample", "none"])
def test_chunks_of_any_heads(reduction, chunk):
    gate, (hidden, heads, labels) = FuserGate((16,) * 3), sample()
    heads[1] = torch.cat([heads[1], torch.randn(3, 16)])
    biases = [torch.randn(len(head)) for head in heads]
    leaves = [*gate.parameters(), *(t.requires_grad_() for t in (*hidden, *heads, *biases))]
    functions = [bent(*pair) for pair in zip(heads, biases)]
    got = chunked_loss(gate, hidden, functions, labels, reduction=reduction, chunk=chunk)
    weight = gate(hidden)
    logits = sum(
        w[..., None] * f(h)[..., :40] for w, f, h in zip(weight.unbind(-1), functions, hidden)
    )
    torch.testing.assert_close(
        mix((head(h) for h, head in zip(hidden, functions, strict=True)), weight), logits
    )
    nll = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    want = {
        "none": nll,
        "sum": nll.sum(),
        "mean": nll.sum() / (labels != -100).sum(),
        "sample": nll.sum(1).mean(),
    }[reduction]
    torch.testing.assert_close(got.loss, want)
    assert torch.equal(got.weight, weight) and not got.weight.requires_grad
    grads = [torch.autograd.grad(loss.sum(), leaves) for loss in (got.loss, want)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_chunks_of_labels_that_do_not_count_or_fit():
    gate, (hidden, heads, labels) = FuserGate((16,) * 3), sample()
    functions = [bent(head, 0.0) for head in heads]
    nothing = torch.full_like(labels, -100)
    loss = chunked_loss(gate, hidden, functions, nothing).loss
    assert (
        loss.isnan() and chunked_loss(gate, hidden, functions, nothing, reduction="sum").loss == 0
    )
    gradients = torch.autograd.grad(loss, list(gate.parameters()))
    assert all((g == 0).all() for g in gradients)
    empty = chunked_loss(
        gate, [h[:0] for h in hidden], functions, labels[:0], reduction="none"
    ).loss
    assert empty.shape == (0, 5)
    labels[1, 1] = 40
    with pytest.raises(ValueError, match="labels must be below 40, .* got 40"):
        chunked_loss(gate, hidden, functions, labels)
    with pytest.raises(ValueError, match="reduction must be .*but got 'token'"):
        chunked_loss(gate, hidden, functions, labels, reduction="token")


def test_training_the_gate_alone_finds_the_specialist_and_leaves_it_as_it_is():
    """Stage 1: two domains, a specialist for each, whose state says so."""
    torch.manual_seed(0)
    B = 16
    R = 8
    H = 16
    V = 32
    heads = [torch.randn(V, H) for _ in range(2)]
    labels = torch.randint(0, V, (B, R))
    domain = torch.arange(B) % 2
    hidden = []
    for s, head in enumerate(heads):
        knows = F.normalize(head[labels], dim=-1) * 4 + torch.tensor([3.0] + [0.0] * (H - 1))
        hidden.append(torch.where((domain == s)[:, None, None], knows, torch.randn(B, R, H)))
    gate = FuserGate((H, H))
    before = [t.clone() for t in (*hidden, *heads)]
    optimizer = torch.optim.AdamW(gate.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = fuser_loss(gate, hidden, heads, labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weight = gate(hidden)
    own = torch.where((domain == 0)[:, None], weight[..., 0], weight[..., 1])
    assert losses[-1] < 0.5 * losses[0] and own.mean() > 0.8
    assert all(torch.equal(a, b) for a, b in zip(before, (*hidden, *heads)))
