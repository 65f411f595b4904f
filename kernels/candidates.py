"""Launch configs that `moe-runtime tune` measures in addition to those of `kernels.tiles`."""

from moe_runtime.kernels import tiles
from moe_runtime.kernels.tiles import Problem, Tile

_HOPPER = {
    "up": (
        Tile(128, 128, 64, 8, 4, TMA=True, JOINED=True),
        Tile(128, 128, 64, 8, 3, TMA=True, JOINED=True),
        Tile(128, 128, 64, 8, 4, 16, TMA=True, JOINED=True),
        Tile(128, 128, 64, 8, 4, TMA=True),
        Tile(128, 128, 64, 8, 4, TMA=True, PERSISTENT=True, JOINED=True),
        Tile(128, 128, 64, 8, 3),
        Tile(128, 64, 64, 8, 4, TMA=True),
        Tile(64, 128, 64, 4, 4, TMA=True),
        Tile(64, 128, 64, 4, 4, TMA=True, JOINED=True),
        Tile(64, 128, 64, 8, 4, TMA=True),
        Tile(64, 128, 64, 4, 3),
        Tile(64, 64, 64, 4, 5, TMA=True),
        Tile(32, 128, 64, 4, 4, TMA=True),
        Tile(16, 128, 64, 4, 4, TMA=True),
        Tile(16, 64, 128, 4, 4, TMA=True),
    ),
    "down": (
        Tile(128, 256, 64, 8, 3, TMA=True),
        Tile(128, 256, 64, 8, 4, TMA=True),
        Tile(128, 256, 64, 8, 3, 16, TMA=True),
        Tile(128, 256, 64, 8, 3, TMA=True, PERSISTENT=True),
        Tile(128, 256, 64, 8, 4, TMA=True, PERSISTENT=True),
        Tile(128, 256, 64, 8, 3),
        Tile(128, 128, 64, 8, 4, TMA=True),
        Tile(128, 128, 64, 8, 4, TMA=True, PERSISTENT=True),
        Tile(128, 128, 64, 4, 4, TMA=True),
        Tile(256, 128, 64, 8, 3, TMA=True),
        Tile(64, 256, 64, 8, 4, TMA=True),
        Tile(64, 256, 64, 4, 4, TMA=True),
        Tile(64, 128, 64, 4, 4, TMA=True),
        Tile(64, 128, 128, 4, 3, TMA=True),
        Tile(32, 128, 64, 4, 4, TMA=True),
        Tile(16, 128, 128, 4, 4, TMA=True),
    ),
    "dz": (
        Tile(128, 256, 64, 8, 3, TMA=True),
        Tile(128, 256, 64, 8, 4, TMA=True),
        Tile(128, 256, 64, 8, 3, 16, TMA=True),
        Tile(128, 128, 64, 8, 3, TMA=True),
        Tile(128, 128, 64, 8, 4, TMA=True),
        Tile(128, 128, 64, 8, 3, TMA=True, PERSISTENT=True),
        Tile(128, 128, 64, 8, 3),
        Tile(128, 64, 64, 8, 4, TMA=True),
        Tile(64, 256, 64, 8, 4, TMA=True),
        Tile(64, 128, 64, 8, 3, TMA=True),
        Tile(64, 128, 64, 4, 4, TMA=True),
        Tile(64, 64, 64, 4, 4, TMA=True),
        Tile(32, 128, 64, 4, 4, TMA=True),
        Tile(16, 128, 64, 4, 4, TMA=True),
    ),
    "dw": (
        Tile(128, 256, 64, 8, 5, TMA=True),
        Tile(128, 256, 64, 8, 7, TMA=True),
        Tile(256, 128, 64, 8, 5, TMA=True),
        Tile(128, 256, 64, 8, 5, 16, TMA=True),
        Tile(128, 256, 64, 8, 5),
        Tile(128, 256, 64, 8, 7),
        Tile(128, 128, 64, 8, 5, TMA=True),
        Tile(128, 128, 64, 8, 5),
        Tile(128, 128, 64, 4, 5, TMA=True),
        Tile(128, 128, 128, 8, 5),
        Tile(64, 256, 64, 4, 5),
        Tile(64, 128, 64, 4, 7, TMA=True),
    ),
}
_HOPPER["dx"] = _HOPPER["down"]
_AMPERE = {
    "up": (
        Tile(128, 64, 64, 8, 3),
        Tile(128, 64, 32, 8, 4),
        Tile(128, 32, 64, 4, 3),
        Tile(128, 64, 64, 8, 3, 16),
        Tile(128, 64, 64, 8, 3, PERSISTENT=True),
        Tile(64, 64, 64, 4, 3),
        Tile(64, 64, 32, 4, 4),
        Tile(64, 128, 32, 8, 4),
        Tile(32, 64, 64, 4, 3),
        Tile(16, 64, 64, 4, 3),
        Tile(16, 64, 128, 4, 3),
    ),
    "down": (
        Tile(128, 128, 64, 8, 3),
        Tile(128, 128, 32, 8, 4),
        Tile(128, 128, 32, 4, 4),
        Tile(128, 256, 32, 8, 3),
        Tile(128, 128, 64, 8, 3, 16),
        Tile(128, 128, 64, 8, 3, PERSISTENT=True),
        Tile(128, 64, 64, 4, 4),
        Tile(64, 128, 64, 4, 3),
        Tile(64, 256, 32, 8, 4),
        Tile(64, 128, 32, 4, 4),
        Tile(32, 128, 64, 4, 3),
        Tile(16, 128, 64, 4, 3),
        Tile(16, 128, 128, 4, 3),
    ),
    "dz": (
        Tile(128, 128, 64, 8, 3),
        Tile(128, 128, 32, 8, 4),
        Tile(128, 128, 64, 8, 3, 16),
        Tile(128, 64, 64, 8, 3),
        Tile(128, 64, 64, 4, 3),
        Tile(128, 64, 64, 8, 3, PERSISTENT=True),
        Tile(64, 128, 32, 4, 4),
        Tile(64, 128, 64, 8, 3),
        Tile(64, 64, 64, 4, 3),
        Tile(32, 64, 64, 4, 3),
        Tile(16, 64, 64, 4, 3),
        Tile(16, 128, 64, 4, 3),
    ),
    "dw": (
        Tile(128, 128, 64, 8, 5),
        Tile(128, 128, 64, 8, 7),
        Tile(128, 128, 32, 8, 7),
        Tile(128, 128, 32, 4, 7),
        Tile(128, 256, 32, 8, 5),
        Tile(256, 128, 32, 8, 5),
        Tile(128, 128, 64, 8, 5, 16),
        Tile(128, 64, 64, 4, 5),
        Tile(64, 128, 64, 4, 5),
        Tile(64, 64, 64, 4, 5),
    ),
}
_AMPERE["dx"] = _AMPERE["down"]
_FLOAT32 = (
    Tile(64, 64, 32, 8, 2),
    Tile(64, 64, 32, 4, 3),
    Tile(64, 64, 32, 4, 2),
    Tile(128, 64, 32, 8, 2),
    Tile(64, 128, 32, 8, 2),
    Tile(128, 128, 32, 8, 2),
    Tile(64, 64, 64, 8, 2),
    Tile(32, 64, 32, 4, 2),
    Tile(16, 64, 32, 4, 2),
    Tile(16, 128, 32, 4, 2),
)
_INTERPRETER = (
    Tile(16, 32, 32, 4, 1),
    Tile(32, 32, 32, 4, 1),
    Tile(16, 32, 32, 4, 1, PERSISTENT=True),
    Tile(16, 32, 32, 4, 1, TMA=True),
)


def candidates(problem: Problem) -> list[Tile]:
    """Return the configs to try for these rows and this GPU, the built-in one first."""
    if problem.arch == 0:
        pool = _INTERPRETER
    elif problem.dtype == "float32":
        pool = _FLOAT32
    else:
        hopper = tiles.nearest(problem.arch) in (90, 100)
        pool = (_HOPPER if hopper else _AMPERE)[problem.kernel]
    if problem.kernel != "dw" and problem.arch:
        # a tile with many more rows than an expert has computes mostly padding, and one with far
        # fewer reads the weights often
        low, high = min(64, problem.rows // 4), max(32, 2 * problem.rows)
        pool = [tile for tile in pool if low <= tile.BLOCK_M <= high]
    return list(
        dict.fromkeys([tiles.heuristic(problem), *(tiles.clip(tile, problem) for tile in pool)])
    )
