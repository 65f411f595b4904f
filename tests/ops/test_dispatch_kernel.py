"""The sort's and the tile map's kernels: against the torch backend and plain Python, launches,
offsets, mutants.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import InterpreterError

from moe_runtime import backends
from moe_runtime.kernels import dispatch as kernels
from moe_runtime.ops.dispatch import dispatch
from tests.support.interp_san import KernelMemoryError
from tests.support.mutants import edited, noting
from tests.support.oracle import choose_experts

WHY = backends.why_not(
    "triton", "dispatch", torch.device("cuda" if torch.cuda.is_available() else "cpu")
)
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))
ARRAYS = ("expert_offsets", "row_token", "row_slot", "slot_row")


def sort_mismatches(idx: torch.Tensor, E: int, module=kernels) -> list[str]:
    """Which arrays are not the torch backend's, bit for bit."""
    got = module.dispatch_forward(idx, E)
    want = dispatch(idx, E, "torch")
    return [
        f"{name} is {a}, want {b}" for name, a, b in zip(ARRAYS, got, want) if not torch.equal(a, b)
    ]


def tiles_in_python(counts: list[int], BLOCK_M: int, first_expert: int) -> list[list[int]]:
    """[expert, first row, end of the expert's rows] of every tile."""
    ends = np.cumsum([0, *counts]).tolist()
    experts = range(first_expert, len(counts))
    return [[e, row, ends[e + 1]] for e in experts for row in range(ends[e], ends[e + 1], BLOCK_M)]


def map_mismatches(
    counts: list[int], dropped: int, BLOCK_M: int, first: int, device, module=kernels
) -> list[str]:
    """Where the tile map of counts[e] rows of each expert and `dropped` rows behind them is not the
    list of tiles.
    """
    offsets = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device=device)
    got = module.tile_map(offsets, sum(counts) + dropped, BLOCK_M, first).t().tolist()
    want = tiles_in_python(counts, BLOCK_M, first)
    found = [] if got[: len(want)] == want else [f"tiles are {got}, want {want}"]
    return found + [
        f"{tile} behind the last tile" for tile in got[len(want) :] if tile[:2] != [-1, len(want)]
    ]


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
    assert not sort_mismatches(choose_experts(T, E, K, routing).to(device), E)


@pytest.mark.parametrize(
    "e", [0, 2, -1, 5], ids=["first expert", "last expert", "dropped", "dropped, too large"]
)
def test_every_slot_at_one_place_keeps_its_order(e, device):
    offsets, _, row_slot, slot_row = kernels.dispatch_forward(
        torch.full((130, 3), e, device=device), 3
    )
    assert row_slot.tolist() == slot_row.tolist() == list(range(390))
    assert offsets.tolist() == [390 * (0 <= e < i) for i in range(4)]


