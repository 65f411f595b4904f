"""Gram matrices, distances and children of two parents: what each reads and makes, and what a child
depends on.
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
    # float32 sums of 9001 products, in the order of the BLAS: 4e-6 on an EPYC
    assert relative_error(found, gram_in_float64(experts, base)) < 6e-6
    listed = gram(list(experts.clone()), base, backend=backend)
    assert relative_error(listed, found) < 6e-6


def test_near_experts_are_told_by_their_differences(backend, device):
    """What training adds is a thousandth of the weight: the base is subtracted before the product,
    not after.
    """
    base = torch.randn(5000, device=device)
    experts = base + 1e-3 * torch.randn(4, 5000, device=device)
    found = gram(experts, base, backend=backend)
    assert relative_error(found, gram_in_float64(experts, base)) < 2e-6


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


class Reads(TorchDispatchMode):
    """Counts the elements of `watched` tensors that ops other than views take as input."""

    def __init__(self, watched):
        super().__init__()
        self.count = {t.untyped_storage().data_ptr(): 0 for t in watched}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().removeprefix("aten::").partition(".")[0] not in VIEWS:
            for t in torch.utils._pytree.tree_leaves(args):
                if isinstance(t, torch.Tensor):
                    storage = t.untyped_storage().data_ptr()
                    if storage in self.count:
                        self.count[storage] += t.numel()
        return func(*args, **(kwargs or {}))


def test_torch_reads_each_expert_once(monkeypatch):
    monkeypatch.setattr(expansion, "BLOCK", 4096)
    *experts, base = torch.randn(5, 9001).bfloat16().clone().unbind()
    experts = [expert.clone() for expert in experts]
    base = base.clone()
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
            want = (a - b).norm().item()
            if metric == "cosine":
                want = 1 - torch.cosine_similarity(a, b, 0).item()
            if i == j:
                want = 0
            assert found[i, j].item() == pytest.approx(
                want,
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


def test_gram_of_more_experts_than_are_taken_at_once(monkeypatch):
    monkeypatch.setattr(expansion, "FEW", 4)
    experts = list(torch.randn(7, 300))
    base = torch.randn(300)
    assert relative_error(gram(experts, base), gram_in_float64(experts, base)) < 2e-6


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


@pytest.mark.parametrize(
    "stride",
    [
        2**31 - 1,
        2**31,
        2**31 + 1,
    ],
    ids=["-1", "2^31", "+1"],
)
def test_experts_beyond_int32(stride, backend):
    if torch.cuda.is_available():
        pytest.skip("on a GPU tests/gpu/test_expansion.py fills that many elements")
    # calloc gives pages that take no memory before they are touched
    memory = torch.from_numpy(np.zeros(stride + 8, dtype=np.float16))
    experts = memory.as_strided((2, 5), (stride, 1))
    experts[0] = torch.arange(5)
    experts[1] = torch.arange(5, 10)
    assert gram(experts, backend=backend).tolist() == [[30, 80], [80, 255]]


# DARE
MASK = (1 << 64) - 1


def philox(counter, key, rounds=10):
    """Philox 4x64 as its authors state it, on Python's integers."""
    c = list(counter)
    k = list(key)
    for _ in range(rounds):
        a = 0xD2E7470EE14C6C93 * c[0]
        b = 0xCA5A826395121157 * c[2]
        c = [
            (b >> 64) ^ c[1] ^ k[0],
            b & MASK,
            (a >> 64) ^ c[3] ^ k[1],
            a & MASK,
        ]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
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
    "seed, stream",
    [
        (0, 0),
        (42, 1),
        (2**63 - 1, stream_of("layers.0.up")),
    ],
)
@pytest.mark.parametrize("start", [0, 4, 4000, 1 << 34])
def test_draws_are_philox_of_the_element(start, seed, stream):
    want = []
    for block in range(start // 4, start // 4 + 5):
        for number in philox(
            [
                block + 1,
                0,
                0,
                0,
            ],
            [seed, stream],
        ):
            want.append([number & 0xFFFFFFFF, number >> 32])
    assert (
        draws(
            seed,
            stream,
            start,
            18,
        ).tolist()
        == want[:18]
    )


ARGS = {
    "weights": (0.3, 0.7),
    "drop": 0.4,
    "seed": 11,
    "tensor": "a",
}


@pytest.mark.parametrize("drop", [0.0, 0.5, 0.9, 1.0])
def test_drop_rates(drop, backend, device):
    """p = 0 keeps all, p = 1 drops all, without a division by zero; the mean stays what it was."""
    base = torch.ones(40_000, device=device)
    first = base + 2
    second = base + 3
    options = {
        "weights": (0.5, 0.5),
        "seed": 3,
        "tensor": "w",
        "backend": backend,
    }
    found = dare_merge(
        first,
        second,
        base,
        drop=drop,
        **options,
    ).cpu()
    if drop == 0:
        assert (found == 3.5).all()
        return
    if drop == 1:
        assert (found == 1).all()
        return
    values, counts = found.double().unique(return_counts=True)
    scale = 0.5 / (1 - drop)
    want = {1, 1 + 2 * scale, 1 + 3 * scale, 1 + 5 * scale}
    assert values.tolist() == pytest.approx(sorted(want), rel=1e-6)
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
        pytest.skip("no Triton here")
    count = math.prod(shape)
    parts = torch.randn(3, count + offset).to(dtype)[:, offset:].view(3, *shape)
    args = ARGS | {"seed": 2**63 - 1, "weights": (1 / 3, 2 / 3)}
    for several in (parts, parts[:2]):
        want = dare_merge(*several, **args, backend="torch")
        got = dare_merge(
            *several.to(device),
            **args,
            backend="triton",
        )
        assert torch.equal(got.cpu(), want)


def test_a_child_depends_on_seed_tensor_and_element_alone(monkeypatch):
    parts = torch.randn(3, 9001)
    given = parts.clone()
    want = dare_merge(*parts, **ARGS)
    assert torch.equal(parts, given)
    dare_merge(
        parts[1],
        parts[0],
        parts[2],
        **ARGS | {"tensor": "b"},
    )  # in another order
    assert torch.equal(dare_merge(*parts, **ARGS), want)
    monkeypatch.setattr(expansion, "BLOCK", 1000)
    assert torch.equal(dare_merge(*parts, **ARGS), want)
    assert torch.equal(dare_merge(*parts[..., None], **ARGS)[:, 0], want)
    strided = torch.stack([parts, parts], 2)[..., 0]
    assert torch.equal(dare_merge(*strided, **ARGS), want)
    for other in ({"seed": 12}, {"tensor": "b"}, {"tensor": 5}):
        assert (dare_merge(*parts, **ARGS | other) != want).float().mean() > 0.4


def test_streams_of_names_differ():
    streams = set()
    for layer in range(500):
        for part in ("gate", "up", "down"):
            streams.add(stream_of(f"model.layers.{layer}.mlp.{part}_proj.weight"))
    assert len(streams) == 1500
    assert 0 <= min(streams) <= max(streams) < 1 << 63
    assert stream_of(7) == 7


def test_parts_beyond_int32():
    """Counters are 64 bits wide: an element beyond 2^33 has numbers of its own."""
    parts = torch.randn(3, 64)
    near = dare_merge(*parts, **ARGS)
    assert not torch.equal(
        near,
        dare_merge(
            *parts,
            **ARGS,
            start=1 << 34,
        ),
    )


@pytest.mark.parametrize(
    "change, words",
    [
        ({"second": torch.zeros(4)}, "second is (4,)"),
        ({"base": torch.zeros(3).half()}, "base is (3,) torch.float16"),
        ({"second": torch.zeros(3).int()}, "second is (3,) torch.int32"),
        ({"drop": 1.5}, "drop must be"),
        ({"drop": -0.1}, "drop must be"),
        ({"weights": (1.0,)}, "weights must be two finite numbers, but got (1.0,)"),
        ({"weights": (1.0, math.inf)}, "two finite numbers, but got (1.0, inf)"),
        ({"seed": -1}, "seed must be"),
        ({"start": 2}, "must be a multiple of 4, but got 2"),
        ({"tensor": 1 << 63}, "tensor must be"),
    ],
)
def test_bad_arguments_of_dare_are_named(change, words):
    args = {"first": torch.zeros(3), "second": torch.zeros(3)} | ARGS | change
    with pytest.raises(ValueError) as error:
        dare_merge(**args)
    assert words in str(error.value)
