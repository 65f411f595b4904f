"""The stable counting sort of slots by expert: more experts and slots than in the conformance
table, and ids at the limits of their dtypes.
"""

import pytest
import torch

from moe_runtime.ops.dispatch import dispatch
from moe_runtime.tools.conformance import oracle
from tests.support.oracle import choose_experts

OP = "dispatch"


@pytest.mark.parametrize(
    "T, E, K, routing",
    [
        pytest.param(5, 300, 4, "random", id="more experts than slots"),
        pytest.param(64, 8, 2, "random", id="128 slots"),
        pytest.param(43, 3, 3, "random", id="129 slots"),
        pytest.param(50, 128, 8, "dropped", id="128 experts, dropped slots"),
        pytest.param(128, 64, 2, "skip", id="64 experts, 256 slots"),
        pytest.param(200, 1, 1, "random", id="E = 1, many slots"),
        pytest.param(90, 3, 2, "all", id="all tokens on one expert, many slots"),
    ],
)
def test_equals_a_sort_in_python(T, E, K, routing, backend, device):
    idx = choose_experts(T, E, K, routing)
    got = dispatch(idx.to(device), E, backend)
    expected = oracle.dispatch(idx, E)
    for name, array in got._asdict().items():
        assert torch.equal(array.cpu(), expected[name]), name


@pytest.mark.parametrize(
    "dtype, E",
    [
        pytest.param(torch.int8, 128, id="int8 cannot hold the sentinel E of a dropped slot"),
        pytest.param(torch.uint8, 256, id="uint8 cannot hold the sentinel E of a dropped slot"),
        pytest.param(torch.int16, 40000, id="int16 cannot hold E"),
        pytest.param(torch.int32, 32767, id="the first E beyond 16-bit sort keys"),
        pytest.param(torch.int32, 32766, id="the last E of 16-bit sort keys"),
        pytest.param(torch.int64, 3, id="int64"),
    ],
)
def test_any_integer_dtype(dtype, E, backend, device):
    limit = min(torch.iinfo(dtype).max, E - 1)
    idx = torch.tensor(
        [
            [0, limit],
            [5, limit - 1],
            [limit, 0],
        ],
        dtype=dtype,
    )
    if dtype.is_signed:
        idx[0, 0] = -1
    offsets, _, row_slot, _ = dispatch(
        idx.to(device),
        E,
        backend,
    )
    experts = []
    for e in idx.flatten().tolist():
        is_valid = 0 <= e < E
        experts.append(e if is_valid else E)
    assert row_slot.tolist() == sorted(range(6), key=lambda s: (experts[s], s))
    assert offsets[-1] == 6 - experts.count(E)


@pytest.mark.parametrize("e", [2**31 - 1, -(2**31)], ids=["largest int32", "smallest int32"])
def test_far_ids_are_dropped_and_not_wrapped(e, backend, device):
    idx = torch.tensor([[e, 1], [0, e]], dtype=torch.int32, device=device)
    offsets, _, row_slot, _ = dispatch(idx, 2, backend)
    assert offsets.tolist() == [0, 1, 2]
    assert row_slot.tolist() == [2, 1, 0, 3]
    # its low 32 bits are 0
    offsets, _, _, _ = dispatch(
        torch.tensor([[2**32, 1]], device=device),
        2,
        backend,
    )
    assert offsets.tolist() == [0, 0, 1]