class Counted:
    """Tells `log` of a launch in place of the kernel."""

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
    """Names of the torch ops that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("T, want", [(0, 0), (64, 1), (65, 3), (200, 3)])
def test_launches_and_nothing_else_runs(T, want, dtype, launches, device):
    idx = choose_experts(T, 8, 2, "dropped").to(device, dtype)
    with Ops() as ops:
        kernels.dispatch_forward(idx, 8)
    assert len(launches) == want
    # nothing is cast, copied or read on the host
    assert ops.names <= ({"new_empty"} if T else {"new_empty", "new_zeros"})


def test_one_launch_each(launches, device):
    offsets, _, row_slot, _ = kernels.dispatch_forward(
        torch.zeros(700, 3, dtype=torch.int32, device=device), 2
    )
    launches.clear()
    with Ops() as ops:
        kernels.tile_map(offsets, 2100, 16)
        kernels.invert(row_slot)
        kernels.invert(row_slot[:0])
        kernels.tile_map(offsets, 0, 16)
    assert launches == ["_tile_map_kernel", "_invert_kernel"]
    assert ops.names <= {"new_empty", "empty_like", "slice"}


@pytest.mark.parametrize("R", [0, 1, 1023, 1024, 3000])
def test_invert(R, device):
    row_slot = torch.randperm(R, device=device).int()
    slot_row = kernels.invert(row_slot)
    assert slot_row.dtype == torch.int32 and slot_row[row_slot.long()].tolist() == list(range(R))


COUNTS = [
    pytest.param([], id="no expert"),
    pytest.param([0], id="E = 1 without rows"),
    pytest.param([97], id="E = 1"),
    pytest.param([0, 0, 0], id="no rows"),
    pytest.param([16, 0, 128], id="E = 3, whole tiles, an empty expert"),
    pytest.param([0, 129, 0, 1, 0, 0], id="empty experts in front, between and behind"),
    pytest.param(
        [1] * 100, id="one row each: more tiles than a program's, more experts than a step's"
    ),
    pytest.param([*range(64)], id="E = 64"),
    pytest.param([(7 * e) % 40 for e in range(300)], id="E = 300"),
    pytest.param([0] * 31 + [5] + [0] * 31 + [1500] + [0] * 40, id="two experts of 104"),
]


@pytest.mark.parametrize("first_expert", [0, 1])
@pytest.mark.parametrize("BLOCK_M", [16, 32, 64, 128])
@pytest.mark.parametrize("counts", COUNTS)
def test_tile_map_is_the_list_of_tiles(counts, BLOCK_M, first_expert, device):
    assert not map_mismatches(counts, 0, BLOCK_M, first_expert, device)
    assert not map_mismatches(counts, 200, BLOCK_M, first_expert, device)


@pytest.mark.parametrize("BLOCK_M", [1, 2, 3, 16])
def test_max_tiles_is_enough_and_no_more_than_needed(BLOCK_M):
    for R in range(40):
        for E in range(1, 9):
            # as many tiles as can be: min(E, R) experts with one row in their last tile, the rest
            # in whole tiles
            spare = R - min(E, R)
            most = min(E, R) + spare // BLOCK_M
            assert most <= kernels.max_tiles(R, E, BLOCK_M) <= most + E
    rng = np.random.default_rng(0)
    for _ in range(300):
        counts = rng.integers(0, 50, rng.integers(1, 20))
        assert sum(-(-c // BLOCK_M) for c in counts) <= kernels.max_tiles(
            int(counts.sum()), len(counts), BLOCK_M
        )


def far_mismatches(folder: Path, module=kernels) -> list[str]:
    """Blocks 2^30 apart, in a sparse file of 20 GB: the counts of expert 2 begin at 2^31."""
    if not backends.interpreted():
        pytest.skip("on a GPU the counts would have to be there")
    E = 3
    blocks = 2**30
    out = [torch.zeros(500, dtype=torch.int32) for _ in range(3)]
    table = torch.from_numpy(np.memmap(folder / "sparse", np.int32, "w+", shape=(E + 2) * blocks))
    idx = torch.tensor([2, 0, 3, 2, -1, 1, 2])
    sizes = {"BLOCK_S": 16, "BLOCK_E": 8}
    try:
        module._dispatch_fwd_count_kernel[(1,)](idx, table, 7, E, blocks, **sizes)
        if table[::blocks].tolist() == [0, 1, 2, 5, 7]:
            found = []
        else:
            found = [f"counts are {table[::blocks]}"]
        table[: (E + 1) * blocks : blocks] = torch.tensor([100, 200, 300, 400])
        module._dispatch_fwd_scatter_kernel[(1,)](
            idx, table, module.Sorted(None, *out), 7, E, 2, blocks, **sizes, BLOCK_J=8
        )
    except (KernelMemoryError, InterpreterError) as error:
        return [repr(error)]
    rows = [300, 100, 400, 301, 401, 200, 302]
    got = [out[2][:7].tolist(), out[1][rows].tolist(), out[0][rows].tolist()]
    return found + [
        f"{a}, want {b}" for a, b in zip(got, (rows, [*range(7)], [0, 0, 1, 1, 2, 2, 3])) if a != b
    ]


def test_offsets_beyond_int32(tmp_path):
    assert not far_mismatches(tmp_path)


# mutants of the kernels' source; each has to be caught by the checks above
def caught(module, device) -> list[str]:
    """What the checks say of the kernels of `module`."""
    module.SCAN, row_slot = 2, torch.randperm(1500, device=device).int()
    checks = [
        lambda: sort_mismatches(choose_experts(123, 5, 3, "dropped").to(device), 5, module),
        lambda: sort_mismatches(choose_experts(66, 31, 2, "dropped").to(device), 31, module),
        lambda: sort_mismatches(choose_experts(25, 40, 3, "dropped").to(device), 40, module),
        lambda: sort_mismatches(torch.tensor([[2**32, 1]], device=device), 2, module),
        lambda: map_mismatches([0, 129, 0, 1, *[3] * 70], 50, 16, 0, device, module),
        lambda: map_mismatches([40, 0, 33], 7, 32, 1, device, module),
        lambda: (
            []
            if torch.equal(module.invert(module.invert(row_slot)), row_slot)
            else ["not the inverse"]
        ),
    ]
    found = []
    for check in checks:
        # the sanitizer's, bare or wrapped, or a sum of counts that nobody wrote
        with noting(found, "OverflowError"):
            found += check()
    return found


MUTANTS = [
    pytest.param("(e < 0) | (e >= E)", "e < 0", id="ids too large are not dropped"),
    pytest.param(
        "mask=s < R, other=0).to(tl.int64)",
        "mask=s < R, other=0).to(tl.int32)",
        id="64-bit ids wrap",
    ),
    pytest.param("tl.where(s < R, key, E + 1)", "key", id="slots behind the last count"),
    pytest.param("key[None, :] < e[:, None]", "key[None, :] <= e[:, None]", id="less or equal"),
    pytest.param("j[None, :] < i[:, None]", "j[None, :] <= i[:, None]", id="ranks from 1"),
    pytest.param(
        "j[None, :] < i[:, None]",
        "j[None, :] > i[:, None]",
        id="slots of an expert in reverse order",
    ),
    pytest.param(
        "row + tl.cumsum(count, 0) - count", "row + tl.cumsum(count, 0)", id="inclusive scan"
    ),
    pytest.param("        row += tl.sum(count, 0)\n", "", id="scan forgets the step before"),
    pytest.param(
        "range(0, E + 2, BLOCK_E)", "range(0, E + 1, BLOCK_E)", id="last step of the counts missing"
    ),
    pytest.param("front = front | (", "front = (", id="one block: rank forgotten"),
    pytest.param("slot // K", "slot % K", id="slot for token"),
    pytest.param("rows % BLOCK_M > 0", "rows % BLOCK_M > 1", id="last tile of one row missing"),
    pytest.param("(e >= FIRST) & (e < E)", "e < E", id="first expert not left out"),
    pytest.param(
        "ends[None, :] <= tile[:, None]", "ends[None, :] < tile[:, None]", id="a tile too many"
    ),
    pytest.param("        end += tl.sum(tiles, 0)\n", "", id="tile map forgets the step before"),
    pytest.param("tl.where(live, expert, -1)", "expert", id="no mark behind the last tile"),
    pytest.param("tile - first_tile", "tile", id="tiles counted from the first expert"),
    pytest.param(
        "r.to(tl.int32), mask=r < R", "slot, mask=r < R", id="the identity for the inverse"
    ),
]


@pytest.mark.parametrize("old, new", MUTANTS)
def test_mutant_is_caught(old, new, tmp_path, device):
    assert caught(edited(kernels, tmp_path, old, new), device)


def test_unharmed_kernels_pass(tmp_path, device):
    assert not caught(edited(kernels, tmp_path, "", ""), device)


@pytest.mark.parametrize("name", ["e", "key"])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_offset_in_32_bits_is_caught(name, tmp_path):
    assert far_mismatches(
        tmp_path,
        edited(kernels, tmp_path, f"{name}.to(tl.int64) * blocks + b", f"{name} * blocks + b"),
    )
