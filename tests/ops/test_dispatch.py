"""The stable counting sort of slots by expert against a sort in plain Python."""

import pytest
import torch

from moe_runtime import backends
from moe_runtime.ops.dispatch import dispatch
from tests.support.oracle import choose_experts

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=str(why)))
    for name in ("torch", "triton")
    for why in [
        backends.why_not(
            name, "dispatch", torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
    ]
]


def sort_in_python(topk_idx: list[list[int]], E: int):
    """expert_offsets, row_token, row_slot, slot_row: every expert's slots in order, then the
    dropped ones.
    """
    K = len(topk_idx[0]) if topk_idx else 0
    experts = [e for token in topk_idx for e in token]
    groups = [[s for s, chosen in enumerate(experts) if chosen == e] for e in range(E)]
    groups.append([s for s, chosen in enumerate(experts) if not 0 <= chosen < E])
    row_slot = [s for group in groups for s in group]
    offsets = [sum(len(group) for group in groups[:e]) for e in range(E + 1)]
    slot_row = sorted(range(len(row_slot)), key=row_slot.__getitem__)
    return offsets, [s // K for s in row_slot], row_slot, slot_row


SHAPES = [
    pytest.param(0, 4, 2, "random", id="no tokens"),
    pytest.param(1, 4, 2, "random", id="one token"),
    pytest.param(37, 8, 3, "random", id="ragged T"),
    pytest.param(37, 8, 3, "skip", id="an expert without tokens"),
    pytest.param(19, 5, 2, "all", id="all tokens on one expert"),
    pytest.param(13, 4, 4, "random", id="K = E"),
    pytest.param(9, 1, 1, "random", id="E = 1"),
    pytest.param(11, 3, 2, "random", id="E = 3"),
    pytest.param(40, 6, 3, "dropped", id="dropped slots"),
    pytest.param(40, 6, 3, "twice", id="one token twice at one expert"),
    pytest.param(5, 300, 4, "random", id="more experts than slots"),
    pytest.param(64, 8, 2, "random", id="128 slots"),
    pytest.param(43, 3, 3, "random", id="129 slots"),
    pytest.param(50, 128, 8, "dropped", id="128 experts, dropped slots"),
    pytest.param(128, 64, 2, "skip", id="64 experts, 256 slots"),
    pytest.param(200, 1, 1, "random", id="E = 1, many slots"),
    pytest.param(90, 3, 2, "all", id="all tokens on one expert, many slots"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("T, E, K, routing", SHAPES)
def test_equals_a_sort_in_python(T, E, K, routing, dtype, backend, device):
    idx = choose_experts(T, E, K, routing).to(dtype)
    got = dispatch(idx.to(device), E, backend)
    assert [array.dtype for array in got] == [torch.int32] * 4
    assert tuple(array.tolist() for array in got) == sort_in_python(idx.tolist(), E)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T, E, K, routing", SHAPES)
def test_rows_and_slots_are_permutations_of_each_other(T, E, K, routing, backend, device):
    d = dispatch(choose_experts(T, E, K, routing).to(device), E, backend)
    offsets, row_token, row_slot, slot_row = (array.cpu() for array in d)
    assert sorted(row_slot.tolist()) == list(range(T * K))
    assert torch.equal(row_slot[slot_row.long()], torch.arange(T * K, dtype=torch.int32))
    assert torch.equal(row_token, row_slot // K)
    assert offsets[0] == 0 and bool((offsets.diff() >= 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype, E",
    [
        pytest.param(torch.int8, 128, id="int8 cannot hold the mark E of a dropped slot"),
        pytest.param(torch.uint8, 256, id="uint8 cannot hold the mark E of a dropped slot"),
        pytest.param(torch.int16, 40000, id="int16 cannot hold E"),
        pytest.param(torch.int32, 32767, id="the first E beyond 16-bit sort keys"),
        pytest.param(torch.int32, 32766, id="the last E of 16-bit sort keys"),
        pytest.param(torch.int64, 3, id="int64"),
    ],
)
def test_any_integer_dtype(dtype, E, backend, device):
    limit = min(torch.iinfo(dtype).max, E - 1)
    idx = torch.tensor([[0, limit], [5, limit - 1], [limit, 0]], dtype=dtype)
    if dtype.is_signed:
        idx[0, 0] = -1
    offsets, _, row_slot, _ = dispatch(idx.to(device), E, backend)
    experts = [e if 0 <= e < E else E for e in idx.flatten().tolist()]
    assert row_slot.tolist() == sorted(range(6), key=lambda s: (experts[s], s))
    assert offsets[-1] == sum(e < E for e in experts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("e", [2**31 - 1, -(2**31)], ids=["largest int32", "smallest int32"])
def test_far_ids_are_dropped_and_not_wrapped(e, backend, device):
    idx = torch.tensor([[e, 1], [0, e]], dtype=torch.int32, device=device)
    offsets, _, row_slot, _ = dispatch(idx, 2, backend)
    assert offsets.tolist() == [0, 1, 2] and row_slot.tolist() == [2, 1, 0, 3]
    # 0 in its low 32 bits
    offsets, _, _, _ = dispatch(torch.tensor([[2**32, 1]], device=device), 2, backend)
    assert offsets.tolist() == [0, 0, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_ids(backend, device):
    idx = choose_experts(12, 5, 4, "random").to(device)
    want = dispatch(idx[:, ::2].contiguous(), 5, backend)
    for view in (idx[:, ::2], idx[:, ::2].t().contiguous().t()):
        assert all(torch.equal(a, b) for a, b in zip(dispatch(view, 5, backend), want))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T, K", [(5, 0), (0, 2), (0, 0)])
def test_no_slots_at_all(T, K, backend, device):
    offsets, *rows = dispatch(torch.zeros(T, K, dtype=torch.int64, device=device), 3, backend)
    assert offsets.tolist() == [0, 0, 0, 0] and all(row.shape == (0,) for row in rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_twenty_runs_give_the_same_bits(backend, device):
    idx = choose_experts(200, 8, 3, "dropped").to(device)
    first = dispatch(idx, 8, backend)
    times = 3 if backend == "triton" and backends.interpreted() else 20
    assert all(
        torch.equal(a, b) for _ in range(times) for a, b in zip(first, dispatch(idx, 8, backend))
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T, E, K, routing", SHAPES[:4])
def test_opcheck(T, E, K, routing, backend, device):
    idx = choose_experts(T, E, K, routing).to(device)
    torch.library.opcheck(torch.ops.moe_runtime.dispatch, (idx, E, backend))
