"""Mixed logits and their cross-entropy: cases that the conformance table does not draw, and what
the op computes, keeps and refuses.
"""

import pytest
import torch

from moe_runtime.ops import fusion, fusion_torch
from moe_runtime.ops.fusion import fuse_logits, fused_cross_entropy
from moe_runtime.tools.conformance import oracle
from tests.support.oracle import assert_parity, assert_same

OP = "fused_cross_entropy"
IGNORED = -100
ALL = ("hidden", "heads", "gate")
TRAIN = pytest.mark.parametrize("train", [ALL, ("gate",)], ids=["all", "gate"])


def by_the_paper(hidden, heads, gate, labels, reduction="mean"):
    return oracle.cross_entropy(oracle.fused_logits(hidden, heads, gate), labels, reduction)


def sample(T, sizes, vocabularies, dtype=torch.float32, device="cpu", ignored=0.25):
    """Leaves whose mixed logits are O(1), and labels."""
    hidden = []
    heads = []
    for size, V in zip(sizes, vocabularies, strict=True):
        hidden.append(torch.randn(T, size).to(device, dtype))
        heads.append((torch.randn(V, size) / size**0.5).to(device, dtype))
    gate = (2 * torch.randn(T, len(sizes), device=device)).softmax(-1)
    labels = torch.randint(0, min(vocabularies), (T,), device=device)
    labels[torch.rand(T, device=device) < ignored] = IGNORED
    return hidden, heads, gate, labels


def run(f, case, dtype=None, train=ALL, scale=1.0, **options):
    """Return the loss and the gradients of everything that trains."""
    hidden, heads, gate, labels = case
    learned = {}

    def leaf(name, tensor):
        tensor = tensor.detach().to(dtype or tensor.dtype).clone()
        if name.startswith(train):
            learned[name] = tensor.requires_grad_()
        return tensor

    hidden = [leaf(f"hidden{s}", tensor) for s, tensor in enumerate(hidden)]
    heads = [leaf(f"heads{s}", tensor) for s, tensor in enumerate(heads)]
    loss = f(
        hidden,
        heads,
        leaf("gate", gate),
        labels,
        **options,
    )
    steps = torch.arange(
        loss.numel(),
        device=loss.device,
        dtype=loss.dtype,
    )
    upstream = scale * torch.cos(steps).view(loss.shape)
    grads = torch.autograd.grad(
        loss,
        list(learned.values()),
        upstream,
    )
    found = {"loss": loss.detach()}
    for name, grad in zip(learned, grads, strict=True):
        found[f"d{name}"] = grad
    return found


@pytest.fixture
def small_blocks(monkeypatch):
    """Force several chunks of tokens and several blocks of the vocabulary, with a partial last
    one.
    """
    monkeypatch.setattr(fusion, "CHUNK", 2000)
    monkeypatch.setattr(fusion_torch, "ROWS", 8)
    monkeypatch.setattr(fusion_torch, "CACHED", 0)


@TRAIN
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks(reduction, dtype, train, backend, small_blocks, device, tolerance, monkeypatch):
    if backend == "triton":
        from moe_runtime.kernels import fusion as kernels

        monkeypatch.setattr(kernels, "ROWS", 24)
    case = sample(
        45,
        (33, 16, 16),
        (150, 161, 150),
        dtype,
        device,
    )
    got = run(fused_cross_entropy, case, train=train, reduction=reduction, backend=backend)
    expected = run(by_the_paper, case, torch.float64, train=train, reduction=reduction)
    assert_parity(got, expected, tolerance[dtype])


def test_gradients_of_many_chunks_are_rounded_once(small_blocks):
    case = sample(
        320,
        (16, 16),
        (200, 200),
        torch.bfloat16,
    )
    got = run(fused_cross_entropy, case, train=("heads",))
    expected = run(by_the_paper, case, torch.float64, train=("heads",))
    for name in ("dheads0", "dheads1"):
        error = (got[name].double() - expected[name]).norm() / expected[name].norm()
        assert error < 5e-3, name  # a running sum in bfloat16 has an error of 1e-2


