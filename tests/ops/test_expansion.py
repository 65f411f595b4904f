"""Gram matrices, distances and children of two parents: what each reads and allocates, and what a
child depends on.
"""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime import backends
from moe_runtime.ops import expansion
from moe_runtime.ops.expansion import dare_merge, distances, draws, farthest_pair, gram, stream_of
from tests.support.oracle import relative_error
from tests.support.shared import BEYOND_INT32

OP = "gram"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def gram_in_float64(experts, base=None):
    rows = torch.stack([expert.double().flatten() for expert in experts])
    if base is not None:
        rows = rows - base.double().flatten()
    return rows @ rows.t()


@pytest.mark.parametrize(
    "shape",
    [
        (17, 700),
        (4, 9001),
        (33, 500),
    ],
    ids=str,
)
def test_several_blocks(shape, backend, device):
    experts = torch.randn(shape, device=device)
    base = torch.randn(shape[1:], device=device)
    found = gram(experts, base, backend=backend)
    assert torch.equal(found, found.t())
    # float32 sums of 9001 products, in the order of the BLAS: the error is 4e-6 on an EPYC
    assert relative_error(found, gram_in_float64(experts, base)) < 6e-6
    listed = gram(list(experts.clone()), base, backend=backend)
    assert relative_error(listed, found) < 6e-6


def test_near_experts_are_told_by_their_differences(backend, device):
    """Training changes weights by about a thousandth: the base must be subtracted before the
    product, not after.
    """
    base = torch.randn(5000, device=device)
    experts = base + 1e-3 * torch.randn(4, 5000, device=device)
    found = gram(experts, base, backend=backend)
    assert relative_error(found, gram_in_float64(experts, base)) < 2e-6


