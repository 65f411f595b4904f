"""The fuser's gate and loss: weights against the equation, dtypes, frozen specialists, the paper's
reduction.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.modules.fuser import FuserGate, chunked_loss, fuser_loss
from tests.methods.ultrafuser import fusers


def sample(B=3, R=5, sizes=(16, 16, 16), V=40, dtype=torch.float32):
    hidden = [torch.randn(B, R, size).to(dtype) for size in sizes]
    heads = [(torch.randn(V, size) / size**0.5).to(dtype) for size in sizes]
    labels = torch.randint(0, V, (B, R))
    labels[0, 3:] = -100
    return hidden, heads, labels


def weights_of(gate, hidden):
    """Compute softmax_s of g(h_s), or of g(h_1 : ... : h_S), in float64."""
    parameters = {name: p.detach().double() for name, p in gate.named_parameters()}

    def g(x):
        if gate.kind == "mlp":
            x = (x @ parameters["up.weight"].t() + parameters["up.bias"]).clamp_min(0)
        return x @ parameters["score.weight"].t() + parameters["score.bias"]

    hidden = [h.double() for h in hidden]
    if gate.joint:
        z = g(torch.cat(hidden, -1))
    else:
        z = torch.cat([g(h) for h in hidden], -1)
    return z.exp() / z.exp().sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64],
    ids=str,
)
@pytest.mark.parametrize("kind", ["mlp", "linear"])
@pytest.mark.parametrize(
    "sizes, joint",
    [
        ((16, 16, 16), False),
        ((16, 16), True),
        ((16, 24, 8), True),
        ((8,), False),
    ],
)
def test_weights(sizes, joint, kind, dtype):
    gate = FuserGate(sizes, kind=kind, joint=joint)
    hidden, _, _ = sample(sizes=sizes, dtype=dtype)
    weight = gate(hidden)
    bound = 1e-5
    if dtype == torch.float64:  # float64 parameters, too
        wide = {name: p.detach().double() for name, p in gate.named_parameters()}
        weight = torch.func.functional_call(
            gate,
            wide,
            (hidden,),
        )
        bound = 1e-12
    assert weight.shape == (3, 5, len(sizes))
    assert weight.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(
        weight.double(),
        weights_of(gate, hidden),
        rtol=bound,
        atol=bound,
    )


@pytest.mark.parametrize(
    "kind, count",
    [("mlp", 16 * 16 + 16 + 16 + 1), ("linear", 16 + 1)],
)
def test_the_paper_has_one_gate_for_all_specialists(kind, count):
    gate = FuserGate((16,) * 3, kind=kind)
    assert sum(p.numel() for p in gate.parameters()) == count
    hidden, _, _ = sample()
    weight = gate(hidden)
    # the gate distinguishes specialists only by their states
    torch.testing.assert_close(
        gate(hidden[::-1]),
        weight.flip(-1),
    )
    torch.testing.assert_close(
        gate(hidden[:1] * 3),
        torch.full_like(weight, 1 / 3),
    )


def test_stays_float32_under_casts_and_autocast():
    gate = FuserGate((16,) * 3)
    hidden, _, _ = sample()
    want = gate(hidden)
    for cast in (gate.bfloat16(), gate.half(), gate.to(torch.bfloat16), copy.deepcopy(gate)):
        assert {p.dtype for p in cast.parameters()} == {torch.float32}
    assert gate.score.weight.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        got = gate(hidden)
    # a cast to bfloat16 and back rounds the parameters; autocast does not
    assert got.dtype == torch.float32
    assert torch.equal(got, gate(hidden))
    torch.testing.assert_close(
        got,
        want,
        rtol=0.1,
        atol=0.02,
    )


def naive(weight, hidden, functions, labels, reduction):
    """Compute the loss from logits that are materialized as a whole."""
    logits = 0
    for w, h, head in zip(
        weight.unbind(-1),
        hidden,
        functions,
        strict=True,
    ):
        logits = logits + w[..., None] * head(h)[..., :40]
    nll = F.cross_entropy(
        logits.transpose(1, 2),
        labels,
        reduction="none",
    )
    return fusers.reduced(nll, labels, reduction)


def assert_equals_naive(result, gate, hidden, functions, labels, reduction, leaves):
    weight = gate(hidden)
    assert torch.equal(result.weight, weight)
    assert not result.weight.requires_grad
    expected = naive(
        weight,
        hidden,
        functions,
        labels,
        reduction,
    )
    torch.testing.assert_close(result.loss, expected)
    gradients = torch.autograd.grad(
        result.loss.sum(),
        leaves,
    )
    for ours, theirs in zip(
        gradients,
        torch.autograd.grad(expected.sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=1e-4,
            atol=1e-6,
        )


REDUCTIONS = pytest.mark.parametrize(
    "reduction",
    ["mean", "sum", "sample", "none"],
)


@pytest.mark.parametrize("joint", [False, True])
@REDUCTIONS
@pytest.mark.parametrize(
    "frozen",
    [False, True],
    ids=["all train", "frozen specialists"],
)
@pytest.mark.parametrize(
    "scales",
    [None, (0.5, 1.0, 3.0)],
    ids=["", "scaled logits"],
)
def test_loss_is_the_naive_one(scales, frozen, reduction, joint):
    gate = FuserGate((16,) * 3, joint=joint)
    hidden, heads, labels = sample()
    leaves = list(gate.parameters())
    if not frozen:
        for tensor in (*hidden, *heads):
            leaves.append(tensor.requires_grad_())
    result = fuser_loss(
        gate,
        hidden,
        heads,
        labels,
        reduction=reduction,
        scales=scales,
    )
    functions = []
    for head, scale in zip(
        heads,
        scales or (1.0, 1.0, 1.0),
        strict=True,
    ):
        functions.append(
            functools.partial(
                F.linear,
                weight=head * scale,
            )
        )
    assert_equals_naive(
        result,
        gate,
        hidden,
        functions,
        labels,
        reduction,
        leaves,
    )


def bent(head, bias):
    """A head that is not a plain matrix product: it has a bias and a soft cap."""
    return lambda h: 4 * torch.tanh((F.linear(h, head) + bias) / 4)


@pytest.mark.parametrize(
    "chunk",
    [1, 4, 15, 100],
)
@REDUCTIONS
def test_chunks_of_any_heads(reduction, chunk):
    gate = FuserGate((16,) * 3)
    hidden, heads, labels = sample()
    heads[1] = torch.cat([heads[1], torch.randn(3, 16)])
    biases = [torch.randn(len(head)) for head in heads]
    leaves = [
        *gate.parameters(),
        *hidden,
        *heads,
        *biases,
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    functions = [bent(*pair) for pair in zip(heads, biases, strict=True)]
    result = chunked_loss(
        gate,
        hidden,
        functions,
        labels,
        reduction=reduction,
        chunk=chunk,
    )
    assert_equals_naive(
        result,
        gate,
        hidden,
        functions,
        labels,
        reduction,
        leaves,
    )


def test_chunks_of_labels_that_do_not_count_or_fit():
    gate = FuserGate((16,) * 3)
    hidden, heads, labels = sample()
    functions = [bent(head, 0.0) for head in heads]
    nothing = torch.full_like(labels, -100)
    assert (
        chunked_loss(
            gate,
            hidden,
            functions,
            nothing,
            reduction="sum",
        ).loss
        == 0
    )
    loss = chunked_loss(gate, hidden, functions, nothing).loss
    assert loss.isnan()
    for gradient in torch.autograd.grad(
        loss,
        list(gate.parameters()),
    ):
        assert not gradient.any()
    no_rows = [h[:0] for h in hidden]
    empty = chunked_loss(
        gate,
        no_rows,
        functions,
        labels[:0],
        reduction="none",
    )
    assert empty.loss.shape == (0, 5)
    labels[1, 1] = 40
    with pytest.raises(ValueError, match="labels must be below 40, .* got 40"):
        chunked_loss(gate, hidden, functions, labels)
    with pytest.raises(ValueError, match="reduction must be .*but got 'token'"):
        chunked_loss(
            gate,
            hidden,
            functions,
            labels,
            reduction="token",
        )
