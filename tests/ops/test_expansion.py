"""Gram matrices, distances and children of two parents, against plain Python; what each reads, and
what a child depends on.
"""

import itertools
import math
import os

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime import backends
from moe_runtime.ops import expansion
from moe_runtime.ops.expansion import dare_merge, distances, draws, farthest_pair, gram, stream_of
from tests.support.oracle import relative_error

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=str(why)))
    for name in ("torch", "triton")
    for why in [
        backends.why_not(name, "gram", torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    ]
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def gram_in_float64(experts, base=None):
    rows = torch.stack(
        [e.double().flatten() - (0 if base is None else base.double().flatten()) for e in experts]
    )
    return rows @ rows.t()


# Gram
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_base", [False, True], ids=["", "base"])
@pytest.mark.parametrize(
    "shape", [(8, 34, 33), (1, 17), (3, 1), (2, 0, 7), (17, 700), (4, 9001)], ids=str
)
def test_gram(shape, with_base, dtype, backend, device):
    experts = torch.randn(shape, device=device).to(dtype)
    base = torch.randn(shape[1:], device=device).to(dtype) if with_base else None
    found = gram(experts, base, backend=backend)
    assert found.dtype == torch.float64 and torch.equal(found, found.t())
    # float32 sums of 9001 products, in the order of the BLAS: 4e-6 on an EPYC
    assert relative_error(found, gram_in_float64(experts, base)) < 6e-6
    apart = gram(list(experts.clone()), base, backend=backend)
    assert relative_error(apart, found) < 6e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_near_experts_are_told_apart_by_their_differences(backend, device):
    """What training adds is a thousandth of the weight: the base is subtracted before the product,
    not after.
    """
    base = torch.randn(5000, device=device)
    experts = base + 1e-3 * torch.randn(4, 5000, device=device)
    found = gram(experts, base, backend=backend)
    assert relative_error(found, gram_in_float64(experts, base)) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda w: w.transpose(1, 2), id="transposed"),
        pytest.param(lambda w: w[::2], id="every other expert"),
        pytest.param(lambda w: w[:1].expand(5, -1, -1), id="E views of one expert"),
        pytest.param(lambda w: w[:, :, 1::2], id="strided"),
    ],
)
def test_gram_of_views(view, backend, device):
    experts = view(torch.randn(6, 34, 33, device=device))
    base = torch.randn(tuple(reversed(experts.shape[1:])), device=device).t()
    assert (
        relative_error(gram(experts, base, backend=backend), gram_in_float64(experts, base)) < 2e-6
    )


def test_gram_of_float64_is_float64s(monkeypatch):
    experts = torch.randn(3, 500, dtype=torch.float64)
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    assert relative_error(gram(experts), experts @ experts.t()) < 1e-14


class Reads(TorchDispatchMode):
    """Counts the elements of `watched` tensors' storages that ops other than views take as
    input.
    """

    VIEWS = (
        "view",
        "slice",
        "reshape",
        "select",
        "unsqueeze",
        "expand",
        "alias",
        "_unsafe_view",
        "t",
        "detach",
        "split",
    )

    def __init__(self, watched):
        super().__init__()
        self.count = {t.untyped_storage().data_ptr(): 0 for t in watched}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().removeprefix("aten::").partition(".")[0] not in self.VIEWS:
            tensors = [t for arg in args for t in (arg if isinstance(arg, list | tuple) else [arg])]
            for t in tensors:
                if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() in self.count:
                    self.count[t.untyped_storage().data_ptr()] += t.numel()
        return func(*args, **(kwargs or {}))


def test_torch_reads_each_expert_once(monkeypatch):
    monkeypatch.setattr(expansion, "BLOCK", 4096)
    experts = [torch.randn(9001).bfloat16() for _ in range(4)]
    base = torch.randn(9001).bfloat16()
    with Reads([*experts, base]) as reads:
        gram(experts, base, backend="torch")
    assert list(reads.count.values()) == [9001] * 5


class Sizes(TorchDispatchMode):
    """Collects the number of elements of every tensor that an op makes, views aside."""

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
    experts = [torch.randn(50_001).bfloat16() for _ in range(4)]
    base = torch.randn(50_001).bfloat16()
    stack = torch.stack(experts)
    with Sizes() as sizes:
        gram(experts, base, backend="torch")
        expansion._gram_by_blocks(stack, base)
        expansion._dare_merge(*experts[:2], base, 1, 2, 1 << 31, 0.5, 0.5, "torch")
    assert len(sizes.found) > 100 and sorted(sizes.found)[-2] <= 4096 < max(sizes.found) == 50_001


