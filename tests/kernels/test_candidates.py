"""The launch configs that the tuner tries, and the file that it writes."""

from pathlib import Path

import pytest
import torch

from moe_runtime.kernels import tiles
from moe_runtime.kernels.candidates import candidates
from moe_runtime.tools import tune
from moe_runtime.tools.layer_shapes import LAYERS

CPU = torch.device("cpu")


def test_a_home_of_another_user_has_no_measured_config(monkeypatch, tmp_path):
    def refuse(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    assert tiles.read_tuned.__wrapped__(tmp_path / "root" / "tiles.json") == {}
    monkeypatch.undo()
    path = tmp_path / "tiles.json"
    path.write_text("{}")
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(
        ValueError, match=r"tiles\.json is not a file of `moe-runtime tune` .*Permission denied"
    ):
        tiles.read_tuned.__wrapped__(path)


@pytest.mark.parametrize("dtype", tune.DTYPES)
@pytest.mark.parametrize(
    "arch",
    [80, 86, 89, 90, 100, 103, 120, 121],
)
def test_candidates_fit_the_gpu(arch, dtype):
    for layer in LAYERS.values():
        for T in (1, 64, 512, 4096, 65536):
            for product in tune.PRODUCTS:
                problem = tune.problem_of(product, layer, T, dtype, CPU)._replace(arch=arch)
                pool = candidates(problem)
                assert pool[0] == tiles.heuristic(problem)
                assert len(set(pool)) == len(pool)
                assert 2 <= len(pool) <= 16
                assert T < 4096 or len(pool) >= 5
                limit = tiles.SHARED_MEMORY[tiles.nearest(arch)]
                for tile in pool:
                    assert tiles.shared_bytes(tile, problem) < limit
                    for size in tile[:3]:
                        assert size & size - 1 == 0
                    assert min(tile[:3]) >= 16
                    assert tile.num_warps in (4, 8)
                    assert not (tile.TMA and arch < 90)
                    if arch >= 100:  # workarounds for bugs on Blackwell
                        assert not tile.TMA or (
                            problem.K % tile.BLOCK_K == 0 and problem.kernel != "dw"
                        )
                        assert not tile.JOINED or arch >= 110
                        assert (
                            arch >= 110
                            or max(
                                tile.BLOCK_N,
                                2 * tiles.in_turns(tile, arch).BLOCK_N,
                            )
                            <= 128
                        )


@pytest.mark.parametrize(
    "arch, K, tma, width",
    [
        (90, 2080, True, 256),
        (100, 2080, False, 128),
        (103, 2048, True, 128),
    ],
)
def test_blackwell_has_no_descriptors_for_odd_sums_and_narrow_tiles(arch, K, tma, width):
    """This includes measured configs."""
    tile = tiles.Tile(128, 256, 64, TMA=True)
    problem = tiles.Problem("down", arch, "bfloat16", 4096, K, 512)
    for found in (tiles.clip(tile, problem), tiles.heuristic(problem)):
        assert found == found._replace(TMA=tma, BLOCK_N=width)
    assert tiles.in_turns(tile, arch) == tile._replace(BLOCK_N=width // 2)
