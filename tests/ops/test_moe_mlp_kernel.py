"""The Triton kernels of a layer's experts with every kind of tile, against float64 loops."""

import pytest
import torch

from tests.support import layouts
from tests.support.layer import moe_layer
from tests.support.oracle import make_case, moe_mismatches

pytest.importorskip("triton")
from moe_runtime.kernels import decode, tiles
from moe_runtime.kernels.tiles import Tile


@pytest.fixture(autouse=True)
def _steps_of_many_slots(monkeypatch):
    """Run the sort, the map and the sum as separate launches, whatever the number of slots."""
    monkeypatch.setattr(decode, "SMALL", 0)


def everywhere(tile, **others):
    """Use the same config for every kernel."""
    return tiles.force(**(dict.fromkeys(tiles.KERNELS, tile) | others))


@pytest.fixture
def check(device, tolerance):
    """check(case) compares the kernels with the oracle."""

    def check(case):
        dtype = case.leaves["x"].dtype
        assert not moe_mismatches(
            moe_layer(backend="triton"),
            case,
            tolerance[dtype],
            device,
        )

    return check


TILES = [
    pytest.param(Tile(32, 32, 32, TMA=True), id="descriptors"),
    pytest.param(Tile(16, 16, 32, GROUP_M=1, TMA=True, PERSISTENT=True), id="both, small"),
    pytest.param(Tile(32, 16, 32, TMA=True, JOINED=True), id="gate and up joined"),
    pytest.param(Tile(64, 64, 64, GROUP_M=8), id="one tile holds an expert"),
    pytest.param(Tile(16, 64, 16, GROUP_M=1), id="short blocks along the sum"),
    pytest.param(Tile(32, 16, 64, GROUP_M=8), id="one block along the sum"),
]


@pytest.mark.parametrize(
    "H, I, dtype, routing",
    [
        pytest.param(40, 24, torch.bfloat16, "dropped", id="no block divides, 16-byte rows"),
        pytest.param(33, 17, torch.float16, "skip", id="odd sizes, no descriptors"),
        pytest.param(64, 32, torch.float32, "random", id="every block divides"),
    ],
)
@pytest.mark.parametrize("tile", TILES)
def test_tiles(tile, H, I, dtype, routing, check):
    with everywhere(tile):
        check(make_case(29, H, I, 4, 2, dtype, routing, bias=dtype != torch.float32))


def test_each_kernel_has_a_tile_of_its_own(check):
    mixed = {
        "up": Tile(64, 16, 32),
        "down": Tile(16, 32, 16, TMA=True),
        "dz": Tile(32, 32, 32),
        "dx": Tile(128, 16, 32),
        "dw": Tile(32, 16, 16),
    }
    with tiles.force(**mixed):
        check(make_case(29, 40, 24, 4, 2, torch.float16, "dropped", bias=True))


def test_the_tiles_of_a_gpu(check):
    """128 rows by 128 columns with the flags of the Hopper table, at sizes that have partial
    tiles.
    """
    with everywhere(Tile(128, 128, 64, TMA=True), dw=Tile(128, 256, 64)):
        check(make_case(180, 136, 200, 2, 2, torch.bfloat16, "twice", bias=True))


@pytest.mark.parametrize(
    "change",
    [
        layouts.stride_zero,
        layouts.transposed_weights,
        layouts.experts_last,
        layouts.strided_x,
        layouts.transposed_x,
    ],
)
def test_descriptors_where_the_layout_lets_them(change, check):
    case = make_case(13, 32, 16, 4, 2)
    change(case)
    with everywhere(Tile(16, 32, 32, TMA=True)):
        check(case)