@pytest.mark.parametrize("reduction, scale", [("mean", 65536 / 2000), ("none", 1e-2)])
def test_float16_neither_underflows_nor_overflows(reduction, scale):
    """p / T on its own underflows float16, and the sum of a label's states overflows it; those of
    the scaled loss do not.
    """
    case = sample(
        2000,
        (16, 16),
        (1000, 1000),
        torch.float16,
    )
    hidden, _, _, labels = case
    hidden[0][:, 0] = 100
    labels[:1500] = 3
    got = run(fused_cross_entropy, case, reduction=reduction, scale=scale)
    expected = run(by_the_paper, case, torch.float64, reduction=reduction, scale=scale)
    assert expected["dheads0"].abs().max() < 65504
    assert_parity(got, expected, 5e-3)


@TRAIN
def test_all_labels_ignored_is_as_in_torch(train, backend, device):
    hidden, heads, gate, labels = sample(
        9,
        (16, 17),
        (20, 20),
        device=device,
        ignored=1,
    )
    case = (hidden, heads, gate, labels)
    mean = run(fused_cross_entropy, case, train=train, backend=backend)
    assert mean.pop("loss").isnan()
    for grad in mean.values():
        assert not grad.any()
    for reduction in ("sum", "none"):
        got = run(fused_cross_entropy, case, train=train, reduction=reduction, backend=backend)
        for tensor in got.values():
            assert not tensor.any()


def test_another_index_may_be_ignored(backend, device):
    hidden, heads, gate, labels = sample(
        24,
        (16, 16),
        (30, 30),
        device=device,
    )
    out = (labels == IGNORED) | (labels == 7)
    labels[out] = 7
    case = (hidden, heads, gate, labels)
    got = run(fused_cross_entropy, case, reduction="none", ignore_index=7, backend=backend)
    for name in ("loss", "dgate", "dhidden1"):
        assert not got[name][out].any()
    assert got["loss"][~out].all()
    assert got["dgate"][~out].any()


def test_more_dims_and_layouts(backend, device, tolerance):
    """[B, R] positions; states that are slices and transposed heads."""
    hidden, heads, gate, labels = sample(
        24,
        (32, 33),
        (40, 40),
        device=device,
    )
    expected = run(by_the_paper, (hidden, heads, gate, labels), torch.float64)
    labels = labels.view(4, 6)
    leaves = {}
    for s in range(2):
        size = hidden[s].shape[1]
        leaves[f"hidden{s}"] = torch.cat([hidden[s], hidden[s]], 1)[:, :size].view(4, 6, -1)
    for s in range(2):
        leaves[f"heads{s}"] = heads[s].t().contiguous().t()
    leaves["gate"] = gate.view(4, 6, 2).clone()
    for leaf in leaves.values():
        leaf.requires_grad_()
    *tensors, gates = leaves.values()
    states = tensors[:2]
    turned = tensors[2:]
    loss = fused_cross_entropy(states, turned, gates, labels.int(), backend=backend)
    got = {"loss": loss.detach()}
    grads = torch.autograd.grad(loss, list(leaves.values()))
    for name, grad in zip(leaves, grads, strict=True):
        got[f"d{name}"] = grad.reshape(expected[f"d{name}"].shape)
    assert_parity(got, expected, tolerance[torch.float32])
    each = fused_cross_entropy(states, turned, gates, labels, reduction="none")
    assert each.shape == (4, 6)
    assert fuse_logits(states, turned, gates).shape == (4, 6, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@TRAIN
def test_the_backward_pass_may_run_twice(train, dtype):
    """A retained graph keeps its gradients, otherwise they are handed out; both are scaled by the
    gradient of the loss.
    """
    case = sample(12, (16, 17), (20, 21), dtype)
    alone = run(fused_cross_entropy, case, train=train, scale=1 / 3)

    def twice(hidden, heads, gate, labels):
        loss = fused_cross_entropy(hidden, heads, gate, labels)
        leaves = [t for t in (*hidden, *heads, gate) if t.requires_grad]
        seven = torch.tensor(7.0)
        first = torch.autograd.grad(loss, leaves, seven, retain_graph=True)
        assert_same(
            torch.autograd.grad(
                loss,
                leaves,
                seven,
                retain_graph=True,
            ),
            first,
        )
        return loss

    assert_same(
        run(
            twice,
            case,
            train=train,
            scale=1 / 3,
        ),
        alone,
    )
    whole = run(fused_cross_entropy, case, train=train)
    bound = 4e-3 if dtype == torch.bfloat16 else 1e-6  # a single rounding
    for name in whole.keys() - {"loss"}:
        expected = whole[name].double()
        assert (alone[name].double() * 3 - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(
    "is_frozen, reduction, op",
    [
        (False, "mean", "fused_loss"),
        (False, "none", "fused_nll"),
        (True, "sum", "fused_nll"),
    ],
)
def test_a_second_gradient_is_refused_by_name(is_frozen, reduction, op, backend, device):
    hidden, heads, gate, labels = sample(
        6,
        (16, 17),
        (20, 21),
        device=device,
    )
    for tensor in (*hidden, *heads):
        tensor.requires_grad_(not is_frozen)
    gate.requires_grad_()
    loss = fused_cross_entropy(
        hidden, heads, gate, labels, reduction=reduction, backend=backend
    ).sum()
    (dgate,) = torch.autograd.grad(loss, gate, create_graph=True)
    assert dgate.abs().sum() > 0
    with pytest.raises(RuntimeError, match=f"moe_runtime::{op} has no second derivative"):
        torch.autograd.grad(dgate.square().sum(), gate)


@TRAIN
def test_autocast_is_as_for_a_linear_layer(train):
    hidden, heads, gate, labels = sample(
        20,
        (16, 17),
        (30, 30),
    )
    narrow_hidden = [t.bfloat16() for t in hidden]
    narrow_heads = [t.bfloat16() for t in heads]
    expected = run(fused_cross_entropy, (narrow_hidden, narrow_heads, gate, labels), train=train)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(fused_cross_entropy, (hidden, heads, gate, labels), train=train)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name].to(got[name].dtype))


