"""The kernels of the sort and the tile map: their steps, their launches, and offsets beyond
int32.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime import backends
from moe_runtime.ops.dispatch import dispatch
from tests.support.oracle import choose_experts

pytest.importorskip("triton")
from moe_runtime.kernels import dispatch as kernels


@pytest.mark.parametrize(
    "T, E, K, routing",
    [
        pytest.param(211, 3, 3, "dropped", id="several blocks, the last one ragged"),
        pytest.param(128, 300, 2, "random", id="300 experts, whole blocks"),
        pytest.param(65, 128, 8, "dropped", id="128 experts"),
        pytest.param(300, 64, 1, "skip", id="K = 1"),
        pytest.param(40, 33, 33, "random", id="K = E = 33"),
    ],
)
@pytest.mark.parametrize("scan", [2, 1024])
def test_scan_in_steps(T, E, K, routing, scan, device, monkeypatch):
    monkeypatch.setattr(kernels, "SCAN", scan)
    idx = choose_experts(T, E, K, routing).to(device)
    got = kernels.dispatch_forward(idx, E)
    for array, want in zip(
        got,
        dispatch(idx, E, "torch"),
        strict=True,
    ):
        assert torch.equal(array, want)


class Counted:
    """Reports a launch to `log` instead of running the kernel."""

    def __init__(self, name: str, log: list[str]):
        self.name = name
        self.log = log

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.log.append(self.name)


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    log = []
    for name in dir(kernels):
        if name.endswith("_kernel"):
            monkeypatch.setattr(kernels, name, Counted(name, log))
    return log


class Ops(TorchDispatchMode):
    """Records the names of the torch ops that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize(
    "T, want",
    [
        (0, 0),
        (64, 1),
        (65, 3),
        (200, 3),
    ],
)
def test_launches_and_nothing_else_runs(T, want, dtype, launches, device):
    """Nothing is cast, copied or read on the host."""
    idx = choose_experts(T, 8, 2, "dropped").to(device, dtype).contiguous()
    with Ops() as ops:
        kernels.dispatch_forward(idx, 8)
    assert len(launches) == want
    assert ops.names <= {"new_empty", "new_zeros"}
    assert T == 0 or "new_zeros" not in ops.names


@pytest.mark.parametrize("R", [0, 1, 1023, 1024, 3000])
def test_invert(R, device):
    row_slot = torch.randperm(R, device=device).int()
    slot_row = kernels.invert(row_slot)
    assert slot_row.dtype == torch.int32
    assert slot_row[row_slot.long()].tolist() == list(range(R))


COUNTS = [
    pytest.param([], id="no expert"),
    pytest.param([0], id="E = 1 without rows"),
    pytest.param([97], id="E = 1"),
    pytest.param([0, 0, 0], id="no rows"),
    pytest.param([16, 0, 128], id="E = 3, whole tiles, an empty expert"),
    pytest.param([0, 129, 0, 1, 0, 0], id="empty experts before, between and after"),
    pytest.param([1] * 100, id="more tiles than a program's, more experts than a step's"),
    pytest.param([*range(64)], id="E = 64"),
    pytest.param([(7 * e) % 40 for e in range(300)], id="E = 300"),
    pytest.param([0] * 31 + [5] + [0] * 31 + [1500] + [0] * 40, id="two experts of 104"),
]


@pytest.mark.parametrize("first_expert", [0, 1])
@pytest.mark.parametrize("BLOCK_M", [16, 32, 64, 128])
@pytest.mark.parametrize("counts", COUNTS)
def test_tile_map_is_the_list_of_tiles(counts, BLOCK_M, first_expert, device):
    """Each tile is [expert, first row, end of the expert's rows]."""
    ends = np.cumsum([0, *counts]).tolist()
    want = []
    for e in range(first_expert, len(counts)):
        for row in range(ends[e], ends[e + 1], BLOCK_M):
            want.append([e, row, ends[e + 1]])
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    for dropped in (0, 200):
        tiles = (
            kernels.tile_map(
                offsets,
                ends[-1] + dropped,
                BLOCK_M,
                first_expert,
            )
            .t()
            .tolist()
        )
        assert tiles[: len(want)] == want
        for tile in tiles[len(want) :]:
            assert tile[:2] == [-1, len(want)]


def test_offsets_beyond_int32(tmp_path):
    """Blocks that are 2^30 apart, in a sparse file of 20 GB: the counts of expert 2 begin at
    2^31.
    """
    if not backends.interpreted():
        pytest.skip("a GPU would need real memory")
    E = 3
    blocks = 2**30
    out = [torch.zeros(500, dtype=torch.int32) for _ in range(3)]
    file = np.memmap(
        Path(tmp_path, "sparse"),
        np.int32,
        "w+",
        shape=(E + 2) * blocks,
    )
    table = torch.from_numpy(file)
    idx = torch.tensor([2, 0, 3, 2, -1, 1, 2])
    sizes = {"BLOCK_S": 16, "BLOCK_E": 8}
    kernels._dispatch_fwd_count_kernel[(1,)](
        idx,
        table,
        7,
        E,
        blocks,
        **sizes,
    )
    assert table[::blocks].tolist() == [0, 1, 2, 5, 7]
    table[: (E + 1) * blocks : blocks] = torch.tensor([100, 200, 300, 400])
    arrays = kernels.Sorted(None, *out)
    kernels._dispatch_fwd_scatter_kernel[(1,)](
        idx, table, arrays, 7, E, 2, blocks, **sizes, BLOCK_J=8
    )
    rows = [300, 100, 400, 301, 401, 200, 302]
    row_token, row_slot, slot_row = out
    assert slot_row[:7].tolist() == rows
    assert row_slot[rows].tolist() == list(range(7))
    assert row_token[rows].tolist() == [0, 0, 1, 1, 2, 2, 3]