def test_blocks_do_not_show(monkeypatch):
    experts = torch.randn(3, 9001)
    want = gram(experts)
    monkeypatch.setattr(expansion, "BLOCK", 4096)
    assert relative_error(gram(experts), want) < 1e-6


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_distances_are_those_of_the_pairs(metric):
    experts = torch.randn(5, 300, dtype=torch.float64)
    found = distances(gram(experts), metric)
    for i, a in enumerate(experts.tolist()):
        for j, b in enumerate(experts.tolist()):
            dot, na, nb = (
                math.fsum(p * q for p, q in zip(*pair)) for pair in ((a, b), (a, a), (b, b))
            )
            want = 1 - dot / math.sqrt(na * nb) if metric == "cosine" else math.dist(a, b)
            assert found[i, j].item() == pytest.approx(0 if i == j else want, abs=1e-12, rel=1e-12)


def test_distances_of_equal_and_of_zero_experts():
    experts = torch.stack([torch.ones(4), torch.ones(4), torch.zeros(4), -torch.ones(4)])
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


# DARE

MASK = (1 << 64) - 1
M0 = 0xD2E7470EE14C6C93
M1 = 0xCA5A826395121157
W0 = 0x9E3779B97F4A7C15
W1 = 0xBB67AE8584CAA73B


def philox(counter, key, rounds=10):
    """Philox 4x64 as its authors state it, on Python's integers."""
    c = list(counter)
    k = list(key)
    for _ in range(rounds):
        a = M0 * c[0]
        b = M1 * c[2]
        c = [(b >> 64) ^ c[1] ^ k[0], b & MASK, (a >> 64) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + W0) & MASK, (k[1] + W1) & MASK]
    return c