def products(profile) -> int:
    """Count the matrix products in a profile."""
    names = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
    return sum(event.name in names for event in profile.function_events)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_specialists_need_no_product_in_the_backward_pass(reduction):
    """Nothing as large as a state is saved for it."""
    sizes = []
    hidden, heads, gate, labels = sample(
        30,
        (16, 17),
        (40, 40),
    )
    gate.requires_grad_()

    def note(tensor):
        sizes.append(tensor.numel())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
    with torch.autograd.profiler.profile() as forward, hooks:
        loss = fused_cross_entropy(hidden, heads, gate, labels, reduction=reduction).sum()
    with torch.autograd.profiler.profile() as backward:
        loss.backward()
    assert products(forward) == 2
    assert products(backward) == 0
    assert max(sizes) == gate.numel()


def test_gradients_come_with_one_forward_pass():
    hidden, heads, gate, labels = sample(
        30,
        (16, 17),
        (40, 40),
    )
    leaves = [t.requires_grad_() for t in (*hidden, *heads)]
    with torch.autograd.profiler.profile() as forward:
        loss = fused_cross_entropy(hidden, heads, gate, labels)
    with torch.autograd.profiler.profile() as backward:
        torch.autograd.grad(loss, leaves)
    assert products(forward) == 6  # for each head: logits, dx, dW
    assert products(backward) == 0


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden": []}, "hidden is [], heads"),
        ({"hidden": [torch.randn(6, 16), torch.randn(5, 17)]}, "hidden is [(6, 16), (5, 17)]"),
        ({"labels": torch.zeros(6)}, "labels is (6,) torch.float32"),
        ({"labels": torch.full((6,), 20)}, "below 20, the size of the smallest vocabulary"),
        ({"gate_weight": torch.rand(6, 2, device="meta")}, "on cpu, meta"),
    ],
)
def test_bad_arguments_are_named(change, words):
    hidden, heads, gate, labels = sample(
        6,
        (16, 17),
        (20, 21),
        ignored=0,
    )
    arguments = {"hidden": hidden, "heads": heads, "gate_weight": gate, "labels": labels}
    with pytest.raises(ValueError) as error:
        fused_cross_entropy(**arguments | change)
    assert words in str(error.value)
