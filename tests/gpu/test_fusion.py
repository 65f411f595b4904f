"""kernels/fusion.py natively, for what the interpreter cannot show. Without a GPU:
tests/ops/test_fusion.py.
"""

import pytest
import torch
import torch.nn.functional as F

from moe_runtime.ops import fusion
from moe_runtime.ops.fusion import fused_cross_entropy
from tests.support.oracle import poison, relative_error

pytestmark = pytest.mark.gpu
IGNORED = -100


def sample(T, sizes, vocabularies, dtype):
    hidden = [torch.randn(T, size, device="cuda").to(dtype) for size in sizes]
    heads = [
        (torch.randn(V, n, device="cuda") / n**0.5).to(dtype) for n, V in zip(sizes, vocabularies)
    ]
    gate = torch.randn(T, len(sizes), device="cuda").softmax(-1)
    labels = torch.randint(
        0,
        min(vocabularies),
        (T,),
        device="cuda",
    )
    labels[::5] = IGNORED
    return hidden, heads, gate, labels


def gradients(case, frozen, loss=fused_cross_entropy, dtype=None, **options):
    hidden, heads, gate, labels = case
    hidden, heads = (
        [t.detach().to(dtype or t.dtype).requires_grad_(not frozen) for t in ts]
        for ts in (hidden, heads)
    )
    gate = (
        gate.detach()
        .to(torch.float64 if dtype == torch.float64 else torch.float32)
        .requires_grad_()
    )
    if frozen:
        leaves = [gate]
    else:
        leaves = [gate, *hidden, *heads]
    out = loss(hidden, heads, gate, labels, **options)
    return out.detach(), *torch.autograd.grad(
        out,
        leaves,
        torch.ones_like(out),
    )


def naive(hidden, heads, gate, labels, reduction="mean"):
    V = min(map(len, heads))
    logits = sum(
        gate[:, s : s + 1] * F.linear(h, head[:V]) for s, (h, head) in enumerate(zip(hidden, heads))
    )
    return F.cross_entropy(
        logits.to(gate.dtype),
        labels,
        reduction=reduction,
    )


SHAPES = [
    (1024, (1024,) * 3, (32000,) * 3),
    (333, (512, 1024, 768), (1000, 1016, 1003)),
    (65, (33, 17), (101, 130)),
    (1, (64,) * 5, (257,) * 5),
    (200, (256,) * 9, (4000,) * 9),
]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16],
    ids=str,
)
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parity_with_float64_on_poisoned_memory(shape, reduction, frozen, tf32, dtype, monkeypatch):
    monkeypatch.setattr(
        torch.backends.cuda.matmul,
        "allow_tf32",
        tf32,
    )
    case = sample(*shape, dtype)
    poison()
    got = gradients(case, frozen, reduction=reduction, backend="triton")
    expected = gradients(
        case,
        frozen,
        naive,
        torch.float64,
        reduction=reduction,
    )
    bound = {
        torch.float32: 2e-3 if tf32 else 2e-5,
        torch.float16: 3e-3,
        torch.bfloat16: 1.5e-2,
    }[dtype]
    for a, b in zip(got, expected, strict=True):
        if b.any():
            assert relative_error(a, b) < bound


@pytest.mark.parametrize("frozen", [False, True])
def test_memory_is_a_share_of_the_naive(frozen):
    def peak(loss, **options):
        gradients(case, frozen, loss, **options)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(case, frozen, loss, **options)
        return torch.cuda.max_memory_allocated() - before

    case = sample(
        8192,
        (1024,) * 3,
        (32000,) * 3,
        torch.bfloat16,
    )
    if frozen:
        share = 0.1
    else:
        share = 0.35
    assert peak(fused_cross_entropy, backend="triton") < share * peak(naive)


def test_beyond_two_to_the_31_elements():
    """The last ids of a head are beyond 2^31 elements."""
    V = (1 << 20) + 64
    H = 2048
    head = torch.zeros(
        V,
        H,
        device="cuda",
        dtype=torch.bfloat16,
    )
    head[-1, 0], head[3, 0] = 8, 4
    hidden = torch.zeros(3, H, device="cuda", dtype=torch.bfloat16)
    hidden[:, 0] = torch.tensor([1.0, 2.0, 3.0])
    labels = torch.tensor([V - 1, 3, V - 1], device="cuda")
    gate = torch.ones(3, 1, device="cuda", requires_grad=True)
    loss = fused_cross_entropy(
        [hidden],
        [head],
        gate,
        labels,
        reduction="none",
        backend="triton",
    )
    logits = torch.zeros(3, V, dtype=torch.float64, device="cuda")
    logits[:, -1], logits[:, 3] = 8 * hidden[:, 0], 4 * hidden[:, 0]
    torch.testing.assert_close(
        loss.double(), F.cross_entropy(logits, labels, reduction="none"), rtol=1e-4, atol=1e-4
    )
    (dgate,) = torch.autograd.grad(loss.sum(), gate)
    expected = (logits.softmax(1) * logits).sum(1) - logits.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(
        dgate[:, 0].double(),
        expected,
        rtol=1e-3,
        atol=1e-3,
    )


def test_more_tokens_than_an_int32_of_logits(monkeypatch):
    """65,600 tokens by 32,768 ids, whose mixed logits are all in memory at the same time."""
    monkeypatch.setattr(fusion, "CHUNK", 1 << 40)
    T = 65600
    V = 32768
    H = 16
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    head = torch.randn(V, H, device="cuda").bfloat16()
    labels = torch.randint(0, V, (T,), device="cuda")
    gate = torch.ones(T, 1, device="cuda")
    hidden.requires_grad_()
    loss = fused_cross_entropy(
        [hidden],
        [head],
        gate,
        labels,
        reduction="none",
        backend="triton",
    )
    rows = slice(T - 128, T)
    last = hidden[rows].detach().double().requires_grad_()
    expected = F.cross_entropy(
        last @ head.double().t(),
        labels[rows],
        reduction="none",
    )
    torch.testing.assert_close(
        loss[rows].double(),
        expected,
        rtol=1e-4,
        atol=1e-4,
    )
    (dhidden,) = torch.autograd.grad(loss.sum(), hidden)
    assert (
        relative_error(
            dhidden[rows],
            torch.autograd.grad(expected.sum(), last)[0],
        )
        < 1e-2
    )