class Sizes(TorchDispatchMode):
    """Records the number of elements of every tensor that an op allocates, except views."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.found.append(out.numel())
        return out


def test_nothing_of_an_experts_size_is_made_but_the_child(monkeypatch):
    monkeypatch.setattr(expansion, "BLOCK", 4096)
    stack = torch.randn(4, 50_001).bfloat16()
    experts = list(stack.clone())
    base = torch.randn(50_001).bfloat16()
    with Sizes() as sizes:
        gram(experts, base, backend="torch")
        expansion._gram_by_blocks(stack, base)
        expansion._dare_merge(
            *experts[:2],
            base,
            1,
            2,
            1 << 31,
            0.5,
            0.5,
            "torch",
        )
    *others, largest = sorted(sizes.found)
    assert len(others) > 100
    assert others[-1] <= 4096
    assert largest == 50_001


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_distances_are_those_of_the_pairs(metric):
    experts = torch.randn(5, 300, dtype=torch.float64)
    found = distances(gram(experts), metric)
    for i, a in enumerate(experts):
        for j, b in enumerate(experts):
            expected = (a - b).norm().item()
            if metric == "cosine":
                expected = 1 - torch.cosine_similarity(a, b, 0).item()
            if i == j:
                expected = 0
            assert found[i, j].item() == pytest.approx(
                expected,
                abs=1e-12,
                rel=1e-12,
            )


def test_distances_of_equal_and_of_zero_experts():
    experts = torch.stack(
        [
            torch.ones(4),
            torch.ones(4),
            torch.zeros(4),
            -torch.ones(4),
        ]
    )
    assert distances(gram(experts)).tolist() == [
        [0, 0, 1, 2],
        [0, 0, 1, 2],
        [1, 1, 0, 1],
        [2, 2, 1, 0],
    ]
    assert distances(gram(experts), "l2").tolist() == [
        [0, 0, 2, 4],
        [0, 0, 2, 4],
        [2, 2, 0, 2],
        [4, 4, 2, 0],
    ]


def test_farthest_pair():
    distance = torch.zeros(4, 4)
    distance[1, 3] = distance[3, 1] = distance[2, 3] = distance[3, 2] = 2.0
    assert farthest_pair(distance) == (1, 3)
    assert farthest_pair(torch.zeros(3, 3)) == (0, 1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_the_row_of_one_more(dtype, device, monkeypatch):
    monkeypatch.setattr(expansion, "BLOCK", 4096)
    experts = torch.randn(4, 7, 1201, device=device).to(dtype)
    for base in (None, torch.randn(7, 1201, device=device).to(dtype)):
        found = expansion.gram_row(
            list(experts[:3]),
            experts[3],
            base,
        )
        assert relative_error(found, gram_in_float64(experts, base)[3]) < 2e-6


@BEYOND_INT32
def test_experts_beyond_int32(stride, backend):
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/test_expansion.py covers it on a GPU")
    # untouched pages from calloc take no memory
    memory = torch.from_numpy(np.zeros(stride + 8, dtype=np.float16))
    experts = memory.as_strided((2, 5), (stride, 1))
    experts[0] = torch.arange(5)
    experts[1] = torch.arange(5, 10)
    assert gram(experts, backend=backend).tolist() == [[30, 80], [80, 255]]


KNOWN = [[153594439, 768515073], [1530661329, 4158700688]]


def test_draws_are_those_of_the_element():
    """The values must never change, since a seed has to reproduce the same children."""
    whole = draws(42, stream_of("layers.0.up"), 0, 40)
    assert whole[:2].tolist() == KNOWN
    for start in (4, 20):
        assert draws(42, stream_of("layers.0.up"), start, 18).tolist() == (
            whole[start : start + 18].tolist()
        )
    far = draws(42, 1, 1 << 34, 4)
    assert (far != draws(42, 1, 0, 4)).all()


ARGS = {
    "weights": (0.3, 0.7),
    "drop": 0.4,
    "seed": 11,
    "tensor": "a",
}


@pytest.mark.parametrize("drop", [0.0, 0.5, 0.9, 1.0])
def test_drop_rates(drop, backend, device):
    """p = 0 keeps everything, p = 1 drops everything, without a division by zero; the mean does not
    change.
    """
    base = torch.ones(40_000, device=device)
    first = base + 2
    second = base + 3
    found = dare_merge(
        first,
        second,
        base,
        drop=drop,
        weights=(0.5, 0.5),
        seed=3,
        tensor="w",
        backend=backend,
    ).cpu()
    if drop == 0:
        assert (found == 3.5).all()
        return
    if drop == 1:
        assert (found == 1).all()
        return
    values, counts = found.double().unique(return_counts=True)
    scale = 0.5 / (1 - drop)
    expected = {1, 1 + 2 * scale, 1 + 3 * scale, 1 + 5 * scale}
    assert values.tolist() == pytest.approx(sorted(expected), rel=1e-6)
    one = drop * (1 - drop)
    chances = [
        drop**2,
        one,
        one,
        (1 - drop) ** 2,
    ]  # independent masks
    assert (counts / 40_000).tolist() == pytest.approx(chances, abs=0.01)
    assert found.mean().item() == pytest.approx(3.5, abs=0.08)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, offset",
    [
        ((70, 61), 0),
        ((4099,), 0),
        ((513,), 1),
    ],
)
def test_backends_give_the_same_bits(shape, offset, dtype, device):
    if backends.why_not("triton", "dare_merge", torch.device(device)):
        pytest.skip("Triton is not installed")
    count = math.prod(shape)
    parts = torch.randn(3, count + offset).to(dtype)[:, offset:].view(3, *shape)
    args = ARGS | {"seed": 2**63 - 1, "weights": (1 / 3, 2 / 3)}
    for several in (parts, parts[:2]):
        expected = dare_merge(*several, **args, backend="torch")
        got = dare_merge(
            *several.to(device),
            **args,
            backend="triton",
        )
        assert torch.equal(got.cpu(), expected)


def test_a_child_depends_on_seed_tensor_and_element_alone(monkeypatch):
    parts = torch.randn(3, 9001)
    given = parts.clone()
    expected = dare_merge(*parts, **ARGS)
    assert torch.equal(parts, given)
    dare_merge(
        parts[1],
        parts[0],
        parts[2],
        **ARGS | {"tensor": "b"},
    )  # in a different order
    assert torch.equal(dare_merge(*parts, **ARGS), expected)
    monkeypatch.setattr(expansion, "BLOCK", 1000)
    assert torch.equal(dare_merge(*parts, **ARGS), expected)
    assert torch.equal(dare_merge(*parts[..., None], **ARGS)[:, 0], expected)
    strided = torch.stack([parts, parts], 2)[..., 0]
    assert torch.equal(dare_merge(*strided, **ARGS), expected)
    for other in ({"seed": 12}, {"tensor": "b"}, {"tensor": 5}):
        assert (dare_merge(*parts, **ARGS | other) != expected).float().mean() > 0.4


@pytest.mark.parametrize(
    "change, words",
    [
        ({"second": torch.zeros(4)}, "second is (4,)"),
        ({"base": torch.zeros(3).half()}, "base is (3,) torch.float16"),
        ({"weights": (1.0, math.inf)}, "two finite numbers, but got (1.0, inf)"),
        ({"start": 2}, "must be a multiple of 4, but got 2"),
    ],
)
def test_bad_arguments_of_dare_are_named(change, words):
    args = {"first": torch.zeros(3), "second": torch.zeros(3)} | ARGS | change
    with pytest.raises(ValueError) as error:
        dare_merge(**args)
    assert words in str(error.value)