def test_philox_is_the_published_one():
    """The authors' own known answers (Random123's kat_vectors: philox4x64 10)."""
    assert philox([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    assert philox([MASK] * 4, [MASK] * 2) == [
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    ]


@pytest.mark.parametrize(
    "seed, stream", [(0, 0), (42, 1), (2**63 - 1, stream_of("model.layers.0.mlp.up_proj.weight"))]
)
@pytest.mark.parametrize("start", [0, 4, 4000])
def test_draws_are_philox_of_the_element(start, seed, stream):
    want = [
        number
        for block in range(start // 4, start // 4 + 5)
        for number in philox([block + 1, 0, 0, 0], [seed, stream])
    ]
    found = draws(seed, stream, start, 18).tolist()
    assert found == [[number & 0xFFFFFFFF, number >> 32] for number in want[:18]]


def child(first, second, base, weights, drop, seed, tensor):
    """The equation, in float64, element by element."""
    kept = draws(seed, stream_of(tensor), 0, first.numel()) >= drop * 2**32
    if base is None:
        out = torch.zeros(first.numel(), dtype=torch.float64)
    else:
        out = base.double().flatten().cpu()
    for parent, weight, keep in zip((first, second), weights, kept.T):
        delta = parent.double().flatten().cpu() - (
            0 if base is None else base.double().flatten().cpu()
        )
        out = out + weight * delta * torch.from_numpy(keep) / (1 - drop if drop < 1 else 1)
    return out.view(first.shape)


ARGS = {"weights": (0.3, 0.7), "drop": 0.4, "seed": 11, "tensor": "a"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_base", [False, True], ids=["", "base"])
@pytest.mark.parametrize("shape", [(33, 34), (1,), (), (0, 3), (2, 3, 700)], ids=str)
def test_child(shape, with_base, dtype, backend, device):
    first, second, base = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    base = base if with_base else None
    found = dare_merge(first, second, base, **ARGS, backend=backend)
    want = child(first, second, base, **ARGS)
    assert found.dtype == dtype and found.shape == first.shape
    rounded = relative_error(want.to(dtype), want)
    assert relative_error(found.cpu(), want) <= 1.01 * rounded + 2e-7


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drop", [0.0, 0.5, 0.9, 1.0])
def test_drop_rates(drop, backend, device):
    """p = 0 keeps all, p = 1 drops all, without a division by zero; the mean stays what it was."""
    first, second, base = torch.full((3, 40_000), 2.0, device=device).unbind()
    # differences of 2 and 3 from 1
    first = first + 1
    second = second + 2
    base = base - 1
    found = dare_merge(
        first, second, base, weights=(0.5, 0.5), drop=drop, seed=3, tensor="w", backend=backend
    ).cpu()
    if drop in (0.0, 1.0):
        assert (found == (1 + 0.5 * 2 + 0.5 * 3 if drop == 0 else 1)).all()
        return
    values, counts = found.double().unique(return_counts=True)
    scale = 0.5 / (1 - drop)
    want = torch.tensor(
        sorted({1, 1 + 2 * scale, 1 + 3 * scale, 1 + 5 * scale}), dtype=torch.float64
    )
    torch.testing.assert_close(values, want, rtol=1e-6, atol=0)
    chances = torch.tensor([drop**2, drop * (1 - drop), drop * (1 - drop), (1 - drop) ** 2])
    torch.testing.assert_close(counts / 40_000, chances, rtol=0, atol=0.01)  # independent masks
    assert found.mean().item() == pytest.approx(3.5, abs=0.08)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, offset", [((70, 61), 0), ((4099,), 0), ((513,), 1)])
def test_backends_give_the_same_bits(shape, offset, dtype, device):
    if backends.why_not("triton", "dare_merge", torch.device(device)):
        pytest.skip("no Triton here")
    count = math.prod(shape)
    parts = [torch.randn(count + offset).to(dtype)[offset:].view(shape) for _ in range(3)]
    args = ARGS | {"seed": 2**63 - 1, "weights": (1 / 3, 2 / 3)}
    want = dare_merge(*parts, **args, backend="torch")
    assert torch.equal(
        dare_merge(*(p.to(device) for p in parts), **args, backend="triton").cpu(), want
    )
    want = dare_merge(*parts[:2], **args, backend="torch")
    assert torch.equal(
        dare_merge(*(p.to(device) for p in parts[:2]), **args, backend="triton").cpu(), want
    )


def test_a_child_depends_on_seed_tensor_and_element_alone(monkeypatch):
    first, second, base = torch.randn(3, 9001)
    want = dare_merge(first, second, base, **ARGS)
    dare_merge(second, first, base, **ARGS | {"tensor": "b"})  # in another order
    assert torch.equal(dare_merge(first, second, base, **ARGS), want)
    monkeypatch.setattr(expansion, "BLOCK", 1000)
    assert torch.equal(dare_merge(first, second, base, **ARGS), want)
    assert torch.equal(
        dare_merge(first.view(-1, 1), second.view(-1, 1), base.view(-1, 1), **ARGS).view(-1), want
    )
    strided = [torch.stack([t, t], 1)[:, 0] for t in (first, second, base)]
    assert torch.equal(dare_merge(*strided, **ARGS), want)
    for other in ({"seed": 12}, {"tensor": "b"}, {"tensor": 5}):
        assert (dare_merge(first, second, base, **ARGS | other) != want).float().mean() > 0.4


def test_streams_of_names_differ():
    names = [
        f"model.layers.{i}.mlp.{part}_proj.weight"
        for i in range(500)
        for part in ("gate", "up", "down")
    ]
    assert len({stream_of(name) for name in names}) == len(names)
    assert all(0 <= stream_of(name) < 1 << 63 for name in names) and stream_of(7) == 7


def test_parents_are_not_written_to():
    parts = [torch.randn(500) for _ in range(3)]
    before = [part.clone() for part in parts]
    dare_merge(*parts, **ARGS)
    assert all(torch.equal(a, b) for a, b in zip(parts, before))


def test_float64_is_computed_in_float64(monkeypatch):
    parts = [torch.randn(500, dtype=torch.float64) for _ in range(3)]
    monkeypatch.setenv("MOE_RUNTIME_BACKEND", "triton")
    assert relative_error(dare_merge(*parts, **ARGS), child(*parts, **ARGS)) < 1e-15


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param({"second": torch.zeros(4)}, "second is (4,)", id="another shape"),
        pytest.param(
            {"base": torch.zeros(3).half()}, "base is (3,) torch.float16", id="another dtype"
        ),
        pytest.param(
            {"first": torch.zeros(3).int(), "second": torch.zeros(3).int()},
            "second is (3,) torch.int32",
            id="integers",
        ),
        pytest.param({"drop": 1.5}, "drop must be", id="a probability above 1"),
        pytest.param({"drop": -0.1}, "drop must be", id="a probability below 0"),
        pytest.param(
            {"weights": (1.0,)},
            "weights must be two finite numbers, but got (1.0,)",
            id="one weight",
        ),
        pytest.param(
            {"weights": (1.0, math.inf)},
            "two finite numbers, but got (1.0, inf)",
            id="an infinite weight",
        ),
        pytest.param({"seed": -1}, "seed must be", id="a negative seed"),
        pytest.param(
            {"start": 2}, "must be a multiple of 4, but got 2", id="a part that begins within four"
        ),
        pytest.param({"tensor": 1 << 63}, "tensor must be", id="a stream beyond 63 bits"),
    ],
)
def test_bad_arguments_of_dare_are_named(change, words):
    args = {"first": torch.zeros(3), "second": torch.zeros(3), **ARGS} | change
    with pytest.raises(ValueError) as error:
        dare_merge(**args)
    assert words in str(error.value)


def test_opcheck():
    first, second, base = torch.randn(3, 5, 7)
    torch.library.opcheck(
        torch.ops.moe_runtime.gram, (torch.randn(3, 35), base.reshape(-1), "torch")
    )
    torch.library.opcheck(torch.ops.moe_runtime.gram, (torch.randn(35, 3).t(), None, "torch"))
    torch.library.opcheck(
        torch.ops.moe_runtime.dare_merge, (first, second, base, 5, 6, 1 << 31, 0.5, 1.5, "torch")
    )
    torch.library.opcheck(
        torch.ops.moe_runtime.dare_merge,
        (first.t(), second.t(), None, 5, 6, 1 << 31, 0.5, 1.5, "torch"),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_give_the_same_bits(backend, device):
    experts = torch.randn(5, 9001, device=device)
    first = gram(experts, backend=backend), dare_merge(*experts[:3], **ARGS, backend=backend)
    for _ in range(20 if backend == "torch" or "TRITON_INTERPRET" not in os.environ else 2):
        again = gram(experts, backend=backend), dare_merge(*experts[:3], **ARGS, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(again, first))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "stride", [2**31 - 1, 2**31, 2**31 + 1], ids=["2^31 - 1", "2^31", "2^31 + 1"]
)
def test_experts_beyond_int32(stride, backend):
    if torch.cuda.is_available():
        pytest.skip("on a GPU tests/gpu/test_expansion.py fills that many elements")
    # calloc gives pages that take no memory before they are touched
    memory = torch.from_numpy(np.zeros(stride + 8, dtype=np.float16))
    experts = memory.as_strided((2, 5), (stride, 1))
    experts[0], experts[1] = torch.arange(5), torch.arange(5, 10)
    assert gram(experts, backend=backend).tolist() == [[30, 80], [80, 255]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [(0, 4, 9001), (0, 4096, 8192, 9001)], ids=str)
def test_a_childs_parts_are_those_of_the_whole(cuts, backend, device):
    parts = torch.randn(3, 9001, device=device)
    want = dare_merge(*parts, **ARGS, backend=backend)
    found = [
        dare_merge(*parts[:, start:end].clone(), **ARGS, start=start, backend=backend)
        for start, end in itertools.pairwise(cuts)
    ]
    assert torch.equal(torch.cat(found), want)


def test_parts_beyond_int32():
    """Counters are 64 bits wide: an element beyond 2^33 has numbers of its own."""
    parts = torch.randn(3, 64)
    near, far = (dare_merge(*parts, **ARGS, start=start) for start in (0, 1 << 34))
    assert not torch.equal(near, far)
    want = draws(ARGS["seed"], stream_of(ARGS["tensor"]), 1 << 34, 64)
    assert (
        want.tolist()[0][0]
        == philox([(1 << 32) + 1, 0, 0, 0], [11, stream_of("a")])[0] & 0xFFFFFFFF
    )


def test_without_rescaling_the_rest_stays_as_it_is():
    first, second, base = torch.randn(3, 500)
    found = dare_merge(first, second, base, **ARGS, rescale=False)
    want = child(
        first,
        second,
        base,
        (0.3 * 0.6, 0.7 * 0.6),
        **{k: ARGS[k] for k in ("drop", "seed", "tensor")},
    )
    assert relative_error(found, want) < 2e-7


def test_gram_of_more_experts_than_are_taken_at_once(monkeypatch):
    monkeypatch.setattr(expansion, "FEW", 4)
    experts = [torch.randn(300) for _ in range(7)]
    base = torch.randn(300)
    assert relative_error(gram(experts, base), gram_in_float64(experts, base)) < 2e-6


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("with_base", [False, True], ids=["", "base"])
def test_the_row_of_one_more(with_base, dtype, device, monkeypatch):
    monkeypatch.setattr(expansion, "BLOCK", 4096)
    experts = torch.randn(4, 7, 1201, device=device).to(dtype)
    base = torch.randn(7, 1201, device=device).to(dtype) if with_base else None
    found = expansion.gram_row(list(experts[:3]), experts[3], base)
    assert relative_error(found, gram_in_float64(experts, base)[3]) < 2e-6
